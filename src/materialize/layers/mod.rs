//! Writes layers: streams each once, from the bottom, then builds the merged tree.
//!
//! A layer's index grows in memory while it is streamed. Its files are written to a hidden directory of the
//! destination, named by their inodes. [`layers::merge`](crate::layers::merge) then gives the merged tree, as
//! for a mount. Directories are made from the root on, and files are renamed to their places. A directory
//! gets its attributes when all its entries exist. No path of a layer is ever looked up on disk.

mod placement;
mod state;
mod unplaced;

#[cfg(test)]
mod tests;

pub(super) use self::placement::finish_root;
pub(super) use self::state::LayerState;
pub use self::unplaced::UNPLACED_DIRECTORY;
