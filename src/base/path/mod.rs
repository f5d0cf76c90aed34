//! Paths in an archive: normal form, resolution of links, and patterns.

pub mod archive_path;
pub mod glob;
pub mod resolve;
