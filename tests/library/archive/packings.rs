//! Files of archives are the same in every packing.

use std::convert::Infallible;

use bytes::Bytes;
use tarfs::archive::scan::{self, Sink};
use tarfs::tar::Member;

use super::{
    TestEnv, assert_files, assert_files_backwards, assert_random_reads, for_each_packing, packed,
};
use crate::support::packing::Packing;
use crate::support::raw;
use crate::support::rng::Rng;
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

/// Frames that lz4 and zstd skip hide the magic of the first other frame.
fn long_skippable_frames_hide_no_format(packing: Packing) {
    let frame = |len: u32| {
        let header = [b"\x57\x2a\x4d\x18", &len.to_le_bytes()[..]].concat();
        [header, vec![7; usize::try_from(len).expect("short")]].concat()
    };
    let tree = Tree::mixed();
    for skippable in [frame(3 << 20), [frame(0), frame(70_000)].concat()] {
        let env = TestEnv::with_archive([&*skippable, &packed(packing)].concat().into());
        for _scanned_and_saved in 0..2 {
            let archive = env.open();
            assert_eq!(archive.index().problem_count(), 0);
            assert_files(&archive, &tree);
            assert_random_reads(&archive, &tree, 40, 4);
        }
    }
}

// Promises: format-detected
#[test]
fn long_skippable_frames_do_not_hide_lz4() {
    long_skippable_frames_hide_no_format(Packing::Lz4);
}

// Promises: format-detected
#[test]
fn long_skippable_frames_do_not_hide_zstd() {
    long_skippable_frames_hide_no_format(Packing::Zstd);
}

// Promises: format-detected
#[test]
fn zeros_before_plain_archive_are_ignored_on_request() {
    let tree = Tree::mixed();
    let env = TestEnv::with_archive([&vec![0; 20 << 10], &*tree.tar].concat().into());
    let mut options = env.options();
    let refused = env.try_open(&options).err();
    assert!(refused.is_some(), "as a disk image may begin");
    options.scan.tar.ignore_zeros = true;
    let archive = env.open_with(&options);
    assert_files(&archive, &tree);
}

/// Counts the bytes of spans before the first member.
#[derive(Default)]
struct FirstMember {
    span_bytes: usize,
    bytes_before: Option<usize>,
}

impl Sink for FirstMember {
    type Error = Infallible;

    fn member(&mut self, _member: Member) -> Result<(), Infallible> {
        self.bytes_before.get_or_insert(self.span_bytes);
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn damage(&mut self, _offset: tarfs::Plain, text: &str) {
        panic!("{text}");
    }

    fn span_piece(&mut self, bytes: &Bytes) {
        self.span_bytes += bytes.len();
    }
}

#[test]
fn first_member_is_known_before_the_rest_of_its_block() {
    let noise = Rng::new(1).bytes(3 << 20);
    let tar = raw::Archive::new()
        .file("a", "a")
        .file("noise", noise)
        .end();
    let len = tar.len();
    // All of it is one block.
    let env = TestEnv::with_archive(Packing::Lz4.pack(&tar.into()));
    let (source, stats) = env.source();
    let mut sink = FirstMember::default();
    let options = env.options().scan;
    let options = scan::Options {
        spans: true,
        ..options
    };
    let network = env.network.handle();
    scan::scan(&source, &options, network, &stats, &mut sink).expect("scanned");
    assert_eq!(sink.span_bytes, len);
    let before = sink.bytes_before.expect("a member");
    assert!(before <= 64 << 10, "{before}");
}
