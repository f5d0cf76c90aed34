//! Large payloads of a plain archive are skipped: what the scan fetches, and later reads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tarfs::archive::{Archive, DiskCacheMode, OpenError, OpenOptions, Volume, scan::Digest};
use tarfs::index::{Index, Ino};
use tarfs::{Extent, Packed};

use super::damage::flipped;
use super::{PATH, TestEnv, index, ino};
use crate::support::http::Resource;
use crate::support::raw;
use crate::support::sha256::sha256;

/// A payload long enough to be skipped on any link, even when memory is full of requested chunks.
const HUGE_LEN: usize = 104 << 20;

/// The byte at offset `at` of file number `file`.
fn byte(file: u8, at: usize) -> u8 {
    let mixed = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    file ^ u8::try_from(mixed).expect("eight bits")
}

fn content(file: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| byte(file, at)).collect()
}

/// Huge and small members alternating.
fn archive() -> Bytes {
    static ARCHIVE: OnceLock<Bytes> = OnceLock::new();
    let make = || {
        let archive = raw::Archive::new()
            .file("d/first", "first")
            .file("d/huge-1", content(1, HUGE_LEN))
            .pax(&[("mtime", "7.5")])
            .file("between", content(2, 100_000))
            .hard_link("linked", "d/huge-1")
            // Ends in the middle of a record.
            .file("huge-2", content(3, HUGE_LEN + 17))
            .symlink("last", "between");
        Bytes::from(archive.end())
    };
    ARCHIVE.get_or_init(make).clone()
}

fn skipping_options(env: &TestEnv) -> OpenOptions {
    let mut options = env.options();
    options.scan.allow_skipping = true;
    options
}

/// All properties of each entry except its bytes.
fn entry_facts(index: &Index) -> Vec<String> {
    let mut facts = Vec::new();
    for number in 1..=index.last_ino().0 {
        if let Some(entry) = index.entry(Ino(number)) {
            let path = index.path(Ino(number)).unwrap_or_default();
            let pieces: Vec<_> = entry.pieces(0, entry.size()).collect();
            let links = entry.link_count();
            let (kind, mtime) = (entry.kind(), entry.mtime());
            facts.push(format!(
                "{number} {path} {kind:?} {links} {mtime:?} {pieces:?}"
            ));
        }
    }
    facts
}

/// Reads `len` bytes of a file in the middle, and checks them.
#[track_caller]
fn check_read(archive: &Archive, name: &str, file: u8, at: usize, len: usize) {
    let ino = ino(archive, name);
    let len = u32::try_from(len).expect("small");
    let bytes = archive
        .read_blocking(ino, at as u64, len)
        .expect("readable");
    assert_eq!(bytes.len(), len as usize);
    let right = (at..).zip(&bytes).all(|(at, &read)| read == byte(file, at));
    assert!(right, "{name} at {at}");
}

// Promises: fetch-skips
#[test]
fn large_payloads_are_skipped_and_still_readable() {
    let env = TestEnv::with_archive(archive());
    let archive = env.open_with(&skipping_options(&env));
    let skipped = archive.stats().skipped_bytes.get();
    let sent = env.server.sent_bytes(PATH);
    assert!(skipped > 90 << 20, "{skipped}");
    let packed_bytes = archive.index().origin().packed_bytes;
    assert!(
        sent + skipped <= packed_bytes,
        "{sent}, {skipped} of {packed_bytes}"
    );
    assert_disjoint(&env);

    let streamed = TestEnv::with_archive(self::archive());
    let whole = streamed.open();
    assert_eq!(whole.stats().skipped_bytes.get(), 0);
    assert_eq!(
        entry_facts(archive.index().tree().expect("rows")),
        entry_facts(whole.index().tree().expect("rows"))
    );

    for archive in [archive, env.open_with(&skipping_options(&env))] {
        check_read(&archive, "between", 2, 0, 100_000);
        check_read(&archive, "d/huge-1", 1, 0, 5000);
        check_read(&archive, "linked", 1, 40 << 20, 1 << 20);
        check_read(&archive, "huge-2", 3, HUGE_LEN - 1000, 1017);
    }
    // Only the spans of one file were fetched, not the archive.
    let more = env.server.sent_bytes(PATH) - sent;
    assert!(more < 16 << 20, "{more}");
}

/// Asserts that no byte was requested twice.
#[track_caller]
fn assert_disjoint(env: &TestEnv) {
    let mut ranges: Vec<_> = env
        .server
        .requests(PATH)
        .iter()
        .map(|seen| seen.request.range().expect("a range"))
        .collect();
    ranges.sort_unstable();
    for (before, after) in ranges.iter().zip(ranges.iter().skip(1)) {
        assert!(before.1 <= after.0, "{before:?} {after:?}");
    }
}

// Promises: fetch-reads
#[test]
fn short_read_of_skipped_payload_fetches_one_window() {
    let env = TestEnv::with_archive(archive());
    drop(env.open_with(&skipping_options(&env)));
    let archive = env.open_with(&skipping_options(&env));
    let before = env.server.sent_bytes(PATH);
    let stored = archive.stats().disk_cache_written_bytes.get();
    for at in [20 << 20, 50 << 20, 80 << 20] {
        check_read(&archive, "d/huge-1", 1, at + 5000, 4096);
        // From memory, because these bytes have no digests to verify a copy on disk.
        check_read(&archive, "d/huge-1", 1, at + 9000, 1000);
    }
    assert_eq!(env.server.sent_bytes(PATH) - before, 3 * (128 << 10));
    assert_eq!(archive.stats().disk_cache_written_bytes.get(), stored);
}

