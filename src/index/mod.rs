//! The immutable tree of entries, with the seek points to reach their bytes.
//!
//! A [`Builder`] builds it in one pass, and [`store`] saves and loads it. Afterwards it is only read. It
//! consists of flat arrays behind accessors that check every offset, so a damaged file gives an error and
//! never a panic.

mod arena;
mod arrays;
mod blocks;
mod build_tree;
mod builder;
mod checksums;
mod dirty;
pub mod format;
mod locator;
mod memory;
mod merge;
mod problem;
mod rows;
pub mod store;
#[cfg(test)]
pub(crate) mod test_support;
mod tree;
mod whiteouts;

pub use blocks::{BlockDigest, BlockHasher, Blocks, NewDigests, block_len};
pub use builder::{Builder, MAX_FORWARD_LINK_PASSES, MemberError, Options, Placement};
pub use checksums::SpanChecksums;
pub use locator::Locator;
pub use memory::{Charge, MemoryLimit, TooMuchMemory};
pub use merge::{LayerIno, MergeError, MergePlan, MergedDirectory, MergedIndex, MergedName, merge};
pub use problem::Problem;
pub use store::Store;
pub use tree::{Child, Entry, Index, Ino, Kind, Origin, Piece, Span, UnresolvedLink, Whiteout};
pub use whiteouts::{NameKind, WhiteoutFormat};
