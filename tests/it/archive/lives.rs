//! A saved index is used as long as it belongs to the bytes, and never a moment longer.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use tarfs::archive::{OpenError, OpenOptions, ReadError};
use tarfs::codec::Compression;

use super::{Lab, PATH, assert_file, assert_files, large_lz4, packed, read};
use crate::support::http::Resource;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::tree::Tree;

#[test]
fn a_damaged_index_is_built_again() {
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
        |index| *index = Noise::new(5).bytes(100_000),
    ];
    for (number, harm) in harms.into_iter().enumerate() {
        let lab = Lab::serving(packed(Packing::Lz4));
        drop(lab.open());
        let path = lab.the_cached("index");
        let mut saved = fs::read(&path).expect("an index");
        harm(&mut saved);
        fs::write(&path, saved).expect("written");

        let archive = lab.open();
        assert_eq!(archive.stats().scans.get(), 1, "harm {number}");
        assert_files(&archive, &Tree::mixed());
        let archive = lab.open();
        assert_eq!(archive.stats().scans.get(), 0, "replaced");
        assert_files(&archive, &Tree::mixed());
    }
}

#[test]
fn the_index_of_another_archive_under_this_ones_name_is_not_used() {
    let lab = Lab::serving(packed(Packing::Lz4));
    drop(lab.open());
    let other = Lab::serving(Packing::Lz4.pack(&Tree::other().tar));
    drop(other.open());
    fs::copy(other.the_cached("index"), lab.the_cached("index")).expect("copied");
    let archive = lab.open();
    assert_eq!(archive.stats().scans.get(), 1);
    assert_files(&archive, &Tree::mixed());
}

#[test]
fn an_archive_read_another_way_has_another_index() {
    let lab = Lab::serving(packed(Packing::Gzip));
    let changes: [fn(&mut OpenOptions); 4] = [
        |_| {},
        |options| options.scan.tar.ignore_zeros = true,
        |options| options.scan.allow_truncated = true,
        |options| options.scan.compression = Some(Compression::Gzip),
    ];
    for scans in [1, 0] {
        for change in changes {
            let mut options = lab.options();
            change(&mut options);
            let archive = lab.open_with(&options);
            assert_eq!(archive.stats().scans.get(), scans);
            assert_files(&archive, &Tree::mixed());
        }
        assert_eq!(lab.cached("index").len(), changes.len());
    }
}

/// What a server may say that proves nothing.
fn weakly(packed: Bytes) -> [Resource; 3] {
    [
        Resource::new(packed.clone()),
        Resource::new(packed.clone()).etag("W/\"1\""),
        Resource::new(packed).last_modified("Sun, 06 Nov 1994 08:49:37 GMT"),
    ]
}

#[test]
fn a_strong_validator_is_believed_and_a_weak_one_is_tested() {
    let packed = packed(Packing::Lz4);
    let lab = Lab::serving(packed.clone());
    drop(lab.open());
    assert_eq!(lab.open().stats().decoded_spans.get(), 0);
    for resource in weakly(packed) {
        let lab = Lab::new();
        lab.serve(resource);
        drop(lab.open());
        let archive = lab.open();
        let stats = archive.stats();
        assert_eq!(stats.scans.get(), 0);
        // The front, the end and some in between, each by one request.
        let samples = stats.source_requests.get() - 1;
        assert!((2..=6).contains(&samples), "{samples}");
        assert!(stats.decoded_spans.get() >= samples);
        assert_files(&archive, &Tree::mixed());
    }
}

#[test]
fn an_index_of_bytes_that_changed_unnoticed_is_given_up() {
    // Incompressible, so that both versions are of one length however they are packed.
    let [old, new] = [1, 2].map(|seed| Tree::single(Noise::new(seed).bytes(9 << 20)));
    for packing in [Packing::Plain, Packing::Lz4, Packing::Lz4Frames] {
        let [old_bytes, new_bytes] = [&old, &new].map(|tree| packing.pack(&tree.tar));
        assert_eq!(old_bytes.len(), new_bytes.len(), "{packing:?}");
        for (before, after) in weakly(old_bytes).into_iter().zip(weakly(new_bytes)) {
            let lab = Lab::new();
            lab.serve(before);
            assert_files(&lab.open(), &old);
            lab.serve(after);
            let archive = lab.open();
            assert_eq!(archive.stats().scans.get(), 1);
            assert_files(&archive, &new);
            assert_files(&lab.open(), &new);
        }
    }
}

#[test]
fn bytes_of_a_newer_version_are_never_taken_for_those_that_were_indexed() {
    // More spans than are looked at when the archive is opened.
    let trees = [1, 2].map(|seed| Tree::single(Noise::new(seed).bytes(40 << 20)));
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
        let lab = Lab::new();
        lab.serve(before);
        drop(lab.open());
        let archive = lab.open_with(&lab.without_spool());
        lab.serve(after);
        let error = read(&archive, "a").err();
        assert!(matches!(error, Some(ReadError::Changed(_))), "{error:?}");
        // Opened anew it is the new version.
        assert_files(&lab.open(), &trees[1]);
    }
}

