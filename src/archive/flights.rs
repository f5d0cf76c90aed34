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

/// Spans in the making, or windows, by their numbers.
#[derive(Clone, Debug)]
pub(super) struct Flights<K: FlightKey = u32> {
    shared: Arc<Mutex<HashMap<K, Arc<Flight>>>>,
}

impl<K: FlightKey> Default for Flights<K> {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
        }
    }
}

/// A span in the making.
#[derive(Debug, Default)]
pub(super) struct Flight {
    landed: Mutex<Landed>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum Landed {
    #[default]
    Not,
    Safely(Bytes),
    Never,
}

/// The right, and the duty, to make a span. Dropped without bytes it lets those who wait know that
/// they must make it themselves.
#[derive(Debug)]
pub(super) struct Claim<K: FlightKey = u32> {
    span: K,
    flight: Arc<Flight>,
    flights: Flights<K>,
}

impl<K: FlightKey> Flights<K> {
    /// The flight of `span`, if it is being made.
    pub(super) fn find(&self, span: K) -> Option<Arc<Flight>> {
        self.flying().get(&span).map(Arc::clone)
    }

    /// The claim to `span`.
    ///
    /// # Errors
    /// When someone has it already: whom to wait for.
    pub(super) fn claim(&self, span: K) -> Result<Claim<K>, Arc<Flight>> {
        let mut flying = self.flying();
        if let Some(flight) = flying.get(&span) {
            return Err(Arc::clone(flight));
        }
        let flight = Arc::<Flight>::default();
        flying.insert(span, Arc::clone(&flight));
        drop(flying);
        Ok(Claim {
            span,
            flight,
            flights: self.clone(),
        })
    }

    /// The bytes of `span`, and whether it was `make` that made them: what `look` finds, or somebody else
    /// is about to make, is not made again. What `make` makes must be where `look` finds it. Who waited
    /// for one who failed makes them in turn.
    ///
    /// # Errors
    /// What `make` fails with.
    pub(super) fn get<E>(
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
                    let bytes = make()?;
                    claim.land(bytes.clone());
                    return Ok((bytes, true));
                }
                Err(flight) => flight,
            };
            if let Some(bytes) = flight.wait() {
                return Ok((bytes, false));
            }
        }
    }

    fn flying(&self) -> MutexGuard<'_, HashMap<K, Arc<Flight>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    /// Waits for the end of the flight; `None` when it failed.
    pub(super) fn wait(&self) -> Option<Bytes> {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*landed {
                Landed::Not => {}
                Landed::Safely(bytes) => return Some(bytes.clone()),
                Landed::Never => return None,
            }
            landed = self
                .changed
                .wait(landed)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn land(&self, how: Landed) {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*landed, Landed::Not) {
            *landed = how;
            self.changed.notify_all();
        }
    }
}

impl<K: FlightKey> Claim<K> {
    /// Which span, or window.
    pub(super) fn span(&self) -> K {
        self.span
    }

    /// Gives `bytes` to those who wait. They must be where those find them who come later.
    pub(super) fn land(self, bytes: Bytes) {
        self.flight.land(Landed::Safely(bytes));
    }
}

impl<K: FlightKey> Drop for Claim<K> {
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
        let flights = Flights::<u32>::default();
        let claim = flights.claim(7).expect("the first");
        let flight = flights.claim(7).expect_err("taken");
        assert!(flights.claim(8).is_ok());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| flight.wait());
            claim.land(Bytes::from_static(b"span"));
            assert_eq!(waiter.join().expect("lives").as_deref(), Some(&b"span"[..]));
        });
        assert!(flights.claim(7).is_ok());
    }

    #[test]
    fn who_waits_for_a_failure_hears_of_it() {
        let flights = Flights::<u32>::default();
        let claim = flights.claim(7).expect("the first");
        let flight = flights.claim(7).expect_err("taken");
        drop(claim);
        assert_eq!(flight.wait(), None);
    }
}
