//! HTTP sources.
//!
//! The first request is a ranged GET, because servers may refuse HEAD. It finds the length, range support,
//! the version, and the target of redirects. Its bytes are kept and served from memory. Every later
//! response must be of the same version. Later requests use the redirects' target. When that expires, the
//! original URL is requested again.
//!
//! The caller's [`StallTimeout`] bounds every network wait.

mod certificates;
mod client;
mod concurrency_limit;
mod connect_time;
mod outage_log;
mod transport;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt};
use tokio::time::Instant;
use url::Url;

use self::client::{Client, Response};
use self::concurrency_limit::{ConcurrencyLimiter, Permit};
use self::outage_log::OutageLog;
use self::transport::NetworkTransport;
use super::read_handle::{Continuation, ReadCommand, ResponseRest};
use super::response::{ContentRange, ResponseHead};
use super::retry::{Jitter, Retry};
use super::{
    Access, Cause, Error, Fingerprint, Location, Obstacle, Options, ReadHandle, Source, SourceInfo,
    Validator,
};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::base::stall_timeout::StallTimeout;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;

pub use self::certificates::{Certificates, CertificatesError};
pub use self::transport::{Content, RawResponse, Transport};

/// Bytes of the first request. They suffice to detect a format, and are few enough to be sent with the
/// response's header.
const PREFIX_LEN: u64 = 64 << 10;

/// Timeout for an answer before a source is opened as its known version.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum pause on a server's request for reads that never give up.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(10);

/// Time until a connection is available for the next request. A request sent before opens another
/// connection, which a server that leaves connections waiting does not serve.
const CONNECTION_RETURN_DELAY: Duration = Duration::from_millis(2);

/// Maximum queueing time of a read-ahead request, in read timeouts, while the server answers others.
const QUEUE_TIMEOUT_FACTOR: u32 = 10;

/// Maximum number of consecutive retries without a pause, after the server refused the concurrency. They go
/// from four requests, the initial number of a transfer, to one.
const MAX_IMMEDIATE_RETRIES: u32 = 2;

/// Bytes that count as progress. A failed request that received as many resets the failure count.
const MIN_PROGRESS_BYTES: u64 = 64 << 10;

/// A source over HTTP or HTTPS.
#[derive(Debug)]
pub struct Http {
    client: Client,
    retry: Retry,
    jitter: Arc<Jitter>,
    timeout: Duration,
    /// Timeout without any byte from the server.
    idle_timeout: Duration,
    limiter: ConcurrencyLimiter,
    stats: Arc<Stats>,
    info: SourceInfo,
    /// Content-Encoding of the stored bytes, if the server names one; unset before the first response.
    encoding: OnceLock<Option<String>>,
    /// Target of the last redirects.
    resolved: Mutex<Url>,
    body: InitialBody,
    /// Latency of the last answer, in microseconds.
    answer_micros: AtomicU64,
    /// Store of the last unread response.
    continuation: Mutex<Weak<Continuation>>,
    options: Options,
    outage: OutageLog,
    /// The same source without caches, for reads after corrupt bytes; created on first use.
    uncached: OnceLock<Box<Self>>,
}

/// Body of the first response.
#[derive(Debug)]
enum InitialBody {
    /// First bytes of a source with ranges.
    Prefix(Bytes),
    /// All bytes of a source without ranges; taken by its stream.
    Whole(Mutex<Option<Content>>),
}

impl Http {
    /// Probes and opens `url`.
    ///
    /// # Errors
    /// If the server is unreachable, refuses access, or sends an unusable response.
    pub async fn open(url: Url, options: Options) -> Result<Self, Error> {
        let failed = |cause| Error::new(Location::from_url(&url).as_str(), cause);
        let network = NetworkTransport::new(&options).map_err(failed)?;
        let Some(version) = options.known_version.clone() else {
            return Self::open_through(Box::new(network), url, options).await;
        };
        let opening = Self::open_through(Box::new(network), url.clone(), options.clone());
        match tokio::time::timeout(OPEN_TIMEOUT, opening).await {
            Ok(Ok(opened)) => return Ok(opened),
            Ok(Err(error)) => tracing::warn!("{error}"),
            Err(_) => tracing::warn!("{}: no answer so far", Location::from_url(&url)),
        }
        tracing::warn!("serving only cached data until the source can be read");
        Self::open_known(version, url, options)
    }

    /// Opens `url` as the known `version`, without a request.
    fn open_known(version: Fingerprint, url: Url, options: Options) -> Result<Self, Error> {
        let location = Location::from_url(&url);
        let failed = |cause| Error::new(location.as_str(), cause);
        let network = NetworkTransport::new(&options).map_err(failed)?;
        let client = Client::new(url.clone(), &options, Box::new(network)).map_err(failed)?;
        let found = ProbeResult {
            fingerprint: version,
            encoding: OnceLock::new(),
            url,
            body: InitialBody::Prefix(Bytes::new()),
            answer_time: Duration::ZERO,
        };
        let jitter = Arc::new(Jitter::new(options.jitter_seed));
        Ok(Self::from_probe(found, client, jitter, location, options))
    }

