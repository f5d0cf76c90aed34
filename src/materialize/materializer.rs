//! The parallel writer: a sink that writes the members of a scan to a tree.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::error::{Error, Problems, WithAction};
use super::layers::{self, LayerState};
use super::lock::DestinationLock;
use super::options::{Options, Summary};
use super::resume::is_tree_unchanged;
use super::resume::journal::Journal;
use super::staging::Staging;
use super::tree_writer::TreeWriter;
use super::write::{
    AttributeTarget, CHANGE_MODE, Context, Directory, Job, Unwritable, sync_file_system,
};
use crate::archive::ResumePoint;
use crate::archive::scan::{PayloadEnd, Sink};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::Plain;
use crate::base::stats::Stats;
use crate::index::MemoryLimit;
use crate::layers::WhiteoutFormat;
use crate::tar::Member;

/// Ends a run with [`Error::Interrupted`] when it is dropped, unless the run is over.
#[derive(Debug)]
pub struct StopOnDrop(Arc<Context>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.problems.stop(Error::Interrupted);
    }
}

/// Writes members below a directory.
#[derive(Debug)]
pub struct Materializer {
    pub(super) tree: TreeWriter,
    /// Path of the destination, for messages, if the run syncs it.
    sync: Option<PathBuf>,
    /// Final mode of the destination, unless a member sets another one.
    pub(super) root_mode: Option<u32>,
    current: CurrentFile,
    layers: Option<LayerState>,
    index_memory: MemoryLimit,
    /// That of a run with a journal. Others lock before they compare, or not at all.
    lock: Option<DestinationLock>,
}

/// The file of the next piece of payload.
#[derive(Debug)]
enum CurrentFile {
    /// The payload is dropped.
    Nothing,
    /// No payload so far.
    Waiting(Job),
    /// A writer receives it in pieces.
    Streaming,
}

impl Materializer {
    /// Opens the existing directory `destination` and starts the writers.
    ///
    /// # Errors
    /// [`Error::Destination`] and [`Error::Thread`].
    pub fn new(destination: &Path, options: Options, stats: Arc<Stats>) -> Result<Self, Error> {
        let top = Directory::open_top(destination)
            .map_err(|errno| Error::Destination(destination.to_owned(), errno))?;
        let problems = Problems::new(options.reporter.clone());
        let sync = options.sync.then(|| destination.to_owned());
        let unwritable = Unwritable::of(destination, &top);
        let mut materializer = Self::start(top, problems, options, stats)?;
        if let Some(unwritable) = unwritable {
            drop(materializer.tree.context.unwritable.set(unwritable));
        }
        materializer.sync = sync;
        Ok(materializer)
    }

    /// Like [`Materializer::new`], in a new directory of `staging`, which the caller commits after success.
    ///
    /// # Errors
    /// When the directory cannot be made, [`Error::Interrupted`], and [`Error::Thread`].
    pub fn staged(staging: &Staging, options: Options, stats: Arc<Stats>) -> Result<Self, Error> {
        let (top, mode) = staging.create()?;
        let stop_error = Arc::clone(&staging.stop_error);
        let problems = Problems::with_stop_error(stop_error, options.reporter.clone());
        let mut materializer = Self::start(top, problems, options, stats)?;
        materializer.root_mode = Some(mode);
        Ok(materializer)
    }

