//! Unmounting while readers wait for a server in read(2), long before their timeout.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::every_request;
use super::fixture::{PATH, Place, content, strong};
use crate::support::fixture;
use crate::support::http::Fault;
use crate::support::mounts::is_mounted;
use crate::support::program;
use crate::support::wait::{self, process_exits};

/// Much less than the minute for which the readers would wait.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(30);

const READ: [(&str, usize); 2] = [("second", 1), ("third", 2)];

/// A mount with an index and no disk cache, and two readers that wait because of a fault.
struct BlockedReaders {
    place: Place,
    readers: Vec<Child>,
    server: Pid,
    /// The processes that serve and keep the mount.
    processes: Vec<OwnedFd>,
}

impl BlockedReaders {
    fn on_server(fault: Fault) -> Self {
        let place = Place::serve(&strong());
        let url = place.server.url(PATH);
        place.run_ok(&["index", &url]);
        let words = ["mount", "--isolated", &url, "mnt", "--timeout", "60"];
        place.run_ok(&[&words[..], &["--no-disk-cache", "--prefetch", "none"]].concat());
        let status = place.try_status().expect("mounted");
        let server = fixture::pid_of(&status).expect("a number");
        let processes = [server, fixture::monitor_of(&status).expect("a number")];
        let handle = |pid| pidfd_open(pid, PidfdFlags::empty()).expect("running");
        let processes = processes.into_iter().map(handle).collect();
        place.serve_with_faults(strong(), every_request(fault));
        let asked = place.server.requests(PATH).len();
        let reader = |(name, _)| {
            let mut command = Command::new("cat");
            command.arg(place.mounted(name));
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("installed")
        };
        let readers: Vec<Child> = READ.map(reader).into();
        for (reader, (name, _)) in readers.iter().zip(READ) {
            wait::wait_until("it has its file open", || {
                has_open(reader, &place.mounted(name))
            });
        }
        wait::wait_until("they wait", || place.server.requests(PATH).len() > asked);
        let mut waiting = Self {
            place,
            readers,
            server,
            processes,
        };
        assert!(waiting.are_all_blocked());
        waiting
    }

    /// Whether no reader has ended after another 300 ms.
    fn are_all_blocked(&mut self) -> bool {
        std::thread::sleep(Duration::from_millis(300));
        let mut readers = self.readers.iter_mut();
        readers.all(|reader| reader.try_wait().expect("a child").is_none())
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.server, signal).expect("running");
    }

    /// Runs `unmount`. All processes must end soon, and the readers with an error.
    #[track_caller]
    fn assert_ended_by(mut self, what: &str, unmount: impl FnOnce(&Self)) {
        let start = Instant::now();
        unmount(&self);
        for reader in self.readers.drain(..) {
            let output = wait::finish_in_time(move || reader.wait_with_output().expect("a child"));
            assert!(!output.status.success(), "{what}: nothing came");
        }
        for process in &self.processes {
            assert!(process_exits(process), "{what}");
        }
        let took = start.elapsed();
        assert!(took < UNMOUNT_TIMEOUT, "{what}: {took:?}");
        assert!(!self.place.is_mounted(), "{what}");
    }
}

/// Whether a process has the file at `path` open.
fn has_open(process: &Child, path: &Path) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.id()));
    let mut descriptors = descriptors.into_iter().flatten().flatten();
    descriptors.any(|link| fs::read_link(link.path()).is_ok_and(|file| file == path))
}

impl Drop for BlockedReaders {
    fn drop(&mut self) {
        for reader in &mut self.readers {
            // An error means that the reader has ended.
            drop(reader.kill());
            drop(reader.wait());
        }
    }
}

fn silent() -> BlockedReaders {
    BlockedReaders::on_server(Fault::Silence)
}

/// Detaches the mount while it is in use, with `umount -l`.
fn detach(waiting: &BlockedReaders) {
    let mountpoint = waiting.place.path("mnt");
    let output = Command::new("umount").arg("-l").arg(&mountpoint).output();
    let output = output.expect("util-linux");
    assert!(output.status.success(), "{}", program::stderr_text(&output));
    assert!(!is_mounted(&mountpoint));
}

// Promises: unmount-quick
#[test]
fn unmount_ends_readers_waiting_for_silent_server() {
    silent().assert_ended_by("tarfs umount --lazy", |waiting| {
        waiting.place.run_ok(&["umount", "--lazy", "mnt"]);
    });
    silent().assert_ended_by("two signals", |waiting| {
        waiting.signal(Signal::TERM);
        waiting.signal(Signal::INT);
    });
    silent().assert_ended_by("umount -l and two signals", |waiting| {
        detach(waiting);
        waiting.signal(Signal::TERM);
        waiting.signal(Signal::INT);
    });
}

// Promises: unmount-detached
#[test]
fn readers_of_detached_mount_are_answered_before_exit() {
    let mut waiting = BlockedReaders::on_server(Fault::Status(503));
    let start = Instant::now();
    detach(&waiting);
    assert!(start.elapsed() < UNMOUNT_TIMEOUT, "{:?}", start.elapsed());
    assert!(waiting.are_all_blocked());
    waiting.place.server.serve(PATH, strong());
    for (reader, (name, number)) in waiting.readers.drain(..).zip(READ) {
        let output = wait::finish_in_time(move || reader.wait_with_output().expect("a child"));
        assert!(output.status.success(), "{}", program::stderr_text(&output));
        assert!(output.stdout == content(1, number), "{name} is wrong");
    }
    for process in &waiting.processes {
        assert!(process_exits(process));
    }

    // The mount also ends when the waiting readers are killed.
    let mut waiting = silent();
    detach(&waiting);
    let start = Instant::now();
    for mut reader in waiting.readers.drain(..) {
        reader.kill().expect("running");
        reader.wait().expect("a child");
    }
    for process in &waiting.processes {
        assert!(process_exits(process));
    }
    assert!(start.elapsed() < UNMOUNT_TIMEOUT, "{:?}", start.elapsed());
}
