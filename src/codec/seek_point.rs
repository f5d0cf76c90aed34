//! Seek points: where decoding can start again, and how often to keep one.

use bytes::Bytes;

use crate::base::extent::{Packed, Plain};

/// Two seek points are at least this many plain bytes apart: frames, members and blocks smaller
/// than that are merged.
pub const MIN_SPAN: u64 = 1 << 20;

/// Inside long frames a seek point is made about every so many plain bytes.
pub const MAX_SPAN: u64 = 4 << 20;

/// An offset in both coordinate systems where decoding can start.
///
/// With an empty `window` the stream is self-contained from here on; with one it is a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeekPoint {
    /// The packed byte that holds the first bit to decode.
    pub packed: Packed,
    /// How many bits of that byte come before, 0 to 7 (deflate: from the least significant;
    /// bzip2: from the most significant).
    pub bit: u8,
    /// The plain byte that is decoded first.
    pub plain: Plain,
    /// What else the codec must know, in a form of its own; documented in docs/index-format.md.
    pub state: u32,
    /// The plain bytes before, as far back as the codec may refer, compressed by
    /// [`pack_window`]. Empty when decoding refers to nothing before.
    pub window: Bytes,
}
