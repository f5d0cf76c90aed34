//! Types and functions that at least two neighbouring layers share.
//!
//! Folders are private, so that each module has one path: `base::lock` is the file `base/file/lock.rs`.

pub mod environment;
pub mod error_chain;
pub mod escape;
pub(crate) mod extent;
mod file;
mod hash;
mod memory;
pub mod passwd;
mod path;
pub mod redact;
pub mod size;
pub(crate) mod stall_timeout;
pub mod stats;
mod threads;
pub mod time;
pub(crate) mod xattr;

pub(crate) use file::{
    AttributeTarget, chmod, foreign_command, mount_point, random_reads, retention,
};
pub use file::{
    bounded_read, descriptor_limit, directory, lock, publish, regular_file, shared_dir, trusted_dir,
};
pub use hash::span_hash;
pub(crate) use hash::{read_overlapped, sha256, tar_checksum};
pub(crate) use memory::budget as memory_budget;
pub use memory::{buffer_pool, free_list, reclaim as memory_reclaim};
pub(crate) use path::{NAME_MAX, archive_path, glob};
pub use path::{resolve, rooted};
pub(crate) use threads::{cancel_token, once_job, thread_pool};
pub use threads::{periodic, process, sync, thread, wait};
