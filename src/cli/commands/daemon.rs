//! `tarfs daemon`: the process that serves the mounts of a user.

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

/// Timeout for the next process to serve the mounts of the previous one.
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
    /// Without it, the first mount starts such a process, which ends a minute after the last one. When it is stopped,
    /// another one continues the mounts.
    Run,
    /// Have this program serve the mounts that processes of its earlier files serve
    ///
    /// Open files stay open, and calls wait for a moment. No mount changes if another process cannot continue one of
    /// them, which needs Linux 6.9 and a source with a strong version.
    Upgrade,
}

pub(crate) fn run(args: &DaemonArgs) -> anyhow::Result<ExitCode> {
    let directory = environment::runtime_dir();
    let socket = DaemonSocket::in_directory(&directory);
    let socket = socket.with_context(|| format!("cannot use {}", directory.display()))?;
    match args.verb {
        DaemonVerb::Run => {
            let listener = socket.listen_alone()?;
            Err(become_daemon(&socket, listener)).context("cannot run this program again")
        }
        DaemonVerb::Upgrade => {
            // While it is connected, the daemon does not end.
            let link = socket.connect_or_start(|listener| start_daemon(&socket, listener));
            let _link = link.context("cannot start a process for the mounts")?;
            for other in socket.of_other_programs()? {
                retire(&directory, &other, &socket)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Has the daemon at `old` hand all its mounts over to the one at `new`, and waits until that serves them.
fn retire(directory: &Path, old: &DaemonSocket, new: &DaemonSocket) -> anyhow::Result<()> {
    let Ok(link) = old.connect() else {
        // It has ended.
        return Ok(());
    };
    // A stopped one does not answer.
    set_socket_timeout(&link, Timeout::Recv, Some(TAKEOVER_TIMEOUT))?;
    let Some((Packet::Server(pid), _)) = link.receive().context("it does not answer")? else {
        return Ok(());
    };
    let mounts: Vec<_> = list_statuses(directory)?
        .into_iter()
        .filter(|status| status.pid == pid)
        .collect();
    let request = Packet::Retire(new.path().into());
    link.send(&request, &[], SendFlags::empty())?;
    wait_for_end(&link).with_context(|| format!("process {pid} goes on"))?;
    let is_served = |statuses: &[Status]| {
        let is_same = |one: &Status, other: &Status| one.device == other.device && other.pid != pid;
        let mut mounts = mounts.iter();
        mounts.all(|mount| statuses.iter().any(|status| is_same(mount, status)))
    };
    let deadline = Instant::now() + TAKEOVER_TIMEOUT;
    while !is_served(&list_statuses(directory)?) {
        if Instant::now() >= deadline {
            bail!("process {pid} has ended, but not all its mounts are served again");
        }
        std::thread::sleep(TAKEOVER_INTERVAL);
    }
    let count = mounts.len();
    let noun = if count == 1 { "mount" } else { "mounts" };
    output::print_text(&format!("process {pid} has handed over {count} {noun}\n"))
}

/// Waits until the daemon behind `link` ends, or refuses to.
fn wait_for_end(link: &Link) -> anyhow::Result<()> {
    loop {
        match link.receive().context("it does not answer")? {
            Some((Packet::Retired, _)) => return Ok(()),
            Some((Packet::Failed(failure), _)) => return Err(failure.into()),
            Some(_) => {}
            None => bail!("it refuses this process"),
        }
    }
}
