//! A mount during the scan of its archive, behind a server that holds the rest back.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Pid, Resource as Limited, Rlimit, Signal, kill_process, prlimit};
use serde_json::Value;
use tarfs::internal::thread::Thread;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Response, Server};
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::sha256::sha256;
use crate::support::wait;

const ARCHIVE: &str = "/archive";

/// Blocks requests until it is opened.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().expect("no panic") = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let is_open = self.is_open.lock().expect("no panic");
        let waited = self
            .opened
            .wait_timeout_while(is_open, wait::WAIT_TIMEOUT, |is_open| !*is_open);
        drop(waited.expect("no panic"));
    }
}

/// Behaviour of the server behind the gate.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Remainder {
    /// The rest of the archive is sent.
    Comes,
    /// An error that is not retried.
    Is404,
    /// A byte now and then, whether the gate is open or not.
    Drips,
    /// Closed connections, until the server works again.
    HangsUp,
}

/// An archive whose first part is served at once, and the rest when the gate opens.
struct GatedServer {
    server: Server,
    gate: Arc<Gate>,
    /// Ends [`Remainder::HangsUp`].
    works: Arc<AtomicBool>,
    /// The whole archive.
    packed: Bytes,
}

type Place = TestMount<GatedServer>;

impl Place {
    fn mounted_at_gate(
        front: Archive,
        rest: impl FnOnce(Archive) -> Archive,
        what: Remainder,
    ) -> Self {
        Self::mounted_with(front, rest, what, &[])
    }

    fn mounted_with(
        front: Archive,
        rest: impl FnOnce(Archive) -> Archive,
        what: Remainder,
        flags: &[&str],
    ) -> Self {
        let place = Self::served(front, rest, what);
        let output = place.mount(flags);
        assert!(output.status.success(), "{}", program::stderr_text(&output));
        place
    }

    /// As [`Self::mounted_with`], but not mounted.
    fn served(front: Archive, rest: impl FnOnce(Archive) -> Archive, what: Remainder) -> Self {
        // Long enough for spans to end before the gate, and for no request to cross it.
        let filler = Rng::new(5).bytes(24 << 20);
        let front = front.file("filler", &filler);
        // Offset of the first byte behind the gate.
        let held_from = (front.clone().unfinished().len() - (4 << 20)) as u64;
        let packed = Bytes::from(rest(front).file("last", "last").end());
        let resource = Resource::new(packed.clone()).etag("\"1\"");
        let (server, gate) = (Server::start(), Arc::<Gate>::default());
        let (held, works) = (Arc::clone(&gate), Arc::<AtomicBool>::default());
        let is_working = Arc::clone(&works);
        server.route(ARCHIVE, move |request| {
            if request.range().is_none_or(|(_, end)| end > held_from) {
                if what == Remainder::Drips {
                    let answer = resource.answer(request);
                    return answer.paced(1, Duration::from_millis(200));
                }
                held.pass();
                if what == Remainder::Is404 {
                    return Response::new(404);
                }
                if what == Remainder::HangsUp && !is_working.load(Ordering::SeqCst) {
                    return Response::hang_up();
                }
            }
            resource.answer(request)
        });
        let opened = Arc::clone(&gate);
        let state = GatedServer {
            server,
            gate,
            works,
            packed,
        };
        TestMount::with(&[], state).before_unmount(move || opened.open())
    }

    fn mount(&self, flags: &[&str]) -> Output {
        let url = self.server.url(ARCHIVE);
        let words = [&["mount", &url, "mnt", "--chunk-size", "256KiB"], flags].concat();
        self.tarfs(&words)
    }

    fn phase(&self) -> String {
        let status = self.status();
        let phase = status.pointer("/index/phase").and_then(Value::as_str);
        phase.expect("a phase").to_owned()
    }

    /// Waits until a counter is at least `least`.
    #[track_caller]
    fn wait_for_count(&self, counter: &str, least: u64) {
        wait::wait_until(counter, || self.counter(counter) >= least);
    }

    /// Waits until the server holds a request back.
    fn wait_for_gate(&self) {
        wait::wait_until("the scan is at the gate", || {
            let mut seen = self.server.requests(ARCHIVE).into_iter();
            seen.any(|seen| seen.status == 0)
        });
    }

    /// Lists the root, which waits for the end of the scan.
    fn list(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("mnt")).expect("a directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names
            .map(|name| name.into_string().expect("UTF-8"))
            .collect()
    }
}

