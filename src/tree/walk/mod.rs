//! Walks over a [`Tree`](super::Tree) by several threads.

mod level;
mod parallel;
mod visitor;

#[cfg(test)]
mod tests;

pub(crate) use self::level::OpenLevels;
pub use self::level::{Level, Start};
pub use self::parallel::walk_parallel;
pub(super) use self::visitor::CALL_CHUNK;
pub use self::visitor::{Visit, Visitor};
