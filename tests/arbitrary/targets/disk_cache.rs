//! Disk cache files with arbitrary content and of arbitrary type.
//!
//! Readers get the archive's own bytes, valid spans are not decoded again, and nothing outside of the
//! cache changes.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use flate2::write::GzEncoder;
use rustix::fs::{CWD, Mode, mkfifoat};
use tarfs::Stats;
use tarfs::archive::{
    Archive, DiskCacheMode, OpenOptions, PrefetchMode, PrefetchOptions, PrefetchState, Volume, scan,
};
use tarfs::codec::{Compression, SeekPoint};
use tarfs::index::store::Store;
use tarfs::index::{BlockHasher, Builder, Ino, Locator, Options, Origin, block_len};
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::internal::free_list::FreeList;
use tarfs::internal::span_hash::SpanHasher;
use tarfs::internal::{DiskCache, DiskCacheDir, DiskCacheOptions, QueueTimeout};
use tarfs::source::{self, Validator};
use tarfs::tar::{Member, MemberKind, Timestamp};
use tarfs::{Extent, Packed, Plain};
use tokio::runtime::Runtime;

use super::knobs::Knobs;
use crate::rng::Rng;

/// The spans of the cached archive. Some fit into one block of a disk, some need several.
const SPAN_LENS: [usize; 7] = [5000, 1, 4096, 700, 9000, 8192, 3000];

/// A size that no input reaches, and one that is too small for a cache file.
const LARGE_DISK_BYTES: u64 = 1 << 30;

/// Timeout of any wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Bytes of an input that name another file beside the cache file.
const NAME_LEN: usize = 12;

/// An archive of one file. Each span is a gzip member.
struct ReferenceArchive {
    plain: Vec<u8>,
    packed: Bytes,
    spans: Vec<Extent<Plain>>,
    seek_points: Vec<SeekPoint>,
}

static REFERENCE: LazyLock<ReferenceArchive> = LazyLock::new(|| {
    let plain = Rng::new(3).bytes(SPAN_LENS.iter().sum());
    let (mut packed, mut spans, mut seek_points) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = &plain[..];
    for len in SPAN_LENS {
        let (span, behind) = rest.split_at(len);
        let start = Plain((plain.len() - rest.len()) as u64);
        spans.push(Extent::with_len(start, len as u64));
        seek_points.push(SeekPoint {
            packed: Packed(packed.len() as u64),
            bit: 0,
            plain: start,
            state: 0,
            window: Bytes::new(),
        });
        let mut member = GzEncoder::new(&mut packed, flate2::Compression::fast());
        member.write_all(span).expect("memory");
        member.finish().expect("memory");
        rest = behind;
    }
    ReferenceArchive {
        plain,
        packed: packed.into(),
        spans,
        seek_points,
    }
});

impl ReferenceArchive {
    /// The bytes of a span.
    fn span(&self, extent: Extent<Plain>) -> &[u8] {
        part(&self.plain, extent).expect("inside")
    }

    /// Saves an index of the archive in `cache`. With `liar`, the last span is missing and claims this
    /// length, more than a span may have.
    fn save_index(&self, cache: &Path, liar: Option<u64>) {
        let len = self.plain.len() as u64;
        let mut builder = Builder::new(Options::default());
        let file = Member {
            header: Plain(0),
            payload: Extent::with_len(Plain(0), len),
            name: b"a".to_vec(),
            kind: MemberKind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            user: Vec::new(),
            group: Vec::new(),
            mtime: Timestamp::default(),
            size: len,
            sparse: None,
            xattrs: Vec::new(),
            has_global_keywords: false,
        };
        builder.add_member(&file).expect("the first");
        let mut hasher = SpanHasher::new(block_len(Some(self.packed.len() as u64)));
        for (&span, seek_point) in self.spans.iter().zip(&self.seek_points) {
            hasher.update(self.span(span));
            builder.add_span(span, Some(&hasher.finish().1), Some(seek_point));
        }
        let packed_bytes = self.packed.len() as u64;
        let mut hasher = BlockHasher::new(block_len(Some(packed_bytes)), Packed(0));
        builder.add_digests(&hasher.update(&self.packed));
        let mut plain_bytes = len;
        if let Some(longer) = liar {
            let span = Extent::with_len(Plain(len), longer);
            builder.add_span(span, Some(&[7]), None);
            plain_bytes = span.end().0;
        }
        let index = builder.finish(Origin {
            content_id: CONTENT_ID,
            compression: Compression::Gzip,
            packed_bytes,
            plain_bytes,
            ..Origin::default()
        });
        let store = Store::new(cache);
        store.publish(&self.locator(), &index).expect("space");
    }

