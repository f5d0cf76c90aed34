//! `ls` as iterators over an index; pure.
//!
//! [`walk`] descends in byte order, [`Columns`] formats `ls -l` lines, and [`json::object`] JSON objects.

mod escape;
pub mod json;
mod long;
mod tree;
mod walk;

pub use escape::escape;
pub use long::Columns;
pub use tree::{Batch, Candidate, FileKind, Metadata, Name, Tree};
pub use walk::{Walk, walk};
