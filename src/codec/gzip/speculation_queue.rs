//! Decodes a long member in partitions, ahead of the serial decoder. The packed bytes ahead are cut into
//! partitions of equal length, each a [`SpeculativeTask`] for any thread. If a block ends where a finished
//! output begins, the serial decoder takes that output and continues at its end. It drops an output that
//! begins elsewhere, and does not wait for a task that no thread has begun.

use std::collections::VecDeque;
use std::sync::Arc;

use super::speculative::{SpeculativeOutput, SpeculativeTask};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::base::once_job::{OnceJob, TakeOutcome};
use crate::codec::walker::input_queue::InputQueue;
use crate::codec::{Context, SpeculativeJob};

/// With fewer threads, decoding twice costs more than it gains.
const MIN_WORKERS: usize = 4;
/// With fewer in flight, speculation does not pay.
const MIN_PARTITIONS: usize = 3;
/// Maximum length; the part before the first block and the part decoded twice are small in comparison.
const MAX_PARTITION_LEN: usize = 1 << 20;
/// Minimum length, for plain bytes a hundred times the packed ones.
const MIN_PARTITION_LEN: usize = 64 << 10;
/// Packed bytes behind a partition that its last block may reach into; most have 10 to 40 KiB.
const OVERLAP: usize = 256 << 10;
/// Plain bytes of a buffer, as in the serial way, so that the pool can reuse it.
const BUFFER_LEN: usize = 1 << 20;
const BUFFERS_PER_PARTITION: std::ops::RangeInclusive<u64> = 4..=8;
/// After so many useless outputs in a row, the queue skips the next partitions.
const MAX_CONSECUTIVE_MISSES: u32 = 4;

#[derive(Clone, Copy, Debug)]
pub(super) struct SpeculationLimits {
    pub(super) partitions: usize,
    /// Maximum packed bytes of a partition, and of a member before speculation begins.
    pub(super) partition_len: usize,
    pub(super) overlap: usize,
    pub(super) buffers: usize,
    /// Plain bytes of each, at least a window's.
    pub(super) buffer_len: usize,
}

impl SpeculationLimits {
    /// The limits that `context` allows; `None` with too few threads or too little memory. Buffers of waiting
    /// outputs are at most half of the pool, so the bytes before them never wait for them. The packed bytes
    /// are at most a quarter of the pool's budget. A thread's own memory, below 1.5 MiB (zlib's states, and a
    /// copy of a partition in several slices), is not counted.
    pub(super) fn new(context: &Context) -> Option<Self> {
        let buffers = context.pool.budget() / 2 / BUFFER_LEN as u64;
        let partitions = (buffers / BUFFERS_PER_PARTITION.start()).min(context.workers as u64 + 1);
        let buffers = buffers
            .checked_div(partitions)?
            .min(*BUFFERS_PER_PARTITION.end());
        let limits = Self {
            partitions: usize::try_from(partitions).ok()?,
            partition_len: MAX_PARTITION_LEN,
            overlap: OVERLAP,
            buffers: usize::try_from(buffers).ok()?,
            buffer_len: BUFFER_LEN,
        };
        (context.workers >= MIN_WORKERS && limits.partitions >= MIN_PARTITIONS).then_some(limits)
    }

    /// Packed length whose plain bytes, perhaps stored twice, fit the buffers at the ratio of `decoded_lens`.
    fn partition_len(&self, (packed_len, plain_len): (u64, u64)) -> usize {
        let room = (self.buffers * self.buffer_len / 2) as u64;
        let len = room.saturating_mul(packed_len) / plain_len.max(1);
        let longest = self.partition_len;
        usize::try_from(len)
            .unwrap_or(longest)
            .clamp(longest.min(MIN_PARTITION_LEN), longest)
    }
}

pub(super) struct SpeculationQueue {
    limits: SpeculationLimits,
    pool: BufferPool,
    partitions: VecDeque<Partition>,
    next_start: Packed,
    partition_len: usize,
    misses: u32,
}

struct Partition {
    start: Packed,
    job: Arc<OnceJob<Option<SpeculativeOutput>>>,
    output: Option<SpeculativeOutput>,
}

impl Drop for Partition {
    fn drop(&mut self) {
        self.job.try_take();
    }
}

pub(super) enum Match {
    Miss,
    /// A thread is still decoding the partition by this job.
    Running(Arc<dyn SpeculativeJob>),
    Hit,
}

