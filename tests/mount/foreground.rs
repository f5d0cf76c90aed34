//! A foreground mount with `--restart`: the started process stays when the mount's process is
//! replaced.

use std::fs::{self, File};
use std::io::{IoSliceMut, Read, Seek, SeekFrom};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::program::{children, stop};
use crate::support::raw::Archive;
use crate::support::wait::{self, process_exits};

/// An archive behind a server, and a socket of a service manager that receives every notification.
struct Services {
    server: Server,
    manager: Option<UnixDatagram>,
}

type Place = TestMount<Services>;

impl Place {
    fn start_services() -> Self {
        let state = Services {
            server: Server::start(),
            manager: None,
        };
        let mut place = TestMount::with(&[], state);
        let manager = UnixDatagram::bind(place.path("notify")).expect("bound");
        sockopt::set_socket_passcred(&manager, true).expect("set");
        let timeout = Some(wait::WAIT_TIMEOUT);
        manager.set_read_timeout(timeout).expect("set");
        place.manager = Some(manager);
        place.write_archive("old");
        place
    }

    /// Replaces the archive by one with `content`.
    fn write_archive(&self, content: &str) {
        let archive = Archive::new().file("file", content).end();
        let resource = Resource::new(archive).etag(&format!("\"{content}\""));
        self.server
            .route("/archive", move |request| resource.answer(request));
    }

    /// Starts a foreground mount that logs to the file `said`.
    fn start(&self, more: &[&str]) -> Child {
        // The test runner may ignore these signals.
        self.command_of("env")
            .args(["--default-signal", env!("CARGO_BIN_EXE_tarfs")])
            .args(["mount", "--foreground", "--restart"])
            .args(more)
            .args([&self.server.url("/archive"), "mnt"])
            .env("NOTIFY_SOCKET", self.path("notify"))
            .stdin(Stdio::null())
            .stderr(File::create(self.path("said")).expect("made"))
            .spawn()
            .expect("started")
    }

    fn messages(&self) -> String {
        fs::read_to_string(self.path("said")).unwrap_or_default()
    }

    /// The next notification to the service manager, and its sender.
    fn next_notification(&self) -> (String, Pid) {
        let manager = self.manager.as_ref().expect("bound");
        let mut bytes = [0; 512];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let len = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(manager, into, &mut control, RecvFlags::empty()) {
                Err(Errno::INTR) => {}
                received => break received.expect("told").bytes,
            }
        };
        let teller = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmCredentials(teller) => Some(teller.pid),
            _ => None,
        });
        let words = String::from_utf8_lossy(bytes.get(..len).expect("read")).into_owned();
        (words, teller.expect("known"))
    }

    /// Waits for the notification `words`. The sender must be `teller`, the only process that a
    /// service manager accepts notifications from.
    fn expect_notification(&self, words: &str, teller: &Child) {
        loop {
            let (heard, by) = self.next_notification();
            assert_eq!(by, pid_of(teller), "{heard}");
            if heard == words {
                return;
            }
        }
    }

    fn content(&self) -> String {
        fs::read_to_string(self.path("mnt/file")).expect("readable")
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn kill(pid: Pid, signal: Signal) {
    kill_process(pid, signal).expect("running");
}

/// The exit status of `child`, within the timeout.
fn wait_for_exit(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait::wait_until("it ends", || {
        status = child.try_wait().expect("a child");
        status.is_some()
    });
    status.expect("it has ended")
}

// Promises: service-notify, service-status
#[test]
fn foreground_process_stays_and_reports_for_restarted_worker() {
    let place = Place::start_services();
    let mut front = place.start(&[]);
    place.expect_notification("READY=1", &front);
    let complete = format!("STATUS={}: complete", place.server.url("/archive"));
    place.expect_notification(&complete, &front);
    let mut open = File::open(place.path("mnt/file")).expect("there");
    for _ in 0..2 {
        let before = place.server_pid().expect("mounted");
        assert_ne!(before, pid_of(&front));
        kill(before, Signal::KILL);
        place.expect_notification("STATUS=the process that served it has died", &front);
        place.expect_notification("READY=1", &front);
        place.expect_notification(&complete, &front);
        let now = place
            .server_pid()
            .expect("another process serves the mount");
        assert!(now != before && children(pid_of(&front)) == [now]);
        let mut content = String::new();
        open.seek(SeekFrom::Start(0)).expect("sought");
        open.read_to_string(&mut content).expect("readable");
        assert_eq!(content, "old");
    }
    assert!(front.try_wait().expect("a child").is_none());
    // Later processes log to the same file as the first one.
    assert_eq!(place.messages().matches("tarfs: mounted ").count(), 3);
    drop(open);
    let last = place.server_pid().expect("mounted");
    let last = pidfd_open(last, PidfdFlags::empty()).expect("running");
    kill(pid_of(&front), Signal::TERM);
    place.expect_notification("STOPPING=1", &front);
    assert!(wait_for_exit(&mut front).success());
    assert!(process_exits(&last) && !place.is_mounted());
}

// Promises: service-signals
#[test]
fn signals_to_foreground_process_reach_the_worker() {
    let place = Place::start_services();
    let mut front = place.start(&[]);
    place.expect_notification("READY=1", &front);
    let open = File::open(place.path("mnt/file")).expect("there");
    kill(pid_of(&front), Signal::INT);
    wait::wait_until("it is refused", || {
        place.messages().contains("a second signal unmounts anyway")
    });
    assert!(front.try_wait().expect("a child").is_none());
    assert_eq!(place.content(), "old");
    kill(pid_of(&front), Signal::HUP);
    assert!(wait_for_exit(&mut front).success());
    assert!(!place.is_mounted());
    drop(open);
}

// Promises: service-signals
#[test]
fn signal_before_mount_ends_foreground_process() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let place = Place::start_services();
        let resource = Resource::new(Archive::new().file("file", "old").end());
        let silent = move |request: &_| resource.answer(request).stall_after(0);
        place.server.route("/archive", silent);
        let mut front = place.start(&["--wait-index"]);
        wait::wait_until("it asks", || !place.server.requests("/archive").is_empty());
        kill(pid_of(&front), signal);
        let status = wait_for_exit(&mut front);
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
        assert!(!place.is_mounted());
    }
}

