//! A mount session, from mount to unmount.

use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use fuser::{Config, INodeNo, Session, SessionACL};
use rustix::fs::{major, makedev, minor};

use super::error::{MountError, UnmountError};
use super::mountinfo::{self, TopMount};
use super::namespace::OpenNamespace;
use super::new_mount::NewMount;
use super::options::MountOptions;
use super::overlay::{self, OverlayKind, UpperDirs};
use super::pinned::{UnmountMode, proc_fd_path};
use super::served_file_system::{ServedFileSystem, abort_connection};
use super::superblock::SuperblockWatch;
use super::syscalls::{self, TARFS_FS_TYPE};
use super::takeover::{self, InheritedSession};
use super::target::MountTarget;
use crate::archive::PageCache;
use crate::base::sync::RwLock;
use crate::base::thread::Thread;
use crate::base::wait::wait_until;
use crate::fuse::archives::DirectoryStatus;
use crate::fuse::filesystem::TarFilesystem;
use crate::fuse::push::MountRoot;
use crate::fuse::recent_errors::RecentError;

/// Number of threads that take requests. They only look up and copy, so two keep up with the kernel. Four
/// doubled the CPU time for no gain. A descriptor for each (`clone_fd`) made no difference.
const REQUEST_THREADS: usize = 2;

/// Timeout of a new mount's first stat(2), which waits for nothing but threads.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for a connection to end after the unmount. An overlay may hold it for a moment longer.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum number of retries while busy. A process that executes another holds open files for a moment.
const MAX_UNMOUNT_TRIES: u32 = 20;
const UNMOUNT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum number of mounts of a dead file system to unmount.
const MAX_DEAD_MOUNTS: u32 = 1000;

/// Read-ahead of the kernel, instead of 128 KiB. Larger values are not faster.
const READ_AHEAD_KIB: u32 = 1024;

/// Whether to unmount a mount that is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Force {
    /// Fail if the mount is in use.
    No,
    /// Unmount it. Later reads of its users fail.
    Yes,
}

impl Force {
    fn mode(self) -> UnmountMode {
        match self {
            Self::No => UnmountMode::IfIdle,
            Self::Yes => UnmountMode::Force,
        }
    }
}

/// A served mount. Dropping it unmounts, by force if necessary.
#[derive(Debug)]
pub struct Mount {
    /// The place of the mount or its overlay. The mountpoint is that at the time of the mount.
    target: RwLock<MountTarget>,
    /// Time of the mount.
    pub mounted_at: SystemTime,
    /// Reports the end of the file system, if the kernel accepts the watch. Set once the mount answers.
    end: RwLock<Option<Arc<SuperblockWatch>>>,
    /// Whether another process unmounts it.
    is_left: AtomicBool,
    served: Arc<ServedFileSystem>,
}

impl Mount {
    /// Checks, without mounting, whether `mountpoint` can be mounted on.
    ///
    /// # Errors
    /// As [`NewMount::on`].
    pub fn check(mountpoint: &Path) -> Result<(), MountError> {
        syscalls::open_mountpoint(mountpoint)?;
        syscalls::check_available()
    }

    /// Describes what a mount on `mountpoint` would hide: another mount, or files.
    pub fn describe_hidden(mountpoint: &Path) -> Option<String> {
        let mountpoint = syscalls::open_mountpoint(mountpoint).ok()?;
        let mountpoint = mountpoint.path().ok()?;
        // Check the table of mounts first: a mount may be slow to answer a listing.
        if let Some(top) = mountinfo::top_mount(&mountpoint).ok()? {
            return Some(format!("a mount of the type {}", top.fs_type));
        }
        let is_empty = fs::read_dir(&mountpoint).ok()?.next().is_none();
        (!is_empty).then(|| "what is in that directory".to_owned())
    }

    /// Serves `filesystem` on `mount`, and returns when the mount answers. Any last unmount calls `on_end`.
    ///
    /// # Errors
    /// When it cannot be served; then nothing is mounted.
    pub fn serve(
        filesystem: TarFilesystem,
        mount: NewMount,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let mount = mount.give();
        let (target, root) = (mount.target, mount.root);
        let device = mount.device.ok_or(MountError::NotReady);
        let served = device.and_then(|device| {
            let session = |filesystem| Session::from_fd(filesystem, device, SESSION_ACL, config());
            Self::serve_session(filesystem, (&target, false), root, session, on_end)
        });
        served.inspect_err(|_| unmount_or_force(&target))
    }

