//! Search for the header of a payload from behind.

use bytes::Bytes;

use super::header::{Header, RECORD_LEN, Record};
use super::totals::MemberTotals;
use super::{Event, Member, Options, Parser, RECORD};
use crate::base::extent::Plain;
use crate::base::tar_checksum;

/// The member whose payload begins at the end of `bytes`, if its header and all its extensions are in them.
///
/// `start` is the offset of the first byte, and `bytes` are whole records. Global pax headers before the
/// member are not applied.
pub(crate) fn member_before_payload(bytes: &Bytes, start: Plain) -> Option<Member> {
    let payload = start.0.checked_add(bytes.len() as u64)?;
    let records = bytes.len() / RECORD_LEN;
    // Between the header and the payload there may be a sparse map, of which no record is a header.
    let mut headers = (0..records)
        .rev()
        .filter(|&number| header(bytes, number).is_some());
    let mut first = headers.next()?;
    while let Some(extension) = extension_before(bytes, first) {
        first = extension;
    }
    let from = first.checked_mul(RECORD_LEN)?;
    let at = Plain(start.0.checked_add(from as u64)?);
    let mut parser = Parser::resume(Options::default(), at, MemberTotals::default(), &[]).ok()?;
    parser.push(bytes.slice(from..));
    loop {
        match parser.pull().ok()? {
            Event::Member(member) if member.payload.start().0 == payload => return Some(*member),
            Event::Warning(_) | Event::Damaged(_) => {}
            _ => return None,
        }
    }
}

fn header(bytes: &Bytes, number: usize) -> Option<Header<'_>> {
    let record = bytes.chunks_exact(RECORD_LEN).nth(number)?;
    let record: &Record = record.try_into().ok()?;
    tar_checksum::is_valid(record).then_some(Header(record))
}

/// The number of the extension header whose body ends where record `next` begins.
fn extension_before(bytes: &Bytes, next: usize) -> Option<usize> {
    (0..next).rev().find(|&number| {
        let header = header(bytes, number);
        header.is_some_and(|header| {
            let is_extension = matches!(header.typeflag(), b'x' | b'L' | b'K' | b'X' | b'g');
            let body = header.size().map(|size| size.div_ceil(RECORD));
            is_extension && body == Ok((next - number - 1) as u64)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header record of `kind` for a body of `size` bytes.
    fn record(name: &str, kind: u8, size: usize) -> Vec<u8> {
        let mut record = vec![0; RECORD_LEN];
        record[..name.len()].copy_from_slice(name.as_bytes());
        record[100..108].copy_from_slice(b"0000640\0");
        record[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
        record[156] = kind;
        record[257..265].copy_from_slice(b"ustar\x0000");
        record[148..156].fill(b' ');
        let sum: u32 = record.iter().map(|&byte| u32::from(byte)).sum();
        record[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        record
    }

    fn padded(body: &[u8]) -> Vec<u8> {
        let mut padded = body.to_vec();
        padded.resize(body.len().next_multiple_of(RECORD_LEN), 0);
        padded
    }

    #[test]
    fn header_with_its_extensions_is_found_after_other_members() {
        let pax = b"19 path=long/name\n\n".to_vec();
        let pax = format!("{} path=long/name\n", pax.len() - 1).into_bytes();
        let long = b"other/name\0";
        let bytes = [
            record("before", b'0', 600),
            padded(&[1; 600]),
            record("././@LongLink", b'L', long.len()),
            padded(long),
            record("PaxHeader", b'x', pax.len()),
            padded(&pax),
            record("short", b'0', 5),
        ]
        .concat();
        let member = member_before_payload(&Bytes::from(bytes), Plain(4096)).expect("found");
        assert_eq!(member.name, b"long/name");
        assert_eq!((member.size, member.mode), (5, 0o640));
    }

    #[test]
    fn payload_that_does_not_follow_a_file_header_has_no_member() {
        let gap = [record("a", b'0', 5), padded(b"12345")].concat();
        assert!(member_before_payload(&Bytes::from(gap), Plain(0)).is_none());
        let directory = record("a", b'5', 0);
        assert!(
            member_before_payload(&Bytes::from(directory), Plain(0))
                .is_none_or(|member| { member.kind != super::super::MemberKind::File })
        );
        assert!(member_before_payload(&Bytes::new(), Plain(0)).is_none());
        assert!(member_before_payload(&Bytes::from(vec![0; 1024]), Plain(0)).is_none());
    }
}
