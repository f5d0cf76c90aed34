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
pub mod import;
mod memory;
mod merge;
mod problem;
pub mod published;
mod rows;
mod shards;
pub mod store;
#[cfg(test)]
pub(crate) mod test_support;
mod tree;
mod whiteouts;

pub use blocks::NewDigests;
pub(crate) use build_tree::check_kind;
pub use build_tree::{MemberError, Options};
pub(crate) use builder::MAX_FORWARD_LINK_PASSES;
pub use builder::{Builder, Placement};
pub(crate) use checksums::zero_runs;
pub(crate) use memory::Charge;
pub use memory::{MemoryLimit, TooMuchMemory};
pub use merge::MergeError;
pub(crate) use merge::{MergePlan, MergedDirectory, MergedName, merge};
pub use problem::Problem;
pub use published::lazy::LazyIndex;
pub use shards::{MAX_SHARDS, Shard, ShardPlan};
pub use tree::{Child, Entry, EntryKind, Index, Ino, Origin, Resolved, Span};
pub(crate) use tree::{DirentNumber, IndexResolver};
pub use whiteouts::WhiteoutFormat;

// For the tests.
#[doc(hidden)]
pub use {
    blocks::{BlockHasher, Blocks, block_len},
    merge::{LayerIno, MergedIndex},
    store::Store,
    tree::{Locator, Piece, UnresolvedLink, Whiteout},
};
