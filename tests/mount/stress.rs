//! Random stress of mounts: a faulty server, killed readers and servers, and unmounts in use.
//!
//! Reads stay right, and nothing is left at the end.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tarfs::internal::thread::Thread;

use crate::support::fixture::{TestMount, pid_of};
use crate::support::http::{Fault, Request, Resource, Server};
use crate::support::packing::Packing;
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};
use crate::support::wait;

/// Default number of rounds.
const DEFAULT_ROUNDS: u64 = 6;

/// Number of files. Some lengths span many spans, and some spans hold many files.
const FILES: usize = 48;
const LENGTHS: [usize; 4] = [1_000, 40_000, 120_000, 600_000];

const PACKINGS: [Packing; 4] = [
    Packing::Plain,
    Packing::Gzip,
    Packing::Lz4,
    Packing::ZstdFrames,
];

/// Number of concurrent readers.
const READERS: u64 = 4;

/// Memory budget of a mount, and its allowed overhead, including the index.
const MEMORY_MIB: u64 = 32;
const OVERHEAD_MIB: u64 = 64;

/// Time after which an operation hangs.
///
/// The timeout of a read is four seconds, and five more since the last progress. Both count twice if
/// another process continues after a restart, which must first be noticed. With a shorter timeout, a
/// busy machine would look like a faulty server.
const HANG_TIMEOUT: Duration = Duration::from_secs(45);

/// Length of an outage that exceeds every timeout, in seconds, and the maximum of random extra
/// seconds.
const OUTAGE_SECONDS: u64 = 10;
const MAX_EXTRA_OUTAGE_SECONDS: u64 = 4;

/// Errors of reads while the server is faulty.
const SERVER_ERRORS: [Errno; 4] = [Errno::IO, Errno::TIMEDOUT, Errno::STALE, Errno::ACCESS];

/// Further errors of any operation while a mount appears or disappears.
const MOUNT_CHANGE_ERRORS: [Errno; 5] = [
    Errno::NOENT,
    Errno::NOTCONN,
    Errno::CONNABORTED,
    Errno::NODEV,
    Errno::INTR,
];

fn content(number: usize) -> Vec<u8> {
    let len = LENGTHS.iter().cycle().nth(number).expect("endless");
    Rng::new(number as u64 + 1).text(*len)
}

fn name(number: usize) -> String {
    format!("d{}/f{number}", number / 16)
}

fn below(rng: &mut Rng, end: usize) -> usize {
    usize::try_from(rng.below(end as u64)).expect("small")
}

/// A random one of `choices`.
fn pick<T: Copy>(rng: &mut Rng, choices: &[T]) -> T {
    let number = below(rng, choices.len());
    *choices.get(number).expect("some")
}

/// The fault of a request to a faulty server.
fn fault(rng: &mut Rng, request: &Request, other: &Resource) -> Option<Fault> {
    let place = below(rng, 300_000);
    let millis = Duration::from_millis(rng.below(30));
    Some(match rng.below(30) {
        0 => Fault::Late(millis * 10),
        1 => Fault::Paced(place / 8 + 1, millis),
        2 => Fault::Status(pick(rng, &[500, 502, 503])),
        3 => Fault::Status(pick(rng, &[401, 403, 404, 412])),
        4 => Fault::Busy(503, "0".to_owned()),
        // Below the timeout, and above it.
        5 => Fault::Busy(429, pick(rng, &["1", "5"]).to_owned()),
        6 => Fault::HangUp,
        7 | 8 => Fault::Reset(place),
        9 | 10 => Fault::Short(place),
        11 => Fault::Silence,
        12 => Fault::Stall(place),
        13 => Fault::OtherRange,
        14 => Fault::Unsatisfiable,
        15 => Fault::Gzip,
        // A client that opens the archive gets the first version, so that readers know the right
        // bytes.
        16 if request.header("if-match").is_some() => Fault::Other(other.clone()),
        _ => return None,
    })
}

/// State of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ServerState {
    Well,
    InTrouble,
    Gone,
}

