//! The supervisor: a process that outlives the one that serves a mount.
//!
//! The worker is the process that serves a mount. If it is killed, it leaves a dead mount, and each `ls` of
//! the parent directory fails on it. So the worker starts this program a second time as its supervisor and
//! passes it the mount's connection.
//!
//! When the worker dies and the mount remains, the supervisor unmounts it. With `--restart`, it starts a
//! successor instead, which continues on the same connection. The supervisor opens and serves nothing, so
//! little can kill it. With `--restart` in the foreground, it is the process that the user started
//! (`foreground`).

mod foreground;
mod protocol;

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use super::daemonize::{self, LogTarget};
use super::inherited_fds::InheritedFds;
use super::{overlay_dirs, privileges};
use crate::cli::args::MountArgs;
use crate::cli::environment::{self, Role};
use crate::cli::ui::{cleanup_on_signal, logging};
use foreground::ForegroundSupervisor;
pub(crate) use foreground::follow_supervisor;
use protocol::{MountPlace, Packet, SessionState};
use tarfs::base::stats::Stats;
use tarfs::base::thread::Thread;
use tarfs::fuse::{
    InheritedSession, LOWER_DIR_NAME, MountTarget, Namespace, OverlayKind, SuperblockWatch,
};

/// Interval at which the supervisor checks a silent worker.
///
/// Threads of a killed worker may block on the mount that it served, and keep its socket open.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Timeout for the threads of a killed process to exit.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which a successor checks whether the source is reachable.
const REACHABILITY_INTERVAL: Duration = Duration::from_millis(250);

/// Pauses between failed successors: the first and the maximum.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(8));

/// A worker that lives for less than this has failed, even if it was ready.
const MIN_LIFETIME: Duration = Duration::from_secs(10);
/// Maximum number of such workers in a row.
const MAX_SHORT_LIVED: u32 = 5;

/// Maximum length of a version that is sent unchanged, in bytes.
const MAX_VERSION_BYTES: usize = 4096;

/// The worker's connection to its supervisor.
#[derive(Debug)]
pub(crate) struct SupervisorLink {
    socket: OwnedFd,
}

/// State that a successor receives from the supervisor.
#[derive(Debug)]
pub(crate) struct TakeoverState {
    /// Connection to the supervisor.
    pub(crate) supervisor: SupervisorLink,
    /// The session to take over, or `None` if the successor must mount again.
    pub(crate) session: Option<InheritedSession>,
    /// The version to serve, in the form of a packet.
    version: String,
    /// The mount's scratch directory, if it has one.
    pub(crate) scratch: Option<PathBuf>,
}

impl TakeoverState {
    /// Returns the version to serve, or the digest of a long version.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Checks that `version` is the one that the mount has shown.
    ///
    /// # Errors
    /// The archive has changed.
    pub(crate) fn ensure_version(&self, version: &str) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.version == version_for_packet(version),
            "the archive has changed since it was mounted: it was {}, and is {version}",
            self.version
        );
        Ok(())
    }
}

/// Returns a version that fits into a packet; that of a thousand layers is long.
fn version_for_packet(version: &str) -> String {
    if version.len() <= MAX_VERSION_BYTES {
        return version.to_owned();
    }
    format!("sha256:{}", tarfs::archive::sha256(version.as_bytes()))
}

