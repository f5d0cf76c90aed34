//! Filling of a buffer by requests, which are repeated after failures.

use std::time::Duration;

use super::concurrency_limit::Permit;
use super::retry_state::{Failure, RetryState};
use super::timer::Timer;
use super::{Http, RangeResult};
use crate::base::buffer_pool::Buffer;
use crate::source::read_handle::ReadCommand;
use crate::source::{Cause, Error, ReadHandle, Source};

/// Maximum pause on a server's request for reads that never give up.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(10);

/// Progress of a read, which several mirrors may serve one after the other.
pub(in crate::source) struct FillState {
    /// Bytes at the front of the buffer that are received.
    pub(in crate::source) filled: usize,
    retry_state: RetryState,
    timer: Timer,
}

struct BufferFill<'a> {
    source: &'a Http,
    offset: u64,
    buffer: &'a mut Buffer,
    state: &'a mut FillState,
    read_handle: &'a ReadHandle,
    /// Whether the first failure is final, because a mirror may serve the rest.
    fails_fast: bool,
}

enum Attempt {
    Received(RangeResult),
    Failed(Failure),
    /// The command came from the owner of the read, or from the timeout.
    Commanded(ReadCommand),
}

impl Http {
    /// Fills `buffer` from `offset` on. Truncates it at the end of the source, and if the handle says so.
    pub(super) async fn fill_buffer(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        read_handle: &ReadHandle,
    ) -> Result<(), Error> {
        let mut state = self.start_fill(offset, buffer, read_handle)?;
        self.continue_fill(offset, buffer, &mut state, read_handle, false)
            .await
    }

    /// Starts to fill `buffer`, by the bytes that came when the source was opened.
    pub(in crate::source) fn start_fill(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        read_handle: &ReadHandle,
    ) -> Result<FillState, Error> {
        let filled = self
            .copy_prefix(offset, buffer)
            .map_err(|cause| Error::new(self.location(), cause))?;
        read_handle.set_received(filled);
        Ok(self.new_attempt(filled))
    }

    /// Fills the rest of `buffer` as [`fill_buffer`](Self::fill_buffer) does. With `fails_fast`, the first
    /// failure is final.
    ///
    /// # Cancel safety
    /// `state` counts the bytes that are received.
    pub(in crate::source) async fn continue_fill(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        state: &mut FillState,
        read_handle: &ReadHandle,
        fails_fast: bool,
    ) -> Result<(), Error> {
        let mut fill = BufferFill {
            source: self,
            offset,
            buffer,
            state,
            read_handle,
            fails_fast,
        };
        fill.run().await
    }

    /// Starts with the full timeout, after `filled` bytes.
    fn new_attempt(&self, filled: usize) -> FillState {
        let mut retry_state = self.new_retry_state();
        retry_state.progress_mark = filled as u64;
        FillState {
            filled,
            retry_state,
            timer: Timer::new(self.options.timeout, filled as u64, &self.stats),
        }
    }
}

impl<'a> BufferFill<'a> {
    async fn run(&mut self) -> Result<(), Error> {
        while self.state.filled < self.buffer.len() {
            let Some(permit) = self.wait_for_permit().await else {
                self.buffer.truncate(self.state.filled);
                continue;
            };
            let attempt = self.attempt(permit).await?;
            self.read_handle.set_in_flight(false);
            match attempt {
                Attempt::Received(RangeResult::Part) => {}
                Attempt::Received(RangeResult::End) | Attempt::Commanded(ReadCommand::Stop) => {
                    self.buffer.truncate(self.state.filled);
                }
                Attempt::Failed(failure) => self.recover(failure).await?,
                Attempt::Commanded(ReadCommand::Cut) => {
                    self.source.stats.source_straggler_retries.increment();
                    self.source.stats.source_retries.increment();
                    self.source.return_to_original_url();
                }
            }
        }
        Ok(())
    }

