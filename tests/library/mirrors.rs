//! Mirrors of a source: spread, failed over, and compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::source::{self, Error, Identity, Options, ReadMode, Source};
use tarfs::{Extent, Packed, Stats, fetch};
use tokio::runtime::Runtime;

use crate::support::fixture::TestDir;
use crate::support::http::{Fault, Resource, Response, Server};
use crate::support::raw::random_bytes;
use crate::support::tree::Tree;
use crate::support::wait::wait_until;

const LEN: usize = 6 << 20;

/// Length of the first request.
const PREFIX_LEN: u64 = 64 << 10;

/// A server, which has faults from the time when they are switched on.
struct Mirror {
    server: Server,
    is_faulty: Arc<AtomicBool>,
}

impl Mirror {
    fn start(resource: Resource, fault: Fault) -> Self {
        let (server, is_faulty) = (Server::start(), Arc::<AtomicBool>::default());
        let switch = Arc::clone(&is_faulty);
        server.serve_with_faults("/a", resource, move |_| {
            switch.load(Ordering::Relaxed).then(|| fault.clone())
        });
        Self { server, is_faulty }
    }

    fn url(&self) -> String {
        self.server.url("/a")
    }

    fn set_faulty(&self, is_faulty: bool) {
        self.is_faulty.store(is_faulty, Ordering::Relaxed);
    }

    fn requests(&self) -> usize {
        self.server.requests("/a").len()
    }
}

/// SOURCE with one mirror.
struct Mirrored {
    network: Runtime,
    stats: Arc<Stats>,
    bytes: Vec<u8>,
    source: Mirror,
    mirror: Mirror,
}

impl Mirrored {
    /// Servers of the same bytes with these entity tags and faults.
    fn new(tags: [&str; 2], faults: [Fault; 2]) -> Self {
        let bytes = random_bytes(LEN);
        let mirror = Resource::new(bytes.clone()).etag(tags[1]);
        Self::with_mirror(&bytes, tags[0], faults, mirror)
    }

    fn with_mirror(bytes: &[u8], tag: &str, faults: [Fault; 2], mirror: Resource) -> Self {
        let [source_fault, mirror_fault] = faults;
        Self {
            network: Runtime::new().expect("a runtime"),
            stats: Arc::default(),
            bytes: bytes.to_vec(),
            source: Mirror::start(Resource::new(bytes.to_vec()).etag(tag), source_fault),
            mirror: Mirror::start(mirror, mirror_fault),
        }
    }

    fn options(&self) -> Options {
        Options {
            mirror_urls: vec![self.mirror.url()],
            timeout: Duration::from_secs(20),
            stats: Arc::clone(&self.stats),
            ..Options::default()
        }
    }

    fn open(&self) -> Arc<dyn Source> {
        let url = self.source.url();
        let opening = source::open(&url, self.options());
        self.network.block_on(opening).expect("opened")
    }

    /// Waits until the mirror is open, and compared by samples if `has_samples`.
    fn wait_for_mirror(&self, has_samples: bool) {
        // SOURCE and the mirror have sent their starts, and four samples besides those in there.
        let samples = if has_samples { 4 * (16 << 10) } else { 0 };
        let received = || self.stats.source_read_bytes.get();
        wait_until("the mirror is open", || {
            received() >= 2 * (PREFIX_LEN + samples)
        });
    }

    fn read(&self, source: &Arc<dyn Source>, start: usize, len: usize) -> Result<Bytes, Error> {
        let extent = Extent::with_len(Packed(start as u64), len as u64);
        fetch::read(self.network.handle(), source, extent)
    }

    /// Streams all bytes, and compares them.
    fn assert_streams(&self, source: &Arc<dyn Source>) {
        let config = fetch::Config {
            chunk_len: 1 << 20,
            ..fetch::Config::new(BufferPool::new(32 << 20), Arc::clone(&self.stats))
        };
        let handle = self.network.handle();
        let mut stream = fetch::Stream::start(handle, Arc::clone(source), Packed(0), config);
        let mut all = Vec::new();
        while let Some(chunk) = stream.next().expect("one mirror is well") {
            all.extend_from_slice(&chunk);
        }
        assert!(all == self.bytes, "wrong bytes");
    }
}

const NO_FAULT: Fault = Fault::Late(Duration::ZERO);

