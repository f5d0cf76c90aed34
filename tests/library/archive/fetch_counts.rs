//! Nothing is fetched, decoded or stored without need.

use super::{
    TestEnv, assert_file, assert_files, for_each_packing, ino, large_lz4, packed, scan_options,
};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::tree::Tree;

use tarfs::archive::{Volume, scan};
use tarfs::index::{EntryKind, Index, Ino};

use super::PATH;

// Promises: fetch-reads
#[test]
fn small_file_read_costs_one_span_and_then_nothing() {
    let (tree, packed) = (Tree::large(), large_lz4());
    let env = TestEnv::with_archive(packed.clone());
    drop(env.open());

    let archive = env.open_with(&env.options_without_disk_cache());
    let (name, content) = &tree.files[160];
    assert_eq!(content.len(), 4096);
    assert_file(&archive, name, content);
    let stats = archive.stats();
    assert!(stats.source_read_bytes.get() < 10_000_000);
    assert!(
        stats.decoded_spans.get() <= 2,
        "{}",
        stats.decoded_spans.get()
    );

    let (requests, spans) = (stats.source_requests.get(), stats.decoded_spans.get());
    assert_file(&archive, name, content);
    let ino = ino(&archive, name);
    assert!(
        archive
            .try_read(ino, 0, 4096)
            .is_some_and(|read| read.is_ok())
    );
    assert_eq!(stats.source_requests.get(), requests);
    assert_eq!(stats.decoded_spans.get(), spans);
}

fn scan_fetches_every_byte_once(packing: Packing) {
    let packed = packed(packing);
    let env = TestEnv::with_frozen_clock(packed.clone());
    for (chunk_len, connections) in [(64 << 10, 8), (1 << 20, 1), (8 << 20, 8)] {
        let mut options = env.options();
        options.cache_dir = None;
        options.scan.chunk_len = chunk_len;
        options.scan.connections = connections;
        let before = env.server.sent_bytes(PATH);
        let archive = env.open_with(&options);
        let read = archive.stats().source_read_bytes.get();
        assert_eq!(read, packed.len() as u64);
        assert_eq!(env.server.sent_bytes(PATH) - before, read);
    }
}
for_each_packing!(scan_fetches_every_byte_once);

// Promises: fetch-materialize
#[test]
fn materialize_fetches_every_byte_once() {
    let tree = Tree::mixed();
    for packing in [Packing::Plain, Packing::Lz4, Packing::Zstd, Packing::Gzip] {
        let packed = packed(packing);
        for chunk_len in [64 << 10, 1 << 20, 8 << 20] {
            for connections in [1, 8] {
                let env = TestEnv::with_frozen_clock(packed.clone());
                let options = scan::Options {
                    chunk_len,
                    connections,
                    ..scan_options()
                };
                let stats = env.assert_materializes(&options, &tree);
                assert_eq!(stats.source_read_bytes.get(), packed.len() as u64);
                assert_eq!(env.server.sent_bytes(PATH), packed.len() as u64);
            }
        }
    }
}

// Promises: memory-bound
#[test]
fn cached_spans_stay_within_memory_budget() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    let mut options = env.options();
    options.scan.memory = 32 << 20;
    for scans in [1, 0] {
        let archive = env.open_with(&options);
        assert_eq!(archive.stats().scans.get(), scans);
        assert!(archive.cached_bytes() <= 12 << 20);
        for (name, content) in &tree.files {
            assert_file(&archive, name, content);
            assert!(archive.cached_bytes() <= 12 << 20);
        }
        // The kernel caches pages that it reads from the disk cache.
        assert!(
            scans == 0 || archive.cached_bytes() >= 6 << 20,
            "and half of it is used"
        );
    }
}

/// All files below `directory`, each directory in the order of its listing.
fn files_in_listing_order(index: &Index, directory: Ino) -> Vec<Ino> {
    let children = index.children(directory, 0).flat_map(|child| {
        let kind = index.entry(child.ino).map(|entry| entry.kind());
        match kind {
            Some(EntryKind::Directory) => files_in_listing_order(index, child.ino),
            _ => vec![child.ino],
        }
    });
    children.collect()
}

// Promises: names-order
#[test]
fn reads_in_listing_order_decode_every_span_once() {
    let env = TestEnv::with_archive(large_lz4());
    let mut options = env.options_without_disk_cache();
    drop(env.open_with(&options));
    options.scan.memory = 32 << 20;
    let archive = env.open_with(&options);
    let files = files_in_listing_order(archive.index().tree().expect("rows"), Ino::ROOT);
    assert_eq!(files.len(), Tree::large().files.len());
    for ino in files {
        let len = archive
            .index()
            .tree()
            .expect("rows")
            .entry(ino)
            .expect("an entry")
            .size();
        let len = u32::try_from(len).expect("small");
        archive.read_blocking(ino, 0, len).expect("bytes");
    }
    let decoded = archive.stats().decoded_spans.get();
    assert_eq!(decoded, u64::from(archive.index().span_count()));
}

#[test]
fn reads_in_order_decode_every_span_once() {
    let env = TestEnv::new();
    for packing in Packing::ALL
        .into_iter()
        .filter(|packing| packing.is_all_seekable())
    {
        env.serve(Resource::new(packed(packing)).etag(&format!("\"{packing:?}\"")));
        drop(env.open());
        let archive = env.open_with(&env.options_without_disk_cache());
        assert_files(&archive, &Tree::mixed());
        let decoded = archive.stats().decoded_spans.get();
        let spans = u64::from(archive.index().span_count());
        assert!(decoded <= spans, "{packing:?}: {decoded} of {spans}");
    }
}
