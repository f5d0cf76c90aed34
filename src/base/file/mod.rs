//! Kinds and modes of files.

pub(crate) mod chmod;
pub mod regular_file;
