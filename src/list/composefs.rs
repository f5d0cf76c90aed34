//! Lines of composefs-dump(5), of which `mkcomposefs --from-file` makes an image.
//!
//! A regular file's payload is its path, so the extracted tree serves as the image's base directory. Nothing is
//! stored in the image, and there are no digests.

use std::collections::HashMap;
use std::io::{self, Write};

use super::item::Item;
use super::tree::{Candidate, FileKind, Metadata, Tree};

/// The paths of files with several names. The other names are links to the first one.
#[derive(Debug, Default)]
pub(super) struct Dump {
    first_paths: HashMap<(u64, u64), Vec<u8>>,
}

impl Dump {
    /// Appends the line of `item` at `path`, without a leading slash. `path` of the root is empty.
    ///
    /// # Errors
    /// Its attributes or its target cannot be read; then nothing is appended.
    pub(super) fn write<T: Tree>(
        &mut self,
        output: &mut Vec<u8>,
        path: &[u8],
        item: &Item<'_, T>,
    ) -> io::Result<()> {
        let metadata = item.metadata()?;
        let target = match metadata.kind {
            FileKind::Symlink => Some(item.target()?),
            _ => None,
        };
        let xattrs = item.xattrs()?;
        let is_shared = metadata.links > 1 && metadata.kind != FileKind::Directory;
        let id = (metadata.file_system, metadata.inode);
        let first = match is_shared.then(|| self.first_paths.get(&id)) {
            Some(None) => {
                self.first_paths.insert(id, path.to_owned());
                None
            }
            known => known.flatten(),
        };
        write_field(output, b"/", path);
        let mark = if first.is_some() { "@" } else { "" };
        let mode = type_bits(metadata.kind) | metadata.mode;
        let Metadata {
            size,
            links,
            uid,
            gid,
            ..
        } = metadata;
        let (device, mtime) = (device_number(metadata.device), metadata.mtime);
        let (seconds, nanoseconds) = (mtime.seconds, mtime.nanoseconds);
        write!(
            output,
            " {size} {mark}{mode:o} {links} {uid} {gid} {device} {seconds}.{nanoseconds} "
        )?;
        match (first, &target) {
            (Some(first), _) => write_field(output, b"/", first),
            (None, Some(target)) => write_field(output, b"", target),
            (None, None) if metadata.kind == FileKind::File && size > 0 => {
                write_field(output, b"", path);
            }
            (None, None) => output.push(b'-'),
        }
        output.extend_from_slice(b" - -");
        for (name, value) in xattrs {
            output.push(b' ');
            escape(output, &name);
            output.push(b'=');
            escape(output, &value);
        }
        output.push(b'\n');
        Ok(())
    }
}

/// Writes a field that is set. A dash alone would mean that it is not.
fn write_field(output: &mut Vec<u8>, prefix: &[u8], value: &[u8]) {
    if prefix.is_empty() && value == b"-" {
        output.extend_from_slice(b"\\x2d");
    } else {
        escape(output, prefix);
        escape(output, value);
    }
}

fn escape(output: &mut Vec<u8>, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for &byte in bytes {
        if byte.is_ascii_graphic() && !matches!(byte, b'\\' | b'=') {
            output.push(byte);
        } else {
            let digit = |shift: u8| DIGITS.get(usize::from(byte >> shift & 15)).copied();
            output.extend(
                [Some(b'\\'), Some(b'x'), digit(4), digit(0)]
                    .into_iter()
                    .flatten(),
            );
        }
    }
}

fn type_bits(kind: FileKind) -> u32 {
    match kind {
        FileKind::File => 0o100_000,
        FileKind::Directory => 0o040_000,
        FileKind::Symlink => 0o120_000,
        FileKind::CharDevice => 0o020_000,
        FileKind::BlockDevice => 0o060_000,
        FileKind::Fifo => 0o010_000,
        FileKind::Socket => 0o140_000,
    }
}

/// A device's number as Linux passes it to programs.
fn device_number((major, minor): (u32, u32)) -> u64 {
    let (major, minor) = (u64::from(major), u64::from(minor));
    (major & !0xfff) << 32 | (major & 0xfff) << 8 | (minor & !0xff) << 12 | minor & 0xff
}
