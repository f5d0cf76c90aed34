//! Finds and unpacks the TOC at the end of an eStargz layer; pure.

use std::io::Read;

use bytes::Bytes;
use flate2::read::GzDecoder;

use crate::tar::{Event, Options, Parser, RECORD};

/// Length of the footer, an empty gzip member.
pub(crate) const FOOTER_LEN: u64 = 51;

/// The place in the footer of the offset of the TOC, in hexadecimal digits.
const OFFSET: std::ops::Range<usize> = 16..32;

/// The bytes of the footer before and after the offset: header and length of the extra field, the subfield `SG`, magic.
const SUBFIELD: &[u8] = b"\x1a\0SG\x16\0";
const MAGIC: &[u8] = b"STARGZ";

/// The offset of the TOC in the archive; `None` if `footer` is none.
pub(crate) fn parse_footer(footer: &[u8]) -> Option<u64> {
    let has_magic = footer.starts_with(b"\x1f\x8b\x08\x04")
        && footer.get(10..OFFSET.start) == Some(SUBFIELD)
        && footer.get(OFFSET.end..)?.starts_with(MAGIC);
    let digits = footer.get(OFFSET).filter(|_| has_magic)?;
    u64::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
}

/// The tar archive in `packed`; `None` if it is damaged or longer than `limit`.
pub(crate) fn unpack(packed: &[u8], limit: u64) -> Option<Vec<u8>> {
    let mut unpacked = Vec::new();
    let mut member = GzDecoder::new(packed).take(limit + 1);
    let len = member.read_to_end(&mut unpacked).ok()?;
    (len as u64 <= limit).then_some(unpacked)
}

/// The TOC, the first file of `archive`.
pub(crate) fn json(archive: &[u8]) -> Option<&[u8]> {
    let (header, rest) = archive.split_at_checked(usize::try_from(RECORD).ok()?)?;
    let mut parser = Parser::new(Options::default());
    parser.push(Bytes::copy_from_slice(header));
    let Ok(Event::Member(file)) = parser.pull() else {
        return None;
    };
    rest.get(..usize::try_from(file.payload.len()).ok()?)
}
