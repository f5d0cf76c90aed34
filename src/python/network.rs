//! The runtime of the network, one a process, and values that do not survive a fork.

use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

use super::error::{ERROR, exception};
use crate::base::sync::Mutex;

/// The runtime of the process with this id.
///
/// A forked child has none of its parent's threads, so it starts its own and never drops that of its parent.
static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// Returns the runtime of this process. The interpreter's lock is held, so that a fork
/// never finds the mutex locked.
pub(super) fn runtime(py: Python<'_>) -> PyResult<&'static Handle> {
    let mut shared = RUNTIME.lock();
    let pid = std::process::id();
    if let Some((owner, runtime)) = *shared
        && owner == pid
    {
        return Ok(runtime.handle());
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("tarfs-net")
        .enable_all()
        .build();
    let failed = |error| {
        exception(
            py,
            ERROR,
            &format!("cannot start the network's threads: {error}"),
        )
    };
    let runtime: &'static Runtime = Box::leak(Box::new(runtime.map_err(failed)?));
    *shared = Some((pid, runtime));
    Ok(runtime.handle())
}

/// A value whose threads exist only in the process that made it.
///
/// A forked child never uses it and never drops it, because its threads may have held locks during the fork.
#[derive(Debug)]
pub(super) struct ThisProcess<T: Send> {
    value: Option<T>,
    pid: u32,
}

impl<T: Send> ThisProcess<T> {
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

impl<T: Send> Drop for ThisProcess<T> {
    /// Waits for the value's threads without the interpreter's lock.
    fn drop(&mut self) {
        let mut value = self.value.take();
        if self.pid != std::process::id() {
            std::mem::forget(value);
            return;
        }
        Python::try_attach(|py| {
            let value = value.take();
            py.detach(|| drop(value));
        });
    }
}
