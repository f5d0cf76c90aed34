//! Loss of parts of the disk cache under a reader: reads go on, and only what was lost is decoded again.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};

use rustix::fs::{FallocateFlags, fallocate};
use tarfs::archive::{Archive, OpenOptions as ArchiveOptions};
use tarfs::{ArchivePath, Extent, Plain};

use super::{TestEnv, assert_files, assert_files_backwards, for_each_packing, packed};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Far less memory than the archive needs.
fn options(env: &TestEnv) -> ArchiveOptions {
    let mut options = env.options();
    options.scan.memory = 8 << 20;
    options
}

/// All spans in which files of the mixed tree have bytes other than zeros.
fn needed_spans(archive: &Archive) -> Vec<Extent<Plain>> {
    let tree = archive.index();
    let tree = tree.tree().expect("rows");
    let mut needed = BTreeSet::new();
    for (name, content) in &Tree::mixed().files {
        let path = ArchivePath::sanitize(name.as_bytes()).path;
        let entry = tree.find(&path).expect("an entry");
        for piece in entry.pieces(0, content.len() as u64) {
            let last = Plain(piece.plain.end().0 - 1);
            let first = tree.span_at(piece.plain.start()).expect("a span");
            needed.extend(first..=tree.span_at(last).expect("a span"));
        }
    }
    let extents = needed
        .into_iter()
        .map(|number| tree.span_extent(number).expect("a span"));
    extents.collect()
}

fn cache_file(env: &TestEnv) -> File {
    let file = OpenOptions::new()
        .write(true)
        .open(env.only_cached_file("disk-cache"));
    file.expect("a cache file")
}

fn lose(file: &File, extent: Extent<Plain>) {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, mode, extent.start().0, extent.len()).expect("freed");
}

fn sum(spans: &[Extent<Plain>]) -> u64 {
    spans.iter().map(Extent::len).sum()
}

fn only_lost_half_is_made_again(packing: Packing) {
    let env = TestEnv::with_archive(packed(packing));
    drop(env.open_with(&options(&env)));
    let archive = env.open_with(&options(&env));
    let needed = needed_spans(&archive);
    let lost: Vec<_> = needed.iter().step_by(2).copied().collect();
    let file = cache_file(&env);
    for &span in &lost {
        lose(&file, span);
    }
    assert_files_backwards(&archive, &Tree::mixed());
    let stats = archive.stats();
    assert_eq!(stats.scans.get(), 0);
    let (spans, bytes) = (stats.decoded_spans.get(), stats.refilled_bytes.get());
    assert!(stats.refill_nanoseconds.get() > 0);
    if packing == Packing::Plain {
        // Fetched by windows, also those that begin before a lost span or end after it.
        let edges = lost.len() as u64 * 2 * (128 << 10);
        assert!(bytes <= sum(&lost) + edges, "{bytes} of {lost:?}");
    } else if packing.is_all_seekable() {
        assert_eq!((spans, bytes), (lost.len() as u64, sum(&lost)));
    }
    drop(archive);

    let archive = env.open_with(&options(&env));
    assert_files(&archive, &Tree::mixed());
    let refilled = archive.stats().refilled_bytes.get();
    assert_eq!(refilled, 0, "it is on disk again");
}
// Promises: disk-damaged
for_each_packing!(only_lost_half_is_made_again);

/// Each read starts at the beginning of the stream, but goes on as far again.
// Promises: disk-damaged
#[test]
fn lost_stream_without_seek_points_is_decoded_few_times() {
    for packing in [Packing::Zstd, Packing::Xz] {
        let tree = Tree::large();
        let env = TestEnv::with_archive(packing.pack(&tree.tar));
        drop(env.open_with(&options(&env)));
        for should_lose_all in [true, false] {
            let archive = env.open_with(&options(&env));
            let spans = archive.index().span_count();
            let file = cache_file(&env);
            for number in (0..spans).step_by(if should_lose_all { 1 } else { 2 }) {
                let extent = archive.index().tree().expect("rows").span_extent(number);
                lose(&file, extent.expect("a span"));
            }
            assert_files(&archive, &tree);
            let decoded = archive.stats().decoded_spans.get();
            assert!(decoded <= 3 * u64::from(spans), "{decoded} of {spans}");
            drop(archive);
            let archive = env.open_with(&options(&env));
            assert_files(&archive, &tree);
            assert_eq!(archive.stats().refilled_bytes.get(), 0);
        }
    }
}
