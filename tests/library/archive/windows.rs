//! Remote archives without compression are read by windows: the right bytes, with few fetched.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tarfs::archive::{
    Archive, DiskCacheMode, OpenOptions, PrefetchMode, PrefetchOptions, PrefetchState, ReadError,
    Volume,
};
use tarfs::{Extent, Plain};

use super::damage::flipped;
use super::{PATH, TestEnv, assert_file, index, ino, large_lz4};
use crate::support::http::{RecordedRequest, Resource, Response};
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;
use crate::support::wait;

const FILE_BYTES: usize = 32 << 20;

/// The length of a window.
const WINDOW_LEN: u64 = 128 << 10;

/// Length of a random read.
const SHORT_READ_LEN: u32 = 4096;

/// One large file, and a few small ones behind it.
fn tree() -> Tree {
    let file = |name: String, seed, len| (name, Rng::new(seed).bytes(len));
    let mut files = vec![file("large".to_owned(), 1, FILE_BYTES)];
    files.extend((2..12).map(|seed| file(format!("small{seed}"), seed, 20_000)));
    Tree::of(files)
}

/// An environment that serves `tree`, with an index and an empty disk cache.
fn indexed(tree: &Tree, packing: Packing) -> TestEnv {
    let env = TestEnv::with_archive(packing.pack(&tree.tar));
    let mut options = env.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    drop(env.open_with(&options));
    assert!(env.cached_files("disk-cache").is_empty());
    env
}

/// Options with far less memory than the archive has bytes.
fn with_little_memory(options: OpenOptions) -> OpenOptions {
    let mut options = options;
    options.scan.memory = 16 << 20;
    options
}

fn open_with_prefetch(env: &TestEnv, options: &OpenOptions) -> Archive {
    let archive = env.open_with(options);
    let started = archive.start_prefetch(PrefetchOptions::default());
    started.expect("threads");
    archive
}

fn wait_until_idle(archive: &Archive) {
    wait::wait_until("it settles", || archive.is_prefetch_idle());
}

/// Reads at `offset` of the large file as a mount does, and checks the bytes.
#[track_caller]
fn check_read(archive: &Archive, tree: &Tree, offset: u64, len: u32) {
    let (name, content) = tree.files.first().expect("the large file");
    let ino = ino(archive, name);
    archive.report_read(ino, offset, len);
    let read = archive.try_read(ino, offset, len);
    let read = read.unwrap_or_else(|| archive.read_blocking(ino, offset, len));
    let read = read.expect("readable");
    let start = index(offset);
    let end = (start + len as usize).min(content.len());
    assert!(content.get(start..end) == Some(&*read), "at {offset}");
}

/// Random offsets of short reads.
fn offsets(seed: u64, count: usize) -> Vec<u64> {
    let mut noise = Rng::new(seed);
    let end = FILE_BYTES as u64 - u64::from(SHORT_READ_LEN);
    (0..count).map(|_| noise.below(end)).collect()
}

fn check_reads(archive: &Archive, tree: &Tree, offsets: &[u64]) {
    for &offset in offsets {
        check_read(archive, tree, offset, SHORT_READ_LEN);
    }
}

/// The requested ranges after the first `from` requests.
fn ranges(env: &TestEnv, from: usize) -> Vec<Range<u64>> {
    let seen = env.server.requests(PATH);
    let ranges = seen.iter().skip(from).map(|seen| seen.request.range());
    let ranges = ranges.map(|range| range.expect("a range"));
    ranges.map(|(start, end)| start..end).collect()
}

#[track_caller]
fn assert_disjoint(mut ranges: Vec<Range<u64>>) {
    ranges.sort_by_key(|range| range.start);
    for (one, next) in ranges.iter().zip(ranges.iter().skip(1)) {
        assert!(one.end <= next.start, "{one:?} and {next:?}");
    }
}