// Promises: mirror-choice
#[test]
fn stream_continues_at_a_mirror_when_source_fails() {
    for fault in [
        Fault::HangUp,
        Fault::Reset(100_000),
        Fault::Stall(1000),
        Fault::Status(503),
    ] {
        // On a busy machine the mirror may serve all of a stream from the start.
        let has_switched = (0..10).any(|_| {
            let mirrored = Mirrored::new(["\"1\"", "\"2\""], [fault.clone(), NO_FAULT]);
            let source = mirrored.open();
            mirrored.wait_for_mirror(true);
            mirrored.source.set_faulty(true);
            mirrored.assert_streams(&source);
            assert_eq!(mirrored.stats.source_rejected_mirrors.get(), 0);
            mirrored.stats.source_mirror_switches.get() > 0
        });
        assert!(has_switched, "{fault:?}");
    }
}

// Promises: mirror-choice
#[test]
fn stream_continues_at_source_when_a_mirror_fails() {
    let mirrored = Mirrored::new(["\"1\"", "\"1\""], [NO_FAULT, Fault::Reset(1000)]);
    let source = mirrored.open();
    mirrored.wait_for_mirror(false);
    mirrored.mirror.set_faulty(true);
    mirrored.assert_streams(&source);
}

// Promises: mirror-choice
#[test]
fn slow_mirror_gets_no_reads_after_it_is_measured() {
    // On a busy machine the time of its block may end, after which it gets one read.
    let is_avoided = (0..5).any(|_| {
        let slow = Fault::Paced(16 << 10, Duration::from_millis(20));
        let mirrored = Mirrored::new(["\"1\"", "\"1\""], [slow, NO_FAULT]);
        let source = mirrored.open();
        mirrored.wait_for_mirror(false);
        mirrored.source.set_faulty(true);
        // The speeds are measured.
        mirrored.assert_streams(&source);
        let before = mirrored.source.server.sent_bytes("/a");
        (0..3).for_each(|_| mirrored.assert_streams(&source));
        let slow = mirrored.source.server.sent_bytes("/a") - before;
        slow < LEN as u64 / 10
    });
    assert!(is_avoided, "the slow mirror is read in each of five runs");
}

// Promises: mirror-choice
#[test]
fn failed_mirror_is_not_asked_again_soon() {
    for fault in [Fault::Reset(100_000), Fault::Stall(100_000)] {
        let mirrored = Mirrored::new(["\"1\"", "\"1\""], [NO_FAULT, fault.clone()]);
        let source = mirrored.open();
        mirrored.wait_for_mirror(false);
        mirrored.mirror.set_faulty(true);
        while mirrored.stats.source_mirror_switches.get() == 0 {
            mirrored.assert_streams(&source);
        }
        let before = mirrored.mirror.requests();
        (0..3).for_each(|_| mirrored.assert_streams(&source));
        let asked = mirrored.mirror.requests() - before;
        // On a busy machine, its time ends.
        assert!(asked <= 1, "{fault:?}: {asked}");
    }
}

// Promises: mirror-same
#[test]
fn mirror_with_the_same_entity_tag_is_not_compared() {
    let mirrored = Mirrored::new(["\"1\"", "\"1\""], [Fault::HangUp, NO_FAULT]);
    let source = mirrored.open();
    mirrored.wait_for_mirror(false);
    mirrored.source.set_faulty(true);
    let read = mirrored
        .read(&source, 1 << 20, 100)
        .expect("the mirror has it");
    assert_eq!(read, mirrored.bytes[1 << 20..][..100]);
    let ranges = mirrored.mirror.server.requests("/a");
    let ranges: Vec<_> = ranges.iter().map(|seen| seen.request.range()).collect();
    let start = 1 << 20;
    assert_eq!(ranges, [Some((0, PREFIX_LEN)), Some((start, start + 100))]);
}

// Promises: mirror-same
#[test]
fn mirror_with_other_bytes_is_not_used() {
    let bytes = random_bytes(LEN);
    let mut other = bytes.clone();
    other[LEN / 2] ^= 1;
    for other in [other, bytes[..LEN - 1].to_vec(), random_bytes(LEN + 1)] {
        let other = Resource::new(other).etag("\"2\"");
        let faults = [NO_FAULT, NO_FAULT];
        let mirrored = Mirrored::with_mirror(&bytes, "\"1\"", faults, other);
        let source = mirrored.open();
        wait_until("the mirror is compared", || {
            mirrored.stats.source_rejected_mirrors.get() == 1
        });
        let before = mirrored.mirror.requests();
        mirrored.assert_streams(&source);
        assert_eq!(mirrored.mirror.requests(), before);
    }
}

