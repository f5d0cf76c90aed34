//! Mounts that survive the death of their serving process.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::process::{Signal, kill_process};

use tarfs::internal::thread::Thread;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::wait;

const ARCHIVE: &str = "/archive";

/// Number of files in the archive.
const FILES: usize = 40;

/// A mounted archive behind a server that can be silenced.
struct SilentServer {
    server: Server,
    is_silent: Arc<AtomicBool>,
}

type Place = TestMount<SilentServer>;

fn name(number: usize) -> String {
    format!("d{}/f{number}", number % 7)
}

fn content(number: usize) -> Vec<u8> {
    Rng::new(number as u64 + 1).bytes(300_000)
}

fn archive(changed: bool) -> Vec<u8> {
    let archive = (0..FILES).fold(Archive::new(), |archive, number| {
        archive.file(&name(number), content(number))
    });
    archive
        .file("last", if changed { "new" } else { "old" })
        .end()
}

impl Place {
    /// Mounts the archive with `flags`.
    fn mounted_with(flags: &[&str]) -> Self {
        let state = SilentServer {
            server: Server::start(),
            is_silent: Arc::default(),
        };
        let place = TestMount::with(&[], state);
        place.serve(Resource::new(archive(false)).etag("\"1\""));
        let url = place.server.url(ARCHIVE);
        // A fixed size, because the free space of the disk varies.
        let words = [
            "mount",
            "--log-file",
            "log",
            "--cache-size",
            "1GiB",
            &url,
            "mnt",
        ];
        place.succeeds(&[&words, flags].concat());
        place
    }

    fn serve(&self, resource: Resource) {
        let is_silent = Arc::clone(&self.is_silent);
        self.server.route(ARCHIVE, move |request| {
            let answer = resource.answer(request);
            if is_silent.load(Ordering::SeqCst) {
                return answer.stall_after(0);
            }
            answer
        });
    }

