//! HTTP sources.
//!
//! The first request is a ranged GET, because servers may refuse HEAD. It finds length, range support,
//! version, the target of redirects, and the first bytes, which are kept. Later responses must be of the same
//! version. When the target expires, the original URL is requested again.
//!
//! The caller's [`StallTimeout`](crate::base::stall_timeout::StallTimeout) bounds every network wait.

mod as_source;
mod concurrency_limit;
pub(super) mod fill;
mod receive;
mod unranged;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use url::Url;

use self::concurrency_limit::{ConcurrencyLimiter, Permit};
use self::receive::{copy, part_len, receive, receive_piece, skip_to, with_idle_timeout};
use super::client::response::{ContentRange, ResponseHead};
use super::client::{Client, Response};
use super::network::NetworkTransport;
use super::read_handle::{Continuation, ResponseRest};
use super::retry::Jitter;
use super::retry::attempts::{Attempts, Failure, OutageLog, protocol_failure, repeat};
use super::{
    Access, Cause, Content, Error, Fingerprint, Location, Options, ReadHandle, Revalidation,
    Source, SourceInfo, Target, Transport, Validator,
};
use crate::base::buffer_pool::Buffer;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;

/// Bytes of the first request, enough to detect a format, and few enough to come with the header.
const PREFIX_LEN: u64 = 64 << 10;

/// Maximum number of bytes that a random read skips in a response with all bytes, of a server without ranges.
const MAX_SKIPPED_BYTES: u64 = 64 << 20;

/// Time until a connection is free again. An earlier request opens another, which a server may leave waiting.
const CONNECTION_RETURN_DELAY: Duration = Duration::from_millis(2);

/// A source over HTTP or HTTPS.
#[derive(Debug)]
pub struct Http {
    /// Identity in [`Continuation`].
    id: Arc<()>,
    client: Client,
    jitter: Arc<Jitter>,
    idle_timeout: Duration,
    limiter: ConcurrencyLimiter,
    stats: Arc<Stats>,
    info: SourceInfo,
    /// Content-Encoding of the stored bytes, if any; unset before the first response.
    encoding: OnceLock<Option<String>>,
    /// Target of the last redirects.
    resolved: Mutex<Url>,
    body: InitialBody,
    /// Latency of the last answer, in microseconds.
    answer_micros: AtomicU64,
    /// Store of the last unread response.
    continuation: Mutex<Weak<Continuation>>,
    /// Whether the server has answered with a requested range.
    has_ranges: AtomicBool,
    /// Whether it is asked for all bytes, because it refused a range.
    asks_for_all: AtomicBool,
    options: Options,
    outage: OutageLog,
    /// The same source without caches, for reads after corrupt bytes; created on first use.
    uncached: OnceLock<Box<Self>>,
}

#[derive(Debug)]
enum InitialBody {
    Prefix(Bytes),
    /// All bytes of a source without ranges; taken by its stream.
    Whole(Mutex<Option<Content>>),
}

impl Http {
    /// Probes and opens `target`, such as a URL.
    ///
    /// # Errors
    /// If the server is unreachable, refuses access, or sends an unusable response.
    pub async fn open(target: impl Into<Target>, options: Options) -> Result<Self, Error> {
        let target = target.into();
        let failed = |cause| Error::new(target.location.as_str(), cause);
        let revalidation = options.revalidation;
        let version = options.known_version.clone();
        let version = version.filter(|_| revalidation != Revalidation::Required);
        let network = NetworkTransport::new(&target.url, &options).map_err(failed)?;
        if revalidation == Revalidation::Never {
            let version = version.ok_or_else(|| failed(Cause::Offline))?;
            return Self::open_known(version, Box::new(network), target, options);
        }
        let transport = Box::new(network.clone());
        let opening = Self::open_through(transport, target.clone(), options.clone());
        let Some(version) = version else {
            return opening.await;
        };
        match tokio::time::timeout(revalidation.timeout(), opening).await {
            Ok(Err(error))
                if revalidation == Revalidation::UnlessLate || error.cause.is_outage() =>
            {
                tracing::warn!("{error}: {}", error.cause);
            }
            Ok(opened) => return opened,
            Err(_) => tracing::warn!("{}: no answer so far", target.location),
        }
        tracing::warn!("serving only cached data until the source can be read");
        let known = Self::open_known(version, Box::new(network), target, options)?;
        known.outage.begin();
        Ok(known)
    }