// Promises: fetch-reads
#[test]
fn random_reads_fetch_one_window_each() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    for options in [env.options(), env.options_without_disk_cache()] {
        let archive = open_with_prefetch(&env, &options);
        let before = env.server.requests(PATH).len();
        let reads = offsets(1, 100);
        check_reads(&archive, &tree, &reads);
        wait_until_idle(&archive);
        let ranges = ranges(&env, before);
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let reads = reads.len() as u64;
        assert!(bytes <= reads * (160 << 10), "{bytes} bytes");
        assert!(ranges.len() as u64 * 10 <= reads * 11, "{}", ranges.len());
        let windows = ranges
            .iter()
            .filter(|range| range.end - range.start == WINDOW_LEN);
        assert!(windows.count() * 10 >= ranges.len() * 8, "{ranges:?}");
        assert_eq!(archive.stats().prefetched_spans.get(), 0);
        assert_eq!(archive.stats().prefetched_packed_bytes.get(), 0);
        assert_eq!(archive.stats().decoded_spans.get(), 0);
        drop(archive);
        for cache_file in env.cached_files("disk-cache") {
            std::fs::remove_file(cache_file).expect("removed");
        }
    }
}

// Promises: fetch-reads, disk-blocks
#[test]
fn thousand_random_reads_fetch_no_byte_twice() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let options = with_little_memory(env.options());
    let archive = open_with_prefetch(&env, &options);
    let before = env.server.requests(PATH).len();
    let reads = offsets(2, 1000);
    check_reads(&archive, &tree, &reads);
    wait_until_idle(&archive);
    let fetched = ranges(&env, before);
    // When half of a span's windows are present, the others are fetched together.
    assert!(
        fetched.len() <= FILE_BYTES / (1 << 20) * 6,
        "{}",
        fetched.len()
    );
    assert_disjoint(fetched);
    assert_eq!(archive.stats().disk_cache_damaged_spans.get(), 0);
    drop(archive);

    // The next mount finds all of it on disk.
    let archive = open_with_prefetch(&env, &options);
    let before = env.server.requests(PATH).len();
    check_reads(&archive, &tree, &reads);
    assert!(ranges(&env, before).is_empty());
    assert!(archive.stats().exact_reads.get() >= 900);
    let from_disk = archive.stats().disk_cache_read_bytes.get();
    assert!(from_disk <= 1000 * (32 << 10), "{from_disk}");
    assert_eq!(archive.stats().disk_cache_damaged_spans.get(), 0);
}

// Promises: fetch-reads
#[test]
fn sequential_reader_fetches_larger_ranges() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let archive = env.open_with(&env.options_without_disk_cache());
    let before = env.server.requests(PATH).len();
    // The source still has the front of the archive, because the archive was just opened.
    for offset in (1 << 20..FILE_BYTES as u64).step_by(32 << 10) {
        check_read(&archive, &tree, offset, 32 << 10);
    }
    let ranges = ranges(&env, before);
    let lens: Vec<u64> = ranges.iter().map(|range| range.end - range.start).collect();
    assert_eq!(lens.first(), Some(&WINDOW_LEN));
    // One window, four windows, the rest of the span, and then whole spans.
    assert!(
        lens.get(1).is_some_and(|len| *len >= 4 * WINDOW_LEN),
        "{lens:?}"
    );
    let spans = lens.get(3..lens.len() - 1).unwrap_or_default();
    assert!(
        spans.len() > 10 && spans.iter().all(|len| *len == 1 << 20),
        "{lens:?}"
    );
    assert!(lens.len() <= FILE_BYTES / (1 << 20) + 3, "{lens:?}");
    assert_disjoint(ranges);
}

