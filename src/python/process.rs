//! The state that all archives of a process share, and calls that signals interrupt.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Handle, Runtime};

use super::error::{ERROR, exception};
use crate::archive::{OpenOptions, SharedResources};
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::locate;

/// Interval of the checks for signals while a call waits.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Time for which a dropped value may wait for its threads. After that, they end in the background.
const DROP_TIMEOUT: Duration = Duration::from_millis(150);

type Job = Box<dyn FnOnce() + Send>;

/// The state of the process with this id.
///
/// A forked child has none of its parent's threads, so it starts its own and never drops that of its parent. The lock
/// is held only by threads that are attached to the interpreter and run no Python, so that a fork never finds it locked.
static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

struct Process {
    pid: u32,
    runtime: &'static Runtime,
    /// Memory and threads of archives, by their bytes of memory.
    resources: BTreeMap<u64, SharedResources>,
    /// Threads that wait for the next call. There are as many as there were calls at the same time.
    idle: Arc<Mutex<Vec<SyncSender<Job>>>>,
}

impl Process {
    fn start() -> std::io::Result<Self> {
        Ok(Self {
            pid: std::process::id(),
            runtime: Box::leak(Box::new(locate::start_network()?)),
            resources: BTreeMap::new(),
            idle: Arc::default(),
        })
    }

    /// Runs `access` with the state of this process.
    fn with<T>(
        _: Python<'_>,
        access: impl FnOnce(&mut Self) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let mut shared = PROCESS.lock();
        let pid = std::process::id();
        if shared.as_ref().is_none_or(|process| process.pid != pid) {
            std::mem::forget(shared.replace(Self::start()?));
        }
        shared
            .as_mut()
            .map_or_else(|| Err(std::io::ErrorKind::Other.into()), access)
    }
}

fn of_threads(py: Python<'_>, error: &std::io::Error) -> PyErr {
    exception(py, ERROR, &format!("cannot start a thread: {error}"))
}

pub(super) fn runtime(py: Python<'_>) -> PyResult<&'static Handle> {
    let runtime = Process::with(py, |process| Ok(process.runtime.handle()));
    runtime.map_err(|error| of_threads(py, &error))
}

/// Returns the memory and threads of all archives of this process that have the memory of `options`.
pub(super) fn resources(py: Python<'_>, options: &OpenOptions) -> PyResult<SharedResources> {
    let resources = Process::with(py, |process| {
        let memory = options.scan.memory;
        if let Some(resources) = process.resources.get(&memory) {
            return Ok(resources.clone());
        }
        let resources = options.create_resources()?;
        process.resources.insert(memory, resources.clone());
        Ok(resources)
    });
    resources.map_err(|error| of_threads(py, &error))
}

/// Runs `work` on a thread of this process. An interrupted caller leaves it alone.
fn start<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<Receiver<T>> {
    let (sender, receiver) = sync_channel(1);
    // The caller may be gone.
    let job: Job = Box::new(move || drop(sender.send(work())));
    let idle = Process::with(py, |process| Ok(Arc::clone(&process.idle)))?;
    let thread = idle.lock().pop();
    if let Some(thread) = thread {
        // It waits for a job.
        drop(thread.send(job));
        return Ok(receiver);
    }
    let (next, jobs) = sync_channel::<Job>(1);
    let thread = Thread::spawn("tarfs-call", move || {
        job();
        loop {
            idle.lock().push(next.clone());
            let Ok(job) = jobs.recv() else {
                return;
            };
            job();
        }
    });
    // It ends with the process.
    std::mem::forget(thread?);
    Ok(receiver)
}

/// Runs `work`, which may wait, without the interpreter's lock, until it ends or a signal handler raises.
pub(super) fn call<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let receiver = start(py, work).map_err(|error| of_threads(py, &error))?;
    let result = receive(py, &Mutex::new(receiver))?;
    result.ok_or_else(|| exception(py, ERROR, "a thread of tarfs panicked"))
}

/// Waits for a message until a signal handler raises; `None` if the sender is gone.
pub(super) fn receive<T: Send>(
    py: Python<'_>,
    receiver: &Mutex<Receiver<T>>,
) -> PyResult<Option<T>> {
    loop {
        match py.detach(|| receiver.lock().recv_timeout(SIGNAL_CHECK_INTERVAL)) {
            Ok(received) => return Ok(Some(received)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

/// A value whose threads exist only in the process that made it.
///
/// A forked child never uses it and never drops it, because its threads may have held locks during the fork.
#[derive(Debug)]
pub(super) struct ProcessLocal<T: Send + 'static> {
    value: Option<T>,
    pid: u32,
}

impl<T: Send + 'static> ProcessLocal<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            value: Some(value),
            pid: std::process::id(),
        }
    }

    /// The value, or an exception in a forked child.
    pub(super) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        let value = self.value.as_ref();
        let value = value.filter(|_| self.pid == std::process::id());
        value.ok_or_else(|| exception(py, ERROR, "it was opened before this process was forked"))
    }
}

impl<T: Send + 'static> Drop for ProcessLocal<T> {
    /// Waits shortly for the value's threads, which may wait for a server, without the interpreter's lock.
    fn drop(&mut self) {
        let value = self.value.take();
        if self.pid != std::process::id() {
            std::mem::forget(value);
            return;
        }
        Python::try_attach(|py| {
            if let Ok(dropped) = start(py, move || drop(value)) {
                // It is dropped in any case.
                py.detach(move || dropped.recv_timeout(DROP_TIMEOUT).ok());
            }
        });
    }
}
