//! Which spans or windows are being made at this moment, so that no two threads make the same one.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use bytes::Bytes;

use crate::base::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The number of a span or of a window, by which a thread claims it.
pub(super) trait FlightKey: Copy + Eq + Hash + fmt::Debug {}
impl<K: Copy + Eq + Hash + fmt::Debug> FlightKey for K {}

/// An error of a fetch, which threads that wait for the fetch may share.
pub(super) trait FlightError: Clone {
    /// Whether a waiter that fetched the same bytes itself would meet the same error.
    fn is_shared(&self) -> bool;
}

/// Spans in the making, or windows, by their numbers.
#[derive(Clone, Debug)]
pub(super) struct Flights<E, K: FlightKey = u32> {
    shared: Arc<Mutex<HashMap<K, Arc<Flight<E>>>>>,
}

impl<E, K: FlightKey> Default for Flights<E, K> {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
        }
    }
}

/// A span in the making.
#[derive(Debug)]
pub(super) struct Flight<E> {
    landed: Mutex<Landed<E>>,
    changed: Condvar,
}

#[derive(Debug)]
enum Landed<E> {
    Not,
    Safely(Bytes),
    /// The waiters fail with the same error.
    Failed(E),
    /// The waiters must make it themselves.
    Never,
}

/// The right, and the duty, to make a span. Dropped without bytes it lets those who wait know that
/// they must make it themselves.
#[derive(Debug)]
pub(super) struct Claim<E, K: FlightKey = u32> {
    span: K,
    flight: Arc<Flight<E>>,
    flights: Flights<E, K>,
}

impl<E: Clone, K: FlightKey> Flights<E, K> {
    /// The flight of `span`, if it is being made.
    pub(super) fn find(&self, span: K) -> Option<Arc<Flight<E>>> {
        self.flying().get(&span).map(Arc::clone)
    }

    /// The claim to `span`.
    ///
    /// # Errors
    /// When someone has it already: whom to wait for.
    pub(super) fn claim(&self, span: K) -> Result<Claim<E, K>, Arc<Flight<E>>> {
        let mut flying = self.flying();
        if let Some(flight) = flying.get(&span) {
            return Err(Arc::clone(flight));
        }
        let flight = Arc::new(Flight {
            landed: Mutex::new(Landed::Not),
            changed: Condvar::default(),
        });
        flying.insert(span, Arc::clone(&flight));
        drop(flying);
        Ok(Claim {
            span,
            flight,
            flights: self.clone(),
        })
    }
}

impl<E: FlightError, K: FlightKey> Flights<E, K> {
    /// The bytes of `span`, and whether it was `make` that made them: what `look` finds, or somebody else
    /// is about to make, is not made again. What `make` makes must be where `look` finds it. A thread that
    /// waited for another one that failed shares its error, or makes the bytes in turn.
    ///
    /// # Errors
    /// The error of `make`, called by this thread or by the one that it waited for.
    pub(super) fn get(
        &self,
        span: K,
        look: impl FnOnce() -> Option<Bytes>,
        make: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<(Bytes, bool), E> {
        loop {
            let flight = match self.claim(span) {
                Ok(claim) => {
                    // It may just have been made.
                    if let Some(bytes) = look() {
                        return Ok((bytes, false));
                    }
                    let made = make();
                    match &made {
                        Ok(bytes) => claim.land(bytes.clone()),
                        Err(error) if error.is_shared() => claim.fail(error.clone()),
                        Err(_) => drop(claim),
                    }
                    return made.map(|bytes| (bytes, true));
                }
                Err(flight) => flight,
            };
            if let Some(bytes) = flight.wait()? {
                return Ok((bytes, false));
            }
        }
    }
}

impl<E, K: FlightKey> Flights<E, K> {
    fn flying(&self) -> MutexGuard<'_, HashMap<K, Arc<Flight<E>>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: Clone> Flight<E> {
    /// Waits for the end of the flight; `None` when its claim was dropped.
    ///
    /// # Errors
    /// The error that the claim failed with.
    pub(super) fn wait(&self) -> Result<Option<Bytes>, E> {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*landed {
                Landed::Not => {}
                Landed::Safely(bytes) => return Ok(Some(bytes.clone())),
                Landed::Failed(error) => return Err(error.clone()),
                Landed::Never => return Ok(None),
            }
            landed = self
                .changed
                .wait(landed)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<E> Flight<E> {
    fn land(&self, how: Landed<E>) {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*landed, Landed::Not) {
            *landed = how;
            self.changed.notify_all();
        }
    }
}

impl<E, K: FlightKey> Claim<E, K> {
    /// Which span, or window.
    pub(super) fn span(&self) -> K {
        self.span
    }

    /// Gives `bytes` to those who wait. They must be where those find them who come later.
    pub(super) fn land(self, bytes: Bytes) {
        self.flight.land(Landed::Safely(bytes));
    }

    /// Makes all threads that wait fail with `error`.
    pub(super) fn fail(self, error: E) {
        self.flight.land(Landed::Failed(error));
    }
}

impl<E, K: FlightKey> Drop for Claim<E, K> {
    fn drop(&mut self) {
        self.flights.flying().remove(&self.span);
        self.flight.land(Landed::Never);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_makes_a_span_and_the_others_get_it() {
        let flights = Flights::<&str>::default();
        let claim = flights.claim(7).expect("the first");
        let flight = flights.claim(7).expect_err("taken");
        assert!(flights.claim(8).is_ok());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| flight.wait());
            claim.land(Bytes::from_static(b"span"));
            let waited = waiter.join().expect("lives");
            assert_eq!(waited, Ok(Some(Bytes::from_static(b"span"))));
        });
        assert!(flights.claim(7).is_ok());
    }

    #[test]
    fn waiters_of_a_dropped_claim_make_the_span_themselves() {
        let flights = Flights::<&str>::default();
        let claim = flights.claim(7).expect("the first");
        let flight = flights.claim(7).expect_err("taken");
        drop(claim);
        assert_eq!(flight.wait(), Ok(None));
    }

    #[test]
    fn waiters_of_a_failed_claim_share_its_error() {
        let flights = Flights::<&str>::default();
        let claim = flights.claim(7).expect("the first");
        let flight = flights.claim(7).expect_err("taken");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| flight.wait());
            claim.fail("timed out");
            assert_eq!(waiter.join().expect("lives"), Err("timed out"));
        });
        assert_eq!(flight.wait(), Err("timed out"));
        assert!(flights.claim(7).is_ok(), "the error is not kept");
    }
}
