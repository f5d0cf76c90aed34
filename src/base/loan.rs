//! Memory that changes hands: what buffers and caches give up while a decoder needs it.
//!
//! What a decoder's state takes (an xz dictionary, a zstd window) is known only when the stream
//! says so, and then it is needed at once. So nothing is set aside for it: those who hold memory
//! that they can do without lend it, for as long as the decoder lives.

use std::fmt::Debug;
use std::sync::Arc;

use super::buffer::Closed;
use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Holds memory and can do with less for a while.
pub trait Lender: Send + Sync + Debug {
    /// The most it has out at once, in bytes; never changes.
    fn lendable(&self) -> u64;

    /// Lowers its own limit by up to `bytes`, never waiting, and answers by how many.
    fn lend(&self, bytes: u64) -> u64;

    /// Takes `bytes` back that it lent.
    fn take_back(&self, bytes: u64);
}

/// What decoders may borrow. Clones share one limit.
#[derive(Clone, Debug)]
pub struct Loans {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    limit_bytes: u64,
    lenders: Vec<Arc<dyn Lender>>,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes of all loans.
    lent: u64,
    /// Whether nothing is lent any more.
    closed: bool,
}

/// Error of [`Loans::borrow`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BorrowError {
    /// More than [`Loans::limit_bytes`].
    #[error("more than may be borrowed")]
    TooMuch,
    /// See [`Loans::close`].
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl Loans {
    /// Loans from the first of `lenders` as far as it can, then from the next.
    pub fn new(lenders: Vec<Arc<dyn Lender>>) -> Self {
        let limit_bytes = lenders.iter().map(|lender| lender.lendable()).sum();
        Self::start(limit_bytes, lenders)
    }

    /// Loans of `limit_bytes` together that no one has to give up anything for.
    pub fn limited(limit_bytes: u64) -> Self {
        Self::start(limit_bytes, Vec::new())
    }

    fn start(limit_bytes: u64, lenders: Vec<Arc<dyn Lender>>) -> Self {
        let shared = Arc::new(Shared {
            limit_bytes,
            lenders,
            state: Mutex::default(),
            returned: Condvar::new(),
        });
        Self { shared }
    }

    /// The most that can be borrowed, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.shared.limit_bytes
    }

    /// What is borrowed at this moment, in bytes.
    pub fn lent_bytes(&self) -> u64 {
        self.shared.state().lent
    }

    /// Borrows `bytes`. Waits while others have so much that it would be beyond the limit: who has a
    /// loan must therefore not wait for someone who wants one.
    ///
    /// # Errors
    /// [`BorrowError::TooMuch`] when `bytes` alone are beyond the limit; [`BorrowError::Closed`] when the
    /// loans are [closed](Loans::close), also while this waits.
    pub fn borrow(&self, bytes: u64) -> Result<Loan, BorrowError> {
        let room = self.shared.limit_bytes.checked_sub(bytes);
        let room = room.ok_or(BorrowError::TooMuch)?;
        let mut state = self.shared.state();
        while state.lent > room && !state.closed {
            state = self
                .shared
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return Err(Closed.into());
        }
        state.lent += bytes;
        let mut parts = Vec::new();
        let mut missing = bytes;
        for lender in &self.shared.lenders {
            let part = lender.lend(missing).min(missing);
            if part > 0 {
                parts.push((Arc::clone(lender), part));
                missing -= part;
            }
        }
        drop(state);
        Ok(Loan {
            bytes,
            parts,
            shared: Arc::clone(&self.shared),
        })
    }

    /// Ends every wait in [`Loans::borrow`] with an error, now and later.
    pub fn close(&self) {
        self.shared.state().closed = true;
        self.shared.returned.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Borrowed memory; goes back to its lenders when dropped.
#[derive(Debug)]
pub struct Loan {
    bytes: u64,
    parts: Vec<(Arc<dyn Lender>, u64)>,
    shared: Arc<Shared>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        for (lender, part) in &self.parts {
            lender.take_back(*part);
        }
        self.shared.state().lent -= self.bytes;
        self.shared.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Lends what it has; this, and what it had.
    #[derive(Debug)]
    struct Purse(AtomicU64, u64);

    impl Lender for Purse {
        fn lendable(&self) -> u64 {
            self.1
        }

        fn lend(&self, bytes: u64) -> u64 {
            let part = self.0.load(Ordering::Relaxed).min(bytes);
            self.0.fetch_sub(part, Ordering::Relaxed);
            part
        }

        fn take_back(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn purses(contents: [u64; 2]) -> (Vec<Arc<Purse>>, Loans) {
        let purses = contents.map(|bytes| Arc::new(Purse(AtomicU64::new(bytes), bytes)));
        let lenders = purses
            .iter()
            .map(|purse| Arc::clone(purse) as Arc<dyn Lender>);
        let loans = Loans::new(lenders.collect());
        (purses.to_vec(), loans)
    }

    fn left(purses: &[Arc<Purse>]) -> Vec<u64> {
        let left = purses.iter().map(|purse| purse.0.load(Ordering::Relaxed));
        left.collect()
    }

    #[test]
    fn lenders_give_in_their_order_and_get_everything_back() {
        let (purses, loans) = purses([10, 20]);
        let small = loans.borrow(4);
        assert_eq!(left(&purses), [6, 20]);
        let large = loans.borrow(16);
        assert_eq!(left(&purses), [0, 10]);
        assert_eq!(loans.lent_bytes(), 20);
        drop(small);
        assert_eq!(left(&purses), [4, 10]);
        assert_eq!(loans.lent_bytes(), 16);
        drop(large);
        assert_eq!(left(&purses), [10, 20]);
    }

    #[test]
    fn no_more_is_lent_than_the_limit() {
        let (purses, loans) = purses([10, 20]);
        assert!(loans.borrow(31).is_err());
        assert!(loans.borrow(u64::MAX).is_err());
        let held = loans.borrow(25);
        assert!(held.is_ok());
        assert!(loans.borrow(5).is_ok());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| loans.borrow(6).is_ok());
            drop(held);
            assert_eq!(waiter.join().ok(), Some(true));
        });
        assert!(loans.borrow(30).is_ok());
        assert_eq!(left(&purses), [10, 20]);
    }

    #[test]
    fn closing_ends_a_wait_for_a_loan() {
        let loans = Loans::limited(10);
        let _held = loans.borrow(10);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| loans.borrow(1).map(drop));
            loans.close();
            let waited = waiter.join().expect("no panic");
            assert_eq!(waited, Err(BorrowError::Closed(Closed)));
        });
        assert_eq!(loans.borrow(11).map(drop), Err(BorrowError::TooMuch));
    }
}
