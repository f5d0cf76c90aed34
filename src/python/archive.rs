//! An opened archive.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};

use super::error::{ACCESS_DENIED, DAMAGED, INVALID, NOT_FOUND, exception, of_error};
use super::members::Members;
use super::opened::{MAX_READ_BYTES, Opened};
use super::options;
use super::process::{ProcessLocal, call};
use super::row::{self, Row};
use crate::archive::{ReadError, Version};
use crate::base::resolve::{PathError, without_dots};
use crate::index::{Index, Ino, MAX_SHARDS, ShardPlan};
use crate::locate::SourceSpec;
use crate::materialize::{Materializer, Options};
use crate::source;

type Counters = Vec<(&'static str, u64)>;

/// An indexed archive or image.
#[pyclass(frozen, module = "tarfs._native")]
pub(super) struct Archive {
    opened: ProcessLocal<Arc<Opened>>,
    /// The archive as it is opened to be written, unless that is `opened`.
    to_write: PyOnceLock<Option<ProcessLocal<Arc<Opened>>>>,
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments of Python are converted, and belong to the method"
)]
#[pymethods]
impl Archive {
    /// Opens `url`, which must have that `version`, and indexes it if no index is saved or published.
    #[new]
    fn new(
        py: Python<'_>,
        url: OsString,
        options: &Bound<'_, PyDict>,
        version: Option<&str>,
    ) -> PyResult<Self> {
        let version = version.map(str::parse::<Version>).transpose();
        let version = version.map_err(|error| exception(py, INVALID, &error.to_string()))?;
        let spec = SourceSpec::from(url);
        if spec.is_stdin() {
            let text = "standard input can only be materialized";
            return Err(exception(py, INVALID, text));
        }
        let context = options::context(py, &spec, options)?;
        let opened = Opened::open(py, &context, &spec, version.as_ref())?;
        let to_write = PyOnceLock::new();
        Ok(Self { opened, to_write })
    }

    /// Returns the entry at `path`.
    fn stat(&self, py: Python<'_>, path: OsString, follow: bool) -> PyResult<Row> {
        self.with_index(py, &path, follow, |path, index, ino| {
            Some(Row::of_entry(path, index.entry(ino)?))
        })
    }

    /// Returns the entries in the directory at `path`, or with `deep` also those below.
    fn entries(&self, py: Python<'_>, path: OsString, deep: bool) -> PyResult<Vec<Row>> {
        self.with_index(py, &path, true, move |path, index, ino| {
            Some(row::list(index, ino, path, deep, |_| true))
        })
    }

    /// Compares the entry `ino` with the archive, if its index is of others.
    fn compare(&self, py: Python<'_>, ino: u32) -> PyResult<()> {
        self.opened.get(py)?.compare_entry(py, Ino(ino))
    }