// Promises: fetch-reads
#[test]
fn read_ahead_fetches_only_missing_windows() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    for mut options in [env.options(), env.options_without_disk_cache()] {
        // Without a disk cache, memory holds everything.
        options.scan.memory = 256 << 20;
        let archive = open_with_prefetch(&env, &options);
        let before = env.server.requests(PATH).len();
        check_reads(&archive, &tree, &offsets(3, 40));
        for offset in (0..FILE_BYTES as u64).step_by(128 << 10) {
            check_read(&archive, &tree, offset, 128 << 10);
            wait_until_idle(&archive);
        }
        assert!(archive.stats().prefetched_spans.get() > 0);
        assert_disjoint(ranges(&env, before));
        drop(archive);
        for cache_file in env.cached_files("disk-cache") {
            std::fs::remove_file(cache_file).expect("removed");
        }
    }
}

// Promises: fetch-reads
#[test]
fn concurrent_readers_share_window_fetches() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let good = Resource::new(tree.tar.clone()).etag("\"1\"");
    env.server.route(PATH, move |request| {
        good.answer(request).delayed(Duration::from_millis(5))
    });
    let archive = env.open_with(&env.options_without_disk_cache());
    let before = env.server.requests(PATH).len();
    // Close to each other, so that the reads overlap.
    let reads: Vec<u64> = offsets(4, 100).iter().map(|offset| offset / 8).collect();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| check_reads(&archive, &tree, &reads));
        }
    });
    let fetched = ranges(&env, before);
    let hedges = index(archive.stats().source_hedges.get());
    let distinct: BTreeSet<u64> = fetched.iter().map(|range| range.start).collect();
    assert!(fetched.len() - distinct.len() <= hedges, "{fetched:?}");
    if hedges == 0 {
        assert_disjoint(fetched);
    }
    assert!(archive.stats().memory_shared_spans.get() > 0);
}

/// Delay that lets all readers find the fetch in flight.
const DELAY: Duration = Duration::from_millis(300);

/// Serves `packed` after a delay, or status 503 for as long as `is_down`, and counts the requests.
fn serve_slowly(env: &TestEnv, packed: Bytes, is_down: &Arc<AtomicBool>) -> Arc<AtomicUsize> {
    let requests = Arc::<AtomicUsize>::default();
    let (count, is_down) = (Arc::clone(&requests), Arc::clone(is_down));
    let resource = Resource::new(packed).etag("\"1\"");
    env.server.route(PATH, move |request| {
        count.fetch_add(1, Ordering::SeqCst);
        let answer = if is_down.load(Ordering::SeqCst) {
            Response::new(503)
        } else {
            resource.answer(request)
        };
        answer.delayed(DELAY)
    });
    requests
}

#[track_caller]
fn assert_times_out(archive: &Archive, offset: u64, len: u32) {
    let read = archive.read_blocking(ino(archive, "large"), offset, len);
    assert!(
        matches!(read, Err(ReadError::TimedOut(_))),
        "{:?}",
        read.err()
    );
}

#[test]
fn readers_share_failure_of_window_in_flight() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let archive = env.open_with(&env.options_without_disk_cache());
    let is_down = Arc::new(AtomicBool::new(true));
    let requests = serve_slowly(&env, tree.tar.clone(), &is_down);
    let window = 9 << 20;
    std::thread::scope(|scope| {
        for reader in 0..8 {
            let archive = &archive;
            scope.spawn(move || assert_times_out(archive, window + reader * 1000, SHORT_READ_LEN));
        }
    });
    // A request and its retry, and as many for a late reader.
    let requests = requests.load(Ordering::SeqCst);
    assert!((2..=4).contains(&requests), "{requests} requests");
    is_down.store(false, Ordering::SeqCst);
    check_read(&archive, &tree, window, SHORT_READ_LEN);
}

