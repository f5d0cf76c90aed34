//! Threads that take buffers from one budget, and borrow from it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use bytes::Bytes;
use shuttle::future::block_on;
use shuttle::sync::mpsc::sync_channel;
use shuttle::thread;

use crate::base::buffer_pool::{BufferPool, Closed, SoftLimit};
use crate::base::memory_reclaim::{GrantError, MemoryBroker, MemoryGrant, Reclaim};
use crate::rng::Rng;

const BUDGET: u64 = 100;

/// Bytes that threads hold now. They are added after they were taken and subtracted before they are
/// returned, so the sum is never more than the bytes taken.
#[derive(Clone)]
struct HeldBytes {
    /// Limit of the sum.
    limit: u64,
    bytes: Arc<Mutex<Vec<u64>>>,
}

impl HeldBytes {
    fn new(limit: u64) -> Self {
        Self {
            limit,
            bytes: Arc::default(),
        }
    }

    fn add(&self, bytes: u64) {
        let mut held = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        held.push(bytes);
        let sum: u64 = held.iter().sum();
        assert!(sum <= self.limit || held.len() == 1, "too much: {held:?}");
    }

    fn subtract(&self, bytes: u64) {
        let mut held = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let place = held.iter().position(|&held| held == bytes);
        held.swap_remove(place.expect("it was taken"));
    }
}

/// A share of a budget, taken in one of several ways.
enum Share {
    Bytes(Bytes),
    Other(Box<dyn Send>),
}

/// Takes `len` bytes in the given way, and waits for them.
fn take(pool: &BufferPool, len: u64, way: u64) -> Share {
    let wanted = usize::try_from(len).expect("small");
    match way {
        0 => Share::Other(Box::new(pool.acquire(wanted).expect("open"))),
        1 => Share::Other(Box::new(pool.reserve(len).expect("open"))),
        2 => {
            let half = wanted / 2;
            let rest = len - half as u64;
            Share::Other(Box::new(pool.acquire_with(half, rest).expect("open")))
        }
        3 => {
            let bytes = pool.acquire(wanted).expect("open").freeze();
            // An empty slice would hold nothing.
            Share::Bytes(bytes.slice(wanted / 2..))
        }
        _ => Share::Other(Box::new(block_on(pool.acquire_async(wanted)))),
    }
}

/// Polls a request for memory once and drops it, as a cancelled task does.
fn take_and_cancel(pool: &BufferPool, len: u64) {
    let mut memory_pool = pin!(pool.acquire_async(usize::try_from(len).expect("small")));
    block_on(poll_fn(|context| {
        drop(memory_pool.as_mut().poll(context));
        Poll::Ready(())
    }));
}