/// Runs `work` on a new thread.
fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Thread<T> {
    Thread::spawn("aside", work).expect("a thread")
}

// Promises: start-answers, scan-answers, scan-grows, scan-waits, check-first-scan
#[test]
fn file_is_readable_before_scan_ends() {
    let content = Rng::new(1).bytes(300_000);
    let front = Archive::new().file("d/early", &content);
    let place = Place::mounted_at_gate(front, |rest| rest.file("d/late", "late"), Remainder::Comes);
    assert!(fs::read(place.path("mnt/d/early")).expect("readable") == content);
    assert_eq!(place.phase(), "scanning");

    let waits = place.counter("scan_waits");
    let (late, listed) = (place.path("mnt/d/late"), place.path("mnt/d"));
    let late = spawn(move || fs::read(late).expect("readable"));
    place.wait_for_count("scan_waits", waits + 1);
    let listed = spawn(move || fs::read_dir(listed).expect("a directory").count());
    place.wait_for_count("scan_waits", waits + 2);
    assert!(!late.is_finished() && !listed.is_finished());
    // Other requests are answered meanwhile.
    let early = fs::symlink_metadata(place.path("mnt/d/early")).expect("known");
    assert_eq!((early.len(), early.ino()), (300_000, 3));
    assert_eq!(place.phase(), "scanning");

    place.gate.open();
    assert_eq!(late.join(), b"late");
    assert_eq!(listed.join(), 2);
    assert_eq!(place.list(), ["d", "filler", "last"]);
    assert_eq!(place.phase(), "complete");
    let missing = fs::read(place.path("mnt/missing")).expect_err("not there");
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    // The index was saved, so the next mount scans nothing.
    assert!(place.tarfs(&["umount", "mnt"]).status.success());
    let url = place.server.url(ARCHIVE);
    assert!(place.tarfs(&["mount", &url, "mnt"]).status.success());
    let scans = place.status();
    assert_eq!(scans.pointer("/counters/scans"), Some(&Value::from(0)));
    assert_eq!(
        scans.pointer("/index/phase"),
        Some(&Value::from("complete"))
    );
}

// Promises: scan-answers, damaged-listed
#[test]
fn mount_waits_for_the_first_member_and_nothing_else() {
    let front = Archive::new().file("early", "early");
    let place = Place::mounted_at_gate(front, |rest| rest, Remainder::Comes);
    // For the first member, and for the event that the scan has ended, for which no thread waits.
    let waits = place.counter("scan_waits");
    assert!(waits <= 2, "{waits}");
    assert_eq!(place.phase(), "scanning");
    let early = fs::read(place.path("mnt/early")).expect("readable");
    assert_eq!(early, b"early");
}

// Promises: scan-pages
#[test]
fn scanned_files_are_in_the_page_cache() {
    let lens = [0, 1, 4096, 5000, 100_000, (2 << 20) + 1, 3 << 20];
    let content = |number: usize| Rng::new(number as u64 + 9).bytes(lens[number]);
    let name = |number| format!("d{}/e/f{number}", number / 4);
    let front = (0..lens.len()).fold(Archive::new(), |front, number| {
        front.file(&name(number), content(number))
    });
    let place = Place::mounted_at_gate(front, |rest| rest, Remainder::Comes);
    if !rustix::process::geteuid().is_root() {
        // The kernel is not primed with names here, and accepts no pages of unknown inodes.
        return;
    }
    // An empty file has no pages.
    place.wait_for_count("pushed_files", lens.len() as u64 - 1);
    assert_eq!(place.phase(), "scanning");
    for number in 0..lens.len() {
        let read = fs::read(place.path("mnt").join(name(number))).expect("readable");
        assert!(read == content(number), "{number} is wrong");
    }
    // A kernel may evict pages at any time, even with free memory.
    let all: usize = lens.iter().sum();
    let served = place.counter("served_bytes");
    assert!(served <= all as u64 / 20, "{served} bytes were asked for");
    assert_eq!(place.phase(), "scanning");
}

