//! `tarfs mount --copy-to`: the copy on disk, for the mount and its status.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::ensure;

use crate::cli::daemon::control_socket::CopyProgress;
use crate::cli::daemon::opened_archive::OpenedArchive;
use crate::cli::files::resolve_destination;
use tarfs::fuse::{self, BackingFiles, Mount};
use tarfs::index::Ino;
use tarfs::materialize::XattrFilter;
use tarfs::materialize::{BackgroundCopy, CopyState, RunningCopy};

#[derive(Debug)]
pub(crate) struct MountCopy {
    background: Arc<BackgroundCopy>,
    /// Set once the index is complete.
    running: OnceLock<RunningCopy>,
}

impl MountCopy {
    /// Opens `directory` for the copy of the mount on `mountpoint`. `xattrs` selects the attributes.
    pub(crate) fn open(
        directory: &Path,
        mountpoint: &Path,
        xattrs: XattrFilter,
    ) -> anyhow::Result<Self> {
        let mountpoint = fuse::canonical_mountpoint(mountpoint)?;
        let copy = resolve_destination(directory).unwrap_or_else(|_| directory.to_owned());
        ensure!(
            !copy.starts_with(&mountpoint) && !mountpoint.starts_with(&copy),
            "{}: the copy and the mount on {} would hide each other (name a directory beside it)",
            copy.display(),
            mountpoint.display()
        );
        let background = BackgroundCopy::open(directory, xattrs)?;
        Ok(Self {
            background,
            running: OnceLock::new(),
        })
    }

    pub(crate) fn backing_files(&self) -> Arc<dyn BackingFiles> {
        Arc::new(CopyBackingFiles(Arc::clone(&self.background)))
    }

    /// Starts to write the tree below `root`, once, if the index is complete. Dropping `self` stops it.
    pub(crate) fn start(&self, opened: &OpenedArchive, root: Ino) -> anyhow::Result<()> {
        let Some(index) = opened.content.complete_index() else {
            return Ok(());
        };
        if self.running.get().is_some() {
            return Ok(());
        }
        let volume = Arc::clone(&opened.content);
        let running = (self.background).start(&index, root, volume, &opened.stats)?;
        // Cannot fail, because only this method sets it.
        drop(self.running.set(running));
        Ok(())
    }

    pub(crate) fn stop(&self) {
        self.background.cancel();
    }

    pub(crate) fn progress(&self) -> CopyProgress {
        let progress = self.background.progress();
        CopyProgress {
            directory: self.background.directory().to_string_lossy().into_owned(),
            state: match progress.state {
                CopyState::Waiting => "waiting",
                CopyState::Writing => "writing",
                CopyState::Retrying => "retrying",
                CopyState::Complete => "complete",
                CopyState::Incomplete => "incomplete",
                CopyState::Stopped => "stopped",
            }
            .to_owned(),
            files: progress.files,
            total_files: progress.total_files,
            bytes: progress.bytes,
            total_bytes: progress.total_bytes,
            failures: progress.failures,
        }
    }

    pub(crate) fn notes(&self, mount: &Mount) -> Vec<String> {
        let copy = self.background.progress().note;
        let copy = copy.map(|note| format!("copy: {note}"));
        let refusal = mount.passthrough_disabled_reason();
        let refusal = refusal.map(|why| format!("no passthrough, this process reads files: {why}"));
        copy.into_iter().chain(refusal).collect()
    }
}

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
