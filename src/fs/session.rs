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

use super::cover::{self, Cover, Upper};
use super::device::{self, MountError, UnmountError};
use super::failures::{Failure, Failures};
use super::handover::{self, Orphan, Site};
use super::namespace::{Namespace, OpenNamespace};
use super::options::MountOptions;
use super::pages::Pages;
use super::table::{Attachment, TopMount};
use super::{Handles, INodeNo, Tree, news, table};
use crate::archive::PageCache;
use crate::base::thread::Thread;

/// Threads that take requests. They only look up and copy, so two keep up with the kernel; four
/// doubled the CPU time and gained nothing. They share one descriptor: one each (`clone_fd`) made
/// no difference that could be measured.
const REQUEST_THREADS: usize = 2;

/// How long a fresh mount may take to answer its first stat, which waits for nothing but threads.
const READY_DEADLINE: Duration = Duration::from_secs(10);

/// How long a session may take to notice that its connection has ended.
const END_DEADLINE: Duration = Duration::from_secs(2);

/// How long a connection may take to end once nothing is mounted here: what lay over the mount may end by and by.
const LAST_BREATH: Duration = Duration::from_secs(3);

/// How often a mount that is in use is tried again, and after what time: a process that is about to
/// start another program has for a moment whatever its threads have open.
const UNMOUNT_TRIES: u32 = 20;
/// See [`UNMOUNT_TRIES`].
const UNMOUNT_PAUSE: Duration = Duration::from_millis(5);

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
    site: Site,
    /// `st_dev` of the mount itself, which tells it from whatever is there before or later; `None`
    /// until it has answered.
    device: Option<u64>,
    capabilities: u64,
    since: SystemTime,
    failures: Arc<Failures>,
    handles: Option<Arc<Handles>>,
    session: Option<Thread<()>>,
    /// Where the kernel asks.
    connection: OwnedFd,
    /// Tells the kernel of changes; ends with the session.
    _news: Option<Thread<()>>,
    pages: Arc<Pages>,
    /// Closes when the session has ended.
    ended: Receiver<()>,
}

