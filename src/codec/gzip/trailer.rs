//! The trailer of a gzip member, as its bytes come, and what it must agree to.

use flate2::Crc;

use crate::base::extent::Plain;
use crate::codec::Cause;

/// A trailer in the course of being read: CRC-32 and length modulo 2^32 of the plain bytes.
#[derive(Debug, Default)]
pub(super) struct Trailer {
    bytes: [u8; 8],
    len: usize,
}

impl Trailer {
    /// Reads on; answers how many bytes of `input` belong to the trailer.
    pub(super) fn push(&mut self, input: &[u8]) -> usize {
        let rest = self.bytes.get_mut(self.len..).unwrap_or_default();
        let len = rest
            .iter_mut()
            .zip(input)
            .map(|(to, from)| *to = *from)
            .count();
        self.len += len;
        len
    }

    /// Whether all of it has been read.
    pub(super) fn is_done(&self) -> bool {
        self.len == self.bytes.len()
    }

    fn crc(&self) -> u32 {
        let [a, b, c, d, ..] = self.bytes;
        u32::from_le_bytes([a, b, c, d])
    }

    /// The length modulo 2^32 of the plain bytes, as stored.
    pub(super) fn plain_len(&self) -> u32 {
        let [.., a, b, c, d] = self.bytes;
        u32::from_le_bytes([a, b, c, d])
    }
}

/// The plain bytes of a member, as its trailer counts them.
#[derive(Debug)]
pub(super) struct Check {
    crc: Crc,
    start: Plain,
}

impl Check {
    /// For a member whose plain bytes begin at `start`.
    pub(super) fn new(start: Plain) -> Self {
        Self {
            crc: Crc::new(),
            start,
        }
    }

    /// Counts the next plain bytes.
    pub(super) fn update(&mut self, plain: &[u8]) {
        self.crc.update(plain);
    }

    /// What is wrong with a member that has `trailer` and whose plain bytes end at `end`.
    pub(super) fn disagreement(&self, trailer: &Trailer, end: Plain) -> Option<Cause> {
        let len = end.0.saturating_sub(self.start.0) & u64::from(u32::MAX);
        let (stored_crc, crc) = (trailer.crc().into(), self.crc.sum().into());
        let stored_len = trailer.plain_len().into();
        let checks = [
            ("CRC-32 of a gzip member", stored_crc, crc),
            ("length of a gzip member", stored_len, len),
        ];
        let (what, expected, computed) = checks
            .into_iter()
            .find(|(_, expected, computed)| expected != computed)?;
        Some(Cause::Checksum {
            what,
            expected,
            computed,
        })
    }
}
