//! A supervisor in the foreground: the process that lives on is the one that the user started.
//!
//! With `--restart` it is not who serves a mount that stays, but who keeps it. A service manager, a shell or
//! a container looks at the process that it started: were that one who serves, its death would be the end of
//! the service just when another process goes on. So here the supervisor comes first and starts who serves;
//! signals go through it, and words to the service manager, and it ends as the last of them has.

use std::cell::{Cell, RefCell};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use signal_hook::flag;
use signal_hook::low_level::{emulate_default_handler, pipe};

use super::{Packet, Worker, is_alive, protocol};
use crate::cli::sd_notify::ServiceManager;
use crate::cli::{cleanup_on_signal, output};

/// A process that dies so soon after a signal was passed on to it may not have heard it.
const SIGNAL_GRACE: Duration = Duration::from_secs(3);

/// What only a supervisor in the foreground has.
#[derive(Debug)]
pub(super) struct ForegroundSupervisor {
    /// A byte for each signal that should end the mount.
    pub(super) signal_pipe: UnixStream,
    /// The last of these.
    last_signal: Arc<AtomicUsize>,
    /// The one that came while nobody served the mount: nobody else shall.
    stop_signal: Cell<Option<i32>>,
    /// The one that was passed on last, and when.
    forwarded: Cell<Option<(i32, Instant)>>,
    manager: Option<ServiceManager>,
    /// What there was no room for when the manager was to be told.
    unsent: RefCell<Option<String>>,
}

impl ForegroundSupervisor {
    /// Hears signals from now on.
    ///
    /// # Errors
    /// When the system has no means for it.
    pub(super) fn new() -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        let (signal_pipe, raised) = UnixStream::pair().context(FAILED)?;
        signal_pipe.set_nonblocking(true).context(FAILED)?;
        let last_signal = Arc::<AtomicUsize>::default();
        for signal in cleanup_on_signal::termination_signals() {
            // In this order: which one it was is known when it is heard.
            let number = usize::try_from(signal).context(FAILED)?;
            flag::register_usize(signal, Arc::clone(&last_signal), number).context(FAILED)?;
            pipe::register(signal, raised.try_clone().context(FAILED)?).context(FAILED)?;
        }
        Ok(Self {
            signal_pipe,
            last_signal,
            stop_signal: Cell::default(),
            forwarded: Cell::default(),
            manager: ServiceManager::from_environment(),
            unsent: RefCell::default(),
        })
    }

    /// The signal that has come since the last call, if one has.
    fn take_signal(&self) -> Option<i32> {
        let mut bytes = [0; 64];
        let has_come = (&self.signal_pipe)
            .read(&mut bytes)
            .is_ok_and(|len| len > 0);
        let last = i32::try_from(self.last_signal.load(Ordering::SeqCst)).ok();
        last.filter(|_| has_come)
    }

    /// Whether nobody shall go on with the mount.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop_signal.get().is_some()
    }

    /// Whoever has just died may have done so before it came to a signal that was passed on.
    pub(super) fn stop_if_signal_was_recent(&self) {
        let recent = |&(_, when): &(i32, Instant)| when.elapsed() < SIGNAL_GRACE;
        if let Some((signal, _)) = self.forwarded.take().filter(recent) {
            self.stop_signal.set(Some(signal));
        }
    }

    /// Passes on what the mount says to the service manager.
    pub(super) fn notify(&self, text: &str) {
        if let Some(manager) = &self.manager {
            let unsent = (!manager.notify(text)).then(|| text.to_owned());
            self.unsent.replace(unsent);
        }
    }

    /// Tells the manager once more what there was no room for.
    pub(super) fn retry_unsent(&self) {
        if let Some(text) = self.unsent.take() {
            self.notify(&text);
        }
    }

    /// Waits for that long, or until a signal comes while nobody serves.
    pub(super) fn sleep(&self, time: Duration) {
        let deadline = Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        let mut polled = [PollFd::new(&self.signal_pipe, PollFlags::IN)];
        if let Err(error) = poll(&mut polled, Some(&deadline)) {
            tracing::debug!(%error, "a pause has ended early");
        }
        if let Some(signal) = self.take_signal() {
            self.stop_signal.set(Some(signal));
        }
    }

    /// The end of this process after the last that served it ended with `status`.
    pub(super) fn exit_code(&self, status: Option<ExitStatus>) -> ExitCode {
        if let Some(code) = status.and_then(|status| status.code()) {
            return ExitCode::from(u8::try_from(code).unwrap_or(output::EXIT_FAILURE));
        }
        if let Some(signal) = self.stop_signal.get() {
            // As it would have ended without a supervisor. The first process of a namespace no signal ends.
            if std::process::id() != 1 {
                drop(emulate_default_handler(signal));
            }
            return ExitCode::from(u8::try_from(128 + signal).unwrap_or(output::EXIT_FAILURE));
        }
        output::print_failure(&match status.and_then(|status| status.signal()) {
            Some(signal) => {
                anyhow::anyhow!("the process that served the mount was ended by signal {signal}")
            }
            None => anyhow::anyhow!("the process that served the mount does not end"),
        })
    }
}

/// Makes this process one that a supervisor in the foreground leads: a terminal's signals are for that one, and
/// when it is killed this process unmounts, if it can.
///
/// # Errors
/// When the supervisor is gone already, or a system call fails.
pub(in crate::cli) fn follow_supervisor() -> anyhow::Result<()> {
    rustix::process::setsid().context("cannot begin a session")?;
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the keeper")?;
    let supervisor = rustix::net::sockopt::socket_peercred(io::stdin())?.pid;
    anyhow::ensure!(
        getppid() == Some(supervisor),
        "who started this process is gone"
    );
    Ok(())
}

impl super::SupervisorLink {
    /// The supervisor that started this process before there was anything to keep.
    ///
    /// # Errors
    /// When no more files can be open.
    pub(in crate::cli) fn from_stdin() -> io::Result<Self> {
        Ok(Self {
            socket: super::dup_stdin()?,
        })
    }

    /// The service manager that wants to hear of it, if there is one.
    pub(in crate::cli) fn service_manager() -> Option<ServiceManager> {
        let socket = super::dup_stdin().ok()?;
        // A supervisor that was stopped must not stop the mount.
        ServiceManager::with_transport(move |text| {
            protocol::send_without_blocking(&socket, &Packet::Notify(text.to_owned()))
        })
    }
}

impl Worker {
    /// Passes on signals that have come, or notes that nobody else shall serve the mount.
    pub(super) fn forward_signals(&self) {
        let Some(foreground) = &self.foreground else {
            return;
        };
        let Some(signal) = foreground.take_signal() else {
            return;
        };
        foreground.forwarded.set(Some((signal, Instant::now())));
        if self.session_state.is_none() || !is_alive(self.pid) {
            // There is nothing that it would have to unmount, and whoever comes after has begun in vain.
            foreground.stop_signal.set(Some(signal));
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
            let told = rustix::process::kill_process(pid, Signal::TERM);
            told.unwrap_or_else(|error| tracing::debug!(%error, "it has ended by itself"));
        }
    }
}
