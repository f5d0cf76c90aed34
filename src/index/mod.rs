//! The immutable tree of entries, with the seek points to reach their bytes.
//!
//! A [`Builder`] makes it in one pass, and [`store`] saves and loads it. Accessors of its flat arrays check
//! every offset, so a damaged file gives an error and never a panic.

mod arrays;
mod blocks;
mod build_tree;
mod builder;
mod checksums;
pub mod format;
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
pub use build_tree::{MemberError, Options};
pub use builder::{Builder, MAX_FORWARD_LINK_PASSES, Placement};
pub use checksums::SpanChecksums;
pub use memory::{Charge, MemoryLimit, TooMuchMemory};
pub use merge::{LayerIno, MergeError, MergePlan, MergedDirectory, MergedIndex, MergedName, merge};
pub use problem::Problem;
pub use store::Store;
pub use tree::{
    Child, Entry, EntryKind, Index, Ino, Locator, Origin, Piece, Span, UnresolvedLink, Whiteout,
};
pub use whiteouts::{NameKind, WhiteoutFormat};