#[test]
fn worker_killed_while_stopping_is_not_restarted() {
    let place = Place::start_services();
    let mut front = place.start(&[]);
    place.expect_notification("READY=1", &front);
    let server = place.server_pid().expect("mounted");
    stop(server);
    kill(pid_of(&front), Signal::TERM);
    place.expect_notification("STATUS=unmounting", &front);
    kill(server, Signal::KILL);
    let status = wait_for_exit(&mut front);
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "{status}");
    assert!(!place.is_mounted());
}

// Promises: service-status
#[test]
fn startup_error_is_reported_once_with_its_exit_code() {
    let place = Place::start_services();
    let mut front = place.start(&["--root", "nowhere"]);
    assert_eq!(wait_for_exit(&mut front).code(), Some(2));
    let said = place.messages();
    assert_eq!(said.matches("tarfs: ").count(), 1, "{said}");
}

// Promises: service-signals
#[test]
fn worker_is_not_restarted_after_stop_request() {
    // During a restart attempt, and in the pause after three attempts.
    for (words, times) in [
        ("has changed since it was", 1),
        ("failed to take over the mount", 3),
    ] {
        let place = Place::start_services();
        let mut front = place.start(&[]);
        place.expect_notification("READY=1", &front);
        let before = place.server_pid().expect("mounted");
        place.write_archive("new");
        kill(before, Signal::KILL);
        wait::wait_until("it is tried", || {
            place.messages().matches(words).count() >= times
        });
        kill(pid_of(&front), Signal::TERM);
        let status = wait_for_exit(&mut front);
        assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "{status}");
        assert!(!place.is_mounted());
        let said = place.messages();
        let count_of = |words| said.matches(words).count();
        assert!(
            count_of("has changed since it was") <= count_of("failed to take over the mount"),
            "{said}"
        );
    }
}

// Promises: service-status, restart-gives-up
#[test]
fn foreground_process_fails_if_worker_is_not_restarted() {
    let place = Place::start_services();
    let mut front = place.start(&[]);
    for _ in 0..6 {
        place.expect_notification("READY=1", &front);
        kill(place.server_pid().expect("mounted"), Signal::KILL);
    }
    assert_eq!(wait_for_exit(&mut front).code(), Some(2));
    assert!(
        place.messages().contains("was ended by signal 9"),
        "{}",
        place.messages()
    );
    assert!(!place.is_mounted());
}

// Promises: service-status
#[test]
fn killed_foreground_process_leaves_nothing() {
    let place = Place::start_services();
    let mut front = place.start(&[]);
    place.expect_notification("READY=1", &front);
    kill(place.server_pid().expect("mounted"), Signal::KILL);
    place.expect_notification("READY=1", &front);
    let last = place
        .server_pid()
        .expect("another process serves the mount");
    let last = pidfd_open(last, PidfdFlags::empty()).expect("running");
    kill(pid_of(&front), Signal::KILL);
    assert!(!wait_for_exit(&mut front).success());
    assert!(process_exits(&last) && !place.is_mounted());
}