impl Mount {
    /// Whether `mountpoint` can be mounted on, as far as can be told without mounting; for those
    /// who have long work to do first.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn check(mountpoint: &Path) -> Result<(), MountError> {
        device::mountpoint(mountpoint)?;
        device::look()
    }

    /// What a mount on `mountpoint` would hide, in words, if anything: another mount, or files.
    pub fn hides(mountpoint: &Path) -> Option<String> {
        let mountpoint = device::mountpoint(mountpoint).ok()?;
        let mountpoint = mountpoint.path().ok()?;
        // Who is asked for a listing may not answer for long: a mount is not.
        if let Some(kind) = table::file_system(&mountpoint).ok()? {
            return Some(format!("a mount of the type {kind}"));
        }
        let is_empty = fs::read_dir(&mountpoint).ok()?.next().is_none();
        (!is_empty).then(|| "what is in that directory".to_owned())
    }

    /// Mounts `tree` on the directory `mountpoint` and returns when the mount answers. `source`
    /// is what mount(8) lists unless the options say otherwise. `ended` is called on the mount's
    /// own thread once nothing is mounted any more, whoever unmounted it.
    ///
    /// # Errors
    /// When it cannot be mounted; then nothing is.
    pub fn start(
        tree: Tree,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        Self::start_kept(tree, source, mountpoint, options, |_, _| {}, ended)
    }

    /// As [`start`](Self::start), and `mounted` is shown where it is and the descriptor on which the
    /// kernel asks, before anybody is answered.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_kept(
        tree: Tree,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        mounted: impl FnOnce(&Site, BorrowedFd<'_>),
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let mountpoint = device::mountpoint(mountpoint)?;
        let tree = tree.watched().map_err(MountError::System)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let mount = device::mount(&mountpoint, source, options)?;
        // Where the table cannot be read nobody can clear up by it either.
        let found = if let Some(root) = &mount.root {
            table::mount_of(root, device::FILE_SYSTEM)
        } else {
            let path = mountpoint.path()?;
            let found = table::device(&path, device::FILE_SYSTEM);
            found.map(|device| device.map(|device| (device, path)))
        };
        let Some((device, mountpoint)) = found.map_err(MountError::System)? else {
            return Err(MountError::NotReady);
        };
        let site = Site {
            mountpoint,
            device,
            cover: None,
            namespace: None,
        };
        mounted(&site, mount.device.as_fd());
        let session = |tree| Session::from_fd(tree, mount.device, ACL, config());
        Self::serve(tree, site, mount.root, session, ended)
    }

    /// Mounts on the directory `mountpoint` of another mount namespace. As
    /// [`start_kept`](Self::start_kept) otherwise.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_in(
        tree: Tree,
        source: &str,
        (namespace, mountpoint): (&OpenNamespace, &Path),
        options: &MountOptions,
        mounted: impl FnOnce(&Site, BorrowedFd<'_>),
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let tree = tree.watched().map_err(MountError::System)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let mount = device::detached(source, options)?;
        let site = Site {
            mountpoint: mountpoint.to_owned(),
            device: mount.number()?,
            cover: None,
            namespace: Some(namespace.namespace().clone()),
        };
        mounted(&site, mount.device.as_fd());
        namespace.attach(mount.copy_root()?, mountpoint)?;
        let session = |tree| Session::from_fd(tree, mount.device, ACL, config());
        Self::serve(tree, site, mount.root, session, ended)
    }

    /// Whether there is a FUSE device, and `mountpoint` is a directory of `namespace`.
    ///
    /// # Errors
    /// As [`start_in`](Self::start_in).
    pub fn check_in(namespace: &OpenNamespace, mountpoint: &Path) -> Result<(), MountError> {
        namespace.check(mountpoint)?;
        device::look()
    }

    /// Goes on with a mount whose process has died, which was made of the same tree. As [`start`](Self::start) otherwise.
    ///
    /// # Errors
    /// When that cannot be done; then nothing is mounted any more.
    pub fn adopt(
        tree: Tree,
        orphan: &Orphan,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        if !is_there(&orphan.site, orphan.descriptor.as_fd()) {
            return Err(MountError::NotReady);
        }
        let tree = tree.watched().map_err(MountError::System)?;
        let session = |tree| handover::session(tree, orphan, ACL, config());
        let site = Site {
            mountpoint: orphan.site.place(),
            ..orphan.site.clone()
        };
        Self::serve(tree, site, None, session, ended)
    }

    /// Serves `tree` at `site`, whose root is `root` if it is open.
    fn serve(
        tree: Tree,
        site: Site,
        root: Option<OwnedFd>,
        session: impl FnOnce(Tree) -> io::Result<Session<Tree>>,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let failures = Arc::clone(&tree.failures);
        let pages = Arc::clone(&tree.pages);
        let told = Arc::clone(&pages);
        let content = Arc::clone(&tree.content);
        let handles = tree.desk.as_ref().map(|desk| Arc::clone(&desk.handles));
        let capabilities = Arc::clone(&tree.capabilities);
        let session = match session(tree) {
            Ok(session) => session,
            Err(error) => {
                take_out(&site);
                return Err(MountError::System(error));
            }
        };
        pages.attach(session.notifier());
        let news = news::start(&content, &pages).inspect_err(|_| take_out(&site))?;
        let connection = session.as_fd().try_clone_to_owned().inspect_err(|_| {
            pages.detach();
            take_out(&site);
        });
        let connection = connection.map_err(MountError::System)?;
        let (alive, end) = mpsc::channel();
        let thread = Thread::spawn("fuse", move || {
            if let Err(error) = session.run() {
                tracing::error!(%error, "the FUSE session failed");
            }
            pages.detach();
            drop(alive);
            ended();
        });
        let session = thread.map_err(|error| {
            // Or the one with the news would not end.
            told.detach();
            take_out(&site);
            MountError::System(error)
        })?;
        let mut mount = Self {
            site,
            device: None,
            capabilities: capabilities.get().copied().unwrap_or(0),
            since: SystemTime::now(),
            failures,
            handles,
            session: Some(session),
            connection,
            _news: news,
            pages: told,
            ended: end,
        };
        let device = mount.first_answer(root)?;
        mount.device = Some(device);
        let (major, minor) = mount.site.device;
        let seen = makedev(major, minor);
        // No path of this process leads into another namespace.
        if mount.site.namespace.is_none() {
            mount.pages.mounted(&mount.site.mountpoint, seen);
        }
        content.set_page_cache(Arc::clone(&mount.pages) as Arc<dyn PageCache>);
        read_ahead(device);
        Ok(mount)
    }

    /// Whether something can be made writable here, as far as can be told without mounting.
    ///
    /// # Errors
    /// When neither overlayfs nor fuse-overlayfs can be had.
    pub fn check_writable() -> Result<(), MountError> {
        cover::look()
    }

    /// Lays a tree over this mount on `mountpoint` that can be written to, and takes the mount itself out
    /// of the tree: from now on this is that tree. What is written goes to `upper`. `covered` is shown
    /// where it is, at once.
    ///
    /// # Errors
    /// When that cannot be done; the mount is as it was.
    pub fn cover(
        &mut self,
        upper: &Upper,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        covered: impl FnOnce(&Site),
    ) -> Result<(), MountError> {
        let mountpoint = device::mountpoint(mountpoint)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let lower = &self.site.mountpoint;
        let cover = cover::lay(lower, upper, &mountpoint, source, options)?;
        let mountpoint = mountpoint.path()?;
        let found = table::device(&mountpoint, cover.file_system());
        let found = found.map_err(MountError::System);
        let device = match found.and_then(|device| device.ok_or(MountError::NotReady)) {
            Ok(device) => device,
            Err(error) => {
                if let Err(error) = device::unmount(cover.file_system(), &mountpoint, None, true) {
                    tracing::warn!(%error, "cannot unmount");
                }
                return Err(error);
            }
        };
        let site = Site {
            mountpoint,
            device,
            cover: Some((cover, self.site.lower_device())),
            namespace: None,
        };
        covered(&site);
        let (major, minor) = site.device;
        self.pages.mounted(&site.mountpoint, makedev(major, minor));
        let below = std::mem::replace(&mut self.site, site);
        // It lives on below, and ends with what lies above.
        let detached =
            device::detach_if(device::FILE_SYSTEM, &below.mountpoint, below.device, |_| {
                true
            });
        detached.map_err(|error| {
            let above = std::mem::replace(&mut self.site, below);
            let device = Some(above.device);
            if let Err(error) =
                device::unmount(above.file_system(), &above.mountpoint, device, true)
            {
                tracing::warn!(%error, "cannot unmount");
            }
            MountError::System(io::Error::other(error))
        })
    }

    /// What makes it writable, if anything does.
    pub fn covered_by(&self) -> Option<Cover> {
        self.site.cover.map(|(cover, _)| cover)
    }

    /// Where it is mounted: absolute, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.site.mountpoint
    }

    /// Where it is now: a directory above it may have another name since. `None` when it is detached.
    ///
    /// # Errors
    /// When the kernel's table of mounts cannot be read.
    pub fn attachment(&self) -> io::Result<Option<Attachment>> {
        self.site.find()
    }

    /// Major and minor number of what is seen there, which no other mount of the machine has.
    pub fn device(&self) -> (u32, u32) {
        self.site.device
    }

    /// What the kernel offered when it was mounted, a bit each, as an [`Orphan`] needs it.
    pub fn capabilities(&self) -> u64 {
        self.capabilities
    }

    /// When it was mounted.
    pub fn since(&self) -> SystemTime {
        self.since
    }

    /// The last reads that failed, oldest first.
    pub fn failures(&self) -> Vec<Failure> {
        self.failures.recent()
    }

    /// Why the kernel does not read copies of files by itself; `None` as long as it does, and where
    /// there are none.
    pub fn passthrough_refusal(&self) -> Option<String> {
        self.handles.as_ref()?.refusal()
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
        if force && self.site.has_copies() {
            return self.site.detach(self.connection.as_fd());
        }
        self.site.unmount(force, Some(self.connection.as_fd()))
    }

    /// The mount namespace that it is in, unless that is this process's own.
    pub fn namespace(&self) -> Option<&Namespace> {
        self.site.namespace.as_ref()
    }

    /// Whether it is in the tree.
    pub fn is_mounted(&self) -> bool {
        self.site.is_mounted()
    }

    /// Whether it is in use still, once it was unmounted, by a bind mount, an overlay or another mount
    /// namespace: then its connection does not end.
    pub fn lives_on(&self) -> bool {
        if self.is_mounted() {
            return true;
        }
        let deadline = Instant::now() + LAST_BREATH;
        while device::is_connected(&self.connection) {
            if Instant::now() > deadline {
                return true;
            }
            std::thread::sleep(LAST_BREATH / 100);
        }
        false
    }

    /// The device number that the mount's first answer carries. Asked from a thread of its own:
    /// a mount that does not answer must not take its owner with it.
    fn first_answer(&self, root: Option<OwnedFd>) -> Result<u64, MountError> {
        let (sender, answer) = mpsc::channel();
        let path = self.site.mountpoint.clone();
        let (major, minor) = self.site.device;
        let device = makedev(major, minor);
        // What lies over it answers for it, by a root of its own.
        let is_covered = self.site.cover.is_some();
        let (major, minor) = self.site.lower_device();
        let own = makedev(major, minor);
        let _asking = Thread::spawn("fuse-ready", move || {
            // Nobody listens any more when the deadline has passed.
            drop(sender.send(match root {
                Some(root) => File::from(root).metadata(),
                None => fs::symlink_metadata(path),
            }));
        })
        .map_err(MountError::System)?;
        let error = match answer.recv_timeout(READY_DEADLINE) {
            Ok(Ok(found))
                if found.st_dev() == device
                    && (is_covered || found.st_ino() == INodeNo::ROOT.0) =>
            {
                return Ok(own);
            }
            Ok(Err(error)) => MountError::System(error),
            Ok(Ok(_)) | Err(_) => MountError::NotReady,
        };
        // Ends the asking thread's wait, whether or not it can be unmounted.
        take_out(&self.site);
        cut(own);
        Err(error)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else {
            return;
        };
        self.pages.detach();
        if let Some(device) = self.device {
            unmount_by_any_means(|force| self.unmount_once(force));
            let is_running = self.ended.recv_timeout(END_DEADLINE) == Err(TIMEOUT);
            if is_running && device::is_connected(&self.connection) {
                cut(device);
            }
        }
        match self.ended.recv_timeout(END_DEADLINE) {
            Err(TIMEOUT) => {
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
pub fn mountpoint(path: &Path) -> io::Result<PathBuf> {
    table::canonical(path)
}

/// The mount on top at `mountpoint` (see [`mountpoint`]), of whatever type, as far as this process sees
/// mounts: another one may see others.
///
/// # Errors
/// When the kernel's table of mounts cannot be read.
pub fn top_mount(mountpoint: &Path) -> io::Result<Option<TopMount>> {
    table::top_mount(mountpoint)
}

/// Whether a file system of this number is mounted, as a whole or in part, as far as this process sees
/// mounts.
pub fn is_mounted(device: (u32, u32)) -> bool {
    table::count(device).is_ok_and(|count| count > 0)
}

/// Takes `copy` out, which is on `mountpoint` (see [`mountpoint`]) and another mount of what a process
/// serves, such as a bind mount. `force` does so although it is in use; its users go on with it, because
/// an end of the connection would be the end of all mounts.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn unmount_copy(mountpoint: &Path, copy: &TopMount, force: Force) -> Result<(), UnmountError> {
    match force {
        Force::No => unmount_at(&copy.file_system, mountpoint, Some(copy.device), force),
        Force::Yes => device::detach_if(&copy.file_system, mountpoint, copy.device, |_| true),
    }
}

/// Takes out whatever archive is mounted on `mountpoint` (see [`mountpoint`]), by whichever
/// process, and nothing that is not an archive; where `device` is given, what has that number only.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn unmount(
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    force: Force,
) -> Result<(), UnmountError> {
    let file_system = if cover::is_ours(mountpoint).unwrap_or(false) {
        Cover::Overlay.file_system()
    } else {
        device::FILE_SYSTEM
    };
    unmount_at(file_system, mountpoint, device, force)
}

/// Takes out the mount at `site` that nobody serves any more, and its bind mounts, under the feet of those
/// who use it.
/// `device` is its connection: as long as somebody holds that, no other mount has its number.
///
/// # Errors
/// As [`Mount::unmount`].
pub fn clear(site: &Site, device: BorrowedFd<'_>) -> Result<(), UnmountError> {
    if !device::is_connected(device) {
        return Ok(());
    }
    for _ in 0..MAX_DEAD_MOUNTS {
        match site.unmount(true, Some(device)) {
            Ok(()) if site.is_mounted() => {}
            Ok(()) | Err(UnmountError::NotMounted(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the mount at `site`, whose connection `device` is, is in the tree, be it below another one.
pub fn is_there(site: &Site, device: BorrowedFd<'_>) -> bool {
    device::is_connected(device) && site.is_mounted()
}

/// Unmounts what is of the type `file_system` at `mountpoint`, that of the number `device` only if one is
/// given. For the moment in which names are listed to the kernel the mount is in use by itself (see
/// [`super::names`]), so who comes first does not give up at once.
fn unmount_at(
    file_system: &str,
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    force: Force,
) -> Result<(), UnmountError> {
    retry_while_busy(|| device::unmount(file_system, mountpoint, device, force == Force::Yes))
}

/// Calls `unmount` again for a moment while the mount is in use.
fn retry_while_busy(unmount: impl Fn() -> Result<(), UnmountError>) -> Result<(), UnmountError> {
    for _ in 0..UNMOUNT_TRIES {
        match unmount() {
            Err(UnmountError::Busy(_)) => std::thread::sleep(UNMOUNT_PAUSE),
            result => return result,
        }
    }
    unmount()
}

const TIMEOUT: mpsc::RecvTimeoutError = mpsc::RecvTimeoutError::Timeout;

/// Unmounts the mount at `site`, if need be by force.
fn take_out(site: &Site) {
    unmount_by_any_means(|force| site.unmount(force, None));
}

/// Calls `unmount` without force, and with force if that fails. A mount that is gone is no failure.
fn unmount_by_any_means(unmount: impl Fn(bool) -> Result<(), UnmountError>) {
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
fn cut(device: u64) {
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
const ACL: SessionACL = SessionACL::All;

/// Raises the kernel's read-ahead, for which FUSE has no word of its own. Root only; without it
/// reads are correct and smaller.
fn read_ahead(device: u64) {
    let file = format!(
        "/sys/class/bdi/{}:{}/read_ahead_kb",
        major(device),
        minor(device)
    );
    if let Err(error) = fs::write(&file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!(%error, file, "read-ahead stays as it is");
    }
}
