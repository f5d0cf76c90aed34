//! What is made and pushed ahead of readers: enough, and never much too much.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tarfs::archive::{
    PrefetchMode, Archive, OpenOptions, PageCache, PrefetchOptions, PrefetchState, DiskCacheMode, AccessedRange,
};
use tarfs::base::extent::Plain;
use tarfs::base::archive_path::ArchivePath;
use tarfs::base::stats::Counter;
use tarfs::fuse::{Content, Force, Mount, MountOptions, TarFilesystem as Mounted, Subtree};
use tarfs::index::{Index, Ino};

use super::{Lab, PATH, index, ino, large_lz4, packed};
use crate::support::http::Resource;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::tree::Tree;
use crate::support::wait;

/// What the kernel reads at once.
const REQUEST: u32 = 128 << 10;

fn settle(archive: &Archive) {
    wait::until("it settles", || archive.is_prefetch_idle());
}

/// Reads a whole file as a mount does.
fn follow(archive: &Archive, ino: Ino, content: &[u8]) {
    for (number, piece) in content.chunks(REQUEST as usize).enumerate() {
        let offset = number as u64 * u64::from(REQUEST);
        archive.note_read(ino, offset, REQUEST);
        let read = archive.read_blocking(ino, offset, REQUEST).expect("readable");
        assert!(read == piece, "{} at {offset} is wrong", ino.0);
    }
}

fn open_ahead(lab: &Lab, options: &OpenOptions) -> Archive {
    let archive = lab.open_with(options);
    archive
        .start_prefetch(PrefetchOptions::default())
        .expect("threads");
    archive
}

/// Packed bytes of the spans that hold the files.
fn packed_spans(archive: &Archive, files: &[Ino]) -> u64 {
    let tree = archive.index();
    let mut spans = BTreeSet::new();
    for &ino in files {
        let entry = tree.entry(ino).expect("there");
        for piece in entry.pieces(0, entry.size()) {
            let last = Plain(piece.plain.end().0 - 1);
            let first = tree.span_at(piece.plain.start()).expect("inside");
            spans.extend(first..=tree.span_at(last).expect("inside"));
        }
    }
    let end = tree.origin().packed_bytes;
    let start = |number| tree.seek_offset(number).map_or(end, |offset| offset.0);
    let lens = spans.iter().map(|&span| start(span + 1) - start(span));
    lens.sum()
}

/// Reads these files of the large tree, in this order, and checks what that fetched.
fn assert_economy(lab: &Lab, numbers: &[usize]) {
    let tree = Tree::large();
    let mut options = lab.without_spool();
    // Whatever is fetched twice was not fetched ahead.
    options.scan.memory = 256 << 20;
    let archive = open_ahead(lab, &options);
    let before = lab.server.sent_bytes(PATH);
    let mut files = Vec::new();
    for &number in numbers {
        let (name, content) = tree.files.get(number).expect("inside");
        let ino = ino(&archive, name);
        follow(&archive, ino, content);
        files.push(ino);
        // All that it leads to, before the next read would make it needed.
        settle(&archive);
    }
    let fetched = lab.server.sent_bytes(PATH) - before;
    let needed = packed_spans(&archive, &files);
    assert!(
        fetched * 10 <= needed * 12,
        "{fetched} bytes for {needed}: {numbers:?}"
    );
}

#[test]
fn reading_a_set_of_files_fetches_little_more_than_their_spans() {
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let mut noise = Noise::new(3);
    let count = Tree::large().files.len();
    for size in [1, 2, 3, 10, 50] {
        let random: Vec<_> = (0..size)
            .map(|_| index(noise.below(count as u64)))
            .collect();
        assert_economy(&lab, &random);
        let mut sorted = random;
        sorted.sort_unstable();
        assert_economy(&lab, &sorted);
    }
    for size in [2, 5, 20, 60, 100, 200] {
        let first = index(noise.below((count - size) as u64));
        let neighbours: Vec<_> = (first..first + size).collect();
        assert_economy(&lab, &neighbours);
    }
}

