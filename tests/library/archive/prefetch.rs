//! Prefetching ahead of readers: enough, and not much too much.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tarfs::Plain;
use tarfs::archive::{
    AccessedRange, Archive, DiskCacheMode, OpenOptions, PageCache, PrefetchMode, PrefetchOptions,
    PrefetchState, Volume,
};
use tarfs::index::{Index, Ino};

use super::{PATH, TestEnv, index, ino, large_lz4, packed};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;
use crate::support::wait;

/// Length of the kernel's requests.
const KERNEL_REQUEST_LEN: u32 = 128 << 10;

fn wait_until_idle(archive: &Archive) {
    wait::wait_until("it settles", || archive.is_prefetch_idle());
}

/// Reads a whole file as a mount does.
fn read_sequentially(archive: &Archive, ino: Ino, content: &[u8]) {
    for (number, piece) in content.chunks(KERNEL_REQUEST_LEN as usize).enumerate() {
        let offset = number as u64 * u64::from(KERNEL_REQUEST_LEN);
        archive.report_read(ino, offset, KERNEL_REQUEST_LEN);
        let read = archive
            .read_blocking(ino, offset, KERNEL_REQUEST_LEN)
            .expect("readable");
        assert!(read == piece, "{} at {offset} is wrong", ino.0);
    }
}

fn open_with_prefetch(env: &TestEnv, options: &OpenOptions) -> Archive {
    let archive = env.open_with(options);
    archive
        .start_prefetch(PrefetchOptions::default())
        .expect("threads");
    archive
}

/// Packed bytes of the spans that hold the files.
fn packed_spans(archive: &Archive, files: &[Ino]) -> u64 {
    let tree = archive.index();
    let tree = tree.tree().expect("rows");
    let mut spans = BTreeSet::new();
    for &ino in files {
        let entry = tree.entry(ino).expect("there");
        for piece in entry.pieces(0, entry.size()) {
            let last = Plain(piece.plain.end().0 - 1);
            let first = tree.span_at(piece.plain.start()).expect("inside");
            spans.extend(first..=tree.span_at(last).expect("inside"));
        }
    }
    let end = tree.origin().packed_bytes;
    let start = |number| tree.seek_offset(number).map_or(end, |offset| offset.0);
    let lens = spans.iter().map(|&span| start(span + 1) - start(span));
    lens.sum()
}

/// Reads these files of the large tree in this order, and checks the number of fetched bytes.
fn assert_economy(env: &TestEnv, numbers: &[usize]) {
    let tree = Tree::large();
    let mut options = env.options_without_disk_cache();
    // With this much memory nothing is evicted, so no span is fetched twice.
    options.scan.memory = 256 << 20;
    let archive = open_with_prefetch(env, &options);
    let before = env.server.sent_bytes(PATH);
    let mut files = Vec::new();
    for &number in numbers {
        let (name, content) = tree.files.get(number).expect("inside");
        let ino = ino(&archive, name);
        read_sequentially(&archive, ino, content);
        files.push(ino);
        // Waits for all prefetches of this read, because the next read would make them necessary.
        wait_until_idle(&archive);
    }
    let fetched = env.server.sent_bytes(PATH) - before;
    let needed = packed_spans(&archive, &files);
    assert!(
        fetched * 10 <= needed * 12,
        "{fetched} bytes for {needed}: {numbers:?}"
    );
}

// Promises: ahead-default, ahead-cost
#[test]
fn reading_some_files_fetches_little_more_than_their_spans() {
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let mut noise = Rng::new(3);
    let count = Tree::large().files.len();
    for size in [1, 2, 3, 10, 50] {
        let random: Vec<_> = (0..size)
            .map(|_| index(noise.below(count as u64)))
            .collect();
        assert_economy(&env, &random);
        let mut sorted = random;
        sorted.sort_unstable();
        assert_economy(&env, &sorted);
    }
    for size in [2, 5, 20, 60, 100, 200] {
        let first = index(noise.below((count - size) as u64));
        let neighbours: Vec<_> = (first..first + size).collect();
        assert_economy(&env, &neighbours);
    }
}