impl SupervisorLink {
    /// Starts a supervisor for the mount that this process is about to make.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(crate) fn spawn() -> io::Result<Self> {
        let (ours, theirs) = protocol::pair()?;
        spawn_self(Role::Supervisor, theirs, None, Output::Null)?;
        Ok(Self { socket: ours })
    }

    /// Receives the state from the supervisor that started this process.
    ///
    /// # Errors
    /// The supervisor is gone or sends another packet.
    pub(crate) fn receive_takeover() -> anyhow::Result<TakeoverState> {
        let socket = dup_stdin()?;
        let Some((Packet::TakeOver(place, state, scratch), descriptor)) =
            protocol::receive(&socket)?
        else {
            anyhow::bail!("the supervisor sent no mount to take over");
        };
        Ok(TakeoverState {
            supervisor: Self { socket },
            session: descriptor.map(|descriptor| InheritedSession {
                target: place.into(),
                descriptor,
                capabilities: state.capabilities,
            }),
            version: state.version,
            scratch: scratch.map(|scratch| PathBuf::from(OsString::from_vec(scratch))),
        })
    }

    /// Reports the mount that the supervisor must clean up.
    pub(crate) fn report_mounted(&self, site: &MountTarget, device: BorrowedFd<'_>) {
        self.send(&Packet::Mounted(site.into()), Some(device));
    }

    /// Reports the overlay over the mount, with a watch for its end.
    pub(crate) fn report_overlay(&self, site: &MountTarget, watch: Option<&SuperblockWatch>) {
        self.send(&Packet::OverlayMounted(site.into()), watch.map(AsFd::as_fd));
    }

    /// Reports a directory to remove with the mount.
    pub(crate) fn report_scratch_dir(&self, directory: &Path) {
        let directory = directory.as_os_str().as_bytes().to_vec();
        self.send(&Packet::ScratchDir(directory), None);
    }

    /// Reports that the mount is ready, with the state for a successor.
    pub(crate) fn report_ready(&self, capabilities: u64, version: &str, is_strong: bool) {
        let state = SessionState {
            capabilities,
            version: version_for_packet(version),
            is_strong,
        };
        self.send(&Packet::Ready(state), None);
    }

    /// Reports how long the source is unreachable, until the returned value is dropped.
    ///
    /// `stats` counts the reads of the source.
    ///
    /// # Errors
    /// No file descriptor or thread is available.
    pub(crate) fn watch_reachability(&self, stats: &Arc<Stats>) -> io::Result<ReachabilityWatch> {
        let socket = self.socket.try_clone()?;
        let stats = Arc::clone(stats);
        let (sender, end) = mpsc::channel();
        let thread = Thread::spawn("reach", move || {
            let mut unreachable_time = Duration::ZERO;
            let (mut received, mut looked) = (stats.source_read_bytes.get(), Instant::now());
            // The thread receives nothing. The channel only closes.
            while end.recv_timeout(REACHABILITY_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let before = std::mem::replace(&mut received, stats.source_read_bytes.get());
                let since = std::mem::replace(&mut looked, Instant::now());
                if received == before && stats.unreachable_reads.get() > 0 {
                    unreachable_time += looked - since;
                    let milliseconds =
                        u64::try_from(unreachable_time.as_millis()).unwrap_or(u64::MAX);
                    // May be lost, because the next packet includes this time.
                    drop(protocol::send_without_blocking(
                        &socket,
                        &Packet::Unreachable(milliseconds),
                    ));
                }
            }
        })?;
        Ok(ReachabilityWatch {
            _end: sender,
            _thread: thread,
        })
    }

    /// Reports that this process failed because the source is unreachable.
    pub(crate) fn report_unreachable(&self) {
        self.send(&Packet::Unreachable(u64::MAX), None);
    }

    fn send(&self, packet: &Packet, device: Option<BorrowedFd<'_>>) {
        if let Err(error) = protocol::send(&self.socket, packet, device) {
            tracing::warn!(%error, "lost the supervisor; a crash will leave a dead mount");
        }
    }
}

/// Reports to the supervisor how long a source is unreachable, until dropped.
#[derive(Debug)]
pub(crate) struct ReachabilityWatch {
    /// Ends the thread when dropped, before the thread is joined.
    _end: Sender<Infallible>,
    _thread: Thread<()>,
}

/// Output of a started process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Output {
    Null,
    /// The output of this process.
    Inherit,
}