    /// The mount at `target`, which another process has made of a [`template`](Self::template). Both are served until the
    /// last one is dropped.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn join(&self, target: MountTarget) -> Result<Self, MountError> {
        if !syscalls::is_connected(&self.served.connection) {
            return Err(MountError::NotReady);
        }
        // That of an overlay reports the end of the overlay.
        let has_own_end = self.target().overlay.is_some() || target.overlay.is_some();
        let end = if has_own_end {
            SuperblockWatch::try_on(&target.mountpoint).map(Arc::new)
        } else {
            self.end()
        };
        Ok(Self {
            target: RwLock::new(target),
            mounted_at: SystemTime::now(),
            end: RwLock::new(end),
            is_left: AtomicBool::default(),
            served: Arc::clone(&self.served),
        })
    }

    /// As [`check`](Self::check), for the directory `mountpoint` in `namespace`.
    ///
    /// # Errors
    /// As [`NewMount::in_namespace`].
    pub fn check_in_namespace(
        namespace: &OpenNamespace,
        mountpoint: &Path,
    ) -> Result<(), MountError> {
        namespace.check(mountpoint)?;
        syscalls::check_available()
    }

    /// As [`serve`](Self::serve), on a mount whose process has died. `filesystem` must show the same tree.
    ///
    /// # Errors
    /// When the takeover fails. Then another process may try.
    pub fn take_over(
        filesystem: TarFilesystem,
        inherited: &InheritedSession,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let is_connected = syscalls::is_connected(&inherited.descriptor);
        if !is_connected || !inherited.target.is_mounted() {
            return Err(MountError::NotReady);
        }
        let session =
            |filesystem| takeover::take_over_session(filesystem, inherited, SESSION_ACL, config());
        let target = MountTarget {
            mountpoint: inherited.target.current_mountpoint(),
            ..inherited.target.clone()
        };
        Self::serve_session(filesystem, (&target, true), None, session, on_end)
    }

    fn serve_session(
        filesystem: TarFilesystem,
        (target, is_inherited): (&MountTarget, bool),
        root: Option<OwnedFd>,
        session: impl FnOnce(TarFilesystem) -> io::Result<Session<TarFilesystem>>,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let kernel_cache = Arc::clone(&filesystem.state.kernel_cache);
        let volume = Arc::clone(&filesystem.volume);
        let filesystem = filesystem.with_watchdog().map_err(MountError::from);
        let started =
            filesystem.and_then(|filesystem| ServedFileSystem::start(filesystem, session, on_end));
        let mount = Self {
            target: RwLock::new(target.clone()),
            mounted_at: SystemTime::now(),
            end: RwLock::new(None),
            is_left: AtomicBool::default(),
            served: Arc::new(started.inspect_err(|_| kernel_cache.detach())?),
        };
        let (device, end) = mount.wait_until_ready(root, is_inherited)?;
        mount.served.device.get_or_init(|| device);
        *mount.end.write() = end.map(Arc::new);
        // Paths of this process do not reach another namespace.
        if target.namespace.is_none() {
            kernel_cache.set_root(MountRoot::at(&target.mountpoint, target.device));
        }
        volume.add_page_cache(kernel_cache as Arc<dyn PageCache>);
        set_read_ahead(device);
        Ok(mount)
    }

    /// Checks, without mounting, that an overlay can be mounted.
    ///
    /// # Errors
    /// When neither overlayfs nor fuse-overlayfs is available.
    pub fn check_writable() -> Result<(), MountError> {
        overlay::check_available()
    }

    /// The place of the mount, or of the overlay over it.
    pub fn target(&self) -> MountTarget {
        self.target.read().clone()
    }

    /// The capability bits that the kernel offered, for an [`InheritedSession`].
    pub fn capabilities(&self) -> u64 {
        self.served.capabilities
    }

    /// The FUSE device of the connection.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.served.connection.as_fd()
    }

    /// Whether both are mounts of one served file system.
    pub fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.served, &other.served)
    }

    /// A detached mount of the file system, of which other processes can make mounts. The file system does not end while one
    /// has it.
    pub fn template(&self) -> Option<Arc<OwnedFd>> {
        self.served.template.lock().clone()
    }

    /// Sets that, unless it has one.
    pub fn set_template(&self, template: Option<Arc<OwnedFd>>) {
        self.served.share_by(template);
    }

    /// Whether other processes can make mounts of it now.
    pub fn can_be_copied(&self) -> bool {
        self.template().is_some() && syscalls::is_connected(&self.served.connection)
    }

    /// Lets the file system end with its last mount, unless a process is making another one.
    pub fn stop_sharing(&self) {
        self.served.stop_sharing();
    }

    /// Whether the mount is in the tree of mounts, as far as is known. Sends no request.
    pub fn is_attached(&self) -> bool {
        let target = self.target();
        let can_be_told = target.mount_id.is_some() || target.overlay.is_some();
        !can_be_told || target.is_attached()
    }

    /// Makes a template of the mount itself, if the kernel can, and the mount still has the attributes of `options`.
    pub fn make_template(&self, options: &MountOptions) -> Option<Arc<OwnedFd>> {
        let target = self.target();
        let mount_id = target.mount_id.filter(|_| target.overlay.is_none())?;
        if !syscalls::has_attributes(mount_id, options) {
            return None;
        }
        let template = syscalls::copy_mount_at(&target.mountpoint, mount_id);
        let template = template.inspect_err(|error| {
            tracing::debug!(%error, "no other mount shares it");
        });
        template.ok().map(Arc::new)
    }

    /// A watch for the end of the file system, if the kernel accepts one.
    pub fn end(&self) -> Option<Arc<SuperblockWatch>> {
        self.end.read().clone()
    }

    /// From now on the mount is the overlay at `target`, which another process has mounted over it.
    pub fn cover(&self, target: MountTarget) {
        let root = MountRoot::at(&target.mountpoint, target.device);
        self.served.kernel_cache.set_root(root);
        // If the process of fuse-overlayfs dies, the mount below it ends, and the overlay stays.
        *self.end.write() = SuperblockWatch::try_on(&target.mountpoint).map(Arc::new);
        *self.target.write() = target;
    }

    /// The last failed reads, oldest first.
    pub fn recent_errors(&self) -> Vec<RecentError> {
        self.served.recent_errors.recent()
    }

    /// Numbers of a directory of archives; `None` for any other mount.
    pub fn directory_status(&self) -> Option<DirectoryStatus> {
        Some(self.served.archives.as_ref()?.status())
    }

    /// Why passthrough is disabled; `None` while it is possible, and without backing files.
    pub fn passthrough_disabled_reason(&self) -> Option<String> {
        self.served.open_files.as_ref()?.disabled_reason()
    }

    /// Unmounts it. The session ends soon after, unless there are other mounts of it.
    ///
    /// # Errors
    /// [`UnmountError::Busy`] when in use and `force` is [`Force::No`]; [`UnmountError::NotMounted`] when
    /// covered by another mount or unmounted before.
    pub fn unmount(&self, force: Force) -> Result<(), UnmountError> {
        retry_while_busy(|| self.unmount_once(force))
    }

    fn unmount_once(&self, force: Force) -> Result<(), UnmountError> {
        if self.has_ended() {
            // Opening the mountpoint would make the next mount there busy.
            return Err(UnmountError::NotMounted(self.target().mountpoint));
        }
        let target = self.target();
        let mode = match force {
            Force::Yes if target.has_bind_mounts() || self.template().is_some() => {
                UnmountMode::Detach
            }
            force => force.mode(),
        };
        target.unmount(mode, Some(self.served.connection.as_fd()))
    }

    /// Whether the file system has ended with its last mount and user. False if that is unknown.
    fn has_ended(&self) -> bool {
        !syscalls::is_connected(&self.served.connection)
            && (!self.target().is_mounted() || has_ended(self.end().as_deref()))
    }

    /// Leaves it to another process, which unmounts it.
    pub fn leave(&self) {
        self.is_left.store(true, Ordering::SeqCst);
    }

    /// Whether it is attached, even if covered by another.
    pub fn is_mounted(&self) -> bool {
        let end = self.end();
        is_still_mounted(
            &self.target(),
            self.served.connection.as_fd(),
            end.as_deref(),
        )
    }

    /// Whether a bind mount, an overlay or another namespace still uses it. Then its connection does not end.
    pub fn is_still_in_use(&self) -> bool {
        let has_ended = || !syscalls::is_connected(&self.served.connection);
        self.is_mounted() || !wait_until(DISCONNECT_TIMEOUT, DISCONNECT_TIMEOUT / 100, has_ended)
    }

    /// Waits until the mount answers, and returns its device number, and a watch for its end. A thread asks, because
    /// it could block. A mount that no path reaches is ready without an answer, because another one covers it.
    fn wait_until_ready(
        &self,
        root: Option<OwnedFd>,
        is_inherited: bool,
    ) -> Result<(u64, Option<SuperblockWatch>), MountError> {
        let (sender, answer) = mpsc::channel();
        let target = self.target();
        let path = target.mountpoint.clone();
        let number = |(major, minor)| makedev(major, minor);
        let device = number(target.device);
        // An overlay answers with its own root and device number.
        let has_overlay = target.overlay.is_some();
        let own_device = number(target.lower_device());
        let is_own = move |found: &Metadata| {
            found.st_dev() == device && (has_overlay || found.st_ino() == INodeNo::ROOT.0)
        };
        let stat_thread = Thread::spawn("tarfs-ready", move || {
            let path = root.as_ref().map_or(path, proc_fd_path);
            let found = fs::metadata(&path);
            let end = found.as_ref().ok().filter(|found| is_own(found));
            let end = end.and_then(|_| SuperblockWatch::try_on(&path));
            // The descriptor keeps the mount in use.
            drop(root);
            // The receiver may have timed out.
            drop(sender.send((found, end)));
        })?;
        let answer = answer.recv_timeout(READY_TIMEOUT);
        let waiting = answer.is_err().then_some(stat_thread);
        let is_elsewhere = is_inherited && answer.is_ok() && self.is_known_to_be_attached();
        let error = match answer {
            Ok((Ok(found), end)) if is_own(&found) => return Ok((own_device, end)),
            Ok((Err(error), _)) => MountError::System(error),
            Ok((Ok(_), _)) | Err(_) => MountError::NotReady,
        };
        // The process answers then, whatever this one mount does.
        let is_answered = is_inherited && !has_overlay && self.is_one_of_several(waiting.is_some());
        if is_elsewhere || is_answered || self.is_covered() {
            // The thread may wait for ever.
            std::mem::forget(waiting);
            return Ok((own_device, None));
        }
        if !is_inherited {
            unmount_or_force(&target);
        } else if let Err(error) = target.detach() {
            tracing::debug!(%error, "the mount stays");
        }
        // Overlays that share the connection have other numbers.
        let is_shared = is_inherited && (has_overlay || is_mounted(target.lower_device()));
        if is_shared {
            // It may wait until another process continues with the connection.
            std::mem::forget(waiting);
        } else {
            // This ends the wait of the asking thread, even if the mount cannot be unmounted.
            abort_connection(own_device);
        }
        Err(error)
    }

    /// Whether its connection lives, and has another mount, or any if this one is not silent.
    fn is_one_of_several(&self, is_silent: bool) -> bool {
        let target = self.target();
        let device = target.lower_device();
        let has_mounts = if is_silent && target.is_attached() {
            mountinfo::has_several_mounts(device)
        } else {
            is_mounted(device)
        };
        has_mounts && syscalls::is_connected(&self.served.connection)
    }

    /// Whether its unique number is in the tree of mounts, and its connection lives.
    fn is_known_to_be_attached(&self) -> bool {
        let target = self.target();
        let is_unique = target.mount_id.is_some();
        is_unique && target.is_attached() && syscalls::is_connected(&self.served.connection)
    }

    /// Whether it is mounted below another mount, which hides it from all paths.
    fn is_covered(&self) -> bool {
        let target = self.target();
        let is_other = |top: Option<TopMount>| top.is_some_and(|top| top.device != target.device);
        target.namespace.is_none()
            && mountinfo::top_mount(&target.mountpoint).is_ok_and(is_other)
            && self.is_mounted()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let is_last = Arc::strong_count(&self.served) == 1;
        if is_last {
            self.served.detach();
        }
        // If it is gone, another one of the file system would be unmounted.
        let is_own = is_last || self.is_attached();
        let is_left = self.is_left.load(Ordering::SeqCst);
        if self.served.device.get().is_some() && is_own && !is_left {
            unmount_then_force(|force| self.unmount_once(force));
        }
    }
}

