//! Paths in an archive: normal form, resolution of links, and patterns.

pub(crate) mod archive_path;
pub(crate) mod glob;
pub mod resolve;
pub mod rooted;
