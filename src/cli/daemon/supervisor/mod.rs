//! The supervisor: a process that outlives the worker, which serves a mount.
//!
//! A killed worker leaves a dead mount, on which each `ls` of the parent directory fails. So the worker
//! starts this program a second time as its supervisor and passes it the mount's connection. When the worker
//! dies and the mount remains, the supervisor unmounts it, or with `--restart` starts a successor that
//! continues on the same connection. The supervisor opens and serves nothing, so little can kill it. With
//! `--restart` in the foreground, it is the process that the user started (`foreground`).

mod foreground;
mod link;
mod process;
mod protocol;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, ExitStatus};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::{Pid, Signal};

use super::daemonize::{self, LogTarget};
use super::inherited_fds::InheritedFds;
use super::privileges;
use super::scratch_dir::remove_scratch;
use crate::cli::args::MountArgs;
use crate::cli::environment::Role;
use crate::cli::ui::{cleanup_on_signal, logging};
use foreground::ForegroundSupervisor;
pub(crate) use link::{SupervisorLink, TakeoverState, follow_supervisor};
use process::{Output, dup_stdin, has_threads, is_alive, spawn_self};
use protocol::{Packet, SessionState};
use tarfs::fuse::{LOWER_DIR_NAME, MountTarget, SuperblockWatch};

/// Interval of checks of a silent worker, whose blocked threads can keep the socket open after a kill.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Timeout for the threads of a killed process to exit.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pauses between failed successors: the first and the maximum.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(8));

/// A worker that lives for less than this has failed, even if it was ready.
const MIN_LIFETIME: Duration = Duration::from_secs(10);
/// Maximum number of such workers in a row.
const MAX_SHORT_LIVED: u32 = 5;

