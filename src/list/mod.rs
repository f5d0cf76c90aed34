//! The commands that print what a tree holds: `ls`, `find`, `du` and `diff`.
//!
//! [`Lister`], [`Finder`] and [`DiskUsage`] receive the files of a walk, and [`DiffPrinter`] the differences of two
//! trees.

mod composefs;
mod diff;
mod drawing;
mod du;
pub mod find;
mod finder;
mod human_size;
pub mod json;
mod listing;
mod long;

pub use diff::DiffPrinter;
pub use drawing::Drawing;
pub use du::{DiskUsage, DuOptions, Measure, Sum};
pub use finder::{Finder, FoundDirectory};
pub use human_size::human_size;
pub use listing::{ListOptions, Lister, Order};
pub use long::{Columns, Style};
