//! The FUSE filesystem: decodes requests, calls the archive, and replies.
//!
//! A [`TarFilesystem`] answers from an index and a [`Volume`](crate::archive::Volume). A [`Mount`] attaches
//! it to the directory tree.
//!
//! The archive does not change, so names, negative entries, attributes and links have a TTL of a year.
//! Directories need no open, nor do files without [`BackingFiles`]. During the scan a later member may
//! replace an earlier one, so the TTL is a second, and the daemon invalidates attributes that change.
//!
//! A request thread never waits. It replies at once, or passes the reply on. Reads go to the archive's threads.
//! Names that are not indexed yet, and all listings, wait for the scan.

mod archives;
mod attr;
mod caller;
mod comparison;
mod filesystem;
mod listing;
mod mount;
mod passthrough;
mod pending_replies;
mod push;
mod read;
mod recent_errors;
mod seek;
mod state;
mod subtree;
mod timed_out_reads;
mod xattr;

pub use archives::DirectoryStatus;
pub use attr::Ownership;
pub use filesystem::TarFilesystem;
pub use mount::*;
pub use passthrough::BackingFiles;
pub use recent_errors::RecentError;
pub use subtree::{Subtree, SubtreeError};
pub use xattr::{LeftOutXattrs, left_out_xattrs};
