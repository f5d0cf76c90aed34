//! The ways in which a fault is met: by mounts and by `materialize`.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::Advice;
use rustix::io::Errno;
use rustix::process::Pid;
use serde_json::Value;

use crate::support::http::{Fault, Request, Resource, Server};
use crate::support::mounts::is_mounted;
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::wait::{self, finish_in_time};

pub(super) const PATH: &str = "/archive";

/// The archive's files, each a span or more.
pub(super) const FILES: [&str; 3] = ["first", "second", "third"];
pub(super) const FILE_LEN: usize = 2 << 20;

/// Seconds: what is expected to end by the deadline has not much time, everything else has plenty.
pub(super) const SHORT_TIMEOUT_SECONDS: &str = "3";
pub(super) const AMPLE_TIMEOUT_SECONDS: &str = "10";

/// How often a read may wait in vain for a server that is well again: a busy machine needs its time. So
/// often in less than the longest pause that a server asks for in vain, which is forgotten by then.
const MAX_ATTEMPTS: usize = 3;

/// Where faults begin for a mount without an index, which is there once its first member is.
const FRONT: u64 = 512 << 10;

/// What a mount gives who waits beyond that.
const MOUNTS_SLACK: Duration = Duration::from_secs(5);

/// What a busy machine needs on top. What hangs takes longer, and so does who waits for a deadline
/// that is not the one that was asked for.
const BUSY: Duration = Duration::from_secs(14);

pub(super) fn content(version: u64, number: usize) -> Vec<u8> {
    Rng::new(version * 100 + number as u64).bytes(FILE_LEN)
}

/// The archive with other bytes in each version.
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

/// What a reader gets: the bytes, or an error.
pub(super) type Read = Result<(), Errno>;

/// What `materialize` does: everything, or nothing but a complaint in which these words are.
pub(super) type Written = Result<(), &'static str>;

/// What `work` comes to, which ends by the deadline.
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

/// A server and a directory with the program's cache.
pub(super) struct Place {
    pub(super) server: Server,
    pub(super) directory: tempfile::TempDir,
}

impl Place {
    pub(super) fn new(resource: &Resource) -> Self {
        let server = Server::start();
        server.serve(PATH, resource.clone());
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["mnt", "out"] {
            fs::create_dir(directory.path().join(name)).expect("made");
        }
        Self { server, directory }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs the program, which has to end.
    pub(super) fn tarfs(&self, words: &[&str]) -> Output {
        let directory = self.directory.path().to_owned();
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        finish_in_time(move || {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            program::tarfs(&directory, &words)
        })
    }

    #[track_caller]
    pub(super) fn succeeds(&self, words: &[&str]) -> Output {
        let output = self.tarfs(words);
        assert!(output.status.success(), "{}", program::stderr_text(&output));
        output
    }

    /// From now on, request after request, counted from 1 on, meets with what `faults` says.
    pub(super) fn serve_with_faults(&self, resource: Resource, faults: impl Faults) {
        let count = AtomicUsize::new(0);
        self.server
            .serve_with_faults(PATH, resource, move |request| {
                faults(count.fetch_add(1, Ordering::SeqCst) + 1, request)
            });
    }

    /// Has the kernel forget what it holds of a file.
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

    fn status(&self) -> Value {
        let text = self.succeeds(&["status", "mnt", "--json"]).stdout;
        serde_json::from_slice(&text).expect("one mount")
    }

    pub(super) fn counter(&self, name: &str) -> u64 {
        let status = self.status();
        let counter = status.pointer(&format!("/counters/{name}"));
        counter.and_then(Value::as_u64).expect("a counter")
    }

    /// Who serves the mount.
    pub(super) fn server_pid(&self) -> Pid {
        let status = self.status();
        let pid = status.get("pid").and_then(Value::as_i64);
        let pid = pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        pid.expect("a number")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if is_mounted(&self.path("mnt")) {
            program::tarfs(self.directory.path(), &["umount", "--lazy", "mnt"]);
        }
    }
}

pub(super) trait Faults:
    Fn(usize, &Request) -> Option<Fault> + Send + Sync + 'static
{
}

impl<F: Fn(usize, &Request) -> Option<Fault> + Send + Sync + 'static> Faults for F {}

/// Reads a file of a mount, with an index that is there already, while requests meet with `faults`;
/// afterwards the mount reads as ever.
#[track_caller]
pub(super) fn read_in_warm_mount(
    resource: &Resource,
    timeout: &str,
    faults: impl Faults,
    expected: Read,
) {
    let place = Place::new(resource);
    let url = place.server.url(PATH);
    place.succeeds(&["index", &url]);
    let words = [
        "mount",
        &url,
        "mnt",
        "--no-disk-cache",
        "--prefetch",
        "none",
    ];
    place.succeeds(&[&words[..], &["--timeout", timeout]].concat());
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
        "the mount does not go on"
    );
    place.succeeds(&["umount", "mnt"]);
    assert_only_gets(&place.server);
}

