//! Lines of composefs-dump(5), of which `mkcomposefs --from-file` makes an image.
//!
//! A regular file's payload is its path, so the extracted tree serves as the image's base directory. Nothing is
//! stored in the image, and there are no digests.

use std::collections::HashMap;
use std::io::{self, Write};

use crate::base::xattr::filter::XattrFilter;
use crate::tree::{FileId, FileKind, Item, Tree};

/// The paths of files with several names. The other names are links to the first one.
#[derive(Debug, Default)]
pub(super) struct Dump {
    first_paths: HashMap<FileId, Vec<u8>>,
}

impl Dump {
    /// Appends the line of `item` at `path`, without a leading slash. `path` of the root is empty. If its attributes or
    /// its target cannot be read, nothing is appended.
    pub(super) fn write<T: Tree>(
        &mut self,
        output: &mut Vec<u8>,
        path: &[u8],
        item: &Item<'_, T>,
    ) -> io::Result<()> {
        let metadata = item.metadata()?;
        let is_link = metadata.kind == FileKind::Symlink;
        let target = is_link.then(|| item.target()).transpose()?;
        let filter = XattrFilter::default();
        let xattrs = item.xattrs()?.into_iter();
        let xattrs = xattrs.filter(|(name, _)| filter.selects(name));
        let id = metadata.id();
        let first = match metadata.is_shared().then(|| self.first_paths.get(&id)) {
            Some(None) => {
                self.first_paths.insert(id, path.to_owned());
                None
            }
            known => known.flatten(),
        };
        write_field(output, b"/", path)?;
        let mark = if first.is_some() { "@" } else { "" };
        let mode = metadata.kind.bits() | metadata.mode;
        let (size, links, mtime) = (metadata.size, metadata.links, metadata.mtime);
        write!(
            output,
            " {size} {mark}{mode:o} {links} {} {} ",
            metadata.uid, metadata.gid
        )?;
        let device = device_number(metadata.device);
        write!(output, "{device} {}.{} ", mtime.seconds, mtime.nanoseconds)?;
        match (first, &target) {
            (Some(first), _) => write_field(output, b"/", first)?,
            (None, Some(target)) => write_field(output, b"", target)?,
            (None, None) if metadata.kind == FileKind::File && size > 0 => {
                write_field(output, b"", path)?;
            }
            (None, None) => output.push(b'-'),
        }
        output.extend_from_slice(b" - -");
        for (name, value) in xattrs {
            output.push(b' ');
            escape(output, &name)?;
            output.push(b'=');
            escape(output, &value)?;
        }
        output.push(b'\n');
        Ok(())
    }
}

/// Writes a field that is set. A dash alone would mean that it is not.
fn write_field(output: &mut Vec<u8>, prefix: &[u8], value: &[u8]) -> io::Result<()> {
    if prefix.is_empty() && value == b"-" {
        return output.write_all(b"\\x2d");
    }
    escape(output, prefix)?;
    escape(output, value)
}

fn escape(output: &mut Vec<u8>, bytes: &[u8]) -> io::Result<()> {
    for &byte in bytes {
        if byte.is_ascii_graphic() && !matches!(byte, b'\\' | b'=') {
            output.push(byte);
        } else {
            write!(output, "\\x{byte:02x}")?;
        }
    }
    Ok(())
}

/// A device's number as Linux passes it to programs.
fn device_number((major, minor): (u32, u32)) -> u64 {
    let (major, minor) = (u64::from(major), u64::from(minor));
    (major & !0xfff) << 32 | (major & 0xfff) << 8 | (minor & !0xff) << 12 | minor & 0xff
}
