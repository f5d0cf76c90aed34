//! Several threads decode a long gzip member speculatively with the same result as one thread.

use tarfs::archive::{DiskCacheMode, scan};

use super::{
    TestEnv, assert_files, assert_files_backwards, assert_random_reads, packed, scan_options,
};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Materializes the mixed tree. Returns the number of speculative shares, and of their pieces that
/// were correct.
fn materialize_counts(workers: usize, memory: u64) -> (u64, u64) {
    let tree = Tree::mixed();
    let env = TestEnv::with_archive(packed(Packing::Gzip));
    let options = scan::Options {
        workers,
        memory,
        ..scan_options()
    };
    let stats = env.assert_materializes(&options, &tree);
    (stats.speculative_decodes.get(), stats.decoder_jobs.get())
}

#[test]
fn gzip_is_decoded_speculatively_by_four_workers_not_three() {
    let (shares, jobs) = materialize_counts(4, 128 << 20);
    assert!(shares >= 3 && jobs >= 3, "{shares} {jobs}");
    assert_eq!(materialize_counts(3, 128 << 20), (0, 0));
}

#[test]
fn nothing_is_decoded_speculatively_with_little_memory() {
    assert_eq!(materialize_counts(8, 32 << 20), (0, 0));
}

#[test]
fn index_from_speculative_decoding_serves_every_byte() {
    let tree = Tree::mixed();
    let env = TestEnv::with_archive(packed(Packing::Gzip));
    let mut options = env.options();
    options.scan.workers = 4;
    options.scan.memory = 256 << 20;
    let archive = env.open_with(&options);
    assert!(archive.stats().decoder_jobs.get() > 0);
    assert_eq!(archive.index().problem_count(), 0);
    assert!(!archive.has_unseekable_spans());
    assert_files(&archive, &tree);

    // Every span is decoded from its seek point.
    options.disk_cache = DiskCacheMode::Disabled;
    options.scan.memory = 0;
    let archive = env.open_with(&options);
    assert_eq!(archive.stats().scans.get(), 0);
    assert_random_reads(&archive, &tree, 100, 5);
    assert_files_backwards(&archive, &tree);
}