#[test]
fn an_unnoticed_change_while_open_is_damage_and_never_other_bytes() {
    // More spans than are looked at when the archive is opened.
    let [old, new] = [1, 2].map(|seed| Tree::single(Noise::new(seed).bytes(40 << 20)));
    let lab = Lab::new();
    lab.serve(Resource::new(Packing::Lz4.pack(&old.tar)));
    drop(lab.open());
    let archive = lab.open_with(&lab.without_spool());
    lab.serve(Resource::new(Packing::Lz4.pack(&new.tar)));
    let error = read(&archive, "a").err();
    assert!(
        matches!(error, Some(ReadError::Damaged { cause: Some(_), .. })),
        "{error:?}"
    );
}

/// The index of the mixed tree as `packing`, at a path of its own.
fn saved(lab: &Lab) -> PathBuf {
    drop(lab.open());
    let path = lab.cache.path().join("mine");
    fs::rename(lab.the_cached("index"), &path).expect("renamed");
    path
}

fn with_index(lab: &Lab, path: PathBuf) -> OpenOptions {
    OpenOptions {
        index_file: Some(path),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..lab.options()
    }
}

#[test]
fn an_index_file_that_belongs_is_used_wherever_the_archive_is() {
    let lab = Lab::serving(packed(Packing::Bgzf));
    let options = with_index(&lab, saved(&lab));
    let archive = lab.open_with(&options);
    assert_eq!(archive.stats().scans.get(), 0);
    assert_files(&archive, &Tree::mixed());

    let elsewhere = Lab::serving(packed(Packing::Bgzf));
    elsewhere.serve(Resource::new(packed(Packing::Bgzf)).etag("\"another\""));
    let archive = elsewhere.open_with(&options);
    assert_eq!(archive.stats().scans.get(), 0);
    assert_files(&archive, &Tree::mixed());
}

#[test]
fn an_index_file_of_another_archive_is_refused() {
    let [one, other] = [1, 2].map(|seed| {
        let tree = Tree::single(Noise::new(seed).bytes(5 << 20));
        Lab::serving(Packing::Lz4.pack(&tree.tar))
    });
    let longer = Lab::serving(packed(Packing::Lz4));
    let options = with_index(&one, saved(&one));
    for lab in [other, longer] {
        let error = lab.try_open(&options).err();
        assert!(
            matches!(error, Some(OpenError::ForeignIndex { .. })),
            "{error:?}"
        );
    }
}

#[test]
fn an_index_file_that_is_damaged_or_missing_is_an_error() {
    let lab = Lab::serving(packed(Packing::Lz4));
    let path = saved(&lab);
    let mut bytes = fs::read(&path).expect("an index");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("written");
    for path in [path, lab.cache.path().join("nothing")] {
        let error = lab.try_open(&with_index(&lab, path)).err();
        assert!(matches!(error, Some(OpenError::Index { .. })), "{error:?}");
    }
}

#[test]
fn an_index_file_of_an_archive_without_members_is_used() {
    let empty = Packing::Gzip.pack(&Bytes::from_static(&[0; 10_240]));
    let lab = Lab::serving(empty);
    let options = with_index(&lab, saved(&lab));
    assert_eq!(lab.open_with(&options).index().entry_count(), 1);
}

#[test]
fn a_cache_that_cannot_be_written_is_noted_and_nothing_more() {
    let lab = Lab::serving(packed(Packing::Zstd));
    let file = lab.cache.path().join("file");
    fs::write(&file, "in the way").expect("written");
    let mut options = lab.options();
    options.cache_dir = Some(file.join("cache"));
    let archive = lab.open_with(&options);
    let notes = archive.notes();
    assert!(
        notes.iter().any(|note| note.contains("could not be saved")),
        "{notes:?}"
    );
    assert_files(&archive, &Tree::mixed());
}

#[test]
fn two_that_open_at_once_leave_one_good_index() {
    let lab = Arc::new(Lab::serving(packed(Packing::Lz4)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| assert_files(&lab.open(), &Tree::mixed()));
        }
    });
    assert_eq!(lab.cached("index").len(), 1);
    assert_eq!(lab.open().stats().scans.get(), 0);
}

#[test]
fn a_large_archive_is_opened_again_by_one_request() {
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let before = lab.server.seen(PATH).len();
    let archive = lab.open();
    assert_eq!(lab.server.seen(PATH).len() - before, 1);
    assert_eq!(archive.stats().source_requests.get(), 1);
    let (name, content) = &tree.files[tree.files.len() - 1];
    assert_file(&archive, name, content);
}
