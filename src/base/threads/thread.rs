//! Threads with an owner. Only this module spawns threads.

use std::error::Error;
use std::io;
use std::thread::{self, JoinHandle, Scope};

use rustix::time::{ClockId, clock_gettime};

/// Number of processors that this process may use, at least one.
pub fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Advice for an error of [`is_thread_limit`].
pub(crate) const HINT_RAISE_THREAD_LIMIT: &str =
    "allow more threads: `ulimit -u`, or the limit of tasks of the service or container";

/// The system permits no further thread.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct ThreadLimit(io::Error);

/// Whether the system permits no further thread, which only the user can change.
pub(crate) fn is_thread_limit(error: &(dyn Error + 'static)) -> bool {
    let wrapped = error.downcast_ref().and_then(io::Error::get_ref);
    matches!(wrapped, Some(wrapped) if wrapped.is::<ThreadLimit>())
}

/// Makes an error of starting a thread one of [`is_thread_limit`], if it is. Other calls have the same number.
pub(crate) fn classify_spawn_error(error: io::Error) -> io::Error {
    match error.kind() {
        kind @ io::ErrorKind::WouldBlock => io::Error::new(kind, ThreadLimit(error)),
        _ => error,
    }
}

/// A named thread, joined when its handle is dropped, so that it never outlives its owner. The owner must
/// first make the work end, usually by dropping the channel that it reads.
#[derive(Debug)]
pub struct Thread<T> {
    handle: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Thread<T> {
    /// Spawns a thread called `name` for `work`. Names begin with `tarfs-` and have at most 15 bytes.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub fn spawn(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        #[expect(clippy::disallowed_methods, reason = "the one place that may")]
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .map_err(classify_spawn_error)?;
        Ok(Self {
            handle: Some(handle),
        })
    }

    /// Waits until the work ends, and returns its result.
    ///
    /// # Panics
    /// If the work panicked, with the same panic.
    pub fn join(mut self) -> T {
        let handle = self.handle.take().expect("taken only here and on drop");
        match handle.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Whether the work has ended.
    pub fn is_finished(&self) -> bool {
        self.handle.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl<T> Drop for Thread<T> {
    fn drop(&mut self) {
        // The work itself may drop its owner last, and a thread cannot join itself.
        let handle = self
            .handle
            .take()
            .filter(|handle| handle.thread().id() != thread::current().id());
        if let Some(handle) = handle {
            // The panic hook has logged a panic. Resuming it inside drop would abort.
            drop(handle.join());
        }
    }
}

/// Spawns a thread called `name` that `scope` joins. The caller waits for `work` at the end of the scope.
pub(crate) fn scoped_thread<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    let builder = thread::Builder::new().name(name.to_owned());
    #[expect(clippy::disallowed_methods, reason = "the one place that may")]
    let spawned = builder.spawn_scoped(scope, work);
    spawned.map(drop).map_err(classify_spawn_error)
}

/// Processor time of this thread, in nanoseconds.
pub fn processor_nanoseconds() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or_default();
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};

    #[test]
    fn work_may_drop_its_own_handle() {
        let (give, take) = mpsc::channel::<Thread<()>>();
        let (sender, receiver) = mpsc::channel();
        let thread = Thread::spawn("test", move || {
            drop(take.recv());
            sender.send(()).expect("a receiver");
        });
        give.send(thread.expect("a thread")).expect("a receiver");
        assert_eq!(receiver.recv(), Ok(()));
    }

    #[test]
    fn dropping_the_handle_waits_for_the_work() {
        let done = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel::<()>();
        let thread = Thread::spawn("test", {
            let done = Arc::clone(&done);
            move || {
                assert!(receiver.recv().is_err());
                done.store(true, Ordering::SeqCst);
            }
        })
        .expect("a thread");
        drop(sender);
        drop(thread);
        assert!(done.load(Ordering::SeqCst));
    }
}