    /// Kills the serving process, and waits for its successor.
    fn kill(&self) {
        let before = self.server_pid().expect("mounted");
        kill_process(before, Signal::KILL).expect("running");
        wait::wait_until("another process serves the mount", || {
            self.server_pid().is_some_and(|now| now != before)
        });
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

// Promises: restart-continues
#[test]
fn open_files_stay_open_after_worker_restart() {
    let place = Place::mounted_with(&["--restart"]);
    place.wait_until_index_is_saved();
    let mut open = File::open(place.path("mnt").join(name(3))).expect("there");
    let mut first = vec![0; 1000];
    open.read_exact(&mut first).expect("readable");
    let standing = File::open(place.path("mnt/d5")).expect("there");
    let numbers = || {
        let all = (0..FILES).map(|number| fs::metadata(place.path("mnt").join(name(number))));
        all.map(|found| found.expect("there").ino())
            .collect::<Vec<_>>()
    };
    let before = numbers();
    for _ in 0..3 {
        place.kill();
        let mut rest = Vec::new();
        open.seek(SeekFrom::Start(0)).expect("sought");
        open.read_to_end(&mut rest).expect("readable");
        assert!(rest == content(3));
        assert_eq!(numbers(), before);
        for number in 0..FILES {
            let read = fs::read(place.path("mnt").join(name(number))).expect("readable");
            assert!(read == content(number), "{number}");
        }
        assert_eq!(standing.metadata().expect("open").ino(), before[5] - 1);
    }
    drop((open, standing));
    let output = place.tarfs(&["umount", "mnt"]);
    assert!(output.status.success(), "{}", program::stderr_text(&output));
    assert!(!place.is_mounted());
}

// Promises: profile-record
#[test]
fn access_log_survives_worker_restart() {
    let place = Place::mounted_with(&["--restart", "--record", "profile"]);
    place.wait_until_index_is_saved();
    let read = |number| fs::read(place.path("mnt").join(name(number))).expect("readable");
    let recorded = || fs::read_to_string(place.path("profile")).unwrap_or_default();
    let is_recorded = |number: usize| recorded().contains(&format!("{}\n", name(number)));
    read(3);
    wait::wait_until("it is recorded", || is_recorded(3));
    place.kill();
    read(4);
    wait::wait_until("that is recorded, too", || is_recorded(4));
    assert!(is_recorded(3), "{}", recorded());
}

// Promises: restart-continues
#[test]
fn waiting_reads_are_answered_after_worker_restart() {
    // Without a disk cache and prefetching, nothing is cached.
    let place = Place::mounted_with(&["--restart", "--no-disk-cache", "--prefetch", "none"]);
    place.wait_until_index_is_saved();
    place.kill();
    place.is_silent.store(true, Ordering::SeqCst);
    let asked = place.server.requests(ARCHIVE).len();
    let files: Vec<_> = [2, 17, 33]
        .map(|number| (number, place.path("mnt").join(name(number))))
        .into_iter()
        .map(|(number, path)| {
            let read = move || {
                let file = File::open(path).expect("there");
                let mut bytes = vec![0; 300_000];
                file.read_exact_at(&mut bytes, 0).expect("readable");
                assert!(bytes == content(number), "{number}");
            };
            Thread::spawn("reader", read).expect("a thread")
        })
        .collect();
    wait::wait_until("they wait", || {
        place.server.requests(ARCHIVE).len() >= asked + files.len()
    });
    assert!(files.iter().all(|file| !file.is_finished()));
    let before = place.server_pid().expect("mounted");
    kill_process(before, Signal::KILL).expect("running");
    place.is_silent.store(false, Ordering::SeqCst);
    for file in files {
        file.join();
    }
    assert_ne!(place.server_pid(), Some(before));
}

// Promises: restart-continues
#[test]
fn worker_killed_while_scanning_is_restarted() {
    let place = Place::mounted_with(&["--restart"]);
    // At any stage.
    place.kill();
    for number in 0..FILES {
        let read = fs::read(place.path("mnt").join(name(number))).expect("readable");
        assert!(read == content(number), "{number}");
    }
    let listed = fs::read_dir(place.path("mnt"))
        .expect("a directory")
        .count();
    assert_eq!(listed, 8);
}

// Promises: restart-continues, restart-new-mount
#[test]
fn relative_paths_mean_the_same_after_restart() {
    let place = TestMount::new(&[]);
    place.put("a.tar", archive(false));
    // The successor resumes the same connection. If the kernel reads the copy itself, a new mount
    // replaces it.
    for more in [&[][..], &["--copy-to", "copy"]] {
        place.succeeds(&[&["mount", "--restart", "a.tar", "mnt"], more].concat());
        let open = File::open(place.mounted("d5")).expect("there");
        let before = place.server_pid().expect("mounted");
        kill_process(before, Signal::KILL).expect("running");
        wait::wait_until("another process serves the mount", || {
            place.server_pid().is_some_and(|now| now != before)
        });
        let read = fs::read(place.mounted(name(3))).expect("readable");
        assert!(read == content(3));
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        let is_lost = statx(&open, "", flags, StatxFlags::BASIC_STATS).is_err();
        assert_eq!(is_lost, !more.is_empty());
        drop(open);
        place.umount();
    }
}

// Promises: restart-gives-up
#[test]
fn restart_rejects_another_version() {
    let place = Place::mounted_with(&["--restart"]);
    place.wait_until_index_is_saved();
    place.serve(Resource::new(archive(true)).etag("\"2\""));
    let before = place.server_pid().expect("mounted");
    kill_process(before, Signal::KILL).expect("running");
    wait::wait_until("it is told", || {
        place.log().contains("has changed since it was mounted")
    });
    assert!(place.server_pid().is_none());
    // There is no successor. Requests wait for the end of the attempts, or fail.
    place.tarfs(&["umount", "--lazy", "mnt"]);
    assert!(!place.is_mounted());
}

// Promises: restart-outage
#[test]
fn restarted_worker_serves_cache_without_source() {
    let place = Place::mounted_with(&["--restart"]);
    place.wait_until_index_is_saved();
    place.is_silent.store(true, Ordering::SeqCst);
    place.kill();
    for number in 0..FILES {
        let read = fs::read(place.path("mnt").join(name(number))).expect("readable");
        assert!(read == content(number), "{number}");
    }
    place.is_silent.store(false, Ordering::SeqCst);
}

// Promises: restart-outage
#[test]
fn restarted_worker_reads_uncached_once_source_is_back() {
    let place = Place::mounted_with(&["--restart", "--no-disk-cache", "--prefetch", "none"]);
    place.wait_until_index_is_saved();
    place.is_silent.store(true, Ordering::SeqCst);
    place.kill();
    let asked = place.server.requests(ARCHIVE).len();
    let path = place.path("mnt").join(name(5));
    let read = Thread::spawn("reader", move || fs::read(path).expect("readable"));
    wait::wait_until("the source is asked", || {
        place.server.requests(ARCHIVE).len() > asked
    });
    place.is_silent.store(false, Ordering::SeqCst);
    assert!(read.expect("a thread").join() == content(5));
}

// Promises: restart-outage
#[test]
fn restarted_worker_rejects_other_version_of_returned_source() {
    let place = Place::mounted_with(&["--restart", "--no-disk-cache", "--prefetch", "none"]);
    place.wait_until_index_is_saved();
    place.is_silent.store(true, Ordering::SeqCst);
    place.kill();
    place.serve(Resource::new(archive(true)).etag("\"2\""));
    place.is_silent.store(false, Ordering::SeqCst);
    let error = fs::read(place.path("mnt").join(name(5))).expect_err("another version");
    assert_eq!(error.kind(), std::io::ErrorKind::StaleNetworkFileHandle);
}

// Promises: restart-outage
#[test]
fn source_outage_does_not_count_towards_restart_timeout() {
    let place = Place::mounted_with(&["--restart", "--restart-timeout", "5", "--timeout", "2"]);
    place.wait_until_index_is_saved();
    let mut open = File::open(place.path("mnt").join(name(3))).expect("there");
    fs::remove_dir_all(place.path("cache")).expect("there");
    place.is_silent.store(true, Ordering::SeqCst);
    let before = place.server_pid().expect("mounted");
    let asked = place.server.requests(ARCHIVE).len();
    kill_process(before, Signal::KILL).expect("running");
    let read = Thread::spawn("reader", move || {
        let mut bytes = Vec::new();
        open.read_to_end(&mut bytes).map(|_| bytes)
    });
    // Each request waits for two seconds, and three of them for longer than the timeout.
    wait::wait_until("the source is asked again and again", || {
        place.server.requests(ARCHIVE).len() >= asked + 4
    });
    place.is_silent.store(false, Ordering::SeqCst);
    let read = read.expect("a thread").join();
    assert!(read.expect("readable") == content(3));
    let told = "does not count against --restart-timeout";
    assert!(place.log().contains(told), "{}", place.log());
}

// Promises: restart-gives-up
#[test]
fn scan_longer_than_restart_timeout_loses_the_mount() {
    let place = Place::mounted_with(&["--restart", "--restart-timeout", "1"]);
    place.wait_until_index_is_saved();
    fs::remove_dir_all(place.path("cache")).expect("there");
    let resource = Resource::new(archive(false)).etag("\"1\"");
    place.server.route(ARCHIVE, move |request| {
        let pause = std::time::Duration::from_millis(50);
        resource.answer(request).paced(1 << 10, pause)
    });
    let before = place.server_pid().expect("mounted");
    kill_process(before, Signal::KILL).expect("running");
    wait::wait_until("it is unmounted", || !place.is_mounted());
}
