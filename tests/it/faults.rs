//! Faults of the network, one by one, each met by a read in a real mount and by `materialize`: right
//! bytes or an error that says why, and both in time. The table in docs/semantics.md is made of these.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use serde_json::Value;

use crate::support::http::{Fault, Request, Resource, Server};
use crate::support::mounts::is_mounted;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::wait::ends;

const PATH: &str = "/archive";

/// The archive's files, each a span or more.
const FILES: [&str; 3] = ["first", "second", "third"];
const FILE_LEN: usize = 2 << 20;

/// Seconds: what is expected to end by the deadline has not much time, everything else has plenty.
const SHORT: &str = "1";
const AMPLE: &str = "4";

fn content(version: u64, number: usize) -> Vec<u8> {
    Noise::new(version * 100 + number as u64).bytes(FILE_LEN)
}

/// The archive with other bytes in each version.
fn archive(version: u64) -> Vec<u8> {
    let files = FILES.iter().enumerate();
    let with_files = files.fold(Archive::new(), |archive, (number, name)| {
        archive.file(name, content(version, number))
    });
    with_files.end()
}

fn strong() -> Resource {
    Resource::new(archive(1)).etag("\"1\"")
}

/// What a reader gets: the bytes, or an error.
type Read = Result<(), Errno>;

/// What `materialize` does: everything, or nothing but a complaint in which these words are.
type Written = Result<(), &'static str>;

/// A server and a directory with the program's cache.
struct Place {
    server: Server,
    directory: tempfile::TempDir,
}

