//! A saved index is used exactly as long as it matches the archive.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use tarfs::archive::{OpenError, OpenOptions, ReadError};
use tarfs::codec::Compression;

use super::{PATH, TestEnv, assert_file, assert_files, large_lz4, packed, read};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;

#[test]
fn damaged_saved_index_is_rebuilt() {
    let harms: [fn(&mut Vec<u8>); 7] = [
        Vec::clear,
        |index| index.truncate(10),
        |index| index.truncate(index.len() - 1),
        |index| index.truncate(index.len() / 2),
        |index| index[20] ^= 1,
        |index| {
            let middle = index.len() / 2;
            index[middle] ^= 0x80;
        },
        |index| *index = Rng::new(5).bytes(100_000),
    ];
    for (number, harm) in harms.into_iter().enumerate() {
        let env = TestEnv::with_archive(packed(Packing::Lz4));
        drop(env.open());
        let path = env.only_cached_file("index");
        let mut saved = fs::read(&path).expect("an index");
        harm(&mut saved);
        fs::write(&path, saved).expect("written");

        let archive = env.open();
        assert_eq!(archive.stats().scans.get(), 1, "harm {number}");
        assert_files(&archive, &Tree::mixed());
        let archive = env.open();
        assert_eq!(archive.stats().scans.get(), 0, "replaced");
        assert_files(&archive, &Tree::mixed());
    }
}

#[test]
fn saved_index_of_another_archive_is_not_used() {
    let env = TestEnv::with_archive(packed(Packing::Lz4));
    drop(env.open());
    let other = TestEnv::with_archive(Packing::Lz4.pack(&Tree::other().tar));
    drop(other.open());
    fs::copy(
        other.only_cached_file("index"),
        env.only_cached_file("index"),
    )
    .expect("copied");
    let archive = env.open();
    assert_eq!(archive.stats().scans.get(), 1);
    assert_files(&archive, &Tree::mixed());
}

#[test]
fn archive_read_with_other_options_has_another_index() {
    let env = TestEnv::with_archive(packed(Packing::Gzip));
    let changes: [fn(&mut OpenOptions); 4] = [
        |_| {},
        |options| options.scan.tar.ignore_zeros = true,
        |options| options.scan.allow_truncated = true,
        |options| options.scan.compression = Some(Compression::Gzip),
    ];
    for scans in [1, 0] {
        for change in changes {
            let mut options = env.options();
            change(&mut options);
            let archive = env.open_with(&options);
            assert_eq!(archive.stats().scans.get(), scans);
            assert_files(&archive, &Tree::mixed());
        }
        assert_eq!(env.cached_files("index").len(), changes.len());
    }
}

/// Server versions that are no proof of identical bytes.
fn weak_resources(packed: Bytes) -> [Resource; 3] {
    [
        Resource::new(packed.clone()),
        Resource::new(packed.clone()).etag("W/\"1\""),
        Resource::new(packed).last_modified("Sun, 06 Nov 1994 08:49:37 GMT"),
    ]
}

// Promises: index-proof
#[test]
fn strong_validator_is_trusted_and_weak_one_is_checked() {
    let packed = packed(Packing::Lz4);
    let env = TestEnv::with_archive(packed.clone());
    drop(env.open());
    assert_eq!(env.open().stats().decoded_spans.get(), 0);
    for resource in weak_resources(packed) {
        let env = TestEnv::new();
        env.serve(resource);
        drop(env.open());
        let archive = env.open();
        let stats = archive.stats();
        assert_eq!(stats.scans.get(), 0);
        // Samples of the front, the end and places in between, each by one request.
        let samples = stats.source_requests.get() - 1;
        assert!((2..=6).contains(&samples), "{samples}");
        assert!(stats.decoded_spans.get() >= samples);
        assert_files(&archive, &Tree::mixed());
    }
}

// Promises: index-proof
#[test]
fn index_is_discarded_if_bytes_changed_unnoticed() {
    // Incompressible, so that both versions have the same length in every packing.
    let [old, new] = [1, 2].map(|seed| Tree::single(Rng::new(seed).bytes(9 << 20)));
    for packing in [Packing::Plain, Packing::Lz4, Packing::Lz4Frames] {
        let [old_bytes, new_bytes] = [&old, &new].map(|tree| packing.pack(&tree.tar));
        assert_eq!(old_bytes.len(), new_bytes.len(), "{packing:?}");
        for (before, after) in weak_resources(old_bytes)
            .into_iter()
            .zip(weak_resources(new_bytes))
        {
            let env = TestEnv::new();
            env.serve(before);
            assert_files(&env.open(), &old);
            env.serve(after);
            let archive = env.open();
            assert_eq!(archive.stats().scans.get(), 1);
            assert_files(&archive, &new);
            assert_files(&env.open(), &new);
        }
    }
}