    /// Like [`Materializer::new`], with a journal beside `destination` for a later run of the same `run_key`.
    ///
    /// If the journal of an earlier run exists and its tree is unchanged, this restores its state. The scan
    /// then starts at the returned resume point.
    ///
    /// # Errors
    /// Those of [`Materializer::new`], [`Error::InUse`], and [`Error::Journal`].
    pub fn with_journal(
        destination: &Path,
        options: Options,
        stats: Arc<Stats>,
        run_key: &str,
    ) -> Result<(Self, Option<ResumePoint>), Error> {
        let lock = DestinationLock::acquire(destination)?;
        let mut materializer = Self::new(destination, options, stats)?;
        materializer.lock = Some(lock);
        let tree = &mut materializer.tree;
        let (journal, recovered) = Journal::open(destination, run_key)?;
        let journal = Arc::new(journal);
        // A run has at most one journal.
        drop(tree.context.file_observer.set(Arc::clone(&journal) as _));
        tree.resume.journal = Some(Arc::clone(&journal));
        let Some(recovered) = recovered else {
            return Ok((materializer, None));
        };
        if !is_tree_unchanged(&recovered.tree_items, &mut tree.destination) {
            tree.context.problems.warn(
                "files of the interrupted run were changed since then; starting from the beginning",
            );
            journal.restart()?;
            return Ok((materializer, None));
        }
        let resume_point = recovered.resume_point.clone();
        tree.restore(recovered);
        Ok((materializer, Some(resume_point)))
    }

    /// Returns a guard that stops the run from another thread.
    pub fn stop_on_drop(&self) -> StopOnDrop {
        StopOnDrop(Arc::clone(&self.tree.context))
    }

    pub(super) fn start(
        top: Directory,
        problems: Problems,
        options: Options,
        stats: Arc<Stats>,
    ) -> Result<Self, Error> {
        Ok(Self {
            index_memory: options.index_memory.clone(),
            tree: TreeWriter::start(top, problems, options, stats)?,
            sync: None,
            root_mode: None,
            current: CurrentFile::Nothing,
            layers: None,
            lock: None,
        })
    }

    /// Number of writer threads.
    pub fn writer_count(&self) -> usize {
        self.tree.destination.writers.count()
    }

    /// Starts a run over layers in an empty destination. `whiteouts` is the format of their deletions.
    pub fn begin_layers(&mut self, whiteouts: WhiteoutFormat) {
        self.layers = Some(LayerState::new(whiteouts, self.index_memory.clone()));
    }

    /// Starts the next layer. Call [`end_layer`](Self::end_layer) when it is complete.
    pub fn begin_layer(&mut self) {
        if let Some(layers) = &mut self.layers {
            layers.begin_layer(self.tree.context.entry_quota.max_entries());
        }
    }

    /// Ends the current layer. Returns the bytes of its files, holes included.
    ///
    /// # Errors
    /// The error that stopped the run.
    pub fn end_layer(&mut self) -> Result<u64, Error> {
        let file_bytes = self.layers.as_mut().map_or(0, LayerState::end_layer);
        self.tree
            .context
            .problems
            .check_fatal()
            .map(|()| file_bytes)
    }

    /// Waits for the writers, makes deferred links, and sets directory attributes.
    ///
    /// Also needed after a failure, so that existing directories get their attributes.
    ///
    /// # Errors
    /// The error that stopped the run.
    pub fn finish(mut self) -> Result<Summary, Error> {
        self.cut_payload();
        if self.needs_resume() {
            return self.suspend();
        }
        let tree = &mut self.tree;
        tree.resume
            .before_finish(&tree.destination, &tree.selection);
        let layers = self.layers.take();
        let merged = layers.and_then(|layers| layers.place_all(tree));
        tree.make_deferred_links();
        if self.needs_resume() {
            return self.suspend();
        }
        let tree = &mut self.tree;
        tree.resume
            .before_finish(&tree.destination, &tree.selection);
        if let Some(mode) = self.root_mode {
            let top = AttributeTarget::Open(tree.destination.top.as_fd());
            if let Err(error) = top.chmod(mode).with_action(CHANGE_MODE) {
                tree.context.problems.add(&ArchivePath::root(), error);
            }
        }
        if let Some(merged) = merged {
            layers::finish_root(&merged.index, tree);
        }
        tree.apply_deferred_attributes();
        let problems = &tree.context.problems;
        tree.selection.report_unmatched_paths(problems);
        self.close()
    }

    /// Ends the writers of a complete run.
    pub(super) fn close(self) -> Result<Summary, Error> {
        let tree = self.tree;
        tree.destination.writers.close();
        let (problems, stats) = (&tree.context.problems, &tree.context.stats);
        problems.check_fatal()?;
        if let Some(path) = &self.sync {
            sync_file_system(&tree.destination.top, path, stats)?;
        }
        if let Some(journal) = &tree.resume.journal {
            journal.remove();
        }
        Ok(tree.context.summary())
    }

