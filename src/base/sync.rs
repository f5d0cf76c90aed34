//! What threads wait for each other with, by the names of [`std::sync`].
//!
//! Files in which threads wait for bytes of each other import it from here, so that
//! `tests/interleavings` can compile these very files once more with locks of a scheduler of its own,
//! which takes every turn that threads may take.

pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
