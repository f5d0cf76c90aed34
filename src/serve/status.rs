//! Status of a mount, as other processes get it.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::archive::{DiskCacheUsage, MemoryUse};
use crate::fuse::{DirectoryStatus, TopMount, top_mount};

/// Maximum length of a text, in bytes. All texts together stay below the maximum of a response.
pub(super) const MAX_TEXT_BYTES: usize = 2048;

/// Status of a mount.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The archive's location, without secrets.
    pub source: String,
    /// The layers, from the bottom, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
    /// The mountpoint, with U+FFFD in the place of bytes that are not UTF-8.
    pub mountpoint: String,
    /// Its bytes, only if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mountpoint_bytes: Option<Vec<u8>>,
    /// Device number as in `/proc/self/mountinfo` (`0:45`), because two mounts may have the same path, in two
    /// namespaces or after a rename.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// ID in `/proc/self/mountinfo` of the mount that a request to unmount removes. A bind mount of it has
    /// the same device and another ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_id: Option<u32>,
    /// Whether nothing is mounted there any more, although the mount is still in use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detached: bool,
    /// Process that serves it.
    pub pid: u32,
    /// Process that keeps it, and ends with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<u32>,
    /// Whether the process that serves it serves other mounts, too, and goes on after this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub daemon: bool,
    /// When it was mounted, in seconds since 1970.
    pub since_unix_seconds: u64,
    /// Pinned version of the archive, or of each layer.
    pub version: String,
    /// Number of its tree. Mounts of one process with an equal number share index, memory and disk cache.
    #[serde(default)]
    pub tree: u64,
    /// Number of entries.
    pub entries: u64,
    /// Progress of the index.
    pub index: IndexState,
    /// Resident memory of the process.
    pub resident_bytes: u64,
    /// Use of the budget.
    pub memory: MemoryUse,
    /// Use of disk by decoded data; `None` without a disk cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_cache: Option<DiskCacheUsage>,
    /// Progress of prefetch.
    #[serde(default)]
    pub prefetch: PrefetchStatus,
    /// Numbers of archives, if SOURCE is a directory of them. The index is then that of an empty tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryStatus>,
    /// Progress of the copy, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyProgress>,
    /// The overlay, if it is writable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable: Option<OverlayStatus>,
    /// URL of these figures for Prometheus, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<String>,
    /// Counters of the work done so far. Each name contains its unit.
    pub counters: BTreeMap<String, u64>,
    /// Number of members that are damaged or missing from the tree.
    #[serde(default)]
    pub damaged_members: u64,
    /// The first of these members, one per line.
    #[serde(default)]
    pub damaged: Vec<String>,
    /// Notes about degraded operation, as text.
    pub notes: Vec<String>,
    /// The last failed reads, oldest first.
    pub errors: Vec<FailedRead>,
}

/// Progress of an index.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct IndexState {
    /// Where it is.
    pub phase: Phase,
    /// Compressed bytes that were scanned; 0 for a saved index.
    pub scanned_bytes: u64,
    /// Compressed bytes of the archive, if the source knows its length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_bytes: Option<u64>,
    /// Reason why the index stays incomplete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Phase of an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The archive is being read.
    Scanning,
    /// All entries are known.
    Complete,
    /// It stays incomplete.
    Failed,
}

/// Progress of prefetch.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct PrefetchStatus {
    /// `none`, `ahead` or `all`, as in `--prefetch`.
    pub what: String,
    /// State of `all`: `off` (not requested), `running`, `complete` (all is cached), `full` (no space for
    /// more) or `incomplete` (some parts could not be decoded).
    pub state: String,
    /// Spans that `all` has decoded or found in the cache.
    pub done_spans: u64,
    /// Spans of the archive.
    pub total_spans: u64,
    /// Spans of the profile that were decoded or found in the cache.
    pub replayed_spans: u64,
    /// Spans of the profile.
    pub replay_spans: u64,
}

/// Progress of a copy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CopyProgress {
    /// Its directory.
    pub directory: String,
    /// `waiting` for the index, `writing`, `retrying`, `complete`, `incomplete` or `stopped`.
    pub state: String,
    /// Complete regular files.
    pub files: u64,
    /// Regular files that it is to have.
    pub total_files: u64,
    /// Stored bytes of complete files.
    pub bytes: u64,
    /// Stored bytes that it is to have.
    pub total_bytes: u64,
    /// Entries that could not be written, or that another process has changed.
    pub failures: u64,
}

