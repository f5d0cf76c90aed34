//! A mount from its beginning to its end.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant, SystemTime};

use fuser::{Config, Session, SessionACL};
use rustix::fs::{major, makedev, minor};

use super::kernel_cache::KernelCache;
use super::mountinfo::{Attachment, TopMount};
use super::namespace::{Namespace, OpenNamespace};
use super::options::MountOptions;
use super::overlay::{self, OverlayKind, UpperDirs};
use super::recent_errors::{RecentError, RecentErrors};
use super::syscalls::{self, MountError, UnmountError};
use super::takeover::{self, InheritedSession, MountTarget};
use super::{INodeNo, OpenFiles, TarFilesystem, invalidate, mountinfo};
use crate::archive::PageCache;
use crate::base::thread::Thread;

/// Threads that take requests. They only look up and copy, so two keep up with the kernel; four
/// doubled the CPU time and gained nothing. They share one descriptor: one each (`clone_fd`) made
/// no difference that could be measured.
const REQUEST_THREADS: usize = 2;

/// How long a fresh mount may take to answer its first stat, which waits for nothing but threads.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a session may take to notice that its connection has ended.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connection may take to end once nothing is mounted here: what lay over the mount may end by and by.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How often a mount that is in use is tried again, and after what time: a process that is about to
/// start another program has for a moment whatever its threads have open.
const MAX_UNMOUNT_TRIES: u32 = 20;
/// See [`MAX_UNMOUNT_TRIES`].
const UNMOUNT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The most mounts of one file system that are taken out when nobody serves it any more.
const MAX_DEAD_MOUNTS: u32 = 1000;

/// Read-ahead of the kernel. FUSE grants 128 KiB when it starts; 1 MiB makes sequential reads
/// faster and larger values do not.
const READ_AHEAD_KIB: u32 = 1024;

/// Whether to unmount under the feet of those who use a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Force {
    /// Not: they come first.
    No,
    /// Yes: what they read next fails.
    Yes,
}

/// A tree in the filesystem. Dropping it unmounts, by force if need be.
#[derive(Debug)]
pub struct Mount {
    target: MountTarget,
    /// `st_dev` of the mount itself, which tells it from whatever is there before or later; `None`
    /// until it has answered.
    device: Option<u64>,
    capabilities: u64,
    mounted_at: SystemTime,
    recent_errors: Arc<RecentErrors>,
    open_files: Option<Arc<OpenFiles>>,
    session: Option<Thread<()>>,
    /// Where the kernel asks.
    connection: OwnedFd,
    /// Tells the kernel of changes; ends with the session.
    _invalidator: Option<Thread<()>>,
    kernel_cache: Arc<KernelCache>,
    /// Closes when the session has ended.
    session_end: Receiver<()>,
}