    /// As [`open`](Self::open), with requests through `transport` instead of the options' connections.
    ///
    /// # Errors
    /// As `open`.
    pub async fn open_through(
        transport: Box<dyn Transport>,
        url: Url,
        options: Options,
    ) -> Result<Self, Error> {
        let location = Location::from_url(&url);
        let client = Client::new(url, &options, transport)
            .map_err(|cause| Error::new(location.as_str(), cause))?;
        let jitter = Arc::new(Jitter::new(options.jitter_seed));
        let mut retry_state = RetryState::new(
            options.retry,
            Arc::clone(&jitter),
            Arc::clone(&options.stats),
        );
        let mut timer = Timer::new(options.timeout, 0, &options.stats);
        // Do not retry outages, because a wrong address should be reported soon.
        retry_state.retry.retries_outages = false;
        // A repeated byte does not extend the timeout.
        let received = AtomicU64::new(0);
        let found = loop {
            let found = tokio::select! {
                biased;
                found = probe(&client, &options, &received) => found,
                late = timer.wait_until_expired(|| received.load(Ordering::Relaxed), || false) => {
                    retry_state.count_timeout();
                    return Err(retry_state.error(location.as_str(), late));
                }
            };
            match found {
                Ok(found) => break found,
                Err(failure) => {
                    if failure.cause.is_outage() {
                        timer.set_unreachable();
                    }
                    let left = timer.update_running(received.load(Ordering::Relaxed));
                    let next = retry_state.pause_after(failure, 0, left).await;
                    next.map_err(|cause| retry_state.error(location.as_str(), cause))?;
                    // The pause counts as waiting time.
                    timer.update(received.load(Ordering::Relaxed));
                }
            }
        };
        Ok(Self::from_probe(found, client, jitter, location, options))
    }

    fn from_probe(
        found: ProbeResult,
        client: Client,
        jitter: Arc<Jitter>,
        location: Location,
        options: Options,
    ) -> Self {
        let ProbeResult {
            fingerprint,
            encoding,
            url,
            body,
            answer_time,
        } = found;
        let access = match body {
            InitialBody::Prefix(_) => Access::Ranges,
            InitialBody::Whole(_) => Access::Stream,
        };
        Self {
            info: SourceInfo {
                location,
                fingerprint,
                access,
            },
            encoding,
            resolved: Mutex::new(url),
            client,
            retry: options.retry,
            jitter,
            timeout: options.timeout,
            idle_timeout: idle_timeout(&options),
            limiter: ConcurrencyLimiter::new(
                options.connections,
                options.timeout,
                Arc::clone(&options.stats),
            ),
            stats: Arc::clone(&options.stats),
            body,
            answer_micros: AtomicU64::new(micros(answer_time)),
            continuation: Mutex::default(),
            options,
            outage: OutageLog::default(),
            uncached: OnceLock::new(),
        }
    }

    /// Returns the same version with single-use connections, no caches on the network, and nothing in
    /// memory.
    fn uncached(&self) -> Result<&Self, Error> {
        if let Some(uncached) = self.uncached.get() {
            return Ok(uncached);
        }
        let mut options = self.options.clone();
        // A pool without idle connections never reuses one.
        options.connections = 0;
        let client = self.client.without_cache(&options);
        let client = client.map_err(|cause| Error::new(self.location(), cause))?;
        let uncached = Self {
            retry: self.retry,
            jitter: Arc::clone(&self.jitter),
            timeout: self.timeout,
            idle_timeout: self.idle_timeout,
            limiter: ConcurrencyLimiter::new(
                self.options.connections,
                self.timeout,
                Arc::clone(&self.stats),
            ),
            stats: Arc::clone(&self.stats),
            info: self.info.clone(),
            encoding: self.encoding.clone(),
            resolved: Mutex::new(client.original().clone()),
            client,
            body: InitialBody::Prefix(Bytes::new()),
            answer_micros: AtomicU64::new(0),
            continuation: Mutex::default(),
            options,
            outage: OutageLog::default(),
            uncached: OnceLock::new(),
        };
        Ok(self.uncached.get_or_init(|| Box::new(uncached)))
    }