#[test]
fn a_reader_in_order_is_kept_ahead_of_and_the_archive_is_fetched_once() {
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    for memory in [32 << 20, 64 << 20, 128 << 20] {
        let mut options = lab.without_spool();
        options.scan.memory = memory;
        let archive = open_ahead(&lab, &options);
        let before = lab.server.sent_bytes(PATH);
        for (name, content) in &tree.files {
            follow(&archive, ino(&archive, name), content);
            settle(&archive);
        }
        let fetched = lab.server.sent_bytes(PATH) - before;
        let needed = large_lz4().len() as u64;
        assert!(fetched * 100 <= needed * 102, "{fetched} with {memory}");
        let stats = archive.stats();
        let spans = u64::from(archive.index().span_count());
        assert_eq!(stats.decoded_spans.get(), spans, "each once");
        if memory > 32 << 20 {
            assert!(
                stats.memory_miss_spans.get() <= spans / 2,
                "{} of {spans} were not there",
                stats.memory_miss_spans.get()
            );
            // Neighbours come by one request.
            assert!(stats.source_requests.get() < spans + 2);
        }
    }
}

#[test]
fn every_packing_is_the_same_read_ahead() {
    let tree = Tree::mixed();
    let lab = Lab::new();
    for packing in Packing::ALL {
        let packed = packed(packing);
        lab.serve(Resource::new(packed.clone()).etag(&format!("\"{packing:?}\"")));
        drop(lab.open());
        let archive = open_ahead(&lab, &lab.without_spool());
        let before = lab.server.sent_bytes(PATH);
        for (name, content) in &tree.files {
            follow(&archive, ino(&archive, name), content);
        }
        settle(&archive);
        let fetched = lab.server.sent_bytes(PATH) - before;
        let needed = packed.len() as u64;
        if packing.is_all_seekable() {
            assert!(fetched * 100 <= needed * 102, "{packing:?}: {fetched}");
        }
        assert_eq!(archive.stats().failed_reads.get(), 0);
    }
}

/// An archive of many small files, mounted from a server.
struct Pushing {
    mount: Option<Mount>,
    archive: Arc<Archive>,
    directory: tempfile::TempDir,
    _lab: Lab,
}

const SMALL: usize = 4000;

fn small_name(number: usize) -> String {
    format!("{}/{number:04}", number / 1000)
}

fn small_content(number: usize) -> Vec<u8> {
    Noise::new(number as u64).bytes(2000 + number % 5000)
}

impl Pushing {
    fn new() -> Self {
        Self::showing(None)
    }

    /// A mount of one directory, or of all.
    fn showing(root: Option<&str>) -> Self {
        let files = (0..SMALL).map(|number| (small_name(number), small_content(number)));
        let tree = Tree::of(files.collect());
        let lab = Lab::serving(Packing::Lz4.pack(&tree.tar));
        let archive = Arc::new(open_ahead(&lab, &lab.without_spool()));
        let options = MountOptions::default();
        let content = Arc::clone(&archive) as Arc<dyn Content>;
        let view = root.map(|root| {
            let path = ArchivePath::sanitize(root.as_bytes()).path;
            Subtree::new(&archive.index(), &path, 0).expect("a directory")
        });
        let view = view.unwrap_or(Subtree::WHOLE);
        let mounted = Mounted::new(content, view, &options, Arc::clone(archive.stats()));
        let directory = tempfile::tempdir().expect("a directory");
        let mount = Mount::start(mounted, "small.tar", directory.path(), &options, || {})
            .expect("these tests need FUSE: /dev/fuse, and root or fusermount3");
        Self {
            mount: Some(mount),
            archive,
            directory,
            _lab: lab,
        }
    }

    fn path(&self, number: usize) -> PathBuf {
        self.directory.path().join(small_name(number))
    }

    /// Lists the directory of file `number`, which makes its inodes known.
    fn list(&self, number: usize) {
        let path = self.path(number);
        let directory = path.parent().expect("one");
        assert_eq!(fs::read_dir(directory).expect("readable").count(), 1000);
    }

    #[track_caller]
    fn read(&self, number: usize) {
        let content = fs::read(self.path(number)).expect("readable");
        assert!(content == small_content(number), "{number} is wrong");
    }

    fn count(&self, counter: impl Fn(&tarfs::base::stats::Stats) -> &Counter) -> u64 {
        counter(self.archive.stats()).get()
    }

    /// Asserts that hardly more than `reads` reads came; the kernel may take pages back at any time.
    #[track_caller]
    fn assert_served(&self, reads: u64) {
        let served = self.count(|stats| &stats.served_reads);
        assert!((reads..=reads + 5).contains(&served), "{served} reads");
    }

    /// Waits until file `number` must have been pushed, as files are pushed in their order.
    fn await_pushed(&self, files: u64) {
        wait::until("files are pushed", || {
            self.count(|stats| &stats.pushed_files) >= files
        });
    }
}