impl Mount {
    /// Whether `mountpoint` can be mounted on, as far as can be told without mounting; for those
    /// who have long work to do first.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn check(mountpoint: &Path) -> Result<(), MountError> {
        syscalls::open_mountpoint(mountpoint)?;
        syscalls::check_available()
    }

    /// What a mount on `mountpoint` would hide, in words, if anything: another mount, or files.
    pub fn describe_hidden(mountpoint: &Path) -> Option<String> {
        let mountpoint = syscalls::open_mountpoint(mountpoint).ok()?;
        let mountpoint = mountpoint.path().ok()?;
        // Who is asked for a listing may not answer for long: a mount is not.
        if let Some(kind) = mountinfo::fs_type_at(&mountpoint).ok()? {
            return Some(format!("a mount of the type {kind}"));
        }
        let is_empty = fs::read_dir(&mountpoint).ok()?.next().is_none();
        (!is_empty).then(|| "what is in that directory".to_owned())
    }

    /// Mounts `filesystem` on the directory `mountpoint` and returns when the mount answers. `source`
    /// is what mount(8) lists unless the options say otherwise. `on_end` is called on the mount's
    /// own thread once nothing is mounted any more, whoever unmounted it.
    ///
    /// # Errors
    /// When it cannot be mounted; then nothing is.
    pub fn start(
        filesystem: TarFilesystem,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        Self::start_with_callback(filesystem, source, mountpoint, options, |_, _| {}, on_end)
    }

    /// As [`start`](Self::start), and `on_mounted` is shown where it is and the descriptor on which the
    /// kernel asks, before anybody is answered.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_callback(
        filesystem: TarFilesystem,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        on_mounted: impl FnOnce(&MountTarget, BorrowedFd<'_>),
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let mountpoint = syscalls::open_mountpoint(mountpoint)?;
        let filesystem = filesystem.with_watchdog().map_err(MountError::System)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let mount = syscalls::mount(&mountpoint, source, options)?;
        // Where the table cannot be read nobody can clear up by it either.
        let found = if let Some(root) = &mount.root {
            mountinfo::find_by_root(root, syscalls::TARFS_FS_TYPE)
        } else {
            let path = mountpoint.path()?;
            let found = mountinfo::device_at(&path, syscalls::TARFS_FS_TYPE);
            found.map(|device| device.map(|device| (device, path)))
        };
        let Some((device, mountpoint)) = found.map_err(MountError::System)? else {
            return Err(MountError::NotReady);
        };
        let target = MountTarget {
            mountpoint,
            device,
            overlay: None,
            namespace: None,
        };
        on_mounted(&target, mount.device.as_fd());
        let session =
            |filesystem| Session::from_fd(filesystem, mount.device, SESSION_ACL, config());
        Self::serve(filesystem, target, mount.root, session, on_end)
    }

    /// Mounts on the directory `mountpoint` of another mount namespace. As
    /// [`start_with_callback`](Self::start_with_callback) otherwise.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_in_namespace(
        filesystem: TarFilesystem,
        source: &str,
        (namespace, mountpoint): (&OpenNamespace, &Path),
        options: &MountOptions,
        on_mounted: impl FnOnce(&MountTarget, BorrowedFd<'_>),
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let filesystem = filesystem.with_watchdog().map_err(MountError::System)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let mount = syscalls::create_detached(source, options)?;
        let target = MountTarget {
            mountpoint: mountpoint.to_owned(),
            device: mount.device_number()?,
            overlay: None,
            namespace: Some(namespace.namespace().clone()),
        };
        on_mounted(&target, mount.device.as_fd());
        namespace.attach(mount.clone_root()?, mountpoint)?;
        let session =
            |filesystem| Session::from_fd(filesystem, mount.device, SESSION_ACL, config());
        Self::serve(filesystem, target, mount.root, session, on_end)
    }

    /// Whether there is a FUSE device, and `mountpoint` is a directory of `namespace`.
    ///
    /// # Errors
    /// As [`start_in_namespace`](Self::start_in_namespace).
    pub fn check_in_namespace(
        namespace: &OpenNamespace,
        mountpoint: &Path,
    ) -> Result<(), MountError> {
        namespace.check(mountpoint)?;
        syscalls::check_available()
    }

    /// Goes on with a mount whose process has died, which was made of the same tree. As [`start`](Self::start) otherwise.
    ///
    /// # Errors
    /// When that cannot be done; then nothing is mounted any more.
    pub fn take_over(
        filesystem: TarFilesystem,
        inherited: &InheritedSession,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        if !is_still_mounted(&inherited.target, inherited.descriptor.as_fd()) {
            return Err(MountError::NotReady);
        }
        let filesystem = filesystem.with_watchdog().map_err(MountError::System)?;
        let session =
            |filesystem| takeover::take_over_session(filesystem, inherited, SESSION_ACL, config());
        let target = MountTarget {
            mountpoint: inherited.target.current_mountpoint(),
            ..inherited.target.clone()
        };
        Self::serve(filesystem, target, None, session, on_end)
    }

    /// Serves `filesystem` at `target`, whose root is `root` if it is open.
    fn serve(
        filesystem: TarFilesystem,
        target: MountTarget,
        root: Option<OwnedFd>,
        session: impl FnOnce(TarFilesystem) -> io::Result<Session<TarFilesystem>>,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let recent_errors = Arc::clone(&filesystem.recent_errors);
        let kernel_cache = Arc::clone(&filesystem.kernel_cache);
        let cache = Arc::clone(&kernel_cache);
        let content = Arc::clone(&filesystem.content);
        let open_files = filesystem
            .backing_io
            .as_ref()
            .map(|backing_io| Arc::clone(&backing_io.open_files));
        let capabilities = Arc::clone(&filesystem.capabilities);
        let session = match session(filesystem) {
            Ok(session) => session,
            Err(error) => {
                unmount_or_force(&target);
                return Err(MountError::System(error));
            }
        };
        kernel_cache.attach(session.notifier());
        let invalidator = invalidate::start(&content, &kernel_cache)
            .inspect_err(|_| unmount_or_force(&target))?;
        let connection = session.as_fd().try_clone_to_owned().inspect_err(|_| {
            kernel_cache.detach();
            unmount_or_force(&target);
        });
        let connection = connection.map_err(MountError::System)?;
        let (end_sender, end) = mpsc::channel();
        let thread = Thread::spawn("fuse", move || {
            if let Err(error) = session.run() {
                tracing::error!(%error, "the FUSE session failed");
            }
            kernel_cache.detach();
            drop(end_sender);
            on_end();
        });
        let session = thread.map_err(|error| {
            // Or the one with the news would not end.
            cache.detach();
            unmount_or_force(&target);
            MountError::System(error)
        })?;
        let mut mount = Self {
            target,
            device: None,
            capabilities: capabilities.get().copied().unwrap_or(0),
            mounted_at: SystemTime::now(),
            recent_errors,
            open_files,
            session: Some(session),
            connection,
            _invalidator: invalidator,
            kernel_cache: cache,
            session_end: end,
        };
        let device = mount.wait_until_ready(root)?;
        mount.device = Some(device);
        let (major, minor) = mount.target.device;
        let seen = makedev(major, minor);
        // No path of this process leads into another namespace.
        if mount.target.namespace.is_none() {
            mount
                .kernel_cache
                .set_mountpoint(&mount.target.mountpoint, seen);
        }
        content.set_page_cache(Arc::clone(&mount.kernel_cache) as Arc<dyn PageCache>);
        set_read_ahead(device);
        Ok(mount)
    }

    /// Whether something can be made writable here, as far as can be told without mounting.
    ///
    /// # Errors
    /// When neither overlayfs nor fuse-overlayfs can be had.
    pub fn check_writable() -> Result<(), MountError> {
        overlay::check_available()
    }

    /// Lays a tree over this mount on `mountpoint` that can be written to, and takes the mount itself out
    /// of the tree: from now on this is that tree. What is written goes to `upper`. `on_overlaid` is shown
    /// where it is, at once.
    ///
    /// # Errors
    /// When that cannot be done; the mount is as it was.
    pub fn add_overlay(
        &mut self,
        upper: &UpperDirs,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        on_overlaid: impl FnOnce(&MountTarget),
    ) -> Result<(), MountError> {
        let mountpoint = syscalls::open_mountpoint(mountpoint)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let lower = &self.target.mountpoint;
        let overlay = overlay::mount_overlay(lower, upper, &mountpoint, source, options)?;
        let mountpoint = mountpoint.path()?;
        let found = mountinfo::device_at(&mountpoint, overlay.fs_type());
        let found = found.map_err(MountError::System);
        let device = match found.and_then(|device| device.ok_or(MountError::NotReady)) {
            Ok(device) => device,
            Err(error) => {
                if let Err(error) = syscalls::unmount(overlay.fs_type(), &mountpoint, None, true) {
                    tracing::warn!(%error, "cannot unmount");
                }
                return Err(error);
            }
        };
        let target = MountTarget {
            mountpoint,
            device,
            overlay: Some((overlay, self.target.lower_device())),
            namespace: None,
        };
        on_overlaid(&target);
        let (major, minor) = target.device;
        self.kernel_cache
            .set_mountpoint(&target.mountpoint, makedev(major, minor));
        let lower_target = std::mem::replace(&mut self.target, target);
        // It lives on below, and ends with what lies above.
        let detached = syscalls::detach_if(
            syscalls::TARFS_FS_TYPE,
            &lower_target.mountpoint,
            lower_target.device,
            |_| true,
        );
        detached.map_err(|error| {
            let overlay_target = std::mem::replace(&mut self.target, lower_target);
            let device = Some(overlay_target.device);
            if let Err(error) = syscalls::unmount(
                overlay_target.fs_type(),
                &overlay_target.mountpoint,
                device,
                true,
            ) {
                tracing::warn!(%error, "cannot unmount");
            }
            MountError::System(io::Error::other(error))
        })
    }

    /// What makes it writable, if anything does.
    pub fn overlay_kind(&self) -> Option<OverlayKind> {
        self.target.overlay.map(|(overlay, _)| overlay)
    }

    /// Where it is mounted: absolute, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.target.mountpoint
    }

    /// Where it is now: a directory above it may have another name since. `None` when it is detached.
    ///
    /// # Errors
    /// When the kernel's table of mounts cannot be read.
    pub fn attachment(&self) -> io::Result<Option<Attachment>> {
        self.target.find()
    }

    /// Major and minor number of what is seen there, which no other mount of the machine has.
    pub fn device(&self) -> (u32, u32) {
        self.target.device
    }

    /// What the kernel offered when it was mounted, a bit each, as an [`InheritedSession`] needs it.
    pub fn capabilities(&self) -> u64 {
        self.capabilities
    }

    /// When it was mounted.
    pub fn mounted_at(&self) -> SystemTime {
        self.mounted_at
    }

    /// The last reads that failed, oldest first.
    pub fn recent_errors(&self) -> Vec<RecentError> {
        self.recent_errors.recent()
    }

    /// Why the kernel does not read copies of files by itself; `None` as long as it does, and where
    /// there are none.
    pub fn passthrough_disabled_reason(&self) -> Option<String> {
        self.open_files.as_ref()?.disabled_reason()
    }

    /// Takes it out of the filesystem. The session ends soon after, unless there are other mounts of it.
    ///
    /// # Errors
    /// [`UnmountError::Busy`] when it is in use and `force` is [`Force::No`];
    /// [`UnmountError::NotMounted`] when something else is on top of it or it is gone already.
    pub fn unmount(&self, force: Force) -> Result<(), UnmountError> {
        retry_while_busy(|| self.unmount_once(force == Force::Yes))
    }

    fn unmount_once(&self, force: bool) -> Result<(), UnmountError> {
        if force && self.target.has_bind_mounts() {
            return self.target.detach(self.connection.as_fd());
        }
        self.target.unmount(force, Some(self.connection.as_fd()))
    }

    /// The mount namespace that it is in, unless that is this process's own.
    pub fn namespace(&self) -> Option<&Namespace> {
        self.target.namespace.as_ref()
    }

    /// Whether it is in the tree.
    pub fn is_mounted(&self) -> bool {
        self.target.is_mounted()
    }

    /// Whether it is in use still, once it was unmounted, by a bind mount, an overlay or another mount
    /// namespace: then its connection does not end.
    pub fn is_still_in_use(&self) -> bool {
        if self.is_mounted() {
            return true;
        }
        let deadline = Instant::now() + DISCONNECT_TIMEOUT;
        while syscalls::is_connected(&self.connection) {
            if Instant::now() > deadline {
                return true;
            }
            std::thread::sleep(DISCONNECT_TIMEOUT / 100);
        }
        false
    }

    /// The device number that the mount's first answer carries. Asked from a thread of its own:
    /// a mount that does not answer must not take its owner with it.
    fn wait_until_ready(&self, root: Option<OwnedFd>) -> Result<u64, MountError> {
        let (sender, answer) = mpsc::channel();
        let path = self.target.mountpoint.clone();
        let (major, minor) = self.target.device;
        let device = makedev(major, minor);
        // What lies over it answers for it, by a root of its own.
        let has_overlay = self.target.overlay.is_some();
        let (major, minor) = self.target.lower_device();
        let own_device = makedev(major, minor);
        let _stat_thread = Thread::spawn("fuse-ready", move || {
            // Nobody listens any more when the deadline has passed.
            drop(sender.send(match root {
                Some(root) => File::from(root).metadata(),
                None => fs::symlink_metadata(path),
            }));
        })
        .map_err(MountError::System)?;
        let error = match answer.recv_timeout(READY_TIMEOUT) {
            Ok(Ok(found))
                if found.st_dev() == device
                    && (has_overlay || found.st_ino() == INodeNo::ROOT.0) =>
            {
                return Ok(own_device);
            }
            Ok(Err(error)) => MountError::System(error),
            Ok(Ok(_)) | Err(_) => MountError::NotReady,
        };
        // Ends the asking thread's wait, whether or not it can be unmounted.
        unmount_or_force(&self.target);
        abort_connection(own_device);
        Err(error)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else {
            return;
        };
        self.kernel_cache.detach();
        if let Some(device) = self.device {
            unmount_then_force(|force| self.unmount_once(force));
            let is_running = self.session_end.recv_timeout(SESSION_END_TIMEOUT) == Err(TIMED_OUT);
            if is_running && syscalls::is_connected(&self.connection) {
                abort_connection(device);
            }
        }
        match self.session_end.recv_timeout(SESSION_END_TIMEOUT) {
            Err(TIMED_OUT) => {
                tracing::warn!("the mount is still in use, and ends with this process");
                std::mem::forget(session);
            }
            _ => session.join(),
        }
    }
}