    async fn fill_buffer(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        read_handle: &ReadHandle,
    ) -> Result<(), Error> {
        let mut filled = self
            .copy_prefix(offset, buffer)
            .map_err(|cause| Error::new(self.location(), cause))?;
        let (mut retry_state, mut timer) = self.new_attempt(filled);
        read_handle.set_received(filled);
        while filled < buffer.len() {
            let left = timer.update(filled as u64);
            let permit_result = tokio::select! {
                biased;
                // No request is in flight that could be cut.
                _ = read_handle.next_command() => {
                    buffer.truncate(filled);
                    continue;
                }
                permit_result = self.acquire_permit(left, read_handle) => permit_result,
            };
            if read_handle.is_prefetch() {
                // Silence before this read's turn does not count.
                timer.ignore_elapsed();
            } else {
                timer.update(filled as u64);
            }
            let before = filled as u64;
            let is_queued = || {
                let is_unanswered = read_handle.received() == before;
                read_handle.is_prefetch()
                    && is_unanswered
                    && self.limiter.received_within(self.idle_timeout)
            };
            let request_rest = async {
                match permit_result {
                    Ok(permit) => {
                        self.request_rest(offset, buffer, &mut filled, permit, read_handle)
                            .await
                    }
                    Err(cause) => Err(cause.into()),
                }
            };
            let asked = tokio::select! {
                biased;
                order = read_handle.next_command() => Err(order),
                asked = request_rest => Ok(asked),
                late = timer.wait_until_expired(|| read_handle.received(), is_queued) => {
                    retry_state.count_timeout();
                    let error = retry_state.error(self.location(), late);
                    if !read_handle.retries_forever() {
                        return Err(error);
                    }
                    self.outage.report_failure(&error, Duration::ZERO);
                    // Users see the outage through other channels.
                    (retry_state, timer) = self.new_attempt(filled);
                    timer.set_unreachable();
                    Err(ReadCommand::Cut)
                }
            };
            read_handle.request_ended();
            match asked {
                Ok(Ok(RangeResult::Part)) => {}
                Ok(Ok(RangeResult::End)) | Err(ReadCommand::Stop) => buffer.truncate(filled),
                Ok(Err(mut failure)) => {
                    failure.cause = failure.cause.after_open();
                    if failure.cause.is_outage() {
                        timer.set_unreachable();
                    }
                    // The failed node may be out of service, so let the original URL choose again.
                    self.set_resolved_url(self.client.original().clone());
                    let left = timer.update_running(filled as u64);
                    let next = tokio::select! {
                        biased;
                        // No request is in flight that could be cut.
                        _ = read_handle.next_command() => {
                            buffer.truncate(filled);
                            Ok(())
                        }
                        next = retry_state.pause_after(failure, filled as u64, left) => next,
                    };
                    match next {
                        Err(cause) if read_handle.retries_forever() && cause.is_transient() => {
                            let pause = match cause {
                                Cause::Busy(asked) => asked.min(MAX_RETRY_AFTER),
                                _ => self.retry.max_pause,
                            };
                            self.outage
                                .report_failure(&retry_state.error(self.location(), cause), pause);
                            timer.set_unreachable();
                            tokio::select! {
                                biased;
                                _ = read_handle.next_command() => buffer.truncate(filled),
                                () = tokio::time::sleep(pause) => {}
                            }
                            (retry_state, timer) = self.new_attempt(filled);
                            timer.set_unreachable();
                        }
                        next => next.map_err(|cause| retry_state.error(self.location(), cause))?,
                    }
                }
                Err(ReadCommand::Cut) => {
                    self.stats.source_straggler_retries.increment();
                    self.stats.source_retries.increment();
                    self.set_resolved_url(self.client.original().clone());
                }
            }
        }
        Ok(())
    }

