//! One archive behind a server: opened, read, opened again, damaged, and read concurrently.

mod concurrency;
mod damage;
mod digest;
mod disk_cache;
mod fetch_counts;
mod packings;
mod prefetch;
mod random_faults;
mod recovery;
mod saved_index;
mod seek_points;
mod short_reads;
mod skips;
mod speculative;
mod statistics;
mod weak_versions;
mod windows;

use std::sync::OnceLock;

use bytes::Bytes;
use tarfs::ArchivePath;
use tarfs::archive::{Archive, ReadError, Volume};
use tarfs::index::Ino;

use crate::support::archive_env::{PATH, TestEnv, scan_options};
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;

/// The mixed tree, packed once for all tests.
fn packed(packing: Packing) -> Bytes {
    static PACKED: [OnceLock<Bytes>; Packing::ALL.len()] =
        [const { OnceLock::new() }; Packing::ALL.len()];
    let place = PACKED.get(packing as usize).expect("one for each");
    place
        .get_or_init(|| packing.pack(&Tree::mixed().tar))
        .clone()
}

/// The large tree as lz4, which cannot make it smaller.
fn large_lz4() -> Bytes {
    static PACKED: OnceLock<Bytes> = OnceLock::new();
    PACKED
        .get_or_init(|| Packing::Lz4.pack(&Tree::large().tar))
        .clone()
}

fn ino(archive: &Archive, name: &str) -> Ino {
    let path = ArchivePath::sanitize(name.as_bytes()).path;
    let index = archive.index();
    let index = index.tree().expect("rows");
    let entry = index.find(&path);
    entry.unwrap_or_else(|| panic!("{name} is missing")).ino()
}

/// Length of a read: more than the kernel requests, and less than a file.
const PIECE: usize = 1 << 20;

/// Reads a whole file in pieces, past its end.
fn read(archive: &Archive, name: &str) -> Result<Vec<u8>, ReadError> {
    let ino = ino(archive, name);
    let mut content = Vec::new();
    loop {
        let len = u32::try_from(PIECE).expect("small");
        let piece = archive.read_blocking(ino, content.len() as u64, len)?;
        content.extend_from_slice(&piece);
        if piece.len() < PIECE {
            return Ok(content);
        }
    }
}

/// Compares a file without printing megabytes when it differs.
fn assert_file(archive: &Archive, name: &str, content: &[u8]) {
    match read(archive, name) {
        Ok(read) => assert!(read == content, "{name} is wrong"),
        Err(error) => panic!("{name}: {error:?}"),
    }
}

fn assert_files(archive: &Archive, tree: &Tree) {
    for (name, content) in &tree.files {
        assert_file(archive, name, content);
    }
}

fn assert_files_backwards(archive: &Archive, tree: &Tree) {
    for (name, content) in tree.files.iter().rev() {
        assert_file(archive, name, content);
    }
}

/// Reads at random places, also past the end.
fn assert_random_reads(archive: &Archive, tree: &Tree, count: u64, seed: u64) {
    let mut noise = Rng::new(seed);
    for _ in 0..count {
        let number = noise.below(tree.files.len() as u64);
        let (name, content) = tree.files.get(index(number)).expect("below");
        let offset = noise.below(content.len() as u64 + 100);
        let len = noise.below(300_000);
        let expected = content.iter().skip(index(offset)).take(index(len));
        let len = u32::try_from(len).expect("small");
        let read = archive.read_blocking(ino(archive, name), offset, len);
        let read = read.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert!(
            read.iter().eq(expected),
            "{len} bytes at {offset} of {name} are wrong"
        );
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

/// A test for each packing.
macro_rules! for_each_packing {
    ($template:ident) => {
        mod $template {
            use super::$template as template;
            use crate::support::packing::Packing;

            crate::archive::tests_of_packings! {
                template:
                plain Plain, gzip Gzip, gzip_members GzipMembers, bgzf Bgzf,
                lz4 Lz4, lz4_linked Lz4Linked, lz4_frames Lz4Frames, lz4_legacy Lz4Legacy,
                zstd Zstd, zstd_frames ZstdFrames,
                xz Xz, xz_blocks XzBlocks, xz_streams XzStreams,
                bzip2 Bzip2, bzip2_streams Bzip2Streams,
            }
        }
    };
}

macro_rules! tests_of_packings {
    ($template:ident: $($name:ident $packing:ident,)+) => {
        $(
            #[test]
            fn $name() {
                $template(Packing::$packing);
            }
        )+
    };
}

use {for_each_packing, tests_of_packings};
