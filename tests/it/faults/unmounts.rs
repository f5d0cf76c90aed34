//! Unmounting while readers wait in read(2) for a server, long before their deadline.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::always;
use super::ways::{PATH, Place, content, strong};
use crate::support::http::Fault;
use crate::support::mounts::is_mounted;
use crate::support::program;
use crate::support::wait::{self, process_ends};

/// Far less than the minute for which the readers would wait.
const SOON: Duration = Duration::from_secs(30);

const READ: [(&str, usize); 2] = [("second", 1), ("third", 2)];

/// A mount with an index, nothing kept, and a server with a fault for which two readers wait.
struct Waiting {
    place: Place,
    readers: Vec<Child>,
    server: Pid,
    /// Who serves the mount, and who watches over that.
    processes: Vec<OwnedFd>,
}

impl Waiting {
    fn for_a_server(fault: Fault) -> Self {
        let place = Place::new(&strong());
        let url = place.server.url(PATH);
        place.succeeds(&["index", &url]);
        let words = ["mount", &url, "mnt", "--timeout", "60"];
        place.succeeds(&[&words[..], &["--no-disk-cache", "--prefetch", "none"]].concat());
        let server = place.server_pid();
        let processes = [vec![server], program::children(server)].concat();
        let handle = |pid| pidfd_open(pid, PidfdFlags::empty()).expect("running");
        let processes = processes.into_iter().map(handle).collect();
        place.disturb(strong(), always(fault));
        let asked = place.server.seen(PATH).len();
        let reader = |(name, _)| {
            let mut command = Command::new("cat");
            command.arg(place.path("mnt").join(name));
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("installed")
        };
        let readers: Vec<Child> = READ.map(reader).into();
        for (reader, (name, _)) in readers.iter().zip(READ) {
            wait::until("it has its file open", || {
                has_open(reader, &place.path("mnt").join(name))
            });
        }
        wait::until("they wait", || place.server.seen(PATH).len() > asked);
        let mut waiting = Self {
            place,
            readers,
            server,
            processes,
        };
        assert!(waiting.all_wait());
        waiting
    }

    /// Whether none of the readers has ended, nor does soon.
    fn all_wait(&mut self) -> bool {
        std::thread::sleep(Duration::from_millis(300));
        let mut readers = self.readers.iter_mut();
        readers.all(|reader| reader.try_wait().expect("a child").is_none())
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.server, signal).expect("running");
    }

    /// Runs `unmount`, after which soon everyone is gone: readers with an error.
    #[track_caller]
    fn ends_by(mut self, what: &str, unmount: impl FnOnce(&Self)) {
        let start = Instant::now();
        unmount(&self);
        for reader in self.readers.drain(..) {
            let output = wait::ends(move || reader.wait_with_output().expect("a child"));
            assert!(!output.status.success(), "{what}: nothing came");
        }
        for process in &self.processes {
            assert!(process_ends(process), "{what}");
        }
        let took = start.elapsed();
        assert!(took < SOON, "{what}: {took:?}");
        assert!(!is_mounted(&self.place.path("mnt")), "{what}");
    }
}

/// Whether a process has the file at `path` open.
fn has_open(process: &Child, path: &Path) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.id()));
    let mut descriptors = descriptors.into_iter().flatten().flatten();
    descriptors.any(|link| fs::read_link(link.path()).is_ok_and(|file| file == path))
}

impl Drop for Waiting {
    fn drop(&mut self) {
        for reader in &mut self.readers {
            // An error says that it has ended.
            drop(reader.kill());
            drop(reader.wait());
        }
    }
}

fn silent() -> Waiting {
    Waiting::for_a_server(Fault::Silence)
}

/// Takes it out of the tree as umount(8) does for who still uses it.
fn detach(waiting: &Waiting) {
    let mountpoint = waiting.place.path("mnt");
    let output = Command::new("umount").arg("-l").arg(&mountpoint).output();
    let output = output.expect("util-linux");
    assert!(output.status.success(), "{}", program::told(&output));
    assert!(!is_mounted(&mountpoint));
}

#[test]
fn an_unmount_ends_who_waits_for_a_silent_server() {
    silent().ends_by("tarfs umount --lazy", |waiting| {
        waiting.place.succeeds(&["umount", "--lazy", "mnt"]);
    });
    silent().ends_by("two signals", |waiting| {
        waiting.signal(Signal::TERM);
        waiting.signal(Signal::INT);
    });
    silent().ends_by("umount -l and two signals", |waiting| {
        detach(waiting);
        waiting.signal(Signal::TERM);
        waiting.signal(Signal::INT);
    });
}

#[test]
fn who_waits_in_a_mount_that_was_detached_is_answered_and_then_its_process_ends() {
    let mut waiting = Waiting::for_a_server(Fault::Status(503));
    let start = Instant::now();
    detach(&waiting);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert!(waiting.all_wait());
    waiting.place.server.serve(PATH, strong());
    for (reader, (name, number)) in waiting.readers.drain(..).zip(READ) {
        let output = wait::ends(move || reader.wait_with_output().expect("a child"));
        assert!(output.status.success(), "{}", program::told(&output));
        assert!(output.stdout == content(1, number), "{name} is wrong");
    }
    for process in &waiting.processes {
        assert!(process_ends(process));
    }

    // Or who waits is killed.
    let mut waiting = silent();
    detach(&waiting);
    let start = Instant::now();
    for mut reader in waiting.readers.drain(..) {
        reader.kill().expect("running");
        reader.wait().expect("a child");
    }
    for process in &waiting.processes {
        assert!(process_ends(process));
    }
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}