    /// Waits for a permit up to `left`. A read-ahead waits longer, while other requests receive bytes.
    async fn acquire_permit(
        &self,
        left: Duration,
        read_handle: &ReadHandle,
    ) -> Result<Permit<'_>, Cause> {
        loop {
            let came = self.stats.source_read_bytes.get();
            tokio::select! {
                biased;
                permit_result = self.limiter.acquire(left) => return permit_result,
                () = tokio::time::sleep(left) => {}
            }
            if !read_handle.is_prefetch() || self.stats.source_read_bytes.get() == came {
                return Err(silent_server());
            }
        }
    }

    /// Starts with the full timeout, after `filled` bytes.
    fn new_attempt(&self, filled: usize) -> (RetryState, Timer) {
        let mut retry_state = self.new_retry_state();
        retry_state.progress_mark = filled as u64;
        let timer = Timer::new(self.timeout, filled as u64, &self.stats);
        (retry_state, timer)
    }

    /// Retry state for a server that has answered before.
    fn new_retry_state(&self) -> RetryState {
        let (jitter, stats) = (Arc::clone(&self.jitter), Arc::clone(&self.stats));
        let mut retry_state = RetryState::new(self.retry, jitter, stats);
        retry_state.is_open = true;
        retry_state
    }

    /// Copies bytes of the first response, and returns their number.
    fn copy_prefix(&self, offset: u64, buffer: &mut Buffer) -> Result<usize, Cause> {
        let InitialBody::Prefix(prefix) = &self.body else {
            return Err(Cause::AlreadyRead);
        };
        let end = offset
            .checked_add(buffer.len() as u64)
            .ok_or(Cause::Truncated)?;
        if self.info.fingerprint.len.is_some_and(|len| end > len) {
            return Err(Cause::Truncated);
        }
        let known = usize::try_from(offset)
            .ok()
            .and_then(|start| prefix.get(start..))
            .unwrap_or_default();
        Ok(copy(known, buffer))
    }

    /// Sends one request for the missing bytes of `buffer`. Bytes received before a failure are kept and
    /// counted.
    ///
    /// # Cancel safety
    /// Received bytes are kept and counted.
    async fn request_rest(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        filled: &mut usize,
        permit: Permit<'_>,
        read_handle: &ReadHandle,
    ) -> Result<RangeResult, Failure> {
        // Neither sum overflows, because `copy_prefix` has checked it.
        let (start, end) = (offset + *filled as u64, offset + buffer.len() as u64);
        read_handle.request_started();
        let kept = read_handle
            .continuation()
            .and_then(|(_, kept)| kept.take(start));
        let is_continued = kept.is_some();
        let asked = if let Some(rest) = kept {
            self.stats.source_reused_responses.increment();
            permit.answered();
            Some(rest)
        } else {
            let len = self.info.fingerprint.len.unwrap_or(end);
            let beyond = read_handle.continuation().map_or(0, |(beyond, _)| *beyond);
            let wanted = (start, end.saturating_add(beyond).min(len).max(end));
            self.request_range(wanted, &permit, read_handle).await?
        };
        let mut rest = match asked {
            Some(rest) if rest.end > start => rest,
            Some(_) => return Ok(RangeResult::End),
            None => return Ok(RangeResult::Part),
        };
        if skip_to(&mut rest, start, &self.stats, self.idle_timeout)
            .await
            .is_err()
        {
            return Ok(RangeResult::Part);
        }
        let part = usize::try_from(rest.end - start).unwrap_or(usize::MAX);
        let target_end = buffer.len().min(filled.saturating_add(part));
        let target = buffer.get_mut(..target_end).unwrap_or_default();
        let idle = self.idle_timeout;
        let received = receive(&mut rest, target, filled, &self.stats, idle, |received| {
            permit.received();
            if read_handle.retries_forever() {
                let came = (received as u64).saturating_sub(read_handle.received());
                self.stats.scan_received_bytes.add(came);
            }
            read_handle.set_received(received);
        });
        match received.await {
            // The server was blocked and may have closed the connection, which is no failure.
            Err(_) if is_continued => return Ok(RangeResult::Part),
            received => received?,
        }
        if !is_continued {
            permit.succeeded();
        }
        self.outage.report_recovery(self.location());
        if let Some((beyond, keep)) = read_handle.continuation()
            && *beyond > 0
            && rest.start < rest.end
        {
            *self.continuation.lock() = Arc::downgrade(keep);
            keep.put(rest);
        }
        // A server may send less than requested. The rest is requested next.
        Ok(RangeResult::Part)
    }

    /// Sends a request for `wanted`, and checks the response. An empty one means that the source ends
    /// before. `None` means that the request was withdrawn and must be sent again.
    async fn request_range(
        &self,
        wanted: (u64, u64),
        permit: &Permit<'_>,
        read_handle: &ReadHandle,
    ) -> Result<Option<ResponseRest>, Failure> {
        if self.limiter.starves_connections() {
            // The connection of the unread response may be the only one that the server serves.
            let kept = self.continuation.lock().upgrade();
            if let Some(kept) = kept {
                kept.clear();
            }
            tokio::time::sleep(CONNECTION_RETURN_DELAY).await;
        }
        let sent = Instant::now();
        let response = tokio::select! {
            biased;
            response = self.send(Some(wanted)) => response?,
            () = permit.overtaken() => return Ok(None),
            () = permit.wait_until_silent(self.idle_timeout) => return Err(silent_server().into()),
        };
        let Response { head, content, url } = response;
        permit.answered();
        match (head.status, self.info.fingerprint.len) {
            (206, _) => {}
            (416, None) => {
                return Ok(Some(ResponseRest {
                    start: wanted.0,
                    end: wanted.0,
                    buffered: Bytes::new(),
                    content,
                }));
            }
            (416, len) if head.fingerprint().len == len => {
                return Err(protocol_failure(
                    "the server refuses a range inside its length",
                ));
            }
            (416, _) => return Err(Cause::Changed.into()),
            (200, _) if !self.info.fingerprint.matches(&head.fingerprint()) => {
                return Err(Cause::Changed.into());
            }
            (200, _) => return Err(protocol_failure("the server stopped answering with ranges")),
            (429 | 503, _) => {
                let is_for_concurrency = permit.throttled(head.retry_after);
                return Err(Failure {
                    is_for_concurrency,
                    ..Failure::from_status(&head)
                });
            }
            _ => return Err(Failure::from_status(&head)),
        }
        if !self.info.fingerprint.matches(&head.fingerprint()) {
            return Err(Cause::Changed.into());
        }
        let len = part_len(&head, wanted, self.encoding(&head)?)?;
        self.set_resolved_url(url);
        let mut rest = ResponseRest {
            start: wanted.0,
            end: wanted.0 + len as u64,
            buffered: Bytes::new(),
            content,
        };
        // A server may send the header at once, and compute the content after it.
        tokio::select! {
            biased;
            filled = receive_piece(&mut rest, &self.stats) => filled?,
            () = permit.wait_until_silent(self.idle_timeout) => return Err(silent_server().into()),
        }
        permit.received();
        let latency = sent.elapsed();
        read_handle.set_latency(latency, self.cost(latency));
        self.answer_micros.store(micros(latency), Ordering::Relaxed);
        Ok(Some(rest))
    }

    /// The part of an answer's latency that is not network time. A new connection may have been needed, and
    /// the request takes as long again.
    fn cost(&self, latency: Duration) -> Duration {
        latency.saturating_sub(self.client.connect_time() * 2)
    }

    /// Sends a request to the last redirect target, and to the original URL if that has expired.
    async fn send(&self, range: Option<(u64, u64)>) -> Result<Response, Cause> {
        let etag = match &self.info.fingerprint.validator {
            Validator::StrongEtag(etag) => Some(etag.as_str()),
            _ => None,
        };
        let resolved = self.resolved.lock().clone();
        let response = self.client.get(&resolved, range, etag).await?;
        if !response.head.may_be_expired_url() || resolved == *self.client.original() {
            return Ok(response);
        }
        self.client.get(self.client.original(), range, etag).await
    }

    /// Requests everything again from a server without ranges.
    async fn request_all(&self) -> Result<Content, Failure> {
        let Response { head, content, .. } =
            with_idle_timeout(self.idle_timeout, self.send(None)).await?;
        if head.status != 200 {
            return Err(Failure::from_status(&head));
        }
        head.check_encoding(self.encoding(&head)?)?;
        if !self.info.fingerprint.matches(&head.fingerprint()) {
            return Err(Cause::Changed.into());
        }
        Ok(content)
    }

    /// Content-Encoding of the stored bytes, from the first response, which `head` may be.
    fn encoding(&self, head: &ResponseHead) -> Result<Option<&str>, Cause> {
        if self.encoding.get().is_none() {
            let encoding = head.stored_encoding()?.map(str::to_owned);
            self.encoding.get_or_init(|| encoding);
        }
        Ok(self.encoding.get().and_then(|encoding| encoding.as_deref()))
    }

    fn set_resolved_url(&self, url: Url) {
        *self.resolved.lock() = url;
    }
}