impl Drop for Pushing {
    fn drop(&mut self) {
        drop(self.mount.take());
    }
}

#[test]
fn files_are_pushed_before_they_are_read_and_a_marker_tells_when() {
    let place = Pushing::new();
    place.list(0);
    for number in 0..3 {
        place.read(number);
    }
    assert_eq!(place.count(|stats| &stats.served_reads), 3);
    // 512 KiB in files of 4.5 KiB and their headers, less those around the marker.
    place.await_pushed(80);
    for number in 3..40 {
        place.read(number);
    }
    place.assert_served(3);
    // Then comes the marker, and with it the next window.
    for number in 40..100 {
        place.read(number);
    }
    let reads = place.count(|stats| &stats.served_reads);
    // 63 without any pushing; how many come before the window does is up to the machine.
    assert!((4..50).contains(&reads), "{reads}");
    place.await_pushed(150);
    for number in 100..SMALL {
        if number % 1000 == 0 {
            place.list(number);
        }
        place.read(number);
    }
    let served = place.count(|stats| &stats.served_bytes);
    let pushed = place.count(|stats| &stats.pushed_bytes);
    let total: usize = (0..SMALL).map(|number| 2000 + number % 5000).sum();
    assert!(served + pushed >= total as u64);
    assert!(pushed <= total as u64, "nothing twice");
}

/// Others may make no copy of a mount, and their kernel is told no names ahead.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn who_opens_files_by_name_finds_them_pushed_too() {
    let place = Pushing::new();
    for number in 0..3 {
        place.read(number);
    }
    if !is_root() {
        settle(&place.archive);
        return assert_eq!(place.count(|stats| &stats.pushed_files), 0);
    }
    place.await_pushed(80);
    for number in 3..40 {
        place.read(number);
    }
    place.assert_served(3);
    for number in 40..SMALL {
        place.read(number);
    }
    let served = place.count(|stats| &stats.served_bytes);
    let pushed = place.count(|stats| &stats.pushed_bytes);
    let total: usize = (0..SMALL).map(|number| 2000 + number % 5000).sum();
    assert!(served + pushed >= total as u64);
    assert!(pushed <= total as u64, "nothing twice");
}

#[test]
fn names_that_are_asked_for_in_a_row_are_told_by_hundreds() {
    let place = Pushing::new();
    let look = |numbers: &mut dyn Iterator<Item = usize>| {
        let before = place.count(|stats| &stats.served_lookups);
        for number in numbers {
            let found = fs::metadata(place.path(number)).expect("there");
            assert_eq!(found.len(), small_content(number).len() as u64);
            settle(&place.archive);
        }
        place.count(|stats| &stats.served_lookups) - before
    };
    let asked = look(&mut (0..1000));
    if is_root() {
        // Some 20 with listings of hundreds, before Linux 6.15 more.
        assert!(asked < 250, "{asked}");
    }
    let asked = look(&mut (1000..2000).rev());
    assert!(asked >= 1000, "nobody knows what comes before: {asked}");
}

#[test]
fn only_what_is_shown_is_listed_for_who_opens_by_name() {
    let place = Pushing::showing(Some("1"));
    let read = |number: usize| {
        let name = place.path(number);
        let name = name.file_name().expect("a file");
        let content = fs::read(place.directory.path().join(name)).expect("readable");
        assert!(content == small_content(number), "{number} is wrong");
    };
    for number in 1000..1003 {
        read(number);
    }
    if is_root() {
        place.await_pushed(80);
    }
    for number in 1003..2000 {
        read(number);
    }
}

#[test]
fn a_mount_can_be_taken_out_while_its_names_are_listed() {
    for files in 3..13 {
        let place = Pushing::new();
        for number in 0..files {
            place.read(number);
        }
        let mount = place.mount.as_ref().expect("mounted");
        mount.unmount(Force::No).expect("nobody is in its way");
    }
}

/// A page cache that takes its time.
#[derive(Debug, Default)]
struct SlowPages {
    stored_bytes: AtomicU64,
}

impl PageCache for SlowPages {
    fn can_store(&self, _ino: Ino) -> bool {
        true
    }

    fn is_visible(&self, _index: &Index, _ino: Ino) -> bool {
        true
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        files.len()
    }

    fn prime_dentries(&self, _index: &Index, _ino: Ino) {}

