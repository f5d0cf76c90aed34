//! `ls` as iterators over an index; pure.
//!
//! [`walk`] descends in byte order with a stack of its own, [`Columns`] makes `ls -l` lines,
//! [`json::object`] makes one JSON object an entry. Who calls decides where the bytes go.

mod escape;
pub mod json;
mod long;
mod walk;

pub use escape::escape;
pub use long::{Columns, mode_string};
pub use walk::{Walk, walk};
