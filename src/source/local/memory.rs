//! A source in memory.

use bytes::Bytes;
use futures_util::future::FutureExt;

use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::source::{
    Access, Cause, Error, Fingerprint, Location, ReadMode, Reading, Source, SourceInfo, Validator,
};

/// A source in memory.
#[derive(Debug)]
pub struct MemorySource {
    bytes: Bytes,
    info: SourceInfo,
}

impl MemorySource {
    /// Creates a source of `bytes`, which the user sees as `name`.
    pub fn new(name: &str, bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self {
            info: SourceInfo {
                location: Location::from_name(name),
                fingerprint: Fingerprint {
                    len: Some(bytes.len() as u64),
                    validator: Validator::None,
                },
                access: Access::Ranges,
            },
            bytes,
        }
    }

    /// Sets the validator.
    #[must_use]
    pub fn with_validator(mut self, validator: Validator) -> Self {
        self.info.fingerprint.validator = validator;
        self
    }

    fn copy(&self, offset: Packed, buffer: &mut Buffer) -> Result<(), Cause> {
        let stored = usize::try_from(offset.0)
            .ok()
            .and_then(|start| self.bytes.get(start..start.checked_add(buffer.len())?))
            .ok_or(Cause::Truncated)?;
        buffer.copy_from_slice(stored);
        Ok(())
    }
}

impl Source for MemorySource {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read<'a>(&'a self, offset: Packed, mut buffer: Buffer, _: ReadMode<'a>) -> Reading<'a> {
        let result = match self.copy(offset, &mut buffer) {
            Ok(()) => Ok(buffer.freeze()),
            Err(cause) => Err(Error::new(self.location(), cause)),
        };
        std::future::ready(result).boxed()
    }
}