// Promises: scan-grows
#[test]
fn open_file_keeps_bytes_if_member_is_replaced() {
    let (old, new) = (Rng::new(1).bytes(100_000), Rng::new(2).bytes(90_000));
    let (front, later) = (Archive::new().file("f", &old), new.clone());
    let place = Place::mounted_at_gate(front, |rest| rest.file("f", later), Remainder::Comes);
    let mut open = File::open(place.path("mnt/f")).expect("there");
    let mut first = vec![0; 1000];
    open.read_exact(&mut first).expect("readable");
    assert!(first == old[..1000]);
    assert_eq!(open.metadata().expect("open").ino(), 2);

    place.gate.open();
    place.list();
    place.wait_for_count("invalidated_inodes", 1);
    // The kernel caches the name for a while.
    wait::wait_until("it is replaced", || {
        fs::read(place.path("mnt/f")).expect("readable") == new
    });
    let replaced = fs::metadata(place.path("mnt/f")).expect("there");
    assert_eq!((replaced.ino(), replaced.len()), (4, 90_000));
    let mut all = Vec::new();
    open.seek(SeekFrom::Start(0)).expect("sought");
    open.read_to_end(&mut all).expect("readable");
    assert!(all == old);
    let unlinked = open.metadata().expect("open");
    assert_eq!((unlinked.ino(), unlinked.nlink()), (2, 0));
}

// Promises: scan-grows
#[test]
fn changes_by_later_members_become_visible_soon() {
    let front = Archive::new().directory("d").file("f", "f");
    let more = |rest: Archive| {
        let rest = rest
            .hard_link("d/g", "f")
            .pax(&[("SCHILY.xattr.user.a", "1")]);
        rest.file("with-xattr", "")
    };
    let place = Place::mounted_at_gate(front, more, Remainder::Comes);
    let stat = |name: &str| fs::symlink_metadata(place.path("mnt").join(name)).expect("there");
    let xattr = |name: &str| {
        let mut value = [0; 8];
        let path = place.path("mnt").join(name);
        rustix::fs::lgetxattr(path, "user.a", &mut value).map(|len| value[..len].to_vec())
    };
    assert_eq!(stat("f").nlink(), 1);
    assert_eq!(xattr("f"), Err(rustix::io::Errno::NODATA));
    assert_eq!(place.phase(), "scanning");
    place.gate.open();
    place.list();
    place.wait_for_count("invalidated_inodes", 1);
    assert_eq!(stat("f").nlink(), 2);
    assert_eq!(stat("d/g").ino(), stat("f").ino());
    assert_eq!(xattr("with-xattr").expect("there"), b"1");
}

// Promises: scan-fails
#[test]
fn failed_scan_keeps_indexed_files() {
    let content = Rng::new(1).bytes(300_000);
    let front = Archive::new().file("early", &content);
    let place = Place::mounted_at_gate(front, |rest| rest.file("late", "late"), Remainder::Is404);
    let (late, waits) = (place.path("mnt/late"), place.counter("scan_waits"));
    let late = spawn(move || fs::read(late));
    place.wait_for_count("scan_waits", waits + 1);
    assert!(!late.is_finished());
    place.gate.open();
    let error = late.join().expect_err("lost");
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert!(fs::read(place.path("mnt/early")).expect("readable") == content);
    let listing = fs::read_dir(place.path("mnt")).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    assert!(listing.is_err(), "a part must not pass for the whole");

    let status = place.status();
    assert_eq!(status.pointer("/index/phase"), Some(&Value::from("failed")));
    let failure = status.pointer("/index/failure").and_then(Value::as_str);
    assert!(failure.expect("why").contains("not found"), "{failure:?}");
    assert!(place.tarfs(&["umount", "mnt"]).status.success());
}

/// Mounts with an expected digest, and opens the gate after the first member and more was fetched. Returns
/// the output, and whether the mount was there before.
fn mount_through_gate(place: &Arc<Place>, digest: &str) -> (Output, bool) {
    let expect = ["--expect-sha256", digest];
    std::thread::scope(|scope| {
        let mounting = scope.spawn(|| place.mount(&expect));
        // Requests may grow, so that one from far before the gate crosses it.
        wait::wait_until("the first member is fetched", || {
            place.server.sent_bytes(ARCHIVE) >= 1 << 20
        });
        // A mount that does not wait would be there by now, because its first member came long ago.
        std::thread::sleep(Duration::from_millis(300));
        let was_early = mounting.is_finished() || place.is_mounted();
        place.gate.open();
        (mounting.join().expect("no panic"), was_early)
    })
}

