//! A file system that this process serves, from its first mount to the end of its last one.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fuser::Session;
use rustix::fs::{major, minor};

use super::error::MountError;
use super::mountinfo;
use super::syscalls;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::fuse::archives::Archives;
use crate::fuse::filesystem::TarFilesystem;
use crate::fuse::passthrough::OpenFiles;
use crate::fuse::push::{KernelCache, MountRoot};
use crate::fuse::recent_errors::RecentErrors;

/// Timeout for the session to notice that its connection has ended.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(2);

const TIMED_OUT: mpsc::RecvTimeoutError = mpsc::RecvTimeoutError::Timeout;

/// A file system that this process serves for all its mounts. Dropping it ends it.
#[derive(Debug)]
pub(super) struct ServedFileSystem {
    /// Its `st_dev`. Unset until a mount answers.
    pub(super) device: OnceLock<u64>,
    pub(super) capabilities: u64,
    pub(super) recent_errors: Arc<RecentErrors>,
    pub(super) open_files: Option<Arc<OpenFiles>>,
    session: Option<Thread<()>>,
    /// The FUSE device of the connection.
    pub(super) connection: OwnedFd,
    /// A detached mount of it, if other processes may mount it.
    pub(super) template: Mutex<Option<Arc<OwnedFd>>>,
    /// The thread that sends invalidations. It ends with the session.
    _invalidator: Option<Thread<()>>,
    pub(super) kernel_cache: Arc<KernelCache>,
    pub(super) archives: Option<Arc<Archives<TarFilesystem>>>,
    /// Closes when the session has ended.
    session_end: Mutex<Receiver<()>>,
}

impl ServedFileSystem {
    /// Serves `filesystem` by the session that `session` makes. Its end calls `on_end`.
    pub(super) fn start(
        filesystem: TarFilesystem,
        session: impl FnOnce(TarFilesystem) -> io::Result<Session<TarFilesystem>>,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let recent_errors = Arc::clone(&filesystem.state.recent_errors);
        let kernel_cache = Arc::clone(&filesystem.state.kernel_cache);
        let volume = Arc::clone(&filesystem.volume);
        let backing_io = filesystem.backing_io.as_ref();
        let open_files = backing_io.map(|backing_io| Arc::clone(&backing_io.open_files));
        let capabilities = Arc::clone(&filesystem.capabilities);
        let archives = filesystem.archives.clone();
        let session = session(filesystem)?;
        kernel_cache.attach(session.notifier());
        let connection = session.as_fd().try_clone_to_owned()?;
        let invalidator = kernel_cache.start_invalidator(&volume)?;
        let (end_sender, session_end) = mpsc::channel();
        let thread_cache = Arc::clone(&kernel_cache);
        let thread = Thread::spawn("tarfs-fuse", move || {
            if let Err(error) = session.run() {
                tracing::error!(%error, "the FUSE session failed");
            }
            thread_cache.detach();
            drop(end_sender);
            on_end();
        });
        // Otherwise the drop of the invalidation thread would block without limit.
        let thread = thread.inspect_err(|_| kernel_cache.detach())?;
        Ok(Self {
            device: OnceLock::new(),
            capabilities: capabilities.get().copied().unwrap_or(0),
            recent_errors,
            open_files,
            session: Some(thread),
            connection,
            template: Mutex::default(),
            _invalidator: invalidator,
            kernel_cache,
            archives,
            session_end: Mutex::new(session_end),
        })
    }

    /// Sets the mount of which other processes make mounts, unless there is one.
    pub(super) fn share_by(&self, template: Option<Arc<OwnedFd>>) {
        let mut current = self.template.lock();
        if current.is_none()
            && let Some(template) = template
        {
            let root = MountRoot::Copy(Arc::downgrade(&template));
            self.kernel_cache.set_root(root);
            *current = Some(template);
        }
    }

    /// Lets it end with its last mount, unless a process is making another one.
    pub(super) fn stop_sharing(&self) {
        let mut template = self.template.lock();
        if template
            .as_ref()
            .is_some_and(|template| Arc::strong_count(template) == 1)
        {
            *template = None;
        }
    }

    /// Ends all that this process does with it of its own accord.
    pub(super) fn detach(&self) {
        self.kernel_cache.detach();
        *self.template.lock() = None;
    }
}

impl Drop for ServedFileSystem {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else {
            return;
        };
        self.detach();
        let end = self.session_end.lock();
        if let Some(&device) = self.device.get() {
            let is_running = end.recv_timeout(SESSION_END_TIMEOUT) == Err(TIMED_OUT);
            // Another process may serve other mounts of it.
            let number = (major(device), minor(device));
            let is_unused = mountinfo::count_mounts(number).is_ok_and(|count| count == 0);
            if is_running && is_unused && syscalls::is_connected(&self.connection) {
                abort_connection(device);
            }
        }
        match end.recv_timeout(SESSION_END_TIMEOUT) {
            Err(TIMED_OUT) => {
                tracing::warn!("the mount is still in use; it ends with this process");
                std::mem::forget(session);
            }
            _ => session.join(),
        }
    }
}

/// Aborts the connection of a detached mount, as root's umount(2) does. Needs the FUSE control file system.
pub(super) fn abort_connection(device: u64) {
    let abort = format!("/sys/fs/fuse/connections/{}/abort", minor(device));
    if let Err(error) = fs::write(&abort, "1") {
        tracing::debug!(%error, abort, "cannot abort the connection");
    }
}