#[test]
fn bytes_of_newer_version_are_never_served_by_old_index() {
    // More spans than are sampled when the archive is opened.
    let trees = [1, 2].map(|seed| Tree::single(Rng::new(seed).bytes(40 << 20)));
    let [old, new] = [0, 1].map(|number: usize| Packing::Lz4.pack(&trees[number].tar));
    let strong = |packed: &Bytes, version: &str| Resource::new(packed.clone()).etag(version);
    let cases: [(Resource, Resource); 3] = [
        (strong(&old, "\"1\""), strong(&new, "\"2\"")),
        (strong(&old, "W/\"1\""), strong(&new, "W/\"2\"")),
        (
            Resource::new(old.clone()).last_modified("Sun, 06 Nov 1994 08:49:37 GMT"),
            Resource::new(new.clone()).last_modified("Mon, 07 Nov 1994 08:49:37 GMT"),
        ),
    ];
    for (before, after) in cases {
        let env = TestEnv::new();
        env.serve(before);
        drop(env.open());
        let archive = env.open_with(&env.options_without_disk_cache());
        env.serve(after);
        let error = read(&archive, "a").err();
        assert!(matches!(error, Some(ReadError::Changed(_))), "{error:?}");
        // A new open gets the new version.
        assert_files(&env.open(), &trees[1]);
    }
}

// Promises: index-spans
#[test]
fn unnoticed_change_while_open_is_read_as_damage() {
    // More spans than are sampled when the archive is opened.
    let [old, new] = [1, 2].map(|seed| Tree::single(Rng::new(seed).bytes(40 << 20)));
    let env = TestEnv::new();
    env.serve(Resource::new(Packing::Lz4.pack(&old.tar)));
    drop(env.open());
    let archive = env.open_with(&env.options_without_disk_cache());
    env.serve(Resource::new(Packing::Lz4.pack(&new.tar)));
    let error = read(&archive, "a").err();
    assert!(
        matches!(error, Some(ReadError::Damaged { cause: Some(_), .. })),
        "{error:?}"
    );
}

/// The index of the mixed tree as `packing`, at a path of its own.
fn saved_index(env: &TestEnv) -> PathBuf {
    drop(env.open());
    let path = env.cache.path().join("mine");
    fs::rename(env.only_cached_file("index"), &path).expect("renamed");
    path
}

fn with_index(env: &TestEnv, path: PathBuf) -> OpenOptions {
    OpenOptions {
        index_file: Some(path),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..env.options()
    }
}

// Promises: index-named
#[test]
fn matching_index_file_is_used_wherever_archive_is() {
    let env = TestEnv::with_archive(packed(Packing::Bgzf));
    let options = with_index(&env, saved_index(&env));
    let archive = env.open_with(&options);
    assert_eq!(archive.stats().scans.get(), 0);
    assert_files(&archive, &Tree::mixed());

    let elsewhere = TestEnv::with_archive(packed(Packing::Bgzf));
    elsewhere.serve(Resource::new(packed(Packing::Bgzf)).etag("\"another\""));
    let archive = elsewhere.open_with(&options);
    assert_eq!(archive.stats().scans.get(), 0);
    assert_files(&archive, &Tree::mixed());
}

// Promises: index-named
#[test]
fn index_file_of_another_archive_is_rejected() {
    let [one, other] = [1, 2].map(|seed| {
        let tree = Tree::single(Rng::new(seed).bytes(5 << 20));
        TestEnv::with_archive(Packing::Lz4.pack(&tree.tar))
    });
    let longer = TestEnv::with_archive(packed(Packing::Lz4));
    let options = with_index(&one, saved_index(&one));
    for env in [other, longer] {
        let error = env.try_open(&options).err();
        assert!(
            matches!(error, Some(OpenError::ForeignIndex { .. })),
            "{error:?}"
        );
    }
}

#[test]
fn damaged_or_missing_index_file_is_an_error() {
    let env = TestEnv::with_archive(packed(Packing::Lz4));
    let path = saved_index(&env);
    let mut bytes = fs::read(&path).expect("an index");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("written");
    for path in [path, env.cache.path().join("nothing")] {
        let error = env.try_open(&with_index(&env, path)).err();
        assert!(matches!(error, Some(OpenError::Index { .. })), "{error:?}");
    }
}

#[test]
fn index_file_of_empty_archive_is_used() {
    let empty = Packing::Gzip.pack(&Bytes::from_static(&[0; 10_240]));
    let env = TestEnv::with_archive(empty);
    let options = with_index(&env, saved_index(&env));
    assert_eq!(env.open_with(&options).index().entry_count(), 1);
}

#[test]
fn unwritable_cache_is_only_noted() {
    let env = TestEnv::with_archive(packed(Packing::Zstd));
    let file = env.cache.path().join("file");
    fs::write(&file, "in the way").expect("written");
    let mut options = env.options();
    options.cache_dir = Some(file.join("cache"));
    let archive = env.open_with(&options);
    let notes = archive.notes();
    assert!(
        notes.iter().any(|note| note.contains("could not be saved")),
        "{notes:?}"
    );
    assert_files(&archive, &Tree::mixed());
}

#[test]
fn two_concurrent_opens_leave_one_valid_index() {
    let env = Arc::new(TestEnv::with_archive(packed(Packing::Lz4)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| assert_files(&env.open(), &Tree::mixed()));
        }
    });
    assert_eq!(env.cached_files("index").len(), 1);
    assert_eq!(env.open().stats().scans.get(), 0);
}

// Promises: index-proof
#[test]
fn large_archive_is_reopened_with_one_request() {
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let before = env.server.requests(PATH).len();
    let archive = env.open();
    assert_eq!(env.server.requests(PATH).len() - before, 1);
    assert_eq!(archive.stats().source_requests.get(), 1);
    let (name, content) = &tree.files[tree.files.len() - 1];
    assert_file(&archive, name, content);
}
