//! `tarfs daemon`: the process that serves the mounts of a user.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use rustix::net::SendFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::cli::daemon::daemon_process::{become_daemon, start_daemon};
use crate::cli::environment;
use crate::cli::ui::output;
use tarfs::serve::{DaemonSocket, Link, Packet, Status, list_statuses};

/// Timeout for an answer of a daemon, and for the next one to serve its mounts.
const TAKEOVER_TIMEOUT: Duration = Duration::from_mins(1);

/// Interval of checks whether it serves them.
const TAKEOVER_INTERVAL: Duration = Duration::from_millis(20);

/// Arguments of `tarfs daemon`.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    #[command(subcommand)]
    verb: DaemonVerb,
}

#[derive(Debug, Subcommand)]
enum DaemonVerb {
    /// Serve this user's mounts in the foreground until it is stopped
    ///
    /// Without it, the first mount starts such a process, which ends a second after the last one. When it is stopped,
    /// another one continues the mounts.
    Run,
    /// Have this program serve the mounts that processes of its earlier files serve
    ///
    /// Open files stay open, and calls wait for a moment. No mount changes if another process cannot continue one of
    /// them, which needs Linux 6.9, a source with a strong version, and the process that keeps the mount.
    Upgrade,
}

pub(crate) fn run(args: &DaemonArgs) -> anyhow::Result<ExitCode> {
    match args.verb {
        DaemonVerb::Run => {
            let socket = socket_in(&environment::runtime_dir())?;
            let (listener, link) = socket.replace()?;
            if let Some(link) = link
                && let Err(error) = retire(&link, &socket)
            {
                tracing::warn!("the process before serves its mounts to their end: {error:#}");
            }
            Err(become_daemon(&socket, listener)).context("cannot run this program again")
        }
        DaemonVerb::Upgrade => {
            let directories = environment::runtime_dirs().into_iter();
            for directory in directories.filter(|directory| directory.is_dir()) {
                upgrade(&directory)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn socket_in(directory: &Path) -> anyhow::Result<DaemonSocket> {
    let socket = DaemonSocket::in_directory(directory);
    socket.with_context(|| format!("cannot use {}", directory.display()))
}

/// Has a daemon of this program continue the mounts of those with sockets in `directory`.
fn upgrade(directory: &Path) -> anyhow::Result<()> {
    let socket = socket_in(directory)?;
    let others = socket.others()?.into_iter();
    for other in others.filter(|other| !socket.has_same_program(other)) {
        let Ok(link) = other.connect() else {
            // It has ended, or does not serve for this process.
            continue;
        };
        let Some(pid) = server_of(&link)? else {
            let path = other.path().display();
            tracing::warn!(%path, "a process with other rights goes on");
            continue;
        };
        if !socket.has_same_clients(&other) {
            tracing::warn!(pid, "a process of another format or other rights goes on");
            continue;
        }
        // While it is connected, the daemon does not end.
        let new = socket.connect_or_start(|listener| start_daemon(&socket, listener, None));
        let new = new.context("cannot start a process for the mounts")?;
        server_of(&new)?.context("the new process refuses this one")?;
        let has_pid = |status: &Status| status.pid == pid;
        let mounts = list_statuses(directory)?.into_iter().filter(has_pid);
        let mounts: Vec<_> = mounts.collect();
        retire(&link, &socket).with_context(|| format!("process {pid} goes on"))?;
        wait_for_takeover(directory, &mounts)?;
        let count = mounts.len();
        let noun = if count == 1 { "mount" } else { "mounts" };
        output::print_text(&format!("process {pid} has handed over {count} {noun}\n"))?;
    }
    Ok(())
}

/// The process of the daemon behind `link`. `None` if it refuses this one.
fn server_of(link: &Link) -> anyhow::Result<Option<u32>> {
    // A stopped one does not answer.
    set_socket_timeout(link, Timeout::Recv, Some(TAKEOVER_TIMEOUT))?;
    match link.receive().context("a process does not answer")? {
        Some((Packet::Server(pid), _)) => Ok(Some(pid)),
        _ => Ok(None),
    }
}

/// Has the daemon behind `link` hand all its mounts over to one of this program at `new`, and waits for its end.
fn retire(link: &Link, new: &DaemonSocket) -> anyhow::Result<()> {
    let program = File::open("/proc/self/exe").context("cannot open this program")?;
    let request = Packet::Retire(new.path().into());
    link.send(&request, &[program.as_fd()], SendFlags::empty())?;
    set_socket_timeout(link, Timeout::Recv, Some(TAKEOVER_TIMEOUT))?;
    loop {
        match link.receive().context("it does not answer")? {
            Some((Packet::Failed(failure), _)) => return Err(failure.into()),
            Some(_) => {}
            None => return Ok(()),
        }
    }
}

/// Waits until other processes serve those of `mounts` that are not unmounted. One whose daemons have died gets a process
/// of its own.
fn wait_for_takeover(directory: &Path, mounts: &[Status]) -> anyhow::Result<()> {
    let deadline = Instant::now() + TAKEOVER_TIMEOUT;
    loop {
        let statuses = list_statuses(directory)?;
        let is_served = |mount: &&Status| {
            let mut same = statuses.iter().filter(|status| {
                (&status.device, status.mount_id) == (&mount.device, mount.mount_id)
            });
            same.any(|status| status.pid != mount.pid)
        };
        let mut waiting = mounts.iter().filter(|mount| !is_served(mount));
        let is_mounted = |mount: &&Status| {
            let mountpoint = OsStr::from_bytes(mount.mountpoint_bytes());
            mount.is_mounted_on(Path::new(mountpoint))
        };
        let Some(mount) = waiting.find(is_mounted) else {
            return Ok(());
        };
        if Instant::now() >= deadline {
            bail!("no process has taken over {}", mount.mountpoint);
        }
        std::thread::sleep(TAKEOVER_INTERVAL);
    }
}
