//! Signals to the monitor, and notifications for a service manager.
//!
//! A service manager, a shell or a container watches the process that it started. That is the monitor in the foreground.
//! It asks the server to unmount at a termination signal, and tells the service manager how the server fares.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use signal_hook::flag;
use signal_hook::low_level::{emulate_default_handler, pipe};

use crate::cli::daemon::sd_notify::ServiceManager;
use crate::cli::exit_status;
use crate::cli::ui::cleanup_on_signal;
use tarfs::internal::wait::is_readable;

/// A server that dies within this time of a request to stop may not have received it.
const SIGNAL_GRACE: Duration = Duration::from_secs(3);

/// Termination signals to this process.
pub(super) struct Signals {
    /// Receives a byte for each of them.
    pipe: UnixStream,
    last: Arc<AtomicUsize>,
    /// The last one, and its time.
    taken: Cell<Option<(i32, Instant)>>,
    manager: Option<ServiceManager>,
    /// The notification for which the manager's socket had no room.
    unsent: RefCell<Option<String>>,
}

impl Signals {
    /// Handles signals from now on.
    pub(super) fn new() -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        let (pipe, raised) = UnixStream::pair().context(FAILED)?;
        pipe.set_nonblocking(true).context(FAILED)?;
        let last = Arc::<AtomicUsize>::default();
        for signal in cleanup_on_signal::termination_signals() {
            // The number must be stored before the pipe becomes readable.
            let number = usize::try_from(signal).context(FAILED)?;
            flag::register_usize(signal, Arc::clone(&last), number).context(FAILED)?;
            pipe::register(signal, raised.try_clone().context(FAILED)?).context(FAILED)?;
        }
        Ok(Self {
            pipe,
            last,
            taken: Cell::default(),
            manager: ServiceManager::from_environment(),
            unsent: RefCell::default(),
        })
    }

    /// The descriptor that waits for a signal.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.pipe, PollFlags::IN)
    }

    /// Takes the signal that arrived since the last call, if there is one.
    pub(super) fn take(&self) -> Option<i32> {
        let mut bytes = [0; 64];
        let has_arrived = (&self.pipe).read(&mut bytes).is_ok_and(|len| len > 0);
        let last = i32::try_from(self.last.load(Ordering::SeqCst)).ok();
        let signal = last.filter(|_| has_arrived)?;
        self.taken.set(Some((signal, Instant::now())));
        Some(signal)
    }

    /// The signal of the last moments, which a dead server may not have received.
    pub(super) fn recent(&self) -> Option<i32> {
        let (signal, when) = self.taken.get()?;
        (when.elapsed() < SIGNAL_GRACE).then_some(signal)
    }

    /// Sends a notification to the service manager.
    pub(super) fn notify(&self, text: &str) {
        if let Some(manager) = &self.manager {
            let unsent = (!manager.notify(text)).then(|| text.to_owned());
            self.unsent.replace(unsent);
        }
    }

    pub(super) fn notify_status(&self, text: &str) {
        if let Some(manager) = &self.manager {
            manager.notify_status(text);
        }
    }

    pub(super) fn retry_unsent(&self) {
        if let Some(text) = self.unsent.take() {
            self.notify(&text);
        }
    }

    /// Sleeps for `time`, or until a signal arrives. Returns it.
    pub(super) fn sleep(&self, time: Duration) -> Option<i32> {
        is_readable(&self.pipe, time);
        self.take()
    }
}

/// Ends this process by `signal`, as without a handler. Returns its exit code, because signals do not kill PID 1 of a
/// namespace.
pub(super) fn end_by(signal: i32) -> ExitCode {
    if std::process::id() != 1 {
        drop(emulate_default_handler(signal));
    }
    ExitCode::from(u8::try_from(128 + signal).unwrap_or(exit_status::FAILURE))
}
