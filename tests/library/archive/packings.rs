//! Files of archives are the same in every packing.

use super::{
    TestEnv, assert_files, assert_files_backwards, assert_random_reads, for_each_packing, packed,
};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

fn files_read_the_same_by_new_and_saved_index(packing: Packing) {
    let (tree, packed) = (Tree::mixed(), packed(packing));
    let env = TestEnv::with_archive(packed.clone());
    let archive = env.open();
    assert_eq!(archive.notes(), <[String; 0]>::default());
    let stats = archive.stats();
    assert_eq!(stats.scans.get(), 1);
    assert_eq!(stats.source_read_bytes.get(), packed.len() as u64);
    assert_eq!(archive.index().problem_count(), 0);
    assert_files(&archive, &tree);
    assert_files_backwards(&archive, &tree);
    assert_random_reads(&archive, &tree, 200, 1);

    let archive = env.open();
    let stats = archive.stats();
    assert!(stats.source_requests.get() <= 2);
    assert_eq!(stats.scans.get(), 0);
    assert_random_reads(&archive, &tree, 200, 2);
    assert_files_backwards(&archive, &tree);
    assert_files(&archive, &tree);
    assert_eq!(stats.scans.get(), 0);
}
for_each_packing!(files_read_the_same_by_new_and_saved_index);

/// Every span is decoded repeatedly, each time from its seek point.
fn every_span_is_decoded_alone_without_cache(packing: Packing) {
    let tree = Tree::mixed();
    let env = TestEnv::with_archive(packed(packing));
    drop(env.open());
    // One piece is not stored on disk. In other packings each read decodes a span.
    let mut options = if packing.is_all_seekable() {
        env.options_without_disk_cache()
    } else {
        env.options()
    };
    options.scan.memory = 0;
    let archive = env.open_with(&options);
    assert_random_reads(&archive, &tree, 40, 3);
    assert!(archive.cached_bytes() == 0);
}
for_each_packing!(every_span_is_decoded_alone_without_cache);
