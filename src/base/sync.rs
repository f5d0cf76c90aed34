//! Synchronisation primitives of [`std::sync`], replaceable in tests.
//!
//! Files in which threads wait for each other import them from here. `tests/interleavings` compiles the
//! same files with the primitives of its own scheduler, which tries every interleaving.

pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
