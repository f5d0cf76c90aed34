//! Types and functions that at least two neighbouring layers share.

// The primitives of `sync`, which tests/interleavings replaces.
use std::sync as primitives;

pub mod error_chain;
pub mod extent;
pub mod hash;
pub mod memory;
pub mod once_job;
pub mod passwd;
pub mod path;
pub mod publish;
pub mod random_reads;
pub mod regular_file;
pub mod retention;
pub mod stall_timeout;
pub mod stats;
pub mod sync;
pub mod thread;
pub mod thread_pool;
pub mod time;
pub mod trusted_dir;
pub mod xattr;

pub use hash::{sha256, span_hash, tar_checksum};
pub use memory::{buffer_pool, free_list, reclaim as memory_reclaim};
pub use path::{archive_path, glob, resolve};
pub use xattr::{filter as xattr_filter, posix_acl};
