//! Options of a [`Materializer`](super::Materializer), and the result of a run.

use std::sync::Arc;

use super::error::{Problem, Problems, Reporter};
use super::selection::Selection;
use crate::base::xattr::filter::XattrFilter;
use crate::index::MemoryLimit;

/// Policy for an entry whose name already exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Existing {
    /// Replace the entry, except a non-empty directory. A directory over a directory only sets attributes.
    #[default]
    Replace,
    /// Keep the existing entry and report an error (`--keep-old-files`), but silently for a directory member.
    Keep,
    /// Keep the existing entry silently (`--skip-old-files`).
    Skip,
}

/// Options of a [`Materializer`](super::Materializer).
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Options {
    /// The members to write, and their paths.
    pub selection: Selection,
    /// Policy for existing entries.
    pub existing: Existing,
    /// Write an empty file for a device node that this process must not create.
    pub device_placeholders: bool,
    /// Set the archive's owners.
    pub same_owner: bool,
    /// Set exactly the archive's modes, whatever the umask is.
    pub same_permissions: bool,
    /// Use only the numbers of owners, not their names.
    pub numeric_owner: bool,
    /// The source is a directory of this machine: as `cp -a`, keep groups of which this user is a member, times of last
    /// access, and set-id bits and capabilities only with their owner.
    pub copies_directory: bool,
    /// Filter of the extended attributes and ACLs to set.
    pub xattrs: XattrFilter,
    /// Number of writer threads, at least one. `None` chooses by the destination's file system.
    pub writers: Option<usize>,
    /// Sync the file system at the end. The commit of a [`Staging`](super::Staging) syncs its tree anyway.
    pub sync: bool,
    /// Maximum number of entries, implied directories included. One more entry ends the run.
    pub max_entries: u64,
    /// Memory limit for the indexes of layers.
    pub index_memory: MemoryLimit,
    /// Receives entries and problems as they occur.
    pub reporter: Option<Arc<dyn Reporter>>,
}

impl Options {
    /// GNU tar's defaults: only root sets the archive's owners and modes.
    pub fn for_this_user() -> Self {
        let is_root = rustix::process::geteuid().is_root();
        Self {
            selection: Selection::default(),
            existing: Existing::default(),
            device_placeholders: false,
            same_owner: is_root,
            same_permissions: is_root,
            numeric_owner: false,
            copies_directory: false,
            xattrs: XattrFilter::default(),
            writers: None,
            sync: false,
            max_entries: u64::MAX,
            index_memory: MemoryLimit::default(),
            reporter: None,
        }
    }
}

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Entries written.
    pub entries: u64,
    /// Payload bytes written.
    pub bytes: u64,
    /// Missing or incomplete entries, damaged places, and requested paths that the archive lacks.
    pub errors: u64,
    /// The first of these problems.
    pub problems: Vec<Problem>,
}

impl Summary {
    pub(super) fn new(entries: u64, bytes: u64, problems: &Problems) -> Self {
        Self {
            entries,
            bytes,
            errors: problems.count(),
            problems: problems.take_problems(),
        }
    }
}
