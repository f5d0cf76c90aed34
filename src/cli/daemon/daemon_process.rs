//! The process of a daemon, which serves the mounts of many monitors.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::Context;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit, umask};
use rustix::stdio::dup2_stdout;
use rustix::thread::{CpuSet, sched_setaffinity};
use tracing::Level;

use super::fork::{Fork, fork};
use super::inherited_fds::InheritedFds;
use super::sd_notify::ServiceManager;
use super::server_process::{ThisProcess, force_exit_in_time};
use super::{privileges, scope};
use crate::cli::environment;
use crate::cli::ui::logging;
use tarfs::internal::thread::Thread;
use tarfs::locate;
use tarfs::serve::{ControlSocket, Daemon, DaemonSocket, Server};

/// Time without a mount after which a daemon ends. It keeps a mount namespace alive, and so the copies of mounts in it.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// Time for monitors to mount again after the end of their shared connection, before dead mounts are unmounted.
const CLEAR_DELAY: Duration = Duration::from_secs(1);

/// Limits that a client may have lowered for itself.
const LIMITS: [Resource; 5] = [
    Resource::As,
    Resource::Cpu,
    Resource::Data,
    Resource::Fsize,
    Resource::Nproc,
];

/// The server of this process, for its log.
static SERVER: OnceLock<Weak<Server>> = OnceLock::new();

/// This program. The file's path may be gone, or belong to another version with other inode numbers.
pub(super) fn own_program() -> Command {
    program_at("/proc/self/exe")
}

fn program_at(path: &str) -> Command {
    let mut command = Command::new(path);
    environment::copy_argv0(&mut command);
    command
}

/// Starts the daemon of `socket`, which accepts clients from `listener`, by the file `program` or this one.
pub(crate) fn start_daemon(
    socket: &DaemonSocket,
    listener: OwnedFd,
    program: Option<&OwnedFd>,
) -> io::Result<()> {
    let program = program.map_or_else(own_program, |program| {
        program_at(&format!("/proc/self/fd/{}", program.as_raw_fd()))
    });
    let mut command = daemon_command(program, socket, listener);
    command.stderr(Stdio::null());
    // It ends when the daemon has left it.
    command.status().map(drop)
}

/// Becomes the daemon of `socket`, which accepts clients from `listener` until it is stopped.
pub(crate) fn become_daemon(socket: &DaemonSocket, listener: OwnedFd) -> io::Error {
    let mut command = daemon_command(own_program(), socket, listener);
    command.envs(environment::of_service());
    command.arg("--foreground").exec()
}

/// The program of a daemon, which has nothing of this process that another client would not have.
fn daemon_command(mut command: Command, socket: &DaemonSocket, listener: OwnedFd) -> Command {
    command
        .arg("serve-mounts")
        .arg(socket.path())
        .env_clear()
        .envs(environment::of_daemon())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::from(listener));
    command
}

/// Serves the mounts of the monitors that connect to `socket`, which is standard output. The process that is started
/// ends at once, so that the daemon is no child of a monitor. In the foreground, it serves as long as it lives, and logs
/// to standard error. A signal ends the daemon without unmounting: it may be meant for the job of one client, and the
/// monitors of the others start the next daemon.
pub(crate) fn run(socket: &Path, is_in_foreground: bool) -> anyhow::Result<ExitCode> {
    if !is_in_foreground && matches!(fork()?, Fork::Parent(_)) {
        return Ok(ExitCode::SUCCESS);
    }
    InheritedFds::collect().close();
    let listener: OwnedFd = rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3)?;
    dup2_stdout(File::open("/dev/null")?)?;
    leave_client();
    if !is_in_foreground {
        rustix::process::setsid().context("cannot begin a session")?;
        logging::log_to(None);
    }
    logging::never_block();
    logging::listen(tell_waiting);
    crate::cli::malloc::return_freed_memory();
    privileges::drop_capabilities_of_daemon();
    let scope = (!is_in_foreground).then(|| Thread::spawn("tarfs-scope", scope::enter));
    let scope = scope.transpose().context("cannot start a thread")?;
    // Those of a job that was killed with the daemon in it.
    let clear = || tarfs::fuse::unmount_dead_mounts(None, CLEAR_DELAY);
    let clears = Thread::spawn("tarfs-clear", clear);
    let clears = clears.context("cannot start a thread")?;
    let network = locate::start_network().context("cannot start the network")?;
    let server = Server::new(network.handle().clone(), ThisProcess::Daemon(socket.into()));
    SERVER.get_or_init(|| Arc::downgrade(&server));
    let directory = socket.parent().context("a socket has no directory")?;
    let asked = Arc::clone(&server);
    let control = ControlSocket::serve(directory, move |request| asked.respond(&request));
    let control = control.context("cannot answer `tarfs status`")?;
    let daemon = Daemon::new(Arc::clone(&server), DaemonSocket::at(socket), listener);
    if let Some(manager) = ServiceManager::from_environment() {
        manager.notify("READY=1");
    }
    let served = daemon.run((!is_in_foreground).then_some(IDLE_TIME));
    force_exit_in_time();
    drop((control, scope, clears));
    // No caller is left to wait for requests in flight.
    network.shutdown_background();
    drop((daemon, server));
    served.context("cannot wait for clients")?;
    Ok(ExitCode::SUCCESS)
}

/// Gives up what the client that has started this process may have set for itself.
fn leave_client() {
    umask(Mode::from_raw_mode(0o022));
    // Only some users may raise it.
    setpriority_process(None, 0).ok();
    for resource in LIMITS {
        let limit = getrlimit(resource);
        let current = limit.maximum;
        setrlimit(resource, Rlimit { current, ..limit }).ok();
    }
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|number| all.set(number));
    sched_setaffinity(None, &all).ok();
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "0") {
        tracing::debug!(%error, "the score of the OOM killer stays as it is");
    }
}

fn tell_waiting(level: Level, text: &str) {
    if let Some(server) = SERVER.get().and_then(Weak::upgrade) {
        server.tell_waiting(level.as_str(), text);
    }
}