/// Result of a request for the rest of a buffer.
enum RangeResult {
    /// Bytes were received, and the rest, if any, must be requested.
    Part,
    /// The source, whose length was unknown, ends before.
    End,
}

/// A failed attempt.
struct Failure {
    cause: Cause,
    /// Pause that the server asks for.
    retry_after: Option<Duration>,
    /// Whether the server may have refused the concurrency. The limiter then delays the retry until fewer
    /// requests are in flight.
    is_for_concurrency: bool,
}

impl Failure {
    fn from_status(head: &ResponseHead) -> Self {
        Self {
            cause: head.failure_cause(),
            retry_after: head.retry_after,
            is_for_concurrency: false,
        }
    }
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self {
            cause,
            retry_after: None,
            is_for_concurrency: false,
        }
    }
}

fn protocol_failure(how: &str) -> Failure {
    Cause::Protocol(how.to_owned()).into()
}

/// State of a series of attempts.
struct RetryState {
    retry: Retry,
    jitter: Arc<Jitter>,
    /// Whether the server has answered before.
    is_open: bool,
    attempts: u32,
    /// Consecutive attempts without substantial progress.
    failures: u32,
    /// Of these, the ones without a pause after them.
    immediate_retries: u32,
    /// Bytes present at the last failure that followed progress.
    progress_mark: u64,
    started: Instant,
    stats: Arc<Stats>,
}

impl RetryState {
    fn new(retry: Retry, jitter: Arc<Jitter>, stats: Arc<Stats>) -> Self {
        Self {
            retry,
            jitter,
            is_open: false,
            attempts: 0,
            failures: 0,
            immediate_retries: 0,
            progress_mark: 0,
            started: Instant::now(),
            stats,
        }
    }

    /// Pauses before the next attempt, after `received` bytes and with `left` of the timeout. Returns the
    /// cause if no attempt should follow.
    async fn pause_after(
        &mut self,
        failure: Failure,
        received: u64,
        left: Duration,
    ) -> Result<(), Cause> {
        self.attempts += 1;
        if received.saturating_sub(self.progress_mark) >= MIN_PROGRESS_BYTES {
            self.progress_mark = received;
            (self.failures, self.immediate_retries) = (0, 0);
        }
        self.failures += 1;
        let Failure {
            cause,
            retry_after,
            is_for_concurrency,
        } = failure;
        // One node of a server that has answered correctly may be faulty.
        let is_slip = self.is_open && matches!(cause, Cause::Protocol(_));
        if !cause.is_transient() && !is_slip {
            return Err(cause);
        }
        tracing::debug!(attempt = self.attempts, %cause, "an attempt failed");
        if is_for_concurrency
            && retry_after.is_none()
            && self.immediate_retries < MAX_IMMEDIATE_RETRIES
        {
            self.immediate_retries += 1;
            self.stats.source_retries.increment();
            return Ok(());
        }
        let failures = self.failures - self.immediate_retries;
        let pause = self
            .retry
            .next_pause(failures, cause, retry_after, left, &self.jitter)?;
        self.stats.source_retries.increment();
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Counts an attempt that timed out.
    fn count_timeout(&mut self) {
        self.attempts += 1;
        self.stats.source_timeouts.increment();
    }

    fn error(&self, location: &str, cause: Cause) -> Error {
        Error {
            location: location.to_owned(),
            attempts: self.attempts.max(1),
            elapsed: self.started.elapsed(),
            cause,
        }
    }
}

/// Interval between checks of a [`Timer`].
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Time without a byte after which a source counts as unreachable.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(2);

/// Counts a read of an unreachable source in the gauge; stops when dropped.
#[derive(Debug)]
struct UnreachableMark {
    stats: Arc<Stats>,
    is_counted: bool,
}

impl UnreachableMark {
    fn set(&mut self, is_counted: bool) {
        match (self.is_counted, is_counted) {
            (false, true) => self.stats.unreachable_reads.increment(),
            (true, false) => self.stats.unreachable_reads.decrement(),
            _ => {}
        }
        self.is_counted = is_counted;
    }
}

impl Drop for UnreachableMark {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Measures a read's waiting time; its owner reports the received bytes.
#[derive(Debug)]
struct Timer {
    time: StallTimeout,
    last_check: Instant,
    counted: u64,
    /// Whether any byte arrived.
    is_alive: bool,
    /// Time of the last byte, or the start of the wait.
    last_receipt: Instant,
    /// Remaining queueing time that does not count.
    queue_left: Duration,
    unreachable: UnreachableMark,
}

impl Timer {
    /// Starts the timer after `received` bytes that it did not wait for.
    fn new(timeout: Duration, received: u64, stats: &Arc<Stats>) -> Self {
        Self {
            time: StallTimeout::new(timeout),
            last_check: Instant::now(),
            counted: received,
            is_alive: false,
            last_receipt: Instant::now(),
            queue_left: timeout.saturating_mul(QUEUE_TIMEOUT_FACTOR),
            unreachable: UnreachableMark {
                stats: Arc::clone(stats),
                is_counted: false,
            },
        }
    }

