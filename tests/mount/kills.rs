//! Processes killed at a random moment: the next run works, and never gives a wrong byte.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::process::Signal;
use tarfs::internal::thread::Thread;

use crate::support::fixture::TestMount;
use crate::support::http::{Fault, Resource, Server};
use crate::support::packing::Packing;
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};
use crate::support::wait;

/// Default number of rounds: three of each kind.
const DEFAULT_ROUNDS: u64 = 18;

/// Number of files. Some lengths span many spans, and some spans hold many files.
const FILES: usize = 60;

/// Number of additional empty files, so that writing the index takes a while.
const EMPTY_FILES: usize = 4000;

/// Bytes that a slow server sends on a connection before each pause.
///
/// Even with all connections, the whole archive takes longer than any process runs. The archive's
/// first file comes soon, because requests are short.
const PIECE_BYTES: usize = 4096;
const PAUSE: Duration = Duration::from_millis(5);
const SOURCE: [&str; 4] = ["--connections", "4", "--chunk-size", "128KiB"];

/// Maximum time until a process is killed.
const MAX_LIFETIME: Duration = Duration::from_millis(250);
/// The same for a process that finds everything in the cache.
const MAX_CACHED_LIFETIME: Duration = Duration::from_millis(40);

/// Maximum number of kills until one leaves an unfinished file.
const ATTEMPTS: usize = 50;

/// Memory budget of each process, and its allowed overhead, including the index.
const MEMORY_MIB: u64 = 32;
const OVERHEAD_MIB: u64 = 64;

const PACKINGS: [Packing; 4] = [
    Packing::Plain,
    Packing::Gzip,
    Packing::Lz4,
    Packing::ZstdFrames,
];

/// Work that a killed process does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Mounting,
    Reading,
    Materializing,
    Indexing,
    SavingIndex,
    SavingDiskCache,
}

const KINDS: [Kind; 6] = [
    Kind::Mounting,
    Kind::Reading,
    Kind::Materializing,
    Kind::Indexing,
    Kind::SavingIndex,
    Kind::SavingDiskCache,
];

fn content(number: usize) -> Vec<u8> {
    let len = match number % 4 {
        0 => 1_000,
        1 => 40_000,
        2 => 120_000,
        _ => 600_000,
    };
    Rng::new(number as u64 + 1).text(len)
}

fn name(number: usize) -> String {
    format!("d{}/f{number}", number / 16)
}

/// A random time below `longest`.
fn below(rng: &mut Rng, longest: Duration) -> Duration {
    let micros = u64::try_from(longest.as_micros()).expect("short");
    Duration::from_micros(rng.below(micros))
}

/// Waits for new entries of a directory.
struct DirectoryWatch(OwnedFd);

impl DirectoryWatch {
    fn new(directory: &Path) -> Self {
        let events = inotify::init(CreateFlags::CLOEXEC).expect("a descriptor");
        inotify::add_watch(&events, directory, WatchFlags::CREATE).expect("there");
        Self(events)
    }

    /// Waits until an entry is created or `victim` has ended. Fails if it hangs.
    fn wait(&self, victim: &mut Child) {
        let start = Instant::now();
        let a_while = Timespec::try_from(Duration::from_millis(20)).expect("short");
        let mut events = [PollFd::new(&self.0, PollFlags::IN)];
        while poll(&mut events, Some(&a_while)) == Ok(0) {
            if victim.try_wait().expect("a child").is_some() {
                return;
            }
            assert!(start.elapsed() < wait::WAIT_TIMEOUT, "nothing is saved");
        }
    }
}

/// Threads that read a mount until they are stopped. Every successful read must be right.
struct Readers {
    is_over: Arc<AtomicBool>,
    /// Number of files that were read.
    reads: Arc<AtomicU64>,
    threads: [Thread<()>; 2],
}