/// Starts this program again with the same arguments and `socket` as its stdin.
fn spawn_self(
    role: Role,
    socket: OwnedFd,
    directory: Option<&Path>,
    output: Output,
) -> io::Result<Child> {
    // The file's path may be gone, or belong to another version with other inode numbers.
    let mut command = Command::new("/proc/self/exe");
    environment::copy_argv0(&mut command)
        .args(std::env::args_os().skip(1))
        .env(environment::ROLE, role.name())
        .stdin(Stdio::from(socket));
    if output == Output::Null {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    if let Some(directory) = directory {
        command.current_dir(directory);
    }
    command.spawn()
}

/// Duplicates the socket that this process has as its stdin.
fn dup_stdin() -> io::Result<OwnedFd> {
    Ok(fcntl_dupfd_cloexec(io::stdin(), 3)?)
}

/// Supervises the mount of the process that started this one, until it is gone.
///
/// # Errors
/// A system call fails.
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
    let worker = Worker {
        socket,
        pid: pid.as_raw_nonzero().get(),
        child: None,
        status: None,
        started: Instant::now(),
        mount_state: None,
        session_state: None,
        scratch: None,
        overlay: OverlayWatch::None,
        foreground: None,
        unreachable_time: Duration::ZERO,
    };
    Ok(supervise(args, worker, directory.ok().as_deref()))
}

/// Starts the worker in the foreground and supervises its mount until it is gone.
///
/// # Errors
/// The worker cannot be started.
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
    let worker = Worker::from_child(
        child,
        ours,
        (None, OverlayWatch::None),
        Some(Rc::new(foreground)),
    );
    Ok(supervise(args, worker, directory.ok().as_deref()))
}

