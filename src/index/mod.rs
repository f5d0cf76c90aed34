//! The immutable tree of entries, with the seek points to reach their bytes.
//!
//! A [`Builder`] makes it in one pass, and [`store`] saves and loads it. Accessors of its flat arrays check
//! every offset, so a damaged file gives an error and never a panic.

mod arrays;
mod blocks;
mod builder;
pub mod format;
pub mod import;
mod memory_limit;
mod merge;
mod problem;
mod shards;
mod span_checksums;
mod storage;
pub mod store;
#[cfg(test)]
pub(crate) mod test_support;
mod tree;
mod whiteouts;

pub use blocks::NewDigests;
pub(crate) use builder::build_tree::check_kind;
pub use builder::build_tree::{MemberError, Options};
pub(crate) use builder::forward_links::MAX_FORWARD_LINK_PASSES;
pub use builder::{Builder, Placement};
pub(crate) use memory_limit::Charge;
pub use memory_limit::{MemoryLimit, TooMuchMemory};
pub use merge::MergeError;
pub(crate) use merge::{MergePlan, MergedDirectory, MergedName, merge};
pub use problem::Problem;
pub use shards::{MAX_SHARDS, Shard, ShardPlan};
pub(crate) use span_checksums::zero_runs;
pub use storage::{MissingRow, WITHOUT_PUBLISHED_INDEX};
pub use tree::lazy::LazyIndex;
pub use tree::{Child, Entry, EntryKind, Index, Ino, Origin, Resolved, Span};
pub(crate) use tree::{DirentNumber, IndexResolver, MAX_DECODE_COST};
pub use whiteouts::WhiteoutFormat;

// For the tests.
#[doc(hidden)]
pub use {
    blocks::{BlockHasher, Blocks, block_len},
    merge::{LayerIno, MergedIndex},
    store::Store,
    tree::{Locator, Piece, UnresolvedLink, Whiteout},
};
