//! A mount that this process serves.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::cgroup::ControlGroup;
use super::ending::{Ending, Endings};
use super::job_list::{JobList, JobMount};
use crate::archive::directory::ArchiveDirectory;
use crate::base::escape::bytes_unless_utf8;
use crate::base::stats::{CounterKind, Stats};
use crate::base::sync::Mutex;
use crate::base::time::unix_seconds;
use crate::fuse::{
    InheritedSession, LeftOutXattrs, Mount, MountOptions, MountTarget, NewMount, Subtree,
    SuperblockWatch, TarFilesystem, left_out_xattrs,
};
use crate::index::LazyIndex;
use crate::materialize::XattrFilter;
use crate::serve::copy::MountCopy;
use crate::serve::failure::Failure;
use crate::serve::link::{Link, SessionState, version_for_packet};
use crate::serve::mount_spec::MountSpec;
use crate::serve::opened::Opened;
use crate::serve::status::{FailedRead, OverlayStatus, Status, format_device};
use crate::serve::volumes::SharedTree;

/// Extra time for a reply beyond the source's timeout, so that the source's error ends the read first.
const REPLY_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Key of a file system: mounts with equal keys can share one.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct FileSystemKey {
    /// Number of the tree.
    tree: u64,
    view: Subtree,
    options: MountOptions,
    xattrs: XattrFilter,
    is_writable: bool,
    /// Its device number, if another process has served it.
    device: Option<(u32, u32)>,
}

impl FileSystemKey {
    /// That of a mount of `tree`, or of the mount `taken` from a dead process.
    ///
    /// # Errors
    /// As [`MountSpec::view`].
    pub(super) fn new(
        spec: &MountSpec,
        tree: &Arc<SharedTree<Arc<Opened>>>,
        taken: Option<&MountTarget>,
    ) -> Result<Self, Failure> {
        Ok(Self {
            tree: tree.number,
            view: spec.view(&*tree.volume)?,
            // All are read-only; the word is for an overlay.
            options: MountOptions {
                read_only: None,
                ..spec.options.clone()
            },
            xattrs: spec.xattrs.clone(),
            is_writable: spec.is_writable,
            device: taken.map(MountTarget::lower_device),
        })
    }
}

/// Figures of the process for the statuses of its mounts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessFigures {
    pub(super) is_daemon: bool,
    pub(super) resident_bytes: u64,
    pub(super) panics: u64,
}

/// A file system that this process serves, for all its mounts. It has the claim of its job list.
#[derive(Debug)]
struct FileSystem {
    key: FileSystemKey,
    /// Counters of what it was served; those of the tree count the work for all its mounts.
    stats: Arc<Stats>,
    endings: Endings,
    /// Its number, once it is mounted.
    device: OnceLock<(u32, u32)>,
    /// Its job list, if it can be shared.
    job_list: Option<JobList>,
    /// Whether its files have the numbers and attributes of the index.
    shows_index: bool,
    /// Once the index is complete.
    left_out_xattrs: OnceLock<LeftOutXattrs>,
}

/// A mount that this process serves. Dropping it unmounts.
#[derive(Debug)]
pub struct ServedMount {
    /// The mount.
    pub mount: Mount,
    /// Its tree.
    pub opened: Arc<Opened>,
    /// Closes the tree with its last mount.
    share: Mutex<Option<Arc<SharedTree<Arc<Opened>>>>>,
    file_system: Arc<FileSystem>,
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
    ending: Arc<Ending>,
}

/// A mount before this process serves it.
#[derive(Debug)]
pub(super) enum MountOrigin {
    /// One that no process has served.
    New(NewMount),
    /// One whose process has died.
    Inherited(InheritedSession),
}