    /// Marks the source as unreachable after a failed attempt.
    fn set_unreachable(&mut self) {
        self.unreachable.set(true);
    }

    /// Updates and returns the remaining time, after `received` bytes.
    fn update(&mut self, received: u64) -> Duration {
        let waited = self.last_check.elapsed();
        self.record_wait(received, waited)
    }

    /// As [`update`](Self::update), if the only wait since then was
    /// [`wait_until_expired`](Self::wait_until_expired), which checks at each step. More elapsed time means
    /// that this process was stopped (by a debugger, or the freezer of a container), so it does not count.
    fn update_running(&mut self, received: u64) -> Duration {
        let waited = self.last_check.elapsed().min(CHECK_INTERVAL * 2);
        self.record_wait(received, waited)
    }

    fn record_wait(&mut self, received: u64, waited: Duration) -> Duration {
        let came = received.saturating_sub(self.counted);
        self.time.record_wait(waited, came);
        (self.last_check, self.counted) = (Instant::now(), received);
        if came > 0 {
            self.is_alive = true;
            self.last_receipt = self.last_check;
            self.unreachable.set(false);
        } else if self.last_receipt.elapsed() >= UNREACHABLE_AFTER {
            self.unreachable.set(true);
        }
        self.time.remaining()
    }

    /// Ignores the time since the last check, because nothing waited.
    fn ignore_elapsed(&mut self) {
        self.last_check = Instant::now();
        self.last_receipt = self.last_check;
    }

