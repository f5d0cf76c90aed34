//! One archive on a server, opened by the library.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tarfs::Stats;
use tarfs::archive::{Archive, DiskCacheMode, OpenError, OpenOptions, scan};
use tarfs::materialize::{self, Materializer};
use tarfs::source::{self, Retry, Source, Validator};
use tempfile::TempDir;

use super::http::{Resource, Server};
use super::runtime::TestRuntime;
use super::tree::Tree;

/// A server, a client, and a directory for indexes and the disk cache.
pub(crate) struct TestEnv {
    pub(crate) server: Server,
    pub(crate) network: TestRuntime,
    pub(crate) cache: TempDir,
}

/// Path of the archive on the server.
pub(crate) const PATH: &str = "/archive";

impl TestEnv {
    pub(crate) fn new() -> Self {
        Self::on(TestRuntime::new())
    }

    fn on(network: TestRuntime) -> Self {
        Self {
            server: Server::start(),
            network,
            cache: tempfile::tempdir().expect("a directory"),
        }
    }

    /// As [`TestEnv::with_archive`], on a clock that stands still, for tests that count requests.
    pub(crate) fn with_frozen_clock(packed: Bytes) -> Self {
        let env = Self::on(TestRuntime::frozen());
        env.serve(Resource::new(packed).etag("\"1\""));
        env
    }

    /// An environment that serves `packed` with a strong entity tag.
    pub(crate) fn with_archive(packed: Bytes) -> Self {
        let env = Self::new();
        env.serve(Resource::new(packed).etag("\"1\""));
        env
    }

    pub(crate) fn serve(&self, resource: Resource) {
        self.server.serve(PATH, resource);
    }

    /// Materializes the served archive in `destination`.
    pub(crate) fn materialize(
        &self,
        options: &scan::Options,
        destination: &Path,
    ) -> (materialize::Summary, Arc<Stats>) {
        let (source, stats) = self.source();
        let for_this_user = materialize::Options::for_this_user();
        let sink = Materializer::new(destination, for_this_user, stats.clone());
        let mut sink = sink.expect("a destination");
        let scanned = scan::scan(&source, options, self.network.handle(), &stats, &mut sink);
        scanned.expect("scanned");
        (sink.finish().expect("written"), stats)
    }

    /// Materializes the served archive, which must give `tree`.
    #[track_caller]
    pub(crate) fn assert_materializes(&self, options: &scan::Options, tree: &Tree) -> Arc<Stats> {
        let root = tempfile::tempdir().expect("a directory");
        let (summary, stats) = self.materialize(options, root.path());
        assert_eq!(summary.errors, 0, "{:?}", summary.problems);
        for (name, content) in &tree.files {
            let written = std::fs::read(root.path().join(name)).expect("a file");
            assert!(written == *content, "{name} is wrong");
        }
        stats
    }

    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions {
            scan: scan_options(),
            cache_dir: Some(self.cache.path().to_owned()),
            index_file: None,
            published_index: None,
            index_memory: tarfs::index::MemoryLimit::default(),
            index_rows: tarfs::index::store::RowsToLoad::All,
            should_rescan_unproven: false,
            should_log_problems: false,
            layer: None,
            resources: None,
            peers: None,
            // A fixed limit, because the free space of the disk varies.
            disk_cache: DiskCacheMode::Enabled {
                limit_bytes: Some(1 << 30),
            },
        }
    }

    /// As [`TestEnv::options`], but every byte that is not in memory is read from the source.
    pub(crate) fn options_without_disk_cache(&self) -> OpenOptions {
        OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..self.options()
        }
    }

    /// The source as a new process opens it, with its own counters.
    pub(crate) fn source(&self) -> (Arc<dyn Source>, Arc<Stats>) {
        let stats = Arc::<Stats>::default();
        let options = source::Options {
            stats: Arc::clone(&stats),
            idle_timeout: Duration::from_secs(20),
            retry: Retry {
                attempts: 2,
                retries_outages: false,
                initial_pause: Duration::ZERO,
                max_pause: Duration::ZERO,
            },
            ..source::Options::default()
        };
        let url = self.server.url(PATH);
        let source = self.network.block_on(source::open(&url, options));
        (source.expect("a source"), stats)
    }

    pub(crate) fn try_open(&self, options: &OpenOptions) -> Result<Archive, OpenError> {
        let (source, stats) = self.source();
        Archive::open(source, options, self.network.handle(), &stats)
    }

    /// Opens the archive with empty memory and zero counters, as a new process does.
    pub(crate) fn open_with(&self, options: &OpenOptions) -> Archive {
        self.try_open(options).expect("an archive")
    }

    pub(crate) fn open(&self) -> Archive {
        self.open_with(&self.options())
    }

    /// An archive in memory, always of the same version.
    pub(crate) fn open_bytes(
        &self,
        packed: Bytes,
        options: &OpenOptions,
    ) -> Result<Archive, OpenError> {
        let version = Validator::StrongEtag("\"1\"".to_owned());
        let source = source::MemorySource::new("memory", packed).with_validator(version);
        let source = Arc::new(source);
        Archive::open(source, options, self.network.handle(), &Arc::default())
    }

    /// The files of a directory in the cache. There are none if the directory is missing.
    pub(crate) fn cached_files(&self, directory: &str) -> Vec<PathBuf> {
        let entries = self.cache.path().join(directory).read_dir();
        let entries = entries.into_iter().flatten();
        entries
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }

    /// The only file of a directory in the cache.
    pub(crate) fn only_cached_file(&self, directory: &str) -> PathBuf {
        let files = self.cached_files(directory);
        assert_eq!(files.len(), 1, "{files:?}");
        files.into_iter().next().expect("just counted")
    }
}

/// The program's options with less memory.
pub(crate) fn scan_options() -> scan::Options {
    scan::Options {
        connections: 4,
        chunk_len: 1 << 20,
        memory: 64 << 20,
        workers: 2,
        ..scan::Options::default()
    }
}
