//! Short reads of a local disk cache: they read few bytes, and damage is always detected.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use tarfs::Stats;
use tarfs::archive::{Archive, PrefetchOptions, Volume};
use tarfs::source;

use super::{TestEnv, assert_file, ino};
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;
use crate::support::wait;

const FILE_BYTES: usize = 40 << 20;

/// More than memory holds, in one file and in small ones.
fn tree() -> Tree {
    let file = |name: String, seed, len| (name, Rng::new(seed).bytes(len));
    let mut files = vec![file("large".to_owned(), 1, FILE_BYTES)];
    files.extend((2..40).map(|seed| file(format!("small{seed}"), seed, 20_000)));
    Tree::of(files)
}

/// Opens the archive of `tree` as a local file and reads it once from end to end.
fn read_once(env: &TestEnv, tree: &Tree, packing: Packing) -> Archive {
    let path = env.cache.path().join("archive");
    fs::write(path, packing.pack(&tree.tar)).expect("written");
    let archive = open(env);
    for (name, content) in &tree.files {
        assert_file(&archive, name, content);
    }
    archive
}

/// Opens the archive of [`read_once`] with little memory.
fn open(env: &TestEnv) -> Archive {
    let path = env.cache.path().join("archive");
    let source = source::open(
        path.to_str().expect("UTF-8"),
        source::Options {
            stats: Arc::default(),
            ..source::Options::default()
        },
    );
    let source = env.network.block_on(source).expect("a source");
    let mut options = env.options();
    options.scan.memory = 16 << 20;
    let stats = Arc::<Stats>::default();
    let archive = Archive::open(source, &options, env.network.handle(), &stats);
    archive.expect("an archive")
}

/// Reads 4 KiB at random places. Returns the number of reads.
fn assert_short_reads(archive: &Archive, tree: &Tree, seed: u64) -> u64 {
    const READS: u64 = 1000;
    let mut noise = Rng::new(seed);
    let ((name, content), small) = tree.files.split_first().expect("files");
    for _ in 0..READS {
        let offset = noise.below(FILE_BYTES as u64 - 4096);
        let read = archive.read_blocking(ino(archive, name), offset, 4096);
        let read = read.expect("read");
        let start = usize::try_from(offset).expect("small");
        let expected = content.get(start..start + 4096);
        assert!(Some(&*read) == expected, "at {offset}");
    }
    for (name, content) in small {
        assert_file(archive, name, content);
    }
    READS
}

/// Bytes that were read from the archive's disk cache.
fn disk_cache_read_bytes(archive: &Archive) -> u64 {
    archive.stats().disk_cache_read_bytes.get()
}

// Promises: disk-blocks
#[test]
fn short_read_of_cached_packed_archive_reads_few_bytes() {
    for packing in [Packing::Gzip, Packing::Zstd, Packing::Lz4, Packing::Xz] {
        let (env, tree) = (TestEnv::new(), tree());
        drop(read_once(&env, &tree, packing));
        // This process has not read any of it before.
        let archive = open(&env);
        let reads = assert_short_reads(&archive, &tree, 1);
        let bytes = disk_cache_read_bytes(&archive);
        assert!(bytes <= reads * (64 << 10), "{packing:?}: {bytes} bytes");
        assert!(archive.stats().exact_reads.get() >= reads);
        assert_eq!(archive.stats().decoded_spans.get(), 0, "{packing:?}");
        assert_eq!(archive.stats().disk_cache_damaged_spans.get(), 0);
    }
}

// Promises: disk-slow
#[test]
fn spans_dropped_by_disk_cache_are_stored_on_later_read() {
    let (env, tree) = (TestEnv::new(), tree());
    let path = env.cache.path().join("archive");
    fs::write(path, Packing::Gzip.pack(&tree.tar)).expect("written");
    // Another process that writes for a long time.
    let directory = env.cache.path().join("disk-cache");
    let private = fs::DirBuilder::new().mode(0o700).create(&directory);
    private.expect("a directory");
    let writing = File::open(&directory).expect("there");
    flock(&writing, FlockOperation::LockExclusive).expect("free");
    let archive = open(&env);
    let prefetch = archive.start_prefetch(PrefetchOptions::default());
    prefetch.expect("threads");
    let stats = Arc::clone(archive.stats());
    wait::wait_until("the archive is scanned", || archive.is_scan_over());
    wait::wait_until("spans are skipped", || {
        stats.disk_cache_skipped_spans.get() > 0
    });
    drop(writing);
    let plain_bytes = tree.tar.len() as u64;
    wait::wait_until("all spans are on disk", || {
        let held = archive.disk_cache_use().map(|held| held.held_bytes);
        held.is_some_and(|held| held >= plain_bytes)
    });
    wait::wait_until("it settles", || archive.is_prefetch_idle());
    let decoded = stats.decoded_spans.get();
    assert_short_reads(&archive, &tree, 1);
    assert_eq!(stats.decoded_spans.get(), decoded);
}

