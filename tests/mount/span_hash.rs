//! Later reads give the scanned bytes, even if a server or proxy replaces them by others with the same
//! length, entity tag and xxh3-64.

use std::fs;
use std::io::Write;

use flate2::write::GzEncoder;
use serde_json::Value;
use tarfs::index::{Index, MemoryLimit, store};
use tarfs::{Extent, Plain};
use xxhash_rust::xxh3::xxh3_64;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::raw::{Archive, random_bytes};
use crate::support::sha256::sha256;
use crate::support::wait;

/// The first two words of XXH3's secret, which it combines with the first words of two stripes.
const SECRET: [u64; 2] = [0xbe4b_a423_396c_feb8, 0x1cad_21f7_2c81_017c];

/// Length of an XXH3 stripe. The two words of a lane are this far apart.
const STRIPE: usize = 64;

/// Packing in which a byte of the archive is a byte of the packed stream.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Packed {
    Not,
    Stored,
}

impl Packed {
    fn pack(self, tar: &[u8]) -> Vec<u8> {
        match self {
            Self::Not => tar.to_vec(),
            Self::Stored => {
                let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::none());
                gzip.write_all(tar).expect("packed");
                gzip.finish().expect("packed")
            }
        }
    }
}

/// Sets two words of a lane of `span` so that the XXH3 is the same for every `difference`. Each word
/// makes a product of zero.
fn plant_collision(tar: &mut [u8], span: &Extent<Plain>, difference: u32) {
    let highs = [5 + difference, 1000 - difference];
    let mut at = usize::try_from(span.start().0).expect("small") + 4096;
    for (secret, high) in SECRET.into_iter().zip(highs) {
        let low = secret & u64::from(u32::MAX);
        let word = u64::from(high) << 32 | low;
        let place = tar.get_mut(at..at + 8).expect("in the span");
        place.copy_from_slice(&word.to_le_bytes());
        at += STRIPE;
    }
}

const FILE_LEN: usize = 10 << 20;

/// A fixture whose server has an archive.
type Place = TestMount<Server>;

fn serve(server: &Server, packed: &[u8]) {
    let resource = Resource::new(packed.to_vec()).etag("\"same\"");
    server.serve("/archive", resource);
}

/// The saved index of the served archive.
fn index(place: &Place) -> Index {
    place.succeeds(&[
        "index",
        "-q",
        &place.url("/archive"),
        "--output",
        "file.idx",
    ]);
    store::read(&place.path("file.idx"), &MemoryLimit::none()).expect("an index")
}

/// Serves and indexes an archive, and then one that differs in two words of each span but has the
/// same xxh3-64. Returns the digest of the first.
fn swap(place: &Place, packed: Packed) -> String {
    let mut tar = Archive::new().file("file", random_bytes(FILE_LEN)).end();
    serve(place, &packed.pack(&tar));
    let index = index(place);
    let spans: Vec<_> = (0..index.span_count())
        .filter_map(|number| index.span_extent(number))
        .filter(|span| span.len() > 64 << 10)
        .collect();
    assert!(spans.len() > 2, "{spans:?}");
    let mut other = tar.clone();
    for span in &spans {
        plant_collision(&mut tar, span, 0);
        plant_collision(&mut other, span, 7);
        let hash = |tar: &[u8]| {
            let offset = |at: Plain| usize::try_from(at.0).expect("small");
            xxh3_64(
                tar.get(offset(span.start())..offset(span.end()))
                    .expect("inside"),
            )
        };
        assert_eq!(hash(&tar), hash(&other), "they must not be told apart");
    }
    let (original, other) = (packed.pack(&tar), packed.pack(&other));
    assert!(original.len() == other.len() && original != other);
    serve(place, &original);
    let digest = sha256(&original);
    place.succeeds(&[
        "index",
        "-q",
        &place.url("/archive"),
        "--expect-sha256",
        &digest,
    ]);
    serve(place, &other);
    digest
}

/// The error of reading the whole mounted file.
#[track_caller]
fn read_error(place: &Place) -> Option<i32> {
    let path = place.mounted("file");
    let read = fs::read(path).map(|bytes| bytes.len());
    read.expect_err("other bytes than were scanned")
        .raw_os_error()
}

// Promises: check-digests
#[test]
fn bytes_with_colliding_span_hash_are_not_served() {
    for packed in [Packed::Not, Packed::Stored] {
        for prefetch in ["none", "ahead", "all"] {
            let place = Place::with(&[], Server::start());
            let digest = swap(&place, packed);
            place.succeeds(&[
                "mount",
                &place.url("/archive"),
                "mnt",
                "--expect-sha256",
                &digest,
                "--prefetch",
                prefetch,
            ]);
            assert_eq!(read_error(&place), Some(5), "{packed:?} {prefetch}");
            let status = place.status();
            let damaged = status.pointer("/counters/damaged_spans");
            let damaged = damaged.and_then(Value::as_u64).expect("a counter");
            assert!(damaged > 0, "{packed:?} {prefetch}");
            place.succeeds(&["umount", "mnt"]);
        }
    }
}

// Promises: copy-tree, check-digests
#[test]
fn copy_gets_no_bytes_with_colliding_span_hash() {
    let place = Place::with(&[], Server::start());
    let digest = swap(&place, Packed::Not);
    let url = place.url("/archive");
    let copy = [
        "mount",
        &url,
        "mnt",
        "--expect-sha256",
        &digest,
        "--copy-to",
        "copy",
    ];
    place.succeeds(&copy);
    assert_eq!(read_error(&place), Some(5));
    wait::wait_until("the copy is given up", || {
        let status = place.status();
        let damaged = status.pointer("/counters/damaged_spans");
        damaged.and_then(Value::as_u64) > Some(1)
    });
    place.succeeds(&["umount", "mnt"]);
    let copied = fs::read(place.path("copy/file"));
    assert!(copied.is_err(), "a file of bytes that were not scanned");
}
