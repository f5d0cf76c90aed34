//! Memory: its parts, buffers under a budget, loans to decoders, and reuse.

pub(crate) mod budget;
pub mod buffer_pool;
pub mod free_list;
pub mod reclaim;
