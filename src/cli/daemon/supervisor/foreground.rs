//! The supervisor in the foreground, as the process that the user started.
//!
//! A service manager, a shell or a container watches the process that it started. With `--restart` that is
//! the supervisor, because the death of a worker would end the service. It starts the worker, forwards
//! signals to it and notifications to the service manager, and exits with the code of the last worker.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::flag;
use signal_hook::low_level::{emulate_default_handler, pipe};

use crate::cli::daemon::sd_notify::ServiceManager;
use crate::cli::exit_status;
use crate::cli::ui::{cleanup_on_signal, output};

/// A worker that dies within this time of a forwarded signal may not have received it.
const SIGNAL_GRACE: Duration = Duration::from_secs(3);

pub(super) struct ForegroundSupervisor {
    /// Receives a byte for each termination signal.
    pub(super) signal_pipe: UnixStream,
    last_signal: Arc<AtomicUsize>,
    /// The signal that arrived while no worker served the mount. It forbids successors.
    stop_signal: Cell<Option<i32>>,
    /// The signal forwarded last, and its time.
    forwarded: Cell<Option<(i32, Instant)>>,
    manager: Option<ServiceManager>,
    /// The notification for which the manager's socket had no room.
    unsent: RefCell<Option<String>>,
}

impl ForegroundSupervisor {
    /// Starts to handle signals.
    pub(super) fn new() -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        let (signal_pipe, raised) = UnixStream::pair().context(FAILED)?;
        signal_pipe.set_nonblocking(true).context(FAILED)?;
        let last_signal = Arc::<AtomicUsize>::default();
        for signal in cleanup_on_signal::termination_signals() {
            // The number must be stored before the pipe becomes readable.
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

    /// Takes the signal that arrived since the last call, if there is one.
    fn take_signal(&self) -> Option<i32> {
        let mut bytes = [0; 64];
        let has_arrived = (&self.signal_pipe)
            .read(&mut bytes)
            .is_ok_and(|len| len > 0);
        let last = i32::try_from(self.last_signal.load(Ordering::SeqCst)).ok();
        last.filter(|_| has_arrived)
    }

    /// Takes a signal that the worker shall get. Forbids successors if that is useless.
    pub(super) fn take_forwarded_signal(&self, is_useless: impl FnOnce() -> bool) -> bool {
        let Some(signal) = self.take_signal() else {
            return false;
        };
        self.forwarded.set(Some((signal, Instant::now())));
        if is_useless() {
            self.stop_signal.set(Some(signal));
        }
        true
    }

    /// Whether no successor may be started.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop_signal.get().is_some()
    }

    /// Forbids successors if the dead worker may have missed a forwarded signal.
    pub(super) fn stop_if_signal_was_recent(&self) {
        let recent = |&(_, when): &(i32, Instant)| when.elapsed() < SIGNAL_GRACE;
        if let Some((signal, _)) = self.forwarded.take().filter(recent) {
            self.stop_signal.set(Some(signal));
        }
    }

    /// Forwards a worker's notification to the service manager.
    pub(super) fn notify(&self, text: &str) {
        if let Some(manager) = &self.manager {
            let unsent = (!manager.notify(text)).then(|| text.to_owned());
            self.unsent.replace(unsent);
        }
    }

    pub(super) fn retry_unsent(&self) {
        if let Some(text) = self.unsent.take() {
            self.notify(&text);
        }
    }

    /// Sleeps for `time`, or until a signal arrives.
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

    pub(super) fn exit_code(&self, status: Option<ExitStatus>) -> ExitCode {
        if let Some(code) = status.and_then(|status| status.code()) {
            return ExitCode::from(u8::try_from(code).unwrap_or(exit_status::FAILURE));
        }
        if let Some(signal) = self.stop_signal.get() {
            // End by the same signal, as without a supervisor. Signals do not kill PID 1 of a namespace.
            if std::process::id() != 1 {
                drop(emulate_default_handler(signal));
            }
            return ExitCode::from(u8::try_from(128 + signal).unwrap_or(exit_status::FAILURE));
        }
        output::print_failure(&match status.and_then(|status| status.signal()) {
            Some(signal) => {
                anyhow::anyhow!("the process that served the mount was ended by signal {signal}")
            }
            None => anyhow::anyhow!("the process that served the mount does not end"),
        })
    }
}
