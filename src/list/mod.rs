//! The commands that list and walk trees: archives by their indexes, and directories of this machine.
//!
//! [`Tree`] is the interface of both, and [`walk_parallel`] visits one by several threads. [`walk`] descends an index
//! in byte order, [`Columns`] formats `ls -l` lines, and [`json::object`] JSON objects.

mod directory_tree;
mod du;
mod escape;
mod human_size;
mod index_tree;
mod item;
pub mod find;
pub mod json;
mod long;
mod output;
mod parallel_walk;
mod tree;
mod walk;

pub use directory_tree::{DirectoryTree, metadata_of};
pub use du::{DiskUsage, DuOptions, Measure, Sum};
pub use escape::escape;
pub use human_size::human_size;
pub use index_tree::{IndexTree, metadata};
pub use item::Item;
pub use long::Columns;
pub use output::SharedOutput;
pub use parallel_walk::{Jobs, Level, Start, Visitor, push_component, walk_parallel};
pub use tree::{Batch, Candidate, FileKind, Metadata, Name, Tree};
pub use walk::{Walk, walk};
