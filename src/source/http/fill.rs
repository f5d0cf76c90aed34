//! Filling of a buffer by requests, each to one of the servers that have the bytes.
//!
//! A request that fails continues at another server without a pause. When all have failed, the read pauses and starts
//! over, as the retry policy says, until its deadline.

use std::future;
use std::time::Duration;

use tokio::time::Instant;

use super::concurrency_limit::Permit;
use super::{Http, RangeResult};
use crate::base::buffer_pool::Buffer;
use crate::source::read_handle::ReadCommand;
use crate::source::retry::attempts::{Attempts, Failure};
use crate::source::{Cause, Error, ReadHandle, Source};

/// Maximum pause on a server's request for reads that never give up.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(10);

/// Servers with the same bytes.
pub(in crate::source) trait Servers: Sync {
    /// A server that is asked, as long as it is.
    type Server: AsRef<Http> + Send + Sync;

    /// The server whose first bytes are in memory.
    fn first(&self) -> &Http;

    /// Chooses the server for `left` more bytes; `None` if the read should pause.
    fn choose(&self, history: &ReadHistory, left: u64) -> Option<Self::Server>;

    /// Waits until another server should be asked for the rest of `left` bytes. Cancel safe.
    fn wait_for_better(
        &self,
        server: &Self::Server,
        history: &ReadHistory,
        read_handle: &ReadHandle,
        left: u64,
    ) -> impl Future<Output = ()> + Send;

    /// Records the end of a request, which began at `started`, and updates `history`.
    fn record(
        &self,
        server: &Self::Server,
        history: &mut ReadHistory,
        started: Instant,
        outcome: Outcome<'_>,
    );
}

/// Servers that failed a read, by their numbers.
#[derive(Clone, Debug, Default)]
pub(in crate::source) struct ReadHistory {
    /// Those that failed or were abandoned since the last pause.
    pub(in crate::source) failed: Vec<usize>,
    /// Those that were abandoned, once for each time.
    pub(in crate::source) abandoned: Vec<usize>,
    /// Whether all servers failed before.
    pub(in crate::source) has_paused: bool,
}

/// End of a request.
pub(in crate::source) enum Outcome<'a> {
    /// Bytes of this range came, or the end of the source.
    Received {
        start: u64,
        end: u64,
        read_handle: &'a ReadHandle,
    },
    Failed(&'a Failure),
    /// Another server is asked, before it ended. It was in flight, or waited for its turn.
    Abandoned {
        was_in_flight: bool,
    },
}

/// A single server.
struct Alone<'a>(&'a Http);

impl<'a> Servers for Alone<'a> {
    type Server = &'a Http;

    fn first(&self) -> &Http {
        self.0
    }

    fn choose(&self, history: &ReadHistory, _left: u64) -> Option<&'a Http> {
        history.failed.is_empty().then_some(self.0)
    }

    async fn wait_for_better(&self, _: &&'a Http, _: &ReadHistory, _: &ReadHandle, _: u64) {
        future::pending::<()>().await;
    }

    fn record(&self, _: &&'a Http, history: &mut ReadHistory, _: Instant, outcome: Outcome<'_>) {
        if matches!(outcome, Outcome::Failed(_)) {
            history.failed.push(0);
        }
    }
}

impl AsRef<Self> for Http {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Http {
    /// Fills `buffer` from this server alone.
    pub(super) async fn fill_buffer(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        read_handle: &ReadHandle,
    ) -> Result<(), Error> {
        fill_buffer(&Alone(self), offset, buffer, read_handle).await
    }
}

/// Fills `buffer` from `offset` on. Truncates it at the end of the source, and if the handle says so.
pub(in crate::source) async fn fill_buffer<S: Servers>(
    servers: &S,
    offset: u64,
    buffer: &mut Buffer,
    read_handle: &ReadHandle,
) -> Result<(), Error> {
    let first = servers.first();
    let filled = first
        .copy_prefix(offset, buffer)
        .map_err(|cause| Error::new(first.location(), cause))?;
    read_handle.set_received(filled);
    let mut fill = BufferFill {
        servers,
        offset,
        buffer,
        read_handle,
        filled,
        attempts: first.new_attempts(read_handle.progress()),
        history: ReadHistory::default(),
        failure: None,
        has_abandoned: false,
    };
    fill.run().await
}

struct BufferFill<'a, S: Servers> {
    servers: &'a S,
    offset: u64,
    buffer: &'a mut Buffer,
    read_handle: &'a ReadHandle,
    /// Bytes at the front of the buffer that are received.
    filled: usize,
    /// Retries and deadline of the read, at whichever server.
    attempts: Attempts,
    history: ReadHistory,
    /// The failure since the last pause that will end soonest, and its server.
    failure: Option<(Failure, S::Server)>,
    /// Whether a server was abandoned since the last pause. At its next request it has more time.
    has_abandoned: bool,
}

