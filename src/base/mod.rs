//! Types and functions that at least two neighbouring layers share.

// The primitives of `sync`, which tests/interleavings replaces.
use std::sync as primitives;

pub mod error_chain;
pub mod escape;
pub(crate) mod extent;
pub(crate) mod file;
pub(crate) mod hash;
pub(crate) mod memory;
pub(crate) mod once_job;
pub mod passwd;
pub(crate) mod path;
pub mod publish;
pub(crate) mod random_reads;
pub(crate) mod retention;
pub(crate) mod stall_timeout;
pub mod stats;
pub mod sync;
pub mod thread;
pub(crate) mod thread_pool;
pub mod time;
pub mod trusted_dir;
pub(crate) mod xattr;

pub(crate) use file::chmod;
pub use file::{descriptor_limit, lock, regular_file};
pub use hash::span_hash;
pub(crate) use hash::{sha256, tar_checksum};
pub(crate) use memory::budget as memory_budget;
pub use memory::{buffer_pool, free_list, reclaim as memory_reclaim};
pub(crate) use path::{archive_path, glob};
pub use path::{resolve, rooted};
pub(crate) use xattr::filter as xattr_filter;
pub use xattr::posix_acl;
