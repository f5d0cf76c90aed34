//! Search for an extension header that ends where a header begins.

use super::header::{Header, RECORD_LEN, Record};
use crate::base::tar_checksum;

/// Whether `bytes`, which are whole records, end with an extension header and its body, of one member.
pub(crate) fn ends_with_extension(bytes: &[u8]) -> bool {
    let records = bytes.chunks_exact(RECORD_LEN).rev().zip(0_u64..);
    let mut headers = records.filter_map(|(record, behind)| {
        let record: &Record = record.try_into().ok()?;
        tar_checksum::is_valid(record).then_some((Header(record), behind))
    });
    headers.any(|(header, behind)| {
        let is_extension = matches!(header.typeflag(), b'x' | b'L' | b'K' | b'X');
        let body = header.size().map(|size| size.div_ceil(RECORD_LEN as u64));
        is_extension && body == Ok(behind)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header record of `kind` for a body of `size` bytes.
    fn record(kind: u8, size: usize) -> Vec<u8> {
        let mut record = vec![0; RECORD_LEN];
        record[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
        record[156] = kind;
        record[257..265].copy_from_slice(b"ustar\x0000");
        record[148..156].fill(b' ');
        let sum: u32 = record.iter().map(|&byte| u32::from(byte)).sum();
        record[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        record
    }

    #[test]
    fn extension_counts_if_its_body_ends_the_bytes() {
        let body = vec![b'a'; RECORD_LEN];
        for (kind, size, is_extension) in [
            (b'x', 300, true),
            (b'L', 512, true),
            (b'x', 0, false),
            (b'x', 513, false),
            (b'g', 300, false),
            (b'0', 300, false),
        ] {
            let bytes = [record(b'0', 0), record(kind, size), body.clone()].concat();
            assert_eq!(ends_with_extension(&bytes), is_extension, "{kind} {size}");
        }
        assert!(ends_with_extension(&record(b'x', 0)));
        assert!(!ends_with_extension(&[]));
    }
}