#[test]
fn readers_share_damage_of_window_in_flight() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let archive = env.open_with(&env.options_without_disk_cache());
    let window = 9 << 20;
    let damaged = flipped(&tree.tar, index(window + 5000));
    let requests = serve_slowly(&env, damaged, &Arc::default());
    std::thread::scope(|scope| {
        for reader in 0..8 {
            let archive = &archive;
            scope.spawn(move || {
                let read = archive.read_blocking(
                    ino(archive, "large"),
                    window + reader * 1000,
                    SHORT_READ_LEN,
                );
                let expected = Extent::with_len(Plain(window), WINDOW_LEN);
                assert!(
                    matches!(&read, Err(ReadError::Damaged { extent, .. }) if *extent == expected),
                    "{:?}",
                    read.err()
                );
            });
        }
    });
    // A request and a second one by another way, and as many for a late reader.
    let requests = requests.load(Ordering::SeqCst);
    assert!((2..=4).contains(&requests), "{requests} requests");
}

#[test]
fn readers_share_failure_of_span_in_flight() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let archive = env.open_with(&env.options_without_disk_cache());
    let is_down = Arc::new(AtomicBool::new(true));
    let requests = serve_slowly(&env, tree.tar.clone(), &is_down);
    let span = 9 << 20;
    std::thread::scope(|scope| {
        let archive = &archive;
        scope.spawn(move || assert_times_out(archive, span, 256 << 10));
        wait::wait_until("the span is requested", || {
            requests.load(Ordering::SeqCst) > 0
        });
        for window in 3..7 {
            scope.spawn(move || {
                assert_times_out(archive, span + window * WINDOW_LEN, SHORT_READ_LEN);
            });
        }
    });
    let requests = requests.load(Ordering::SeqCst);
    assert!((2..=4).contains(&requests), "{requests} requests");
    is_down.store(false, Ordering::SeqCst);
    check_read(&archive, &tree, span, SHORT_READ_LEN);
}

#[test]
fn sequential_reader_does_not_fetch_window_in_flight() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let archive = env.open_with(&env.options_without_disk_cache());
    let is_down = Arc::default();
    let requests = serve_slowly(&env, tree.tar.clone(), &is_down);
    let before = env.server.requests(PATH).len();
    let span = 9 << 20;
    std::thread::scope(|scope| {
        scope.spawn(|| check_read(&archive, &tree, span + 6 * WINDOW_LEN, SHORT_READ_LEN));
        wait::wait_until("the window is requested", || {
            requests.load(Ordering::SeqCst) > 0
        });
        check_read(&archive, &tree, span, 256 << 10);
    });
    let fetched = ranges(&env, before);
    assert!(fetched.len() >= 2, "{fetched:?}");
    assert_disjoint(fetched);
}

/// Serves a flipped byte at `place` to the first `times` requests for it.
fn serve_damaged(env: &TestEnv, packed: &Bytes, place: u64, times: usize) {
    let good = Resource::new(packed.clone()).etag("\"1\"");
    let bad = Resource::new(flipped(packed, index(place))).etag("\"1\"");
    let left = AtomicUsize::new(times);
    env.server.route(PATH, move |request| {
        let range = request.range();
        let hits = range.is_some_and(|(start, end)| (start..end).contains(&place));
        let take = |left: usize| left.checked_sub(1);
        let is_bad = hits
            && left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
                .is_ok();
        if is_bad { &bad } else { &good }.answer(request)
    });
}

fn requests_for(env: &TestEnv, place: u64, from: usize) -> Vec<RecordedRequest> {
    let seen = env.server.requests(PATH).into_iter().skip(from);
    let holds = |seen: &RecordedRequest| {
        let range = seen.request.range();
        range.is_some_and(|(start, end)| (start..end).contains(&place))
    };
    seen.filter(holds).collect()
}

// Promises: check-again
#[test]
fn window_with_wrong_bytes_is_refetched_by_another_route() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let place = 5_000_000;
    serve_damaged(&env, &tree.tar, place, 1);
    let before = env.server.requests(PATH).len();
    let archive = env.open();
    check_read(&archive, &tree, place, SHORT_READ_LEN);
    check_read(&archive, &tree, place - 1000, SHORT_READ_LEN);
    assert_eq!(archive.stats().damaged_spans.get(), 1);
    let requests = requests_for(&env, place, before);
    let [first, again] = requests.as_slice() else {
        panic!("{requests:?}");
    };
    assert_eq!(first.request.header("cache-control"), None);
    assert_eq!(again.request.header("cache-control"), Some("no-cache"));
}

