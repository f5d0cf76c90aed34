//! What threads wait for each other with, compiled once more with locks of the scheduler.

/// In place of what these files take from the standard library.
mod primitives {
    #![allow(unreachable_pub, reason = "a public item of the library exports it")]
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;
}

#[path = "../../src/base/sync.rs"]
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    clippy::pedantic,
    reason = "the library's, and looked at there"
)]
pub(crate) mod sync;

#[path = "../../src/base/memory/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    clippy::pedantic,
    reason = "the library's, and looked at there"
)]
pub(crate) mod memory;

pub(crate) use memory::{buffer_pool, reclaim as memory_reclaim};