/// State shared by the readers and the threads that disturb them.
struct Shared {
    mount: PathBuf,
    contents: Vec<Vec<u8>>,
    is_over: AtomicBool,
    /// Odd while the mount is certainly there. Each mount has another number.
    era: AtomicU64,
    /// Whether nothing has disturbed the mount, so that no operation may fail.
    is_sound: AtomicBool,
    began: Instant,
    /// Start of each reader's current operation, in milliseconds.
    starts: Vec<AtomicU64>,
    reads: AtomicU64,
    /// Number of reads that had no reason to fail.
    sound_reads: AtomicU64,
    failures: AtomicU64,
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).expect("soon")
    }

    /// Does random operations until the end. Each gives the right result or an allowed error.
    fn run_reader(&self, reader: usize, mut rng: Rng) {
        let start = self.starts.get(reader).expect("one for each");
        while !self.is_over.load(Ordering::SeqCst) {
            start.store(self.now(), Ordering::SeqCst);
            let era = self.era.load(Ordering::SeqCst);
            let was_sound = self.is_sound.load(Ordering::SeqCst);
            let number = below(&mut rng, FILES);
            let done = match rng.below(8) {
                0 => self.list(number),
                1 => self.stat(number),
                _ => self.read(number, &mut rng),
            };
            // In this order, because the mount is marked as disturbed before another era begins.
            let is_sound = was_sound && self.is_sound.load(Ordering::SeqCst);
            let is_steady = era % 2 == 1 && era == self.era.load(Ordering::SeqCst);
            let is_sound = is_sound && is_steady;
            self.reads.fetch_add(1, Ordering::SeqCst);
            self.sound_reads
                .fetch_add(u64::from(is_sound), Ordering::SeqCst);
            match done {
                Ok(is_right) => assert!(is_right || !is_steady, "wrong: {number}"),
                Err(error) => {
                    self.failures.fetch_add(1, Ordering::SeqCst);
                    let may_be = |errnos: &[Errno]| {
                        let mut errnos = errnos.iter().map(|errno| Some(errno.raw_os_error()));
                        errnos.any(|errno| errno == error.raw_os_error())
                    };
                    let may_be =
                        may_be(&SERVER_ERRORS) || (!is_steady && may_be(&MOUNT_CHANGE_ERRORS));
                    assert!(may_be, "{number}: {error}, steady: {is_steady}");
                    assert!(!is_sound, "{number}: {error}, without any trouble");
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        }
    }

    fn content(&self, number: usize) -> &[u8] {
        self.contents.get(number).expect("known")
    }

    /// Reads a file. The bytes must be right in every state.
    fn read(&self, number: usize, rng: &mut Rng) -> io::Result<bool> {
        let all = self.content(number);
        let offset = below(rng, all.len());
        let len = 1 + below(rng, all.len() - offset);
        let mut bytes = vec![0; len];
        let file = with_hang_check(|| File::open(self.mount.join(name(number))))?;
        let mut filled = 0;
        while filled < len {
            let rest = bytes.get_mut(filled..).expect("inside");
            let read = with_hang_check(|| file.read_at(rest, (offset + filled) as u64))?;
            assert!(read > 0, "it ends too early: {number}");
            filled += read;
        }
        let right = all.get(offset..offset + len);
        assert!(right == Some(&bytes[..]), "wrong bytes: {number}");
        Ok(true)
    }

    fn stat(&self, number: usize) -> io::Result<bool> {
        let found = with_hang_check(|| fs::metadata(self.mount.join(name(number))))?;
        Ok(found.len() == self.content(number).len() as u64)
    }

    fn list(&self, number: usize) -> io::Result<bool> {
        let directory = self.mount.join(format!("d{}", number / 16));
        let names = with_hang_check(|| fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>())?;
        Ok(names.len() == 16)
    }

    fn check_for_hangs(&self) {
        let now = self.now();
        for start in &self.starts {
            let since = now.saturating_sub(start.load(Ordering::SeqCst));
            assert!(
                u128::from(since) < HANG_TIMEOUT.as_millis(),
                "a reader hangs"
            );
        }
    }
}

/// Runs an operation, which must not hang.
fn with_hang_check<T>(operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let start = Instant::now();
    let done = operation();
    let took = start.elapsed();
    assert!(took < HANG_TIMEOUT, "it took {took:?}");
    done
}

/// Stops the readers when dropped, also when a round fails, because the test waits for them.
struct StopOnDrop<'a>(&'a Shared);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
    }
}

