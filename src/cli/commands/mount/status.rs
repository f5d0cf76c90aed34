//! The status of the mount that this process serves.

use std::cell::OnceCell;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use super::copy::MountCopy;
use crate::cli::daemon::control_socket::{self, FailedRead, Status};
use crate::cli::daemon::opened_archive::OpenedArchive;
use crate::cli::daemon::overlay_dirs::OverlayDirs;
use crate::cli::daemon::sd_notify::ServiceManager;
use crate::cli::ui::panic_hook;
use crate::cli::ui::units::unix_seconds;
use tarfs::fuse::{LeftOutXattrs, Mount};
use tarfs::index::Ino;
use tarfs::internal::escape::bytes_unless_utf8;

/// State of the serving process from which a status is built.
pub(super) struct ServeState<'a> {
    pub(super) mount: &'a Mount,
    pub(super) opened: &'a OpenedArchive,
    pub(super) copy: Option<&'a MountCopy>,
    pub(super) writable: Option<&'a OverlayDirs>,
    pub(super) root: Ino,
    /// Whether files of the mount have the numbers and attributes of the index.
    pub(super) shows_index: bool,
    pub(super) metrics_url: Option<String>,
    pub(super) manager: Option<ServiceManager>,
    /// Whether damaged members were reported before the process left the terminal.
    pub(super) is_reported: bool,
    /// Once the index is complete.
    pub(super) left_out_xattrs: OnceCell<LeftOutXattrs>,
}

pub(super) fn build_status(state: &ServeState<'_>) -> Status {
    let (mount, opened) = (state.mount, state.opened);
    // Taken first, because the notes explain states that `progress` reports.
    let progress = state.copy.map(MountCopy::progress);
    let notes = notes(state);
    let current = mount.target.find();
    let detached = matches!(current, Ok(None));
    let (mountpoint, mount_id) = match current.ok().flatten() {
        Some(found) => (found.path, Some(found.mount_id)),
        None => (mount.target.mountpoint.clone(), None),
    };
    let entries = opened.content.index().entry_count();
    let (damaged_members, damaged) = opened.damage();
    opened.stats.panics.record_max(panic_hook::count());
    let mut memory = opened.content.memory_use();
    if let Some(archives) = &opened.directory {
        memory.index_bytes = archives.index_bytes();
    }
    Status {
        source: opened.location.clone(),
        layers: opened.layers.clone(),
        mountpoint: mountpoint.to_string_lossy().into_owned(),
        mountpoint_bytes: bytes_unless_utf8(mountpoint.as_os_str().as_bytes()).map(<[u8]>::to_vec),
        device: Some(control_socket::format_device(mount.target.device)),
        mount_id,
        detached,
        pid: std::process::id(),
        since_unix_seconds: unix_seconds(mount.mounted_at),
        version: opened.version.clone(),
        entries,
        index: opened.index(),
        resident_bytes: resident_bytes().unwrap_or(0),
        memory,
        disk_cache: opened.disk_cache(),
        prefetch: opened.prefetch(),
        metrics: state.metrics_url.clone(),
        counters: opened
            .stats
            .snapshot()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
        directory: mount.directory_status(),
        copy: progress,
        writable: state.writable.map(|writable| writable.status(mount)),
        damaged_members,
        damaged,
        notes,
        errors: mount
            .recent_errors()
            .into_iter()
            .map(|failure| FailedRead {
                last_unix_seconds: unix_seconds(failure.last),
                count: failure.count,
                path: failure.path,
                reason: failure.reason,
            })
            .collect(),
    }
}

/// States of the mount that need an explanation.
fn notes(state: &ServeState<'_>) -> Vec<String> {
    let mut notes = state.opened.notes();
    if let Some(copy) = state.copy {
        notes.extend(copy.notes(state.mount));
    }
    if let Some(namespace) = &state.mount.target.namespace {
        let path = namespace.path.display();
        notes.push(format!("it is in another mount namespace: {path}"));
    }
    if let Some(directory) = state.mount.directory_status() {
        notes.extend(directory.notes);
    }
    let index = state.opened.content.index();
    let count = || {
        let left_out = index.read(tarfs::fuse::left_out_xattrs);
        left_out.unwrap_or_default()
    };
    let left_out = index.is_complete();
    let left_out = left_out.then(|| *state.left_out_xattrs.get_or_init(count));
    let left_out = left_out.unwrap_or_default();
    if left_out.acl_entries > 0 {
        notes.push(format!(
            "{} entries of ACLs are left out, because they name users or groups that this user \
             namespace does not map",
            left_out.acl_entries
        ));
    }
    if left_out.attributes > 0 {
        notes.push(format!(
            "{} extended attributes are left out, because Linux cannot hold them",
            left_out.attributes
        ));
    }
    notes
}

/// Resident memory of this process, from `/proc/self/status` (`VmRSS:   12345 kB`).
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    kib.checked_mul(1024)
}
