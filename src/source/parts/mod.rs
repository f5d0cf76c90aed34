//! Sources made of other sources: several in a row, and a part of one.

mod join;
mod slice;

pub(crate) use join::Join;
pub(crate) use slice::Slice;