    /// Returns notes for the user about the origin of the tree.
    fn notes(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.opened.get(py)?.notes())
    }

    /// Returns `len` bytes of the file `ino` from `start` on, which it must have, or those before the end of a truncated
    /// archive and before damage. An error if there is none.
    fn read<'py>(
        &self,
        py: Python<'py>,
        ino: u32,
        start: u64,
        len: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (opened, ino) = (self.opened.get(py)?, Ino(ino));
        let mut offset = start;
        let end = start.saturating_add(len as u64);
        let bytes = PyBytes::new_with(py, len, |mut buffer| {
            while offset < end {
                let left = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX);
                let len = left.min(buffer.len()).min(MAX_READ_BYTES);
                let cached = py.detach(|| opened.try_read(ino, offset, len));
                let read = if let Some(Ok(bytes)) = cached {
                    Ok(bytes)
                } else {
                    let opened = Arc::clone(opened);
                    call(py, move || opened.read(ino, offset, len))?
                };
                let bytes = match read {
                    Ok(bytes) => bytes,
                    // The next read fails.
                    Err(_) if offset > start => break,
                    Err(error) => return Err(of_error(py, &error)),
                };
                let parts = buffer.split_at_mut_checked(bytes.len());
                let parts = parts.filter(|_| !bytes.is_empty());
                let (now, later) = parts.ok_or_else(|| of_error(py, &ReadError::Index))?;
                py.detach(|| now.copy_from_slice(&bytes));
                offset = offset.saturating_add(bytes.len() as u64);
                buffer = later;
            }
            Ok(())
        })?;
        match usize::try_from(offset.saturating_sub(start)) {
            Ok(done) if done < len => {
                let available = bytes.as_bytes().get(..done).unwrap_or_default();
                Ok(PyBytes::new(py, available))
            }
            _ => Ok(bytes),
        }
    }

    /// Cuts the archive into `count` shards: number, and entries, bytes, packed start and end of each.
    fn plan_shards(&self, py: Python<'_>, count: u32) -> PyResult<Vec<(u32, [u64; 4])>> {
        let plan = shards(py, self.opened.get(py)?, count)?;
        let shards = plan.shards().iter();
        let shards = shards.map(|shard| {
            let sizes = [
                shard.entries,
                shard.bytes,
                shard.packed_start,
                shard.packed_end,
            ];
            (shard.number, sizes)
        });
        Ok(shards.collect())
    }

    /// Reads the entries of shard `number` of `count` in archive order, or those of `only` among them.
    fn members(
        &self,
        py: Python<'_>,
        number: u32,
        count: u32,
        only: Option<Vec<(OsString, u32)>>,
    ) -> PyResult<Members> {
        let opened = self.opened.get(py)?;
        let plan = shards(py, opened, count)?;
        let only = only.map(|only| self.check_entries(py, only)).transpose()?;
        let only = only.map(HashSet::<Ino>::from_iter);
        let is_wanted = |ino: &&Ino| only.as_ref().is_none_or(|only| only.contains(ino));
        let entries = plan.entries(number).iter().filter(is_wanted);
        Members::of_entries(Arc::clone(opened), entries.copied().collect())
    }

    /// Returns the entries of shard `number` of `count`, under all their names.
    fn shard_entries(&self, py: Python<'_>, number: u32, count: u32) -> PyResult<Vec<Row>> {
        let plan = shards(py, self.opened.get(py)?, count)?;
        self.with_index(py, &OsString::new(), true, move |path, index, ino| {
            let is_wanted = |ino| plan.shard_of(ino) == Some(number);
            Some(row::list(index, ino, path, true, is_wanted))
        })
    }

    /// Returns the numbers of the shards, of `count`, in which the `entries` are; 0 for those without one.
    fn shards_of(
        &self,
        py: Python<'_>,
        entries: Vec<(OsString, u32)>,
        count: u32,
    ) -> PyResult<Vec<u32>> {
        let plan = shards(py, self.opened.get(py)?, count)?;
        let entries = self.check_entries(py, entries)?.into_iter();
        let shards = entries.map(|ino| plan.shard_of(ino));
        Ok(shards.map(Option::unwrap_or_default).collect())
    }

    /// Writes shard `number` of `count` below `directory`, or finishes the tree of all shards if `number` is 0.
    /// Returns the numbers of entries and bytes. A finished tree may lack members, which is an error.
    fn write_shard(
        &self,
        py: Python<'_>,
        directory: OsString,
        number: u32,
        count: u32,
    ) -> PyResult<(u64, u64)> {
        let shown = self.opened.get(py)?;
        let written = self
            .to_write
            .get_or_try_init(py, || shown.open_to_write(py))?;
        let opened = Arc::clone(
            written
                .as_ref()
                .map_or(Ok(shown), |archive| archive.get(py))?,
        );
        let plan = shards(py, &opened, count)?;
        let location = &shown.location;
        let missing = if number == 0 {
            opened.index.problem_count()
        } else {
            0
        };
        let path = PathBuf::from(directory);
        let (destination, stats) = (path.clone(), Arc::clone(&opened.stats));
        let open = move || Materializer::new(&destination, Options::for_this_user(), stats);
        let writer = call(py, open)?.map_err(|error| of_error(py, &error))?;
        // After an interrupt.
        let _stop = writer.stop_on_drop();
        let summary = call(py, move || opened.materialize(writer, &plan, number))?;
        let summary = summary.map_err(|error| of_error(py, &*error))?;
        match (summary.problems.first(), summary.errors) {
            (None, 0) if missing > 0 => {
                let text =
                    format!("{location}: members that are damaged or not in the tree: {missing}");
                Err(exception(py, DAMAGED, &text))
            }
            (None, 0) => Ok((summary.entries, summary.bytes)),
            (Some(problem), _) => Err(of_error(py, problem)),
            (None, errors) => {
                let text = format!(
                    "{}: {errors} entries cannot be written to the destination directory",
                    path.display()
                );
                Err(exception(py, ACCESS_DENIED, &text))
            }
        }
    }

    /// Returns the URL without secrets, the version, the number of problems of the index, and the counters.
    fn info(&self, py: Python<'_>) -> PyResult<(&str, String, u64, Counters)> {
        let opened = self.opened.get(py)?;
        let (location, version) = (&opened.location, opened.version.to_string());
        let problems = opened.index.problem_count();
        Ok((location, version, problems, opened.stats.snapshot()))
    }
}