/// Starts threads that take up to `most` bytes at a time and return them.
fn take_all(noise: &mut Rng, pool: &BufferPool, held: &HeldBytes, most: u64) {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (pool, held, mut noise) = (pool.clone(), held.clone(), Rng::new(noise.number()));
            thread::spawn(move || {
                for _ in 0..3 {
                    let len = 1 + noise.below(most);
                    if noise.below(6) == 0 {
                        take_and_cancel(&pool, len);
                        continue;
                    }
                    let share = take(&pool, len, noise.below(5));
                    held.add(len);
                    thread::yield_now();
                    held.subtract(len);
                    match share {
                        // This is the last slice of the buffer.
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

fn assert_all_returned(pool: &BufferPool) {
    assert_eq!(pool.used_bytes(), 0, "everything is back");
    let all = usize::try_from(pool.budget()).expect("small");
    let first = pool.try_acquire(all).expect("all of it");
    assert!(pool.try_acquire(1).is_none(), "and no more");
    drop(first);
}

pub(crate) fn buffers(mut noise: Rng) {
    let pool = BufferPool::new(BUDGET);
    // Some requests are longer than the budget, and are served alone.
    let most = if noise.below(2) == 0 { 60 } else { 130 };
    take_all(&mut noise, &pool, &HeldBytes::new(BUDGET), most);
    assert!(pool.peak_bytes() <= BUDGET.max(most));
    assert_all_returned(&pool);
}

pub(crate) fn soft_limits(mut noise: Rng) {
    let enough = SoftLimit {
        bytes: 10 + noise.below(40),
        buffers: 2,
    };
    let pool = BufferPool::with_soft_limit(BUDGET, enough);
    take_all(&mut noise, &pool, &HeldBytes::new(BUDGET), 60);
    assert_eq!(pool.used_bytes(), 0);
}

pub(crate) fn buffers_beside_grant(mut noise: Rng) {
    let pool = BufferPool::new(BUDGET);
    let lent = 1 + noise.below(pool.reclaimable_bytes());
    let broker = MemoryBroker::new(vec![Arc::new(pool.clone())]);
    let grant = broker.grant(lent).expect("within the limit");
    take_all(&mut noise, &pool, &HeldBytes::new(BUDGET - lent), 60);
    drop(grant);
    assert_eq!(broker.granted_bytes(), 0);
    assert_all_returned(&pool);
}

pub(crate) fn grants(mut noise: Rng) {
    let pools = [BufferPool::new(BUDGET), BufferPool::new(40)];
    let reclaimers = pools
        .iter()
        .map(|pool| Arc::new(pool.clone()) as Arc<dyn Reclaim>);
    let broker = MemoryBroker::new(reclaimers.collect());
    let limit = broker.limit_bytes();
    assert_eq!(limit, 105);
    let held = HeldBytes::new(limit);
    let borrowers: Vec<_> = (0..3)
        .map(|_| {
            let (broker, held, [pool, _]) = (broker.clone(), held.clone(), pools.clone());
            let mut noise = Rng::new(noise.number());
            thread::spawn(move || {
                for _ in 0..2 {
                    let bytes = 1 + noise.below(limit);
                    let grant: MemoryGrant = broker.grant(bytes).expect("within the limit");
                    held.add(bytes);
                    // A decoder borrows its state in this way.
                    let len = 1 + noise.below(BUDGET / 4);
                    drop(take(&pool, len, noise.below(5)));
                    held.subtract(bytes);
                    drop(grant);
                }
                assert!(broker.grant(limit + 1).is_err());
            })
        })
        .collect();
    // These threads take the rest of the budget.
    let [pool, _] = &pools;
    take_all(&mut noise, pool, &HeldBytes::new(BUDGET), 60);
    for borrower in borrowers {
        borrower.join().expect("no panic");
    }
    assert_eq!(broker.granted_bytes(), 0);
    assert!(broker.grant(limit).is_ok(), "all can be had again");
    pools.iter().for_each(assert_all_returned);
}

pub(crate) fn preallocations(mut noise: Rng) {
    let pool = BufferPool::new(BUDGET);
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (pool, mut noise) = (pool.clone(), Rng::new(noise.number()));
            thread::spawn(move || {
                let bytes = 30 + noise.below(70);
                let preallocated = pool.preallocate(bytes).expect("open");
                // A thread with this much reserved memory never waits.
                let first = preallocated.try_acquire(20).expect("set aside");
                thread::yield_now();
                let second = preallocated.try_acquire(10).expect("set aside");
                drop(first);
                drop(preallocated);
                assert!(pool.used_bytes() >= 10);
                drop(second);
            })
        })
        .collect();
    take_all(&mut noise, &pool, &HeldBytes::new(BUDGET), 60);
    for thread in threads {
        thread.join().expect("no panic");
    }
    assert_all_returned(&pool);
}

/// A thread that decodes ahead in stream order, a consumer, and a writer.
///
/// Each job takes its buffer and its state at once. If a job's output does not fit into its buffer,
/// the consumer decodes the rest in reserved memory. Without a reserve, jobs may be larger than the
/// budget.
pub(crate) fn long_jobs(mut noise: Rng) {
    let pool = BufferPool::new(BUDGET);
    let (give, jobs) = sync_channel(2);
    let decoder = thread::spawn({
        let pool = pool.clone();
        move || {
            let (set_aside, most) = if noise.below(2) == 0 {
                (0, 130)
            } else {
                (20, 40)
            };
            let aside = Arc::new((BufferPool::new(20), pool.reserve(set_aside).expect("open")));
            for _ in 0..4 {
                let len = 10 + usize::try_from(noise.below(most)).expect("small");
                let job = pool.acquire_with(len, 30).expect("open");
                let pieces = noise.below(4);
                give.send((job, Arc::clone(&aside), pieces))
                    .expect("it is consumed");
            }
        }
    });
    let (write, written) = sync_channel(1);
    let writer = thread::spawn(move || written.into_iter().map(drop).count());
    let mut count = 0;
    for ((buffer, state), aside, pieces) in jobs {
        write.send(buffer).expect("it is written");
        count += 1;
        for _ in 0..pieces {
            let piece = aside.0.acquire(10).expect("open");
            write.send(piece).expect("it is written");
            count += 1;
        }
        drop(state);
    }
    drop(write);
    decoder.join().expect("no panic");
    assert_eq!(writer.join().expect("no panic"), count);
    assert_all_returned(&pool);
}

/// Threads that wait for memory which is never returned.
pub(crate) fn close_during_waits(mut noise: Rng) {
    let pool = BufferPool::new(BUDGET);
    let broker = MemoryBroker::with_limit(BUDGET);
    let held = pool.acquire(90).expect("open");
    let grant = broker.grant(90).expect("open");
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let (pool, broker, way) = (pool.clone(), broker.clone(), noise.below(5));
            thread::spawn(move || match way {
                0 => pool.acquire(20).map(drop),
                1 => pool.reserve(20).map(drop),
                2 => pool.acquire_with(10, 10).map(drop),
                3 => pool.preallocate(20).map(drop),
                _ => match broker.grant(20) {
                    Err(GrantError::Closed(closed)) => Err(closed),
                    other => panic!("{other:?}"),
                },
            })
        })
        .collect();
    thread::yield_now();
    pool.close();
    broker.close();
    for waiter in waiters {
        assert_eq!(waiter.join().expect("no panic"), Err(Closed));
    }
    drop((held, grant));
    assert_eq!((pool.used_bytes(), broker.granted_bytes()), (0, 0));
}