impl ServedMount {
    /// Serves what `key` says of `tree` on `origin` as `spec` says, and returns when the mount answers. Its end reaches
    /// `ending`.
    ///
    /// # Errors
    /// If it cannot be served. Then nothing is mounted.
    pub(super) fn serve(
        spec: &MountSpec,
        (key, tree): (FileSystemKey, Arc<SharedTree<Arc<Opened>>>),
        (copy, metrics): (Option<MountCopy>, Option<String>),
        (origin, job_list): (MountOrigin, Option<JobList>),
        ending: &Arc<Ending>,
    ) -> Result<Self, Failure> {
        let (view, stats) = (key.view, Arc::default());
        let filesystem = filesystem(spec, &tree, view, (copy.as_ref(), &stats))?;
        let file_system = Arc::new(FileSystem {
            key,
            stats,
            endings: Endings::of_first(ending),
            device: OnceLock::new(),
            job_list,
            shows_index: spec.shows_index(view.root),
            left_out_xattrs: OnceLock::new(),
        });
        // While the session runs, no other process may claim the file system.
        let of_session = Arc::clone(&file_system);
        let on_end = move || {
            let device = of_session.device.get();
            let is_mounted = || device.is_some_and(|&device| crate::fuse::is_mounted(device));
            of_session.endings.reach_all(is_mounted);
        };
        let mount = match origin {
            MountOrigin::New(mount) => Mount::serve(filesystem, mount, on_end),
            MountOrigin::Inherited(session) => Mount::take_over(filesystem, &session, on_end),
        };
        let mount = mount?;
        let device = mount.target().lower_device();
        file_system.device.get_or_init(|| device);
        let mount = Self::new(mount, (tree, file_system), (copy, metrics), ending);
        mount.start_copy()?;
        Ok(mount)
    }

    /// Serves the mount at `target` of the file system of `shared`, which shows the same of `tree`.
    ///
    /// # Errors
    /// If the file system has ended.
    pub(super) fn join(
        shared: &Self,
        tree: Arc<SharedTree<Arc<Opened>>>,
        (target, metrics): (MountTarget, Option<String>),
        ending: &Arc<Ending>,
    ) -> Result<Self, Failure> {
        let mount = shared.mount.join(target)?;
        let file_system = Arc::clone(&shared.file_system);
        if !file_system.endings.add(ending) {
            return Err(Failure::new("the connection of the mount has ended"));
        }
        Ok(Self::new(
            mount,
            (tree, file_system),
            (None, metrics),
            ending,
        ))
    }

    fn new(
        mount: Mount,
        (tree, file_system): (Arc<SharedTree<Arc<Opened>>>, Arc<FileSystem>),
        (copy, metrics): (Option<MountCopy>, Option<String>),
        ending: &Arc<Ending>,
    ) -> Self {
        Self {
            mount,
            opened: Arc::clone(&**tree),
            share: Mutex::new(Some(tree)),
            file_system,
            copy,
            metrics,
            overlay: OnceLock::new(),
            monitor: OnceLock::new(),
            link: OnceLock::new(),
            ending: Arc::clone(ending),
        }
    }

    /// Whether a mount of `key` can be one of its file system.
    pub(super) fn can_be_shared_by(&self, key: &FileSystemKey) -> bool {
        let device = self.mount.target().lower_device();
        let own = FileSystemKey {
            device: key.device.is_some().then_some(device),
            ..self.file_system.key.clone()
        };
        own == *key && (key.device.is_some() || self.mount.can_be_copied())
    }

    /// Its number in the table of mounts. If it is gone, a bind mount of it is a mount of its own.
    pub(super) fn mount_id(&self) -> Option<u32> {
        let target = self.mount.target();
        let found = target.find().ok().flatten();
        let found = found.filter(|_| target.is_attached());
        found.map(|found| found.mount_id)
    }

    /// Whether it is in the tree of mounts, or about to be, as far as is known.
    pub(super) fn is_attached(&self) -> bool {
        if self.file_system.key.is_writable {
            // The monitor detaches the mount below an overlay before it says so.
            let is_covered = self.overlay.get().is_some();
            return match self.overlay_end() {
                Some(end) => !end.has_ended(),
                None => !is_covered || self.mount.is_attached(),
            };
        }
        self.mount.is_attached()
    }

    /// The watch for the end of its overlay.
    pub(super) fn overlay_end(&self) -> Option<Arc<SuperblockWatch>> {
        self.overlay.get()?;
        self.mount.end()
    }

