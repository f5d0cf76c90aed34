//! One archive behind a server: opened, read, opened again, damaged, and read concurrently.

mod concurrency;
mod damage;
mod digest;
mod disk_cache;
mod fetch_counts;
mod packings;
mod prefetch;
mod random_faults;
mod saved_index;
mod seek_points;
mod short_reads;
mod skips;
mod speculative;
mod statistics;
mod weak_versions;
mod windows;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tarfs::archive::{Archive, DiskCacheMode, OpenError, OpenOptions, ReadError, scan};
use tarfs::base::archive_path::ArchivePath;
use tarfs::base::stats::Stats;
use tarfs::index::Ino;
use tarfs::materialize::{self, Materializer};
use tarfs::source::{self, Retry, Source, Validator};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;

/// A server, a client, and a directory for indexes and the disk cache.
struct TestEnv {
    server: Server,
    network: Runtime,
    cache: TempDir,
}

/// Path of the archive on the server.
const PATH: &str = "/archive";

impl TestEnv {
    fn new() -> Self {
        Self {
            server: Server::start(),
            network: Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .expect("a runtime"),
            cache: tempfile::tempdir().expect("a directory"),
        }
    }

    /// An environment that serves `packed` with a strong entity tag.
    fn with_archive(packed: Bytes) -> Self {
        let env = Self::new();
        env.serve(Resource::new(packed).etag("\"1\""));
        env
    }

    fn serve(&self, resource: Resource) {
        self.server.serve(PATH, resource);
    }

    /// Materializes the served archive, which must give `tree`.
    #[track_caller]
    fn assert_materializes(&self, options: &scan::Options, tree: &Tree) -> Arc<Stats> {
        let (source, stats) = self.source();
        let root = tempfile::tempdir().expect("a directory");
        let mut sink = Materializer::new(
            root.path(),
            materialize::Options::for_this_user(),
            stats.clone(),
        )
        .expect("a destination");
        let scanned = scan::scan(&source, options, self.network.handle(), &stats, &mut sink);
        scanned.expect("scanned");
        let summary = sink.finish().expect("written");
        assert_eq!(summary.errors, 0, "{:?}", summary.problems);
        for (name, content) in &tree.files {
            let written = std::fs::read(root.path().join(name)).expect("a file");
            assert!(written == *content, "{name} is wrong");
        }
        stats
    }

    fn options(&self) -> OpenOptions {
        OpenOptions {
            scan: scan_options(),
            cache_dir: Some(self.cache.path().to_owned()),
            index_file: None,
            index_memory: tarfs::index::MemoryLimit::default(),
            should_rescan_unproven: false,
            should_log_problems: false,
            layer: None,
            // A fixed limit, because the free space of the disk varies.
            disk_cache: DiskCacheMode::Enabled {
                limit_bytes: Some(1 << 30),
            },
        }
    }

    /// As [`TestEnv::options`], but every byte that is not in memory is read from the source.
    fn options_without_disk_cache(&self) -> OpenOptions {
        OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..self.options()
        }
    }

    /// The source as a new process opens it, with its own counters.
    fn source(&self) -> (Arc<dyn Source>, Arc<Stats>) {
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

    fn try_open(&self, options: &OpenOptions) -> Result<Archive, OpenError> {
        let (source, stats) = self.source();
        Archive::open(source, options, self.network.handle(), &stats)
    }

    /// Opens the archive with empty memory and zero counters, as a new process does.
    fn open_with(&self, options: &OpenOptions) -> Archive {
        self.try_open(options).expect("an archive")
    }

    fn open(&self) -> Archive {
        self.open_with(&self.options())
    }

    /// An archive in memory, always of the same version.
    fn open_bytes(&self, packed: Bytes, options: &OpenOptions) -> Result<Archive, OpenError> {
        let version = Validator::StrongEtag("\"1\"".to_owned());
        let source = source::MemorySource::new("memory", packed).with_validator(version);
        let source = Arc::new(source);
        Archive::open(source, options, self.network.handle(), &Arc::default())
    }

    /// The files of a directory in the cache. There are none if the directory is missing.
    fn cached_files(&self, directory: &str) -> Vec<PathBuf> {
        let entries = self.cache.path().join(directory).read_dir();
        let entries = entries.into_iter().flatten();
        entries
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }

    /// The only file of a directory in the cache.
    fn only_cached_file(&self, directory: &str) -> PathBuf {
        let files = self.cached_files(directory);
        assert_eq!(files.len(), 1, "{files:?}");
        files.into_iter().next().expect("just counted")
    }
}

