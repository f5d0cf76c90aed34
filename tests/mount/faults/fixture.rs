//! Fixture for network faults: mounts and `materialize` under faults.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::Advice;
use rustix::io::Errno;

use crate::support::fixture::TestMount;
use crate::support::http::{Fault, Request, Resource, Server};
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::wait::{self, finish_in_time};

pub(super) const PATH: &str = "/archive";

/// The archive's files, each at least one span.
pub(super) const FILES: [&str; 3] = ["first", "second", "third"];
pub(super) const FILE_LEN: usize = 2 << 20;

/// Timeouts in seconds: short for work that must time out, ample for all other work.
pub(super) const SHORT_TIMEOUT_SECONDS: &str = "3";
pub(super) const AMPLE_TIMEOUT_SECONDS: &str = "10";

/// Maximum number of reads that may time out after the server has recovered, because a busy machine
/// is slow.
///
/// Together they take less time than the longest pause that a server asks for, which has expired by
/// then.
const MAX_ATTEMPTS: usize = 3;

/// Offset of the first fault for a mount without an index. Mounting needs only the first member.
const FRONT: u64 = 512 << 10;

/// Time that a mount may take beyond the timeout.
const MOUNTS_SLACK: Duration = Duration::from_secs(5);

/// Extra time for a busy machine. A hanging call takes longer, and so does a wait for a wrong
/// timeout.
const BUSY: Duration = Duration::from_secs(14);

pub(super) fn content(version: u64, number: usize) -> Vec<u8> {
    Rng::new(version * 100 + number as u64).bytes(FILE_LEN)
}

/// The archive with different bytes in each version.
pub(super) fn archive(version: u64) -> Vec<u8> {
    let files = FILES.iter().enumerate();
    let with_files = files.fold(Archive::new(), |archive, (number, name)| {
        archive.file(name, content(version, number))
    });
    with_files.end()
}

pub(super) fn strong() -> Resource {
    Resource::new(archive(1)).etag("\"1\"")
}

/// The expected result of a read: the right bytes or an error.
pub(super) type Read = Result<(), Errno>;

/// The expected result of `materialize`: all files, or an error message that contains these words.
pub(super) type Written = Result<(), &'static str>;

/// The result of `work`, which must end by the deadline.
#[track_caller]
fn run_in_time<T>(timeout: &str, work: impl FnOnce() -> T) -> T {
    let timeout = Duration::from_secs(timeout.parse().expect("a number"));
    let start = Instant::now();
    let result = work();
    let took = start.elapsed();
    let deadline = timeout + MOUNTS_SLACK + BUSY;
    assert!(took < deadline, "took {took:?}, allowed {timeout:?}");
    result
}

/// A server, and a directory with the program's cache.
pub(super) struct ArchiveServer {
    pub(super) server: Server,
}

pub(super) type Place = TestMount<ArchiveServer>;

impl Place {
    pub(super) fn serve(resource: &Resource) -> Self {
        let server = Server::start();
        server.serve(PATH, resource.clone());
        TestMount::with(&["out"], ArchiveServer { server })
    }

    /// Runs the program, which must end in time.
    pub(super) fn run(&self, words: &[&str]) -> Output {
        let mut command = self.command(words);
        finish_in_time(move || command.output().expect("started"))
    }

    #[track_caller]
    pub(super) fn run_ok(&self, words: &[&str]) {
        let output = self.run(words);
        assert!(output.status.success(), "{}", program::stderr_text(&output));
    }

    /// Makes the server apply `faults` to each later request, counted from 1.
    pub(super) fn serve_with_faults(&self, resource: Resource, faults: impl Faults) {
        let count = AtomicUsize::new(0);
        self.server
            .serve_with_faults(PATH, resource, move |request| {
                faults(count.fetch_add(1, Ordering::SeqCst) + 1, request)
            });
    }

