//! Checksums of plain bytes that formats store, computed by drivers.

use std::fmt;

use xxhash_rust::xxh32::Xxh32;
use xxhash_rust::xxh64::Xxh64;

use super::Compression;

/// A checksum under construction.
pub struct ContentChecksum(State);

enum State {
    Lz4(Xxh32),
    Zstd(Xxh64),
}

impl ContentChecksum {
    /// The checksum of an lz4 frame: xxh32 with seed 0.
    pub(crate) fn lz4() -> Self {
        Self(State::Lz4(Xxh32::new(0)))
    }

    /// The checksum of a zstd frame: the low half of xxh64 with seed 0.
    pub(super) fn zstd() -> Self {
        Self(State::Zstd(Xxh64::new(0)))
    }

    /// Adds the next plain bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Lz4(hash) => hash.update(bytes),
            State::Zstd(hash) => hash.update(bytes),
        }
    }

    /// The checksum of the bytes so far.
    pub fn digest(&self) -> u32 {
        match &self.0 {
            State::Lz4(hash) => hash.digest(),
            State::Zstd(hash) => {
                let [first, second, third, fourth, ..] = hash.digest().to_le_bytes();
                u32::from_le_bytes([first, second, third, fourth])
            }
        }
    }

    /// The format that stores the checksum.
    pub fn compression(&self) -> Compression {
        match self.0 {
            State::Lz4(_) => Compression::Lz4,
            State::Zstd(_) => Compression::Zstd,
        }
    }
}

impl fmt::Debug for ContentChecksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentChecksum({})", self.compression())
    }
}
