//! A scan along the seek points of a saved index finds what a scan from the front finds.

use std::convert::Infallible;

use bytes::Bytes;
use tarfs::archive::scan::{self, Sink};
use tarfs::archive::{OpenError, OpenOptions, SavedIndex};
use tarfs::tar::Member;
use xxhash_rust::xxh3::Xxh3Default;

use super::{Lab, for_each_packing, packed};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Names and payloads of all members, hashed.
#[derive(Default)]
struct Hashed(Xxh3Default);

impl Sink for Hashed {
    type Error = Infallible;

    fn member(&mut self, member: Member) -> Result<(), Infallible> {
        self.0.update(&member.name);
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Infallible> {
        self.0.update(&bytes);
        Ok(())
    }

    fn member_end(&mut self, _cut: bool) -> Result<(), Infallible> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }
}

/// What a scan saw, and how many of them decoded along an index.
fn scanned(lab: &Lab, options: &OpenOptions, use_saved: bool) -> (u64, u64) {
    let (source, stats) = lab.source();
    let saved = SavedIndex::find(&*source, options).expect("a usable index, or none");
    let options = scan::Options {
        saved_index: saved.filter(|_| use_saved),
        ..options.scan.clone()
    };
    let mut hashed = Hashed::default();
    let summary = scan::scan(&source, &options, lab.network.handle(), &stats, &mut hashed);
    let summary = summary.expect("a good archive");
    assert_eq!(summary.plain_len, Tree::mixed().tar.len() as u64);
    assert_eq!(
        stats.source_read_bytes.get(),
        summary.packed_len,
        "no byte is fetched twice"
    );
    (hashed.0.digest(), stats.indexed_scans.get())
}

fn a_saved_index_changes_nothing_but_who_decodes(packing: Packing) {
    let lab = Lab::serving(packed(packing));
    let (plain, scans) = scanned(&lab, &lab.options(), true);
    assert_eq!(scans, 0, "nothing is saved yet");
    drop(lab.open());
    let windows = matches!(packing, Packing::Gzip | Packing::Lz4Linked);
    for (memory, use_saved) in [(64 << 20, true), (0, true), (64 << 20, false)] {
        let mut options = lab.options();
        options.scan.memory = memory;
        let (hash, scans) = scanned(&lab, &options, use_saved);
        assert!(hash == plain, "with memory {memory}");
        assert_eq!(scans, u64::from(windows && use_saved));
    }
}

for_each_packing!(a_saved_index_changes_nothing_but_who_decodes);

#[test]
fn the_index_of_another_version_is_not_decoded_along() {
    let lab = Lab::serving(packed(Packing::Gzip));
    drop(lab.open());
    lab.serve(Resource::new(packed(Packing::Gzip)).etag("\"2\""));
    assert_eq!(scanned(&lab, &lab.options(), true).1, 0);
    // Nor one that nothing but the length speaks for, unless it is asked for by name.
    lab.serve(Resource::new(packed(Packing::Gzip)));
    drop(lab.open());
    assert_eq!(scanned(&lab, &lab.options(), true).1, 0);
    let named = OpenOptions {
        index_file: lab.cached("index").pop(),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..lab.options()
    };
    assert_eq!(scanned(&lab, &named, true).1, 1);
}

#[test]
fn another_archives_index_file_is_nothing_to_decode_along() {
    let lab = Lab::serving(packed(Packing::Gzip));
    drop(lab.open());
    lab.serve(Resource::new(packed(Packing::Lz4Linked)).etag("\"2\""));
    let named = OpenOptions {
        index_file: Some(lab.the_cached("index")),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..lab.options()
    };
    let (source, _stats) = lab.source();
    let found = SavedIndex::find(&*source, &named);
    assert!(matches!(found, Err(OpenError::ForeignIndex { .. })));
}