/// Supervises the mount of `worker` and of its successors.
///
/// Relative paths are relative to `directory`.
fn supervise(args: &MountArgs, mut worker: Worker, directory: Option<&Path>) -> ExitCode {
    let mut short_lived_count = 0;
    loop {
        while worker.receive_packet() {}
        let Some(mount_state) = worker.take_mount_state() else {
            // The worker may still write data, so there is no timeout.
            worker.wait_for_exit();
            if let (Some(directory), None) = (directory, &args.namespace) {
                // It may have died after it mounted and before it reported that.
                tarfs::fuse::unmount_dead(&directory.join(&args.mountpoint));
            }
            return worker.finish(directory, &args.mountpoint);
        };
        if let Some(foreground) = &worker.foreground {
            foreground.stop_if_signal_was_recent();
        }
        worker.kill_and_reap();
        let mountpoint = mount_state.site.mountpoint.display();
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

/// State of the overlay that writes to the scratch directory.
#[derive(Clone)]
enum OverlayWatch {
    /// There is no overlay yet.
    None,
    /// The overlay's end cannot be observed.
    Unwatched,
    /// The overlay's end can be observed.
    Watched(Rc<SuperblockWatch>),
}

/// A process that serves a mount.
struct Worker {
    socket: OwnedFd,
    pid: i32,
    /// The process's handle, if the supervisor started it.
    child: Option<Child>,
    /// Its exit status, if the supervisor reaped it.
    status: Option<ExitStatus>,
    started: Instant,
    /// The mount that it reported.
    mount_state: Option<MountState>,
    session_state: Option<SessionState>,
    /// Directory to remove with the mount.
    scratch: Option<PathBuf>,
    /// The overlay that may use `scratch`.
    overlay: OverlayWatch,
    /// State of a supervisor in the foreground.
    foreground: Option<Rc<ForegroundSupervisor>>,
    /// Time during which the source was unreachable, before the worker was ready.
    unreachable_time: Duration,
}

impl Worker {
    /// Creates the state of `child`, which has the other end of `socket`.
    fn from_child(
        child: Child,
        socket: OwnedFd,
        (scratch, overlay): (Option<PathBuf>, OverlayWatch),
        foreground: Option<Rc<ForegroundSupervisor>>,
    ) -> Self {
        Self {
            socket,
            pid: i32::try_from(child.id()).unwrap_or(i32::MAX),
            child: Some(child),
            status: None,
            started: Instant::now(),
            mount_state: None,
            session_state: None,
            scratch,
            overlay,
            foreground,
            unreachable_time: Duration::ZERO,
        }
    }

    /// Cleans up, and returns the exit code for the user.
    fn finish(&self, directory: Option<&Path>, mountpoint: &Path) -> ExitCode {
        self.clean_up(directory, mountpoint);
        match &self.foreground {
            Some(foreground) => foreground.exit_code(self.status),
            None => ExitCode::SUCCESS,
        }
    }

    /// Unmounts and removes what the worker left.
    fn clean_up(&self, directory: Option<&Path>, mountpoint: &Path) {
        if let Some(scratch) = &self.scratch {
            // The worker may have died before it reported an overlay.
            let lower = scratch.join(LOWER_DIR_NAME);
            tarfs::fuse::unmount_dead(&lower);
            if let Some(directory) = directory {
                tarfs::fuse::unmount_dead_overlay(&directory.join(mountpoint), &lower);
            }
            if self.is_unused(scratch) {
                overlay_dirs::remove_scratch(scratch);
            } else {
                let scratch = scratch.display();
                tracing::error!(%scratch, "this directory stays, because the mount may be in use");
            }
        }
    }

    /// Waits until no process uses the overlay over `scratch`; else they would see empty directories.
    ///
    /// Returns false if the overlay's end is unknown. In the foreground, waits for at most
    /// [`THREAD_EXIT_TIMEOUT`].
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

    /// Handles the next packet, or none after a timeout.
    ///
    /// Returns false when the worker is dead and all packets are read.
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
            Ok(Some((Packet::Mounted(place), device))) => {
                let site = place.into();
                self.mount_state = device.map(|device| MountState {
                    site,
                    lower: None,
                    device,
                });
            }
            Ok(Some((Packet::OverlayMounted(place), watch))) => {
                self.overlay = match watch {
                    Some(watch) => OverlayWatch::Watched(Rc::new(watch.into())),
                    None => OverlayWatch::Unwatched,
                };
                if let Some(mount_state) = &mut self.mount_state {
                    mount_state.lower =
                        Some(std::mem::replace(&mut mount_state.site, place.into()));
                }
            }
            Ok(Some((Packet::ScratchDir(directory), _))) => {
                self.scratch = Some(PathBuf::from(OsString::from_vec(directory)));
            }
            Ok(Some((Packet::Ready(state), _))) => self.session_state = Some(state),
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

    /// Waits for a packet or the end of the connection.
    ///
    /// Returns false after `deadline`, or when a signal was forwarded.
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
        let has_packet = polled.first().is_some_and(|it| !it.revents().is_empty());
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

    /// Kills the worker and waits until its threads handle no more requests.
    ///
    /// Threads that are blocked on the mount itself may remain.
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
    /// Chooses the mode for a mount with these arguments and this state.
    fn of(args: &MountArgs, state: &SessionState) -> Self {
        // The kernel keeps cached pages. If another version looks the same, readers would see old bytes
        // among new ones.
        let may_adopt = state.is_strong && tarfs::fuse::supports_takeover(state.capabilities);
        match args.copy_to {
            None if may_adopt => Self::Adopt,
            _ => Self::MountAgain,
        }
    }
}

/// A worker's mount.
struct MountState {
    site: MountTarget,
    /// The FUSE mount below an overlay, which leaves the tree soon.
    lower: Option<MountTarget>,
    /// The connection. While it is open, the kernel does not reuse the mount's device number.
    device: OwnedFd,
}

impl MountState {
    fn is_mounted(&self) -> bool {
        let is_mounted = |site| tarfs::fuse::is_still_mounted(site, self.device.as_fd());
        is_mounted(&self.site) || self.lower.as_ref().is_some_and(is_mounted)
    }

    /// Unmounts it.
    fn unmount(&self) {
        for site in [Some(&self.site), self.lower.as_ref()]
            .into_iter()
            .flatten()
        {
            if let Err(error) = tarfs::fuse::clear_dead_mounts(site, self.device.as_fd()) {
                tracing::error!(%error, "cannot unmount the dead mount");
            }
        }
        if self.is_mounted() {
            tracing::error!("the dead mount is below another mount and stays");
        }
    }

    /// Starts successors until one is ready, or returns `None` after `timeout`.
    ///
    /// Time in which the source is unreachable does not count.
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
        let scratch = before.scratch.clone();
        let bytes = scratch
            .as_ref()
            .map(|scratch| scratch.as_os_str().as_bytes().to_vec());
        let scratch_state = (scratch, before.overlay.clone());
        let mut worker = Worker::from_child(child, ours, scratch_state, before.foreground.clone());
        let packet = Packet::TakeOver((&self.site).into(), state.clone(), bytes);
        let device = (mode == RestartMode::Adopt).then(|| self.device.as_fd());
        let sent = protocol::send(&worker.socket, &packet, device);
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
                site: self.site.clone(),
                lower: None,
                device: self.device.try_clone()?,
            });
        }
        // The time before it was ready does not count towards its lifetime.
        worker.started = Instant::now();
        tracing::info!(pid = worker.pid, "a new process serves the mount");
        Ok(RestartResult::Succeeded(Box::new(worker)))
    }
}