// Promises: check-again, check-neighbours
#[test]
fn window_with_wrong_bytes_again_fails_alone() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    // A byte in one window. The spans around it are intact.
    let place = 5 * (1 << 20) + 3 * WINDOW_LEN + 50_000;
    serve_damaged(&env, &tree.tar, place, usize::MAX);
    let archive = env.open();
    let ino = ino(&archive, "large");
    for _ in 0..2 {
        let error = archive.read_blocking(ino, place, SHORT_READ_LEN).err();
        assert!(
            matches!(&error, Some(ReadError::Damaged { extent, .. })
                if (extent.start().0..extent.end().0).contains(&place) && extent.len() <= WINDOW_LEN),
            "{error:?}"
        );
    }
    check_read(&archive, &tree, place - WINDOW_LEN, SHORT_READ_LEN);
    check_read(&archive, &tree, place + WINDOW_LEN, SHORT_READ_LEN);
    // A reader that would fetch this window with others gets the intact ones.
    let first = place / WINDOW_LEN * WINDOW_LEN;
    for number in (4..20).rev() {
        check_read(&archive, &tree, first - number * WINDOW_LEN, 100 << 10);
    }
    assert!(
        archive
            .read_blocking(ino, first - WINDOW_LEN, 2 << 17)
            .is_err()
    );
    for number in 2..20 {
        check_read(&archive, &tree, first + number * WINDOW_LEN, 100 << 10);
    }
}

// Promises: disk-blocks
#[test]
fn wrong_bytes_of_disk_cache_are_fetched_again() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let options = with_little_memory(env.options());
    let reads = offsets(5, 300);
    let archive = env.open_with(&options);
    check_reads(&archive, &tree, &reads);
    // In the process that knows the windows, and in the next one.
    for (round, mut archive) in [(0, Some(archive)), (1, None)] {
        if let Some(archive) = &archive {
            wait::wait_until("all is written", || {
                archive.stats().disk_cache_written_bytes.get()
                    >= archive.stats().source_read_bytes.get() / 2
            });
        }
        let cache_file = File::options()
            .read(true)
            .write(true)
            .open(env.only_cached_file("disk-cache"))
            .expect("a cache file");
        let mut noise = Rng::new(round);
        // Damages a byte at a random place of each window.
        for window in 0..FILE_BYTES as u64 / WINDOW_LEN {
            let (place, mut byte) = (window * WINDOW_LEN + noise.below(WINDOW_LEN), [0]);
            if cache_file.read_exact_at(&mut byte, place).is_ok() && byte != [0] {
                byte[0] ^= 1 << noise.below(8);
                cache_file.write_all_at(&byte, place).expect("written");
            }
        }
        let archive = archive.get_or_insert_with(|| env.open_with(&options));
        check_reads(archive, &tree, &reads);
        check_reads(archive, &tree, &offsets(6 + round, 300));
        for offset in (0..FILE_BYTES as u64).step_by(128 << 10) {
            check_read(archive, &tree, offset, 128 << 10);
        }
        assert!(
            archive.stats().disk_cache_damaged_spans.get() > 0,
            "{round}"
        );
    }
}