impl Readers {
    fn start(mount: &Path, rng: &mut Rng) -> Self {
        let (is_over, reads) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let threads = [rng.number(), rng.number()].map(|order| {
            let (mount, mut rng) = (mount.to_owned(), Rng::new(order));
            let (is_over, reads) = (Arc::clone(&is_over), Arc::clone(&reads));
            let read = move || {
                // The archive's first file, which is available at once.
                let mut number = 0;
                while !is_over.load(Ordering::SeqCst) {
                    let all = content(number);
                    let offset = usize::try_from(rng.below(all.len() as u64)).expect("small");
                    let expected = all.get(offset..).expect("inside");
                    let mut bytes = vec![0; expected.len()];
                    let file = File::open(mount.join(name(number)));
                    let read = file.and_then(|file| file.read_exact_at(&mut bytes, offset as u64));
                    if read.is_err() {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    assert!(bytes == expected, "{number}");
                    reads.fetch_add(1, Ordering::SeqCst);
                    number = usize::try_from(rng.below(FILES as u64)).expect("small");
                }
            };
            Thread::spawn("reader", read).expect("a thread")
        });
        Self {
            is_over,
            reads,
            threads,
        }
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }

    /// Stops the threads. Returns the number of files that were read.
    fn stop(self) -> u64 {
        self.is_over.store(true, Ordering::SeqCst);
        let Self { reads, threads, .. } = self;
        wait::finish_in_time(move || threads.into_iter().for_each(Thread::join));
        reads.load(Ordering::SeqCst)
    }
}

/// A server, and a directory with a cache that outlives the killed processes.
struct SlowServer {
    server: Server,
    is_slow: Arc<AtomicBool>,
}

type Place = TestMount<SlowServer>;

impl Place {
    fn new() -> Self {
        let plain = (0..FILES).fold(Archive::new(), |archive, number| {
            archive.file(&name(number), content(number))
        });
        let plain = (0..EMPTY_FILES).fold(plain, |archive, number| {
            archive.file(&format!("empty/{number}"), "")
        });
        let plain = Bytes::from(plain.end());
        let server = Server::start();
        let is_slow = Arc::<AtomicBool>::default();
        for packing in PACKINGS {
            let resource = Resource::new(packing.pack(&plain)).etag("\"1\"");
            let is_slow = Arc::clone(&is_slow);
            server.serve_with_faults(&format!("/{packing:?}"), resource, move |_| {
                let is_slow = is_slow.load(Ordering::SeqCst);
                is_slow.then_some(Fault::Paced(PIECE_BYTES, PAUSE))
            });
        }
        TestMount::with(&[], SlowServer { server, is_slow })
    }

    fn url(&self, packing: Packing) -> String {
        self.server.url(&format!("/{packing:?}"))
    }

    /// Starts a process that will be killed.
    fn start(&self, words: &[&str]) -> Child {
        let mut log = OpenOptions::new();
        let log = log.append(true).create(true).open(self.path("log"));
        self.command(words)
            .args(["--memory", &format!("{MEMORY_MIB}MiB")])
            .args(SOURCE)
            .stdout(Stdio::null())
            .stderr(log.expect("ours"))
            .spawn()
            .expect("started")
    }

    fn start_mount(&self, url: &str) -> Child {
        self.start(&["mount", "-f", "--log-file", "log", url, "mnt"])
    }

    /// Arguments that write the tree, without options that only take time.
    fn materialize_words(url: &str) -> [&str; 6] {
        ["materialize", url, "-C", "tree", "--exclude", "empty"]
    }

    /// Removes what was saved so far, and creates a directory for `what`.
    fn clear_and_create(&self, what: &str) -> PathBuf {
        drop(fs::remove_dir_all(self.path("cache")));
        let directory = self.path("cache").join(what);
        let mut maker = DirBuilder::new();
        let maker = maker.mode(0o700).recursive(true);
        maker.create(&directory).expect("made");
        directory
    }

    /// Checks a new mount.
    fn check_mount(&self, packing: Packing) {
        let url = self.url(packing);
        let words = ["mount", "--log-file", "log", &url, "mnt"];
        self.succeeds(&words);
        for number in 0..FILES {
            let read = fs::read(self.mounted(name(number))).expect("readable");
            assert!(read == content(number), "{number}");
        }
        self.umount();
    }

    /// Checks a tree written over the remains of a killed run.
    fn check_tree(&self, packing: Packing) {
        let url = self.url(packing);
        let words = Self::materialize_words(&url);
        self.succeeds(&words);
        for number in 0..FILES {
            let read = fs::read(self.path("tree").join(name(number))).expect("readable");
            assert!(read == content(number), "{number}");
        }
        fs::remove_dir_all(self.path("tree")).expect("removed");
    }

    /// Kills `victim` after a pause, and waits until its mount is gone. Returns whether it was still
    /// running.
    fn kill(&self, mut victim: Child, pause: Duration) -> bool {
        std::thread::sleep(pause);
        if let Some(peak) = program::peak_mib(victim.id()) {
            assert!(peak <= MEMORY_MIB + OVERHEAD_MIB, "{peak} MiB of memory");
        }
        // An error means that it has ended by itself, which its status shows.
        drop(victim.kill());
        let status = victim.wait().expect("a child");
        let was_killed = status.signal() == Some(Signal::KILL.as_raw());
        assert!(was_killed || status.success(), "{status}");
        wait::wait_until("its mount is gone", || !self.is_mounted());
        was_killed
    }

    fn check_log_for_panics(&self) {
        let log = fs::read_to_string(self.path("log")).expect("written");
        let found = log.split_once("panicked");
        assert!(found.is_none(), "{log}");
    }