// Promises: ahead-default, ahead-cost, ahead-shared
#[test]
fn sequential_reader_is_prefetched_and_fetches_archive_once() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    for memory in [32 << 20, 64 << 20, 128 << 20] {
        let mut options = env.options_without_disk_cache();
        options.scan.memory = memory;
        let archive = open_with_prefetch(&env, &options);
        let before = env.server.sent_bytes(PATH);
        for (name, content) in &tree.files {
            read_sequentially(&archive, ino(&archive, name), content);
            wait_until_idle(&archive);
        }
        let fetched = env.server.sent_bytes(PATH) - before;
        let needed = large_lz4().len() as u64;
        assert!(fetched * 100 <= needed * 102, "{fetched} with {memory}");
        let stats = archive.stats();
        let spans = u64::from(archive.index().span_count());
        assert_eq!(stats.decoded_spans.get(), spans, "each once");
        if memory > 32 << 20 {
            assert!(
                stats.memory_miss_spans.get() <= spans / 2,
                "{} of {spans} were not there",
                stats.memory_miss_spans.get()
            );
            // Adjacent spans are fetched by one request.
            assert!(stats.source_requests.get() < spans + 2);
        }
    }
}

#[test]
fn read_ahead_serves_same_bytes_in_every_packing() {
    let tree = Tree::mixed();
    let env = TestEnv::new();
    for packing in Packing::ALL {
        let packed = packed(packing);
        env.serve(Resource::new(packed.clone()).etag(&format!("\"{packing:?}\"")));
        drop(env.open());
        let archive = open_with_prefetch(&env, &env.options_without_disk_cache());
        let before = env.server.sent_bytes(PATH);
        for (name, content) in &tree.files {
            read_sequentially(&archive, ino(&archive, name), content);
        }
        wait_until_idle(&archive);
        let fetched = env.server.sent_bytes(PATH) - before;
        let needed = packed.len() as u64;
        if packing.is_all_seekable() {
            assert!(fetched * 100 <= needed * 102, "{packing:?}: {fetched}");
        }
        assert_eq!(archive.stats().failed_reads.get(), 0);
    }
}

/// A slow page cache.
#[derive(Debug, Default)]
struct SlowPages {
    stored_bytes: AtomicU64,
}

impl PageCache for SlowPages {
    fn is_open(&self) -> bool {
        true
    }

    fn can_store(&self, _ino: Ino) -> bool {
        true
    }

    fn is_visible(&self, _index: &Index, _ino: Ino) -> bool {
        true
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        files.len()
    }

    fn prime_dentries(&self, _index: &Index, _ino: Ino) {}

    fn store(&self, _ino: Ino, _offset: u64, bytes: &[u8]) -> std::io::Result<u64> {
        std::thread::sleep(Duration::from_millis(2));
        let len = bytes.len() as u64;
        self.stored_bytes.fetch_add(len, Ordering::SeqCst);
        Ok(len)
    }
}

// Promises: scan-pages
#[test]
fn scan_waits_for_slow_page_cache_stores() {
    let (tree, env) = (Tree::large(), TestEnv::new());
    let mut options = env.options_without_disk_cache();
    // A fifth of the archive is in memory at once.
    options.scan.memory = 64 << 20;
    options.scan.chunk_len = 256 << 10;
    // No span is stored before a reader is sequential.
    let gate = Arc::new(Barrier::new(2));
    let (is_held, at_gate) = (AtomicBool::new(true), Arc::clone(&gate));
    let resource = Resource::new(large_lz4()).etag("\"1\"");
    env.server.route(PATH, move |request| {
        let is_behind = request.range().is_some_and(|(start, _)| start >= 8 << 20);
        if is_behind && is_held.swap(false, Ordering::SeqCst) {
            at_gate.wait();
        }
        resource.answer(request)
    });
    let (source, stats) = env.source();
    let archive =
        Archive::open_early(source, &options, env.network.handle(), &stats).expect("begun");
    archive
        .start_prefetch(PrefetchOptions::default())
        .expect("threads");
    let pages = Arc::<SlowPages>::default();
    archive.add_page_cache(Arc::clone(&pages) as Arc<dyn PageCache>);
    gate.wait();
    let total: usize = tree.files.iter().map(|(_, content)| content.len()).sum();
    // Most of it, because a busy machine may skip some.
    wait::wait_until("most is stored", || {
        pages.stored_bytes.load(Ordering::SeqCst) >= total as u64 / 4 * 3
    });
}