#[test]
fn full_prefetch_repairs_disk_cache() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let options = with_little_memory(env.options());
    let fetch_all = || {
        let archive = env.open_with(&options);
        let started = archive.start_prefetch(PrefetchOptions {
            mode: PrefetchMode::All,
            ..PrefetchOptions::default()
        });
        started.expect("threads");
        wait::wait_until("all is fetched", || {
            let progress = archive.prefetch_progress();
            progress.is_some_and(|progress| progress.state == PrefetchState::Complete)
        });
        archive
    };
    drop(fetch_all());
    let cache_file = File::options()
        .read(true)
        .write(true)
        .open(env.only_cached_file("disk-cache"))
        .expect("a cache file");
    let (place, mut byte) = (FILE_BYTES as u64 / 2, [0]);
    cache_file.read_exact_at(&mut byte, place).expect("kept");
    cache_file
        .write_all_at(&[!byte[0]], place)
        .expect("written");
    let before = env.server.requests(PATH).len();
    drop(fetch_all());
    assert!(!ranges(&env, before).is_empty(), "fetched again");
    let mut repaired = [0];
    cache_file
        .read_exact_at(&mut repaired, place)
        .expect("kept");
    assert_eq!(repaired, byte);
}

#[test]
fn span_with_one_failed_run_is_not_complete() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let archive = env.open();
    // Two runs of this span are missing now.
    let span = 9 << 20;
    check_read(&archive, &tree, span + 3 * WINDOW_LEN, SHORT_READ_LEN);
    let good = Resource::new(tree.tar.clone()).etag("\"1\"");
    let is_first_run = move |range: (u64, u64)| range == (span, span + 3 * WINDOW_LEN);
    env.server.route(PATH, move |request| {
        if request.range().is_some_and(is_first_run) {
            Response::new(500)
        } else {
            good.answer(request)
        }
    });
    let before = env.server.requests(PATH).len();
    let started = archive.start_prefetch(PrefetchOptions {
        mode: PrefetchMode::All,
        // Then spans are requested one by one.
        bytes_per_second: Some(1 << 30),
        ..PrefetchOptions::default()
    });
    started.expect("threads");
    let state = || archive.prefetch_progress().map(|progress| progress.state);
    wait::wait_until("it ends", || state() != Some(PrefetchState::Running));
    let ranges = ranges(&env, before);
    let runs = [
        span..span + 3 * WINDOW_LEN,
        span + 4 * WINDOW_LEN..span + 8 * WINDOW_LEN,
    ];
    for run in runs {
        assert!(ranges.contains(&run), "{run:?} of {ranges:?}");
    }
    assert_eq!(state(), Some(PrefetchState::Incomplete));
}

// Promises: fetch-reads
#[test]
fn windows_stay_within_memory_budget() {
    let tree = tree();
    let env = indexed(&tree, Packing::Plain);
    let options = with_little_memory(env.options_without_disk_cache());
    let archive = open_with_prefetch(&env, &options);
    for offset in offsets(8, 400) {
        check_read(&archive, &tree, offset, SHORT_READ_LEN);
        assert!(
            archive.cached_bytes() <= 8 << 20,
            "{}",
            archive.cached_bytes()
        );
    }
    assert!(archive.cached_bytes() >= 3 << 20, "half of it is used");
    for (name, content) in &tree.files {
        assert_file(&archive, name, content);
    }
    assert!(env.cached_files("disk-cache").is_empty());
}

// Promises: fetch-reads
#[test]
fn random_reads_of_remote_packed_archive_decode_span_once() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    // A file system that does not block the writer.
    let cache = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let mut options = with_little_memory(env.options());
    options.cache_dir = Some(cache.path().to_owned());
    options.disk_cache = DiskCacheMode::IndexOnly;
    drop(env.open_with(&options));
    options.disk_cache = env.options().disk_cache;
    let archive = Arc::new(env.open_with(&options));
    std::thread::scope(|scope| {
        for seed in 1..5 {
            let (archive, tree) = (Arc::clone(&archive), Arc::clone(&tree));
            scope.spawn(move || super::assert_random_reads(&archive, &tree, 300, seed));
        }
    });
    let stats = archive.stats();
    let spans = u64::from(archive.index().span_count());
    assert_eq!(stats.disk_cache_skipped_spans.get(), 0);
    assert!(
        stats.decoded_spans.get() <= spans,
        "{}",
        stats.decoded_spans.get()
    );
}
