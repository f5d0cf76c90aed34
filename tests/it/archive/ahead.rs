//! A long gzip member, decoded ahead by several threads, is what it is when one decodes it.

use tarfs::archive::{DiskCacheMode, scan};

use super::{Lab, assert_files, assert_files_backwards, assert_random_reads, packed, scan_options};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Materializes the mixed tree and answers how many shares were begun, and how many pieces of
/// such shares were good.
fn materialized(workers: usize, memory: u64) -> (u64, u64) {
    let tree = Tree::mixed();
    let lab = Lab::serving(packed(Packing::Gzip));
    let options = scan::Options {
        workers,
        memory,
        ..scan_options()
    };
    let stats = lab.assert_materializes(&options, &tree);
    (stats.speculative_decodes.get(), stats.decoder_jobs.get())
}

#[test]
fn four_workers_decode_a_gzip_ahead_and_three_do_not() {
    let (shares, jobs) = materialized(4, 128 << 20);
    assert!(shares >= 3 && jobs >= 3, "{shares} {jobs}");
    assert_eq!(materialized(3, 128 << 20), (0, 0));
}

#[test]
fn with_little_memory_nothing_is_decoded_ahead() {
    assert_eq!(materialized(8, 32 << 20), (0, 0));
}

#[test]
fn an_index_made_ahead_serves_every_byte() {
    let tree = Tree::mixed();
    let lab = Lab::serving(packed(Packing::Gzip));
    let mut options = lab.options();
    options.scan.workers = 4;
    options.scan.memory = 256 << 20;
    let archive = lab.open_with(&options);
    assert!(archive.stats().decoder_jobs.get() > 0);
    assert_eq!(archive.index().problem_count(), 0);
    assert!(!archive.has_unseekable_spans());
    assert_files(&archive, &tree);

    // Every span from its seek point.
    options.disk_cache = DiskCacheMode::Disabled;
    options.scan.memory = 0;
    let archive = lab.open_with(&options);
    assert_eq!(archive.stats().scans.get(), 0);
    assert_random_reads(&archive, &tree, 100, 5);
    assert_files_backwards(&archive, &tree);
}