// Promises: fetch-skips
#[test]
fn skipped_payload_with_changed_bytes_is_refetched() {
    let env = TestEnv::with_archive(archive());
    let mut options = skipping_options(&env);
    options.disk_cache = DiskCacheMode::Disabled;
    options.scan.memory = 32 << 20;
    let opened = env.open_with(&options);
    let at = 40 << 20;
    check_read(&opened, "d/huge-1", 1, at, 1000);
    // Reads until all of it is evicted from memory.
    for place in (0..HUGE_LEN - (1 << 20)).step_by(1 << 19) {
        check_read(&opened, "huge-2", 3, place, 1000);
    }
    let place = {
        let index = opened.index();
        let index = index.tree().expect("rows");
        let entry = index.entry(ino(&opened, "d/huge-1")).expect("a file");
        let whole = entry.pieces(0, 1).next().expect("a byte");
        whole.plain.start().0 + at as u64
    };
    let good = Resource::new(archive()).etag("\"1\"");
    let bad = Resource::new(flipped(&archive(), index(place))).etag("\"1\"");
    let is_bad = AtomicBool::new(true);
    env.server.route(PATH, move |request| {
        let range = request.range();
        let hits = range.is_some_and(|(start, end)| (start..end).contains(&place));
        let is_hit = hits && is_bad.swap(false, Ordering::SeqCst);
        if is_hit { &bad } else { &good }.answer(request)
    });
    check_read(&opened, "d/huge-1", 1, at, 1000);
    assert_eq!(opened.stats().damaged_spans.get(), 1);
}

// Promises: expect-digest
#[test]
fn nothing_is_skipped_if_digest_is_expected() {
    let packed = archive();
    let env = TestEnv::with_archive(packed.clone());
    let mut options = skipping_options(&env);
    let digest = sha256(&packed).parse().expect("a digest");
    options.scan.sha256 = Digest::Expect(digest);
    let archive = env.open_with(&options);
    assert_eq!(archive.stats().skipped_bytes.get(), 0);
    assert_eq!(archive.index().origin().sha256, Some(digest));
}

// Promises: fetch-skips
#[test]
fn source_without_version_is_read_whole() {
    let env = TestEnv::new();
    env.serve(Resource::new(archive()).last_modified("Sat, 01 Jan 2022 00:00:00 GMT"));
    let archive = env.open_with(&skipping_options(&env));
    assert_eq!(archive.stats().skipped_bytes.get(), 0);
    assert!(archive.index().origin().content_id != [0; 32]);
}

#[test]
fn archive_ending_in_payload_is_truncated_skipped_or_not() {
    let archive = archive();
    let env = TestEnv::with_archive(archive.slice(..archive.len() - HUGE_LEN / 2));
    let error = |options: &OpenOptions| match env.try_open(options) {
        Err(OpenError::Archive { error, member, .. }) => format!("{error} in {member:?}"),
        other => panic!("{other:?}"),
    };
    let skipped = error(&skipping_options(&env));
    assert!(skipped.contains("plain byte"), "{skipped}");
    assert_eq!(skipped, error(&env.options()));
}

// Promises: fetch-skips
#[test]
fn unverifiable_index_is_not_shared() {
    let env = TestEnv::with_archive(raw_huge());
    drop(env.open_with(&skipping_options(&env)));
    let saved = env.only_cached_file("index");
    // Another server, without evidence that the bytes are the same.
    let other = TestEnv::new();
    other.serve(Resource::new(raw_huge()));
    let options = OpenOptions {
        index_file: Some(saved),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..other.options()
    };
    assert!(matches!(
        other.try_open(&options),
        Err(OpenError::ForeignIndex { .. })
    ));
}

/// An archive of one huge member, so that hardly any span has a hash.
fn raw_huge() -> Bytes {
    raw::Archive::new()
        .file("huge", content(1, HUGE_LEN))
        .end()
        .into()
}

// Promises: check-digests
#[test]
fn data_beside_skipped_payload_has_digests() {
    let env = TestEnv::with_archive(archive());
    let archive = env.open_with(&skipping_options(&env));
    assert!(archive.stats().skipped_bytes.get() > 0);
    let known = archive.index();
    let known = known.tree().expect("rows");
    let unseen = |name: &str, at: u64| {
        let entry = known.entry(ino(&archive, name)).expect("a file");
        let piece = entry.pieces(at, 1).next().expect("stored");
        // In a plain archive, plain bytes are packed bytes.
        let start = piece.plain.start().0 + at - piece.offset;
        let blocks = known.blocks(Extent::with_len(Packed(start), 1));
        let blocks = blocks.expect("rows").expect("scanned");
        let len = usize::try_from(blocks.extent().len()).expect("small");
        blocks.undigested_blocks(&vec![0; len]).count()
    };
    for name in ["d/first", "between"] {
        let size = known.entry(ino(&archive, name)).expect("a file").size();
        assert_eq!(unseen(name, 0), 0, "{name}");
        assert_eq!(unseen(name, size - 1), 0, "{name}");
    }
    for name in ["d/huge-1", "huge-2"] {
        assert!(unseen(name, HUGE_LEN as u64 / 2) > 0, "{name}");
        assert_eq!(unseen(name, HUGE_LEN as u64 - 1), 0, "the end of {name}");
    }
}
