//! Worker threads that fetch and decode spans while no read does.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::rate_limit::RateLimit;
use super::shared::{Message, Shared, SpanCounts};
use crate::archive::read::Reader;
use crate::base::extent::Plain;
use crate::base::sync::Mutex;
use crate::base::thread_pool::ThreadPool;

const DISK_POLL_INTERVAL: Duration = Duration::from_millis(50);

const FETCH_THREADS: usize = 4;

/// Threads that fetch and decode spans. Several archives may share them.
#[derive(Clone, Debug)]
pub(crate) struct FillThreads {
    // Dropped before the decoders, because it submits work to them.
    fetchers: Arc<ThreadPool>,
    decoders: Arc<ThreadPool>,
}

impl FillThreads {
    pub(crate) fn start() -> io::Result<Self> {
        Ok(Self {
            fetchers: Arc::new(ThreadPool::start("tarfs-fetch", FETCH_THREADS)?),
            decoders: Arc::new(ThreadPool::start("tarfs-ahead", 2)?),
        })
    }
}

pub(super) struct FillWorkers {
    threads: FillThreads,
    /// Rate limit, and the start of its clock.
    rate: Option<Arc<(Mutex<RateLimit>, Instant)>>,
    shared: Arc<Shared>,
    pub(super) reader: Arc<Reader>,
}

impl FillWorkers {
    pub(super) fn new(
        reader: &Arc<Reader>,
        threads: FillThreads,
        shared: &Arc<Shared>,
        bytes_per_second: Option<u64>,
    ) -> Self {
        let rate = bytes_per_second.map(RateLimit::new);
        Self {
            threads,
            rate: rate.map(|rate| Arc::new((Mutex::new(rate), Instant::now()))),
            shared: Arc::clone(shared),
            reader: Arc::clone(reader),
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        self.shared.outstanding.load(Ordering::SeqCst) > 0
    }

    /// Queues fills of `numbers` (see [`Reader::batches`]). They wait for active reads and the rate limit.
    pub(super) fn submit(&self, numbers: Vec<u32>, from: Plain, purpose: Option<&SpanCounts>) {
        let counts = purpose.map(|counts| {
            counts
                .queued
                .fetch_add(numbers.len() as u64, Ordering::SeqCst);
            Arc::clone(&counts.done)
        });
        let pending_job = Arc::new(PendingJob::new(self, purpose));
        let (reader, decoders) = (Arc::clone(&self.reader), Arc::clone(&self.threads.decoders));
        let rate = self.rate.clone();
        let should_wait_for_disk = purpose.is_some_and(|counts| counts.should_wait_for_disk);
        self.threads.fetchers.submit(move || {
            let rate = rate.as_deref();
            let mut numbers = numbers.as_slice();
            // Small parts, because one large part would exceed the rate for long.
            let part = if rate.is_some() { 1 } else { numbers.len() };
            while let Some((now, rest)) = numbers.split_at_checked(part.min(numbers.len())) {
                // Waits before it claims spans, because no read may wait for a waiting fill.
                if now.is_empty()
                    || !wait_for_rate(&reader, rate)
                    || should_wait_for_disk && !wait_for_disk(&reader)
                    || !reader.read_priority.wait_until_idle()
                {
                    return;
                }
                numbers = rest;
                for batch in reader.batches(now.iter().copied(), from, counts.as_deref()) {
                    if let Some((rate, since)) = rate {
                        let mut rate = rate.lock();
                        rate.spend(since.elapsed(), batch.packed.len());
                    }
                    let Some(reserved) = reader.reserve_batch(&batch, 2) else {
                        return;
                    };
                    match reader.fetch_batch(&batch) {
                        Ok(packed) => {
                            reader
                                .stats
                                .prefetched_packed_bytes
                                .add(packed.len() as u64);
                            let (filled, job) = (counts.as_ref(), Arc::clone(&pending_job));
                            batch.decode(&reader, &packed, reserved, &decoders, filled, job);
                        }
                        Err(error) => tracing::debug!(%error, "cannot prefetch"),
                    }
                }
            }
        });
    }
}

/// Waits until the rate limit allows a fetch; returns false if prefetch ends.
fn wait_for_rate(reader: &Reader, rate: Option<&(Mutex<RateLimit>, Instant)>) -> bool {
    let Some((rate, since)) = rate else {
        return true;
    };
    loop {
        let wait = rate.lock().wait_time(since.elapsed());
        if wait == Duration::ZERO {
            return true;
        }
        if !reader.read_priority.pause(wait) {
            return false;
        }
    }
}

/// Waits until the disk cache accepts more; returns false if the archive is closed.
fn wait_for_disk(reader: &Reader) -> bool {
    let disk_cache = reader.spans.disk();
    while disk_cache.is_some_and(|disk_cache| disk_cache.is_busy()) {
        if !reader.read_priority.pause(DISK_POLL_INTERVAL) {
            return false;
        }
    }
    true
}

/// Counts an outstanding job, and wakes the tracker when dropped.
struct PendingJob {
    shared: Arc<Shared>,
    purpose: Option<Arc<AtomicU32>>,
}

impl PendingJob {
    fn new(fill_workers: &FillWorkers, purpose: Option<&SpanCounts>) -> Self {
        let purpose = purpose.map(|counts| Arc::clone(&counts.outstanding));
        fill_workers
            .shared
            .outstanding
            .fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &purpose {
            purpose.fetch_add(1, Ordering::SeqCst);
        }
        Self {
            shared: Arc::clone(&fill_workers.shared),
            purpose,
        }
    }
}

impl Drop for PendingJob {
    fn drop(&mut self) {
        // Counts a message before the job ends, so that `is_idle` is never true in between.
        self.shared.pending_messages.fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &self.purpose {
            purpose.fetch_sub(1, Ordering::SeqCst);
        }
        self.shared.outstanding.fetch_sub(1, Ordering::SeqCst);
        self.shared.send(Message::Wake);
        self.shared.message_done();
    }
}