    /// The locator of the saved index.
    fn locator(&self) -> Locator {
        Locator {
            canonical: "name:a".to_owned(),
            fingerprint: format!("len={} etag=\"1\"", self.packed.len()),
            options: "compression=auto ignore-zeros=false allow-truncated=false".to_owned(),
        }
    }
}

/// The content id, which names the cache file.
const CONTENT_ID: [u8; 32] = [0xab; 32];

fn content() -> String {
    "ab".repeat(32)
}

fn part(bytes: &[u8], extent: Extent<Plain>) -> Option<&[u8]> {
    let at = |plain: Plain| usize::try_from(plain.0).ok();
    bytes.get(at(extent.start())?..at(extent.end())?)
}

/// Type of the entry at the path of the cache file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// A file that only its owner can write.
    File,
    /// A file that everyone can write.
    Open,
    /// A symbolic link to a file outside of the cache.
    Link,
    /// A directory, or a FIFO.
    Other,
}

/// A cache, and files outside of it.
struct Place {
    directory: tempfile::TempDir,
    found: Found,
    /// Initial length of the cache file.
    len: u64,
}

impl Place {
    fn new(bytes: &[u8], knobs: Knobs) -> Self {
        // In memory, because a disk would take milliseconds for each input.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let found = match (knobs.flag(0), knobs.flag(1), knobs.flag(2)) {
            (false, ..) => Found::File,
            (true, false, false) => Found::Open,
            (true, false, true) => Found::Link,
            (true, true, _) => Found::Other,
        };
        let longer = if knobs.flag(3) { 1 << 43 } else { 0 };
        let place = Self {
            directory,
            found,
            len: bytes.len() as u64 + longer,
        };
        fs::create_dir(place.path("outside")).expect("fresh");
        fs::create_dir_all(place.path("cache/disk-cache")).expect("fresh");
        fs::write(place.path("outside/a"), "outside").expect("space");
        place.put(&content(), found, bytes, longer);
        let kinds = [Found::File, Found::Link, Found::Other, Found::Open];
        let names = bytes
            .rchunks_exact(NAME_LEN)
            .take(usize::from(knobs.number() % 8));
        for (name, kind) in names.zip(kinds.into_iter().cycle()) {
            let name: String = name.iter().map(|&byte| letter(byte)).collect();
            place.put(&name, kind, bytes, 0);
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn cache_file(&self) -> PathBuf {
        self.path("cache/disk-cache").join(content() + ".data")
    }

    /// Creates an entry beside the cache files, unless the name is taken.
    fn put(&self, name: &str, kind: Found, bytes: &[u8], longer: u64) {
        let path = self.path("cache/disk-cache").join(format!("{name}.data"));
        if path.symlink_metadata().is_ok() {
            return;
        }
        match kind {
            Found::Link => symlink("../../outside/a", &path).expect("fresh"),
            Found::Other if bytes.len().is_multiple_of(2) => fs::create_dir(&path).expect("fresh"),
            Found::Other => mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).expect("fresh"),
            Found::File | Found::Open => {
                fs::write(&path, bytes).expect("space");
                let file = fs::File::options().write(true).open(&path).expect("ours");
                file.set_len(bytes.len() as u64 + longer).expect("a hole");
                let mode = if kind == Found::Open { 0o666 } else { 0o600 };
                fs::set_permissions(&path, Permissions::from_mode(mode)).expect("ours");
            }
        }
    }

    /// Whether valid spans of the cache file can be used.
    fn is_usable(&self) -> bool {
        self.found == Found::File
    }