/// Location of the files that are written to a mount.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OverlayStatus {
    /// Directory with new and changed files.
    pub upper: String,
    /// Whether it is removed with the mount.
    pub is_temporary: bool,
    /// `overlayfs` or `fuse-overlayfs`.
    pub by: String,
}

/// A failed read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FailedRead {
    /// Time of the last failure, in seconds since 1970.
    pub last_unix_seconds: u64,
    /// Number of failures in a row.
    pub count: u64,
    /// Path in the archive.
    pub path: String,
    /// The reason.
    pub reason: String,
}

impl Status {
    /// Truncates texts that an archive or a server can make long.
    pub(super) fn truncate_texts(&mut self) {
        truncate_text(&mut self.source);
        truncate_text(&mut self.version);
        self.index.failure.iter_mut().for_each(truncate_text);
        self.layers.iter_mut().for_each(truncate_text);
        self.damaged.iter_mut().for_each(truncate_text);
        self.notes.iter_mut().for_each(truncate_text);
        for error in &mut self.errors {
            truncate_text(&mut error.path);
            truncate_text(&mut error.reason);
        }
    }

    /// Whether both mounts have one tree, so that its index, memory and disk cache are there once.
    pub fn shares_tree_with(&self, other: &Self) -> bool {
        self.tree != 0 && (self.pid, self.tree) == (other.pid, other.tree)
    }

    /// The mountpoint, in any encoding.
    pub fn mountpoint_bytes(&self) -> &[u8] {
        let bytes = self.mountpoint_bytes.as_deref();
        bytes.unwrap_or(self.mountpoint.as_bytes())
    }

    /// Whether this mount is on `mountpoint` for this process. Without a mount table, compares the paths.
    pub fn is_mounted_on(&self, mountpoint: &Path) -> bool {
        self.matches_top_mount(mountpoint, &top_mount(mountpoint))
    }

    pub(super) fn matches_top_mount(
        &self,
        mountpoint: &Path,
        top: &io::Result<Option<TopMount>>,
    ) -> bool {
        match (&self.device, top) {
            (Some(device), Ok(top)) => top
                .as_ref()
                .is_some_and(|top| *device == format_device(top.device)),
            _ => self.mountpoint_bytes() == mountpoint.as_os_str().as_bytes(),
        }
    }

    /// Whether `top` is another mount of the same tree, such as a bind mount.
    pub(super) fn is_another_mount(&self, top: &io::Result<Option<TopMount>>) -> bool {
        match top {
            Ok(Some(top)) => self.device.is_some() && self.mount_id != Some(top.id),
            _ => false,
        }
    }
}

fn truncate_text(text: &mut String) {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
}

/// Formats a device number as the kernel's mount table does.
pub fn format_device((major, minor): (u32, u32)) -> String {
    format!("{major}:{minor}")
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Status {
        pub(crate) fn example() -> Self {
            let stats = crate::Stats::default();
            stats.scans.increment();
            let counters = stats.snapshot().into_iter();
            Self {
                source: "http://host/a.tar".into(),
                layers: Vec::new(),
                mountpoint: "/mnt".into(),
                mountpoint_bytes: None,
                device: None,
                mount_id: None,
                detached: false,
                pid: std::process::id(),
                monitor: None,
                daemon: false,
                since_unix_seconds: 1000,
                version: "3 bytes".into(),
                tree: 1,
                entries: 2,
                index: IndexState {
                    phase: Phase::Complete,
                    scanned_bytes: 7,
                    of_bytes: Some(7),
                    failure: None,
                },
                resident_bytes: 20 << 20,
                memory: MemoryUse {
                    budget_bytes: 128 << 20,
                    spans_bytes: 40 << 20,
                    reads_bytes: 5,
                    decoders_bytes: 6,
                    index_bytes: 12_345,
                },
                disk_cache: Some(DiskCacheUsage {
                    held_bytes: 30 << 20,
                    all_bytes: 50 << 20,
                    limit_bytes: 70 << 20,
                }),
                prefetch: PrefetchStatus {
                    what: "all".into(),
                    state: "running".into(),
                    done_spans: 3,
                    total_spans: 7,
                    replayed_spans: 1,
                    replay_spans: 2,
                },
                directory: None,
                copy: None,
                writable: None,
                metrics: Some("http://127.0.0.1:9469/metrics".into()),
                counters: counters
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect(),
                damaged_members: 2,
                damaged: vec!["a/c: cut".into()],
                notes: vec!["stored".into()],
                errors: vec![FailedRead {
                    last_unix_seconds: 1000,
                    count: 3,
                    path: "a/b".into(),
                    reason: "cut".into(),
                }],
            }
        }
    }
}