    /// Ends a run that a later run resumes, and leaves the final steps to it.
    ///
    /// # Errors
    /// The error that stopped the run, if the destination caused it.
    pub fn suspend(mut self) -> Result<Summary, Error> {
        self.cut_payload();
        let mut tree = self.tree;
        tree.resume
            .before_suspend(&tree.destination, &tree.selection);
        tree.destination.writers.close();
        tree.context.problems.check_fatal()?;
        Ok(tree.context.summary())
    }

    /// Whether a later run continues. Directories must stay writable for it.
    fn needs_resume(&self) -> bool {
        self.tree.resume.journal.is_some() && self.tree.context.problems.fatal().is_some()
    }

    /// Ends an open payload, and waits for the writers.
    pub(super) fn cut_payload(&mut self) {
        if !matches!(self.current, CurrentFile::Nothing) {
            self.end_payload(PayloadEnd::Cut);
        }
        self.tree.destination.writers.wait_for_all();
    }

    fn end_payload(&mut self, end: PayloadEnd) {
        let writers = &mut self.tree.destination.writers;
        match std::mem::replace(&mut self.current, CurrentFile::Nothing) {
            CurrentFile::Nothing => {}
            CurrentFile::Waiting(job) if end == PayloadEnd::Complete => {
                writers.write_file(job, Bytes::new());
            }
            CurrentFile::Waiting(job) => {
                writers.begin_file(job);
                writers.end_file(end);
            }
            CurrentFile::Streaming => writers.end_file(end),
        }
    }
}

impl Sink for Materializer {
    type Error = Error;

    fn member(&mut self, member: Member) -> Result<(), Error> {
        let tree = &mut self.tree;
        tree.context.problems.check_fatal()?;
        let job = if let Some(layers) = &mut self.layers {
            layers.apply_member(member, tree)
        } else {
            let (destination, selection) = (&mut tree.destination, &tree.selection);
            if !tree
                .resume
                .before_member(destination, selection, &tree.links)
            {
                return Ok(());
            }
            let problems = &tree.context.problems;
            let selected = tree.selection.select_member(&member, problems);
            selected.and_then(|output_path| {
                let problems = &tree.context.problems;
                problems.report_stripped_prefix(output_path.stripped);
                tree.begin_member(member, output_path.path)
            })
        };
        self.current = job.map_or(CurrentFile::Nothing, CurrentFile::Waiting);
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.tree.context.problems.check_fatal()?;
        let writers = &mut self.tree.destination.writers;
        match std::mem::replace(&mut self.current, CurrentFile::Nothing) {
            CurrentFile::Nothing => return Ok(()),
            CurrentFile::Waiting(job) if job.member.payload.len() == bytes.len() as u64 => {
                writers.write_file(job, bytes);
                return Ok(());
            }
            // Pieces are never gathered, because a held piece would keep buffers that the rest may need.
            CurrentFile::Waiting(job) => writers.begin_file(job),
            CurrentFile::Streaming => {}
        }
        writers.write_piece(bytes);
        self.current = CurrentFile::Streaming;
        Ok(())
    }

    fn member_end(&mut self, end: PayloadEnd) -> Result<(), Error> {
        self.end_payload(end);
        self.tree.resume.after_member();
        self.tree.context.problems.check_fatal()
    }

    fn resume_point(&mut self, resume_point: ResumePoint) {
        let entries = self.tree.context.entry_quota.count();
        self.tree.resume.set_resume_point(resume_point, entries);
    }

    fn warning(&mut self, text: &str) {
        self.tree.context.problems.warn(text);
    }

    fn damage(&mut self, _offset: Plain, text: &str) {
        let is_in_content = !matches!(self.current, CurrentFile::Nothing);
        self.tree.context.problems.damage(text, is_in_content);
    }
}
