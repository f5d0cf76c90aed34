//! Damaged archives: damage is reported, and everything else remains readable.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tarfs::ArchivePath;
use tarfs::archive::{Archive, Error, OpenError, ReadError};
use tarfs::codec::{self, Compression};
use tarfs::{Extent, Plain};

use super::{PATH, TestEnv, assert_file, assert_files, for_each_packing, index, packed, read};
use crate::support::http::{RecordedRequest, Resource};
use crate::support::packing::Packing;
use crate::support::raw;
use crate::support::tree::Tree;
use crate::support::wait;

pub(super) fn flipped(packed: &Bytes, place: usize) -> Bytes {
    let mut packed = packed.to_vec();
    *packed.get_mut(place).expect("a place inside") ^= 0x10;
    packed.into()
}

fn damage_affects_only_its_span(packing: Packing) {
    if !packing.is_all_seekable() {
        return;
    }
    let (tree, packed) = (Tree::mixed(), packed(packing));
    let env = TestEnv::new();
    let options = env.options_without_disk_cache();
    let archive = env.open_bytes(packed.clone(), &options).expect("indexed");
    let spans = archive.index().span_count();
    assert!(spans >= 2, "{spans}");
    let number = spans / 2 - 1;
    let seek = |number| {
        archive
            .index()
            .tree()
            .expect("rows")
            .seek_offset(number)
            .expect("seekable")
            .0
    };
    let place = index(u64::midpoint(seek(number), seek(number + 1)));
    let mut extent = archive
        .index()
        .tree()
        .expect("rows")
        .span_extent(number)
        .expect("a span");
    if packing == Packing::Plain {
        // These packings are read by windows of 128 KiB.
        let window = 128 << 10;
        extent = Extent::with_len(Plain(place as u64 / window * window), window);
    }
    drop(archive);

    let archive = env
        .open_bytes(flipped(&packed, place), &options)
        .expect("opened");
    assert_eq!(archive.stats().scans.get(), 0);
    let mut damaged_files = 0;
    for (name, content) in &tree.files {
        let path = ArchivePath::sanitize(name.as_bytes()).path;
        let index = archive.index();
        let index = index.tree().expect("rows");
        let entry = index.find(&path).expect("an entry");
        let mut pieces = entry.pieces(0, entry.size());
        if pieces.any(|piece| {
            let shared = piece.plain.intersection(&extent);
            shared.is_some_and(|shared| !shared.is_empty())
        }) {
            damaged_files += 1;
            let error = read(&archive, name).err();
            assert!(
                matches!(&error, Some(ReadError::Damaged { extent: at, .. }) if *at == extent),
                "{name}: {error:?}"
            );
        } else {
            assert_file(&archive, name, content);
        }
    }
    assert!(damaged_files > 0);
}
for_each_packing!(damage_affects_only_its_span);

/// An environment with an indexed archive, whose server then flips a bit in the middle of the first
/// `times` responses that hold a certain byte. Returns it with a file that holds the byte.
fn env_with_damaging_route(packing: Packing, times: usize) -> (TestEnv, String, u64) {
    let packed = packed(packing);
    let env = TestEnv::with_archive(packed.clone());
    let archive = env.open_with(&env.options_without_disk_cache());
    let (place, extent) = {
        let index = archive.index();
        let index = index.tree().expect("rows");
        let number = index.span_count() / 2;
        let seek = |number| index.seek_offset(number).expect("seekable").0;
        let place = u64::midpoint(seek(number - 1), seek(number));
        (place, index.span_extent(number - 1).expect("a span"))
    };
    let tree = Tree::mixed();
    let (name, _) = tree
        .files
        .iter()
        .find(|(name, _)| {
            let path = ArchivePath::sanitize(name.as_bytes()).path;
            let index = archive.index();
            let index = index.tree().expect("rows");
            let entry = index.find(&path).expect("an entry");
            let mut pieces = entry.pieces(0, entry.size());
            pieces.any(|piece| {
                piece
                    .plain
                    .intersection(&extent)
                    .is_some_and(|it| !it.is_empty())
            })
        })
        .expect("a file there");
    let good = Resource::new(packed.clone()).etag("\"1\"");
    let bad = Resource::new(flipped(&packed, index(place))).etag("\"1\"");
    let left = Arc::new(AtomicUsize::new(times));
    env.server.route(PATH, move |request| {
        let hits = request
            .range()
            .is_some_and(|(start, end)| (start..end).contains(&place));
        let take = |left: usize| left.checked_sub(1);
        let is_bad = hits
            && left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
                .is_ok();
        if is_bad { &bad } else { &good }.answer(request)
    });
    (env, name.clone(), place)
}

