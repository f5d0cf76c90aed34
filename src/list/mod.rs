//! `ls` as iterators over an index; pure.
//!
//! [`walk`] descends in byte order with a stack of its own. [`Columns`] formats `ls -l` lines, and
//! [`json::object`] one JSON object per entry. The caller decides where to write them.

mod escape;
pub mod json;
mod long;
mod walk;

pub use escape::escape;
pub use long::{Columns, mode_string};
pub use walk::{Walk, walk};