impl Place {
    fn new(resource: &Resource) -> Self {
        let server = Server::start();
        server.serve(PATH, resource.clone());
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["mnt", "out"] {
            fs::create_dir(directory.path().join(name)).expect("made");
        }
        Self { server, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs the program, which has to end.
    fn tarfs(&self, words: &[&str]) -> Output {
        let directory = self.directory.path().to_owned();
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        ends(move || {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            program::tarfs(&directory, &words)
        })
    }

    #[track_caller]
    fn succeeds(&self, words: &[&str]) -> Output {
        let output = self.tarfs(words);
        assert!(output.status.success(), "{}", program::told(&output));
        output
    }

    /// From now on, request after request, counted from 1 on, meets with what `faults` says.
    fn disturb(&self, resource: Resource, faults: impl Faults) {
        let count = AtomicUsize::new(0);
        self.server.serve_badly(PATH, resource, move |request| {
            faults(count.fetch_add(1, Ordering::SeqCst) + 1, request)
        });
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let path = self.path("mnt").join(name);
        ends(move || fs::read(path))
    }

    fn counter(&self, name: &str) -> u64 {
        let text = self.succeeds(&["status", "mnt", "--json"]).stdout;
        let status: Value = serde_json::from_slice(&text).expect("one mount");
        let counter = status.pointer(&format!("/counters/{name}"));
        counter.and_then(Value::as_u64).expect("a counter")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if is_mounted(&self.path("mnt")) {
            program::tarfs(self.directory.path(), &["umount", "--lazy", "mnt"]);
        }
    }
}

trait Faults: Fn(usize, &Request) -> Option<Fault> + Send + Sync + 'static {}

impl<F: Fn(usize, &Request) -> Option<Fault> + Send + Sync + 'static> Faults for F {}

/// Reads a file of a mount, with an index that is there already, while requests meet with `faults`;
/// afterwards the mount reads as ever.
#[track_caller]
fn read_in_a_mount(resource: &Resource, timeout: &str, faults: impl Faults, expected: Read) {
    let place = Place::new(resource);
    let url = place.server.url(PATH);
    place.succeeds(&["index", &url]);
    let words = ["mount", &url, "mnt", "--no-spool", "--prefetch", "none"];
    place.succeeds(&[&words[..], &["--timeout", timeout]].concat());
    place.disturb(resource.clone(), faults);
    let read = place.read("second");
    match (&read, expected) {
        (Ok(read), Ok(())) => assert!(*read == content(1, 1), "wrong bytes"),
        (Err(error), Err(number)) => {
            assert_eq!(error.raw_os_error(), Some(number.raw_os_error()), "{error}");
            assert!(place.counter("failed_reads") > 0);
        }
        _ => panic!("{:?} instead of {expected:?}", read.map(|read| read.len())),
    }
    place.server.serve(PATH, resource.clone());
    let later = place.read("third").expect("the mount goes on");
    assert!(later == content(1, 2), "wrong bytes");
    place.succeeds(&["umount", "mnt"]);
    assert_only_gets(&place.server);
}

/// Writes the tree while all requests but the first meet with `faults`.
#[track_caller]
fn write_the_tree(resource: &Resource, timeout: &str, faults: impl Faults, expected: Written) {
    let place = Place::new(resource);
    place.disturb(resource.clone(), move |number, request| match number {
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
    let output = place.tarfs(&[&words[..], &["--timeout", timeout]].concat());
    let told = program::told(&output);
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
    let seen = server.seen(PATH);
    assert!(seen.iter().all(|seen| seen.request.method == "GET"));
}

/// Both.
#[track_caller]
fn both(timeout: &str, faults: impl Faults + Clone, read: Read, written: Written) {
    std::thread::scope(|scope| {
        let of_mount = faults.clone();
        scope.spawn(|| read_in_a_mount(&strong(), timeout, of_mount, read));
        write_the_tree(&strong(), timeout, faults, written);
    });
}

/// The first few requests meet with `fault`.
fn at_first(count: usize, fault: Fault) -> impl Faults + Clone {
    move |number, _: &Request| (number <= count).then(|| fault.clone())
}

fn always(fault: Fault) -> impl Faults + Clone {
    at_first(usize::MAX, fault)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
fn late_answers_are_waited_for() {
    both(AMPLE, always(Fault::Late(millis(100))), Ok(()), Ok(()));
}

#[test]
fn slow_and_steady_connections_are_waited_for() {
    let fault = Fault::Paced(32 << 10, millis(10));
    both(AMPLE, always(fault), Ok(()), Ok(()));
}

#[test]
fn drops_do_not_count_as_bytes() {
    let fault = Fault::Paced(1, millis(100));
    both(
        SHORT,
        always(fault),
        Err(Errno::TIMEDOUT),
        Err("next to nothing comes"),
    );
}

#[test]
fn an_error_of_the_server_is_met_with_repeats() {
    both(AMPLE, at_first(3, Fault::Status(500)), Ok(()), Ok(()));
    both(
        AMPLE,
        always(Fault::Status(500)),
        Err(Errno::IO),
        Err("status 500"),
    );
}

#[test]
fn an_outage_is_waited_for_until_the_deadline() {
    both(AMPLE, at_first(5, Fault::Status(502)), Ok(()), Ok(()));
    both(
        SHORT,
        always(Fault::Status(503)),
        Err(Errno::TIMEDOUT),
        Err("status 503"),
    );
}

#[test]
fn a_server_that_asks_for_a_pause_gets_it_unless_it_is_longer_than_the_deadline() {
    let fault = Fault::Busy(503, "1".to_owned());
    both(AMPLE, at_first(2, fault), Ok(()), Ok(()));
    let fault = Fault::Busy(429, "3600".to_owned());
    both(
        AMPLE,
        always(fault),
        Err(Errno::TIMEDOUT),
        Err("left alone for 3600 s"),
    );
}

#[test]
fn connections_that_are_reset_anywhere_cost_nothing_but_time() {
    let cuts = |number: usize, _: &Request| Some(Fault::Reset(number * 7_919 % 200_000 + 70_000));
    both(AMPLE, cuts, Ok(()), Ok(()));
    both(AMPLE, at_first(5, Fault::Reset(1)), Ok(()), Ok(()));
}

#[test]
fn a_server_that_is_gone_is_waited_for_until_the_deadline() {
    both(AMPLE, at_first(5, Fault::HangUp), Ok(()), Ok(()));
    both(
        SHORT,
        always(Fault::HangUp),
        Err(Errno::TIMEDOUT),
        Err("the connection broke"),
    );
}

#[test]
fn short_bodies_are_completed() {
    let cuts = |number: usize, _: &Request| Some(Fault::Short(number * 104_729 % 200_000 + 70_000));
    both(AMPLE, cuts, Ok(()), Ok(()));
    both(
        AMPLE,
        always(Fault::Short(0)),
        Err(Errno::IO),
        Err("it ends before its length"),
    );
}

#[test]
fn silence_ends_by_the_deadline() {
    both(AMPLE, at_first(1, Fault::Silence), Ok(()), Ok(()));
    both(
        SHORT,
        always(Fault::Silence),
        Err(Errno::TIMEDOUT),
        Err("the server is silent"),
    );
}

#[test]
fn a_stall_in_the_middle_ends_by_the_deadline() {
    both(AMPLE, at_first(1, Fault::Stall(50_000)), Ok(()), Ok(()));
    both(
        SHORT,
        always(Fault::Stall(0)),
        Err(Errno::TIMEDOUT),
        Err("the server is silent"),
    );
}

#[test]
fn another_range_is_never_taken_for_the_one_that_was_asked_for() {
    both(AMPLE, at_first(2, Fault::OtherRange), Ok(()), Ok(()));
    both(
        AMPLE,
        always(Fault::OtherRange),
        Err(Errno::IO),
        Err("the server sends bytes"),
    );
}

#[test]
fn everything_is_never_taken_for_a_part() {
    both(AMPLE, at_first(2, Fault::Whole), Ok(()), Ok(()));
    let told = "stopped answering with ranges";
    both(AMPLE, always(Fault::Whole), Err(Errno::IO), Err(told));
}

#[test]
fn a_range_that_is_denied_is_asked_for_again() {
    both(AMPLE, at_first(2, Fault::Unsatisfiable), Ok(()), Ok(()));
    let told = "refuses a range inside its length";
    both(
        AMPLE,
        always(Fault::Unsatisfiable),
        Err(Errno::IO),
        Err(told),
    );
}

#[test]
fn a_server_without_head_is_as_good_as_any() {
    both(AMPLE, |_: usize, _: &Request| None, Ok(()), Ok(()));
}

#[test]
fn bodies_in_chunks_are_as_good_as_any() {
    both(AMPLE, always(Fault::Chunked), Ok(()), Ok(()));
}

#[test]
fn wrapped_bytes_are_never_taken_for_bytes() {
    both(AMPLE, at_first(2, Fault::Gzip), Ok(()), Ok(()));
    let told = "Content-Encoding: gzip";
    both(AMPLE, always(Fault::Gzip), Err(Errno::IO), Err(told));
}

#[test]
fn access_that_is_refused_in_the_midst_is_said_to_be() {
    for status in [401, 403] {
        let fault = always(Fault::Status(status));
        both(AMPLE, fault, Err(Errno::ACCESS), Err("refuses access"));
    }
    for status in [404, 410] {
        both(
            AMPLE,
            always(Fault::Status(status)),
            Err(Errno::STALE),
            Err("not found"),
        );
    }
}

/// Both with a server that has other bytes in the midst.
#[track_caller]
fn changed(before: &Resource, after: Resource, read: Read, written: Written) {
    let after = Arc::new(after);
    let late = move |number: usize, _: &Request| {
        (number > 2).then(|| Fault::Other(Resource::clone(&after)))
    };
    let at_once = late.clone();
    let at_once = move |number: usize, request: &Request| at_once(number + 2, request);
    read_in_a_mount(before, AMPLE, at_once, read);
    write_the_tree(before, AMPLE, late, written);
}

#[test]
fn a_version_that_changes_in_the_midst_is_never_mixed_in() {
    let other = || Resource::new(archive(2));
    let told = "changed since it was opened";
    let is_stale = |before: &Resource, after: Resource| {
        changed(before, after, Err(Errno::STALE), Err(told));
    };
    is_stale(&strong(), other().etag("\"2\""));
    is_stale(&strong(), other());
    let weak = |tag: &str| Resource::new(archive(1)).etag(tag);
    is_stale(&weak("W/\"1\""), other().etag("W/\"2\""));
    let longer = [archive(2), vec![0; 512]].concat();
    is_stale(&Resource::new(archive(1)), Resource::new(longer));
    // The same version in two nodes.
    changed(&strong(), strong(), Ok(()), Ok(()));
    changed(&weak("W/\"1\""), weak("W/\"1\""), Ok(()), Ok(()));
}

/// Where nothing tells versions apart, the archive's own checksums do, and the index's.
#[test]
fn other_bytes_of_a_server_that_names_no_versions_are_damage() {
    let [before, after] = [1, 2].map(|version| Packing::Lz4.pack(&archive(version).into()));
    assert_eq!(before.len(), after.len(), "or the length would tell");
    let [before, after] = [before, after].map(Resource::new);
    let faults = move |_: usize, _: &Request| Some(Fault::Other(after.clone()));
    read_in_a_mount(&before, AMPLE, faults.clone(), Err(Errno::IO));
    let place = Place::new(&before);
    place.disturb(before, move |number, request| {
        (number > 1).then(|| faults(number, request)).flatten()
    });
    let url = place.server.url(PATH);
    let output = place.tarfs(&["materialize", "-q", &url, "-C", "out", "--atomic"]);
    let told = program::told(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("checksum"), "{told}");
    let written = fs::read_dir(place.path("out")).expect("there").count();
    assert_eq!(written, 0, "nothing of a mixture appears");
}

/// What a server that knows no ranges sends, broken off at `cut`.
fn read_once(resource: Resource, cut: usize) -> (Place, Output) {
    let place = Place::new(&resource);
    place.disturb(resource.without_ranges(), move |number, _| {
        (number == 1).then_some(Fault::Short(cut))
    });
    let url = place.server.url(PATH);
    let output = place.tarfs(&["mount", &url, "mnt", "--timeout", AMPLE]);
    (place, output)
}

#[test]
fn a_server_without_ranges_is_read_from_the_front_and_again_when_it_breaks_off() {
    let cut = 3_000_000;
    let (place, output) = read_once(strong(), cut);
    assert!(output.status.success(), "{}", program::told(&output));
    for (number, name) in FILES.iter().enumerate() {
        assert!(place.read(name).expect("readable") == content(1, number));
    }
    assert_eq!(place.server.seen(PATH).len(), 2);
    assert_eq!(place.counter("source_retries"), 1);
    // What may be another version is not taken for the rest.
    let (place, output) = read_once(Resource::new(archive(1)), cut);
    assert!(output.status.success(), "{}", program::told(&output));
    assert!(place.read("first").expect("readable") == content(1, 0));
    let error = place.read("third").expect_err("never came");
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));

    for (resource, expected) in [
        (strong(), Ok(())),
        (Resource::new(archive(1)), Err("cannot read")),
    ] {
        let place = Place::new(&resource);
        place.disturb(resource.without_ranges(), move |number, _| {
            (number == 1).then_some(Fault::Short(cut))
        });
        let output = place.tarfs(&["materialize", "-q", &place.server.url(PATH), "-C", "out"]);
        let told = program::told(&output);
        assert_eq!(output.status.success(), expected.is_ok(), "{told}");
        assert!(told.contains(expected.err().unwrap_or_default()), "{told}");
        for (number, name) in FILES.iter().enumerate() {
            let written = fs::read(place.path("out").join(name)).unwrap_or_default();
            assert!(
                content(1, number).starts_with(&written),
                "wrong bytes in {name}"
            );
            assert!(expected.is_err() || written.len() == FILE_LEN);
        }
    }
}

#[test]
fn another_host_gets_bytes_to_send_and_no_secrets() {
    let place = Place::new(&strong());
    place.server.serve("/elsewhere", strong());
    let elsewhere = place.server.other_url("/elsewhere");
    place.disturb(strong(), move |_, _| {
        Some(Fault::Redirect(elsewhere.clone()))
    });
    let url = place
        .server
        .url(PATH)
        .replace("http://", "http://me:secret@");
    let header = ["--header", "X-Key: secret"];
    place.succeeds(&[&["index", &url][..], &header].concat());
    place.succeeds(&[&["mount", &url, "mnt"][..], &header].concat());
    assert!(place.read("second").expect("readable") == content(1, 1));
    place.succeeds(&[&["materialize", "-q", &url, "-C", "out"][..], &header].concat());
    let written = fs::read(place.path("out/third")).expect("there");
    assert!(written == content(1, 2));
    for seen in place.server.seen(PATH) {
        assert_eq!(seen.request.header("x-key"), Some("secret"));
        assert!(seen.request.header("authorization").is_some());
    }
    let seen = place.server.seen("/elsewhere");
    assert!(seen.len() > 3);
    for seen in seen {
        for name in ["x-key", "authorization", "cookie", "referer"] {
            assert_eq!(seen.request.header(name), None);
        }
    }
}

#[test]
fn retries_are_as_many_as_are_asked_for() {
    for (words, requests) in [
        (&[][..], 5),
        (&["--retries", "0"][..], 1),
        (&["--retries", "2"][..], 3),
    ] {
        let place = Place::new(&strong());
        place.disturb(strong(), always(Fault::Status(503)));
        let url = place.server.url(PATH);
        let output = place.tarfs(&[&["ls", &url][..], words].concat());
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(place.server.seen(PATH).len(), requests, "{words:?}");
    }
}
