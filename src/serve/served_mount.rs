//! A mount that this process serves.

use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::cgroup::ControlGroup;
use super::copy::MountCopy;
use super::failure::Failure;
use super::link::{Link, SessionState, version_for_packet};
use super::mount_spec::MountSpec;
use super::opened::Opened;
use super::status::{FailedRead, OverlayStatus, Status, format_device};
use super::volumes::SharedTree;
use crate::archive::directory::ArchiveDirectory;
use crate::base::escape::bytes_unless_utf8;
use crate::base::stats::{CounterKind, Stats};
use crate::base::sync::Mutex;
use crate::base::time::unix_seconds;
use crate::fuse::{
    Force, InheritedSession, LeftOutXattrs, Mount, MountTarget, NewMount, Subtree, TarFilesystem,
    UnmountError, left_out_xattrs,
};
use crate::index::{Ino, LazyIndex};

/// Extra time for a reply beyond the source's timeout, so that the source's error ends the read first.
const REPLY_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// A mount that this process serves. Dropping it unmounts.
#[derive(Debug)]
pub struct ServedMount {
    /// The mount.
    pub mount: Mount,
    /// Its tree.
    pub opened: Arc<Opened>,
    /// Closes the tree with its last mount.
    share: Mutex<Option<Arc<SharedTree<Arc<Opened>>>>>,
    /// Counters of what it was served; those of the tree count the work for all its mounts.
    stats: Arc<Stats>,
    /// Its copy on disk, if there is one.
    copy: Option<MountCopy>,
    /// URL of its metrics, if they are served.
    metrics: Option<String>,
    /// The overlay over it, if there is one.
    overlay: OnceLock<OverlayStatus>,
    /// The process that keeps it, and its control group if that can end.
    monitor: OnceLock<(u32, Option<ControlGroup>)>,
    /// The link to that process, once the mount answers.
    link: OnceLock<Arc<Link>>,
    release: OnceLock<Release>,
    root: Ino,
    /// Whether files of the mount have the numbers and attributes of the index.
    shows_index: bool,
    /// Once the index is complete.
    left_out_xattrs: OnceLock<LeftOutXattrs>,
}

struct Release(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Release")
    }
}

/// A mount before this process serves it.
#[derive(Debug)]
pub enum MountOrigin {
    /// One that no process has served.
    New(NewMount),
    /// One whose process has died.
    Inherited(InheritedSession),
}

impl ServedMount {
    /// Serves the part `view` of `opened` on `origin` as `spec` says, and returns when the mount answers. The end of the
    /// mount calls `on_end`.
    ///
    /// # Errors
    /// If it cannot be served. Then nothing is mounted.
    pub fn start(
        spec: &MountSpec,
        (tree, view): (Arc<SharedTree<Arc<Opened>>>, Subtree),
        (copy, metrics): (Option<MountCopy>, Option<String>),
        origin: MountOrigin,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, Failure> {
        let root = view.root;
        let (opened, stats) = (Arc::clone(&**tree), Arc::new(Stats::default()));
        let filesystem = filesystem(spec, &opened, view, (copy.as_ref(), &stats))?;
        let mount = match origin {
            MountOrigin::New(mount) => Mount::serve(filesystem, mount, on_end),
            MountOrigin::Inherited(session) => Mount::take_over(filesystem, &session, on_end),
        };
        let mount = Self {
            mount: mount?,
            opened,
            share: Mutex::new(Some(tree)),
            stats,
            copy,
            metrics,
            overlay: OnceLock::new(),
            monitor: OnceLock::new(),
            link: OnceLock::new(),
            release: OnceLock::new(),
            root,
            shows_index: spec.shows_index(root),
            left_out_xattrs: OnceLock::new(),
        };
        mount.start_copy()?;
        Ok(mount)
    }

    /// Starts the copy, if there is one, once the index is complete.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start_copy(&self) -> Result<(), Failure> {
        let copy = self.copy.as_ref();
        copy.map_or(Ok(()), |copy| copy.start(&self.opened, self.root))
    }

    /// The index, if it is complete and says all that the mount shows.
    pub fn shown_index(&self) -> Option<LazyIndex> {
        let index = self.opened.volume.complete_index()?;
        self.shows_index.then(|| {
            self.stats.sent_indexes.increment();
            index
        })
    }

    /// From now on the mount is the overlay at `target`, which its monitor has mounted over it.
    pub(super) fn cover(&self, target: MountTarget, overlay: OverlayStatus) {
        self.mount.cover(target);
        self.set_overlay(overlay);
    }

    pub(super) fn set_overlay(&self, overlay: OverlayStatus) {
        self.overlay.get_or_init(|| overlay);
    }

    pub(super) fn set_monitor(&self, pid: u32) {
        self.monitor.get_or_init(|| (pid, ControlGroup::of(pid)));
    }

    /// Whether the job of the process that keeps it has ended.
    pub(super) fn has_job_ended(&self) -> bool {
        let group = self.monitor.get().and_then(|(_, group)| group.as_ref());
        group.is_some_and(ControlGroup::has_ended)
    }

    pub(super) fn set_link(&self, link: &Arc<Link>) {
        self.link.get_or_init(|| Arc::clone(link));
    }

    /// The link to its monitor, if that can have another process continue with it.
    pub(super) fn link_to_continue(&self) -> Option<&Link> {
        let can_continue = self.state().can_be_continued();
        let link = self.link.get().filter(|link| !link.is_closed());
        link.map(|link| &**link).filter(|_| can_continue)
    }