// Promises: mirror-same
#[test]
fn corrupt_bytes_of_a_mirror_are_read_again_from_source() {
    let bytes = random_bytes(LEN);
    let (start, mut other) = (1_000_000, bytes.clone());
    other[start] ^= 1;
    let other = Resource::new(other).etag("\"2\"");
    let faults = [Fault::HangUp, NO_FAULT];
    let mirrored = Mirrored::with_mirror(&bytes, "\"1\"", faults, other);
    let source = mirrored.open();
    mirrored.wait_for_mirror(true);
    mirrored.source.set_faulty(true);
    let wrong = mirrored
        .read(&source, start, 100)
        .expect("the mirror has it");
    assert_ne!(wrong, bytes[start..start + 100]);
    mirrored.source.set_faulty(false);
    let buffer = BufferPool::new(100).acquire(100).expect("open");
    let is_intact = |read: &[u8]| read == &bytes[start..start + 100];
    let reading = source.read(Packed(start as u64), buffer, ReadMode::Uncached(&is_intact));
    let read = mirrored.network.block_on(reading);
    assert_eq!(read.expect("SOURCE has it"), bytes[start..start + 100]);
    // The mirror that sent them is not used for the next reads.
    let before = mirrored.mirror.requests();
    let read = mirrored.read(&source, start, 100).expect("SOURCE has it");
    assert_eq!(read, bytes[start..start + 100]);
    assert_eq!(mirrored.mirror.requests(), before);
}

/// With SOURCE and two mirrors, of which one has wrong bytes, a read past caches gives the right ones.
// Promises: mirror-same
#[test]
fn intact_bytes_are_read_from_any_server() {
    let (bytes, start) = (random_bytes(LEN), 1_000_000);
    let mut wrong = bytes.clone();
    wrong[start] ^= 1;
    let network = Runtime::new().expect("a runtime");
    // The servers with wrong bytes, and the one that is down.
    for (corrupt, down) in [
        (&[1][..], Some(0)),
        (&[0], None),
        (&[0, 1], None),
        (&[0], Some(1)),
    ] {
        let servers: Vec<Mirror> = (0..3)
            .map(|number| {
                let bytes = if corrupt.contains(&number) {
                    &wrong
                } else {
                    &bytes
                };
                let resource = Resource::new(bytes.clone()).etag("\"1\"");
                Mirror::start(resource, Fault::HangUp)
            })
            .collect();
        let options = Options {
            mirror_urls: vec![servers[1].url(), servers[2].url()],
            ..Options::default()
        };
        let (url, stats) = (servers[0].url(), Arc::clone(&options.stats));
        let opening = source::open(&url, options);
        let source = network.block_on(opening).expect("opened");
        let expected = &bytes[start..start + 100];
        let is_intact = |read: &[u8]| read == expected;
        let read_intact = || {
            let buffer = BufferPool::new(100).acquire(100).expect("open");
            let reading = source.read(Packed(start as u64), buffer, ReadMode::Uncached(&is_intact));
            network
                .block_on(reading)
                .is_ok_and(|read| read == *expected)
        };
        wait_until("all are open", || {
            stats.source_read_bytes.get() >= 3 * PREFIX_LEN && read_intact()
        });
        down.inspect(|&down| servers[down].set_faulty(true));
        assert!(read_intact(), "{corrupt:?}");
        // Those that sent wrong bytes are blocked, also one that was opened too late for the first read past caches. On
        // a busy machine the others may seem silent.
        let is_avoided = (0..10).any(|_| {
            let requests = || -> usize { corrupt.iter().map(|&one| servers[one].requests()).sum() };
            let before = requests();
            let buffer = BufferPool::new(100).acquire(100).expect("open");
            let reading = source.read_at(Packed(start as u64), buffer);
            let read = network.block_on(reading).expect("read");
            let is_right = read == *expected && requests() == before;
            if !is_right {
                read_intact();
            }
            is_right
        });
        assert!(is_avoided, "{corrupt:?}");
    }
}

// Promises: mirror-same
#[test]
fn wrong_bytes_of_all_servers_are_returned() {
    let mirrored = Mirrored::new(["\"1\"", "\"1\""], [NO_FAULT, NO_FAULT]);
    let source = mirrored.open();
    mirrored.wait_for_mirror(false);
    let buffer = BufferPool::new(100).acquire(100).expect("open");
    let reading = source.read(Packed(1 << 20), buffer, ReadMode::Uncached(&|_| false));
    let read = mirrored.network.block_on(reading).expect("read");
    assert_eq!(read, mirrored.bytes[1 << 20..][..100]);
    mirrored.assert_streams(&source);
}

// Promises: mirror-source
#[test]
fn mirror_is_read_if_source_cannot_be_opened() {
    let mirrored = Mirrored::new(["\"1\"", "\"2\""], [Fault::Status(404), NO_FAULT]);
    mirrored.source.set_faulty(true);
    let source = mirrored.open();
    assert_eq!(source.location(), mirrored.source.url());
    mirrored.assert_streams(&source);
}

