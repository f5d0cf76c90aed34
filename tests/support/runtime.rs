//! Runtimes on three clocks: that of the machine, one that stands still, and one that leaps.

use std::ops::Deref;
use std::sync::Arc;

use tarfs::internal::thread::Thread;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A runtime for sources.
pub(crate) struct TestRuntime {
    runtime: Arc<Runtime>,
    _driver: Option<Driver>,
}

/// A thread that drives a runtime on a paused clock.
struct Driver {
    // Declared before the thread, because dropping it ends the thread.
    _stop: oneshot::Sender<()>,
    _thread: Thread<()>,
}

impl TestRuntime {
    /// A runtime on the clock of the machine.
    pub(crate) fn new() -> Self {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        Self {
            runtime: Arc::new(runtime.expect("a runtime")),
            _driver: None,
        }
    }

    /// A runtime in which no time passes, so that no request looks late on a busy machine. Its timers never end.
    pub(crate) fn frozen() -> Self {
        Self::paused(|runtime, stopped| {
            // A paused clock does not advance while a blocking task runs.
            runtime.spawn_blocking(move || drop(stopped.blocking_recv()))
        })
    }

    /// A runtime whose clock leaps to the end of the next timer whenever all its tasks wait.
    ///
    /// It is for simulated networks, whose answers wait on the same clock. Each timer must be in a task of
    /// [`TestRuntime::run`], because the clock does not wait for other threads.
    pub(crate) fn simulated() -> Self {
        Self::paused(|runtime, stopped| runtime.spawn(async move { drop(stopped.await) }))
    }

    /// Runs `work` as a task, and waits for its result.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> T {
        self.block_on(self.spawn(work)).expect("no panic")
    }

    /// A runtime on a paused clock, which runs until the task that `start` starts has ended.
    fn paused(start: fn(&Runtime, oneshot::Receiver<()>) -> JoinHandle<()>) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build();
        let runtime = Arc::new(runtime.expect("a runtime"));
        let (stop, stopped) = oneshot::channel();
        let (driven, task) = (Arc::clone(&runtime), start(&runtime, stopped));
        let thread = Thread::spawn("network", move || drop(driven.block_on(task)));
        Self {
            runtime,
            _driver: Some(Driver {
                _stop: stop,
                _thread: thread.expect("a thread"),
            }),
        }
    }
}

impl Deref for TestRuntime {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        &self.runtime
    }
}
