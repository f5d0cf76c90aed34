//! An expected digest: readers get bytes with that digest, or none.

use tarfs::Sha256;
use tarfs::archive::{Error, OpenError, OpenOptions, scan::Digest};

use super::{PATH, TestEnv, assert_files, for_each_packing, packed};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::sha256::sha256;
use crate::support::tree::Tree;

const OTHER: Sha256 = Sha256([0x5a; 32]);

fn digest(bytes: &[u8]) -> Sha256 {
    sha256(bytes).parse().expect("a digest")
}

impl TestEnv {
    fn options_expecting(&self, digest: Sha256) -> OpenOptions {
        let mut options = self.options();
        options.scan.sha256 = Digest::Expect(digest);
        // Otherwise the scan would skip large members.
        options.scan.allow_skipping = true;
        options
    }

    #[track_caller]
    fn assert_rejects(&self, digest: Sha256) -> Sha256 {
        match self.try_open(&self.options_expecting(digest)) {
            Err(OpenError::Archive { error, .. }) => match *error {
                Error::DigestMismatch { expected, found } => {
                    assert_eq!(expected, digest);
                    found
                }
                error => panic!("{error:?}"),
            },
            result => panic!("opened: {}", result.is_ok()),
        }
    }
}

fn digest_covers_all_packed_bytes(packing: Packing) {
    let packed = packed(packing);
    let right = digest(&packed);
    let env = TestEnv::with_archive(packed);
    assert_eq!(env.assert_rejects(OTHER), right);
    assert!(env.cached_files("index").is_empty() && env.cached_files("disk-cache").is_empty());
    let archive = env.open_with(&env.options_expecting(right));
    assert_eq!(archive.stats().scans.get(), 1);
    assert_eq!(archive.index().origin().sha256, Some(right));
    assert_files(&archive, &Tree::mixed());
}
// Promises: expect-digest
for_each_packing!(digest_covers_all_packed_bytes);

// Promises: expect-digest
#[test]
fn digest_includes_bytes_after_the_end_of_archive() {
    let packed = [&packed(Packing::Plain)[..], &vec![0; 3 << 20]].concat();
    let env = TestEnv::with_archive(packed.clone().into());
    assert_eq!(env.assert_rejects(OTHER), digest(&packed));
}

// Promises: expect-mount
#[test]
fn saved_index_proves_digest_only_with_strong_version() {
    let packed = packed(Packing::Lz4);
    let right = digest(&packed);
    let env = TestEnv::with_archive(packed.clone());
    // The index was saved without an expected digest.
    drop(env.open());
    let archive = env.open_with(&env.options_expecting(right));
    assert_eq!(archive.stats().scans.get(), 1);
    drop(archive);
    let archive = env.open_with(&env.options_expecting(right));
    assert_eq!(archive.stats().scans.get(), 0);
    drop(archive);
    // A caller without an expected digest may use the index as well.
    assert_eq!(env.open().stats().scans.get(), 0);
    // The saved digest already differs.
    let sent = env.server.sent_bytes(PATH);
    assert_eq!(env.assert_rejects(OTHER), right);
    assert!(env.server.sent_bytes(PATH) - sent < 1 << 20);
}

// Promises: expect-mount
#[test]
fn saved_index_does_not_prove_digest_with_weak_version() {
    let packed = packed(Packing::Lz4);
    let right = digest(&packed);
    let env = TestEnv::new();
    env.serve(Resource::new(packed.clone()).etag("W/\"1\""));
    for _ in 0..2 {
        let archive = env.open_with(&env.options_expecting(right));
        assert_eq!(archive.stats().scans.get(), 1);
    }
    assert_eq!(env.open().stats().scans.get(), 0);
}

// Promises: expect-mount
#[test]
fn foreign_index_file_does_not_prove_digest() {
    let packed = packed(Packing::Lz4);
    let right = digest(&packed);
    let elsewhere = TestEnv::with_archive(packed.clone());
    drop(elsewhere.open_with(&elsewhere.options_expecting(right)));
    let env = TestEnv::with_archive(packed.clone());
    let options = OpenOptions {
        index_file: Some(elsewhere.only_cached_file("index")),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..env.options_expecting(right)
    };
    assert_eq!(env.open_with(&options).stats().scans.get(), 1);
    // The same holds for an index that claims to be of this archive, because anyone can write one.
    let options = OpenOptions {
        index_file: Some(env.only_cached_file("index")),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..env.options_expecting(right)
    };
    assert_eq!(env.open_with(&options).stats().scans.get(), 1);
}

// Promises: expect-mount
#[test]
fn archive_with_wrong_digest_leaves_no_index_or_cache() {
    let env = TestEnv::with_archive(packed(Packing::Lz4));
    let (source, stats) = env.source();
    let options = env.options_expecting(OTHER);
    let network = env.network.handle();
    let opened = tarfs::archive::Archive::open_early(source, &options, network, &stats);
    let Err(OpenError::Archive { error, .. }) = opened else {
        panic!("opened: {}", opened.is_ok());
    };
    assert!(matches!(*error, Error::DigestMismatch { .. }), "{error:?}");
    assert!(env.cached_files("index").is_empty() && env.cached_files("disk-cache").is_empty());
}
