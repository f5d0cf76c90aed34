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
pub(super) struct CleanupOnSignal {
    handle: Handle,
    ends_at_once: Arc<AtomicBool>,
    first: Arc<Mutex<PriorCleanup>>,
    _thread: Thread<()>,
}

/// What is undone before anything else, if there is more.
#[derive(Default)]
pub(super) struct PriorCleanup(Option<Box<dyn FnOnce() + Send>>);

impl fmt::Debug for PriorCleanup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PriorCleanup")
            .field(&self.0.is_some())
            .finish()
    }
}

impl CleanupOnSignal {
    /// Calls `cleanup` on another thread when SIGINT, SIGTERM or SIGHUP comes, and then lets the
    /// signal do what it does without this.
    ///
    /// # Errors
    /// When signals cannot be watched for.
    pub(super) fn install(cleanup: impl FnOnce() + Send + 'static) -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        // What nohup(1) and a shell's background jobs are deaf to stays unheard.
        let handled = [SIGINT, SIGTERM, SIGHUP]
            .into_iter()
            .filter(|&signal| !is_ignored(signal));
        let ends_at_once = Arc::new(AtomicBool::new(false));
        for signal in handled.clone() {
            // In this order: the first signal finds the flag not set yet.
            flag::register_conditional_default(signal, Arc::clone(&ends_at_once))
                .context(FAILED)?;
            flag::register(signal, Arc::clone(&ends_at_once)).context(FAILED)?;
        }
        let mut signals = Signals::new(handled).context(FAILED)?;
        let handle = signals.handle();
        let first = Arc::<Mutex<PriorCleanup>>::default();
        let held = Arc::clone(&first);
        let thread = Thread::spawn("signals", move || {
            if let Some(signal) = signals.forever().next() {
                // Until the end: what is undone stays so.
                let mut first = lock(&held);
                if let Some(first) = first.0.take() {
                    first();
                }
                cleanup();
                if let Err(error) = emulate_default_handler(signal) {
                    tracing::error!(%error, "cannot end by the signal");
                }
            }
        })
        .context(FAILED)?;
        Ok(Self {
            handle,
            ends_at_once,
            first,
            _thread: thread,
        })
    }

    /// Has `cleanup` done before what is undone anyway.
    pub(super) fn run_first(&self, cleanup: impl FnOnce() + Send + 'static) {
        lock(&self.first).0 = Some(Box::new(cleanup));
    }

    /// Nothing is undone until what this returns is dropped: a signal waits, or has ended everything.
    pub(super) fn block(&self) -> MutexGuard<'_, PriorCleanup> {
        lock(&self.first)
    }
}

fn lock(first: &Mutex<PriorCleanup>) -> MutexGuard<'_, PriorCleanup> {
    first.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for CleanupOnSignal {
    fn drop(&mut self) {
        // From now on a signal has its usual effect again.
        self.ends_at_once.store(true, Ordering::SeqCst);
        // If one came already the thread ends the process, for which our thread waits.
        self.handle.close();
    }
}

/// The signals that end a mount. nohup(1) wants SIGHUP to be ignored; a shell has its background jobs
/// ignore SIGINT, but who sends that to a mount means it.
pub(super) fn termination_signals() -> impl Iterator<Item = i32> {
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