/// The program's options with less memory.
fn scan_options() -> scan::Options {
    scan::Options {
        connections: 4,
        chunk_len: 1 << 20,
        memory: 64 << 20,
        workers: 2,
        ..scan::Options::default()
    }
}

/// The mixed tree, packed once for all tests.
fn packed(packing: Packing) -> Bytes {
    static PACKED: [OnceLock<Bytes>; Packing::ALL.len()] =
        [const { OnceLock::new() }; Packing::ALL.len()];
    let place = PACKED.get(packing as usize).expect("one for each");
    place
        .get_or_init(|| packing.pack(&Tree::mixed().tar))
        .clone()
}

/// The large tree as lz4, which cannot make it smaller.
fn large_lz4() -> Bytes {
    static PACKED: OnceLock<Bytes> = OnceLock::new();
    PACKED
        .get_or_init(|| Packing::Lz4.pack(&Tree::large().tar))
        .clone()
}

fn ino(archive: &Archive, name: &str) -> Ino {
    let path = ArchivePath::sanitize(name.as_bytes()).path;
    let index = archive.index();
    let entry = index.find(&path);
    entry.unwrap_or_else(|| panic!("{name} is missing")).ino()
}

/// Length of a read: more than the kernel requests, and less than a file.
const PIECE: usize = 1 << 20;

/// Reads a whole file in pieces, past its end.
fn read(archive: &Archive, name: &str) -> Result<Vec<u8>, ReadError> {
    let ino = ino(archive, name);
    let mut content = Vec::new();
    loop {
        let len = u32::try_from(PIECE).expect("small");
        let piece = archive.read_blocking(ino, content.len() as u64, len)?;
        content.extend_from_slice(&piece);
        if piece.len() < PIECE {
            return Ok(content);
        }
    }
}

/// Compares a file without printing megabytes when it differs.
fn assert_file(archive: &Archive, name: &str, content: &[u8]) {
    match read(archive, name) {
        Ok(read) => assert!(read == content, "{name} is wrong"),
        Err(error) => panic!("{name}: {error:?}"),
    }
}

fn assert_files(archive: &Archive, tree: &Tree) {
    for (name, content) in &tree.files {
        assert_file(archive, name, content);
    }
}

fn assert_files_backwards(archive: &Archive, tree: &Tree) {
    for (name, content) in tree.files.iter().rev() {
        assert_file(archive, name, content);
    }
}

/// Reads at random places, also past the end.
fn assert_random_reads(archive: &Archive, tree: &Tree, count: u64, seed: u64) {
    let mut noise = Rng::new(seed);
    for _ in 0..count {
        let number = noise.below(tree.files.len() as u64);
        let (name, content) = tree.files.get(index(number)).expect("below");
        let offset = noise.below(content.len() as u64 + 100);
        let len = noise.below(300_000);
        let expected = content.iter().skip(index(offset)).take(index(len));
        let len = u32::try_from(len).expect("small");
        let read = archive.read_blocking(ino(archive, name), offset, len);
        let read = read.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert!(
            read.iter().eq(expected),
            "{len} bytes at {offset} of {name} are wrong"
        );
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

/// A test for each packing.
macro_rules! for_each_packing {
    ($template:ident) => {
        mod $template {
            use super::$template as template;
            use crate::support::packing::Packing;

            crate::archive::tests_of_packings! {
                template:
                plain Plain, gzip Gzip, gzip_members GzipMembers, bgzf Bgzf,
                lz4 Lz4, lz4_linked Lz4Linked, lz4_frames Lz4Frames, lz4_legacy Lz4Legacy,
                zstd Zstd, zstd_frames ZstdFrames,
                xz Xz, xz_blocks XzBlocks, xz_streams XzStreams,
                bzip2 Bzip2, bzip2_streams Bzip2Streams,
            }
        }
    };
}

macro_rules! tests_of_packings {
    ($template:ident: $($name:ident $packing:ident,)+) => {
        $(
            #[test]
            fn $name() {
                $template(Packing::$packing);
            }
        )+
    };
}

use {for_each_packing, tests_of_packings};
