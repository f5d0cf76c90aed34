//! A scan along the seek points of a saved index finds the same members as a scan from the front.

use std::convert::Infallible;

use bytes::Bytes;
use tarfs::archive::scan::{self, PayloadEnd, Sink};
use tarfs::archive::{OpenError, OpenOptions, SavedIndex};
use tarfs::tar::Member;
use xxhash_rust::xxh3::Xxh3Default;

use super::{TestEnv, for_each_packing, packed};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Names and payloads of all members, hashed.
#[derive(Default)]
struct HashingSink(Xxh3Default);

impl Sink for HashingSink {
    type Error = Infallible;

    fn member(&mut self, member: Member) -> Result<(), Infallible> {
        self.0.update(&member.name);
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Infallible> {
        self.0.update(&bytes);
        Ok(())
    }

    fn member_end(&mut self, _end: PayloadEnd) -> Result<(), Infallible> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn damage(&mut self, _offset: tarfs::Plain, text: &str) {
        panic!("{text}");
    }
}

/// Number of scans, and number of scans that decoded along an index.
fn scan_counts(env: &TestEnv, options: &OpenOptions, use_saved: bool) -> (u64, u64) {
    let (source, stats) = env.source();
    let saved = SavedIndex::find(&*source, options).expect("a usable index, or none");
    let options = scan::Options {
        saved_index: saved.filter(|_| use_saved),
        ..options.scan.clone()
    };
    let mut hashed = HashingSink::default();
    let summary = scan::scan(&source, &options, env.network.handle(), &stats, &mut hashed);
    let summary = summary.expect("a good archive");
    assert_eq!(summary.plain_len, Tree::mixed().tar.len() as u64);
    assert_eq!(
        stats.source_read_bytes.get(),
        summary.packed_len,
        "no byte is fetched twice"
    );
    (hashed.0.digest(), stats.indexed_scans.get())
}

fn saved_index_changes_only_how_scan_decodes(packing: Packing) {
    let env = TestEnv::with_archive(packed(packing));
    let (plain, scans) = scan_counts(&env, &env.options(), true);
    assert_eq!(scans, 0, "nothing is saved yet");
    drop(env.open());
    let windows = matches!(packing, Packing::Gzip | Packing::Lz4Linked);
    for (memory, use_saved) in [(64 << 20, true), (0, true), (64 << 20, false)] {
        let mut options = env.options();
        options.scan.memory = memory;
        let (hash, scans) = scan_counts(&env, &options, use_saved);
        assert!(hash == plain, "with memory {memory}");
        assert_eq!(scans, u64::from(windows && use_saved));
    }
}

// Promises: index-materialize
for_each_packing!(saved_index_changes_only_how_scan_decodes);

// Promises: index-materialize
#[test]
fn seek_points_of_another_version_are_not_used_by_scan() {
    let env = TestEnv::with_archive(packed(Packing::Gzip));
    drop(env.open());
    env.serve(Resource::new(packed(Packing::Gzip)).etag("\"2\""));
    assert_eq!(scan_counts(&env, &env.options(), true).1, 0);
    // Nor does an index whose only evidence is the length, unless the caller names it.
    env.serve(Resource::new(packed(Packing::Gzip)));
    drop(env.open());
    assert_eq!(scan_counts(&env, &env.options(), true).1, 0);
    let named = OpenOptions {
        index_file: env.cached_files("index").pop(),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..env.options()
    };
    assert_eq!(scan_counts(&env, &named, true).1, 1);
}

// Promises: index-materialize
#[test]
fn seek_points_of_another_archive_are_not_used_by_scan() {
    let env = TestEnv::with_archive(packed(Packing::Gzip));
    drop(env.open());
    env.serve(Resource::new(packed(Packing::Lz4Linked)).etag("\"2\""));
    let named = OpenOptions {
        index_file: Some(env.only_cached_file("index")),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..env.options()
    };
    let (source, _stats) = env.source();
    let found = SavedIndex::find(&*source, &named);
    assert!(matches!(found, Err(OpenError::ForeignIndex { .. })));
}