    fn store(&self, _ino: Ino, _offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        std::thread::sleep(Duration::from_millis(2));
        let len = bytes.len() as u64;
        self.stored_bytes.fetch_add(len, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn a_scan_waits_for_who_stores_what_it_passes() {
    let (tree, lab) = (Tree::large(), Lab::new());
    let mut options = lab.without_spool();
    // A fifth of the archive is in memory at once.
    options.scan.memory = 64 << 20;
    options.scan.chunk_len = 256 << 10;
    // Not before someone follows.
    let gate = Arc::new(Barrier::new(2));
    let (is_held, at_gate) = (AtomicBool::new(true), Arc::clone(&gate));
    let resource = Resource::new(large_lz4()).etag("\"1\"");
    lab.server.route(PATH, move |request| {
        let is_behind = request.range().is_some_and(|(start, _)| start >= 8 << 20);
        if is_behind && is_held.swap(false, Ordering::SeqCst) {
            at_gate.wait();
        }
        resource.answer(request)
    });
    let (source, stats) = lab.source();
    let archive =
        Archive::open_early(source, &options, lab.network.handle(), &stats).expect("begun");
    archive
        .start_prefetch(PrefetchOptions::default())
        .expect("threads");
    let pages = Arc::<SlowPages>::default();
    archive.set_page_cache(Arc::clone(&pages) as Arc<dyn PageCache>);
    gate.wait();
    let total: usize = tree.files.iter().map(|(_, content)| content.len()).sum();
    // Most: a machine may be too busy for either of them.
    wait::until("most is stored", || {
        pages.stored_bytes.load(Ordering::SeqCst) >= total as u64 / 4 * 3
    });
}

/// Opens with empty memory and prepares `prefetch`.
fn open_with(lab: &Lab, memory: u64, prefetch: PrefetchOptions) -> Archive {
    let mut options = lab.without_spool();
    options.scan.memory = memory;
    let archive = lab.open_with(&options);
    archive.start_prefetch(prefetch).expect("threads");
    archive
}

fn all() -> PrefetchOptions {
    PrefetchOptions {
        mode: PrefetchMode::All,
        ..PrefetchOptions::default()
    }
}

fn state(archive: &Archive) -> PrefetchState {
    archive.prefetch_progress().expect("started").state
}

#[test]
fn everything_is_fetched_once_in_the_background_and_then_nothing() {
    let tree = Tree::mixed();
    let lab = Lab::new();
    for packing in [
        Packing::Plain,
        Packing::Lz4,
        Packing::Bgzf,
        Packing::ZstdFrames,
    ] {
        let packed = packed(packing);
        lab.serve(Resource::new(packed.clone()).etag(&format!("\"{packing:?}\"")));
        drop(lab.open());
        let before = lab.server.sent_bytes(PATH);
        let archive = open_with(&lab, 128 << 20, all());
        wait::until("everything is fetched", || {
            state(&archive) == PrefetchState::Complete
        });
        let fetched = lab.server.sent_bytes(PATH);
        let needed = packed.len() as u64;
        assert!((fetched - before) * 100 <= needed * 102, "{packing:?}");
        let progress = archive.prefetch_progress().expect("started");
        assert_eq!(progress.done_spans, progress.total_spans);
        for (name, content) in &tree.files {
            follow(&archive, ino(&archive, name), content);
        }
        settle(&archive);
        assert_eq!(lab.server.sent_bytes(PATH), fetched, "{packing:?}");
        assert_eq!(archive.stats().memory_miss_spans.get(), 0);
    }
}

#[test]
fn without_room_for_everything_fetching_stops_and_says_so() {
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let before = lab.server.sent_bytes(PATH);
    let archive = open_with(&lab, 64 << 20, all());
    wait::until("memory is full", || state(&archive) == PrefetchState::Full);
    let fetched = lab.server.sent_bytes(PATH) - before;
    // Three quarters of what spans may take, which are noise and pack to as much.
    assert!((10 << 20..20 << 20).contains(&fetched), "{fetched}");
    assert!(archive.cached_bytes() <= 24 << 20);
    let progress = archive.prefetch_progress().expect("started");
    assert!(progress.done_spans < progress.total_spans, "{progress:?}");
}

#[test]
fn nothing_is_fetched_ahead_when_nothing_may_be() {
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let none = PrefetchOptions {
        mode: PrefetchMode::Off,
        ..PrefetchOptions::default()
    };
    let archive = open_with(&lab, 64 << 20, none);
    for (name, content) in &tree.files {
        follow(&archive, ino(&archive, name), content);
    }
    settle(&archive);
    assert_eq!(archive.stats().prefetched_spans.get(), 0);
    assert_eq!(state(&archive), PrefetchState::Off);
}

#[test]
fn who_waits_for_the_rate_is_in_nobodys_way() {
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let slow = PrefetchOptions {
        bytes_per_second: Some(1),
        ..all()
    };
    let archive = open_with(&lab, 64 << 20, slow);
    wait::until("one request is sent", || {
        archive.stats().prefetched_packed_bytes.get() > 0
    });
    // It sleeps for weeks now.
    for (name, content) in &tree.files {
        let read = archive.read_blocking(ino(&archive, name), 0, 1 << 20);
        assert!(read.expect("readable") == *content, "{name} is wrong");
    }
    assert_eq!(archive.stats().prefetched_spans.get(), 1);
    assert_eq!(state(&archive), PrefetchState::Running);
    drop(archive);
}

/// What a start of some program reads: files of the large tree, here and there.
fn some_files() -> Vec<usize> {
    let mut noise = Noise::new(11);
    let count = Tree::large().files.len() as u64;
    (0..60).map(|_| index(noise.below(count))).collect()
}

/// Reads them as a mount does, each when nothing is on its way.
fn read_slowly(archive: &Archive, numbers: &[usize]) {
    let tree = Tree::large();
    for &number in numbers {
        let (name, content) = tree.files.get(number).expect("inside");
        settle(archive);
        follow(archive, ino(archive, name), content);
    }
}

/// Records how they are read.
fn record(lab: &Lab, numbers: &[usize]) -> Vec<AccessedRange> {
    let record = PrefetchOptions {
        mode: PrefetchMode::Off,
        record: true,
        ..PrefetchOptions::default()
    };
    let archive = open_with(lab, 64 << 20, record);
    assert_eq!(archive.accesses_since(0), None);
    read_slowly(&archive, numbers);
    assert!(archive.stats().memory_miss_spans.get() > 0);
    let (recorded, reads) = archive.accesses_since(0).expect("something was read");
    assert_eq!(archive.accesses_since(reads), None, "nothing since");
    let distinct: BTreeSet<_> = numbers.iter().collect();
    assert_eq!(recorded.len(), distinct.len(), "each file is one range");
    let (tree, first) = (Tree::large(), *numbers.first().expect("some"));
    let (name, content) = tree.files.get(first).expect("inside");
    let expected = AccessedRange {
        ino: ino(&archive, name),
        offset: 0,
        len: content.len() as u64,
    };
    assert_eq!(recorded.first(), Some(&expected));
    recorded
}

#[test]
fn a_replayed_recording_leaves_nothing_to_fetch_for_reads() {
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let random = some_files();
    let mut sorted = some_files();
    sorted.sort_unstable();
    // All of it has room, or a third.
    for (numbers, memory) in [(random, 256 << 20), (sorted, 96 << 20)] {
        let recorded = record(&lab, &numbers);
        let replay = PrefetchOptions {
            mode: PrefetchMode::Off,
            replay: Some(Box::new(move |_| recorded)),
            ..PrefetchOptions::default()
        };
        let archive = open_with(&lab, memory, replay);
        read_slowly(&archive, &numbers);
        let stats = archive.stats();
        let progress = archive.prefetch_progress().expect("started");
        assert_eq!(progress.replayed_spans, progress.replay_spans);
        assert_eq!(stats.memory_miss_spans.get(), 0, "with {memory}");
        assert_eq!(stats.decoded_spans.get(), progress.replay_spans);
    }
}

#[test]
fn what_memory_has_no_room_for_is_fetched_once_in_the_background_and_kept_on_disk() {
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    let mut options = lab.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    drop(lab.open_with(&options));

    let before = lab.server.sent_bytes(PATH);
    options = lab.options();
    options.scan.memory = 32 << 20;
    let archive = lab.open_with(&options);
    archive.start_prefetch(all()).expect("threads");
    wait::until("everything is fetched", || {
        state(&archive) == PrefetchState::Complete
    });
    let fetched = lab.server.sent_bytes(PATH);
    assert!((fetched - before) * 100 <= large_lz4().len() as u64 * 102);
    assert_eq!(archive.stats().disk_cache_skipped_spans.get(), 0);
    for (name, content) in tree.files.iter().rev() {
        let read = archive.read_blocking(ino(&archive, name), 0, 1 << 20);
        assert!(read.expect("readable") == *content, "{name} is wrong");
    }
    assert_eq!(lab.server.sent_bytes(PATH), fetched);
}
