//! Synchronization primitives of `base`, compiled once more with the scheduler's locks.

/// Replaces the standard library's primitives in these files.
mod primitives {
    #![allow(unreachable_pub, reason = "a public item of the library exports it")]
    pub use shuttle::sync::{
        Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    };
    pub(crate) use std::sync::PoisonError;
}

#[path = "../../src/base/threads/sync.rs"]
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
