//! The state behind an opened archive.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Once};

use bytes::Bytes;
use pyo3::prelude::*;

use super::error::{ERROR, exception, of_error};
use super::process::{ProcessLocal, call, receive};
use crate::archive::{
    Archive, Callback, OpenError, PrefetchOptions, ReadError, TreeOrigin, TreePart, Version,
    Volume, WaitFor,
};
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::index::{Index, Ino, ShardPlan};
use crate::locate::{self, OpenContext, SourceSpec};
use crate::materialize::{self, EntryError, Materializer, Summary};

/// Maximum length of one read of the archive.
pub(super) const MAX_READ_BYTES: usize = 8 << 20;

/// Number of archives of a process that are scanned at once. The scans share the memory.
const MAX_SCANS: u64 = 2;

pub(super) struct Opened {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) index: Arc<Index>,
    pub(super) location: String,
    pub(super) stats: Arc<Stats>,
    pub(super) version: Version,
    context: OpenContext,
    spec: SourceSpec,
    prefetch: Once,
}

impl Opened {
    /// Opens `spec`, and indexes it if no index is saved or published. It must have the `expected` version. An
    /// interrupt cancels the scan.
    pub(super) fn open(
        py: Python<'_>,
        context: &OpenContext,
        spec: &SourceSpec,
        expected: Option<&Version>,
    ) -> PyResult<ProcessLocal<Arc<Self>>> {
        let mut opened = Self::try_open(py, context, spec, MAX_SCANS)?;
        if opened.as_ref().is_err_and(Failure::is_out_of_memory) {
            // It waits until there is no other scan.
            opened = Self::try_open(py, context, spec, 1)?;
        }
        let opened = opened.map_err(|failure| failure.into_exception(py))?;
        let volume = &*opened.get(py)?.volume;
        let checked = expected.map_or(Ok(()), |expected| expected.check(volume));
        checked.map_err(|error| of_error(py, &error))?;
        Ok(opened)
    }

    fn try_open(
        py: Python<'_>,
        context: &OpenContext,
        spec: &SourceSpec,
        memory_divisor: u64,
    ) -> PyResult<Result<ProcessLocal<Arc<Self>>, Failure>> {
        let (mut own, tree) = (context.clone(), spec.clone().into());
        own.archive.scan.memory /= memory_divisor;
        let volume = match call(py, move || own.open_early(&tree))? {
            Ok(volume) => ProcessLocal::new(volume),
            Err(error) => return Ok(Err(Failure::Open(error))),
        };
        let scanned = volume.get(py)?;
        let (end, ended) = sync_channel::<()>(1);
        scanned.on_available(WaitFor::End, Callback::new(move || drop(end)));
        receive(py, &Mutex::new(ended))?;
        if let Some(failure) = scanned.as_archive().and_then(Archive::failure) {
            return Ok(Err(Failure::Scan(failure)));
        }
        let index = scanned.complete_index();
        let index = index.ok_or_else(|| exception(py, ERROR, "the archive is not indexed"))?;
        let index = call(py, move || index.into_tree())?;
        let index = index.map_err(|error| of_error(py, &error))?;
        Ok(Ok(ProcessLocal::new(Arc::new(Self {
            volume: Arc::clone(scanned),
            index,
            location: spec.redacted(),
            stats: Arc::clone(&context.source.stats),
            version: Version::of(&**scanned),
            context: context.clone(),
            spec: spec.clone(),
            prefetch: Once::new(),
        }))))
    }

    /// Notes about trees for which neither the archive nor the user nor the image's manifest vouches.
    pub(super) fn notes(&self) -> Vec<String> {
        let archives = self.volume.archives().into_iter();
        let notes = archives.filter_map(Archive::foreign_tree_note);
        notes
            .map(|note| note.replace("--no-published-index", "index=False"))
            .collect()
    }

    /// Compares what leads to the entry at `path` with the archive, if others made the index.
    pub(super) fn compare_path(
        self: &Arc<Self>,
        py: Python<'_>,
        path: &OsString,
        follow: bool,
    ) -> PyResult<()> {
        let path = path.clone();
        self.compare(py, move |volume| {
            volume.compare_path_blocking(path.as_bytes(), follow)
        })
    }

    /// Compares the entry `ino` with the archive, if others made the index.
    pub(super) fn compare_entry(self: &Arc<Self>, py: Python<'_>, ino: Ino) -> PyResult<()> {
        self.compare(py, move |volume| {
            volume.compare_blocking(TreePart::Entry(ino))
        })
    }

    fn compare(
        self: &Arc<Self>,
        py: Python<'_>,
        compare: impl FnOnce(&dyn Volume) -> Result<(), ReadError> + Send + 'static,
    ) -> PyResult<()> {
        if !self.volume.is_compared() {
            return Ok(());
        }
        let this = Arc::clone(self);
        let compared = call(py, move || compare(&*this.volume))?;
        compared.map_err(|error| of_error(py, &error))
    }

    /// Opens the same version again for a verb that writes, if only a publisher vouches for the tree.
    pub(super) fn open_to_write(
        &self,
        py: Python<'_>,
    ) -> PyResult<Option<ProcessLocal<Arc<Self>>>> {
        let archive = self.volume.as_archive();
        if archive.is_none_or(|archive| archive.tree_origin() >= TreeOrigin::WRITTEN) {
            return Ok(None);
        }
        let mut context = self.context.clone();
        context.published_index.least_origin = TreeOrigin::WRITTEN;
        context.published_index.is_searched_early = false;
        Self::open(py, &context, &self.spec, Some(&self.version)).map(Some)
    }

    /// Writes shard `number` of `plan` by `writer`, or finishes the tree of all shards if it is 0.
    pub(super) fn materialize(
        &self,
        writer: Materializer,
        plan: &ShardPlan,
        number: u32,
    ) -> Result<Summary, Box<dyn Error + Send + Sync>> {
        let (read, summary) = if number == 0 {
            writer.finish_shards(&*self.volume, &self.index, &self.version)
        } else {
            let archive = self.volume.as_archive().ok_or(ReadError::NotAFile)?;
            writer.write_shard(archive, &self.index, plan, number)
        };
        // An error of the destination stops the reading, too.
        let summary = summary?;
        read.map_err(cause)?;
        Ok(summary)
    }

    /// Reads as [`Volume::try_read`] does.
    pub(super) fn try_read(
        &self,
        ino: Ino,
        offset: u64,
        len: usize,
    ) -> Option<Result<Bytes, ReadError>> {
        // Reads work without it.
        let start = || drop(self.volume.start_prefetch(PrefetchOptions::default()));
        self.prefetch.call_once(start);
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.volume.report_read(ino, offset, len);
        self.volume.try_read(ino, offset, len)
    }

    /// Reads as [`Volume::read_before_cut`] does.
    pub(super) fn read(&self, ino: Ino, offset: u64, len: usize) -> Result<Bytes, ReadError> {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.volume.read_before_cut(ino, offset, len)
    }
}

/// Why an archive is not open.
enum Failure {
    Open(locate::Error),
    Scan(Arc<OpenError>),
}

impl Failure {
    fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Open(error) => error.is_out_of_memory(),
            Self::Scan(error) => error.is_out_of_memory(),
        }
    }

    fn into_exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Open(error) => of_error(py, &error),
            Self::Scan(error) => of_error(py, &*error),
        }
    }
}

/// The error of the archive or of the sink.
pub(super) fn cause(error: EntryError<materialize::Error>) -> Box<dyn Error + Send + Sync> {
    match error {
        EntryError::Read(_, error) => error.into(),
        EntryError::Sink(error) => error.into(),
    }
}
