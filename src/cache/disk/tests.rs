//! Tests of the disk cache.

use std::path::Path;

use rustix::fs::XattrFlags;

use super::*;

const SPAN: u64 = 256 << 10;

/// A directory on tmpfs. A disk may add metadata blocks, more so when it is fragmented.
pub(super) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a directory")
}

fn cache_dir(directory: &Path, spans: u64) -> DiskCacheDir {
    let limit = spans * SPAN + cache_dir::SPACE_MARGIN_BYTES;
    DiskCacheDir::new(directory, Some(limit))
}

fn options() -> DiskCacheOptions {
    DiskCacheOptions {
        write_pool: BufferPool::new(4 << 20),
        is_only_copy: false,
        free_list: FreeList::new(0),
        read_rate: Arc::default(),
        stats: Arc::default(),
    }
}

fn only_copy() -> DiskCacheOptions {
    DiskCacheOptions {
        is_only_copy: true,
        ..options()
    }
}

fn open(cache_dir: &DiskCacheDir, content: &str) -> DiskCache {
    DiskCache::open(cache_dir.clone(), content, options()).expect("a disk cache")
}

fn extent(number: u64) -> Extent<Plain> {
    Extent::with_len(Plain(number * SPAN), SPAN)
}

fn bytes(number: u64) -> Bytes {
    let byte = u8::try_from(number % 255 + 1).expect("small");
    vec![byte; usize::try_from(SPAN).expect("small")].into()
}

/// Inserts these spans as reads do, and waits until they are written.
fn want(cache: &DiskCache, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        cache.insert_evicting(extent(number), bytes(number), 1, QueueTimeout::Unlimited);
    }
    cache.flush();
}

fn evicted_bytes(cache: &DiskCache) -> u64 {
    cache.shared.options.stats.disk_cache_evicted_bytes.get()
}

fn kept(cache: &DiskCache) -> Vec<u64> {
    let is_kept = |number: &u64| cache.read(extent(*number)) == Some(bytes(*number));
    (0..20).filter(is_kept).collect()
}

// Promises: status-counters, disk-once
#[test]
fn inserted_span_is_readable_at_once_and_after_reopen() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let cache = open(&cache_dir, "a");
    for number in 0..10 {
        cache.insert(extent(number), bytes(number), QueueTimeout::NoWait);
        assert_eq!(cache.read(extent(number)), Some(bytes(number)));
    }
    drop(cache);
    let cache = open(&cache_dir, "a");
    assert_eq!(kept(&cache), (0..10).collect::<Vec<_>>());
    assert_eq!(cache.problem_text(), None);
    let expected = DiskCacheUsage {
        held_bytes: 10 * SPAN,
        all_bytes: 10 * SPAN,
        limit_bytes: 100 * SPAN + cache_dir::SPACE_MARGIN_BYTES,
    };
    assert_eq!(cache.disk_usage(), expected);
}

// Promises: disk-zeros
#[test]
fn zero_runs_take_no_disk_and_are_read_as_zeros() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let cache = open(&cache_dir, "a");
    let run = |from: u64, to: u64| {
        Extent::new(Plain(from * SPAN + 100), Plain(to * SPAN - 100)).expect("in order")
    };
    let part = |from, to, zeros: Option<Extent<Plain>>| {
        let whole = Extent::new(Plain(from * SPAN), Plain(to * SPAN)).expect("in order");
        SparseExtent::new(whole, zeros)
    };
    let content = |part: &SparseExtent| {
        let mut bytes = vec![7; usize::try_from(part.extent().len()).expect("small")];
        part.fill_zeros(&mut bytes);
        Bytes::from(bytes)
    };
    let zeros = SparseExtent::new(extent(0), [extent(0)]);
    let mixed = part(1, 5, Some(run(2, 4)));
    // Nothing that another process wrote in place of zeros is read.
    cache.insert(extent(3), bytes(3), QueueTimeout::Unlimited);
    cache.flush();
    let before = cache.disk_usage().held_bytes;
    for part in [&zeros, &mixed] {
        cache.insert(part.clone(), content(part), QueueTimeout::Unlimited);
    }
    cache.flush();
    let more = cache.disk_usage().held_bytes - before;
    assert!((2 * SPAN..=2 * SPAN + 8192).contains(&more), "{more}");
    // The zeros at the end are past the end of the file.
    let end = part(100, 104, Some(run(101, 105)));
    cache.insert(end.clone(), content(&end), QueueTimeout::Unlimited);
    drop(cache);
    let cache = open(&cache_dir, "a");
    for part in [&zeros, &mixed, &end] {
        assert!(cache.covers(part));
        assert_eq!(cache.read(part.clone()), Some(content(part)));
        let read = cache.read_part(part, Wait::ForDisk);
        assert_eq!(read, Some(content(part)));
        assert!(!cache.covers(&SparseExtent::new(part.extent(), [])) || part == &mixed);
    }
    let hole = SparseExtent::from(extent(50));
    assert!(!cache.covers(&hole));
    assert_eq!(cache.read(hole), None);
}

