//! Types and functions that at least two neighbouring layers share.

// The primitives of `sync`, which tests/interleavings replaces.
use std::sync as primitives;

pub mod archive_path;
pub mod buffer_pool;
pub mod change_time;
pub mod civil;
pub mod error_chain;
pub mod extent;
pub mod file_time;
pub mod free_list;
pub mod glob;
pub mod id_map;
pub mod memory_reclaim;
pub mod once_job;
pub mod passwd;
pub mod posix_acl;
pub mod publish;
pub mod random_reads;
pub mod regular_file;
pub mod resolve;
pub mod retention;
pub mod sha256;
pub mod span_hash;
pub mod stall_timeout;
pub mod stats;
pub mod sync;
pub mod tar_checksum;
pub mod thread;
pub mod thread_pool;
pub mod trusted_dir;
pub mod xattr_filter;
