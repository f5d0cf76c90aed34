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
    let mut env = TestEnv::with_archive(packed(packing));
    // A disk may be too slow for a span.
    env.cache = tempfile::tempdir_in("/dev/shm").expect("a directory");
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
    let (spans, bytes) = (stats.decoded_spans.get(), stats.filled_bytes.get());
    assert!(stats.fill_nanoseconds.get() > 0);
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
    let refilled = archive.stats().filled_bytes.get();
    assert_eq!(refilled, 0, "it is on disk again");
}
// Promises: disk-damaged
for_each_packing!(only_lost_half_is_made_again);

/// So that all processes evict first what is soonest decoded.
// Promises: disk-eviction
#[test]
fn cache_files_record_what_their_bytes_cost() {
    for (packing, weight) in [
        (Packing::Lz4, 2),
        (Packing::Gzip, 3),
        (Packing::Bzip2, 17),
        (Packing::Xz, 11),
    ] {
        let mut env = TestEnv::with_archive(packed(packing));
        env.cache = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let archive = env.open();
        let spans = archive.index().span_count();
        let cost = |number| archive.index().tree().expect("rows").decode_cost(number);
        let costs: Vec<_> = (0..spans).map(cost).collect();
        if packing == Packing::Xz {
            assert!(costs.iter().copied().eq(1..=spans), "{costs:?}");
        } else {
            assert!(costs.iter().all(|cost| *cost == 1), "{costs:?}");
        }
        drop(archive);
        let mut text = [0; 20];
        let file = env.only_cached_file("disk-cache");
        let len = rustix::fs::getxattr(&file, "user.tarfs.cost", &mut text).expect("recorded");
        let recorded = std::str::from_utf8(text.get(..len).expect("short")).expect("digits");
        let mean = costs.iter().sum::<u32>() / spans;
        assert_eq!(recorded, (weight * mean).to_string(), "{packing:?}");
    }
}
