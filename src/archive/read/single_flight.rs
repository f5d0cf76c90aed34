//! Single-flight table: no two threads fetch or decode the same span or window at once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::base::sync::{Condvar, Mutex};

pub(crate) trait FlightError: Clone {
    /// Whether a waiter that fetched the same bytes itself would meet the same error.
    fn is_shared(&self) -> bool;
}

/// Claims by the number of a span or window.
#[derive(Clone, Debug)]
pub(crate) struct SingleFlight<E, K = u32> {
    shared: Arc<Mutex<HashMap<K, Arc<InFlight<E>>>>>,
}

impl<E, K> Default for SingleFlight<E, K> {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct InFlight<E> {
    outcome: Mutex<Outcome<E>>,
    changed: Condvar,
}

#[derive(Debug)]
enum Outcome<E> {
    Pending,
    Done(Bytes),
    /// The waiters fail with the same error.
    Failed(E),
    /// The waiters must fill it themselves.
    Dropped,
}

/// The exclusive right to fill a span. Dropped without bytes, it leaves the fill to its waiters.
#[derive(Debug)]
pub(crate) struct Claim<E, K: Eq + Hash = u32> {
    span: K,
    flight: Arc<InFlight<E>>,
    single_flight: SingleFlight<E, K>,
}

impl<E: Clone, K: Copy + Eq + Hash> SingleFlight<E, K> {
    pub(crate) fn find(&self, span: K) -> Option<Arc<InFlight<E>>> {
        self.shared.lock().get(&span).map(Arc::clone)
    }

    /// Claims `span`; fails with the flight to wait for if another thread has the claim.
    pub(crate) fn claim(&self, span: K) -> Result<Claim<E, K>, Arc<InFlight<E>>> {
        let mut claimed = self.shared.lock();
        if let Some(flight) = claimed.get(&span) {
            return Err(Arc::clone(flight));
        }
        let flight = Arc::new(InFlight {
            outcome: Mutex::new(Outcome::Pending),
            changed: Condvar::default(),
        });
        claimed.insert(span, Arc::clone(&flight));
        drop(claimed);
        Ok(Claim {
            span,
            flight,
            single_flight: self.clone(),
        })
    }
}

impl<E: FlightError, K: Copy + Eq + Hash> SingleFlight<E, K> {
    /// Returns the bytes of `span`, and whether this call filled them.
    /// Calls `fill`, after which `find` must succeed, only if `find` fails and no other thread fills the
    /// span. If that thread fails, its waiters share its error, or one of them fills the span.
    pub(crate) fn get_or_fill(
        &self,
        span: K,
        find: impl FnOnce() -> Option<Bytes>,
        fill: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<(Bytes, bool), E> {
        loop {
            let claim = match self.claim(span) {
                Ok(claim) => claim,
                Err(flight) => match flight.wait()? {
                    Some(bytes) => return Ok((bytes, false)),
                    None => continue,
                },
            };
            // Another thread may just have filled it.
            if let Some(bytes) = find() {
                return Ok((bytes, false));
            }
            let filled = fill();
            match &filled {
                Ok(bytes) => claim.complete(bytes.clone()),
                Err(error) if error.is_shared() => claim.fail(error.clone()),
                Err(_) => drop(claim),
            }
            return filled.map(|bytes| (bytes, true));
        }
    }
}

impl<E: Clone> InFlight<E> {
    /// Waits for the end of the fill, and returns its error; `None` if its claim was dropped.
    pub(crate) fn wait(&self) -> Result<Option<Bytes>, E> {
        let mut outcome = self.outcome.lock();
        loop {
            match &*outcome {
                Outcome::Pending => {}
                Outcome::Done(bytes) => return Ok(Some(bytes.clone())),
                Outcome::Failed(error) => return Err(error.clone()),
                Outcome::Dropped => return Ok(None),
            }
            outcome = self.changed.wait(outcome);
        }
    }
}

impl<E> InFlight<E> {
    /// As [`Self::wait`], for at most `timeout`; `None` also after a failure.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> Option<Bytes> {
        let deadline = Instant::now() + timeout;
        let mut outcome = self.outcome.lock();
        while matches!(*outcome, Outcome::Pending) {
            let left = deadline.checked_duration_since(Instant::now())?;
            (outcome, _) = self.changed.wait_timeout(outcome, left);
        }
        match &*outcome {
            Outcome::Done(bytes) => Some(bytes.clone()),
            _ => None,
        }
    }

    fn complete(&self, outcome: Outcome<E>) {
        let mut current = self.outcome.lock();
        if matches!(*current, Outcome::Pending) {
            *current = outcome;
            self.changed.notify_all();
        }
    }
}

impl<E, K: Copy + Eq + Hash> Claim<E, K> {
    pub(crate) fn span(&self) -> K {
        self.span
    }

    /// Completes the flight with `bytes`. They must already be where later readers find them.
    pub(crate) fn complete(self, bytes: Bytes) {
        self.flight.complete(Outcome::Done(bytes));
    }

    pub(crate) fn fail(self, error: E) {
        self.flight.complete(Outcome::Failed(error));
    }
}

impl<E, K: Eq + Hash> Drop for Claim<E, K> {
    fn drop(&mut self) {
        self.single_flight.shared.lock().remove(&self.span);
        self.flight.complete(Outcome::Dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: ahead-shared
    #[test]
    fn one_thread_fills_a_span_and_the_others_share_it() {
        let single_flight = SingleFlight::<&str>::default();
        let claim = single_flight.claim(7).expect("the first");
        let flight = single_flight.claim(7).expect_err("taken");
        assert!(single_flight.claim(8).is_ok());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| flight.wait());
            claim.complete(Bytes::from_static(b"span"));
            let waited = waiter.join().expect("no panic");
            assert_eq!(waited, Ok(Some(Bytes::from_static(b"span"))));
        });
        assert!(single_flight.claim(7).is_ok());
    }

    #[test]
    fn waiters_of_a_dropped_claim_fill_the_span_themselves() {
        let single_flight = SingleFlight::<&str>::default();
        let claim = single_flight.claim(7).expect("the first");
        let flight = single_flight.claim(7).expect_err("taken");
        drop(claim);
        assert_eq!(flight.wait(), Ok(None));
    }

    // Promises: ahead-shared
    #[test]
    fn waiters_of_a_failed_claim_share_its_error() {
        let single_flight = SingleFlight::<&str>::default();
        let claim = single_flight.claim(7).expect("the first");
        let flight = single_flight.claim(7).expect_err("taken");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| flight.wait());
            claim.fail("timed out");
            assert_eq!(waiter.join().expect("no panic"), Err("timed out"));
        });
        assert_eq!(flight.wait(), Err("timed out"));
        assert!(single_flight.claim(7).is_ok(), "the error is not cached");
    }
}