/// `path` as a [`Mount`] names its mountpoint: absolute, without symbolic links. Works for a mount
/// whose process has died, too.
///
/// # Errors
/// When there is nothing there.
pub fn canonical_mountpoint(path: &Path) -> io::Result<PathBuf> {
    mountinfo::canonicalize(path)
}

/// The mount on top at `mountpoint` (see [`canonical_mountpoint`]), of whatever type, as far as this process sees
/// mounts: another one may see others.
///
/// # Errors
/// When the kernel's table of mounts cannot be read.
pub fn top_mount(mountpoint: &Path) -> io::Result<Option<TopMount>> {
    mountinfo::top_mount(mountpoint)
}

/// Whether a file system of this number is mounted, as a whole or in part, as far as this process sees
/// mounts.
pub fn is_mounted(device: (u32, u32)) -> bool {
    mountinfo::count_mounts(device).is_ok_and(|count| count > 0)
}

/// Takes `copy` out, which is on `mountpoint` (see [`canonical_mountpoint`]) and another mount of what a process
/// serves, such as a bind mount. `force` does so although it is in use; its users go on with it, because
/// an end of the connection would be the end of all mounts.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn unmount_bind_mount(
    mountpoint: &Path,
    copy: &TopMount,
    force: Force,
) -> Result<(), UnmountError> {
    match force {
        Force::No => unmount_at(&copy.fs_type, mountpoint, Some(copy.device), force),
        Force::Yes => syscalls::detach_if(&copy.fs_type, mountpoint, copy.device, |_| true),
    }
}