impl SpeculationQueue {
    /// A queue for a member decoded up to `packed`. `decoded_lens` are its packed and plain bytes so far.
    pub(super) fn new(
        limits: SpeculationLimits,
        pool: BufferPool,
        packed: Packed,
        decoded_lens: (u64, u64),
    ) -> Self {
        let partition_len = limits.partition_len(decoded_lens);
        Self {
            limits,
            pool,
            partitions: VecDeque::new(),
            next_start: Packed(packed.0 + partition_len as u64),
            partition_len,
            misses: 0,
        }
    }

    /// Whether partitions are in flight, so that the decoder must stop at block ends.
    pub(super) fn is_busy(&self) -> bool {
        !self.partitions.is_empty()
    }

    /// Input needed to the end of the next partition and its overlap; `None` when it is not its turn yet.
    fn needed_input_len(&self, input: &InputQueue) -> Option<usize> {
        let distance = usize::try_from(self.next_start.0.checked_sub(input.offset().0)?).ok()?;
        let near = self.partitions.len() < self.limits.partitions
            && distance <= self.limits.partitions * self.limits.partition_len;
        near.then_some(distance + self.partition_len + self.limits.overlap)
    }

    pub(super) fn wants_input(&self, input: &InputQueue) -> bool {
        !input.is_finished()
            && self
                .needed_input_len(input)
                .is_some_and(|needed_len| needed_len > input.len())
    }

    /// Starts the next partition, if its input and memory are available without waiting.
    pub(super) fn start_next(
        &mut self,
        input: &InputQueue,
        decoded_lens: (u64, u64),
    ) -> Option<Arc<dyn SpeculativeJob>> {
        if self.next_start.0 < input.offset().0 {
            // Decoding overtook it, because there was no memory, or no thread to begin it.
            self.next_start = Packed(input.offset().0 + self.partition_len as u64);
        }
        let needed_len = self.needed_input_len(input)?;
        if self.wants_input(input) {
            return None;
        }
        let distance = usize::try_from(self.next_start.0 - input.offset().0).ok()?;
        let packed = input.slice(distance..needed_len);
        // The last one may be shorter. A very short one is decoded soon anyway.
        if packed.len() < self.partition_len / 2 {
            return None;
        }
        let buffers =
            (0..self.limits.buffers).map(|_| self.pool.try_acquire(self.limits.buffer_len));
        let task = SpeculativeTask {
            start: self.next_start.0 * 8,
            partition_len: self.partition_len.min(packed.len()),
            packed,
            buffers: buffers.collect::<Option<_>>()?,
        };
        let partition = Partition {
            start: self.next_start,
            job: Arc::new(OnceJob::new(move || task.run())),
            output: None,
        };
        let work = partition.job.clone();
        self.partitions.push_back(partition);
        self.next_start = Packed(self.next_start.0 + self.partition_len as u64);
        self.partition_len = self.limits.partition_len(decoded_lens);
        Some(work)
    }

    /// Looks up the output for the block at `bit`. Drops partitions before it.
    pub(super) fn find_match(&mut self, bit: u64) -> Match {
        while let Some(partition) = self.partitions.front_mut() {
            if bit < partition.start.0 * 8 {
                return Match::Miss;
            }
            if partition.output.is_none() {
                match partition.job.try_take() {
                    TakeOutcome::Running => {
                        return Match::Running(partition.job.clone());
                    }
                    TakeOutcome::Done(Some(output)) => partition.output = Some(output),
                    TakeOutcome::Done(None) => self.misses += 1,
                    TakeOutcome::Nothing => {}
                }
            }
            match &partition.output {
                Some(output) if output.begins_at(bit) => return Match::Hit,
                Some(output) if !output.begins_before(bit) => return Match::Miss,
                Some(_) => self.misses += 1,
                None => {}
            }
            self.partitions.pop_front();
            if self.misses >= MAX_CONSECUTIVE_MISSES {
                self.partitions.clear();
                let pause = (self.partition_len as u64) << self.misses.min(16);
                self.next_start = Packed((bit / 8).saturating_add(pause));
            }
        }
        Match::Miss
    }

    pub(super) fn take_match(&mut self) -> Option<SpeculativeOutput> {
        let output = self.partitions.front_mut()?.output.take()?;
        self.partitions.pop_front();
        self.misses = 0;
        Some(output)
    }
}
