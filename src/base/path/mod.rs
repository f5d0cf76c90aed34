//! Paths in an archive: normal form, resolution of links, and patterns.

/// Maximum bytes of a file name on Linux.
pub(crate) const NAME_MAX: usize = 255;

pub(crate) mod archive_path;
pub(crate) mod glob;
pub mod resolve;
pub mod rooted;