/// Opens with empty memory and prepares `prefetch`.
fn open_with(env: &TestEnv, memory: u64, prefetch: PrefetchOptions) -> Archive {
    let mut options = env.options_without_disk_cache();
    options.scan.memory = memory;
    let archive = env.open_with(&options);
    archive.start_prefetch(prefetch).expect("threads");
    archive
}

fn all() -> PrefetchOptions {
    PrefetchOptions {
        mode: PrefetchMode::All,
        ..PrefetchOptions::default()
    }
}

fn state(archive: &Archive) -> PrefetchState {
    archive.prefetch_progress().expect("started").state
}

// Promises: prefetch-all
#[test]
fn full_prefetch_fetches_everything_once() {
    let tree = Tree::mixed();
    let env = TestEnv::new();
    for packing in [
        Packing::Plain,
        Packing::Lz4,
        Packing::Bgzf,
        Packing::ZstdFrames,
    ] {
        let packed = packed(packing);
        env.serve(Resource::new(packed.clone()).etag(&format!("\"{packing:?}\"")));
        drop(env.open());
        let before = env.server.sent_bytes(PATH);
        let archive = open_with(&env, 128 << 20, all());
        wait::wait_until("everything is fetched", || {
            state(&archive) == PrefetchState::Complete
        });
        let fetched = env.server.sent_bytes(PATH);
        let needed = packed.len() as u64;
        assert!((fetched - before) * 100 <= needed * 102, "{packing:?}");
        let progress = archive.prefetch_progress().expect("started");
        assert_eq!(progress.done_spans, progress.total_spans);
        for (name, content) in &tree.files {
            read_sequentially(&archive, ino(&archive, name), content);
        }
        wait_until_idle(&archive);
        assert_eq!(env.server.sent_bytes(PATH), fetched, "{packing:?}");
        assert_eq!(archive.stats().memory_miss_spans.get(), 0);
    }
}

// Promises: prefetch-all
#[test]
fn full_prefetch_without_space_stops_and_is_reported() {
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let before = env.server.sent_bytes(PATH);
    let archive = open_with(&env, 64 << 20, all());
    wait::wait_until("memory is full", || state(&archive) == PrefetchState::Full);
    let fetched = env.server.sent_bytes(PATH) - before;
    // Three quarters of the memory for spans. They are noise, so their packed length is the same.
    assert!((10 << 20..20 << 20).contains(&fetched), "{fetched}");
    assert!(archive.cached_bytes() <= 24 << 20);
    let progress = archive.prefetch_progress().expect("started");
    assert!(progress.done_spans < progress.total_spans, "{progress:?}");
}

// Promises: ahead-none
#[test]
fn nothing_is_prefetched_if_prefetch_is_off() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let none = PrefetchOptions {
        mode: PrefetchMode::Off,
        ..PrefetchOptions::default()
    };
    let archive = open_with(&env, 64 << 20, none);
    for (name, content) in &tree.files {
        read_sequentially(&archive, ino(&archive, name), content);
    }
    wait_until_idle(&archive);
    assert_eq!(archive.stats().prefetched_spans.get(), 0);
    assert_eq!(state(&archive), PrefetchState::Off);
}

// Promises: ahead-rate
#[test]
fn rate_limited_prefetch_does_not_block_reads() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let slow = PrefetchOptions {
        bytes_per_second: Some(1),
        ..all()
    };
    let archive = open_with(&env, 64 << 20, slow);
    wait::wait_until("one request is sent", || {
        archive.stats().prefetched_packed_bytes.get() > 0
    });
    // The prefetcher waits for weeks now.
    for (name, content) in &tree.files {
        let read = archive.read_blocking(ino(&archive, name), 0, 1 << 20);
        assert!(read.expect("readable") == *content, "{name} is wrong");
    }
    assert_eq!(archive.stats().prefetched_spans.get(), 1);
    assert_eq!(state(&archive), PrefetchState::Running);
    drop(archive);
}