/// Mounts a writable overlay over the mount `lower` on `mountpoint`, and detaches the mount below. Changes are written to
/// `upper`. Calls `on_overlaid` with the place of the overlay before the detach.
///
/// # Errors
/// When the overlay cannot be mounted; the mount is then unchanged.
pub fn mount_overlay(
    lower: &MountTarget,
    upper: &UpperDirs,
    source: &str,
    mountpoint: &Path,
    options: &MountOptions,
    on_overlaid: impl FnOnce(&MountTarget),
) -> Result<MountTarget, MountError> {
    let mountpoint = syscalls::open_mountpoint(mountpoint)?;
    let source = options.fsname.as_deref().unwrap_or(source);
    let overlay = overlay::mount_overlay(&lower.mountpoint, upper, &mountpoint, source, options)?;
    let mountpoint = mountpoint.path()?;
    let device = mountinfo::device_at(&mountpoint, overlay.fs_type())
        .map_err(MountError::System)
        .and_then(|device| device.ok_or(MountError::NotReady))
        .inspect_err(|_| syscalls::unmount_or_warn(overlay.fs_type(), &mountpoint, None))?;
    let target = MountTarget {
        mountpoint,
        device,
        overlay: Some((overlay, lower.device)),
        namespace: None,
        mount_id: None,
    };
    on_overlaid(&target);
    // The overlay has cloned the mount and keeps it alive.
    let (below, device) = (&lower.mountpoint, Some(lower.device));
    let detached = syscalls::unmount(TARFS_FS_TYPE, below, device, UnmountMode::Detach);
    detached.map_err(|error| {
        syscalls::unmount_or_warn(overlay.fs_type(), &target.mountpoint, Some(target.device));
        MountError::from(io::Error::other(error))
    })?;
    Ok(target)
}