    /// Waits until a request may be sent. `None` if a command came, while no request was in flight.
    async fn wait_for_permit(&mut self) -> Option<Result<Permit<'a>, Cause>> {
        let left = self.state.timer.update(self.state.filled as u64);
        let permit = tokio::select! {
            biased;
            _ = self.read_handle.next_command() => return None,
            permit = self.source.acquire_permit(left, self.read_handle) => permit,
        };
        if self.read_handle.is_stream_read {
            // Silence before this read's turn does not count.
            self.state.timer.ignore_elapsed();
        } else {
            self.state.timer.update(self.state.filled as u64);
        }
        Some(permit)
    }

    async fn attempt(&mut self, permit: Result<Permit<'a>, Cause>) -> Result<Attempt, Error> {
        let Self {
            source,
            offset,
            buffer,
            state,
            read_handle,
            fails_fast,
        } = self;
        let FillState {
            filled,
            retry_state,
            timer,
        } = &mut **state;
        let before = *filled as u64;
        let is_queued = || {
            read_handle.is_stream_read
                && read_handle.received() == before
                && source.limiter.received_within(source.idle_timeout)
        };
        let request = async {
            let permit = permit?;
            source
                .request_rest(*offset, buffer, filled, permit, read_handle)
                .await
        };
        let late = tokio::select! {
            biased;
            command = read_handle.next_command() => return Ok(Attempt::Commanded(command)),
            result = request => {
                return Ok(result.map_or_else(Attempt::Failed, Attempt::Received));
            }
            late = timer.wait_until_expired(|| read_handle.received(), is_queued) => late,
        };
        retry_state.count_timeout();
        let error = retry_state.error(source.location(), late);
        if *fails_fast || !read_handle.retries_forever() {
            source.outage.begin();
            return Err(error);
        }
        source.outage.report_failure(&error, Duration::ZERO);
        // Users see the outage through other channels.
        self.start_again();
        Ok(Attempt::Commanded(ReadCommand::Cut))
    }

    /// Pauses after a failure; an error means that no further attempt should follow.
    async fn recover(&mut self, mut failure: Failure) -> Result<(), Error> {
        failure.cause = failure.cause.after_open();
        // The failed node may be out of service, so let the original URL choose again.
        self.source.return_to_original_url();
        if self.fails_fast {
            if failure.cause.is_outage() {
                self.source.outage.begin();
            }
            let location = self.source.location();
            return Err(self.state.retry_state.error(location, failure.cause));
        }
        if failure.cause.is_outage() {
            self.state.timer.set_unreachable();
        }
        let filled = self.state.filled as u64;
        let left = self.state.timer.update_running(filled);
        let paused = tokio::select! {
            biased;
            // No request is in flight that could be cut.
            _ = self.read_handle.next_command() => {
                self.buffer.truncate(self.state.filled);
                return Ok(());
            }
            paused = self.state.retry_state.pause_after(failure, filled, left) => paused,
        };
        let Err(cause) = paused else {
            return Ok(());
        };
        let is_final = !self.read_handle.retries_forever() || !cause.is_transient();
        let pause = match cause {
            Cause::Busy(asked) => asked.min(MAX_RETRY_AFTER),
            _ => self.source.options.retry.max_pause,
        };
        let error = self.state.retry_state.error(self.source.location(), cause);
        if is_final {
            if error.cause.is_outage() {
                self.source.outage.begin();
            }
            return Err(error);
        }
        self.source.outage.report_failure(&error, pause);
        self.state.timer.set_unreachable();
        tokio::select! {
            biased;
            _ = self.read_handle.next_command() => self.buffer.truncate(self.state.filled),
            () = tokio::time::sleep(pause) => {}
        }
        self.start_again();
        Ok(())
    }

    /// Starts with the full timeout, for a read that never gives up.
    fn start_again(&mut self) {
        *self.state = self.source.new_attempt(self.state.filled);
        self.state.timer.set_unreachable();
    }
}