fn requests_for(env: &TestEnv, place: u64, from: usize) -> Vec<RecordedRequest> {
    let seen = env.server.requests(PATH).into_iter().skip(from);
    seen.filter(|seen| {
        let range = seen.request.range();
        range.is_some_and(|(start, end)| (start..end).contains(&place))
    })
    .collect()
}

const SEEKABLE: [Packing; 3] = [Packing::Lz4, Packing::Gzip, Packing::ZstdFrames];

// Promises: check-again, check-cache
#[test]
fn data_damaged_in_transit_is_refetched_by_another_route() {
    for packing in SEEKABLE {
        let (env, name, place) = env_with_damaging_route(packing, 1);
        let before = env.server.requests(PATH).len();
        let archive = env.open_with(&env.options_without_disk_cache());
        let tree = Tree::mixed();
        let (_, content) = tree
            .files
            .iter()
            .find(|(known, _)| *known == name)
            .expect("known");
        assert_file(&archive, &name, content);
        assert_eq!(archive.stats().damaged_spans.get(), 1, "{packing:?}");
        let requests = requests_for(&env, place, before);
        let [first, again] = requests.as_slice() else {
            panic!("{packing:?}: {requests:?}");
        };
        assert_eq!(first.request.header("cache-control"), None);
        assert_eq!(again.request.header("cache-control"), Some("no-cache"));
        assert_ne!(first.request.client_port, again.request.client_port);
        // All other files are intact.
        assert_files(&archive, &tree);
        assert_eq!(archive.stats().damaged_spans.get(), 1, "{packing:?}");
    }
}

// Promises: check-again
#[test]
fn data_still_damaged_after_two_fetches_is_an_error() {
    for packing in SEEKABLE {
        let (env, name, place) = env_with_damaging_route(packing, usize::MAX);
        let before = env.server.requests(PATH).len();
        let archive = env.open_with(&env.options_without_disk_cache());
        let error = read(&archive, &name).err();
        assert!(
            matches!(error, Some(ReadError::Damaged { .. })),
            "{error:?}"
        );
        assert_eq!(requests_for(&env, place, before).len(), 2, "{packing:?}");
        assert_eq!(archive.stats().damaged_spans.get(), 2, "{packing:?}");
    }
}

// Promises: check-cache, check-neighbours
#[test]
fn only_the_damaged_disk_cache_block_is_decoded_again() {
    let env = TestEnv::with_archive(packed(Packing::Lz4));
    let archive = env.open();
    let extent = {
        let index = archive.index();
        let index = index.tree().expect("rows");
        assert!(index.span_count() >= 3);
        index.span_extent(index.span_count() / 2).expect("a span")
    };
    drop(archive);
    let cache_file = env.only_cached_file("disk-cache");
    let file = OpenOptions::new().read(true).write(true).open(cache_file);
    let file = file.expect("a cache file");
    let middle = u64::midpoint(extent.start().0, extent.end().0);
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).expect("kept");
    file.write_all_at(&[byte[0] ^ 0x20], middle)
        .expect("written");

    let archive = env.open();
    assert_files(&archive, &Tree::mixed());
    let stats = archive.stats();
    assert_eq!(stats.disk_cache_damaged_spans.get(), 1);
    assert_eq!(stats.decoded_spans.get(), 1, "only that one");
    assert_eq!(stats.damaged_spans.get(), 0);
    // The archive is intact again.
    drop(archive);
    let archive = env.open();
    assert_files(&archive, &Tree::mixed());
    let stats = archive.stats();
    assert_eq!(
        (
            stats.disk_cache_damaged_spans.get(),
            stats.decoded_spans.get()
        ),
        (0, 0)
    );
}

/// The error of opening an archive in memory.
fn failure(packed: &Bytes, allow_truncated: bool) -> Option<Error> {
    let env = TestEnv::new();
    let mut options = env.options();
    options.scan.allow_truncated = allow_truncated;
    match env.open_bytes(packed.clone(), &options) {
        Ok(_) => None,
        Err(OpenError::Archive { error, .. }) => Some(*error),
        Err(error) => panic!("{error:?}"),
    }
}

fn truncated_archive_is_an_error_unless_allowed(packing: Packing) {
    let (tree, packed) = (Tree::mixed(), packed(packing));
    for len in [packed.len() * 2 / 3, packed.len() * 5 / 6] {
        let cut = packed.slice(..len);
        let error = failure(&cut, false);
        assert!(
            error.as_ref().is_some_and(Error::is_truncation),
            "{error:?}"
        );

        let env = TestEnv::new();
        let mut options = env.options();
        options.scan.allow_truncated = true;
        for scans in [1, 0] {
            let archive = env.open_bytes(cut.clone(), &options).expect("a part");
            assert_eq!(archive.stats().scans.get(), scans);
            let notes = archive.notes();
            assert!(scans == 0 || notes.iter().any(|note| note.contains("truncated")));
            assert_readable_part(&archive, &tree);
        }
    }
}
for_each_packing!(truncated_archive_is_an_error_unless_allowed);

