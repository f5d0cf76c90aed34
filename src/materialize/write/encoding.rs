//! Fields of a journal item: numbers of eight bytes, and strings after their lengths.

use crate::base::archive_path::ArchivePath;

#[derive(Debug, Default)]
pub(crate) struct FieldEncoder(pub(crate) Vec<u8>);

impl FieldEncoder {
    pub(crate) fn number(&mut self, number: impl Into<u64>) {
        self.0.extend_from_slice(&number.into().to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
}

/// Decodes the body of an item; each method is `None` for an invalid one.
#[derive(Debug)]
pub(crate) struct FieldDecoder<'a>(pub(crate) &'a [u8]);

impl<'a> FieldDecoder<'a> {
    pub(crate) fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// `None` if fields are left.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }

    /// A path, sanitized to stay below the root.
    pub(crate) fn path(&mut self) -> Option<ArchivePath> {
        let path = ArchivePath::sanitize(self.bytes()?);
        (!path.has_parent_component).then_some(path.path)
    }
}
