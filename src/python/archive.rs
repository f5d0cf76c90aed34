//! An opened archive.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, Once};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::error::{ERROR, INVALID, NOT_FOUND, exception, of_error};
use super::members::Members;
use super::network::{ThisProcess, runtime};
use super::opened::Opened;
use super::options;
use super::row::{self, Row};
use crate::archive::Version;
use crate::base::resolve::PathError;
use crate::index::published::{MissingRow, with_loading};
use crate::index::{Index, Ino, MAX_SHARDS, ShardPlan};
use crate::locate::SourceSpec;

type Counters = Vec<(&'static str, u64)>;

/// An indexed archive or image.
#[pyclass(frozen, module = "tarfs._native")]
pub(super) struct Archive {
    opened: ThisProcess<Arc<Opened>>,
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments of Python are converted, and belong to the method"
)]
#[pymethods]
impl Archive {
    /// Opens `url`, and indexes it if no index is saved or published. Another version than `version` is an error.
    #[new]
    #[pyo3(signature = (url, options, version = None))]
    fn new(
        py: Python<'_>,
        url: OsString,
        options: &Bound<'_, PyDict>,
        version: Option<&str>,
    ) -> PyResult<Self> {
        let parse = |text: &str| Version::from_str(text);
        let version = version.map(parse).transpose();
        let version = version.map_err(|error| exception(py, INVALID, &error.to_string()))?;
        let spec = SourceSpec::from(url);
        if spec.is_stdin() {
            let text = "standard input can only be materialized";
            return Err(exception(py, INVALID, text));
        }
        let context = options::context(&spec, options, runtime(py)?)?;
        let (location, stats) = (spec.redacted(), Arc::clone(&context.source.stats));
        let volume = py.detach(|| context.open(&spec.into()));
        let volume = volume.map_err(|error| of_error(py, &error))?;
        if let Some(version) = version {
            let checked = py.detach(|| version.check(&*volume));
            checked.map_err(|error| of_error(py, &error))?;
        }
        let index = volume.complete_index();
        let index = index.ok_or_else(|| exception(py, ERROR, "the archive is not indexed"))?;
        let opened = Arc::new(Opened {
            volume,
            index,
            location,
            stats,
            prefetch: Once::new(),
        });
        let opened = ThisProcess::new(opened);
        Ok(Self { opened })
    }

    /// Returns the version, as a text that [`new`](Self::new) takes.
    fn version(&self, py: Python<'_>) -> PyResult<String> {
        let opened = self.opened.get(py)?;
        Ok(Version::of(&*opened.volume).to_string())
    }

    /// Returns the entry at `path`.
    fn stat(&self, py: Python<'_>, path: OsString, follow: bool) -> PyResult<Row> {
        self.with_index(py, &path, follow, |index, ino| {
            Some(Row::of_entry(path.as_bytes(), index.entry(ino)?))
        })
    }

    /// Returns the entries in the directory at `path`, or with `deep` also those below.
    fn entries(&self, py: Python<'_>, path: OsString, deep: bool) -> PyResult<Vec<Row>> {
        self.with_index(py, &path, true, |index, ino| {
            Some(row::list(index, ino, path.as_bytes(), deep))
        })
    }