// Promises: disk-zeros
#[test]
fn first_writes_measure_the_speed_of_reads() {
    let directory = directory();
    let cache = open(&cache_dir(directory.path(), 100), "a");
    assert_eq!(cache.read_rate(), None);
    want(&cache, [0]);
    assert!(cache.read_rate() > Some(0));
}

// Promises: disk-eviction
#[test]
fn least_recently_read_span_is_evicted_for_a_new_read() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 4);
    let cache = open(&cache_dir, "a");
    want(&cache, 0..4);
    cache.mark_used(&extent(0).into());
    want(&cache, 4..6);
    assert_eq!(kept(&cache), [0, 3, 4, 5]);
    assert_eq!(cache.disk_usage().held_bytes, 4 * SPAN);
    assert!(cache.problem_text().is_some());
    assert_eq!(evicted_bytes(&cache), 2 * SPAN);
    drop(cache);
    // Spans of an earlier mount count as older than any use since.
    let cache = open(&cache_dir, "a");
    cache.mark_used(&extent(0).into());
    want(&cache, [8]);
    assert_eq!(kept(&cache), [0, 4, 5, 8]);
    want(&cache, [9, 10, 11]);
    assert_eq!(kept(&cache), [8, 9, 10, 11]);
}

// Promises: disk-eviction
#[test]
fn span_that_costs_less_is_evicted_first() {
    let directory = directory();
    let cache = open(&cache_dir(directory.path(), 4), "a");
    for (number, cost) in [(0, 9), (1, 1), (2, 1), (3, 9)] {
        let sparse = SparseExtent::from(extent(number)).with_cost(cost);
        cache.insert_evicting(sparse, bytes(number), 1, QueueTimeout::Unlimited);
        cache.flush();
    }
    want(&cache, 4..6);
    assert_eq!(kept(&cache), [0, 3, 4, 5]);
}

// Promises: disk-eviction
#[test]
fn archive_in_use_that_costs_less_gives_way_first() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 8);
    let [costly, cheap, new] = ["costly", "cheap", "new"].map(|name| open(&cache_dir, name));
    costly.set_recovery_cost(10);
    want(&costly, 0..5);
    want(&cheap, 0..3);
    want(&new, [0]);
    assert_eq!(
        [&costly, &cheap, &new].map(|cache| kept(cache).len()),
        [5, 2, 1]
    );
}

// Promises: disk-eviction
#[test]
fn scanned_span_evicts_nothing_when_cache_is_full() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 4);
    let cache = open(&cache_dir, "a");
    for number in 0..6 {
        cache.insert(extent(number), bytes(number), QueueTimeout::Unlimited);
    }
    cache.flush();
    assert_eq!(kept(&cache), [0, 1, 2, 3]);
    let problems = cache.problem_text().expect("no room");
    assert!(problems.contains("1114112 bytes"), "{problems}");
}

// Promises: disk-eviction
#[test]
fn unused_archives_of_equal_cost_are_evicted_first_in_lru_order() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 6);
    for (content, minutes) in [("old", 2), ("older", 3), ("new", 1)] {
        let cache = open(&cache_dir, content);
        want(&cache, 0..2);
        let file = Arc::clone(&cache.shared.current.lock().file);
        drop(cache);
        file.set_last_used(SystemTime::now() - Duration::from_mins(minutes));
    }
    let cache = open(&cache_dir, "a");
    want(&cache, 0..3);
    assert_eq!(kept(&cache), [0, 1, 2]);
    assert_eq!(cache.problem_text(), None);
    assert!(!directory.path().join("disk-cache/older.data").exists());
    assert_eq!(kept(&open(&cache_dir, "old")), [1]);
    assert_eq!(kept(&open(&cache_dir, "new")), [0, 1]);
    assert_eq!(evicted_bytes(&cache), 3 * SPAN);
}