/// Whether this process sees any mount of the file system `device`, or of a part of it.
pub fn is_mounted(device: (u32, u32)) -> bool {
    mountinfo::count_mounts(device).is_ok_and(|count| count > 0)
}

/// Unmounts the mounts of this user that no process serves any more, because all their processes were killed. With `device`,
/// only those of that file system. Leaves those that are not dead any more after `delay`.
pub fn unmount_dead_mounts(device: Option<(u32, u32)>, delay: Duration) {
    let owner = format!("user_id={}", rustix::process::geteuid().as_raw());
    let mountpoints = mountinfo::mountpoints_with(TARFS_FS_TYPE, &owner, device);
    let mut mountpoints = mountpoints.unwrap_or_default();
    if !delay.is_zero() {
        mountpoints.retain(|mountpoint| syscalls::is_dead(mountpoint));
        std::thread::sleep(delay);
    }
    for mountpoint in mountpoints {
        syscalls::unmount_dead(&mountpoint);
    }
}

/// Unmounts `copy`, another mount of a served file system, such as a bind mount. `force` only detaches it,
/// because ending the connection would end all mounts of the file system.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn unmount_bind_mount(
    mountpoint: &Path,
    copy: &TopMount,
    force: Force,
) -> Result<(), UnmountError> {
    let mode = match force {
        Force::No => UnmountMode::IfIdle,
        Force::Yes => UnmountMode::Detach,
    };
    unmount_at(&copy.fs_type, mountpoint, Some(copy.device), mode)
}