    /// Returns `len` bytes of the file `ino` from `start` on. It must have them.
    fn read<'py>(
        &self,
        py: Python<'py>,
        ino: u32,
        start: u64,
        len: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let opened = self.opened.get(py)?;
        PyBytes::new_with(py, len, |buffer| {
            let read = py.detach(|| opened.fill(Ino(ino), start, buffer));
            read.map_err(|error| of_error(py, &error))
        })
    }

    /// Cuts the archive into `count` shards: number, and entries, bytes, packed start and end of each.
    fn plan(&self, py: Python<'_>, count: u32) -> PyResult<Vec<(u32, [u64; 4])>> {
        let plan = self.shards(py, count)?;
        let shards = plan.shards().iter();
        let shards = shards.map(|it| {
            let sizes = [it.entries, it.bytes, it.packed_start, it.packed_end];
            (it.number, sizes)
        });
        Ok(shards.collect())
    }

    /// Reads the entries of shard `number` of `count` in archive order, or those of `only` among them.
    fn members(
        &self,
        py: Python<'_>,
        number: u32,
        count: u32,
        only: Option<Vec<u32>>,
    ) -> PyResult<Members> {
        let opened = self.opened.get(py)?;
        let plan = self.shards(py, count)?;
        let only = only.map(HashSet::<u32>::from_iter);
        let is_wanted = |ino: &&Ino| only.as_ref().is_none_or(|only| only.contains(&ino.0));
        let entries = plan.entries(number).iter().filter(is_wanted);
        Members::of_entries(Arc::clone(opened), entries.copied().collect())
    }

    /// Returns the numbers of the shards, of `count`, in which the entries `inos` are; 0 for those without one.
    fn shards_of(&self, py: Python<'_>, inos: Vec<u32>, count: u32) -> PyResult<Vec<u32>> {
        let plan = self.shards(py, count)?;
        let shards = inos.into_iter().map(|ino| plan.shard_of(Ino(ino)));
        Ok(shards.map(Option::unwrap_or_default).collect())
    }

    /// Writes shard `number` of `count` below `directory`, or finishes the tree of all shards if `number` is 0.
    /// Returns the numbers of entries and bytes.
    fn materialize(
        &self,
        py: Python<'_>,
        directory: OsString,
        number: u32,
        count: u32,
    ) -> PyResult<(u64, u64)> {
        let opened = self.opened.get(py)?;
        let plan = self.shards(py, count)?;
        let summary = py.detach(|| opened.materialize(Path::new(&directory), &plan, number));
        let summary = summary.map_err(|error| of_error(py, &*error))?;
        match summary.problems.first() {
            None => Ok((summary.entries, summary.bytes)),
            Some(problem) => Err(of_error(py, problem)),
        }
    }

    /// Returns the URL without secrets, the number of problems of the index, and the counters.
    fn info(&self, py: Python<'_>) -> PyResult<(&str, u64, Counters)> {
        let opened = self.opened.get(py)?;
        let problems = opened.index.problem_count();
        Ok((&opened.location, problems, opened.stats.snapshot()))
    }
}

impl Archive {
    /// Runs `access` with the entry at `path`.
    fn with_index<T: Send>(
        &self,
        py: Python<'_>,
        path: &OsString,
        follow: bool,
        access: impl FnOnce(&Index, Ino) -> Option<T> + Send,
    ) -> PyResult<T> {
        let index = &self.opened.get(py)?.index;
        let find = || {
            let ino = row::find(index, path.as_bytes(), follow)?;
            Ok(ino.and_then(|ino| access(index, ino)))
        };
        let found: Result<Option<T>, PathError> = py
            .detach(|| with_loading(find))
            .map_err(|error| of_error(py, &error))?;
        let reason = match found {
            Ok(Some(result)) => return Ok(result),
            Ok(None) => "not in the archive".to_owned(),
            Err(error) => error.to_string(),
        };
        let text = format!("{}: {reason}", path.display());
        Err(exception(py, NOT_FOUND, &text))
    }

    fn shards(&self, py: Python<'_>, count: u32) -> PyResult<ShardPlan> {
        let opened = self.opened.get(py)?;
        if opened.volume.as_archive().is_none() {
            let text = "SOURCE has layers, and only a single archive has shards";
            return Err(exception(py, INVALID, text));
        }
        if !(1..=MAX_SHARDS).contains(&count) {
            let text = format!("{count} shards: there can be 1 to {MAX_SHARDS}");
            return Err(exception(py, INVALID, &text));
        }
        let load = || {
            opened.index.load_tree_rows()?;
            Ok(ShardPlan::new(&opened.index, count))
        };
        let plan: Result<_, MissingRow> = py.detach(load);
        plan.map_err(|error| of_error(py, &error))
    }
}
