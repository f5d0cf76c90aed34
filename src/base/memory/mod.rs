//! Memory: buffers under a budget, loans to decoders, and reuse.

pub mod buffer_pool;
pub mod free_list;
pub mod reclaim;
