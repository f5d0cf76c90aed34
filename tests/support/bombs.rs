//! Archives that unpack to a thousand times their size.

use std::fs;
use std::io::Write as _;

use flate2::Crc;
use flate2::write::DeflateEncoder;

use super::adversarial::{MOST_BYTES, Place};
use super::fixture::PROGRAM;
use super::measured_runner::{MeasuredRunner, Run};
use super::raw::{Archive, Header};

/// Number of zero bytes in each bomb.
pub(crate) const LEN: u64 = 512 << 20;

/// Number of zero bytes that are packed once and repeated.
pub(crate) const CHUNK: usize = 16 << 20;

/// An archive and then a stream of zeros, as one gzip member.
pub(crate) fn gzip(start: &[u8], zeros: u64) -> Vec<u8> {
    let chunk = vec![0; CHUNK];
    let mut packed = b"\x1f\x8b\x08\0\0\0\0\0\0\x03".to_vec();
    let mut crc = Crc::new();
    let block = |bytes: &[u8]| {
        let mut deflate = DeflateEncoder::new(Vec::new(), flate2::Compression::best());
        deflate.write_all(bytes).expect("memory");
        // Flush to a byte boundary, so that another chunk can follow.
        deflate.flush().expect("memory");
        deflate.get_ref().clone()
    };
    let (head, repeated) = (block(start), block(&chunk));
    packed.extend(head);
    crc.update(start);
    for _ in 0..zeros / CHUNK as u64 {
        packed.extend_from_slice(&repeated);
        crc.update(&chunk);
    }
    packed.extend([3, 0]);
    packed.extend(crc.sum().to_le_bytes());
    packed.extend(crc.amount().to_le_bytes());
    packed
}

/// The same as one zstd frame, of blocks that repeat a byte.
pub(crate) fn zstd(start: &[u8], zeros: u64) -> Vec<u8> {
    const BLOCK: u64 = 128 << 10;
    let header = |kind: u64, len: u64, last: u64| {
        let word = (len << 3 | kind << 1 | last).to_le_bytes();
        [word[0], word[1], word[2]]
    };
    let mut packed = b"\x28\xb5\x2f\xfd\0\x50".to_vec();
    packed.extend(header(0, start.len() as u64, 0));
    packed.extend_from_slice(start);
    for number in 1..=zeros / BLOCK {
        packed.extend(header(1, BLOCK, u64::from(number == zeros / BLOCK)));
        packed.push(0);
    }
    packed
}

/// An archive of one file of zeros, without its end.
pub(crate) fn file() -> Vec<u8> {
    Archive::new()
        .file("before", "1")
        .add(Header::new("zeros", b'0').size(LEN), "")
        .unfinished()
}

/// A complete archive.
pub(crate) fn ended_archive() -> Vec<u8> {
    Archive::new().file("a", "1").end()
}

pub(crate) struct Bomb {
    pub(crate) place: Place,
    pub(crate) runner: MeasuredRunner,
}

impl Bomb {
    pub(crate) fn new(packed: &[u8]) -> Self {
        assert!(packed.len() < 4 << 20, "no bomb: {} bytes", packed.len());
        Self::of(packed)
    }

    /// A bomb of any length.
    pub(crate) fn of(packed: &[u8]) -> Self {
        let place = Place::create();
        fs::write(place.path("a"), packed).expect("space");
        let runner = MeasuredRunner::start(place.root());
        Self { place, runner }
    }

    /// Runs `tarfs` in the destination.
    pub(crate) fn run(&mut self, words: &[&str]) -> Run {
        let root = self.place.root_of("own");
        let run = self.runner.run(&root, &[&[PROGRAM], words].concat());
        assert!(run.peak_bytes < MOST_BYTES, "{words:?}: {run:?}");
        run
    }
}

/// Error of each verb with an index at its memory limit.
pub(crate) const INDEX_MEMORY_ERROR: &str = "the index needs more than the 16777216 bytes of memory that --index-memory \
                             allows (if that is to be expected, allow it with a larger --index-memory)";
