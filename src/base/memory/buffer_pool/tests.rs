//! Tests of the buffer pool.

use super::*;

// Promises: memory-order
#[test]
fn large_reservation_is_served_before_smaller_ones_that_came_later() {
    let pool = BufferPool::new(100);
    let held = pool.reserve(60).expect("open");
    std::thread::scope(|scope| {
        let large = scope.spawn(|| pool.reserve(80).map(|reserved| reserved.bytes));
        while pool.shared.state.lock().queue.is_empty() {
            std::thread::yield_now();
        }
        assert!(pool.reserve_within(10, Duration::ZERO).is_none());
        let small = scope.spawn(|| pool.reserve(30).map(|reserved| reserved.bytes));
        drop(held);
        assert_eq!(large.join().expect("no panic"), Ok(80));
        assert_eq!(small.join().expect("no panic"), Ok(30));
    });
    assert!(pool.shared.state.lock().queue.is_empty());
    assert_eq!(pool.used_bytes(), 0);
}

// Promises: memory-order
#[test]
fn reservation_that_gives_up_lets_the_next_one_through() {
    let pool = BufferPool::new(100);
    let held = pool.reserve(60).expect("open");
    let is_wanted = std::sync::atomic::AtomicBool::new(true);
    let wanted = || is_wanted.load(std::sync::atomic::Ordering::SeqCst);
    std::thread::scope(|scope| {
        let large = scope.spawn(|| {
            let left = || wanted().then_some(Duration::from_millis(1));
            pool.reserve_while(80, left).is_some()
        });
        while pool.shared.state.lock().queue.is_empty() {
            std::thread::yield_now();
        }
        let small = scope.spawn(|| pool.reserve(30).is_ok());
        is_wanted.store(false, std::sync::atomic::Ordering::SeqCst);
        assert!(!large.join().expect("no panic"));
        assert!(small.join().expect("no panic"));
    });
    drop(held);
}

#[test]
fn long_buffers_begin_at_a_page() {
    let pools = [
        BufferPool::new(1 << 30),
        BufferPool::with_free_list(1 << 30, FreeList::new(1 << 30)),
    ];
    for pool in pools {
        for len in [MIN_ALIGNED_LEN, 300_000, 200_000, 1 << 20] {
            let mut buffer = pool.acquire(len).expect("open");
            assert_eq!((buffer.len(), buffer.as_ptr().addr() % ALIGNMENT), (len, 0));
            buffer.truncate(len - 1);
            assert_eq!(buffer.len(), len - 1);
        }
    }
}

#[test]
fn detached_memory_is_not_counted_and_returns_to_its_list() {
    let source_list = FreeList::new(1 << 30);
    let pool = BufferPool::with_free_list(1 << 20, source_list.clone());
    let mut buffer = pool.acquire(1 << 20).expect("open");
    buffer.fill(7);
    buffer.truncate((1 << 20) - 5);
    let buffer = buffer.detach(1).expect_err("another phase");
    let bytes = buffer.detach(8192).expect("at a page").freeze();
    assert_eq!(pool.used_bytes(), 0);
    assert_eq!(bytes.len(), (1 << 20) - 5);
    assert!(bytes.iter().all(|&byte| byte == 7));
    assert!(source_list.pop_fitting(1 << 20).is_none());
    drop(bytes);
    assert!(source_list.pop_fitting(1 << 20).is_some());
}

#[test]
fn oversized_or_unlisted_memory_is_not_detached() {
    let mut buffer = BufferPool::with_free_list(1 << 20, FreeList::new(1 << 30))
        .acquire(1 << 20)
        .expect("open");
    buffer.truncate(1 << 19);
    assert!(buffer.detach(0).is_err());
    assert!(
        BufferPool::new(1 << 20)
            .acquire(1 << 20)
            .expect("open")
            .detach(0)
            .is_err()
    );
}

#[test]
fn buffer_is_charged_until_its_last_slice_is_dropped() {
    let pool = BufferPool::new(100);
    let bytes = pool.acquire(60).expect("open").freeze();
    let slice = bytes.slice(10..20);
    drop(bytes);
    assert_eq!(pool.used_bytes(), 60);
    assert!(pool.try_acquire(60).is_none());
    drop(slice);
    assert_eq!(pool.used_bytes(), 0);
    assert!(pool.try_acquire(60).is_some());
}

#[test]
fn buffer_larger_than_the_budget_is_acquired_alone() {
    let pool = BufferPool::new(10);
    let large = pool.acquire(100).expect("open");
    assert!(pool.try_acquire(1).is_none());
    drop(large);
    assert!(pool.try_acquire(1).is_some());
}

#[test]
fn buffers_are_reused() {
    let pool = BufferPool::new(1000);
    let first = pool.acquire(400).expect("open");
    let address = first.as_ptr();
    drop(first);
    assert_eq!(pool.acquire(300).expect("open").as_ptr(), address);
}

#[test]
fn idle_buffers_are_evicted_for_acquired_ones() {
    let pool = BufferPool::new(1000);
    drop(pool.acquire(900).expect("open"));
    let small = pool.acquire(200).expect("open");
    assert_eq!(small.len(), 200);
    let used = pool.used_bytes();
    assert!(pool.shared.state.lock().idle + used <= 1000);
}

