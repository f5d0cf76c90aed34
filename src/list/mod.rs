//! The commands that walk trees: archives by their indexes, and directories of this machine.
//!
//! [`Tree`] is the interface of both, and [`walk_parallel`] visits one by several threads. [`DiskUsage`],
//! [`Finder`] and [`Lister`] do the work of `du`, `find` and `ls`, [`Comparison`] that of `diff`, and [`change`] that
//! of the commands that change directories.

pub mod change;
mod composefs;
mod diff;
mod directory_tree;
mod du;
pub mod find;
mod finder;
mod human_size;
mod index_tree;
mod item;
pub mod json;
mod listing;
mod long;
mod output;
mod parallel_walk;
mod tree;

pub use crate::base::escape::escape;
pub use crate::base::resolve::without_dots;
pub use diff::{Comparison, DiffPrinter, Difference, Differences, Pair, Property};
pub use directory_tree::{DirectoryTree, OpenDirectory, metadata_of};
pub use du::{DiskUsage, DuOptions, Measure, Sum};
pub use finder::{Finder, FoundDirectory};
pub use human_size::human_size;
pub use index_tree::{IndexTree, ResolvedFile, metadata};
pub use item::{Item, Place};
pub use listing::{ListOptions, Lister, Order};
pub use long::{Columns, Style};
pub use output::SharedOutput;
pub use parallel_walk::{Level, Start, Visit, Visitor, walk_parallel};
pub use tree::{Batch, Content, FileId, FileKind, Metadata, Name, Tree, Xattr};
