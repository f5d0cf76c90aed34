//! Cleanup before a signal ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;

use tarfs::internal::process::status_field;
use tarfs::internal::sync::{Mutex, MutexGuard};
use tarfs::internal::thread::Thread;

/// Runs a cleanup before a signal ends the process, until it is dropped. A second signal ends it at once.
pub(crate) struct CleanupOnSignal {
    handle: Handle,
    ends_at_once: Arc<AtomicBool>,
    first: Arc<Mutex<PriorCleanup>>,
    _thread: Thread<()>,
}

/// A cleanup that runs before all others, if there is one.
#[derive(Default)]
pub(crate) struct PriorCleanup(Option<Box<dyn FnOnce() + Send>>);

impl CleanupOnSignal {
    /// Calls `cleanup` on another thread before SIGINT, SIGTERM or SIGHUP has its default effect.
    pub(crate) fn install(cleanup: impl FnOnce() + Send + 'static) -> anyhow::Result<Self> {
        const FAILED: &str = "cannot watch for signals";
        // Signals that nohup(1) or a shell's background job ignores stay ignored.
        let handled = [SIGINT, SIGTERM, SIGHUP]
            .into_iter()
            .filter(|&signal| !is_ignored(signal));
        let ends_at_once = Arc::new(AtomicBool::new(false));
        for signal in handled.clone() {
            // The order matters: the first signal must find the flag unset.
            flag::register_conditional_default(signal, Arc::clone(&ends_at_once))
                .context(FAILED)?;
            flag::register(signal, Arc::clone(&ends_at_once)).context(FAILED)?;
        }
        let mut signals = Signals::new(handled).context(FAILED)?;
        let handle = signals.handle();
        let first = Arc::<Mutex<PriorCleanup>>::default();
        let held = Arc::clone(&first);
        let thread = Thread::spawn("tarfs-signals", move || {
            if let Some(signal) = signals.forever().next() {
                // Locked until the process ends, so that no file is committed after the cleanup.
                let mut first = held.lock();
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

    pub(crate) fn run_first(&self, cleanup: impl FnOnce() + Send + 'static) {
        self.first.lock().0 = Some(Box::new(cleanup));
    }

    /// Blocks the cleanup, and the end by a signal, until the guard is dropped. If a signal arrived before,
    /// waits for the end of the process.
    pub(crate) fn block(&self) -> MutexGuard<'_, PriorCleanup> {
        self.first.lock()
    }
}

impl Drop for CleanupOnSignal {
    fn drop(&mut self) {
        // From now on, a signal has its default effect.
        self.ends_at_once.store(true, Ordering::SeqCst);
        // If a signal has arrived, the thread ends the process, and dropping the thread waits for that.
        self.handle.close();
    }
}

/// Returns the signals that end a mount. SIGHUP stays ignored if nohup(1) set that. SIGINT does not, although
/// a shell's background job ignores it, because a SIGINT to a mount is intended.
pub(crate) fn termination_signals() -> impl Iterator<Item = i32> {
    let hangup = Some(SIGHUP).filter(|&signal| !is_ignored(signal));
    [SIGINT, SIGTERM].into_iter().chain(hangup)
}

/// Whether the parent process set `signal` to be ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = u64::from_str_radix(status_field(&status, "SigIgn"), 16);
    // Bit 0 is signal 1.
    mask.is_ok_and(|mask| mask & (1 << (signal - 1)) != 0)
}
