//! The copy of a mount's tree on disk, for the mount and its status.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::failure::Failure;
use super::opened::Opened;
use super::status::CopyProgress;
use crate::base::directory::resolve_destination;
use crate::fuse::{self, BackingFiles, Mount};
use crate::index::Ino;
use crate::materialize::XattrFilter;
use crate::materialize::{BackgroundCopy, CopyState, RunningCopy};

/// The copy of a mount's tree on disk.
#[derive(Debug)]
pub struct MountCopy {
    background: Arc<BackgroundCopy>,
    /// Set once the index is complete.
    running: OnceLock<RunningCopy>,
}

impl MountCopy {
    /// Opens `directory` for the copy of the mount on `mountpoint`. `xattrs` selects the attributes.
    ///
    /// # Errors
    /// If the directory cannot be used, or it and the mount hide each other.
    pub fn open(directory: &Path, mountpoint: &Path, xattrs: XattrFilter) -> Result<Self, Failure> {
        let mountpoint = fuse::canonical_mountpoint(mountpoint);
        let mountpoint = mountpoint.map_err(|error| Failure::of(&error))?;
        let copy = resolve_destination(directory).unwrap_or_else(|_| directory.to_owned());
        if copy.starts_with(&mountpoint) || mountpoint.starts_with(&copy) {
            let (copy, mountpoint) = (copy.display(), mountpoint.display());
            return Err(Failure::new(format!(
                "{copy}: the copy and the mount on {mountpoint} would hide each other (name a directory beside it)"
            )));
        }
        let background = BackgroundCopy::open(directory, xattrs);
        let background = background.map_err(|error| Failure::of(&error))?;
        Ok(Self {
            background,
            running: OnceLock::new(),
        })
    }

    pub(super) fn backing_files(&self) -> Arc<dyn BackingFiles> {
        Arc::new(CopyBackingFiles(Arc::clone(&self.background)))
    }

    /// Starts to write the tree below `root`, once, if the index is complete. Dropping `self` stops it.
    pub(super) fn start(&self, opened: &Opened, root: Ino) -> Result<(), Failure> {
        let Some(index) = opened.volume.complete_index() else {
            return Ok(());
        };
        if self.running.get().is_some() {
            return Ok(());
        }
        let volume = Arc::clone(&opened.volume);
        let running = (self.background).start(&index, root, volume, &opened.stats);
        let running = running.map_err(|error| Failure::of(&error))?;
        // Cannot fail, because only this method sets it.
        drop(self.running.set(running));
        Ok(())
    }

    /// Ends it soon.
    pub fn stop(&self) {
        self.background.cancel();
    }

    pub(super) fn progress(&self) -> CopyProgress {
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

    pub(super) fn notes(&self, mount: &Mount) -> Vec<String> {
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
