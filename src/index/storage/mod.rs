//! Rows of an index, in memory or in the frames of a file that are loaded when a row is first used.

mod frame_checksum;
mod frame_memory;
mod missing_row;
mod on_demand;
pub(super) mod row_types;
mod rows;

pub(super) use frame_checksum::frame_checksum;
pub(super) use frame_memory::FrameMemory;
pub(super) use missing_row::find_missing;
pub use missing_row::{MissingRow, WITHOUT_PUBLISHED_INDEX};
pub(super) use on_demand::OnDemand;
pub use on_demand::PackedIndex;
pub(super) use rows::{Row, Rows};