/// Asserts that a prefix of the files is there, and that only the last of them is incomplete.
fn assert_readable_part(archive: &Archive, tree: &Tree) {
    let end = archive.index().origin().plain_bytes;
    let mut complete = 0;
    for (name, content) in &tree.files {
        let path = ArchivePath::sanitize(name.as_bytes()).path;
        let index = archive.index();
        let index = index.tree().expect("rows");
        let Some(entry) = index.find(&path) else {
            break;
        };
        let pieces = entry.pieces(0, entry.size());
        let is_complete = pieces
            .map(|piece| piece.plain.end().0)
            .all(|stored| stored <= end);
        if is_complete {
            assert_file(archive, name, content);
            complete += 1;
        } else if let Ok(part) = read(archive, name) {
            assert!(content.starts_with(&part), "{name} is wrong");
        }
    }
    assert!(complete >= 9, "only {complete} files");
    assert!(complete < tree.files.len());
}

/// An archive with a flipped bit in its last checksum, and the format that reports it.
fn with_wrong_checksum(packing: Packing) -> Option<(Bytes, Compression)> {
    let packed = packed(packing);
    let len = packed.len();
    let (from_end, compression) = match packing {
        Packing::Gzip | Packing::GzipMembers => (8, Compression::Gzip),
        // The checksum is before the empty member at the end.
        Packing::Bgzf => (28 + 8, Compression::Gzip),
        Packing::Lz4 | Packing::Lz4Linked | Packing::Lz4Frames => (4, Compression::Lz4),
        Packing::Zstd | Packing::ZstdFrames => (4, Compression::Zstd),
        Packing::Xz | Packing::XzBlocks | Packing::XzStreams => {
            // The index is before a footer of 12 bytes, which holds its length in units of four bytes.
            // Before the index is the check of the last block.
            let size = packed.get(len - 8..len - 4)?.try_into().ok()?;
            let index_len = (u64::from(u32::from_le_bytes(size)) + 1) * 4;
            (12 + index(index_len) + 4, Compression::Xz)
        }
        Packing::Bzip2 | Packing::Bzip2Streams => (3, Compression::Bzip2),
        Packing::Plain | Packing::Lz4Legacy => return None,
    };
    Some((flipped(&packed, len - from_end), compression))
}

fn wrong_checksum_at_the_end_is_an_error(packing: Packing) {
    let Some((packed, expected)) = with_wrong_checksum(packing) else {
        return;
    };
    for allow_truncated in [false, true] {
        let error = failure(&packed, allow_truncated);
        let Some(Error::Codec(codec::Error {
            compression, cause, ..
        })) = error
        else {
            panic!("{error:?}");
        };
        assert_eq!(compression, expected);
        assert!(
            matches!(
                cause,
                codec::Cause::Checksum { .. } | codec::Cause::Malformed(_)
            ),
            "{cause:?}"
        );
    }
}
for_each_packing!(wrong_checksum_at_the_end_is_an_error);

fn scan_detects_damage_if_format_has_checksums(packing: Packing) {
    if matches!(packing, Packing::Plain | Packing::Lz4Legacy) {
        return;
    }
    let packed = packed(packing);
    for part in 1..6 {
        let error = failure(&flipped(&packed, packed.len() * part / 6), false);
        assert!(error.is_some(), "at {part}/6");
    }
}
for_each_packing!(scan_detects_damage_if_format_has_checksums);

#[test]
fn open_error_names_what_is_not_an_archive() {
    let html = Bytes::from_static(b"<!DOCTYPE html><html>not found</html>");
    assert!(matches!(failure(&html, true), Some(Error::WebPage)));
    let zip = Bytes::from_static(b"PK\x03\x04 and so on");
    assert!(matches!(
        failure(&zip, true),
        Some(Error::UnsupportedFormat("zip"))
    ));
}

// Promises: truncated-error
#[test]
fn damage_fails_early_opening_only_before_the_first_member() {
    let cut = raw::Archive::new().file("a", "1").unfinished();
    let cut = Bytes::from([&cut[..], &[b'x'; 100]].concat());
    // The scan often ends before the caller continues.
    for _ in 0..30 {
        for (len, has_member) in [(cut.len(), true), (500, false)] {
            let env = TestEnv::with_archive(cut.slice(..len));
            let (source, stats) = env.source();
            let (options, network) = (env.options(), env.network.handle());
            let opened = Archive::open_early(source, &options, network, &stats);
            assert_eq!(opened.is_ok(), has_member, "{:?}", opened.err());
            if let Ok(archive) = opened {
                wait::wait_until("the scan is over", || archive.failure().is_some());
            }
        }
    }
}