// Promises: disk-eviction
#[test]
fn costly_archive_stays_longer_than_a_cheap_one() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 4);
    for (content, cost, minutes) in [("costly", 10, 30), ("cheap", 1, 4)] {
        let cache = open(&cache_dir, content);
        want(&cache, 0..2);
        cache.set_recovery_cost(cost);
        let file = Arc::clone(&cache.shared.current.lock().file);
        drop(cache);
        file.set_last_used(SystemTime::now() - Duration::from_mins(minutes));
    }
    want(&open(&cache_dir, "a"), 0..2);
    assert!(!directory.path().join("disk-cache/cheap.data").exists());
    assert_eq!(kept(&open(&cache_dir, "costly")), [0, 1]);
    let file = directory.path().join("disk-cache/costly.data");
    assert_eq!(xattr_of(&file), "10");
    // No text there prevents the eviction.
    for text in ["", "0", "99999999999999999999999", "\u{ff}"] {
        let set = rustix::fs::setxattr(
            &file,
            "user.tarfs.cost",
            text.as_bytes(),
            XattrFlags::empty(),
        );
        set.expect("set");
        let cache = open(&cache_dir, "b");
        want(&cache, 0..4);
        assert_eq!(kept(&cache), [0, 1, 2, 3], "{text}");
        drop(cache);
        let cache = open(&cache_dir, "costly");
        want(&cache, 0..2);
    }
}

fn xattr_of(file: &Path) -> String {
    let mut text = [0; 20];
    let len = rustix::fs::getxattr(file, "user.tarfs.cost", &mut text).expect("set");
    String::from_utf8(text[..len].to_vec()).expect("digits")
}

/// A span that the disk was too slow for is written when it is read again.
// Promises: disk-slow
#[test]
fn skipped_span_is_written_when_memory_still_has_it() {
    let directory = directory();
    let cache = open(&cache_dir(directory.path(), 100), "a");
    let is_offered = |number| {
        let before = cache.shared.options.stats.disk_cache_written_bytes.get();
        cache.note_read(extent(number), &bytes(number), || extent(number).into());
        cache.flush();
        cache.shared.options.stats.disk_cache_written_bytes.get() > before
    };
    assert!(!is_offered(1), "none was skipped");
    let full = cache
        .shared
        .options
        .write_pool
        .reserve(4 << 20)
        .expect("open");
    for number in 0..8 {
        cache.insert(extent(number), bytes(number), QueueTimeout::NoWait);
    }
    for number in [2, 5, 5] {
        assert!(!is_offered(number), "there is no room");
    }
    drop(full);
    assert!(is_offered(1) && !is_offered(1) && !is_offered(9));
    assert_eq!(cache.take_skipped(3), [0, 2, 3].map(extent));
    assert_eq!(cache.take_skipped(9).len(), 4);
}

// Promises: disk-eviction
#[test]
fn archives_in_use_share_the_disk_limit() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 8);
    let first = open(&cache_dir, "first");
    want(&first, 0..8);
    let second = open(&cache_dir, "second");
    want(&second, 0..10);
    assert_eq!(kept(&second), [6, 7, 8, 9]);
    assert_eq!(kept(&first), [4, 5, 6, 7]);
    want(&first, 10..16);
    assert_eq!(kept(&second), [6, 7, 8, 9]);
    assert_eq!(kept(&first), [12, 13, 14, 15]);
    assert_eq!(first.disk_usage().all_bytes, 8 * SPAN);
    assert_eq!([&first, &second].map(evicted_bytes), [6 * SPAN, 10 * SPAN]);
}

// Promises: disk-damaged
#[test]
fn two_openers_of_one_archive_share_its_cache_file() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 8);
    let caches = [open(&cache_dir, "a"), open(&cache_dir, "a")];
    want(&caches[0], 0..4);
    want(&caches[1], 2..6);
    for cache in &caches {
        assert_eq!(kept(cache), (0..6).collect::<Vec<_>>());
    }
    want(&caches[0], 10..16);
    for cache in &caches {
        assert_eq!(kept(cache).len(), 8);
        assert_eq!(cache.disk_usage().held_bytes, 8 * SPAN);
    }
}

// Promises: disk-no-ranges
#[test]
fn only_copy_stays_whole_while_in_use() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 4);
    let copy = DiskCache::create(cache_dir.clone(), only_copy()).expect("a disk cache");
    for number in 0..3 {
        copy.insert(extent(number), bytes(number), QueueTimeout::Unlimited);
    }
    copy.flush();
    let other = open(&cache_dir, "other");
    want(&other, 0..3);
    assert_eq!(kept(&other), [2]);
    copy.publish("a").expect("renamed");
    want(&other, 3..6);
    assert_eq!(kept(&other), [5]);
    assert_eq!(kept(&copy), [0, 1, 2]);
    copy.insert(extent(9), bytes(9), QueueTimeout::Unlimited);
    copy.flush();
    assert!(copy.problem_text().is_some(), "not at its own expense");
    assert_eq!(kept(&copy), [0, 1, 2]);
    drop(copy);
    want(&other, 6..8);
    assert_eq!(kept(&other), [5, 6, 7], "all of it goes at once");
}