    /// Makes the kernel drop the cached pages of a file.
    fn drop_cached_pages(&self, name: &str) {
        let file = File::open(self.path("mnt").join(name)).expect("there");
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).expect("clean pages");
    }

    /// The names in the root.
    fn list(&self) -> io::Result<Vec<String>> {
        let root = self.path("mnt");
        finish_in_time(move || {
            let names = fs::read_dir(root)?.map(|entry| entry.map(|entry| entry.file_name()));
            let names: io::Result<Vec<_>> = names.collect();
            let text = |name: OsString| name.into_string().expect("UTF-8");
            Ok(names?.into_iter().map(text).collect())
        })
    }

    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let path = self.path("mnt").join(name);
        finish_in_time(move || fs::read(path))
    }
}

pub(super) trait Faults:
    Fn(usize, &Request) -> Option<Fault> + Send + Sync + 'static
{
}

impl<F: Fn(usize, &Request) -> Option<Fault> + Send + Sync + 'static> Faults for F {}

/// Reads a file of a mount with a complete index, while requests meet `faults`.
///
/// Afterwards the mount must read normally again.
#[track_caller]
pub(super) fn read_in_warm_mount(
    resource: &Resource,
    timeout: &str,
    faults: impl Faults,
    expected: Read,
) {
    let place = Place::serve(resource);
    let url = place.server.url(PATH);
    place.run_ok(&["index", &url]);
    let words = [
        "mount",
        &url,
        "mnt",
        "--no-disk-cache",
        "--prefetch",
        "none",
    ];
    place.run_ok(&[&words[..], &["--timeout", timeout]].concat());
    place.serve_with_faults(resource.clone(), faults);
    let read = run_in_time(timeout, || place.read("second"));
    match (&read, expected) {
        (Ok(read), Ok(())) => assert!(*read == content(1, 1), "wrong bytes"),
        (Err(error), Err(number)) => {
            assert_eq!(error.raw_os_error(), Some(number.raw_os_error()), "{error}");
            assert!(place.counter("failed_reads") > 0);
        }
        _ => panic!("{:?} instead of {expected:?}", read.map(|read| read.len())),
    }
    place.server.serve(PATH, resource.clone());
    assert!(
        (0..MAX_ATTEMPTS).any(|_| has_recovered(&place)),
        "the mount has not recovered"
    );
    place.run_ok(&["umount", "mnt"]);
    assert_only_gets(&place.server);
}

/// Whether a read of a new file succeeds in time. It may fail only by a timeout.
#[track_caller]
fn has_recovered(place: &Place) -> bool {
    match place.read("third") {
        Ok(read) => {
            assert!(read == content(1, 2), "wrong bytes");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            false
        }
    }
}

/// Reads a file again while requests meet `faults`.
///
/// The file is cached in memory, or on disk if the server names a version, so no request is sent.
#[track_caller]
pub(super) fn read_cached(resource: &Resource, faults: impl Faults + Clone) {
    let places = [(false, "memory_hit_spans"), (true, "disk_cache_hit_spans")];
    let counts = |&(is_on_disk, _): &(bool, &str)| !is_on_disk || resource.has_version();
    for (is_on_disk, found) in places.into_iter().filter(counts) {
        let place = Place::serve(resource);
        let url = place.server.url(PATH);
        place.run_ok(&["index", &url]);
        let cache_flags = if is_on_disk {
            &[][..]
        } else {
            &["--no-disk-cache"]
        };
        let words = [&["mount", &url, "mnt", "--prefetch", "none"], cache_flags].concat();
        place.run_ok(&words);
        assert!(place.read("second").expect("no fault yet") == content(1, 1));
        if is_on_disk {
            // The new mount has no spans in memory.
            place.run_ok(&["umount", "mnt"]);
            place.run_ok(&words);
        }
        let asked = place.server.requests(PATH).len();
        let [failed, hits] = ["failed_reads", found].map(|name| place.counter(name));
        place.serve_with_faults(resource.clone(), faults.clone());
        place.drop_cached_pages("second");
        let start = Instant::now();
        let read = place.read("second").expect("kept");
        let took = start.elapsed();
        assert!(read == content(1, 1), "wrong bytes");
        assert!(took < BUSY, "the read waited: {took:?}");
        // Otherwise the bytes were in another cache, such as the kernel's.
        assert!(place.counter(found) > hits, "not found: {found}");
        assert_eq!(place.counter("failed_reads"), failed);
        assert_eq!(
            place.server.requests(PATH).len(),
            asked,
            "the server was asked"
        );
        place.run_ok(&["umount", "mnt"]);
    }
}