enum Attempt {
    Received(RangeResult),
    Failed(Failure),
    /// Another server should be asked.
    Abandoned,
    /// The command came from the owner of the read, or from the timeout.
    Commanded(ReadCommand),
}

impl<S: Servers> BufferFill<'_, S> {
    async fn run(&mut self) -> Result<(), Error> {
        while self.filled < self.buffer.len() {
            let left = (self.buffer.len() - self.filled) as u64;
            match self.servers.choose(&self.history, left) {
                Some(server) => self.ask(server, left).await?,
                None => self.pause().await?,
            }
        }
        Ok(())
    }

    /// Sends one request to `server` for the rest of `left` bytes.
    async fn ask(&mut self, server: S::Server, left: u64) -> Result<(), Error> {
        let (servers, read_handle) = (self.servers, self.read_handle);
        let (history, started) = (self.history.clone(), Instant::now());
        let start = self.offset + self.filled as u64;
        let attempt = tokio::select! {
            biased;
            attempt = self.attempt(server.as_ref()) => attempt?,
            () = servers.wait_for_better(&server, &history, read_handle, left) => Attempt::Abandoned,
        };
        // A cut of a request that has ended must not end the next one.
        let was_in_flight = read_handle.is_in_flight();
        read_handle.set_in_flight(false);
        let history = &mut self.history;
        match attempt {
            Attempt::Received(result) => {
                let end = self.offset + self.filled as u64;
                let outcome = Outcome::Received {
                    start,
                    end,
                    read_handle,
                };
                servers.record(&server, history, started, outcome);
                if matches!(result, RangeResult::End) {
                    self.buffer.truncate(self.filled);
                }
            }
            Attempt::Abandoned => {
                let outcome = Outcome::Abandoned { was_in_flight };
                servers.record(&server, history, started, outcome);
                self.has_abandoned = true;
                self.note_failure(Cause::silent_server().into(), server, left);
            }
            Attempt::Failed(mut failure) => {
                failure.cause = failure.cause.after_open();
                // The failed node may be out of service, so let the original URL choose again.
                server.as_ref().return_to_original_url();
                if failure.cause.is_descriptor_limit() {
                    // Nothing is recorded, because it is no fault of this server. Another one fails in the same way.
                    return self.end_or_wait(server.as_ref(), failure.cause).await;
                }
                servers.record(&server, history, started, Outcome::Failed(&failure));
                self.note_failure(failure, server, left);
            }
            Attempt::Commanded(ReadCommand::Stop) => self.buffer.truncate(self.filled),
            Attempt::Commanded(ReadCommand::Cut) => {
                let http = server.as_ref();
                http.stats.source_straggler_retries.increment();
                http.stats.source_retries.increment();
                http.return_to_original_url();
            }
        }
        Ok(())
    }

    async fn attempt(&mut self, http: &Http) -> Result<Attempt, Error> {
        let Self {
            offset,
            buffer,
            read_handle,
            filled,
            attempts,
            ..
        } = self;
        let left = attempts.timer.update(read_handle.progress());
        let permit = tokio::select! {
            biased;
            // No request is in flight that could be cut.
            _ = read_handle.next_command() => return Ok(Attempt::Commanded(ReadCommand::Stop)),
            permit = http.acquire_permit(left, read_handle) => permit,
        };
        if read_handle.is_stream_read {
            // Silence before this read's turn does not count.
            attempts.timer.ignore_elapsed();
        } else {
            attempts.timer.update(read_handle.progress());
        }
        let before = *filled as u64;
        let is_queued = || {
            read_handle.is_stream_read
                && read_handle.received() == before
                && http.limiter.received_within(http.idle_timeout)
        };
        let request = request(http, permit, *offset, buffer, filled, read_handle);
        let commanded = async {
            tokio::select! {
                biased;
                command = read_handle.next_command() => Attempt::Commanded(command),
                attempt = request => attempt,
            }
        };
        let progress = || read_handle.progress();
        let expired = match attempts.run(commanded, progress, is_queued).await {
            Ok(attempt) => return Ok(attempt),
            Err(expired) => expired,
        };
        let error = attempts.retry_state.error(http.location(), expired);
        if !read_handle.retries_forever() {
            http.outage.begin();
            return Err(error);
        }
        http.outage.report_failure(&error, Duration::ZERO);
        // Users see the outage through other channels.
        self.start_again(http);
        Ok(Attempt::Commanded(ReadCommand::Cut))
    }

    /// Keeps `failure` if it will end sooner than the others since the last pause.
    fn note_failure(&mut self, failure: Failure, server: S::Server, left: u64) {
        let http = server.as_ref();
        if self.servers.choose(&self.history, left).is_some() {
            self.attempts.retry_state.count_attempt();
            http.stats.source_mirror_switches.increment();
            if failure.cause.is_outage() {
                http.outage.begin();
            }
            tracing::debug!(cause = %failure.cause, "{}: asking another server", http.location());
        }
        let is_better = |(known, _): &(Failure, _)| failure.hope() > known.hope();
        if self.failure.as_ref().is_none_or(is_better) {
            self.failure = Some((failure, server));
        }
    }

    /// Pauses after all servers failed; an error means that no further attempt should follow.
    async fn pause(&mut self) -> Result<(), Error> {
        let Some((failure, server)) = self.failure.take() else {
            return Err(Error::new(
                self.servers.first().location(),
                Cause::silent_server(),
            ));
        };
        let left = (self.buffer.len() - self.filled) as u64;
        let is_first = !std::mem::replace(&mut self.history.has_paused, true);
        if is_first && !failure.may_end() && self.servers.choose(&self.history, left).is_some() {
            // Servers that failed in earlier reads may have recovered.
            self.failure = Some((failure, server));
            return Ok(());
        }
        self.history.failed.clear();
        if std::mem::take(&mut self.has_abandoned) {
            return Ok(());
        }
        let http = server.as_ref();
        let (attempts, progress) = (&mut self.attempts, self.read_handle.progress());
        let paused = tokio::select! {
            biased;
            // No request is in flight that could be cut.
            _ = self.read_handle.next_command() => {
                self.buffer.truncate(self.filled);
                return Ok(());
            }
            paused = attempts.pause_after(failure, progress, progress) => paused,
        };
        match paused {
            Ok(()) => Ok(()),
            Err(cause) => self.end_or_wait(http, cause).await,
        }
    }

    /// Ends the read by `cause`. A read that never gives up waits and starts over, if the cause may end.
    async fn end_or_wait(&mut self, http: &Http, cause: Cause) -> Result<(), Error> {
        let may_end = cause.is_transient() || cause.is_descriptor_limit();
        let requested = cause.retry_after().map(|pause| pause.min(MAX_RETRY_AFTER));
        let pause = requested.unwrap_or(http.options.retry.max_pause);
        let error = self.attempts.retry_state.error(http.location(), cause);
        if !may_end || !self.read_handle.retries_forever() {
            if error.cause.is_outage() {
                http.outage.begin();
            }
            return Err(error);
        }
        http.outage.report_failure(&error, pause);
        self.attempts.timer.set_unreachable();
        self.history.failed.clear();
        tokio::select! {
            biased;
            _ = self.read_handle.next_command() => self.buffer.truncate(self.filled),
            () = tokio::time::sleep(pause) => {}
        }
        self.start_again(http);
        Ok(())
    }

    /// Starts with the full timeout, for a read that never gives up.
    fn start_again(&mut self, http: &Http) {
        self.attempts = http.new_attempts(self.read_handle.progress());
        self.attempts.timer.set_unreachable();
    }
}

/// Sends one request for the missing bytes, if there is a permit.
async fn request(
    http: &Http,
    permit: Result<Permit<'_>, Cause>,
    offset: u64,
    buffer: &mut Buffer,
    filled: &mut usize,
    read_handle: &ReadHandle,
) -> Attempt {
    let result = match permit {
        Ok(permit) => {
            http.request_rest(offset, buffer, filled, permit, read_handle)
                .await
        }
        Err(cause) => Err(cause.into()),
    };
    result.map_or_else(Attempt::Failed, Attempt::Received)
}