    /// Opens `target` as the known `version`, without a request.
    pub(super) fn open_known(
        version: Fingerprint,
        transport: Box<dyn Transport>,
        target: Target,
        options: Options,
    ) -> Result<Self, Error> {
        let failed = |cause| Error::new(target.location.as_str(), cause);
        let client = Client::new(&target, &options, transport).map_err(failed)?;
        let Target { url, location, .. } = target;
        let found = ProbeResult::without_request(version, url);
        let jitter = Arc::new(Jitter::new(options.jitter_seed));
        Ok(Self::from_probe(found, client, jitter, location, options))
    }

    /// As [`open`](Self::open), with requests through `transport` instead of the options' connections.
    ///
    /// # Errors
    /// As `open`.
    pub async fn open_through(
        transport: Box<dyn Transport>,
        target: impl Into<Target>,
        options: Options,
    ) -> Result<Self, Error> {
        let target = target.into();
        let client = Client::new(&target, &options, transport)
            .map_err(|cause| Error::new(target.location.as_str(), cause))?;
        let location = target.location;
        let jitter = Arc::new(Jitter::new(options.jitter_seed));
        // A repeated byte does not extend the timeout.
        let received = AtomicU64::new(0);
        let probing = || probe(&client, &options, &received);
        let found = repeat(location.as_str(), &options, &jitter, &received, probing).await?;
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
            has_ranges,
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
            id: Arc::default(),
            encoding,
            resolved: Mutex::new(url),
            client,
            jitter,
            idle_timeout: options.idle_limit(),
            limiter: ConcurrencyLimiter::new(
                options.connections,
                options.timeout,
                Arc::clone(&options.stats),
            ),
            stats: Arc::clone(&options.stats),
            body,
            answer_micros: AtomicU64::new(micros(answer_time)),
            continuation: Mutex::default(),
            has_ranges: AtomicBool::new(has_ranges),
            asks_for_all: AtomicBool::default(),
            options,
            outage: OutageLog::default(),
            uncached: OnceLock::new(),
        }
    }

    /// The same version, with single-use connections, no caches on the network, and nothing in memory.
    fn uncached(&self) -> Result<&Self, Error> {
        if let Some(uncached) = self.uncached.get() {
            return Ok(uncached);
        }
        let mut options = self.options.clone();
        // A pool without idle connections never reuses one.
        options.connections = 0;
        let client = self.client.without_cache(&options);
        let client = client.map_err(|cause| Error::new(self.location(), cause))?;
        let version = self.info.fingerprint.clone();
        let found = ProbeResult {
            encoding: self.encoding.clone(),
            has_ranges: self.has_ranges.load(Ordering::Relaxed),
            ..ProbeResult::without_request(version, client.original.clone())
        };
        let (jitter, location) = (Arc::clone(&self.jitter), self.info.location.clone());
        let uncached = Self::from_probe(found, client, jitter, location, self.options.clone());
        Ok(self.uncached.get_or_init(|| Box::new(uncached)))
    }

    /// Waits for a permit up to `left`. A read of a stream waits longer, while other requests receive bytes.
    async fn acquire_permit(
        &self,
        left: Duration,
        read_handle: &ReadHandle,
    ) -> Result<Permit<'_>, Cause> {
        loop {
            let received = self.stats.source_read_bytes.get();
            tokio::select! {
                biased;
                permit_result = self.limiter.acquire(left) => return permit_result,
                () = tokio::time::sleep(left) => {}
            }
            if !read_handle.is_stream_read || self.stats.source_read_bytes.get() == received {
                return Err(Cause::silent_server());
            }
        }
    }

    /// Timeout for a read without progress.
    pub(super) fn timeout(&self) -> Duration {
        self.options.timeout
    }

    /// Attempts of an operation of this open source, which has `received` bytes.
    fn new_attempts(&self, received: u64) -> Attempts {
        let mut attempts = Attempts::new(&self.options, &self.jitter, received);
        attempts.retry_state.is_open = true;
        attempts
    }

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

    /// Sends one request for the missing bytes of `buffer`.
    ///
    /// # Cancel safety
    /// Received bytes are kept and counted, also before a failure.
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
        read_handle.set_in_flight(true);
        let (response, is_continued) = self
            .next_response((start, end), &permit, read_handle)
            .await?;
        let mut rest = match response {
            Some(rest) if rest.end > start => rest,
            Some(_) => return Ok(RangeResult::End),
            None => return Ok(RangeResult::Part),
        };
        let skip_note = |at| read_handle.set_skipped(at);
        match skip_to(&mut rest, start, &self.stats, self.idle_timeout, skip_note).await {
            Err(_) if is_continued => return Ok(RangeResult::Part),
            skipped => skipped?,
        }
        let part = usize::try_from(rest.end - start).unwrap_or(usize::MAX);
        let target_end = buffer.len().min(filled.saturating_add(part));
        let target = buffer.get_mut(..target_end).unwrap_or_default();
        let idle = self.idle_timeout;
        let received = receive(&mut rest, target, filled, &self.stats, idle, |received| {
            permit.received();
            if read_handle.retries_forever() {
                let new_bytes = (received as u64).saturating_sub(read_handle.received());
                self.stats.scan_received_bytes.add(new_bytes);
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
        if let Some((beyond, keep)) = &read_handle.continuation
            && (*beyond > 0 || !self.has_ranges.load(Ordering::Relaxed))
            && rest.start < rest.end
        {
            *self.continuation.lock() = Arc::downgrade(keep);
            keep.put(rest);
        }
        // A server may send less than requested. The rest is requested next.
        Ok(RangeResult::Part)
    }

    /// Continues an earlier response (returns true), or requests the range and what the caller wants after.
    async fn next_response(
        &self,
        (start, end): (u64, u64),
        permit: &Permit<'_>,
        read_handle: &ReadHandle,
    ) -> Result<(Option<ResponseRest>, bool), Failure> {
        let continuation = read_handle.continuation.as_ref();
        let kept = continuation.and_then(|(_, kept)| kept.take(&self.id, start));
        if let Some(rest) = kept {
            self.stats.source_reused_responses.increment();
            permit.answered();
            return Ok((Some(rest), true));
        }
        let len = self.info.fingerprint.len.unwrap_or(end);
        let beyond = continuation.map_or(0, |(beyond, _)| *beyond);
        let wanted = (start, end.saturating_add(beyond).min(len).max(end));
        let response = self.request_range(wanted, permit, read_handle).await?;
        Ok((response, false))
    }

    /// Requests `wanted`; empty if the source ends before, `None` if it was withdrawn and must be sent again.
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
        let asks_for_all = self.asks_for_all.load(Ordering::Relaxed);
        let range = (!asks_for_all).then_some(wanted);
        let sent = Instant::now();
        let response = tokio::select! {
            biased;
            response = self.send(range) => response?,
            () = permit.overtaken() => return Ok(None),
            () = permit.wait_until_silent(self.idle_timeout) => return Err(Cause::silent_server().into()),
        };
        let Response { head, content, url } = response;
        permit.answered();
        let (start, end) = match self.check_part(&head, permit, wanted, read_handle) {
            Ok(sent_range) => sent_range,
            Err(failure) => {
                // A server that never answered with a range may have none.
                let is_possible = !asks_for_all && !self.has_ranges.load(Ordering::Relaxed);
                let asks_for_all = is_possible && head.refuses_range();
                self.asks_for_all.store(asks_for_all, Ordering::Relaxed);
                return if asks_for_all { Ok(None) } else { Err(failure) };
            }
        };
        let mut rest = ResponseRest {
            source: Arc::clone(&self.id),
            start,
            end,
            buffered: Bytes::new(),
            content,
        };
        if start == end {
            return Ok(Some(rest));
        }
        *self.resolved.lock() = url;
        // A server may send the header at once, and compute the content after it.
        tokio::select! {
            biased;
            filled = receive_piece(&mut rest, &self.stats) => filled?,
            () = permit.wait_until_silent(self.idle_timeout) => return Err(Cause::silent_server().into()),
        }
        permit.received();
        let latency = sent.elapsed();
        read_handle.set_latency(latency, self.cost(latency));
        self.answer_micros.store(micros(latency), Ordering::Relaxed);
        Ok(Some(rest))
    }

    /// The cause when a response has other bytes than this version.
    fn other_version(&self) -> Cause {
        match self.info.fingerprint.validator {
            Validator::Digest(_) => {
                Cause::Damaged("its length is not that of the bytes with its digest".to_owned())
            }
            _ => Cause::Changed,
        }
    }

    /// Checks status and version of a response. Returns the range in it, which is empty if a source of unknown length
    /// ends before `wanted`.
    fn check_part(
        &self,
        head: &ResponseHead,
        permit: &Permit<'_>,
        wanted: (u64, u64),
        read_handle: &ReadHandle,
    ) -> Result<(u64, u64), Failure> {
        let version = &self.info.fingerprint;
        let is_same = version.matches(&head.fingerprint());
        match (head.status, version.len) {
            (206, _) if is_same => {
                let len = part_len(head, wanted, self.encoding(head)?)?;
                self.has_ranges.store(true, Ordering::Relaxed);
                Ok((wanted.0, wanted.0 + len as u64))
            }
            (416, None) => Ok((wanted.0, wanted.0)),
            (416, len) if head.fingerprint().len.is_none_or(|told| Some(told) == len) => Err(
                protocol_failure("the server refuses a range inside its length"),
            ),
            (200 | 203 | 206 | 416, _) if !is_same => Err(self.other_version().into()),
            (200 | 203, len) => {
                let has_ranges = self.has_ranges.load(Ordering::Relaxed);
                let may_skip = read_handle.is_stream_read || wanted.0 <= MAX_SKIPPED_BYTES;
                let Some(len) = len.filter(|_| !has_ranges && may_skip) else {
                    let stopped = "the server stopped answering with ranges";
                    return Err(protocol_failure(stopped));
                };
                head.check_encoding(self.encoding(head)?)?;
                // The next read in order continues the response.
                self.limiter.limit_to_one();
                Ok((0, len))
            }
            _ => {
                let failure = Failure::from(head);
                let is_throttled = failure.cause.is_throttling();
                Err(Failure {
                    is_for_concurrency: is_throttled && permit.throttled(head.retry_after),
                    ..failure
                })
            }
        }
    }

    /// The latency without network time: that of a possible new connection, and as long for the request.
    fn cost(&self, latency: Duration) -> Duration {
        latency.saturating_sub(self.client.connect_time() * 2)
    }

    /// Sends a request to the last redirect target.
    async fn send(&self, range: Option<(u64, u64)>) -> Result<Response, Cause> {
        let resolved = self.resolved.lock().clone();
        let version = Some(&self.info.fingerprint);
        self.client.get(&resolved, range, version).await
    }

    async fn request_all(&self) -> Result<Content, Failure> {
        let Response { head, content, .. } =
            with_idle_timeout(self.idle_timeout, self.send(None)).await?;
        if head.status != 200 {
            return Err(Failure::from(&head));
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

    /// Asks the original URL next, and not a caching proxy, after a failure.
    fn return_to_original_url(&self) {
        self.client.report_via_failure("a request failed");
        self.resolved.lock().clone_from(&self.client.original);
    }
}

enum RangeResult {
    /// Bytes were received, and the rest, if any, must be requested.
    Part,
    /// The source, whose length was unknown, ends before.
    End,
}

struct ProbeResult {
    fingerprint: Fingerprint,
    encoding: OnceLock<Option<String>>,
    /// Target of the redirects.
    url: Url,
    body: InitialBody,
    answer_time: Duration,
    /// Whether the server has answered with a range.
    has_ranges: bool,
}

impl ProbeResult {
    fn without_request(fingerprint: Fingerprint, url: Url) -> Self {
        Self {
            fingerprint,
            encoding: OnceLock::new(),
            url,
            body: InitialBody::Prefix(Bytes::new()),
            answer_time: Duration::ZERO,
            has_ranges: false,
        }
    }
}

async fn probe(
    client: &Client,
    options: &Options,
    received: &AtomicU64,
) -> Result<ProbeResult, Failure> {
    let idle = options.idle_limit();
    let sent = Instant::now();
    let ask =
        async |range| with_idle_timeout(idle, client.get(&client.original, range, None)).await;
    let mut response = ask(Some((0, PREFIX_LEN))).await?;
    let answer_time = sent.elapsed();
    if response.head.refuses_range() && probed_len(&response.head).is_none() {
        response = ask(None).await?;
    }
    let Response { head, content, url } = response;
    let body = match probed_len(&head) {
        Some(0) => InitialBody::Prefix(Bytes::new()),
        Some(len) => {
            head.stored_encoding()?;
            let mut prefix = vec![0; len];
            let note = |len: usize| {
                received.fetch_max(len as u64, Ordering::Relaxed);
            };
            let mut rest = ResponseRest {
                source: Arc::default(),
                start: 0,
                end: len as u64,
                buffered: Bytes::new(),
                content,
            };
            receive(&mut rest, &mut prefix, &mut 0, &options.stats, idle, note).await?;
            InitialBody::Prefix(prefix.into())
        }
        None if head.is_whole() => {
            head.stored_encoding()?;
            InitialBody::Whole(Mutex::new(Some(content)))
        }
        None if head.status == 206 => {
            let sent = head.content_range().map_or_else(
                |_| "a part that was not requested".to_owned(),
                |(from, to)| format!("bytes {from}..{to} instead of 0..{PREFIX_LEN}"),
            );
            return Err(protocol_failure(&format!("the server sends {sent}")));
        }
        None => return Err(Failure::from(&head)),
    };
    Ok(ProbeResult {
        fingerprint: head.fingerprint(),
        encoding: OnceLock::from(head.stored_encoding()?.map(str::to_owned)),
        url,
        body,
        answer_time,
        has_ranges: head.status == 206,
    })
}

/// Length of the bytes to keep of the response to the first request; `None` if it has others, or too many. Some servers
/// give the length of a part as that of the whole.
fn probed_len(head: &ResponseHead) -> Option<usize> {
    match (head.status, head.range) {
        (
            206,
            Some(ContentRange::Part {
                start: 0,
                end,
                total,
            }),
        ) if end <= PREFIX_LEN => {
            let is_all = total == Some(PREFIX_LEN);
            usize::try_from(end).ok().filter(|_| !is_all)
        }
        (416, Some(ContentRange::Unsatisfied { total: Some(0) })) => Some(0),
        _ if head.is_whole() => {
            let len = head.content_len.filter(|&len| len <= PREFIX_LEN)?;
            usize::try_from(len).ok()
        }
        _ => None,
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