// Promises: disk-limit
#[test]
fn lowered_limit_is_enforced_on_open() {
    let directory = directory();
    want(&open(&cache_dir(directory.path(), 10), "a"), 0..10);
    let cache = open(&cache_dir(directory.path(), 3), "a");
    want(&cache, []);
    drop(cache);
    let cache = open(&cache_dir(directory.path(), 3), "a");
    assert_eq!(kept(&cache), [7, 8, 9]);
}

#[test]
fn only_published_nonempty_cache_file_survives_drop() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 10);
    let cache = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
    want(&cache, [0]);
    drop(cache);
    drop(open(&cache_dir, "empty"));
    assert!(cache_dir.files().expect("readable").is_empty());

    let cache = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
    want(&cache, [0]);
    cache.publish("known").expect("renamed");
    want(&cache, [1]);
    drop(cache);
    assert_eq!(kept(&open(&cache_dir, "known")), [0, 1]);
}

#[test]
fn publish_keeps_the_fuller_of_two_cache_files() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let made = |spans| {
        let cache = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
        want(&cache, 0..spans);
        cache
    };
    let (less, more, least) = (made(2), made(5), made(1));
    for cache in [&less, &more, &least] {
        cache.publish("a").expect("renamed");
    }
    assert_eq!(kept(&least), [0, 1, 2, 3, 4], "the other one is better");
    // A cache whose file was replaced switches to the new file at its next write.
    want(&less, [7]);
    for cache in [&less, &more, &least] {
        assert_eq!(kept(cache), [0, 1, 2, 3, 4, 7]);
    }
    assert_eq!(cache_dir.files().expect("readable").len(), 1);
}

// Promises: disk-damaged
#[test]
fn deleted_disk_cache_file_is_recreated_on_write() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let cache = open(&cache_dir, "a");
    want(&cache, 0..2);
    std::fs::remove_file(directory.path().join("disk-cache/a.data")).expect("there");
    assert_eq!(kept(&cache), [0, 1], "still open");
    want(&cache, 2..4);
    drop(cache);
    assert_eq!(kept(&open(&cache_dir, "a")), [2, 3]);
}

// Promises: archives-memory
#[test]
fn disk_caches_share_the_memory_of_queued_spans() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let options = DiskCacheOptions {
        write_pool: BufferPool::new(4 * SPAN),
        ..options()
    };
    let open = |content| DiskCache::open(cache_dir.clone(), content, options.clone());
    let caches = ["a", "b"].map(|content| open(content).expect("a disk cache"));
    let lock = cache_dir.lock_for_write().expect("no one writes");
    for number in 0..3 {
        for cache in &caches {
            cache.insert(extent(number), bytes(number), QueueTimeout::NoWait);
        }
    }
    assert_eq!(options.write_pool.used_bytes(), 4 * SPAN);
    assert_eq!(options.stats.disk_cache_skipped_spans.get(), 2);
    drop(lock);
    for cache in &caches {
        cache.flush();
        cache.insert(extent(2), bytes(2), QueueTimeout::Unlimited);
        cache.flush();
        assert_eq!(kept(cache), [0, 1, 2]);
    }
    drop(caches);
    assert_eq!(options.write_pool.used_bytes(), 0);
}

// Promises: disk-slow
#[test]
fn write_lock_timeout_skips_all_pending_spans() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let cache = open(&cache_dir, "a");
    want(&cache, [0]);
    let lock = cache_dir.lock_for_write().expect("no one writes");
    for number in 1..9 {
        cache.insert_evicting(extent(number), bytes(number), 1, QueueTimeout::NoWait);
    }
    let skipped = &cache.shared.options.stats.disk_cache_skipped_spans;
    while skipped.get() == 0 {
        std::thread::yield_now();
    }
    drop(lock);
    cache.flush();
    assert_eq!(skipped.get(), 8);
    want(&cache, [9]);
    assert_eq!(kept(&cache), [0, 9]);
}

// Promises: disk-damaged
#[test]
fn unfinished_files_of_dead_processes_are_removed() {
    let directory = directory();
    let cache_dir = cache_dir(directory.path(), 100);
    let living = DiskCache::create(cache_dir.clone(), options()).expect("a disk cache");
    want(&living, [0]);
    std::fs::write(directory.path().join("disk-cache/.1-0.data"), b"left").expect("written");
    drop(open(&cache_dir, "a"));
    assert!(!directory.path().join("disk-cache/.1-0.data").exists());
    living.publish("b").expect("still there");
    assert_eq!(kept(&living), [0]);
}
