//! `tarfs mount --copy-to`: the copy on disk, as the mount and its status see it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::ensure;
use bytes::Bytes;

use super::control_socket::CopyProgress;
use super::mount::OpenedArchive;
use crate::archive::{Archive, ReadError};
use crate::base::xattr_filter::XattrFilter;
use crate::fuse::{self, BackingFiles, Mount};
use crate::index::{Index, Ino};
use crate::materialize::{BackgroundCopy, CopyState, ReadFn, RunningCopy};

/// What a copy is made from.
pub(super) struct CopySource {
    index: Box<dyn Fn() -> Option<Arc<Index>>>,
    read: ReadFn,
}

impl CopySource {
    /// The tree of `archive` once all of it is known, and its bytes.
    pub(super) fn from_archive(archive: &Arc<Archive>) -> Self {
        let (read, index) = (Arc::clone(archive), Arc::clone(archive));
        Self::new(
            move || index.complete_index(),
            move |ino, offset, len| read.read_blocking(ino, offset, len),
        )
    }

    /// What `index` gives once all of it is known, and the bytes that `read` gives.
    pub(super) fn new(
        index: impl Fn() -> Option<Arc<Index>> + 'static,
        read: impl Fn(Ino, u64, u32) -> Result<Bytes, ReadError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            index: Box::new(index),
            read: Arc::new(read),
        }
    }
}

/// The copy of one mount.
#[derive(Debug)]
pub(super) struct MountCopy {
    background: Arc<BackgroundCopy>,
    /// Once the index is complete.
    running: OnceLock<RunningCopy>,
}

impl MountCopy {
    /// Takes `directory` for the copy of what is to be mounted on `mountpoint`, with the attributes that
    /// `xattrs` selects.
    ///
    /// # Errors
    /// When it is not for that; then nothing in it was changed.
    pub(super) fn open(
        directory: &Path,
        mountpoint: &Path,
        xattrs: XattrFilter,
    ) -> anyhow::Result<Self> {
        let mountpoint = fuse::canonical_mountpoint(mountpoint)?;
        let copy = resolve_destination(directory).unwrap_or_else(|_| directory.to_owned());
        ensure!(
            !copy.starts_with(&mountpoint) && !mountpoint.starts_with(&copy),
            "{}: a copy there and the mount on {} would hide each other (name a directory beside it)",
            copy.display(),
            mountpoint.display()
        );
        let background = BackgroundCopy::open(directory, xattrs)?;
        Ok(Self {
            background,
            running: OnceLock::new(),
        })
    }

    /// The copies of files, for the mount.
    pub(super) fn backing_files(&self) -> Arc<dyn BackingFiles> {
        Arc::new(CopyBackingFiles(Arc::clone(&self.background)))
    }

    /// Begins to write what lies below `root`, once, if the index is complete; until this is
    /// dropped.
    ///
    /// # Errors
    /// When something else is in the directory, or the system says no.
    pub(super) fn start(&self, opened: &OpenedArchive, root: Ino) -> anyhow::Result<()> {
        let CopySource { index, read } = &opened.copy_source;
        let Some(index) = index() else {
            return Ok(());
        };
        if self.running.get().is_some() {
            return Ok(());
        }
        let read = Arc::clone(read);
        let running = self.background.start(&index, root, read, &opened.stats)?;
        // Nobody else starts it.
        drop(self.running.set(running));
        Ok(())
    }

    /// Says that nothing more is to be written.
    pub(super) fn stop(&self) {
        self.background.cancel();
    }

    /// How far it is.
    pub(super) fn progress(&self) -> CopyProgress {
        let progress = self.background.progress();
        CopyProgress {
            directory: self.background.directory().to_string_lossy().into_owned(),
            state: state_name(progress.state).to_owned(),
            files: progress.files,
            total_files: progress.total_files,
            bytes: progress.bytes,
            total_bytes: progress.total_bytes,
            failures: progress.failures,
        }
    }

    /// What is not as it could be.
    pub(super) fn notes(&self, mount: &Mount) -> Vec<String> {
        let copy = self.background.progress().note;
        let copy = copy.map(|note| format!("copy: {note}"));
        let refusal = mount.passthrough_disabled_reason();
        let refusal = refusal.map(|why| format!("no passthrough, this process reads files: {why}"));
        copy.into_iter().chain(refusal).collect()
    }
}

/// Where `directory` is or will be, without symbolic links.
fn resolve_destination(directory: &Path) -> io::Result<PathBuf> {
    match std::fs::canonicalize(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let directory = std::path::absolute(directory)?;
            let parent = directory.parent().unwrap_or(Path::new("/"));
            let name = directory.file_name().unwrap_or_default();
            Ok(std::fs::canonicalize(parent)?.join(name))
        }
        found => found,
    }
}

fn state_name(state: CopyState) -> &'static str {
    match state {
        CopyState::Waiting => "waiting",
        CopyState::Writing => "writing",
        CopyState::Retrying => "retrying",
        CopyState::Complete => "complete",
        CopyState::Incomplete => "incomplete",
        CopyState::Stopped => "stopped",
    }
}

/// The copy as the mount sees it.
#[derive(Debug)]
struct CopyBackingFiles(Arc<BackgroundCopy>);

impl BackingFiles for CopyBackingFiles {
    fn may_have(&self, ino: Ino) -> bool {
        self.0.is_complete(ino)
    }

    fn open(&self, ino: Ino) -> Option<File> {
        self.0.open_copy(ino)
    }

    fn request_copy(&self, ino: Ino) {
        self.0.prioritize(ino);
    }
}