    /// Names, contents, modes and times of everything outside of the cache.
    fn outside(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for directory in ["", "outside", "cache"] {
            for entry in fs::read_dir(self.path(directory)).expect("there") {
                let path = entry.expect("an entry").path();
                let found = fs::symlink_metadata(&path).expect("there");
                lines.push(format!("{} {:o}", path.display(), found.mode()));
                if found.is_file() {
                    let content = fs::read(&path).expect("readable");
                    let links = found.nlink();
                    lines.push(format!("{content:?} {:?} {links}", found.modified().ok()));
                }
            }
        }
        lines.sort();
        lines
    }

    fn open(&self, disk_bytes: u64) -> Archive {
        static NETWORK: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
        let source = source::MemorySource::new("a", REFERENCE.packed.clone())
            .with_validator(Validator::StrongEtag("\"1\"".to_owned()));
        let options = OpenOptions {
            scan: scan_options(),
            cache_dir: Some(self.path("cache")),
            index_file: None,
            published_index: None,
            index_memory: tarfs::index::MemoryLimit::default(),
            index_rows: tarfs::index::store::RowsToLoad::All,
            should_rescan_unproven: false,
            should_log_problems: false,
            layer: None,
            resources: None,
            peers: None,
            disk_cache: DiskCacheMode::Enabled {
                limit_bytes: Some(disk_bytes),
            },
        };
        let stats = Arc::<Stats>::default();
        let opened = Archive::open(Arc::new(source), &options, NETWORK.handle(), &stats);
        opened.expect("the index is right, whatever the cache file is")
    }

    /// Reads everything. Returns the number of decoded spans.
    fn read(&self, disk_bytes: u64) -> u64 {
        let archive = self.open(disk_bytes);
        assert_eq!(archive.stats().scans.get(), 0, "the index is found");
        let len = u32::try_from(REFERENCE.plain.len()).expect("small");
        let bytes = archive
            .read_blocking(FILE, 0, len)
            .expect("it is in memory");
        assert!(bytes == REFERENCE.plain, "other bytes than the archive's");
        archive.stats().decoded_spans.get()
    }
}

/// The only file.
const FILE: Ino = Ino(2);

/// A character of a name, often one that names of cache files contain.
fn letter(byte: u8) -> char {
    match byte {
        b'/' | 0 => '.',
        b'0'..=b'9' | b'a'..=b'z' | b'-' | b'.' => char::from(byte),
        _ => char::from(b'a' + byte % 16),
    }
}

fn scan_options() -> scan::Options {
    scan::Options {
        connections: 1,
        chunk_len: 1 << 20,
        memory: 1 << 20,
        workers: 0,
        ..scan::Options::default()
    }
}

/// Cache files of this archive, and of other archives beside it.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let whole = REFERENCE.plain.clone();
    let torn = {
        let (front, rest) = whole.split_at(4000);
        let (_, back) = rest.split_at(3000);
        [front, &[0; 3000], back].concat()
    };
    let behind = [&whole[..], &whole].concat();
    let beside = [&whole[..], b".12345-0....abababababab........-..."].concat();
    let cut = whole.iter().copied().take(9000).collect();
    let files = [whole, torn, behind, beside, cut, vec![0; 30_000]];
    let knobs = [0, 1, 3, 5, 0b1_1000, 0b10_0000, 0b100_0000, 0b1110_1000];
    files
        .iter()
        .enumerate()
        .flat_map(|(number, file)| {
            let others = u8::try_from(number).expect("six");
            knobs.map(|knobs| [&file[..], &[9, 0, knobs, others]].concat())
        })
        .collect()
}

/// Uses `bytes` as a cache file.
pub(super) fn run(bytes: &[u8]) {
    let (bytes, knobs) = Knobs::split(bytes);
    let place = Place::new(bytes, knobs);
    REFERENCE.save_index(&place.path("cache"), None);
    let before = place.outside();
    if knobs.flag(5) {
        // A read with no disk space may remove cache files.
        place.read(0);
    } else {
        assert_used_and_repaired(&place, bytes);
    }
    if knobs.flag(4) {
        let longer = 1 << (bytes.len() % 43);
        REFERENCE.save_index(&place.path("cache"), Some(longer));
        prefetch_all(&place);
    }
    access_directly(&place, knobs);
    assert_eq!(place.outside(), before);
}