// Promises: expect-mount
#[test]
fn mount_expecting_digest_shows_nothing_before_match() {
    let content = Rng::new(1).bytes(300_000);
    let served = || {
        let front = Archive::new().directory("d").file("d/early", &content);
        Arc::new(Place::served(front, |rest| rest, Remainder::Comes))
    };
    let place = served();
    let wrong = "5a".repeat(32);
    let (output, was_early) = mount_through_gate(&place, &wrong);
    assert!(!was_early, "a mount of unverified bytes");
    assert_eq!(output.status.code(), Some(2));
    assert!(program::stderr_text(&output).contains(&wrong));
    assert!(!place.is_mounted());

    let right = sha256(&place.packed);
    let place = served();
    let (output, was_early) = mount_through_gate(&place, &right);
    assert!(!was_early, "a mount of unverified bytes");
    assert!(output.status.success(), "{}", program::stderr_text(&output));
    assert!(fs::read(place.path("mnt/d/early")).expect("readable") == content);
    assert!(place.tarfs(&["umount", "mnt"]).status.success());

    // The index was built under this digest.
    let sent = place.server.sent_bytes(ARCHIVE);
    let output = place.mount(&["--expect-sha256", &right]);
    assert!(output.status.success(), "{}", program::stderr_text(&output));
    assert!(
        place.server.sent_bytes(ARCHIVE) - sent < 1 << 20,
        "scanned again"
    );
    assert!(place.tarfs(&["umount", "mnt"]).status.success());
}

// Promises: scan-outage
#[test]
fn unmount_ends_scan_waiting_for_server() {
    let front = Archive::new().file("early", "early");
    let place = Place::mounted_at_gate(front, |rest| rest, Remainder::Comes);
    let (late, waits) = (place.path("mnt/last"), place.counter("scan_waits"));
    let late = spawn(move || fs::read(late).is_err());
    place.wait_for_count("scan_waits", waits + 1);
    let umount = place.tarfs(&["umount", "--lazy", "mnt"]);
    assert!(umount.status.success());
    assert!(late.join());
    assert!(!place.is_mounted());
}

// Promises: caller-killed
#[test]
fn killed_reader_exits_though_server_is_silent() {
    let front = Archive::new().file("early", "early");
    let place = Place::mounted_at_gate(front, |rest| rest.file("late", "late"), Remainder::Comes);
    let waiting = |program: &str, path: &str, counter: &str| {
        let before = place.counter(counter);
        let mut command = Command::new("sh");
        // A test runner in the background may ignore signals.
        let line = format!("ulimit -c 0; exec env --default-signal {program} \"$0\"");
        command.args(["-c", &line]).arg(place.path(path));
        let process = command.stdout(Stdio::null()).spawn().expect("installed");
        place.wait_for_count(counter, before + 1);
        process
    };
    let mut waiting = [
        (waiting("cat", "mnt/late", "scan_waits"), Signal::KILL),
        (waiting("cat", "mnt/last", "scan_waits"), Signal::QUIT),
        (waiting("ls", "mnt", "scan_waits"), Signal::TERM),
        // It may wait for a request of its own.
        (waiting("cat", "mnt/filler", "served_reads"), Signal::KILL),
    ];
    for (process, signal) in &mut waiting {
        assert_eq!(process.try_wait().expect("a child"), None, "waits");
        kill_process(Pid::from_child(process), *signal).expect("running");
    }
    wait::wait_until("they are gone", || {
        let mut ended = waiting.iter_mut().map(|(process, _)| process.try_wait());
        ended.all(|ended| ended.expect("a child").is_some())
    });
    assert_eq!(place.phase(), "scanning");
    assert_eq!(
        fs::read(place.path("mnt/early")).expect("readable"),
        b"early"
    );
    assert!(place.counter("interrupted_requests") >= 3);
    place.gate.open();
    assert_eq!(fs::read(place.path("mnt/late")).expect("readable"), b"late");
}

