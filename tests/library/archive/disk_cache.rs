//! The disk cache: spans that are expensive to decode are stored, and no read depends on it.

use std::fs;
use std::sync::Arc;

use tarfs::Stats;
use tarfs::archive::{Archive, DiskCacheMode, OpenError};
use tarfs::source;

use super::{
    PATH, TestEnv, assert_file, assert_files, assert_files_backwards, assert_random_reads,
    for_each_packing, index, packed,
};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;
use crate::support::wait;

const UNSEEKABLE: [Packing; 2] = [Packing::Zstd, Packing::Xz];

/// Reads everything. Returns the number of fetched bytes.
fn fetched_by_reading(archive: &Archive) -> u64 {
    let before = archive.stats().source_read_bytes.get();
    assert_files_backwards(archive, &Tree::mixed());
    archive.stats().source_read_bytes.get() - before
}

// Promises: index-spans, disk-once
#[test]
fn unseekable_stream_is_cached_on_disk_and_fetched_once() {
    for packing in UNSEEKABLE {
        let env = TestEnv::with_archive(packed(packing));
        let mut options = env.options();
        // Far less than the archive.
        options.scan.memory = 8 << 20;
        let archive = env.open_with(&options);
        assert!(archive.index().span_count() > 1);
        assert_eq!(fetched_by_reading(&archive), 0, "{packing:?}");
        assert_random_reads(&archive, &Tree::mixed(), 100, 1);
        assert!(archive.stats().disk_cache_read_bytes.get() > 0);
        drop(archive);

        let archive = env.open_with(&options);
        assert_eq!(fetched_by_reading(&archive), 0, "{packing:?}");
        assert_random_reads(&archive, &Tree::mixed(), 100, 1);
        assert_eq!(archive.stats().decoded_spans.get(), 0);
        assert_eq!(archive.stats().scans.get(), 0);
    }
}

/// Reads all files of the mixed tree, each whole, in random order.
fn assert_files_at_random(archive: &Archive, seed: u64) {
    let tree = Tree::mixed();
    let mut left: Vec<_> = tree.files.iter().collect();
    let mut noise = Rng::new(seed);
    while !left.is_empty() {
        let number = index(noise.below(left.len() as u64));
        let (name, content) = left.swap_remove(number);
        assert_file(archive, name, content);
    }
}

fn archive_is_fetched_once_in_any_read_order(packing: Packing) {
    let packed = packed(packing);
    let env = TestEnv::with_archive(packed.clone());
    let mut options = env.options();
    // Far less than the archive.
    options.scan.memory = 8 << 20;
    let archive = env.open_with(&options);
    assert_files_at_random(&archive, 1);
    let once = packed.len() as u64 * 102 / 100;
    let sent = env.server.sent_bytes(PATH);
    assert!(sent <= once, "{sent} of {once}");
    assert_eq!(archive.stats().decoded_spans.get(), 0);
    assert_eq!(archive.disk_cache_problem(), None);
    drop(archive);

    let requests = env.server.requests(PATH).len();
    let archive = env.open_with(&options);
    let opening = (env.server.requests(PATH).len(), env.server.sent_bytes(PATH));
    let (asked, got) = (opening.0 - requests, opening.1 - sent);
    assert!(
        asked == 1 && got <= 64 << 10,
        "{asked} requests, {got} bytes"
    );
    assert_files_at_random(&archive, 2);
    let read = (env.server.requests(PATH).len(), env.server.sent_bytes(PATH));
    assert_eq!(read, opening, "nothing is fetched for reads");
}
// Promises: disk-data, disk-once
for_each_packing!(archive_is_fetched_once_in_any_read_order);

