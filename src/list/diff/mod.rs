//! Differences of two trees, and the lines of `diff`.

mod compare;
mod printer;

pub use compare::{Comparison, Difference, Differences, Pair, Property};
pub use printer::DiffPrinter;
