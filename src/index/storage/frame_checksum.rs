//! Checksums of packed frames.

use xxhash_rust::xxh3::xxh3_64;

/// Finds damage of a packed frame without unpacking it: the lower half of its xxh3-64.
pub(crate) fn frame_checksum(packed: &[u8]) -> u32 {
    let [_, _, _, _, lower @ ..] = xxh3_64(packed).to_be_bytes();
    u32::from_be_bytes(lower)
}
