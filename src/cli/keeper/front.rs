//! A keeper in the foreground: the process that lives on is the one that the user started.
//!
//! With `--restart` it is not who serves a mount that stays, but who keeps it. A service manager, a shell or
//! a container looks at the process that it started: were that one who serves, its death would be the end of
//! the service just when another process goes on. So here the keeper comes first and starts who serves;
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

use super::{Packet, Ward, is_alive, wire};
use crate::cli::notify::Manager;
use crate::cli::{output, undo};

/// A process that dies so soon after a signal was passed on to it may not have heard it.
const HEEDED: Duration = Duration::from_secs(3);

/// What only a keeper in the foreground has.
#[derive(Debug)]
pub(super) struct Front {
    /// A byte for each signal that should end the mount.
    pub(super) heard: UnixStream,
    /// The last of these.
    last: Arc<AtomicUsize>,
    /// The one that came while nobody served the mount: nobody else shall.
    ended_by: Cell<Option<i32>>,
    /// The one that was passed on last, and when.
    passed_on: Cell<Option<(i32, Instant)>>,
    manager: Option<Manager>,
    /// What there was no room for when the manager was to be told.
    untold: RefCell<Option<String>>,
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
        let last = Arc::<AtomicUsize>::default();
        for signal in undo::ending_signals() {
            // In this order: which one it was is known when it is heard.
            let number = usize::try_from(signal).context(FAILED)?;
            flag::register_usize(signal, Arc::clone(&last), number).context(FAILED)?;
            pipe::register(signal, raised.try_clone().context(FAILED)?).context(FAILED)?;
        }
        Ok(Self {
            heard,
            last,
            ended_by: Cell::default(),
            passed_on: Cell::default(),
            manager: Manager::find(),
            untold: RefCell::default(),
        })
    }

    /// The signal that has come since the last call, if one has.
    fn signal(&self) -> Option<i32> {
        let mut bytes = [0; 64];
        let has_come = (&self.heard).read(&mut bytes).is_ok_and(|len| len > 0);
        let last = i32::try_from(self.last.load(Ordering::SeqCst)).ok();
        last.filter(|_| has_come)
    }

    /// Whether nobody shall go on with the mount.
    pub(super) fn is_over(&self) -> bool {
        self.ended_by.get().is_some()
    }

    /// Whoever has just died may have done so before it came to a signal that was passed on.
    pub(super) fn heed_what_was_passed_on(&self) {
        let recent = |&(_, when): &(i32, Instant)| when.elapsed() < HEEDED;
        if let Some((signal, _)) = self.passed_on.take().filter(recent) {
            self.ended_by.set(Some(signal));
        }
    }

    /// Passes on what the mount says to the service manager.
    pub(super) fn tell(&self, words: &str) {
        if let Some(manager) = &self.manager {
            let untold = (!manager.tell(words)).then(|| words.to_owned());
            self.untold.replace(untold);
        }
    }

    /// Tells the manager once more what there was no room for.
    pub(super) fn repeat(&self) {
        if let Some(words) = self.untold.take() {
            self.tell(&words);
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
        if let Some(signal) = self.signal() {
            self.ended_by.set(Some(signal));
        }
    }

    /// The end of this process after the last that served it ended with `status`.
    pub(super) fn end(&self, status: Option<ExitStatus>) -> ExitCode {
        if let Some(code) = status.and_then(|status| status.code()) {
            return ExitCode::from(u8::try_from(code).unwrap_or(output::FAILURE));
        }
        if let Some(signal) = self.ended_by.get() {
            // As it would have ended without a keeper. The first process of a namespace no signal ends.
            if std::process::id() != 1 {
                drop(emulate_default_handler(signal));
            }
            return ExitCode::from(u8::try_from(128 + signal).unwrap_or(output::FAILURE));
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
        let Some(signal) = front.signal() else { return };
        front.passed_on.set(Some((signal, Instant::now())));
        if self.state.is_none() || !is_alive(self.pid) {
            // There is nothing that it would have to unmount, and whoever comes after has begun in vain.
            front.ended_by.set(Some(signal));
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
            let told = rustix::process::kill_process(pid, Signal::TERM);
            told.unwrap_or_else(|error| tracing::debug!(%error, "it has ended by itself"));
        }
    }
}