// Promises: caller-extended
#[test]
fn trickling_server_times_out() {
    let front = Archive::new().file("early", "early");
    let place = Place::mounted_with(front, |rest| rest, Remainder::Drips, &["--timeout", "1"]);
    let late = fs::read(place.path("mnt/last")).expect_err("it never comes");
    assert_eq!(late.kind(), std::io::ErrorKind::TimedOut, "{late}");
    let list = fs::read_dir(place.path("mnt"));
    let list = list.and_then(|mut entries| entries.next().transpose());
    let list = list.expect_err("never whole");
    assert_eq!(list.kind(), std::io::ErrorKind::TimedOut, "{list}");
    let filler = fs::read(place.path("mnt/filler")).expect_err("never whole");
    assert_eq!(filler.kind(), std::io::ErrorKind::TimedOut, "{filler}");
    assert_eq!(place.phase(), "scanning");
    assert!(place.counter("timed_out_requests") >= 2);
}

/// The process is stopped, like a container frozen for a snapshot.
// Promises: caller-timeout
#[test]
fn time_while_stopped_is_not_server_silence() {
    // Stopped for longer than any request may wait, and running for much less.
    let place = Place::mounted_with(
        Archive::new(),
        |rest| rest.file("late", "late"),
        Remainder::Comes,
        &["--timeout", "20"],
    );
    let (pid, waits) = (
        place.server_pid().expect("mounted"),
        place.counter("scan_waits"),
    );
    let late = place.path("mnt/late");
    let late = spawn(move || fs::read(late));
    place.wait_for_count("scan_waits", waits + 1);
    place.wait_for_gate();
    program::stop(pid);
    std::thread::sleep(Duration::from_secs(30));
    kill_process(pid, Signal::CONT).expect("stopped");
    // The process looks at its timers before the server sends more.
    std::thread::sleep(Duration::from_secs(2));
    assert!(!late.is_finished());
    place.gate.open();
    assert_eq!(late.join().expect("in time"), b"late");
    assert_eq!(place.counter("timed_out_requests"), 0);
}

// Promises: memory-files
#[test]
fn scan_resumes_after_a_moment_without_descriptors() {
    let front = Archive::new().file("early", "early");
    let flags = ["--log-file", "log"];
    let rest = |rest: Archive| rest.file("late", "late");
    let place = Place::mounted_with(front, rest, Remainder::HangsUp, &flags);
    let pid = place.status().get("pid").and_then(Value::as_i64);
    let pid = pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let set_limit = |current| {
        let limit = Rlimit {
            current,
            maximum: Some(1 << 10),
        };
        prlimit(pid, Limited::Nofile, limit).expect("running")
    };
    let before = set_limit(Some(3));
    place.gate.open();
    wait::wait_until("the limit is logged", || {
        let log = fs::read_to_string(place.path("log"));
        log.expect("written").contains("Too many open files")
    });
    set_limit(before.current.map(|limit| limit.min(1 << 10)));
    place.works.store(true, Ordering::SeqCst);
    assert_eq!(fs::read(place.path("mnt/late")).expect("there"), b"late");
    assert_eq!(place.list(), ["early", "filler", "late", "last"]);
    assert_eq!(place.phase(), "complete");
}

// Promises: scan-outage
#[test]
fn scan_resumes_when_server_returns_after_deadline() {
    let front = Archive::new().file("early", "early");
    let place = Place::mounted_with(
        front,
        |rest| rest.file("late", "late"),
        Remainder::Comes,
        &["--timeout", "1", "--log-file", "log"],
    );
    let error = fs::read(place.path("mnt/late")).expect_err("nothing comes");
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert_eq!(fs::read(place.path("mnt/early")).expect("known"), b"early");
    place.wait_for_count("source_timeouts", 6);
    assert_eq!(place.phase(), "scanning");
    place.gate.open();
    assert_eq!(fs::read(place.path("mnt/late")).expect("there"), b"late");
    assert_eq!(place.list(), ["early", "filler", "late", "last"]);
    // All timed-out reads share few timeouts of the source. On a busy machine a read may time out just
    // after another one has succeeded.
    let timeouts = place.counter("source_timeouts");
    let log = fs::read_to_string(place.path("log")).expect("written");
    let url = place.server.url(ARCHIVE);
    let lines_with = |what: &str| log.lines().filter(|line| line.contains(what)).count() as u64;
    let troubles = lines_with("; retrying in ") + lines_with("can be read again");
    let warned = lines_with(&format!("WARN cannot read {url}"));
    let mended = lines_with(&format!("INFO {url} can be read again"));
    assert!(warned >= 1 && warned == mended, "{log}");
    assert!(2 * warned <= timeouts, "{timeouts}: {log}");
    assert_eq!(troubles, warned + mended, "{log}");
}
