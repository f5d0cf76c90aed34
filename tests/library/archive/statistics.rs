//! The counters of reads and of memory are exact to the byte.

use std::fs;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};

use tarfs::archive::{Archive, Volume, scan};
use tarfs::{Extent, Plain};

use super::{PATH, TestEnv, assert_file, ino, large_lz4, packed};
use crate::support::http::{Resource, Response};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// The spans of a file of one piece.
fn spans(archive: &Archive, name: &str) -> Vec<Extent<Plain>> {
    let index = archive.index();
    let index = index.tree().expect("rows");
    let entry = index.entry(ino(archive, name)).expect("an entry");
    let piece = entry.pieces(0, entry.size()).next().expect("a piece");
    let plain = piece.plain;
    assert_eq!(plain.len(), entry.size());
    let first = index.span_at(plain.start()).expect("a span");
    let last = index.span_at(Plain(plain.end().0 - 1)).expect("a span");
    let spans = (first..=last).map(|number| index.span_extent(number).expect("a span"));
    spans.collect()
}

fn sum(spans: &[Extent<Plain>]) -> u64 {
    spans.iter().map(Extent::len).sum()
}

/// Hits, misses and waits in memory, then hits and misses on disk.
fn cache_counts(archive: &Archive) -> [u64; 5] {
    let stats = archive.stats();
    [
        &stats.memory_hit_spans,
        &stats.memory_miss_spans,
        &stats.memory_shared_spans,
        &stats.disk_cache_hit_spans,
        &stats.disk_cache_miss_spans,
    ]
    .map(tarfs::internal::stats::Counter::get)
}

// Promises: status-counters
#[test]
fn read_spans_are_counted_by_cache_level() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let archive = env.open_with(&env.options_without_disk_cache());
    // A file in several spans, selected by its length.
    let (name, content) = &tree.files[159];
    assert_eq!(content.len(), 1 << 20);
    let (ino, spans) = (ino(&archive, name), spans(&archive, name));
    let count = spans.len() as u64;
    let len = 1 << 20;

    assert!(archive.try_read(ino, 0, len).is_none());
    assert_eq!(
        cache_counts(&archive),
        [0; 5],
        "only the blocking read counts"
    );
    assert_eq!(
        archive.read_blocking(ino, 0, len).expect("bytes"),
        content[..]
    );
    assert_eq!(cache_counts(&archive), [0, count, 0, 0, 0]);
    let stats = archive.stats();
    assert_eq!(stats.decoded_spans.get(), count);
    assert_eq!(stats.decoded_bytes.get(), sum(&spans));

    assert_eq!(
        archive.read_blocking(ino, 0, len).expect("bytes"),
        content[..]
    );
    assert_eq!(cache_counts(&archive), [count, count, 0, 0, 0]);
    assert!(
        archive
            .try_read(ino, 0, len)
            .is_some_and(|read| read.is_ok())
    );
    assert_eq!(cache_counts(&archive), [2 * count, count, 0, 0, 0]);
    assert_eq!(stats.decoded_bytes.get(), sum(&spans));
}

// Promises: status-counters
#[test]
fn read_without_spans_counts_no_cache_level() {
    let env = TestEnv::with_archive(packed(Packing::Lz4));
    let archive = env.open();
    let hole = archive.try_read(ino(&archive, "first/sparse"), 1 << 20, 4096);
    assert_eq!(hole.expect("at once").expect("zeros"), [0; 4096][..]);
    let empty = archive.try_read(ino(&archive, "first/empty"), 0, 4096);
    assert_eq!(empty.expect("at once").expect("nothing"), [][..]);
    assert_eq!(cache_counts(&archive), [0; 5]);
}

// Promises: status-counters
#[test]
fn disk_cache_serves_spans_missing_in_memory() {
    let env = TestEnv::with_archive(packed(Packing::Zstd));
    drop(env.open());
    let archive = env.open();
    let spans = spans(&archive, "z");
    let count = spans.len() as u64;
    assert_file(&archive, "z", b"the end");
    assert_eq!(cache_counts(&archive), [0, 0, 0, count, 0]);
    let bytes = archive.stats().disk_cache_read_bytes.get();
    assert!(bytes <= sum(&spans).min(32 << 10), "{bytes}");
    assert_eq!(archive.stats().decoded_bytes.get(), 0);
    assert_file(&archive, "z", b"the end");
    assert_eq!(cache_counts(&archive), [0, 0, 0, 2 * count, 0]);
    drop(archive);

    fs::remove_file(env.only_cached_file("disk-cache")).expect("removed");
    let archive = env.open();
    assert_file(&archive, "z", b"the end");
    assert_eq!(cache_counts(&archive), [0, count, 0, 0, count]);
    assert!(
        archive.stats().decoded_bytes.get() > sum(&spans),
        "a long way"
    );
}

// Promises: status-counters
#[test]
fn memory_use_is_reported_during_a_read() {
    let tree = Tree::large();
    let packed = large_lz4();
    let env = TestEnv::with_archive(packed.clone());
    drop(env.open());
    let archive = env.open_with(&env.options_without_disk_cache());
    let idle = archive.memory_use();
    assert_eq!(idle.budget_bytes, 64 << 20);
    assert_eq!(
        (idle.spans_bytes, idle.reads_bytes, idle.decoders_bytes),
        (0, 0, 0)
    );
    assert_eq!(idle.index_bytes, archive.index().memory_bytes() as u64);

    let (asked, is_asked) = sync_channel(0);
    let (release, is_released) = sync_channel::<()>(0);
    let is_released = Mutex::new(is_released);
    let resource = Resource::new(packed).etag("\"1\"");
    env.server.route(PATH, move |request| {
        let is_released = is_released.lock().expect("never poisoned");
        if asked.send(()).is_ok() && is_released.recv().is_ok() {
            resource.answer(request)
        } else {
            // The test has failed elsewhere.
            Response::new(500)
        }
    });
    let (name, content) = &tree.files[100];
    let span = sum(&spans(&archive, name));
    let (done, is_done) = sync_channel(1);
    archive.read(
        ino(&archive, name),
        0,
        4096,
        Arc::new(|| true),
        Box::new(move |read| drop(done.send(read))),
    );
    is_asked.recv().expect("a request");
    let busy = archive.memory_use();
    assert!(
        busy.reads_bytes > 2 * span,
        "packed bytes, plain bytes, and a decoder's"
    );
    assert!(busy.reads_bytes <= idle.budget_bytes / 2);
    assert_eq!(busy.spans_bytes, 0);
    release.send(()).expect("waited for");
    let read = is_done.recv().expect("an answer").expect("bytes");
    assert_eq!(read, content[..]);
    let after = archive.memory_use();
    assert_eq!((after.reads_bytes, after.decoders_bytes), (0, 0));
    assert_eq!(after.spans_bytes, archive.cached_bytes());
    assert!(after.spans_bytes >= span);
}

// Promises: status-counters
#[test]
fn reported_memory_budget_is_the_one_in_use() {
    let env = TestEnv::with_archive(packed(Packing::Gzip));
    let mut options = env.options();
    options.scan.memory = 1 << 20;
    let archive = env.open_with(&options);
    assert_eq!(archive.memory_use().budget_bytes, scan::MIN_MEMORY);
}
