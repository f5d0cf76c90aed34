//! The process that serves a mount: how it is started, and whether it lives.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{Shutdown, shutdown};

use crate::cli::daemon::daemon_process::{own_program, start_daemon};
use tarfs::internal::process::{has_threads, is_alive};
use tarfs::internal::wait::{is_readable, wait_until};
use tarfs::serve::{DaemonSocket, Link, MountSpec};

/// Interval of questions whether a process has ended.
const INTERVAL: Duration = Duration::from_millis(5);

/// Timeout for the threads of a killed process to exit.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout for a daemon to accept a client.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

/// A process that serves a mount, and the link to it.
#[derive(Debug)]
pub(super) struct ServerProcess {
    pub(super) link: Link,
    /// Its number, once it is known.
    pub(super) pid: Option<i32>,
    /// Whether it serves other mounts, too.
    pub(super) is_daemon: bool,
    /// The handle of a process that this one has started for its mount alone.
    child: Option<Child>,
    /// Its exit status, once it is reaped.
    pub(super) status: Option<ExitStatus>,
    /// When it began to serve.
    pub(super) started: Instant,
}

impl ServerProcess {
    /// Starts a process that serves one mount. In the foreground it has the user's terminal and standard input.
    pub(super) fn start(spec: &MountSpec, has_terminal: bool, has_stdin: bool) -> io::Result<Self> {
        let (ours, theirs) = Link::pair()?;
        let mut command = own_program();
        command
            .arg("serve-mount")
            // For those who list processes.
            .arg(&spec.mountpoint)
            .stdout(Stdio::from(theirs.into_fd()));
        if !has_stdin {
            command.stdin(Stdio::null());
        }
        if !has_terminal {
            command.stderr(Stdio::null());
        }
        let child = command.spawn()?;
        Ok(Self {
            pid: i32::try_from(child.id()).ok(),
            child: Some(child),
            ..Self::behind(ours)
        })
    }

    /// Connects to the daemon at `socket`, and starts it if it is missing, by the file `program` or this one.
    pub(super) fn connect(socket: &DaemonSocket, program: Option<&OwnedFd>) -> io::Result<Self> {
        let start = |listener| start_daemon(socket, listener, program);
        let link = socket.connect_or_start(start)?;
        // A stopped one accepts no client.
        if !is_readable(&link, ACCEPT_TIMEOUT) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Self {
            is_daemon: true,
            ..Self::behind(link)
        })
    }

    fn behind(link: Link) -> Self {
        Self {
            link,
            pid: None,
            is_daemon: false,
            child: None,
            status: None,
            started: Instant::now(),
        }
    }

    /// It without its handle, for a process that has not started it.
    pub(super) fn forget_child(&mut self) {
        self.child = None;
    }

    /// Whether it lives, as far as is known.
    pub(super) fn is_alive(&self) -> bool {
        self.pid.is_none_or(is_alive)
    }

    /// Waits until it has ended, but for threads that are blocked on the mount itself. A daemon goes on.
    pub(super) fn wait(&mut self) {
        while self.child.is_some() && self.is_alive() {
            std::thread::sleep(INTERVAL);
        }
        self.reap();
    }

    /// Kills it if this process has started it for its mount, because it is dead or useless, and waits for its threads,
    /// except those that are blocked on the mount itself. A daemon forgets the mount.
    pub(super) fn kill(&mut self) {
        shutdown(&self.link, Shutdown::Both).ok();
        if let Some(child) = &mut self.child {
            drop(child.kill());
        }
        self.reap();
    }

    /// Waits until it is dead. Its link is closed a moment before, and its claim ends with it.
    pub(super) fn wait_for_death(&self) {
        wait_until(KILL_TIMEOUT, INTERVAL, || !self.is_alive());
    }

    fn reap(&mut self) {
        if self.is_daemon && self.is_alive() {
            return;
        }
        wait_until(KILL_TIMEOUT, INTERVAL, || !self.has_threads());
    }

    /// Whether a thread has not ended. If threads are blocked on the mount, they stay after a kill.
    fn has_threads(&mut self) -> bool {
        let Some(child) = &mut self.child else {
            return self.pid.is_some_and(has_threads);
        };
        if self.status.is_none() {
            self.status = child.try_wait().ok().flatten();
        }
        self.status.is_none()
    }

    /// The descriptor that waits for packets.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.link, PollFlags::IN)
    }
}