/// Supervises the mount of the process that started this one, until it is gone.
pub(crate) fn run(args: &MountArgs, inherited: InheritedFds) -> anyhow::Result<ExitCode> {
    let socket = dup_stdin()?;
    // Signals from a terminal or to a process group are meant for the worker.
    let ignored = Arc::<AtomicBool>::default();
    for signal in cleanup_on_signal::termination_signals() {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    let directory = std::env::current_dir();
    // The file may belong to another user, and this process has dropped its capabilities.
    let log = LogTarget::open(args.log_file.as_deref()).or_else(|_| LogTarget::open(None))?;
    daemonize::detach(log, inherited)?;
    std::env::set_current_dir("/")?;
    let pid = rustix::net::sockopt::socket_peercred(&socket)?.pid;
    let worker = Worker::new(pid.as_raw_nonzero().get(), socket);
    Ok(supervise(args, worker, directory.ok().as_deref()))
}

/// Starts the worker in the foreground and supervises its mount until it is gone.
pub(crate) fn run_foreground(
    args: &MountArgs,
    inherited: InheritedFds,
) -> anyhow::Result<ExitCode> {
    let foreground = ForegroundSupervisor::new()?;
    let (ours, theirs) = protocol::pair()?;
    // The worker needs all privileges of this process to open its files.
    let child = spawn_self(Role::SupervisedWorker, theirs, None, Output::Inherit)?;
    privileges::drop_capabilities(args);
    inherited.close();
    // The worker reports errors of the log file.
    if let Ok(log) = LogTarget::open(args.log_file.as_deref()) {
        log.redirect();
    }
    logging::never_block();
    let directory = std::env::current_dir();
    std::env::set_current_dir("/")?;
    let worker = Worker {
        foreground: Some(Rc::new(foreground)),
        ..Worker::from_child(child, ours)
    };
    Ok(supervise(args, worker, directory.ok().as_deref()))
}

/// Supervises the mount of `worker` and of its successors. Relative paths are relative to `directory`.
fn supervise(args: &MountArgs, mut worker: Worker, directory: Option<&Path>) -> ExitCode {
    let mut short_lived_count = 0;
    loop {
        while worker.receive_packet() {}
        let reported = worker.mount_state.take();
        let has_end = reported
            .as_ref()
            .is_some_and(|reported| reported.end.is_some());
        let Some(mount_state) = reported.filter(MountState::is_mounted) else {
            // The worker may still write data, so there is no timeout.
            worker.wait_for_exit();
            if let (Some(directory), None, false) = (directory, &args.namespace, has_end) {
                // It may have died after it mounted and before it reported that.
                tarfs::fuse::unmount_dead(&directory.join(&args.mountpoint));
            }
            return worker.finish(directory, &args.mountpoint);
        };
        if let Some(foreground) = &worker.foreground {
            foreground.stop_if_signal_was_recent();
        }
        worker.kill_and_reap();
        let mountpoint = mount_state.target.mountpoint.display();
        tracing::error!(%mountpoint, pid = worker.pid, "the process that served this mount has died");
        if let Some(foreground) = &worker.foreground {
            foreground.notify("STATUS=the process that served it has died");
        }
        if worker.started.elapsed() < MIN_LIFETIME {
            short_lived_count += 1;
        } else {
            short_lived_count = 1;
        }
        if args.restart
            && short_lived_count <= MAX_SHORT_LIVED
            && let Some(directory) = directory
            && let Some(state) = worker.session_state.clone()
        {
            let mode = RestartMode::of(args, &state);
            if args.writable && mode == RestartMode::MountAgain {
                // Processes with open files in the old mount would write to the directories of the new one.
                tracing::error!("a writable mount cannot be mounted again while it is in use");
            } else if let Some(next) = {
                let timeout = Duration::from_secs(args.restart_timeout);
                mount_state.restart(&state, mode, directory, &worker, timeout)
            } {
                worker = next;
                continue;
            }
        }
        mount_state.unmount();
        // This closes the connection, so that blocked requests fail.
        drop(mount_state);
        return worker.finish(directory, &args.mountpoint);
    }
}

/// The overlay that writes to the scratch directory, and whether its end can be observed.
#[derive(Clone)]
enum OverlayWatch {
    None,
    Unwatched,
    Watched(Rc<SuperblockWatch>),
}

struct Worker {
    socket: OwnedFd,
    pid: i32,
    /// The process's handle, if the supervisor started it.
    child: Option<Child>,
    /// Its exit status, if the supervisor reaped it.
    status: Option<ExitStatus>,
    started: Instant,
    mount_state: Option<MountState>,
    session_state: Option<SessionState>,
    /// Directory to remove with the mount.
    scratch: Option<PathBuf>,
    overlay: OverlayWatch,
    foreground: Option<Rc<ForegroundSupervisor>>,
    /// Time during which the source was unreachable, before the worker was ready.
    unreachable_time: Duration,
}

impl Worker {
    /// Forwards a signal to the worker, or forbids successors if no mount is ready.
    fn forward_signals(&self) {
        let Some(foreground) = &self.foreground else {
            return;
        };
        // The worker has nothing to unmount, and its successor would only start to end again.
        let is_useless = || self.session_state.is_none() || !is_alive(self.pid);
        if foreground.take_forwarded_signal(is_useless)
            && let Some(pid) = Pid::from_raw(self.pid)
        {
            let killed = rustix::process::kill_process(pid, Signal::TERM);
            killed.unwrap_or_else(|error| tracing::debug!(%error, "the process has ended already"));
        }
    }

    /// Creates the state of process `pid`, which has the other end of `socket`.
    fn new(pid: i32, socket: OwnedFd) -> Self {
        Self {
            socket,
            pid,
            child: None,
            status: None,
            started: Instant::now(),
            mount_state: None,
            session_state: None,
            scratch: None,
            overlay: OverlayWatch::None,
            foreground: None,
            unreachable_time: Duration::ZERO,
        }
    }

    fn from_child(child: Child, socket: OwnedFd) -> Self {
        let mut worker = Self::new(i32::try_from(child.id()).unwrap_or(i32::MAX), socket);
        worker.child = Some(child);
        worker
    }

    /// Unmounts and removes what the worker left, and returns the exit code for the user.
    fn finish(&self, directory: Option<&Path>, mountpoint: &Path) -> ExitCode {
        if let Some(scratch) = &self.scratch {
            // The worker may have died before it reported an overlay.
            let lower = scratch.join(LOWER_DIR_NAME);
            tarfs::fuse::unmount_dead(&lower);
            if let Some(directory) = directory {
                tarfs::fuse::unmount_dead_overlay(&directory.join(mountpoint), &lower);
            }
            if self.is_unused(scratch) {
                remove_scratch(scratch);
            } else {
                let scratch = scratch.display();
                tracing::error!(%scratch, "this directory stays, because the mount may be in use");
            }
        }
        match &self.foreground {
            Some(foreground) => foreground.exit_code(self.status),
            None => ExitCode::SUCCESS,
        }
    }

    /// Waits until no process uses the overlay over `scratch`; else they would see empty directories. False
    /// if its end is unknown. In the foreground, waits for at most [`THREAD_EXIT_TIMEOUT`].
    fn is_unused(&self, scratch: &Path) -> bool {
        match &self.overlay {
            OverlayWatch::None => true,
            OverlayWatch::Unwatched => !scratch.exists(),
            OverlayWatch::Watched(watch) => {
                watch.wait(self.foreground.as_ref().map(|_| THREAD_EXIT_TIMEOUT))
            }
        }
    }

    /// Takes the worker's mount, if it is still mounted.
    fn take_mount_state(&mut self) -> Option<MountState> {
        self.mount_state.take().filter(MountState::is_mounted)
    }

    /// Handles a packet, or none after a timeout. False when the worker is dead and all packets are read.
    fn receive_packet(&mut self) -> bool {
        match self.wait_for_packet(&POLL_INTERVAL) {
            Ok(true) => {}
            Ok(false) | Err(Errno::INTR) => {
                // The last packet may have arrived since.
                return is_alive(self.pid)
                    || self.wait_for_packet(&Timespec::default()) == Ok(true);
            }
            Err(_) => return false,
        }
        match protocol::receive(&self.socket) {
            Ok(Some((Packet::Mounted(target), device))) => {
                self.mount_state = device.map(|device| MountState {
                    target,
                    lower: None,
                    device,
                    end: None,
                });
            }
            Ok(Some((Packet::OverlayMounted(target), watch))) => {
                self.overlay = match watch {
                    Some(watch) => OverlayWatch::Watched(Rc::new(SuperblockWatch(watch))),
                    None => OverlayWatch::Unwatched,
                };
                if let Some(mount_state) = &mut self.mount_state {
                    mount_state.lower = Some(std::mem::replace(&mut mount_state.target, target));
                }
            }
            Ok(Some((Packet::ScratchDir(directory), _))) => {
                self.scratch = Some(PathBuf::from(directory));
            }
            Ok(Some((Packet::Ready(state), end))) => {
                self.session_state = Some(state);
                if let Some(mount_state) = &mut self.mount_state {
                    mount_state.end = end.map(|end| Rc::new(SuperblockWatch(end)));
                }
            }
            Ok(Some((Packet::Unreachable(milliseconds), _))) => {
                self.unreachable_time =
                    Duration::from_millis(milliseconds).min(self.started.elapsed());
            }
            Ok(Some((Packet::Notify(text), _))) => {
                if let Some(foreground) = &self.foreground {
                    foreground.notify(&text);
                }
            }
            Ok(Some((Packet::TakeOver(..), _)) | None) => return false,
            Err(error) => {
                tracing::debug!(%error, "invalid packet from the process that serves the mount");
            }
        }
        true
    }

    /// Waits for a packet or the end of the connection. False after `deadline` or a forwarded signal.
    fn wait_for_packet(&self, deadline: &Timespec) -> Result<bool, Errno> {
        let foreground = self
            .foreground
            .as_ref()
            .map(|foreground| &foreground.signal_pipe);
        let foreground = foreground.map(|pipe| PollFd::new(pipe, PollFlags::IN));
        let mut polled: Vec<_> = [Some(PollFd::new(&self.socket, PollFlags::IN)), foreground]
            .into_iter()
            .flatten()
            .collect();
        poll(&mut polled, Some(deadline))?;
        if let Some(foreground) = &self.foreground {
            foreground.retry_unsent();
        }
        let has_packet = polled.first().is_some_and(|fd| !fd.revents().is_empty());
        self.forward_signals();
        Ok(has_packet)
    }

    /// Waits for the exit of a started worker that has no mount.
    fn wait_for_exit(&mut self) {
        while self.child.is_some() && is_alive(self.pid) {
            self.forward_signals();
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill_and_reap();
    }

    /// Kills the worker and waits for its threads, except those that are blocked on the mount itself.
    fn kill_and_reap(&mut self) {
        if let Some(child) = &mut self.child {
            // It closed its socket, so it is dead or useless.
            drop(child.kill());
        }
        let deadline = Instant::now() + THREAD_EXIT_TIMEOUT;
        while has_threads(self.pid) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(child) = &mut self.child {
            // Reaps the zombie. If threads are blocked on the mount, the process stays a zombie for longer.
            self.status = child.try_wait().ok().flatten();
        }
    }
}

/// Whether a successor takes over the connection or mounts again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RestartMode {
    Adopt,
    MountAgain,
}

impl RestartMode {
    fn of(args: &MountArgs, state: &SessionState) -> Self {
        // If another version looks the same, readers would see its bytes among old ones in the page cache.
        let may_adopt = state.is_strong && tarfs::fuse::supports_takeover(state.capabilities);
        match args.copy_to {
            None if may_adopt => Self::Adopt,
            _ => Self::MountAgain,
        }
    }
}

struct MountState {
    target: MountTarget,
    /// The FUSE mount below an overlay, which leaves the tree soon.
    lower: Option<MountTarget>,
    /// The connection. While it is open, the kernel does not reuse the mount's device number.
    device: OwnedFd,
    /// The watch for the end of the mount, once it is ready.
    end: Option<Rc<SuperblockWatch>>,
}

impl MountState {
    fn is_mounted(&self) -> bool {
        let (device, end) = (self.device.as_fd(), self.end.as_deref());
        let is_mounted = |target| tarfs::fuse::is_still_mounted(target, device, end);
        is_mounted(&self.target) || self.lower.as_ref().is_some_and(is_mounted)
    }

    fn unmount(&self) {
        for target in [Some(&self.target), self.lower.as_ref()]
            .into_iter()
            .flatten()
        {
            let (device, end) = (self.device.as_fd(), self.end.as_deref());
            if let Err(error) = tarfs::fuse::clear_dead_mounts(target, device, end) {
                tracing::error!(%error, "cannot unmount the dead mount");
            }
        }
        if self.is_mounted() {
            tracing::error!("the dead mount is below another mount and stays");
        }
    }

    /// Starts successors until one is ready. `None` after `timeout`, which excludes outages of the source.
    fn restart(
        &self,
        state: &SessionState,
        mode: RestartMode,
        directory: &Path,
        before: &Worker,
        timeout: Duration,
    ) -> Option<Worker> {
        if mode == RestartMode::MountAgain {
            self.unmount();
            if self.is_mounted() {
                // A new mount would hide the one that hides this one.
                return None;
            }
        }
        let mut deadline = Instant::now() + timeout;
        let (mut pause, longest) = RESTART_BACKOFF;
        let is_over = || {
            let foreground = before.foreground.as_ref();
            foreground.is_some_and(|foreground| foreground.is_stopped())
        };
        while !is_over()
            && Instant::now() < deadline
            && (mode == RestartMode::MountAgain || self.is_mounted())
        {
            match self.try_restart(state, mode, (directory, before), deadline) {
                Ok(RestartResult::Succeeded(worker)) => return Some(*worker),
                Ok(RestartResult::Failed) => {
                    tracing::error!("the new process failed to take over the mount");
                }
                Ok(RestartResult::SourceUnreachable(time)) => {
                    tracing::error!(
                        "the source cannot be reached; this time does not count against --restart-timeout"
                    );
                    // The pause does not count either.
                    deadline += time + pause;
                }
                Err(error) => tracing::error!(%error, "cannot start a new process for the mount"),
            }
            match &before.foreground {
                Some(foreground) => foreground.sleep(pause),
                None => std::thread::sleep(pause),
            }
            pause = (2 * pause).min(longest);
        }
        None
    }

    fn try_restart(
        &self,
        state: &SessionState,
        mode: RestartMode,
        (directory, before): (&Path, &Worker),
        deadline: Instant,
    ) -> io::Result<RestartResult> {
        let (ours, theirs) = protocol::pair()?;
        let output = match &before.foreground {
            Some(_) => Output::Inherit,
            None => Output::Null,
        };
        let child = spawn_self(Role::Successor, theirs, Some(directory), output)?;
        let mut worker = Worker {
            scratch: before.scratch.clone(),
            overlay: before.overlay.clone(),
            foreground: before.foreground.clone(),
            ..Worker::from_child(child, ours)
        };
        let scratch = before.scratch.clone().map(PathBuf::into_os_string);
        let packet = Packet::TakeOver(self.target.clone(), state.clone(), scratch);
        let device = (mode == RestartMode::Adopt).then(|| self.device.as_fd());
        let sent = protocol::send(&worker.socket, &packet, device, SendFlags::empty());
        while sent.is_ok()
            && worker.session_state.is_none()
            && Instant::now() < deadline + worker.unreachable_time
        {
            if !worker.receive_packet() {
                break;
            }
        }
        if worker.session_state.is_none() {
            worker.kill_and_reap();
            // It may have died after it mounted and before it was ready.
            if mode == RestartMode::MountAgain
                && let Some(left) = worker.take_mount_state()
            {
                left.unmount();
            }
            return Ok(match worker.unreachable_time {
                Duration::ZERO => RestartResult::Failed,
                time => RestartResult::SourceUnreachable(time),
            });
        }
        if mode == RestartMode::Adopt {
            worker.mount_state = Some(Self {
                target: self.target.clone(),
                lower: None,
                device: self.device.try_clone()?,
                end: self.end.clone(),
            });
        }
        // The time before it was ready does not count towards its lifetime.
        worker.started = Instant::now();
        tracing::info!(pid = worker.pid, "a new process serves the mount");
        Ok(RestartResult::Succeeded(Box::new(worker)))
    }
}

enum RestartResult {
    Succeeded(Box<Worker>),
    Failed,
    /// It failed, and the source was unreachable for this long.
    SourceUnreachable(Duration),
}
