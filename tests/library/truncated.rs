//! Truncated archives with --allow-truncated: all that is before the cut, to the byte.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use tarfs::archive::scan::{self, Digest, PayloadEnd, Sink};
use tarfs::archive::{OpenOptions, ReadError, Volume};
use tarfs::index::{EntryKind, ShardPlan};
use tarfs::layers::{Layer, LayeredArchive, WhiteoutFormat};
use tarfs::materialize::read_entries;
use tarfs::source::{MemorySource, Source};
use tarfs::tar::Member;

use crate::support::archive_env::{TestEnv, scan_options};
use crate::support::cli::Place;
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::raw;
use crate::support::rng::Rng;

/// Contents by name, and whether each is cut.
#[derive(Default, PartialEq, Eq, Debug)]
struct Collector {
    files: BTreeMap<String, (Vec<u8>, bool)>,
    current: String,
}

impl Sink for Collector {
    type Error = Infallible;

    fn member(&mut self, member: Member) -> Result<(), Infallible> {
        self.current = String::from_utf8(member.name).expect("UTF-8");
        let before = self.files.insert(self.current.clone(), Default::default());
        assert!(before.is_none(), "{} is there twice", self.current);
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Infallible> {
        let file = self.files.get_mut(&self.current).expect("a file");
        file.0.extend_from_slice(&bytes);
        Ok(())
    }

    fn member_end(&mut self, end: PayloadEnd) -> Result<(), Infallible> {
        self.files.get_mut(&self.current).expect("a file").1 = end == PayloadEnd::Cut;
        Ok(())
    }

    fn warning(&mut self, _text: &str) {}

    fn damage(&mut self, _offset: tarfs::Plain, text: &str) {
        panic!("{text}");
    }
}

/// The front of an archive of files that pack to two thirds.
fn cut(packing: Packing) -> Bytes {
    let mut random = Rng::new(7);
    let files = (0..60).fold(raw::Archive::new(), |archive, number| {
        let content = [random.bytes(60_001), random.text(60_000)].concat();
        archive.file(&format!("f{number:02}"), content)
    });
    let packed = packing.pack(&Bytes::from(files.end()));
    packed.slice(..packed.len() * 39 / 80)
}

fn allowing(options: OpenOptions) -> OpenOptions {
    OpenOptions {
        scan: scan::Options {
            allow_truncated: true,
            ..scan_options()
        },
        ..options
    }
}

// Promises: shard-damaged
#[test]
fn shards_of_a_truncated_archive_have_every_byte_before_the_cut() {
    for packing in Packing::ALL {
        let env = TestEnv::new();
        env.serve(Resource::new(cut(packing)).etag("\"1\""));
        let options = allowing(env.options_without_disk_cache());
        let mut scanned = Collector::default();
        let (source, stats) = env.source();
        let network = env.network.handle();
        let summary = scan::scan(&source, &options.scan, network, &stats, &mut scanned);
        assert!(summary.expect("scanned").truncated, "{packing:?}");
        scanned.current.clear();
        for form in ["fresh", "saved"] {
            let archive = env.open_with(&options);
            let index = archive
                .complete_index()
                .expect("complete")
                .into_tree()
                .expect("rows");
            let plan = ShardPlan::new(&index, 3);
            let (mut found, mut damaged) = (Collector::default(), 0);
            for number in 1..=3 {
                // The root is implied.
                let entries = plan.entries(number);
                let read = read_entries(&archive, &index, entries, &mut found);
                damaged += read.expect("read");
            }
            found.current.clear();
            assert!(found == scanned, "{packing:?}, {form}");
            let cut = found.files.values().filter(|(_, is_cut)| *is_cut).count();
            assert_eq!(damaged, cut as u64, "{packing:?}, {form}");
        }
    }
}

/// The layers above a cut one are read, too.
#[test]
fn entries_of_a_truncated_layer_have_every_byte_before_the_cut() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let env = TestEnv::new();
        env.serve(Resource::new(cut(packing)).etag("\"1\""));
        let options = allowing(env.options_without_disk_cache());
        let mut expected = Collector::default();
        let (source, stats) = env.source();
        let network = env.network.handle();
        scan::scan(&source, &options.scan, network, &stats, &mut expected).expect("scanned");
        let small = |name: &str| -> Arc<dyn Source> {
            let bytes = raw::Archive::new().file(name, [1; 600]).end();
            Arc::new(MemorySource::new(name, bytes))
        };
        let layers = [small("below"), source, small("top")].map(|source| Layer {
            source,
            digest: Digest::Ignore,
            published_index: None,
        });
        let opened = LayeredArchive::open(&layers, &options, WhiteoutFormat::Oci, network, &stats);
        let volume = opened.expect("layers");
        for name in ["below", "top"] {
            let whole = (vec![1; 600], false);
            expected.files.insert(name.to_owned(), whole);
        }
        let index = volume
            .complete_index()
            .expect("complete")
            .into_tree()
            .expect("rows");
        let entries: Vec<_> = index.entries().map(|entry| entry.ino()).collect();
        let mut found = Collector::default();
        let read = read_entries(&volume, &index, &entries, &mut found);
        let cut = expected
            .files
            .values()
            .filter(|(_, is_cut)| *is_cut)
            .count();
        assert_eq!(read.expect("read"), cut as u64, "{packing:?}");
        (expected.current, found.current) = Default::default();
        assert!(found == expected, "{packing:?}");
    }
}

// Promises: shard-damaged
#[test]
fn read_behind_the_cut_says_that_the_archive_ends() {
    let env = TestEnv::new();
    env.serve(Resource::new(cut(Packing::Gzip)).etag("\"1\""));
    let archive = env.open_with(&allowing(env.options_without_disk_cache()));
    let index = archive
        .complete_index()
        .expect("complete")
        .into_tree()
        .expect("rows");
    let files = index
        .entries()
        .filter(|entry| entry.kind() == EntryKind::File);
    let last = files.last().expect("a file");
    let start = last
        .pieces(0, u64::MAX)
        .next()
        .expect("a content")
        .plain
        .start();
    let there = index.origin().plain_bytes - start.0;
    let len = u32::try_from(there).expect("small");
    let bytes = archive.read_blocking(last.ino(), 0, len).expect("there");
    assert_eq!(bytes.len() as u64, there);
    let error = archive
        .read_blocking(last.ino(), there, 1)
        .expect_err("missing");
    assert!(matches!(error, ReadError::Truncated), "{error:?}");
}

// Promises: shard-damaged
#[test]
fn cut_file_is_named_once_and_no_index_is_blamed() {
    let place = Place::new();
    place.put("a.tar.gz", cut(Packing::Gzip));
    let words = [
        "shard",
        "write",
        "--allow-truncated",
        "a.tar.gz",
        "1/1",
        "-C",
        "out",
    ];
    let outcome = place.run(&words);
    assert_eq!(outcome.code, 2, "{}", outcome.complaints);
    let named = outcome.complaints.matches("the archive ends in the middle");
    assert_eq!(named.count(), 1, "{}", outcome.complaints);
    assert!(
        !outcome.complaints.contains("index is damaged"),
        "{}",
        outcome.complaints
    );
}