/// Reads a file and lists the root of a mount without an index, while requests meet `faults`.
///
/// Requests for the front of the archive meet none. The faults begin after the mount, because an
/// earlier failure would make the mount itself fail. Afterwards the scan continues if it timed out,
/// and does not continue if it failed.
#[track_caller]
pub(super) fn read_in_cold_mount(
    resource: &Resource,
    timeout: &str,
    faults: impl Faults,
    expected: Read,
) {
    let place = Place::serve(resource);
    let count = AtomicUsize::new(0);
    let is_mounted = Arc::<AtomicBool>::default();
    let may_fail = Arc::clone(&is_mounted);
    let is_of_front = |request: &Request| request.range().is_some_and(|(start, _)| start < FRONT);
    place.serve_with_faults(resource.clone(), move |_, request| {
        if is_of_front(request) {
            return None;
        }
        wait::wait_until("it is mounted", || may_fail.load(Ordering::SeqCst));
        faults(count.fetch_add(1, Ordering::SeqCst) + 1, request)
    });
    let url = place.server.url(PATH);
    let words = ["mount", &url, "mnt", "--chunk-size", "256KiB"];
    place.run_ok(&[&words[..], &["--timeout", timeout]].concat());
    is_mounted.store(true, Ordering::SeqCst);
    let (read, listed) = std::thread::scope(|scope| {
        let read = scope.spawn(|| run_in_time(timeout, || place.read("third")));
        let listed = run_in_time(timeout, || place.list());
        (read.join().expect("in time"), listed)
    });
    let number = |error: io::Error| error.raw_os_error();
    let [read, listed] = [
        read.map(|read| assert!(read == content(1, 2), "wrong bytes")),
        listed.map(|listed| assert_eq!(listed, FILES)),
    ]
    .map(|result| result.map_err(number));
    let told = expected.map_err(|errno| Some(errno.raw_os_error()));
    assert_eq!((read, listed), (told, told));
    place.server.serve(PATH, resource.clone());
    if expected == Err(Errno::TIMEDOUT) {
        wait::wait_until("the scan goes on", || has_recovered(&place));
    }
    place.run_ok(&["umount", "mnt"]);
    assert_only_gets(&place.server);
}

/// Extracts the tree, while all requests but the first meet `faults`.
#[track_caller]
pub(super) fn materialize_tree(
    resource: &Resource,
    timeout: &str,
    faults: impl Faults,
    expected: Written,
) {
    let place = Place::serve(resource);
    place.serve_with_faults(resource.clone(), move |number, request| match number {
        1 => None,
        number => faults(number - 1, request),
    });
    let url = place.server.url(PATH);
    let words = [
        "materialize",
        "-q",
        &url,
        "-C",
        "out",
        "--chunk-size",
        "256KiB",
    ];
    let words = [&words[..], &["--timeout", timeout]].concat();
    let output = run_in_time(timeout, || place.run(&words));
    let told = program::stderr_text(&output);
    for (number, name) in FILES.iter().enumerate() {
        // A failed run may leave the start of a file, but no wrong byte.
        let written = fs::read(place.path("out").join(name)).unwrap_or_default();
        let content = content(1, number);
        assert!(content.starts_with(&written), "wrong bytes in {name}");
        assert!(
            expected.is_err() || written == content,
            "{name} lacks bytes: {told}"
        );
    }
    match expected {
        Ok(()) => assert_eq!((output.status.code(), told.as_str()), (Some(0), "")),
        Err(words) => {
            assert_eq!(output.status.code(), Some(2), "{told}");
            assert!(told.contains(words), "{told}");
        }
    }
    assert_only_gets(&place.server);
}

/// No request uses HEAD, because some servers reject it.
#[track_caller]
fn assert_only_gets(server: &Server) {
    let seen = server.requests(PATH);
    assert!(seen.iter().all(|seen| seen.request.method == "GET"));
}
