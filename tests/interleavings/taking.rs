//! Who takes buffers of one budget, and borrows from it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use bytes::Bytes;
use shuttle::future::block_on;
use shuttle::thread;

use crate::base::buffer::{Enough, Pool};
use crate::base::loan::{Lender, Loan, Loans};
use crate::noise::Noise;

const BUDGET: u64 = 100;

/// What is held at this moment by threads, in bytes: noted after it was taken and until right before it
/// is given back, so that it is never more than what is taken.
#[derive(Clone)]
struct Held {
    /// What all may hold.
    limit: u64,
    bytes: Arc<Mutex<Vec<u64>>>,
}

impl Held {
    fn new(limit: u64) -> Self {
        Self {
            limit,
            bytes: Arc::default(),
        }
    }

    fn took(&self, bytes: u64) {
        let mut held = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        held.push(bytes);
        let sum: u64 = held.iter().sum();
        assert!(sum <= self.limit || held.len() == 1, "too much: {held:?}");
    }

    fn gives_back(&self, bytes: u64) {
        let mut held = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let place = held.iter().position(|&held| held == bytes);
        held.swap_remove(place.expect("it was taken"));
    }
}

/// A share of a budget, however it was come by.
enum Share {
    Bytes(Bytes),
    Other(Box<dyn Send>),
}

/// Takes `len` bytes in one of all ways, and waits for them.
fn take(pool: &Pool, len: u64, way: u64) -> Share {
    let wanted = usize::try_from(len).expect("small");
    match way {
        0 => Share::Other(Box::new(pool.take(wanted))),
        1 => Share::Other(Box::new(pool.reserve(len))),
        2 => {
            let bytes = pool.take(wanted).freeze();
            // Not an empty one, which would hold nothing.
            Share::Bytes(bytes.slice(wanted / 2..))
        }
        _ => Share::Other(Box::new(block_on(pool.take_async(wanted)))),
    }
}

/// Asks once, as a task does, and is dropped whatever the answer.
fn ask_in_vain(pool: &Pool, len: u64) {
    let mut taking = pin!(pool.take_async(usize::try_from(len).expect("small")));
    block_on(poll_fn(|context| {
        drop(taking.as_mut().poll(context));
        Poll::Ready(())
    }));
}

/// Threads that take up to `most` bytes at a time, and give them back.
fn take_all(noise: &mut Noise, pool: &Pool, held: &Held, most: u64) {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (pool, held, mut noise) = (pool.clone(), held.clone(), Noise::new(noise.number()));
            thread::spawn(move || {
                for _ in 0..3 {
                    let len = 1 + noise.below(most);
                    if noise.below(6) == 0 {
                        ask_in_vain(&pool, len);
                        continue;
                    }
                    let share = take(&pool, len, noise.below(4));
                    held.took(len);
                    thread::yield_now();
                    held.gives_back(len);
                    match share {
                        // The last slice of it.
                        Share::Bytes(bytes) => drop(bytes.clone()),
                        Share::Other(share) => drop(share),
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
}

fn is_whole(pool: &Pool) {
    assert_eq!(pool.taken(), 0, "everything is back");
    let all = usize::try_from(pool.budget()).expect("small");
    let first = pool.try_take(all).expect("all of it");
    assert!(pool.try_take(1).is_none(), "and no more");
    drop(first);
}

pub(crate) fn buffers(mut noise: Noise) {
    let pool = Pool::new(BUDGET);
    // Some longer than all there is, which are handed out alone.
    let most = if noise.below(2) == 0 { 60 } else { 130 };
    take_all(&mut noise, &pool, &Held::new(BUDGET), most);
    assert!(pool.peak() <= BUDGET.max(most));
    is_whole(&pool);
}

pub(crate) fn frugally(mut noise: Noise) {
    let enough = Enough {
        bytes: 10 + noise.below(40),
        buffers: 2,
    };
    let pool = Pool::frugal(BUDGET, enough);
    take_all(&mut noise, &pool, &Held::new(BUDGET), 60);
    assert_eq!(pool.taken(), 0);
}

pub(crate) fn beside_a_loan(mut noise: Noise) {
    let pool = Pool::new(BUDGET);
    let lent = 1 + noise.below(pool.lendable());
    let loans = Loans::new(vec![Arc::new(pool.clone())]);
    let loan = loans.borrow(lent).expect("within the limit");
    take_all(&mut noise, &pool, &Held::new(BUDGET - lent), 60);
    drop(loan);
    assert_eq!(loans.lent_bytes(), 0);
    is_whole(&pool);
}

pub(crate) fn loans(mut noise: Noise) {
    let pools = [Pool::new(BUDGET), Pool::new(40)];
    let lenders = pools
        .iter()
        .map(|pool| Arc::new(pool.clone()) as Arc<dyn Lender>);
    let loans = Loans::new(lenders.collect());
    let limit = loans.limit_bytes();
    assert_eq!(limit, 105);
    let held = Held::new(limit);
    let borrowers: Vec<_> = (0..3)
        .map(|_| {
            let (loans, held, [pool, _]) = (loans.clone(), held.clone(), pools.clone());
            let mut noise = Noise::new(noise.number());
            thread::spawn(move || {
                for _ in 0..2 {
                    let bytes = 1 + noise.below(limit);
                    let loan: Loan = loans.borrow(bytes).expect("within the limit");
                    held.took(bytes);
                    // As a decoder does with the state that it has borrowed.
                    let len = 1 + noise.below(BUDGET / 4);
                    drop(take(&pool, len, noise.below(4)));
                    held.gives_back(bytes);
                    drop(loan);
                }
                assert!(loans.borrow(limit + 1).is_none());
            })
        })
        .collect();
    // They have what is not lent.
    let [pool, _] = &pools;
    take_all(&mut noise, pool, &Held::new(BUDGET), 60);
    for borrower in borrowers {
        borrower.join().expect("no panic");
    }
    assert_eq!(loans.lent_bytes(), 0);
    assert!(loans.borrow(limit).is_some(), "all can be had again");
    pools.iter().for_each(is_whole);
}

pub(crate) fn rations(mut noise: Noise) {
    let pool = Pool::new(BUDGET);
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (pool, mut noise) = (pool.clone(), Noise::new(noise.number()));
            thread::spawn(move || {
                let bytes = 30 + noise.below(70);
                let ration = pool.ration(bytes);
                // Whoever has so much besides makes nobody wait who has set it aside.
                let first = ration.try_take(20).expect("set aside");
                thread::yield_now();
                let second = ration.try_take(10).expect("set aside");
                drop(first);
                drop(ration);
                assert!(pool.taken() >= 10);
                drop(second);
            })
        })
        .collect();
    take_all(&mut noise, &pool, &Held::new(BUDGET), 60);
    for thread in threads {
        thread.join().expect("no panic");
    }
    is_whole(&pool);
}