    /// Waits until the time expires, and returns the cause. While `is_queued`, the server answers other
    /// requests, so no time counts. This is limited to [`QUEUE_TIMEOUT_FACTOR`] timeouts.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn wait_until_expired(
        &mut self,
        received: impl Fn() -> u64,
        is_queued: impl Fn() -> bool,
    ) -> Cause {
        let mut left = self.update(received());
        while !left.is_zero() {
            tokio::time::sleep(left.min(CHECK_INTERVAL)).await;
            if is_queued() && !self.queue_left.is_zero() {
                self.queue_left = self.queue_left.saturating_sub(self.last_check.elapsed());
                self.ignore_elapsed();
            } else {
                left = self.update_running(received());
            }
        }
        let obstacle = if self.is_alive {
            Obstacle::TooSlow
        } else {
            Obstacle::Timeout
        };
        Cause::Unreachable {
            obstacle,
            detail: String::new(),
        }
    }
}

/// Result of the first request.
struct ProbeResult {
    fingerprint: Fingerprint,
    /// As in [`Http`].
    encoding: OnceLock<Option<String>>,
    /// Target of the redirects.
    url: Url,
    body: InitialBody,
    /// Latency of the answer.
    answer_time: Duration,
}

/// Sends the first request, which finds version, redirect target and first bytes.
async fn probe(
    client: &Client,
    options: &Options,
    received: &AtomicU64,
) -> Result<ProbeResult, Failure> {
    let (wanted, idle) = ((0, PREFIX_LEN), idle_timeout(options));
    let sent = Instant::now();
    let Response { head, content, url } =
        with_idle_timeout(idle, client.get(client.original(), Some(wanted), None)).await?;
    let answer_time = sent.elapsed();
    let empty = InitialBody::Prefix(Bytes::new());
    let body = match (head.status, head.range) {
        (206, _) => {
            let len = head.fingerprint().len.unwrap_or(PREFIX_LEN).min(PREFIX_LEN);
            let len = part_len(&head, (0, len), head.stored_encoding()?)?;
            let mut prefix = vec![0; len];
            let note = |len: usize| {
                received.fetch_max(len as u64, Ordering::Relaxed);
            };
            let mut rest = ResponseRest {
                start: 0,
                end: len as u64,
                buffered: Bytes::new(),
                content,
            };
            receive(&mut rest, &mut prefix, &mut 0, &options.stats, idle, note).await?;
            InitialBody::Prefix(prefix.into())
        }
        (200, _) if head.content_len == Some(0) => empty,
        (200, _) => {
            head.stored_encoding()?;
            InitialBody::Whole(Mutex::new(Some(content)))
        }
        (416, Some(ContentRange::Unsatisfied { total: Some(0) })) => empty,
        _ => return Err(Failure::from_status(&head)),
    };
    Ok(ProbeResult {
        fingerprint: head.fingerprint(),
        encoding: OnceLock::from(head.stored_encoding()?.map(str::to_owned)),
        url,
        body,
        answer_time,
    })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Length of the part in a 206. It must start as requested, and may be shorter.
fn part_len(
    head: &ResponseHead,
    (start, end): (u64, u64),
    encoding: Option<&str>,
) -> Result<usize, Cause> {
    head.check_encoding(encoding)?;
    let (from, to) = head.content_range()?;
    if from != start || to > end {
        return Err(Cause::Protocol(format!(
            "the server sends bytes {from}..{to} instead of {start}..{end}"
        )));
    }
    usize::try_from(to - from).map_err(|_| Cause::Truncated)
}

/// Timeout without any byte, before a response and within it.
fn idle_timeout(options: &Options) -> Duration {
    options.idle_timeout.min(options.timeout / 2)
}

/// Error of a server that does not answer, or stopped sending.
fn silent_server() -> Cause {
    Cause::Unreachable {
        obstacle: Obstacle::Timeout,
        detail: String::new(),
    }
}

/// Runs `work` with the timeout `limit`.
///
/// # Cancel safety
/// As that of `work`.
async fn with_idle_timeout<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Cause>>,
) -> Result<T, Cause> {
    let done = tokio::time::timeout(limit, work).await;
    done.unwrap_or_else(|_| Err(silent_server()))
}

/// Skips the bytes before `start`.
async fn skip_to(
    rest: &mut ResponseRest,
    start: u64,
    stats: &Stats,
    idle: Duration,
) -> Result<(), Cause> {
    while rest.start < start {
        with_idle_timeout(idle, receive_piece(rest, stats)).await?;
        let gap = usize::try_from(start - rest.start).unwrap_or(usize::MAX);
        let len = rest.buffered.len().min(gap);
        rest.buffered.advance(len);
        rest.start += len as u64;
    }
    Ok(())
}

/// Waits until `rest` has buffered bytes.
async fn receive_piece(rest: &mut ResponseRest, stats: &Stats) -> Result<(), Cause> {
    if rest.buffered.is_empty() {
        rest.buffered = rest.content.next().await?.ok_or(Cause::Truncated)?;
        stats.source_read_bytes.add(rest.buffered.len() as u64);
    }
    Ok(())
}

/// Receives `rest` until `target` is full, with the timeout `idle` for each piece. It updates `received`
/// even if it fails, and calls `note` with it.
async fn receive(
    rest: &mut ResponseRest,
    target: &mut [u8],
    received: &mut usize,
    stats: &Stats,
    idle: Duration,
    note: impl Fn(usize),
) -> Result<(), Cause> {
    while *received < target.len() {
        with_idle_timeout(idle, receive_piece(rest, stats)).await?;
        let len = copy(
            &rest.buffered,
            target.get_mut(*received..).unwrap_or_default(),
        );
        rest.buffered.advance(len);
        rest.start += len as u64;
        *received += len;
        note(*received);
    }
    Ok(())
}

/// Copies as much as fits, and returns the length.
fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let len = from.len().min(to.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
    len
}

impl Source for Http {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read_at(&self, offset: Packed, mut buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        async move {
            let read_handle = ReadHandle::default();
            self.fill_buffer(offset.0, &mut buffer, &read_handle)
                .await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn read_uncached(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        if let InitialBody::Whole(_) = self.body {
            return self.read_at(offset, buffer);
        }
        match self.uncached() {
            Ok(uncached) => uncached.read_at(offset, buffer),
            Err(error) => async move { Err(error) }.boxed(),
        }
    }

    fn read_with_handle<'a>(
        &'a self,
        offset: Packed,
        mut buffer: Buffer,
        read_handle: &'a ReadHandle,
    ) -> BoxFuture<'a, Result<Bytes, Error>> {
        async move {
            self.fill_buffer(offset.0, &mut buffer, read_handle).await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn max_concurrent_reads(&self) -> usize {
        self.limiter.limit()
    }

    fn limit_to_one_read(&self) {
        self.limiter.limit_to_one();
    }

    fn response_cost(&self) -> Option<Duration> {
        let micros = self.answer_micros.load(Ordering::Relaxed);
        Some(self.cost(Duration::from_micros(micros)))
    }

    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        let InitialBody::Whole(content) = &self.body else {
            return super::stream_by_ranges(self);
        };
        let taken = content.lock().take();
        let Some(content) = taken else {
            let spent = Error::new(self.location(), Cause::AlreadyRead);
            return stream::iter([Err(spent)]).boxed();
        };
        let stream_state = UnrangedStream::new(self, content);
        stream::unfold(Some(stream_state), |stream_state| async {
            let mut stream_state = stream_state?;
            match stream_state.next().await {
                Ok(Some(piece)) => Some((Ok(piece), Some(stream_state))),
                Ok(None) => None,
                Err(cause) => Some((
                    Err(stream_state
                        .retry_state
                        .error(stream_state.source.location(), cause)),
                    None,
                )),
            }
        })
        .boxed()
    }
}

/// Stream of a server without ranges, over as many responses as needed.
struct UnrangedStream<'a> {
    source: &'a Http,
    content: Content,
    /// Bytes returned to the reader.
    delivered: u64,
    /// Bytes of this response. An earlier response delivered those before `delivered`.
    received_in_response: u64,
    /// Bytes that count as progress: delivered ones, and repeated ones, each once until
    /// [`MIN_PROGRESS_BYTES`] are delivered.
    counted: u64,
    /// Bytes that a restarted response repeated since the last progress.
    received_again: u64,
    /// Bytes delivered at the last progress.
    progress_mark: u64,
    retry_state: RetryState,
    timer: Timer,
}

impl<'a> UnrangedStream<'a> {
    fn new(source: &'a Http, content: Content) -> Self {
        Self {
            source,
            content,
            delivered: 0,
            received_in_response: 0,
            counted: 0,
            received_again: 0,
            progress_mark: 0,
            retry_state: source.new_retry_state(),
            timer: Timer::new(source.timeout, 0, &source.stats),
        }
    }