/// Unmounts the archive at `mountpoint` (see [`canonical_mountpoint`](super::canonical_mountpoint)), mounted
/// by any process. Never unmounts anything but an archive. With `device`, unmounts only that file system.
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
        TARFS_FS_TYPE
    };
    // Others that share its connection are not meant.
    let mode = match force {
        Force::Yes if device.is_some_and(mountinfo::has_several_mounts) => UnmountMode::Detach,
        force => force.mode(),
    };
    unmount_at(fs_type, mountpoint, device, mode)
}

/// Unmounts the dead mount at `target`, and without a unique number its bind mounts, even while they are in use. `device` is
/// the connection's FUSE device. While it is open, its number is unique. `end` is the watch for the mount's end.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn clear_dead_mounts(
    target: &MountTarget,
    device: BorrowedFd<'_>,
    end: Option<&SuperblockWatch>,
) -> Result<(), UnmountError> {
    if target.mount_id.is_some() {
        // Others of its file system may be continued. Without others, a thread of the dead process may wait for the mount, and
        // keep the connection.
        let mode = if target.has_bind_mounts() {
            UnmountMode::Detach
        } else {
            UnmountMode::Force
        };
        return if target.is_attached() {
            target.unmount(mode, Some(device))
        } else {
            Ok(())
        };
    }
    if !is_still_mounted(target, device, end) {
        return Ok(());
    }
    for _ in 0..MAX_DEAD_MOUNTS {
        match target.unmount(UnmountMode::Force, Some(device)) {
            Ok(()) if !has_ended(end) && target.is_mounted() => {}
            Ok(()) | Err(UnmountError::NotMounted(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the mount at `target` with the connection `device` is attached, even if covered by another. Without a unique
/// number and a watch for its `end`, false for a mount whose connection was aborted. Sends no request, and opens no path.
pub fn is_still_mounted(
    target: &MountTarget,
    device: BorrowedFd<'_>,
    end: Option<&SuperblockWatch>,
) -> bool {
    // The kernel reuses the number of a file system that has ended. So the table is read before the watch.
    target.is_mounted()
        && (target.mount_id.is_some() && target.is_attached()
            || syscalls::is_connected(device)
            || end.is_some_and(|end| !end.has_ended()))
}

fn has_ended(end: Option<&SuperblockWatch>) -> bool {
    end.is_some_and(SuperblockWatch::has_ended)
}

/// Unmounts the mount of type `fs_type` at `mountpoint`. With `device`, only that file system. Retries for a
/// moment, because dentry priming keeps the mount busy while it clones it.
fn unmount_at(
    fs_type: &str,
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    mode: UnmountMode,
) -> Result<(), UnmountError> {
    retry_while_busy(|| syscalls::unmount(fs_type, mountpoint, device, mode))
}

fn retry_while_busy(unmount: impl Fn() -> Result<(), UnmountError>) -> Result<(), UnmountError> {
    for _ in 0..MAX_UNMOUNT_TRIES {
        match unmount() {
            Err(UnmountError::Busy(_)) => std::thread::sleep(UNMOUNT_RETRY_INTERVAL),
            result => return result,
        }
    }
    unmount()
}

fn unmount_or_force(target: &MountTarget) {
    unmount_then_force(|force| target.unmount(force.mode(), None));
}

/// Unmounts without force, then with force if that fails. An ended mount is no failure.
fn unmount_then_force(unmount: impl Fn(Force) -> Result<(), UnmountError>) {
    let result = unmount(Force::No).or_else(|error| match error {
        UnmountError::NotMounted(_) | UnmountError::NotOwner { .. } => Err(error),
        UnmountError::Busy(_) | UnmountError::System { .. } => unmount(Force::Yes),
    });
    match result {
        Ok(()) | Err(UnmountError::NotMounted(_)) => {}
        Err(error) => tracing::warn!(%error, "cannot unmount"),
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config.n_threads = Some(REQUEST_THREADS);
    config
}

/// Answers every user. Requests of a mount that can be idmapped carry none to check (Linux 6.12).
const SESSION_ACL: SessionACL = SessionACL::All;

/// Raises the kernel's read-ahead through sysfs. Only root may. Otherwise reads are correct but smaller.
fn set_read_ahead(device: u64) {
    let file = format!(
        "/sys/class/bdi/{}:{}/read_ahead_kb",
        major(device),
        minor(device)
    );
    if let Err(error) = fs::write(&file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!(%error, file, "cannot raise the read-ahead");
    }
}