    /// Starts the copy, if there is one, once the index is complete.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start_copy(&self) -> Result<(), Failure> {
        let copy = self.copy.as_ref();
        copy.map_or(Ok(()), |copy| {
            copy.start(&self.opened, self.file_system.key.view.root)
        })
    }

    /// The index, if it is complete and says all that the mount shows.
    pub fn shown_index(&self) -> Option<LazyIndex> {
        let index = self.opened.volume.complete_index()?;
        self.file_system.shows_index.then(|| {
            self.file_system.stats.sent_indexes.increment();
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

    /// The process `pid` keeps it from now on, with the directory `scratch` for an overlay. The job list has it, too.
    pub(super) fn set_monitor(&self, pid: u32, scratch: Option<&OsString>) {
        let (_, group) = self.monitor.get_or_init(|| (pid, ControlGroup::of(pid)));
        let (Some(job_list), Some(group)) = (&self.file_system.job_list, group) else {
            return;
        };
        let added = job_list.add(&JobMount {
            target: self.mount.target(),
            group: group.clone(),
            scratch: scratch.cloned(),
        });
        if let Err(error) = added {
            tracing::warn!(%error, "if the daemon dies with the job of a mount, the mount stays");
        }
    }

    /// The job list of its file system.
    pub(super) fn job_list(&self) -> Option<&JobList> {
        self.file_system.job_list.as_ref()
    }

    /// Sets whether another mount of its file system may have ended that. Returns what it was.
    pub(super) fn set_shared(&self, was_shared: bool) -> bool {
        self.file_system.endings.set_shared(was_shared)
    }

    /// Whether its monitor mounts again, because it has lost its connection.
    pub(super) fn was_aborted(&self) -> bool {
        self.ending.was_aborted()
    }

    /// Whether the job of the process that keeps it has ended.
    pub(super) fn has_job_ended(&self) -> bool {
        let group = self.monitor.get().and_then(|(_, group)| group.as_ref());
        group.is_some_and(ControlGroup::has_ended)
    }

    pub(super) fn set_link(&self, link: &Arc<Link>) {
        self.link.get_or_init(|| Arc::clone(link));
    }

    /// The link to its monitor, which can have another process continue with it.
    ///
    /// # Errors
    /// If no other process can continue, or the monitor is dead.
    pub(super) fn link_to_continue(&self) -> Result<&Link, Failure> {
        let failure = |text: &str, advice: &str| {
            let target = self.mount.target();
            let mountpoint = target.mountpoint.display();
            Failure::new(format!(
                "{text} {mountpoint}{advice} `tarfs umount {mountpoint}` ends it"
            ))
        };
        if !self.state().can_be_continued() {
            let advice = ", which needs Linux 6.9 and a source with a strong version;";
            return Err(failure("no other process can continue with", advice));
        }
        let link = self.link.get().filter(|link| !link.is_closed());
        let advice = " was killed, so no other process can continue with the mount;";
        link.map(|link| &**link)
            .ok_or_else(|| failure("the process that keeps", advice))
    }

    /// State for a successor of this process.
    pub(super) fn state(&self) -> SessionState {
        SessionState {
            capabilities: self.mount.capabilities(),
            version: version_for_packet(&self.opened.version),
            is_strong: self.opened.is_strong,
        }
    }

    /// Ends its service.
    pub(super) fn release(&self) {
        self.ending.reach();
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
        let (own, shared) = (
            self.file_system.stats.snapshot(),
            self.opened.stats.snapshot(),
        );
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
    pub(super) fn status(&self, process: &ProcessFigures) -> Status {
        let (mount, opened) = (&self.mount, &self.opened);
        // Taken first, because the notes explain states that it reports.
        let copy = self.copy.as_ref().map(MountCopy::progress);
        let notes = self.notes();
        let target = mount.target();
        let current = target.find();
        let detached = matches!(current, Ok(None));
        let current = current.ok().flatten();
        let mountpoint = current.map_or_else(|| target.mountpoint.clone(), |found| found.path);
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
            mount_id: self.mount_id(),
            detached,
            pid: std::process::id(),
            monitor: self.monitor.get().map(|(pid, _)| *pid),
            daemon: process.is_daemon,
            since_unix_seconds: unix_seconds(mount.mounted_at),
            version: opened.version.clone(),
            tree: opened.number,
            entries,
            index: opened.index(),
            resident_bytes: process.resident_bytes,
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
        let left_out = left_out.then(|| *self.file_system.left_out_xattrs.get_or_init(count));
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