/// The files that a starting program reads, scattered over the large tree.
fn sample_files() -> Vec<usize> {
    let mut noise = Rng::new(11);
    let count = Tree::large().files.len() as u64;
    (0..60).map(|_| index(noise.below(count))).collect()
}

/// Reads the files as a mount does, each while no request is in flight.
fn read_slowly(archive: &Archive, numbers: &[usize]) {
    let tree = Tree::large();
    for &number in numbers {
        let (name, content) = tree.files.get(number).expect("inside");
        wait_until_idle(archive);
        read_sequentially(archive, ino(archive, name), content);
    }
}

/// Records the ranges of these reads.
fn record(env: &TestEnv, numbers: &[usize]) -> Vec<AccessedRange> {
    let record = PrefetchOptions {
        mode: PrefetchMode::Off,
        record: true,
        ..PrefetchOptions::default()
    };
    let archive = open_with(env, 64 << 20, record);
    assert_eq!(archive.accesses_since(0), None);
    read_slowly(&archive, numbers);
    assert!(archive.stats().memory_miss_spans.get() > 0);
    let (recorded, reads) = archive.accesses_since(0).expect("something was read");
    assert_eq!(archive.accesses_since(reads), None, "nothing since");
    let distinct: BTreeSet<_> = numbers.iter().collect();
    assert_eq!(recorded.len(), distinct.len(), "each file is one range");
    let (tree, first) = (Tree::large(), *numbers.first().expect("some"));
    let (name, content) = tree.files.get(first).expect("inside");
    let expected = AccessedRange {
        ino: ino(&archive, name),
        offset: 0,
        len: content.len() as u64,
    };
    assert_eq!(recorded.first(), Some(&expected));
    recorded
}

// Promises: profile-replay
#[test]
fn replayed_access_log_leaves_no_fetch_to_reads() {
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let random = sample_files();
    let mut sorted = sample_files();
    sorted.sort_unstable();
    // Memory for all of it, or for a third.
    for (numbers, memory) in [(random, 256 << 20), (sorted, 96 << 20)] {
        let recorded = record(&env, &numbers);
        let replay = PrefetchOptions {
            mode: PrefetchMode::Off,
            replay: Some(Box::new(move |_| recorded)),
            ..PrefetchOptions::default()
        };
        let archive = open_with(&env, memory, replay);
        read_slowly(&archive, &numbers);
        let stats = archive.stats();
        let progress = archive.prefetch_progress().expect("started");
        assert_eq!(progress.replayed_spans, progress.replay_spans);
        assert_eq!(stats.memory_miss_spans.get(), 0, "with {memory}");
        assert_eq!(stats.decoded_spans.get(), progress.replay_spans);
    }
}

#[test]
fn full_prefetch_beyond_memory_fetches_once_to_disk_cache() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    let mut options = env.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    drop(env.open_with(&options));

    let before = env.server.sent_bytes(PATH);
    options = env.options();
    options.scan.memory = 32 << 20;
    let archive = env.open_with(&options);
    archive.start_prefetch(all()).expect("threads");
    wait::wait_until("everything is fetched", || {
        state(&archive) == PrefetchState::Complete
    });
    let fetched = env.server.sent_bytes(PATH);
    assert!((fetched - before) * 100 <= large_lz4().len() as u64 * 102);
    assert_eq!(archive.stats().disk_cache_skipped_spans.get(), 0);
    for (name, content) in tree.files.iter().rev() {
        let read = archive.read_blocking(ino(&archive, name), 0, 1 << 20);
        assert!(read.expect("readable") == *content, "{name} is wrong");
    }
    assert_eq!(env.server.sent_bytes(PATH), fetched);
}