/// Whether a file that was not read before comes, and in time; it may fail by nothing else.
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

/// Reads a file once more that was read before, while requests meet with `faults`. It is in memory, or
/// in a spool if the server names a version, and the server is not asked for it.
#[track_caller]
pub(super) fn read_cached(resource: &Resource, faults: impl Faults + Clone) {
    let places = [(false, "memory_hit_spans"), (true, "disk_cache_hit_spans")];
    let counts = |&(is_spooled, _): &(bool, &str)| !is_spooled || resource.has_version();
    for (is_spooled, found) in places.into_iter().filter(counts) {
        let place = Place::new(resource);
        let url = place.server.url(PATH);
        place.succeeds(&["index", &url]);
        let keeping = if is_spooled {
            &[][..]
        } else {
            &["--no-disk-cache"]
        };
        let words = [&["mount", &url, "mnt", "--prefetch", "none"], keeping].concat();
        place.succeeds(&words);
        assert!(place.read("second").expect("no fault yet") == content(1, 1));
        if is_spooled {
            // The next one has nothing in memory.
            place.succeeds(&["umount", "mnt"]);
            place.succeeds(&words);
        }
        let asked = place.server.requests(PATH).len();
        let [failed, hits] = ["failed_reads", found].map(|name| place.counter(name));
        place.serve_with_faults(resource.clone(), faults.clone());
        place.drop_cached_pages("second");
        let start = Instant::now();
        let read = place.read("second").expect("kept");
        let took = start.elapsed();
        assert!(read == content(1, 1), "wrong bytes");
        assert!(took < BUSY, "somebody was waited for: {took:?}");
        // Or it was the kernel that had it, or somebody else.
        assert!(place.counter(found) > hits, "not found: {found}");
        assert_eq!(place.counter("failed_reads"), failed);
        assert_eq!(
            place.server.requests(PATH).len(),
            asked,
            "the server was asked"
        );
        place.succeeds(&["umount", "mnt"]);
    }
}

/// Mounts without an index, reads a file further back and lists the root, while all requests but those
/// for the front of the archive meet with `faults`. They wait until it is mounted: before that, what
/// fails is the mount. Afterwards it scans on if it waited in vain, and never if it failed.
#[track_caller]
pub(super) fn read_in_cold_mount(
    resource: &Resource,
    timeout: &str,
    faults: impl Faults,
    expected: Read,
) {
    let place = Place::new(resource);
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
    place.succeeds(&[&words[..], &["--timeout", timeout]].concat());
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
    place.succeeds(&["umount", "mnt"]);
    assert_only_gets(&place.server);
}

/// Writes the tree while all requests but the first meet with `faults`.
#[track_caller]
pub(super) fn materialize_tree(
    resource: &Resource,
    timeout: &str,
    faults: impl Faults,
    expected: Written,
) {
    let place = Place::new(resource);
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
    let output = run_in_time(timeout, || place.tarfs(&words));
    let told = program::stderr_text(&output);
    for (number, name) in FILES.iter().enumerate() {
        // What failed may have left the front of a file, and no byte that is not of it.
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

/// HEAD is refused by this server, so that nobody relies on it; nobody does.
#[track_caller]
fn assert_only_gets(server: &Server) {
    let seen = server.requests(PATH);
    assert!(seen.iter().all(|seen| seen.request.method == "GET"));
}