    /// Kills a process that saves a file in `directory`. Returns whether the file was left unfinished.
    fn kill_while_saving(&self, directory: &str, words: &[&str], pause: Duration) -> bool {
        let directory = self.clear_and_create(directory);
        let watch = DirectoryWatch::new(&directory);
        let mut victim = self.start(words);
        watch.wait(&mut victim);
        let was_killed = self.kill(victim, pause);
        let names = fs::read_dir(directory).expect("there").flatten();
        let mut names = names.map(|entry| entry.file_name());
        was_killed && names.any(|name| name.to_string_lossy().starts_with('.'))
    }
}

/// Results of all rounds.
#[derive(Default, Debug)]
struct Tally {
    rounds: [u64; KINDS.len()],
    /// Number of these whose process was still running.
    kills: [u64; KINDS.len()],
    /// Number of files read from mounts whose processes were killed.
    reads: u64,
}

impl Place {
    /// Kills a process that does a `kind` of work at a random moment. Returns whether it was still
    /// running.
    fn round(&self, kind: Kind, packing: Packing, rng: &mut Rng, reads: &mut u64) -> bool {
        let url = self.url(packing);
        let is_saving = matches!(kind, Kind::SavingIndex | Kind::SavingDiskCache);
        self.is_slow.store(!is_saving, Ordering::SeqCst);
        // With a saved index there is nothing to do.
        let is_new = kind == Kind::Indexing || rng.below(2) == 0;
        if is_new {
            drop(fs::remove_dir_all(self.path("cache")));
        }
        let life = if is_new {
            MAX_LIFETIME
        } else {
            MAX_CACHED_LIFETIME
        };
        let was_killed = match kind {
            Kind::Mounting => self.kill(self.start_mount(&url), below(rng, MAX_CACHED_LIFETIME)),
            Kind::Reading => {
                let mount = self.start_mount(&url);
                wait::wait_until("it is mounted", || self.is_mounted());
                let readers = Readers::start(&self.path("mnt"), rng);
                wait::wait_until("a file is read", || readers.reads() > 0);
                let was_killed = self.kill(mount, below(rng, MAX_LIFETIME));
                *reads += readers.stop();
                was_killed
            }
            Kind::Materializing => {
                fs::create_dir(self.path("tree")).expect("made");
                let words = Self::materialize_words(&url);
                let was_killed = self.kill(self.start(&words), below(rng, life));
                self.is_slow.store(false, Ordering::SeqCst);
                self.check_tree(packing);
                was_killed
            }
            Kind::Indexing => self.kill(self.start(&["index", &url]), below(rng, MAX_LIFETIME)),
            Kind::SavingIndex => (0..ATTEMPTS).any(|_| {
                let pause = below(rng, Duration::from_micros(500));
                self.kill_while_saving("index", &["index", &url], pause)
            }),
            Kind::SavingDiskCache => (0..ATTEMPTS).any(|_| {
                let words = ["mount", "-f", "--log-file", "log", &url, "mnt"];
                self.kill_while_saving("disk-cache", &words, below(rng, MAX_CACHED_LIFETIME))
            }),
        };
        self.is_slow.store(false, Ordering::SeqCst);
        self.check_mount(packing);
        self.check_log_for_panics();
        was_killed
    }
}

// Promises: kill-state
#[test]
#[expect(
    clippy::print_stderr,
    reason = "the rounds of a failure are shown with it, and what all came to"
)]
fn next_start_is_right_after_kill_at_any_moment() {
    let place = Place::new();
    let mut rng = Rng::new(seed());
    let mut tally = Tally::default();
    for (round, (at, kind)) in
        (0..rounds(DEFAULT_ROUNDS)).zip(KINDS.into_iter().enumerate().cycle())
    {
        let packing = PACKINGS[usize::try_from(rng.below(4)).expect("small")];
        eprintln!("round {round}: {kind:?}, {packing:?}");
        tally.rounds[at] += 1;
        let was_killed = place.round(kind, packing, &mut rng, &mut tally.reads);
        tally.kills[at] += u64::from(was_killed);
    }
    eprintln!(
        "of {:?} of each kind {:?} were killed",
        tally.rounds, tally.kills
    );
    // A process that finds everything in the cache may finish early.
    let is_enough = |(rounds, kills)| 2 * kills >= rounds;
    let mut all = tally.rounds.into_iter().zip(tally.kills);
    assert!(
        all.all(is_enough),
        "too few processes were killed: {tally:?}"
    );
    let has_read = tally.reads > 0 || tally.rounds[1] == 0;
    assert!(has_read, "nothing was read: {tally:?}");
}
