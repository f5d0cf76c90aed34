//! Trees of files: archives by their indexes, and directories of this machine.
//!
//! [`Tree`] is the interface of both. [`walk_parallel`] visits the files of one by several threads, [`Comparison`]
//! compares two, and [`Remover`] removes a directory.

mod compare;
mod directory_tree;
mod index_tree;
mod interface;
mod item;
mod mode;
mod output;
mod remove;
mod walk;

pub use compare::{Comparison, Difference, Differences, Pair, Property};
pub use directory_tree::{
    DirectoryTree, OpenDirectory, followed_metadata_of, is_link_loop, metadata_of,
};
pub(crate) use directory_tree::{is_root, metadata_of_open};
pub use index_tree::{IndexTree, ResolvedFile, metadata};
pub use interface::{Batch, Content, FileId, FileKind, FollowedLinks, Metadata, Name, Tree, Xattr};
pub(crate) use interface::{is_missing, push_component};
pub use item::{Item, Place};
pub use mode::apply_mode;
pub(crate) use mode::{ALL_MODE_BITS, mode_string, type_letter};
pub use output::SharedOutput;
pub use remove::{RemovalLog, RemoveOptions, Removed, Remover, remove_tree};
pub(crate) use walk::OpenLevels;
pub use walk::{Level, Start, Visit, Visitor, walk_parallel};
