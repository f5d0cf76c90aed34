//! Threads, pools of them, their locks, jobs that one of them runs, and waits for others.

// The primitives of `sync`, which tests/interleavings replaces.
use std::sync as primitives;

pub(crate) mod cancel_token;
pub(crate) mod once_job;
pub mod periodic;
pub mod process;
pub mod sync;
pub mod thread;
pub(crate) mod thread_pool;
pub mod wait;