/// Result of an attempt to restart.
enum RestartResult {
    Succeeded(Box<Worker>),
    Failed,
    /// It failed, and the source was unreachable for this long.
    SourceUnreachable(Duration),
}

/// Whether process `pid` exists and its main thread has not ended.
///
/// If `/proc` does not show the process, returns whether any of its threads has not ended.
fn is_alive(pid: i32) -> bool {
    let Some(Ok(stat)) = process_directory(pid).map(|process| fs::read(process.join("stat")))
    else {
        return Pid::from_raw(pid).is_some_and(is_running);
    };
    // The state follows the name, which is in parentheses and may hold any bytes.
    let state = stat.rsplit(|&byte| byte == b')').next().unwrap_or_default();
    !matches!(state.trim_ascii_start().first(), Some(b'Z' | b'X'))
}

/// Whether a dying process still has running threads. A zombie lists only its main thread.
fn has_threads(pid: i32) -> bool {
    let tasks = process_directory(pid).map(|process| fs::read_dir(process.join("task")));
    is_alive(pid) || tasks.is_some_and(|tasks| tasks.is_ok_and(|tasks| tasks.count() > 1))
}

/// Returns the directory of process `pid` in `/proc`.
///
/// `None` if `/proc` belongs to another PID namespace, where that number means another process.
fn process_directory(pid: i32) -> Option<PathBuf> {
    let own = fs::read_link("/proc/self").ok()?;
    let is_ours = own.as_os_str() == std::process::id().to_string().as_str();
    is_ours.then(|| format!("/proc/{pid}").into())
}

/// Whether any thread of process `pid` has not ended.
fn is_running(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut polled = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())) != Ok(1)
        }
        Err(Errno::SRCH) => false,
        // Linux before 5.3 lacks pidfd_open(2).
        Err(_) => test_kill_process(pid) != Err(Errno::SRCH),
    }
}

impl From<&MountTarget> for MountPlace {
    fn from(site: &MountTarget) -> Self {
        Self {
            mountpoint: site.mountpoint.as_os_str().as_bytes().to_vec(),
            device: site.device,
            cover: site
                .overlay
                .map(|(cover, device)| (cover.fs_type().to_owned(), device)),
            namespace: site.namespace.as_ref().map(|namespace| {
                let path = namespace.path.as_os_str().as_bytes().to_vec();
                (path, namespace.identity)
            }),
        }
    }
}

impl From<MountPlace> for MountTarget {
    fn from(place: MountPlace) -> Self {
        Self {
            mountpoint: PathBuf::from(OsString::from_vec(place.mountpoint)),
            device: place.device,
            overlay: place
                .cover
                .and_then(|(name, device)| Some((OverlayKind::from_fs_type(&name)?, device))),
            namespace: place.namespace.map(|(path, identity)| Namespace {
                path: PathBuf::from(OsString::from_vec(path)),
                identity,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_alive_until_its_main_thread_ends() {
        assert!(is_alive(
            i32::try_from(std::process::id()).expect("a number")
        ));
        let mut child = Command::new("true").spawn().expect("installed");
        let pid = i32::try_from(child.id()).expect("a number");
        while is_alive(pid) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!has_threads(pid), "a zombie until somebody waits for it");
        child.wait().expect("a child");
        assert!(!has_threads(pid) && !is_alive(pid));
    }
}