/// Valid spans are used. All others are decoded, and found on the next read.
fn assert_used_and_repaired(place: &Place, bytes: &[u8]) {
    let is_damaged = |span: Extent<Plain>| part(bytes, span) != Some(REFERENCE.span(span));
    let spans = REFERENCE.spans.iter();
    let damaged = spans.filter(|&&span| !place.is_usable() || is_damaged(span));
    let damaged = damaged.count() as u64;
    assert_eq!(place.read(LARGE_DISK_BYTES), damaged);
    let left = if place.is_usable() { 0 } else { damaged };
    assert_eq!(place.read(LARGE_DISK_BYTES), left);
    if place.is_usable() {
        let file = fs::File::open(place.cache_file()).expect("there");
        let mut stored = vec![0; REFERENCE.plain.len()];
        file.read_exact_at(&mut stored, 0).expect("as long");
        assert!(stored == REFERENCE.plain);
        let len = file.metadata().expect("open").len();
        assert_eq!(len, place.len.max(stored.len() as u64), "nothing is cut");
    }
}

/// Prefetches all spans with an index that claims an impossible one.
fn prefetch_all(place: &Place) {
    let archive = place.open(LARGE_DISK_BYTES);
    let all = PrefetchOptions {
        mode: PrefetchMode::All,
        ..PrefetchOptions::default()
    };
    archive.start_prefetch(all).expect("threads");
    let start = Instant::now();
    let state = || archive.prefetch_progress().map(|progress| progress.state);
    while state() == Some(PrefetchState::Running) {
        assert!(start.elapsed() < WAIT_TIMEOUT, "it does not end");
        std::thread::yield_now();
    }
    // Spans that do not fit into the disk cache must fit into memory.
    let may_be_full = !place.is_usable() && state() == Some(PrefetchState::Full);
    assert!(may_be_full || state() == Some(PrefetchState::Incomplete));
}

/// Reads and writes a cache file at offsets that no real reader uses.
fn access_directly(place: &Place, knobs: Knobs) {
    let directory = DiskCacheDir::new(&place.path("cache"), Some(LARGE_DISK_BYTES));
    let start = Instant::now();
    for file in directory.files().unwrap_or_default() {
        // A child of another test inherits our descriptors until it calls execve(2).
        while file.is_in_use() {
            assert!(start.elapsed() < WAIT_TIMEOUT, "all who used one are gone");
            std::thread::yield_now();
        }
    }
    let options = DiskCacheOptions {
        write_pool: BufferPool::new(1 << 20),
        is_only_copy: knobs.flag(6),
        free_list: FreeList::new(0),
        read_rate: Arc::default(),
        stats: Arc::default(),
    };
    let is_whole = options.is_only_copy;
    let Ok(cache) = DiskCache::open(directory.clone(), &content(), options) else {
        assert!(!place.is_usable() && !is_whole, "nothing is in its way");
        return;
    };
    let len = knobs.push_len() as u64;
    for start in [0, 1, len, 1 << 20, 1 << 42, u64::MAX - len, u64::MAX] {
        let extent = Extent::with_len(Plain(start), len);
        if let Some(bytes) = cache.read(extent) {
            assert_eq!(bytes.len() as u64, extent.len());
        }
    }
    for &span in &REFERENCE.spans {
        let bytes = Bytes::copy_from_slice(REFERENCE.span(span));
        cache.insert_evicting(span, bytes.clone(), 1, QueueTimeout::Unlimited);
        assert_eq!(cache.read(span), Some(bytes));
    }
    cache.flush();
    for &span in &REFERENCE.spans {
        let found = cache.read(span);
        assert!(found.is_some_and(|found| found == REFERENCE.span(span)));
        cache.mark_used(&span.into());
    }
    assert_eq!(cache.problem_text(), None);
    if knobs.flag(7) {
        // Another entry may have that name.
        drop(cache.publish("published"));
    }
    drop(cache);
    let content = content();
    let found = directory.files().expect("readable");
    let is_ours = |name: Option<&str>| name == Some(&content) || name == Some("published");
    assert!(
        found
            .iter()
            .any(|file| is_ours(file.name.split('.').next()))
    );
}