// Promises: mirror-all-fail
#[test]
fn error_of_source_is_reported_if_all_mirrors_fail() {
    let faults = [Fault::Status(404), Fault::Status(403)];
    let mirrored = Mirrored::new(["\"1\"", "\"2\""], faults);
    mirrored.source.set_faulty(true);
    mirrored.mirror.set_faulty(true);
    let url = mirrored.source.url();
    let opening = source::open(&url, mirrored.options());
    let error = mirrored.network.block_on(opening).expect_err("all fail");
    assert_eq!(error.location, url);
    assert!(
        matches!(error.cause, source::Cause::NotFound),
        "{}",
        error.cause
    );
}

// Promises: mirror-all-fail
#[test]
fn read_fails_in_time_if_all_mirrors_fail() {
    let faults = [Fault::Status(404), Fault::Status(404)];
    let mirrored = Mirrored::new(["\"1\"", "\"1\""], faults);
    let source = mirrored.open();
    mirrored.wait_for_mirror(false);
    mirrored.source.set_faulty(true);
    mirrored.mirror.set_faulty(true);
    let error = mirrored.read(&source, 1 << 20, 100).expect_err("all fail");
    assert!(
        matches!(error.cause, source::Cause::NotFound),
        "{}",
        error.cause
    );
}

// Promises: mirror-source
#[test]
fn headers_are_sent_to_mirrors_of_the_same_host_only() {
    let (server, network) = (Server::start(), Runtime::new().expect("a runtime"));
    let resource = Resource::new(random_bytes(1 << 20)).etag("\"1\"");
    server.serve("/a", resource.clone());
    server.serve("/b", resource.clone());
    server.serve("/c", resource);
    let options = Options {
        identity: Arc::new(Identity {
            headers: vec![("Authorization".to_owned(), "Bearer one".to_owned())],
            ..Identity::default()
        }),
        mirror_urls: vec![server.url("/b"), server.other_url("/c")],
        ..Options::default()
    };
    let url = server.url("/a");
    let source = network
        .block_on(source::open(&url, options))
        .expect("opened");
    wait_until("all are open", || {
        ["/b", "/c"]
            .iter()
            .all(|path| !server.requests(path).is_empty())
    });
    drop(source);
    for (path, expected) in [
        ("/a", Some("Bearer one")),
        ("/b", Some("Bearer one")),
        ("/c", None),
    ] {
        for seen in server.requests(path) {
            assert_eq!(seen.request.header("authorization"), expected, "{path}");
        }
    }
}

// Promises: mirror-source
#[test]
fn published_index_is_read_from_a_mirror() {
    let (source, mirror) = (Server::start(), Server::start());
    let archive = Resource::new(Tree::mixed().tar.clone()).etag("\"1\"");
    source.serve("/a.tar", archive.clone());
    mirror.serve("/a.tar", archive);
    let (url, mirror_url) = (source.url("/a.tar"), mirror.url("/a.tar"));
    let (indexing, place) = (TestDir::new(&[]), TestDir::new(&[]));
    indexing.succeeds(&["index", &url, "--output", "index"]);
    let listed = indexing.succeeds(&["ls", "-R", &url]);
    let index = std::fs::read(indexing.path("index")).expect("written");
    mirror.serve("/a.tar.tarfs", Resource::new(index).etag("\"2\""));
    let list = ["ls", "-R", "--mirror-url", &mirror_url, &url];
    assert_eq!(place.succeeds(&list), listed);
    assert!(!source.requests("/a.tar.tarfs").is_empty());
    assert!(!mirror.requests("/a.tar.tarfs").is_empty());
}

// Promises: mirror-source
#[test]
fn mirrors_are_for_urls_only() {
    let (server, place) = (Server::start(), TestDir::new(&[]));
    server.route("/a", |_| Response::new(404));
    place.put("a.tar", "");
    let url = server.url("/a");
    for (source, mirror, expected) in [
        ("a.tar", &*url, "mirrors and their SOURCE are"),
        (&url, "file:///a.tar", "mirrors and their SOURCE are"),
        (&format!("join:{url},a.tar"), &url, "--mirror-url"),
    ] {
        let words = ["ls", "--retries=0", "--mirror-url", mirror, source];
        let complaint = place.failure_of(64, &words);
        assert!(complaint.contains(expected), "{complaint}");
    }
    for flags in [
        ["--offline", &*format!("join:{url},a.tar")],
        ["--via=nowhere", &*url],
    ] {
        let complaint = place.failure_of(64, &["ls", flags[0], flags[1]]);
        let (flag, _) = flags[0].split_once('=').unwrap_or((flags[0], ""));
        assert!(complaint.contains(flag), "{complaint}");
    }
}
