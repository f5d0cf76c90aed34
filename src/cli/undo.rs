//! What is to be undone before a signal ends the process.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;

use crate::base::thread::Thread;

/// While it lives, a signal that ends the process has something undone first. A second signal
/// ends it at once.
#[derive(Debug)]
pub(super) struct Undo {
    handle: Handle,
    impatient: Arc<AtomicBool>,
    first: Arc<Mutex<First>>,
    _thread: Thread<()>,
}

/// What is undone before anything else, if there is more.
#[derive(Default)]
pub(super) struct First(Option<Box<dyn FnOnce() + Send>>);

impl fmt::Debug for First {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("First").field(&self.0.is_some()).finish()
    }
}

impl Undo {
    /// Calls `undo` on another thread when SIGINT, SIGTERM or SIGHUP comes, and then lets the
    /// signal do what it does without this.
    ///
    /// # Errors
    /// When signals cannot be watched for.
    pub(super) fn on_signals(undo: impl FnOnce() + Send + 'static) -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        // What nohup(1) and a shell's background jobs are deaf to stays unheard.
        let heard = [SIGINT, SIGTERM, SIGHUP]
            .into_iter()
            .filter(|&signal| !is_ignored(signal));
        let impatient = Arc::new(AtomicBool::new(false));
        for signal in heard.clone() {
            // In this order: the first signal finds the flag not set yet.
            flag::register_conditional_default(signal, Arc::clone(&impatient)).context(FAILED)?;
            flag::register(signal, Arc::clone(&impatient)).context(FAILED)?;
        }
        let mut signals = Signals::new(heard).context(FAILED)?;
        let handle = signals.handle();
        let first = Arc::<Mutex<First>>::default();
        let held = Arc::clone(&first);
        let thread = Thread::spawn("signals", move || {
            if let Some(signal) = signals.forever().next() {
                // Until the end: what is undone stays so.
                let mut first = lock(&held);
                if let Some(first) = first.0.take() {
                    first();
                }
                undo();
                if let Err(error) = emulate_default_handler(signal) {
                    tracing::error!(%error, "cannot end by the signal");
                }
            }
        })
        .context(FAILED)?;
        Ok(Self {
            handle,
            impatient,
            first,
            _thread: thread,
        })
    }

    /// Has `undo` done before what is undone anyway.
    pub(super) fn first(&self, undo: impl FnOnce() + Send + 'static) {
        lock(&self.first).0 = Some(Box::new(undo));
    }

    /// Nothing is undone until what this returns is dropped: a signal waits, or has ended everything.
    pub(super) fn hold(&self) -> MutexGuard<'_, First> {
        lock(&self.first)
    }
}

fn lock(first: &Mutex<First>) -> MutexGuard<'_, First> {
    first.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Undo {
    fn drop(&mut self) {
        // From now on a signal has its usual effect again.
        self.impatient.store(true, Ordering::SeqCst);
        // If one came already the thread ends the process, for which our thread waits.
        self.handle.close();
    }
}

/// The signals that end a mount. nohup(1) wants SIGHUP to be ignored; a shell has its background jobs
/// ignore SIGINT, but who sends that to a mount means it.
pub(super) fn ending_signals() -> impl Iterator<Item = i32> {
    let hangup = Some(SIGHUP).filter(|&signal| !is_ignored(signal));
    [SIGINT, SIGTERM].into_iter().chain(hangup)
}

/// Whether the process was told to ignore `signal` by who started it.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Bit 0 is signal 1.
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}