/// Takes out whatever archive is mounted on `mountpoint` (see [`canonical_mountpoint`]), by whichever
/// process, and nothing that is not an archive; where `device` is given, what has that number only.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn unmount(
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    force: Force,
) -> Result<(), UnmountError> {
    let fs_type = if overlay::is_tarfs_overlay(mountpoint).unwrap_or(false) {
        OverlayKind::Overlayfs.fs_type()
    } else {
        syscalls::TARFS_FS_TYPE
    };
    unmount_at(fs_type, mountpoint, device, force)
}

/// Takes out the mount at `target` that nobody serves any more, and its bind mounts, under the feet of those
/// who use it.
/// `device` is its connection: as long as somebody holds that, no other mount has its number.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn clear_dead_mounts(target: &MountTarget, device: BorrowedFd<'_>) -> Result<(), UnmountError> {
    if !syscalls::is_connected(device) {
        return Ok(());
    }
    for _ in 0..MAX_DEAD_MOUNTS {
        match target.unmount(true, Some(device)) {
            Ok(()) if target.is_mounted() => {}
            Ok(()) | Err(UnmountError::NotMounted(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the mount at `target`, whose connection `device` is, is in the tree, be it below another one.
pub fn is_still_mounted(target: &MountTarget, device: BorrowedFd<'_>) -> bool {
    syscalls::is_connected(device) && target.is_mounted()
}

/// Unmounts what is of the type `fs_type` at `mountpoint`, that of the number `device` only if one is
/// given. For the moment in which names are listed to the kernel the mount is in use by itself (see
/// [`super::dentries`]), so who comes first does not give up at once.
fn unmount_at(
    fs_type: &str,
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    force: Force,
) -> Result<(), UnmountError> {
    retry_while_busy(|| syscalls::unmount(fs_type, mountpoint, device, force == Force::Yes))
}

/// Calls `unmount` again for a moment while the mount is in use.
fn retry_while_busy(unmount: impl Fn() -> Result<(), UnmountError>) -> Result<(), UnmountError> {
    for _ in 0..MAX_UNMOUNT_TRIES {
        match unmount() {
            Err(UnmountError::Busy(_)) => std::thread::sleep(UNMOUNT_RETRY_INTERVAL),
            result => return result,
        }
    }
    unmount()
}

const TIMED_OUT: mpsc::RecvTimeoutError = mpsc::RecvTimeoutError::Timeout;

/// Unmounts the mount at `target`, if need be by force.
fn unmount_or_force(target: &MountTarget) {
    unmount_then_force(|force| target.unmount(force, None));
}

/// Calls `unmount` without force, and with force if that fails. A mount that is gone is no failure.
fn unmount_then_force(unmount: impl Fn(bool) -> Result<(), UnmountError>) {
    let result = unmount(false).or_else(|error| match error {
        UnmountError::NotMounted(_) | UnmountError::NotOwner { .. } => Err(error),
        UnmountError::Busy(_) | UnmountError::System { .. } => unmount(true),
    });
    match result {
        Ok(()) | Err(UnmountError::NotMounted(_)) => {}
        Err(error) => tracing::warn!(%error, "cannot unmount"),
    }
}

/// Ends the kernel's side of a connection whose mount was only detached; root's umount(2) has
/// done so already, others depend on the control filesystem being mounted.
fn abort_connection(device: u64) {
    let abort = format!("/sys/fs/fuse/connections/{}/abort", minor(device));
    if let Err(error) = fs::write(&abort, "1") {
        tracing::debug!(%error, abort, "cannot cut the connection");
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config.n_threads = Some(REQUEST_THREADS);
    config
}

/// Whom the library answers: everybody who gets past the kernel, which keeps others than the mount's
/// owner out unless `allow_other` is given. The library cannot check, because the kernel names no
/// user in requests of a mount that can be idmapped (Linux 6.12).
const SESSION_ACL: SessionACL = SessionACL::All;

/// Raises the kernel's read-ahead, for which FUSE has no word of its own. Root only; without it
/// reads are correct and smaller.
fn set_read_ahead(device: u64) {
    let file = format!(
        "/sys/class/bdi/{}:{}/read_ahead_kb",
        major(device),
        minor(device)
    );
    if let Err(error) = fs::write(&file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!(%error, file, "read-ahead stays as it is");
    }
}
