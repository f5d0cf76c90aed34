//! Decodes a long member in shares, ahead of where its decoding stands.
//!
//! The packed bytes ahead are cut into shares of equal length, and each becomes a [`Task`] that
//! any thread may run. The decoder goes on as ever; where a block ends that a finished guess
//! begins with, it takes what the guess holds and stands at the guess' end. A guess that no one
//! has begun when decoding comes to its share is not waited for, and one that begins elsewhere is
//! dropped.

use std::collections::VecDeque;
use std::sync::Arc;

use super::guess::{Guess, Task};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::base::once_job::{TakeOutcome, OnceJob};
use crate::codec::input::Input;
use crate::codec::{self, Context};

/// With fewer threads than that, what is decoded twice costs more than it brings.
const MIN_WORKERS: usize = 4;
/// How many shares are under way at least, or it is not worth it.
const MIN_SHARES: usize = 3;
/// The longest share. What is searched before its first block, and decoded twice, is little of it.
const MAX_SHARE_LEN: usize = 1 << 20;
/// The shortest share: where plain bytes are a hundred times the packed ones.
const MIN_SHARE_LEN: usize = 64 << 10;
/// Packed bytes behind a share that its last block may reach into; most have 10 to 40 KiB.
const OVERLAP: usize = 256 << 10;
/// Plain bytes of a buffer: those of the serial way, so that the pool can reuse them.
const BUFFER_LEN: usize = 1 << 20;
/// The least and the most buffers that a share is given.
const BUFFERS: std::ops::RangeInclusive<u64> = 4..=8;
/// When so many guesses in a row were of no use, the next shares are let go by.
const MAX_MISSES: u32 = 4;

/// How much is decoded ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Shares under way.
    pub(super) shares: usize,
    /// The most packed bytes of a share, and of a member before anything is decoded ahead.
    pub(super) share_len: usize,
    /// See [`OVERLAP`].
    pub(super) overlap: usize,
    /// Buffers of a share.
    pub(super) buffers: usize,
    /// Plain bytes of each, at least a window's.
    pub(super) buffer_len: usize,
}

impl Plan {
    /// What `context` allows; `None` when there are too few threads, or too little memory.
    ///
    /// Buffers of guesses that wait for their turn are at most half of the pool: the other half
    /// is for those before, who therefore never wait for them. Their packed bytes are a quarter
    /// of the pool's budget at the most. Not counted is what a thread needs while it decodes one:
    /// zlib's states, and a copy of a share that lies in several slices, together below 1.5 MiB.
    pub(super) fn new(context: &Context) -> Option<Self> {
        let buffers = context.pool.budget() / 2 / BUFFER_LEN as u64;
        let shares = (buffers / BUFFERS.start()).min(context.workers as u64 + 1);
        let buffers = buffers.checked_div(shares)?.min(*BUFFERS.end());
        let plan = Self {
            shares: usize::try_from(shares).ok()?,
            share_len: MAX_SHARE_LEN,
            overlap: OVERLAP,
            buffers: usize::try_from(buffers).ok()?,
            buffer_len: BUFFER_LEN,
        };
        (context.workers >= MIN_WORKERS && plan.shares >= MIN_SHARES).then_some(plan)
    }

    /// The packed length of shares whose plain bytes fit into half of their buffers, as each byte
    /// may be there twice, when they pack as those `so_far`.
    fn share_len(&self, (packed_len, plain_len): (u64, u64)) -> usize {
        let room = (self.buffers * self.buffer_len / 2) as u64;
        let len = room.saturating_mul(packed_len) / plain_len.max(1);
        let longest = self.share_len;
        usize::try_from(len)
            .unwrap_or(longest)
            .clamp(longest.min(MIN_SHARE_LEN), longest)
    }
}

/// The shares under way, in order.
#[derive(Debug)]
pub(super) struct Queue {
    plan: Plan,
    pool: BufferPool,
    shares: VecDeque<Share>,
    /// Where the next share begins.
    next: Packed,
    /// How long it is.
    share_len: usize,
    /// Guesses in a row that were of no use.
    misses: u32,
}

#[derive(Debug)]
struct Share {
    start: Packed,
    ticket: Arc<OnceJob<Option<Guess>>>,
    /// What the ticket brought.
    guess: Option<Guess>,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.ticket.try_take();
    }
}

