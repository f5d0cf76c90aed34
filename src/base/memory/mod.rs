//! Memory: buffers under a budget, loans to decoders, and reuse.
//!
//! A mount divides `--memory` into fixed parts (`archive/open/resources.rs`):
//!
//! | part | share | kept by |
//! |---|---|---|
//! | packed buffers of the scan | 1/4 | a [`BufferPool`](buffer_pool::BufferPool) |
//! | plain buffers of the scan | 1/4 | a [`BufferPool`](buffer_pool::BufferPool) |
//! | span cache | 3/8, with a disk cache 5/16 | a [`Reclaim`](reclaim::Reclaim) |
//! | write queues of disk caches | 1/16 if there are any | a [`BufferPool`](buffer_pool::BufferPool) |
//! | idle memory of spans | 1/8 | a [`FreeList`](free_list::FreeList) |
//!
//! After the scan, reads that decode have its half as one pool. During the scan they have 1/8, besides these
//! parts. `materialize` has no caches, and gives half of everything to each pool. Decoders have no part. A
//! [`MemoryBroker`](reclaim::MemoryBroker) reclaims their state from the pools, and last from the span cache.

pub mod buffer_pool;
pub mod free_list;
pub mod reclaim;