    /// State for a successor of this process.
    pub(super) fn state(&self) -> SessionState {
        SessionState {
            capabilities: self.mount.capabilities,
            version: version_for_packet(&self.opened.version),
            is_strong: self.opened.is_strong,
        }
    }

    /// Calls `release` when the mount is to be served no more, although it has users.
    pub(super) fn on_release(&self, release: impl Fn() + Send + Sync + 'static) {
        self.release.get_or_init(|| Release(Box::new(release)));
    }

    /// Ends its service.
    pub(super) fn release(&self) {
        if let Some(Release(release)) = self.release.get() {
            release();
        }
    }

    /// Unmounts it. By force, its service ends, too, because a user could keep it alive.
    ///
    /// # Errors
    /// As [`Mount::unmount`].
    pub fn unmount(&self, force: Force) -> Result<(), UnmountError> {
        self.mount.unmount(force)?;
        if force == Force::Yes && !self.mount.is_mounted() {
            self.release();
        }
        Ok(())
    }

    /// Ends its copy soon, after its end, and its tree if no other mount uses that.
    pub fn close(&self) {
        if let Some(copy) = &self.copy {
            copy.stop();
        }
        // Fails pending reads now instead of when the connection is aborted.
        drop(self.share.lock().take());
    }

    /// Counters of the work for it and for others that share its tree.
    fn counters(&self) -> impl Iterator<Item = (String, u64)> {
        let (own, shared) = (self.stats.snapshot(), self.opened.stats.snapshot());
        let kinds = Stats::COUNTERS.iter().map(|info| info.kind);
        let pairs = own.into_iter().zip(shared).zip(kinds);
        pairs.map(|(((name, own), (_, shared)), kind)| {
            let value = match kind {
                CounterKind::Sum => own + shared,
                CounterKind::Peak => own.max(shared),
            };
            (name.to_owned(), value)
        })
    }

    /// The status of the mount.
    pub fn status(&self) -> Status {
        let (mount, opened) = (&self.mount, &self.opened);
        // Taken first, because the notes explain states that it reports.
        let copy = self.copy.as_ref().map(MountCopy::progress);
        let notes = self.notes();
        let target = mount.target();
        let current = target.find();
        let detached = matches!(current, Ok(None));
        let (mountpoint, mount_id) = match current.ok().flatten() {
            Some(found) => (found.path, Some(found.mount_id)),
            None => (target.mountpoint.clone(), None),
        };
        // Its guard must not live while others are taken below.
        let entries = opened.volume.index().entry_count();
        let (damaged_members, damaged) = opened.damage();
        let mut memory = opened.volume.memory_use();
        if let Some(archives) = &opened.directory {
            memory.index_bytes = archives.index_bytes();
        }
        let errors = mount.recent_errors().into_iter();
        Status {
            source: opened.location.clone(),
            layers: opened.layers.clone(),
            mountpoint: mountpoint.to_string_lossy().into_owned(),
            mountpoint_bytes: bytes_unless_utf8(mountpoint.as_os_str().as_bytes())
                .map(<[u8]>::to_vec),
            device: Some(format_device(target.device)),
            mount_id,
            detached,
            pid: std::process::id(),
            monitor: self.monitor.get().map(|(pid, _)| *pid),
            daemon: false,
            since_unix_seconds: unix_seconds(mount.mounted_at),
            version: opened.version.clone(),
            entries,
            index: opened.index(),
            resident_bytes: resident_bytes().unwrap_or(0),
            memory,
            disk_cache: opened.disk_cache(),
            prefetch: opened.prefetch(),
            metrics: self.metrics.clone(),
            counters: self.counters().collect(),
            directory: mount.directory_status(),
            copy,
            writable: self.overlay.get().cloned(),
            damaged_members,
            damaged,
            notes,
            errors: errors
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
    fn notes(&self) -> Vec<String> {
        let mut notes = self.opened.notes();
        if let Some(copy) = &self.copy {
            notes.extend(copy.notes(&self.mount));
        }
        if let Some(namespace) = &self.mount.target().namespace {
            let path = namespace.path.display();
            notes.push(format!("it is in another mount namespace: {path}"));
        }
        if let Some(directory) = self.mount.directory_status() {
            notes.extend(directory.notes);
        }
        let index = self.opened.volume.index();
        let count = || index.read(left_out_xattrs).unwrap_or_default();
        let left_out = index.is_complete();
        let left_out = left_out.then(|| *self.left_out_xattrs.get_or_init(count));
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
}

/// The filesystem that shows the part `view` of `opened`.
fn filesystem(
    spec: &MountSpec,
    opened: &Opened,
    view: Subtree,
    (copy, stats): (Option<&MountCopy>, &Arc<Stats>),
) -> Result<TarFilesystem, Failure> {
    let (volume, stats) = (Arc::clone(&opened.volume), Arc::clone(stats));
    let timeout = spec.open.server.timeout + REPLY_TIMEOUT_MARGIN;
    let mut tree = TarFilesystem::new(volume, view, &spec.own_options(), stats)
        .with_timeout(timeout)
        .with_xattrs(spec.xattrs.clone());
    if spec.open.archive.allow_truncated {
        tree = tree.for_truncated();
    }
    if spec.is_writable {
        tree = tree.for_overlay();
    }
    let tree = if let Some(archives) = &opened.directory {
        let archives = Arc::clone(archives) as Arc<dyn ArchiveDirectory>;
        tree.with_archives(archives, spec.idle_timeout)
    } else if let Some(copy) = copy {
        tree.with_backing_files(copy.backing_files())
    } else {
        Ok(tree)
    };
    tree.map_err(|error| Failure::to("cannot start a thread", &error))
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