/// What there is where a block begins.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Meeting {
    /// Nothing, or nothing yet.
    Nothing,
    /// A share that someone is decoding.
    Running,
    /// A guess that begins here.
    Guess,
}

impl Queue {
    /// For a member that is decoded up to `packed`; `so_far` it has had so many packed and so
    /// many plain bytes.
    pub(super) fn new(plan: Plan, pool: BufferPool, packed: Packed, so_far: (u64, u64)) -> Self {
        let share_len = plan.share_len(so_far);
        Self {
            plan,
            pool,
            shares: VecDeque::new(),
            next: Packed(packed.0 + share_len as u64),
            share_len,
            misses: 0,
        }
    }

    /// Whether shares are under way, for which block ends must be watched.
    pub(super) fn is_busy(&self) -> bool {
        !self.shares.is_empty()
    }

    /// How far ahead of `input` the next share ends, with the overlap; `None` when it is not its
    /// turn yet.
    fn reach(&self, input: &Input) -> Option<usize> {
        let distance = usize::try_from(self.next.0.checked_sub(input.offset().0)?).ok()?;
        let near = self.shares.len() < self.plan.shares
            && distance <= self.plan.shares * self.plan.share_len;
        near.then_some(distance + self.share_len + self.plan.overlap)
    }

    /// Whether more input would make another share.
    pub(super) fn is_hungry(&self, input: &Input) -> bool {
        !input.is_ended() && self.reach(input).is_some_and(|reach| reach > input.len())
    }

    /// The next share, when it is at hand and there is memory for it without waiting.
    pub(super) fn begin(&mut self, input: &Input, so_far: (u64, u64)) -> Option<codec::Ahead> {
        if self.next.0 < input.offset().0 {
            // Decoding went past: there was no memory, or no one to begin.
            self.next = Packed(input.offset().0 + self.share_len as u64);
        }
        let reach = self.reach(input)?;
        if self.is_hungry(input) {
            return None;
        }
        let distance = usize::try_from(self.next.0 - input.offset().0).ok()?;
        let packed = input.slice(distance..reach);
        // The last may be shorter; what is very short is soon decoded anyway.
        if packed.len() < self.share_len / 2 {
            return None;
        }
        let buffers = (0..self.plan.buffers).map(|_| self.pool.try_acquire(self.plan.buffer_len));
        let task = Task {
            start: self.next.0 * 8,
            share_len: self.share_len.min(packed.len()),
            packed,
            buffers: buffers.collect::<Option<_>>()?,
        };
        let share = Share {
            start: self.next,
            ticket: Arc::new(OnceJob::new(move || task.run())),
            guess: None,
        };
        let work = codec::Ahead::new(Arc::clone(&share.ticket));
        self.shares.push_back(share);
        self.next = Packed(self.next.0 + self.share_len as u64);
        self.share_len = self.plan.share_len(so_far);
        Some(work)
    }

    /// What there is for the block that begins at `bit`. Drops what lies before.
    pub(super) fn meet(&mut self, bit: u64) -> Meeting {
        while let Some(share) = self.shares.front_mut() {
            if bit < share.start.0 * 8 {
                return Meeting::Nothing;
            }
            if share.guess.is_none() {
                match share.ticket.try_take() {
                    TakeOutcome::Running => return Meeting::Running,
                    TakeOutcome::Done(Some(guess)) => share.guess = Some(guess),
                    TakeOutcome::Done(None) => self.misses += 1,
                    TakeOutcome::Nothing => {}
                }
            }
            match &share.guess {
                Some(guess) if guess.begins_at(bit) => return Meeting::Guess,
                Some(guess) if !guess.begins_before(bit) => return Meeting::Nothing,
                Some(_) => self.misses += 1,
                None => {}
            }
            self.shares.pop_front();
            if self.misses >= MAX_MISSES {
                self.shares.clear();
                let pause = (self.share_len as u64) << self.misses.min(16);
                self.next = Packed((bit / 8).saturating_add(pause));
            }
        }
        Meeting::Nothing
    }

    /// The guess that was met.
    pub(super) fn take(&mut self) -> Option<Guess> {
        let guess = self.shares.front_mut()?.guess.take()?;
        self.shares.pop_front();
        self.misses = 0;
        Some(guess)
    }

    /// The work that was met while it ran.
    pub(super) fn running(&self) -> Option<codec::Ahead> {
        let share = self.shares.front()?;
        Some(codec::Ahead::new(Arc::clone(&share.ticket)))
    }
}