#[test]
fn soft_limit_needs_both_measures_and_budget_still_holds() {
    let soft_limit = SoftLimit {
        bytes: 30,
        buffers: 2,
    };
    let pool = BufferPool::with_soft_limit(100, soft_limit);
    let large = [
        pool.acquire(40).expect("open"),
        pool.acquire(40).expect("open"),
    ];
    assert!(pool.try_acquire(1).is_none(), "enough of both");
    drop(large);
    let small = [10, 10, 10].map(|len| pool.acquire(len).expect("open"));
    assert!(pool.try_acquire(1).is_none(), "enough of both");
    drop(small);
    let _first = pool.acquire(70).expect("open");
    assert!(pool.try_acquire(31).is_none(), "more than the budget");
    assert!(pool.try_acquire(30).is_some());
}

#[test]
fn reservation_counts_against_the_budget() {
    let pool = BufferPool::new(100);
    let reserved = pool.reserve(60).expect("open");
    assert!(pool.try_acquire(41).is_none());
    drop(pool.try_acquire(40).expect("room"));
    drop(reserved);
    assert_eq!(pool.used_bytes(), 0);
    assert!(pool.try_acquire(41).is_some());
}

#[test]
fn preallocated_buffers_do_not_wait() {
    let pool = BufferPool::new(100);
    drop(pool.acquire(40).expect("open"));
    let preallocated = pool.preallocate(70).expect("open");
    assert_eq!(pool.used_bytes(), 70);
    let first = preallocated.acquire(40).expect("open");
    let second = preallocated.clone().acquire(20).expect("open");
    assert_eq!(pool.used_bytes(), 70);
    let third = preallocated.acquire(50).expect("open");
    assert_eq!(pool.used_bytes(), 110, "more than was preallocated");
    drop((first, third));
    assert_eq!(pool.used_bytes(), 20);
    drop(second);
    drop(preallocated);
    assert_eq!(pool.used_bytes(), 0);
    let preallocated = pool.preallocate(70).expect("open");
    drop(preallocated.acquire(30).expect("open"));
    drop(preallocated);
    assert_eq!(pool.used_bytes(), 0, "what was not used returns too");
}

#[test]
fn reclaimed_bytes_are_unavailable_and_a_quarter_remains() {
    let pool = BufferPool::new(100);
    drop(pool.acquire(50).expect("open"));
    assert_eq!(pool.reclaim(60), 60);
    assert_eq!(pool.shared.state.lock().idle, 0);
    let held = pool.acquire(30).expect("open");
    assert!(pool.try_acquire(11).is_none());
    assert_eq!(pool.reclaim(60), 15);
    assert_eq!(pool.reclaim(60), 0);
    drop(held);
    assert_eq!(pool.acquire(90).expect("open").len(), 90, "alone");
    pool.restore(75);
    assert!(pool.try_acquire(100).is_some());
}

#[test]
fn waiter_wakes_when_reclaimed_bytes_are_restored() {
    let pool = BufferPool::new(100);
    let _held = pool.acquire(20).expect("open");
    assert_eq!(pool.reclaim(70), 70);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.acquire(50).expect("open").len());
        pool.restore(70);
        assert_eq!(waiter.join().ok(), Some(50));
    });
}

#[test]
fn waiter_wakes_when_bytes_are_released() {
    let pool = BufferPool::new(10);
    let held = pool.acquire(10).expect("open");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.acquire(5).expect("open").len());
        drop(held);
        assert_eq!(waiter.join().ok(), Some(5));
    });
}

// Promises: unmount-quick
#[test]
fn closing_ends_every_wait_and_leaves_buffers_valid() {
    let pool = BufferPool::new(10);
    let held = pool.acquire(10).expect("open");
    std::thread::scope(|scope| {
        let waiters = [
            scope.spawn(|| pool.acquire(5).map(drop)),
            scope.spawn(|| pool.reserve(5).map(drop)),
            scope.spawn(|| pool.preallocate(5).map(drop)),
            scope.spawn(|| pool.acquire_with(1, 1).map(drop)),
        ];
        pool.close();
        for waiter in waiters {
            assert_eq!(waiter.join().expect("no panic"), Err(Closed));
        }
    });
    assert_eq!(held.len(), 10);
    drop(held);
    assert_eq!(pool.acquire(1).map(drop), Err(Closed), "also later");
}

#[test]
fn buffer_and_reservation_are_acquired_atomically() {
    let pool = BufferPool::new(100);
    let held = pool.acquire(50).expect("open");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.acquire_with(40, 30).map(|(buffer, _)| buffer.len()));
        // The waiter holds nothing, so the other half can still be acquired.
        drop(pool.acquire(50));
        drop(held);
        assert_eq!(waiter.join().expect("no panic"), Ok(40));
    });
    let (alone, reserved) = pool.acquire_with(90, 90).expect("more than all, alone");
    assert_eq!((alone.len(), pool.used_bytes()), (90, 180));
    drop(alone);
    assert_eq!(pool.used_bytes(), 90);
    drop(reserved);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn reservation_uses_preallocated_bytes() {
    let pool = BufferPool::new(100);
    let preallocated = pool.preallocate(70).expect("open");
    let reserved = preallocated.reserve(60).expect("never waits");
    assert_eq!(pool.used_bytes(), 70);
    drop(preallocated);
    assert_eq!(pool.used_bytes(), 60);
    drop(reserved);
    assert_eq!(pool.used_bytes(), 0);
}