// Promises: disk-once
#[test]
fn reads_with_foreign_index_fill_disk_cache() {
    let packed = packed(Packing::Lz4);
    let env = TestEnv::with_archive(packed.clone());
    let mut options = env.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    drop(env.open_with(&options));
    assert!(env.cached_files("disk-cache").is_empty());

    options = env.options();
    options.scan.memory = 8 << 20;
    let archive = env.open_with(&options);
    assert_files(&archive, &Tree::mixed());
    let stats = Arc::clone(archive.stats());
    assert_eq!(stats.scans.get(), 0);
    assert!(stats.decoded_spans.get() > 0);
    drop(archive);
    assert!(stats.disk_cache_written_bytes.get() > 0);
    assert!(stats.disk_cache_written_bytes.get() <= stats.decoded_bytes.get());

    let archive = env.open_with(&options);
    assert_files_at_random(&archive, 3);
    let missing = stats.decoded_bytes.get() - stats.disk_cache_written_bytes.get();
    let stats = archive.stats();
    assert!(stats.disk_cache_hit_spans.get() > 0);
    // Each span is decoded once, and again if memory has evicted it.
    assert!(missing > 0 || stats.decoded_bytes.get() == 0);
}

// Promises: disk-data
#[test]
fn local_archive_is_cached_on_disk_only_if_packed() {
    for packing in Packing::ALL {
        let env = TestEnv::new();
        let path = env.cache.path().join("archive");
        fs::write(&path, packed(packing)).expect("written");
        let stats = Arc::<Stats>::default();
        let open = || {
            let spec = path.to_str().expect("UTF-8");
            let source = source::open(spec, source::Options::default());
            let source = env.network.block_on(source).expect("a source");
            let network = env.network.handle();
            Archive::open(source, &env.options(), network, &stats).expect("an archive")
        };
        for scans in [1, 1] {
            let archive = open();
            assert_eq!(stats.scans.get(), scans);
            assert_files(&archive, &Tree::mixed());
        }
        let is_packed = packing != Packing::Plain;
        assert_eq!(
            stats.disk_cache_written_bytes.get() > 0,
            is_packed,
            "{packing:?}"
        );
        assert_eq!(env.cached_files("disk-cache").len(), usize::from(is_packed));
    }
}

// Promises: index-spans, disk-damaged
#[test]
fn reads_are_right_if_disk_cache_is_damaged() {
    for packing in UNSEEKABLE {
        let harms: [fn(&TestEnv); 4] = [
            |env| fs::remove_file(env.only_cached_file("disk-cache")).expect("removed"),
            |env| truncate(env, 9_000_000),
            |env| truncate(env, 0),
            |env| {
                let garbage = Rng::new(9).bytes(Tree::mixed().tar.len());
                fs::write(env.only_cached_file("disk-cache"), garbage).expect("written");
            },
        ];
        for harm in harms {
            let env = TestEnv::with_archive(packed(packing));
            drop(env.open());
            harm(&env);
            let archive = env.open();
            assert_files(&archive, &Tree::mixed());
            assert_random_reads(&archive, &Tree::mixed(), 20, 1);
            assert!(archive.stats().decoded_spans.get() > 0);
        }
    }
}

fn truncate(env: &TestEnv, len: u64) {
    let file = fs::OpenOptions::new()
        .write(true)
        .open(env.only_cached_file("disk-cache"));
    file.expect("a cache file").set_len(len).expect("shorter");
}

// Promises: disk-none
#[test]
fn bytes_are_decoded_again_without_disk_cache() {
    for packing in UNSEEKABLE {
        let env = TestEnv::with_archive(packed(packing));
        let options = env.options_without_disk_cache();
        for _ in 0..2 {
            let archive = env.open_with(&options);
            assert_files(&archive, &Tree::mixed());
            assert_random_reads(&archive, &Tree::mixed(), 20, 1);
        }
        assert!(env.cached_files("disk-cache").is_empty());
    }
}