// Promises: disk-blocks
#[test]
fn short_read_of_cached_plain_archive_reads_few_bytes() {
    let (env, tree) = (TestEnv::new(), tree());
    let path = env.cache.path().join("archive");
    fs::write(&path, &tree.tar).expect("written");
    let stats = Arc::<Stats>::default();
    let options = source::Options {
        stats: Arc::clone(&stats),
        ..source::Options::default()
    };
    let source = source::open(path.to_str().expect("UTF-8"), options);
    let source = env.network.block_on(source).expect("a source");
    let mut options = env.options();
    options.scan.memory = 16 << 20;
    let archive = Archive::open(source, &options, env.network.handle(), &stats);
    let archive = archive.expect("an archive");
    let before = stats.source_read_bytes.get();
    let reads = assert_short_reads(&archive, &tree, 1);
    let bytes = stats.source_read_bytes.get() - before;
    assert!(bytes <= reads * (64 << 10), "{bytes} bytes");
    assert!(stats.exact_reads.get() > reads / 2);
    assert!(env.cached_files("disk-cache").is_empty());
}

/// Changes a byte in each of many places.
fn damage(path: &Path, seed: u64) {
    let file = File::options().read(true).write(true).open(path);
    let file = file.expect("a cache file");
    let len = file.metadata().expect("metadata").len();
    let mut noise = Rng::new(seed);
    for _ in 0..20 {
        let (offset, mut byte) = (noise.below(len), [0]);
        file.read_exact_at(&mut byte, offset).expect("read");
        byte[0] ^= 1 << noise.below(8);
        file.write_all_at(&byte, offset).expect("written");
    }
}

#[test]
fn disk_cache_changed_during_verification_is_never_served() {
    const ROUNDS: u64 = 4;
    for packing in [Packing::Gzip, Packing::Zstd, Packing::Lz4] {
        let (env, tree) = (TestEnv::new(), tree());
        let archive = read_once(&env, &tree, packing);
        let (cache_file, readers) = (env.only_cached_file("disk-cache"), AtomicUsize::new(3));
        let damages = thread::scope(|scope| {
            for reader in 0..3 {
                let (archive, tree, readers) = (&archive, &tree, &readers);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        assert_short_reads(archive, tree, reader * ROUNDS + round);
                    }
                    readers.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let mut damages = 0;
            while readers.load(Ordering::SeqCst) > 0 && damages < 10_000 {
                damage(&cache_file, damages);
                damages += 1;
            }
            damages
        });
        assert!(damages > 10, "{packing:?}: {damages}");
        assert!(
            archive.stats().disk_cache_damaged_spans.get() > 0,
            "{packing:?}"
        );
    }
}

// Promises: disk-blocks
#[test]
fn changed_byte_of_disk_cache_is_never_served() {
    for packing in [Packing::Gzip, Packing::Zstd] {
        let (env, tree) = (TestEnv::new(), tree());
        let archive = read_once(&env, &tree, packing);
        for seed in 0..4 {
            assert_short_reads(&archive, &tree, seed);
            damage(&env.only_cached_file("disk-cache"), seed);
        }
        assert_short_reads(&archive, &tree, 5);
        assert!(
            archive.stats().disk_cache_damaged_spans.get() > 0,
            "{packing:?}"
        );
        assert!(archive.stats().exact_reads.get() > 0);
    }
}

// Promises: check-neighbours
#[test]
fn partly_cached_span_is_not_damaged() {
    let (env, tree) = (TestEnv::new(), tree());
    let archive = read_once(&env, &tree, Packing::Gzip);
    assert_short_reads(&archive, &tree, 1);
    let cache_file = File::options()
        .write(true)
        .open(env.only_cached_file("disk-cache"))
        .expect("a cache file");
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for hole in 1..20 {
        fallocate(&cache_file, mode, hole << 21, 1 << 16).expect("a hole");
    }
    let decoded = archive.stats().decoded_spans.get();
    assert_short_reads(&archive, &tree, 2);
    assert!(archive.stats().decoded_spans.get() > decoded);
    assert_eq!(archive.stats().disk_cache_damaged_spans.get(), 0);
}
