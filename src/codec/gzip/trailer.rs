//! Incremental reader of gzip member trailers, and the checksum to compare with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use flate2::Crc;

use crate::base::extent::Plain;
use crate::base::sync::Mutex;
use crate::codec::Cause;

/// A trailer being read: CRC-32 and length modulo 2^32 of the plain bytes.
#[derive(Debug, Default)]
pub(super) struct Trailer {
    bytes: [u8; 8],
    len: usize,
}

impl Trailer {
    /// Reads on; returns how many bytes of `input` belong to the trailer.
    pub(super) fn push(&mut self, input: &[u8]) -> usize {
        let rest = self.bytes.get_mut(self.len..).unwrap_or_default();
        let pairs = rest.iter_mut().zip(input);
        let len = pairs.map(|(to, from)| *to = *from).count();
        self.len += len;
        len
    }

    pub(super) fn is_done(&self) -> bool {
        self.len == self.bytes.len()
    }

    fn crc(&self) -> u32 {
        let [a, b, c, d, ..] = self.bytes;
        u32::from_le_bytes([a, b, c, d])
    }

    pub(super) fn plain_len(&self) -> u32 {
        let [.., a, b, c, d] = self.bytes;
        u32::from_le_bytes([a, b, c, d])
    }
}

/// The plain bytes of a member, as its trailer counts them.
pub(super) struct MemberChecksum {
    /// Of the bytes since the last part, or all.
    crc: Crc,
    start: Plain,
    parts: Option<ChecksumParts>,
}

/// Checksums of parts of a member, which are known in any order.
#[derive(Clone, Debug, Default)]
struct ChecksumParts {
    count: u64,
    combined: Arc<Mutex<CombinedChecksum>>,
}

#[derive(Debug, Default)]
struct CombinedChecksum {
    /// Of the first `count` parts.
    crc: Crc,
    count: u64,
    /// Of parts behind the first that is not known yet.
    out_of_order: BTreeMap<u64, Crc>,
}

pub(super) struct ChecksumPart {
    number: u64,
    combined: Arc<Mutex<CombinedChecksum>>,
}

impl ChecksumPart {
    pub(super) fn set_bytes(self, plain: &[u8]) {
        let mut crc = Crc::new();
        crc.update(plain);
        self.add(crc);
    }

    fn add(self, crc: Crc) {
        let combined = &mut *self.combined.lock();
        combined.out_of_order.insert(self.number, crc);
        while let Some(next) = combined.out_of_order.remove(&combined.count) {
            combined.crc.combine(&next);
            combined.count += 1;
        }
    }
}

impl MemberChecksum {
    pub(super) fn new(start: Plain) -> Self {
        Self {
            crc: Crc::new(),
            start,
            parts: None,
        }
    }

    pub(super) fn update(&mut self, plain: &[u8]) {
        self.crc.update(plain);
    }

    /// Begins a part whose checksum another thread sets.
    pub(super) fn part(&mut self) -> ChecksumPart {
        self.end_part();
        self.parts.get_or_insert_default().next()
    }

    fn end_part(&mut self) {
        let crc = std::mem::take(&mut self.crc);
        self.parts.get_or_insert_default().next().add(crc);
    }

    /// Whether there are parts. Then a mismatch is known only after all parts are set.
    pub(super) fn has_parts(&self) -> bool {
        self.parts.is_some()
    }

    pub(super) fn compare(mut self, trailer: &Trailer, end: Plain) -> Result<(), Cause> {
        let len = end.0.saturating_sub(self.start.0) & u64::from(u32::MAX);
        if self.has_parts() {
            self.end_part();
        }
        let computed = match &self.parts {
            Some(parts) => parts.sum(),
            None => self.crc.sum(),
        };
        Cause::compare_checksums("CRC-32 of a gzip member", trailer.crc(), computed)?;
        Cause::compare_checksums("length of a gzip member", trailer.plain_len(), len)
    }
}

impl ChecksumParts {
    fn next(&mut self) -> ChecksumPart {
        let number = self.count;
        self.count += 1;
        ChecksumPart {
            number,
            combined: Arc::clone(&self.combined),
        }
    }

    /// CRC of all parts, which must be set.
    fn sum(&self) -> u32 {
        let combined = self.combined.lock();
        debug_assert_eq!(combined.count, self.count, "a part is not set");
        combined.crc.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tell: impl FnOnce(Vec<(ChecksumPart, &[u8])>)) -> Result<(), Cause> {
        let mut check = MemberChecksum::new(Plain(10));
        check.update(b"ab");
        let second = check.part();
        let third = check.part();
        check.update(b"g");
        let last = check.part();
        tell(vec![(second, b"cd"), (third, b"ef"), (last, b"")]);
        let mut crc = Crc::new();
        crc.update(b"abcdefg");
        let mut trailer = Trailer::default();
        trailer.push(&crc.sum().to_le_bytes());
        trailer.push(&[7, 0, 0, 0]);
        check.compare(&trailer, Plain(17))
    }

    #[test]
    fn checksum_parts_may_arrive_in_any_order() {
        for turn in 0..3 {
            let compared = check(|mut parts| {
                parts.rotate_left(turn);
                for (part, bytes) in parts {
                    part.set_bytes(bytes);
                }
            });
            assert_eq!(compared, Ok(()));
        }
    }

    #[test]
    fn checksum_part_with_wrong_bytes_is_a_mismatch() {
        let compared = check(|parts| {
            for (part, bytes) in parts.into_iter().rev() {
                part.set_bytes(if bytes == b"cd" { b"cx" } else { bytes });
            }
        });
        assert!(matches!(compared, Err(Cause::Checksum { .. })));
    }
}
