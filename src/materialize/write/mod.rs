//! Making entries in the destination: directories, files, links and their attributes.

pub(super) mod attribute_policy;
pub(super) mod attributes;
pub(super) mod context;
pub(super) mod destination;
pub(super) mod directories;
pub(super) mod directory;
pub(super) mod file;
pub(super) mod file_system;
pub(super) mod job;
mod nodes;
pub(super) mod pool;
pub(super) mod remove_tree;
pub(super) mod tree_writer;
pub(super) mod unwritable;