// Promises: disk-full
#[test]
fn disk_cache_that_cannot_grow_is_noted_in_status() {
    for limit in [0, 9 << 20] {
        let env = TestEnv::with_archive(packed(Packing::Zstd));
        let mut options = env.options();
        options.scan.memory = 8 << 20;
        options.disk_cache = DiskCacheMode::Enabled {
            limit_bytes: Some(limit),
        };
        let archive = env.open_with(&options);
        // A scan leaves out what a slow disk does not take in time, so reads must fill the cache.
        let trouble = wait::wait_for("a problem of the disk cache", || {
            assert_files(&archive, &Tree::mixed());
            archive.disk_cache_problem()
        });
        assert!(
            trouble.contains("the disk cache is incomplete"),
            "{trouble}"
        );
        let used = archive.disk_cache_use().expect("a cache file");
        assert!(used.all_bytes <= limit, "{used:?}");
        drop(archive);
        let archive = env.open_with(&options);
        for (name, content) in Tree::mixed().files.iter().rev() {
            assert_file(&archive, name, content);
            let used = archive.disk_cache_use().expect("a cache file");
            assert!(used.all_bytes <= limit, "{used:?}");
            assert_eq!(used.limit_bytes, limit);
        }
    }
}

/// An environment whose server does not support ranges.
fn without_ranges(packing: Packing) -> TestEnv {
    let env = TestEnv::new();
    env.serve(
        Resource::new(packed(packing))
            .etag("\"1\"")
            .without_ranges(),
    );
    env
}

// Promises: disk-no-ranges
#[test]
fn server_without_ranges_is_cached_on_disk_whole() {
    let tree = Tree::mixed();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Lz4, Packing::Zstd] {
        let env = without_ranges(packing);
        let mut options = env.options();
        options.scan.memory = 8 << 20;
        let archive = env.open_with(&options);
        assert_eq!(
            archive.stats().disk_cache_written_bytes.get(),
            tree.tar.len() as u64
        );
        assert_files(&archive, &tree);
        drop(archive);

        let archive = env.open_with(&options);
        assert_eq!(
            archive.stats().scans.get(),
            0,
            "index and disk cache are enough"
        );
        assert_files(&archive, &tree);
        drop(archive);

        fs::remove_file(env.only_cached_file("disk-cache")).expect("removed");
        let archive = env.open_with(&options);
        assert_eq!(archive.stats().scans.get(), 1, "the disk cache is lost");
        assert_files(&archive, &tree);
        assert_random_reads(&archive, &tree, 50, 1);
    }
}

#[test]
fn damaged_cache_of_server_without_ranges_is_refilled() {
    let tree = Tree::mixed();
    for len in [0, 1_000_000, 12_000_000, 14_000_000] {
        let env = without_ranges(Packing::Gzip);
        drop(env.open());
        truncate(&env, len);
        let archive = env.open();
        assert_files(&archive, &tree);
    }
}

// Promises: disk-no-ranges
#[test]
fn server_without_ranges_requires_disk_cache() {
    let env = without_ranges(Packing::Gzip);
    let refused = env.options();
    let nowhere = env.options();
    let too_small = env.options();
    let cases = [
        tarfs::archive::OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..refused
        },
        tarfs::archive::OpenOptions {
            cache_dir: None,
            ..nowhere
        },
        tarfs::archive::OpenOptions {
            disk_cache: DiskCacheMode::Enabled {
                limit_bytes: Some(1 << 20),
            },
            ..too_small
        },
    ];
    for options in cases {
        let error = env.try_open(&options).err();
        assert!(
            matches!(error, Some(OpenError::NoDiskCache { .. })),
            "{error:?}"
        );
    }
    assert!(env.cached_files("disk-cache").is_empty());
}

// Promises: disk-data
#[test]
fn materialize_needs_no_disk_cache() {
    let env = without_ranges(Packing::Gzip);
    let mut options = env.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    let archive = env.open_with(&options);
    assert!(archive.index().entry_count() > Tree::mixed().files.len() as u64);
    assert!(env.cached_files("disk-cache").is_empty());
}