impl Archive {
    /// Runs `access` with the entry at `path`.
    fn with_index<T: Send + 'static>(
        &self,
        py: Python<'_>,
        path: &OsString,
        follow: bool,
        access: impl FnOnce(&[u8], &Index, Ino) -> Option<T> + Send + 'static,
    ) -> PyResult<T> {
        let opened = self.opened.get(py)?;
        opened.compare_path(py, path, follow)?;
        let index = Arc::clone(&opened.index);
        let name = path.clone();
        let found = py.detach(move || -> Result<Option<T>, PathError> {
            let name = name.as_bytes();
            let (entry, path) = (index.resolve(name, follow)?, without_dots(name));
            Ok(entry.and_then(|entry| access(&path, &index, entry.ino())))
        });
        let reason = match found {
            Ok(Some(result)) => return Ok(result),
            Ok(None) => "not in the archive".to_owned(),
            Err(error) => error.to_string(),
        };
        let text = format!("{}: {reason}", path.display());
        Err(exception(py, NOT_FOUND, &text))
    }

    /// The numbers of `entries`, which must be those of this archive at their paths.
    fn check_entries(&self, py: Python<'_>, entries: Vec<(OsString, u32)>) -> PyResult<Vec<Ino>> {
        let index = Arc::clone(&self.opened.get(py)?.index);
        let found = py.detach(move || {
            let found = entries.into_iter().map(|(path, ino)| {
                let found = index.resolve(path.as_bytes(), false).ok().flatten();
                let found = found.map(|entry| entry.ino());
                found.filter(|found| found.0 == ino).ok_or(path)
            });
            found.collect::<Result<Vec<_>, _>>()
        });
        found.map_err(|path| {
            let text = format!("{}: the entry is of another archive", path.display());
            exception(py, INVALID, &text)
        })
    }
}

fn shards(py: Python<'_>, opened: &Opened, count: u32) -> PyResult<ShardPlan> {
    if opened.volume.as_archive().is_none() {
        let text = "SOURCE has layers, and only a single archive has shards";
        return Err(exception(py, INVALID, text));
    }
    if !(1..=MAX_SHARDS).contains(&count) {
        let text = format!("{count} shards: there can be 1 to {MAX_SHARDS}");
        return Err(exception(py, INVALID, &text));
    }
    let index = Arc::clone(&opened.index);
    Ok(py.detach(move || ShardPlan::new(&index, count)))
}

/// Returns the paths of the archives below `url`, a prefix in an object store or a local directory.
#[pyfunction]
pub(super) fn list_archives(
    py: Python<'_>,
    url: OsString,
    options: &Bound<'_, PyDict>,
) -> PyResult<Vec<String>> {
    let spec = SourceSpec::from(url);
    let context = options::context(py, &spec, options)?;
    let listing = call(py, move || context.list_place(&spec))?;
    let listing = listing.map_err(|error| of_error(py, &error))?;
    let paths = listing.archives.into_iter().map(|archive| archive.path);
    Ok(paths.collect())
}

/// Returns the canonical name of `url` if it is one of a server or an object that tarfs reads itself.
#[pyfunction]
pub(super) fn own_name(url: &str) -> Option<String> {
    source::own_name(url)
}

/// Returns `url` with absolute paths on this machine.
#[pyfunction]
pub(super) fn absolute_source(url: OsString) -> OsString {
    let spec = SourceSpec::from(url.clone());
    match spec.absolute() {
        absolute if absolute == spec => url,
        SourceSpec::Plain(path) => path,
        absolute => absolute.to_string().into(),
    }
}

/// Returns the path of the local file that `place` names, a path or a URL; `None` if it is no local file.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "Python passes values")]
pub(super) fn local_path(place: OsString) -> Option<PathBuf> {
    source::local_path(&place)
}