/// A server, and a directory with a cache that outlives all mounts.
struct Place {
    server: Server,
    server_state: Arc<Mutex<ServerState>>,
    fixture: TestMount,
    shared: Arc<Shared>,
}

impl Place {
    fn new() -> Self {
        let archive = |version: usize| {
            let files = (0..FILES).fold(Archive::new(), |archive, number| {
                archive.file(&name(number), content(number + version * FILES))
            });
            Bytes::from(files.end())
        };
        let [first, second] = [0, 1].map(archive);
        let server = Server::start();
        let server_state = Arc::new(Mutex::new(ServerState::Well));
        for packing in PACKINGS {
            let resource = Resource::new(packing.pack(&first)).etag("\"1\"");
            let other = Resource::new(packing.pack(&second)).etag("\"2\"");
            let (server_state, rng) = (Arc::clone(&server_state), Mutex::new(Rng::new(seed())));
            let path = format!("/{packing:?}");
            server.serve_with_faults(&path, resource, move |request| {
                match *server_state.lock().expect("whole") {
                    ServerState::Well => None,
                    ServerState::InTrouble => {
                        fault(&mut rng.lock().expect("whole"), request, &other)
                    }
                    ServerState::Gone => Some(Fault::HangUp),
                }
            });
        }
        let fixture = TestMount::new(&[]);
        let shared = Shared {
            mount: fixture.path("mnt"),
            contents: (0..FILES).map(content).collect(),
            is_over: AtomicBool::new(false),
            era: AtomicU64::new(0),
            is_sound: AtomicBool::new(false),
            began: Instant::now(),
            starts: (0..READERS).map(|_| AtomicU64::new(0)).collect(),
            reads: AtomicU64::new(0),
            sound_reads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        };
        Self {
            server,
            server_state,
            fixture,
            shared: Arc::new(shared),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.fixture.path(name)
    }

    fn set_server_state(&self, server_state: ServerState) {
        if server_state != ServerState::Well {
            self.shared.is_sound.store(false, Ordering::SeqCst);
        }
        *self.server_state.lock().expect("whole") = server_state;
    }

    /// Runs the program, which must end.
    fn tarfs(&self, words: &[&str]) -> Output {
        let mut command = self.fixture.command(words);
        wait::finish_in_time(move || command.output().expect("started"))
    }

    /// Mounts. This may fail while the server is faulty.
    fn mount(&self, packing: Packing, flags: &[&str]) {
        let url = self.server.url(&format!("/{packing:?}"));
        let memory = format!("{MEMORY_MIB}MiB");
        let words = ["mount", "--timeout", "4", "--memory", &memory, &url, "mnt"];
        let log = ["--log-file", "log"];
        let output = self.tarfs(&[&words[..], &log, flags].concat());
        let is_well = *self.server_state.lock().expect("whole") == ServerState::Well;
        let told = program::stderr_text(&output);
        assert!(output.status.success() || !is_well, "{told}");
        assert!(!told.contains("panicked"), "{told}");
        if output.status.success() {
            self.shared.is_sound.store(is_well, Ordering::SeqCst);
            self.shared.era.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// From now on, operations may fail because the mount changes.
    fn expect_mount_errors(&self) {
        self.shared.is_sound.store(false, Ordering::SeqCst);
        self.shared
            .era
            .fetch_add(self.shared.era.load(Ordering::SeqCst) % 2, Ordering::SeqCst);
    }

    fn status(&self) -> Option<Value> {
        let output = self.tarfs(&["status", "mnt", "--json"]);
        serde_json::from_slice(&output.stdout).ok()
    }

    fn daemon(&self) -> Option<Pid> {
        pid_of(&self.status()?)
    }

    /// Asserts that process `pid` never exceeded its memory limit, if it still runs.
    fn check_peak(pid: Pid) {
        let pid = u32::try_from(pid.as_raw_pid()).expect("positive");
        if let Some(peak) = program::peak_mib(pid) {
            assert!(peak <= MEMORY_MIB + OVERHEAD_MIB, "{peak} MiB of memory");
        }
    }

    /// Unmounts, even while the mount is in use.
    fn unmount(&self, is_lazy: bool) {
        self.expect_mount_errors();
        self.daemon().into_iter().for_each(Self::check_peak);
        if !is_lazy {
            // This fails while the mount is in use.
            self.tarfs(&["umount", "mnt"]);
        }
        if self.fixture.is_mounted() {
            self.tarfs(&["umount", "--lazy", "mnt"]);
        }
        assert!(!self.fixture.is_mounted(), "it cannot be unmounted");
    }

    /// Kills the serving process. If the mount `restarts`, waits for its successor.
    fn kill(&self, restarts: bool) {
        if restarts {
            // Otherwise the successor would retry the server for a minute.
            self.set_server_state(ServerState::Well);
        }
        let Some(before) = self.daemon() else { return };
        self.expect_mount_errors();
        Self::check_peak(before);
        kill_process(before, Signal::KILL).expect("running");
        if restarts {
            wait::wait_until("a successor serves the mount", || {
                self.daemon().is_some_and(|now| now != before)
            });
            self.shared.era.fetch_add(1, Ordering::SeqCst);
        } else {
            wait::wait_until("the mount is unmounted", || !self.fixture.is_mounted());
        }
    }

    /// Starts another process that reads, kills it, and waits for its end.
    fn kill_a_reader(&self, rng: &mut Rng) {
        let path = self.path("mnt").join(name(below(rng, FILES)));
        let mut reader: Child = Command::new("cat")
            .arg(path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        reader.kill().expect("a child");
        wait::wait_until("a killed reader is gone", || {
            reader.try_wait().expect("a child").is_some()
        });
    }

    /// Waits until the mount is idle, and reports what is still in use.
    fn check_idle(&self) {
        let used = || {
            let status = self.status()?;
            let of = |name: &str| status.pointer(&format!("/memory/{name}"))?.as_u64();
            Some(of("reads_bytes")? + of("decoders_bytes")?)
        };
        wait::wait_until("all memory is given back", || used() == Some(0));
        Self::check_peak(self.daemon().expect("mounted"));
    }

    /// A panicked worker is replaced, and so is the process, so only the log shows a panic.
    fn check_log_for_panics(&self) {
        let log = fs::read_to_string(self.path("log")).expect("written");
        let found = log.split_once("panicked");
        assert!(found.is_none(), "{log}");
    }

    /// Processes of the program that belong to this test.
    fn processes(&self) -> Vec<String> {
        let place = self.fixture.root().as_os_str().as_encoded_bytes();
        let is_ours = |process: &Path| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            environment
                .windows(place.len())
                .any(|window| window == place)
        };
        let all = fs::read_dir("/proc").expect("readable").flatten();
        all.map(|entry| entry.path())
            .filter(|process| is_ours(process))
            .map(|process| process.display().to_string())
            .collect()
    }

    fn round(&self, packing: Packing, rng: &mut Rng) {
        let restarts = rng.below(2) == 0;
        let mut flags = Vec::new();
        flags.extend(restarts.then_some("--restart"));
        flags.extend((rng.below(2) == 0).then_some("--no-disk-cache"));
        if rng.below(2) == 0 {
            // Without the cache of earlier rounds.
            drop(fs::remove_dir_all(self.path("cache")));
        }
        if rng.below(3) == 0 {
            self.set_server_state(ServerState::InTrouble);
        }
        self.mount(packing, &flags);
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(rng.below(150)));
            let action = rng.below(8);
            match action {
                0..3 => self.set_server_state(ServerState::InTrouble),
                3 => self.set_server_state(ServerState::Well),
                4 => self.set_server_state(ServerState::Gone),
                5 => self.kill_a_reader(rng),
                6 => self.kill(restarts),
                _ => self.unmount(rng.below(2) == 0),
            }
            if !self.fixture.is_mounted() {
                self.expect_mount_errors();
                self.mount(packing, &flags);
            }
            self.shared.check_for_hangs();
        }
        // Only in long runs, because this takes long.
        if rounds(DEFAULT_ROUNDS) > DEFAULT_ROUNDS && rng.below(5) == 0 {
            self.set_server_state(pick(rng, &[ServerState::InTrouble, ServerState::Gone]));
            for _ in 0..OUTAGE_SECONDS + rng.below(MAX_EXTRA_OUTAGE_SECONDS) {
                std::thread::sleep(Duration::from_secs(1));
                self.shared.check_for_hangs();
            }
        }
        self.set_server_state(ServerState::Well);
        if !self.fixture.is_mounted() {
            self.expect_mount_errors();
            self.mount(packing, &flags);
        }
    }

    /// Reads everything. Every successful read must be right.
    fn read_all(&self) -> io::Result<()> {
        for number in 0..FILES {
            let path = self.path("mnt").join(name(number));
            let read = wait::finish_in_time(move || fs::read(path))?;
            assert!(read == self.shared.content(number), "wrong: {number}");
        }
        Ok(())
    }

    /// Checks that the mount is idle and shows everything after the faults.
    ///
    /// If its scan has failed for good, a new mount must. Then no process may be left.
    fn check_after_recovery(&self, packing: Packing) {
        self.check_idle();
        if let Err(error) = self.read_all() {
            let status = self.status().expect("mounted");
            let phase = status.pointer("/index/phase").and_then(Value::as_str);
            assert_eq!(phase, Some("failed"), "{error}, and all is well: {status}");
            self.unmount(false);
            self.mount(packing, &[]);
            self.read_all().expect("all is well");
            self.check_idle();
        }
        self.unmount(false);
        wait::wait_until("no process is left", || self.processes().is_empty());
        self.check_log_for_panics();
    }
}

// Promises: kill-faults, kill-names
#[test]
#[expect(
    clippy::print_stderr,
    reason = "the rounds of a failure are shown with it, and what all came to"
)]
fn mounts_under_random_faults_are_right_and_leave_nothing() {
    let place = Place::new();
    let mut rng = Rng::new(seed());
    let (mut reads, mut sound_reads, mut failures) = (0, 0, 0);
    for round in 0..rounds(DEFAULT_ROUNDS) {
        let packing = pick(&mut rng, &PACKINGS);
        eprintln!("round {round}: {packing:?}");
        let shared = &place.shared;
        shared.is_over.store(false, Ordering::SeqCst);
        let readers: Vec<Thread<()>> = (0..READERS)
            .map(|reader| {
                let order = Rng::new(rng.number());
                let shared = Arc::clone(shared);
                let number = usize::try_from(reader).expect("small");
                let read = move || shared.run_reader(number, order);
                Thread::spawn("reader", read).expect("a thread")
            })
            .collect();
        let over = StopOnDrop(shared);
        place.round(packing, &mut rng);
        drop(over);
        wait::finish_in_time(move || readers.into_iter().for_each(Thread::join));
        place.check_after_recovery(packing);
        reads = shared.reads.load(Ordering::SeqCst);
        sound_reads = shared.sound_reads.load(Ordering::SeqCst);
        failures = shared.failures.load(Ordering::SeqCst);
    }
    eprintln!("of {reads} operations {failures} failed as they may, and {sound_reads} could not");
    assert!(sound_reads > 0, "there was always some trouble");
    assert!(reads > failures && failures > 0, "chance had no say");
}
