//! A keeper in the foreground: the process that lives on is the one that the user started.
//!
//! With `--restart` it is not who serves a mount that stays, but who keeps it. A service manager, a shell or
//! a container looks at the process that it started: were that one who serves, its death would be the end of
//! the service just when another process goes on. So here the keeper comes first and starts who serves;
//! signals go through it, and words to the service manager, and it ends as the last of them has.

use std::cell::Cell;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::{emulate_default_handler, pipe};

use super::{Packet, Ward, wire};
use crate::cli::notify::Manager;
use crate::cli::{output, undo};

/// What only a keeper in the foreground has.
#[derive(Debug)]
pub(super) struct Front {
    /// A byte for each signal that should end the mount.
    pub(super) heard: UnixStream,
    /// Whether one came while nobody served the mount: nobody else shall.
    pub(super) is_over: Cell<bool>,
    manager: Option<Manager>,
}

impl Front {
    /// Hears signals from now on.
    ///
    /// # Errors
    /// When the system has no means for it.
    pub(super) fn new() -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        let (heard, raised) = UnixStream::pair().context(FAILED)?;
        heard.set_nonblocking(true).context(FAILED)?;
        let hangup = Some(SIGHUP).filter(|&signal| !undo::is_ignored(signal));
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
            pipe::register(signal, raised.try_clone().context(FAILED)?).context(FAILED)?;
        }
        Ok(Self {
            heard,
            is_over: Cell::new(false),
            manager: Manager::find(),
        })
    }

    /// Whether a signal has come since the last call.
    pub(super) fn was_asked_to_end(&self) -> bool {
        let mut bytes = [0; 64];
        (&self.heard).read(&mut bytes).is_ok_and(|len| len > 0)
    }

    /// Passes on what the mount says to the service manager.
    pub(super) fn tell(&self, words: &str) {
        if let Some(manager) = &self.manager {
            manager.tell(words);
        }
    }

    /// Waits for that long, or until a signal comes while nobody serves.
    pub(super) fn pause(&self, time: Duration) {
        let deadline = Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        let mut polled = [PollFd::new(&self.heard, PollFlags::IN)];
        if let Err(error) = poll(&mut polled, Some(&deadline)) {
            tracing::debug!(%error, "a pause has ended early");
        }
        if self.was_asked_to_end() {
            self.is_over.set(true);
        }
    }

    /// The end of this process after the last that served it ended with `status`.
    pub(super) fn end(&self, status: Option<ExitStatus>) -> ExitCode {
        if let Some(code) = status.and_then(|status| status.code()) {
            return ExitCode::from(u8::try_from(code).unwrap_or(output::FAILURE));
        }
        if self.is_over.get() {
            // As it would have ended without a keeper.
            drop(emulate_default_handler(SIGTERM));
        }
        output::fail(&match status.and_then(|status| status.signal()) {
            Some(signal) => {
                anyhow::anyhow!("the process that served the mount was ended by signal {signal}")
            }
            None => anyhow::anyhow!("the process that served the mount does not end"),
        })
    }
}

/// Makes this process one that a keeper in the foreground leads: a terminal's signals are for that one, and
/// when it is killed this process unmounts, if it can.
///
/// # Errors
/// When the keeper is gone already, or a system call fails.
pub(in crate::cli) fn follow() -> anyhow::Result<()> {
    rustix::process::setsid().context("cannot begin a session")?;
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the keeper")?;
    let keeper = rustix::net::sockopt::socket_peercred(io::stdin())?.pid;
    anyhow::ensure!(
        getppid() == Some(keeper),
        "who started this process is gone"
    );
    Ok(())
}

impl super::Keeper {
    /// The keeper that started this process before there was anything to keep.
    ///
    /// # Errors
    /// When no more files can be open.
    pub(in crate::cli) fn that_leads() -> io::Result<Self> {
        Ok(Self {
            socket: super::standard_input()?,
        })
    }

    /// The service manager that wants to hear of it, if there is one.
    pub(in crate::cli) fn manager() -> Option<Manager> {
        let socket = super::standard_input().ok()?;
        // A keeper that was stopped must not stop the mount.
        Manager::behind(move |text| wire::send_at_once(&socket, &Packet::Word(text.to_owned())))
    }
}

impl Ward {
    /// Passes on signals that have come, or notes that nobody else shall serve the mount.
    pub(super) fn pass_signals_on(&self) {
        let Some(front) = &self.front else { return };
        if !front.was_asked_to_end() {
            return;
        }
        if self.state.is_none() {
            // There is nothing that it would have to unmount, and whoever comes after has begun in vain.
            front.is_over.set(true);
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
            let told = rustix::process::kill_process(pid, Signal::TERM);
            told.unwrap_or_else(|error| tracing::debug!(%error, "it has ended by itself"));
        }
    }
}
