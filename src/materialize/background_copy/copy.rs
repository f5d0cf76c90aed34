//! The background copy of a mount, as the mount sees it.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use super::directory::CopyDirectory;
use super::status::{BackgroundCopyProgress, CopyStatus};
use super::task::CopyTask;
use crate::archive::Volume;
use crate::base::cancel_token::CancelToken;
use crate::base::lock::LockHolder;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::base::xattr::filter::XattrFilter;
use crate::index::MissingRow;
use crate::index::{self, Index, Ino, LazyIndex};
use crate::materialize::error::Error;
use crate::materialize::sidecar;

/// The background copy of a mount.
pub struct BackgroundCopy {
    status: Arc<CopyStatus>,
    xattrs: XattrFilter,
    boot_id: u64,
    /// Exists only once the index is complete.
    pub(super) task: OnceLock<Arc<CopyTask>>,
}

/// Handle of a running copy. Dropping it stops the writing.
#[derive(Debug)]
pub struct RunningCopy {
    status: Arc<CopyStatus>,
    _thread: Thread<()>,
}

impl std::fmt::Debug for BackgroundCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackgroundCopy")
            .field("directory", &self.status.directory)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

impl BackgroundCopy {
    /// Opens `directory` for a copy, or makes it. Entries get the attributes that `xattrs` selects.
    ///
    /// # Errors
    /// When it is not writable, or unsuitable: [`Error::NotACopy`], [`Error::InUse`].
    pub fn open(directory: &Path, xattrs: XattrFilter) -> Result<Arc<Self>, Error> {
        let copy = Self::new(directory, xattrs, this_boot_id())?;
        Ok(Arc::new(copy))
    }

    pub(super) fn new(directory: &Path, xattrs: XattrFilter, boot_id: u64) -> Result<Self, Error> {
        Ok(Self {
            status: Arc::new(CopyStatus {
                directory: CopyDirectory::open(directory)?,
                cancel_token: CancelToken::default(),
                report: Mutex::default(),
            }),
            xattrs,
            boot_id,
            task: OnceLock::new(),
        })
    }

    /// Absolute path of the copy without symbolic links.
    pub fn directory(&self) -> &Path {
        &self.status.directory.path
    }

    /// Starts to copy the tree below `root` of the complete `index` of `volume`.
    ///
    /// It continues until all is written or the result is dropped. Entries of an earlier mount can be opened
    /// immediately. `stats` counts the written entries and bytes.
    ///
    /// # Errors
    /// [`Error::NotACopy`] when an earlier mount wrote another tree, and errors of the system.
    pub fn start(
        &self,
        index: &LazyIndex,
        root: Ino,
        volume: Arc<dyn Volume>,
        stats: &Arc<Stats>,
    ) -> Result<RunningCopy, Error> {
        let status = Arc::clone(&self.status);
        let tree = index.clone().into_tree().map_err(Error::IndexRows);
        let tree = tree.inspect_err(|error| status.halt(error))?;
        let task = self.build_task(&tree, root, volume, stats);
        let task = Arc::new(task.inspect_err(|error| status.halt(error))?);
        if self.task.set(Arc::clone(&task)).is_err() {
            return Err(Error::InUse(
                self.directory().to_owned(),
                LockHolder::default(),
            ));
        }
        let thread = Thread::spawn("tarfs-copy", move || task.run())
            .map_err(|error| Error::Thread(Arc::new(error)))
            .inspect_err(|error| status.halt(error))?;
        Ok(RunningCopy {
            status,
            _thread: thread,
        })
    }

    pub(super) fn build_task(
        &self,
        index: &Arc<Index>,
        root: Ino,
        volume: Arc<dyn Volume>,
        stats: &Arc<Stats>,
    ) -> Result<CopyTask, Error> {
        let tree_hash = tree_hash(index, root, &self.xattrs).map_err(Error::IndexRows)?;
        let ledger = self.status.directory.ledger(tree_hash, self.boot_id)?;
        CopyTask::new(
            &self.status,
            index,
            root,
            volume,
            ledger,
            &self.xattrs,
            stats,
        )
    }

    /// Whether [`open_copy`](Self::open_copy) may succeed. Does not access the disk.
    pub fn is_complete(&self, ino: Ino) -> bool {
        self.task
            .get()
            .is_some_and(|task| task.complete.contains(ino.0))
    }

    /// Opens the copy of file `ino` if it is complete and unchanged, at offset 0 and with its holes.
    pub fn open_copy(&self, ino: Ino) -> Option<File> {
        self.task.get()?.open_copy(ino)
    }

    /// Moves file `ino` to the front.
    pub fn prioritize(&self, ino: Ino) {
        if let Some(task) = self.task.get() {
            task.prioritize(ino);
        }
    }

    /// Progress of the copy.
    pub fn progress(&self) -> BackgroundCopyProgress {
        let mut progress = self.status.report.lock().clone();
        if let Some(task) = self.task.get() {
            progress.files = task.files.load(Ordering::Relaxed);
            progress.total_files = task.plan.files;
            progress.bytes = task.bytes.load(Ordering::Relaxed);
            progress.total_bytes = task.plan.bytes;
        }
        progress
    }

    /// Stops the copy, without finishing the files in progress.
    pub fn cancel(&self) {
        self.status.cancel_token.cancel();
    }
}

impl Drop for RunningCopy {
    /// Cancels the copy. The thread's own drop waits for its end.
    fn drop(&mut self) {
        self.status.cancel_token.cancel();
    }
}

/// Hash that identifies the copied tree.
fn tree_hash(index: &Index, root: Ino, xattrs: &XattrFilter) -> Result<u128, MissingRow> {
    let origin = index.origin();
    let mut hasher = Xxh3Default::new();
    hasher.update(&index::format::VERSION.to_le_bytes());
    hasher.update(&root.0.to_le_bytes());
    hasher.update(&index.last_ino().0.to_le_bytes());
    hasher.update(&index.entry_count().to_le_bytes());
    hasher.update(&origin.plain_bytes.to_le_bytes());
    hasher.update(&origin.content_id);
    if origin.content_id == [0; 32] {
        for number in 0..index.span_count() {
            let hash = index.span(number)?.and_then(|span| span.hash);
            hasher.update(&hash.unwrap_or_default().to_le_bytes());
        }
        if !index.is_hashed()? {
            // Without content hashes, the source has a strong version identifier.
            hasher.update(origin.locator.canonical.as_bytes());
            hasher.update(origin.locator.fingerprint.as_bytes());
        }
    }
    if *xattrs != XattrFilter::default() {
        hasher.update(format!("{xattrs:?}").as_bytes());
    }
    Ok(hasher.digest128())
}

/// Number of the current boot, or of this process if the system has no boot ID.
pub(super) fn this_boot_id() -> u64 {
    let boot_id = sidecar::boot_id();
    if boot_id.is_empty() {
        use std::hash::BuildHasher;
        return std::hash::RandomState::new().hash_one(std::process::id());
    }
    xxh3_64(&boot_id)
}