    /// Returns the next bytes; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Cause> {
        // The reader did not wait until now.
        self.timer.ignore_elapsed();
        loop {
            match self.receive().await {
                Ok(Some(piece)) => {
                    if let Some(fresh) = self.take_new_bytes(piece) {
                        return Ok(Some(fresh));
                    }
                }
                Ok(None) if self.is_complete() => return Ok(None),
                Ok(None) => self.restart(Cause::Truncated.into()).await?,
                Err(cause) => self.restart(cause.after_open().into()).await?,
            }
        }
    }

    async fn receive(&mut self) -> Result<Option<Bytes>, Cause> {
        let counted = self.counted;
        tokio::select! {
            biased;
            piece = with_idle_timeout(self.source.idle_timeout, self.content.next()) => piece,
            late = self.timer.wait_until_expired(|| counted, || false) => {
                self.retry_state.stats.source_timeouts.increment();
                Err(late)
            }
        }
    }

    /// Returns the part of `piece` that was not delivered before; `None` if it is empty.
    fn take_new_bytes(&mut self, mut piece: Bytes) -> Option<Bytes> {
        let len = piece.len() as u64;
        self.source.stats.source_read_bytes.add(len);
        let known = self
            .delivered
            .saturating_sub(self.received_in_response)
            .min(len);
        let counted = self.counted;
        if known > 0 {
            let received_again = self.received_again.max(self.received_in_response + known);
            self.counted += received_again - self.received_again;
            self.received_again = received_again;
        }
        self.received_in_response += len;
        self.counted += len - known;
        let came = self.counted - counted;
        self.source.stats.scan_received_bytes.add(came);
        // The elapsed time was spent waiting for these bytes.
        self.timer.update_running(self.counted);
        if known == len {
            return None;
        }
        let fresh = piece.split_off(usize::try_from(known).unwrap_or(piece.len()));
        self.delivered = self.received_in_response;
        Some(fresh)
    }

    fn is_complete(&self) -> bool {
        let len = self.source.info.fingerprint.len;
        self.received_in_response >= self.delivered && len.is_none_or(|len| len == self.delivered)
    }

    /// Requests everything again to continue after a failure. This needs a version whose bytes the server
    /// promises to be identical.
    async fn restart(&mut self, mut failure: Failure) -> Result<(), Cause> {
        if !self.source.info.fingerprint.is_strong() {
            return Err(failure.cause);
        }
        if self.delivered - self.progress_mark >= MIN_PROGRESS_BYTES {
            (self.progress_mark, self.received_again) = (self.delivered, 0);
        }
        let counted = self.counted;
        loop {
            let left = self.timer.update_running(counted);
            self.retry_state
                .pause_after(failure, self.delivered, left)
                .await?;
            // The pause counts as waiting time.
            self.timer.update(counted);
            let asked = tokio::select! {
                biased;
                asked = self.source.request_all() => asked,
                late = self.timer.wait_until_expired(|| counted, || false) => {
                    self.retry_state.count_timeout();
                    return Err(late);
                }
            };
            match asked {
                Ok(content) => {
                    (self.content, self.received_in_response) = (content, 0);
                    return Ok(());
                }
                Err(other) => failure = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_while_the_process_is_stopped_does_not_count() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime.expect("a runtime").block_on(async {
            let mut timer = Timer::new(Duration::from_mins(1), 0, &Arc::default());
            tokio::time::advance(Duration::from_hours(1)).await;
            assert!(timer.update_running(0) >= Duration::from_secs(58));
            tokio::time::advance(Duration::from_hours(1)).await;
            assert!(timer.update(0).is_zero(), "it was looked at by nobody else");
            let mut timer = Timer::new(Duration::from_mins(1), 0, &Arc::default());
            let begun = Instant::now();
            timer.wait_until_expired(|| 0, || false).await;
            let lasted = begun.elapsed();
            assert!((60..62).contains(&lasted.as_secs()), "{lasted:?}");
        });
    }
}
