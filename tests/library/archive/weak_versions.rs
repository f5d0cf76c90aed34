//! Servers without versions: a saved index and the disk cache of an earlier mount.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tarfs::archive::{Archive, OpenOptions, PeerSpan, Peers};
use tarfs::index::{Index, MemoryLimit};

use super::{PATH, TestEnv, assert_file, read};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;

/// Three files of noise, each in its own spans.
fn tree(middle_seed: u64) -> Tree {
    let file = |name: &str, seed, len| (name.to_owned(), Rng::new(seed).bytes(len));
    Tree::of(vec![
        file("first", 1, 10 << 20),
        file("middle", middle_seed, 1 << 20),
        file("last", 3, 30 << 20),
    ])
}

fn packed(tree: &Tree) -> Bytes {
    Packing::Lz4.pack(&tree.tar)
}

// Promises: disk-unproven
#[test]
fn old_bytes_are_not_served_for_server_without_validators() {
    let (old, new) = (tree(2), tree(4));
    let (old_packed, new_packed) = (packed(&old), packed(&new));
    assert_eq!(old_packed.len(), new_packed.len());
    let env = TestEnv::new();
    env.serve(Resource::new(old_packed));
    drop(env.open());
    // The change is small, so sampling may miss it. Then reading the file is an error.
    env.serve(Resource::new(new_packed));
    let archive = env.open();
    let [_, (name, content), _] = &new.files[..] else {
        panic!("three files");
    };
    if let Ok(bytes) = read(&archive, name) {
        assert!(bytes == *content, "bytes of an earlier version");
    }
}

// Promises: disk-unproven
#[test]
fn earlier_disk_cache_is_used_only_with_validator() {
    let tree = tree(2);
    let packed = packed(&tree);
    let dated = Resource::new(packed.clone()).last_modified("Sun, 06 Nov 1994 08:49:37 GMT");
    for (resource, is_named) in [(Resource::new(packed.clone()), false), (dated, true)] {
        let env = TestEnv::new();
        env.serve(resource);
        drop(env.open());
        let sent = env.server.sent_bytes(PATH);
        let archive = env.open();
        assert_eq!(archive.stats().scans.get(), 0);
        for (name, content) in &tree.files {
            assert_file(&archive, name, content);
        }
        let sent = env.server.sent_bytes(PATH) - sent;
        assert_eq!(sent < packed.len() as u64, is_named, "{sent} bytes");
    }
}

/// Another process, with decoded blocks of an archive in memory.
#[derive(Debug)]
struct OtherProcess(Archive);

impl Peers for OtherProcess {
    fn index(&self, _: &str, _: &MemoryLimit) -> Option<Index> {
        None
    }

    fn span(&self, _: &str, number: u32, _: u64) -> PeerSpan {
        let found = self.0.span_for_peer(number, Duration::ZERO);
        found.map_or(PeerSpan::Absent, |bytes| PeerSpan::Bytes(bytes.to_vec()))
    }
}

// Promises: disk-unproven
#[test]
fn blocks_of_other_processes_are_used_only_with_validator() {
    let tree = tree(2);
    let packed = packed(&tree);
    let dated = Resource::new(packed.clone()).last_modified("Sun, 06 Nov 1994 08:49:37 GMT");
    for (resource, is_named) in [(Resource::new(packed), false), (dated, true)] {
        let env = TestEnv::new();
        env.serve(resource);
        let other = env.open_with(&env.options_without_disk_cache());
        let [_, (name, content), _] = &tree.files[..] else {
            panic!("three files");
        };
        assert_file(&other, name, content);
        let archive = env.open_with(&OpenOptions {
            peers: Some(Arc::new(OtherProcess(other))),
            ..env.options_without_disk_cache()
        });
        assert_file(&archive, name, content);
        assert_eq!(archive.stats().peer_spans.get() > 0, is_named);
    }
}

// Promises: disk-unproven
#[test]
fn process_reads_its_own_disk_cache_without_validator() {
    let tree = tree(2);
    let env = TestEnv::new();
    env.serve(Resource::new(packed(&tree)));
    drop(env.open());
    let mut options = env.options();
    // Far less than the archive.
    options.scan.memory = 8 << 20;
    let archive = env.open_with(&options);
    let [_, (name, content), _] = &tree.files[..] else {
        panic!("three files");
    };
    let others = || {
        for (other, content) in tree.files.iter().filter(|(other, _)| other != name) {
            assert_file(&archive, other, content);
        }
    };
    assert_file(&archive, name, content);
    others();
    let decoded = archive.stats().decoded_spans.get();
    assert_file(&archive, name, content);
    assert_eq!(archive.stats().decoded_spans.get(), decoded);
    assert!(archive.stats().disk_cache_hit_spans.get() > 0);
    drop(archive);
    assert_eq!(env.cached_files("disk-cache").len(), 1, "that of the scan");
}

// Promises: index-proof
#[test]
fn samples_include_the_first_and_last_bytes() {
    let seeds = [[5, 2, 3], [1, 2, 5]];
    let file = |name: &str, seed, len| (name.to_owned(), Rng::new(seed).bytes(len));
    for [first, middle, last] in seeds {
        let changed = Tree::of(vec![
            file("first", first, 1 << 16),
            file("middle", middle, 40 << 20),
            file("last", last, 1 << 16),
        ]);
        let old = Tree::of(vec![
            file("first", 1, 1 << 16),
            file("middle", 2, 40 << 20),
            file("last", 3, 1 << 16),
        ]);
        let env = TestEnv::new();
        env.serve(Resource::new(packed(&old)).etag("W/\"1\""));
        drop(env.open());
        env.serve(Resource::new(packed(&changed)).etag("W/\"1\""));
        let archive = env.open();
        assert_eq!(archive.stats().scans.get(), 1);
        for (name, content) in &changed.files {
            assert_file(&archive, name, content);
        }
    }
}
