//! A file on a web server.
//!
//! The first request is a ranged GET, because HEAD may be refused: it finds the length, whether
//! ranges work, the version, and where redirects lead, and its bytes are kept and served from
//! memory. Every later answer must be of the same version. Later requests go straight to where
//! the redirects led; when that runs out, the original URL is asked again.
//!
//! Every wait for the network has an end: that of the [time](TimeLeft) of who waits.

mod client;
mod connecting;
mod gate;
mod outage;
mod transport;
mod trust;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt};
use tokio::time::Instant;
use url::Url;

use self::client::{Client, Reply};
use self::gate::{Gate, Pass};
use self::outage::Outage;
use self::transport::Network;
use super::answer::{Answer, ContentRange};
use super::retry::{Jitter, Retry};
use super::watch::{Continuation, Order, Rest};
use super::{
    Access, Cause, Error, Fingerprint, Location, Obstacle, Options, Source, Validator, Watch,
};
use crate::base::buffer::Buffer;
use crate::base::extent::Packed;
use crate::base::stats::Stats;
use crate::base::time_left::TimeLeft;

pub use self::transport::{Content, Message, Transport};
pub use self::trust::{Certificates, CertificatesError};

/// Bytes asked for by the first request: what detecting a format needs, and little enough to be
/// sent with the answer's header.
const PREFIX_LEN: u64 = 64 << 10;

/// How long a server may take to answer before a source is opened as a version that is known.
const PATIENCE: Duration = Duration::from_secs(2);

/// No server that asks to be left alone for longer is left alone for longer by who never gives up.
const LONGEST_PAUSE: Duration = Duration::from_mins(10);

/// How long a connection takes to be there for the next request: who asks before opens another one, which
/// a server that leaves connections waiting does not answer.
const RETURN: Duration = Duration::from_millis(2);

/// How many times the timeout of a read a request that was sent ahead may be without an answer, while the
/// server answers others.
const QUEUE_TIMES: u32 = 10;

/// Attempts in a row that need no pause before the next one, when the server has refused the number of
/// requests: from four at once, the first of a transfer, to one.
const RETRIES_AT_ONCE: u32 = 2;

/// Bytes that count as progress: a request that brought as many did not fail in vain.
const PROGRESS: u64 = 64 << 10;

/// A source behind HTTP or HTTPS.
#[derive(Debug)]
pub struct Http {
    client: Client,
    retry: Retry,
    jitter: Arc<Jitter>,
    timeout: Duration,
    /// How long the server may be silent.
    idle_timeout: Duration,
    gate: Gate,
    stats: Arc<Stats>,
    location: Location,
    fingerprint: Fingerprint,
    /// The Content-Encoding of the stored bytes, if the server names one; unset before the first answer.
    encoding: OnceLock<Option<String>>,
    /// Where the last redirects led.
    resolved: Mutex<Url>,
    body: Body,
    /// How long the last request took to be answered, in microseconds.
    answer_micros: AtomicU64,
    /// Where the rest of an answer may be kept.
    continuation: Mutex<Weak<Continuation>>,
    options: Options,
    outage: Outage,
    /// The same for who got bytes that cannot be right, made when the first one did.
    afresh: OnceLock<Box<Self>>,
}

/// What the first answer left us.
#[derive(Debug)]
enum Body {
    /// The first bytes of a source with ranges.
    Prefix(Bytes),
    /// All of a source without; taken by whoever streams it.
    Whole(Mutex<Option<Content>>),
}

impl Http {
    /// Finds out what `url` is.
    ///
    /// # Errors
    /// When the server cannot be reached, refuses, or answers what cannot be used.
    pub async fn open(url: Url, options: Options) -> Result<Self, Error> {
        let failed = |cause| Error::new(Location::from_url(&url).as_str(), cause);
        let network = Network::new(&options).map_err(failed)?;
        let Some(version) = options.known_version.clone() else {
            return Self::open_through(Box::new(network), url, options).await;
        };
        let opening = Self::open_through(Box::new(network), url.clone(), options.clone());
        match tokio::time::timeout(PATIENCE, opening).await {
            Ok(Ok(opened)) => return Ok(opened),
            Ok(Err(error)) => tracing::warn!("{error}"),
            Err(_) => tracing::warn!("{}: no answer so far", Location::from_url(&url)),
        }
        tracing::warn!("what is cached is served until the source can be read");
        Self::known(version, url, options)
    }

    /// The version `version` of what is at `url`, without asking the server.
    fn known(version: Fingerprint, url: Url, options: Options) -> Result<Self, Error> {
        let location = Location::from_url(&url);
        let failed = |cause| Error::new(location.as_str(), cause);
        let network = Network::new(&options).map_err(failed)?;
        let client = Client::new(url.clone(), &options, Box::new(network)).map_err(failed)?;
        let found = Found {
            fingerprint: version,
            encoding: OnceLock::new(),
            url,
            body: Body::Prefix(Bytes::new()),
            answer_time: Duration::ZERO,
        };
        let jitter = Arc::new(Jitter::new(options.chance));
        Ok(Self::of(found, client, jitter, location, options))
    }

    /// As [`open`](Self::open), with requests that travel through `transport`, whatever the options
    /// say of connections.
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
        let jitter = Arc::new(Jitter::new(options.chance));
        let mut effort = Effort::new(
            options.retry,
            Arc::clone(&jitter),
            Arc::clone(&options.stats),
        );
        let mut timer = Timer::new(options.timeout, 0, &options.stats);
        // Whoever is wrong about the address should hear of it soon.
        effort.retry.persists = false;
        // What comes once more is no reason to wait longer.
        let received = AtomicU64::new(0);
        let found = loop {
            let found = tokio::select! {
                biased;
                found = probe(&client, &options, &received) => found,
                late = timer.run_out(|| received.load(Ordering::Relaxed), || false) => {
                    effort.gave_up();
                    return Err(effort.error(location.as_str(), late));
                }
            };
            match found {
                Ok(found) => break found,
                Err(failure) => {
                    if failure.cause.is_outage() {
                        timer.lost();
                    }
                    let left = timer.step(received.load(Ordering::Relaxed));
                    let next = effort.failed(failure, 0, left).await;
                    next.map_err(|cause| effort.error(location.as_str(), cause))?;
                    // The pause counts.
                    timer.left(received.load(Ordering::Relaxed));
                }
            }
        };
        Ok(Self::of(found, client, jitter, location, options))
    }

    fn of(
        found: Found,
        client: Client,
        jitter: Arc<Jitter>,
        location: Location,
        options: Options,
    ) -> Self {
        let Found {
            fingerprint,
            encoding,
            url,
            body,
            answer_time,
        } = found;
        Self {
            fingerprint,
            encoding,
            resolved: Mutex::new(url),
            client,
            retry: options.retry,
            jitter,
            timeout: options.timeout,
            idle_timeout: idle_timeout(&options),
            gate: Gate::new(
                options.connections,
                options.timeout,
                Arc::clone(&options.stats),
            ),
            stats: Arc::clone(&options.stats),
            location,
            body,
            answer_micros: AtomicU64::new(micros(answer_time)),
            continuation: Mutex::default(),
            options,
            outage: Outage::default(),
            afresh: OnceLock::new(),
        }
    }

    /// The same version of the same file by connections that are used once, past caches on the way,
    /// and with nothing in memory.
    fn afresh(&self) -> Result<&Self, Error> {
        if let Some(afresh) = self.afresh.get() {
            return Ok(afresh);
        }
        let mut options = self.options.clone();
        // A connection that may not rest is not used again.
        options.connections = 0;
        let client = self.client.afresh(&options);
        let client = client.map_err(|cause| Error::new(self.location(), cause))?;
        let afresh = Self {
            retry: self.retry,
            jitter: Arc::clone(&self.jitter),
            timeout: self.timeout,
            idle_timeout: self.idle_timeout,
            gate: Gate::new(
                self.options.connections,
                self.timeout,
                Arc::clone(&self.stats),
            ),
            stats: Arc::clone(&self.stats),
            location: self.location.clone(),
            fingerprint: self.fingerprint.clone(),
            encoding: self.encoding.clone(),
            resolved: Mutex::new(client.original().clone()),
            client,
            body: Body::Prefix(Bytes::new()),
            answer_micros: AtomicU64::new(0),
            continuation: Mutex::default(),
            options,
            outage: Outage::default(),
            afresh: OnceLock::new(),
        };
        Ok(self.afresh.get_or_init(|| Box::new(afresh)))
    }

    async fn fill(&self, offset: u64, buffer: &mut Buffer, watch: &Watch) -> Result<(), Error> {
        let mut filled = self
            .copy_prefix(offset, buffer)
            .map_err(|cause| Error::new(self.location(), cause))?;
        let (mut effort, mut timer) = self.anew(filled);
        watch.set_received(filled);
        while filled < buffer.len() {
            let left = timer.left(filled as u64);
            let entered = tokio::select! {
                biased;
                // Nothing is there to be cut.
                _ = watch.order() => {
                    buffer.truncate(filled);
                    continue;
                }
                entered = self.enter(left, watch) => entered,
            };
            if watch.is_ahead() {
                // What came for those before would count as silence here.
                timer.skip();
            } else {
                timer.left(filled as u64);
            }
            let before = filled as u64;
            let is_queued = || {
                let is_unanswered = watch.received() == before;
                watch.is_ahead() && is_unanswered && self.gate.received_within(self.idle_timeout)
            };
            let ask = async {
                match entered {
                    Ok(pass) => self.ask(offset, buffer, &mut filled, pass, watch).await,
                    Err(cause) => Err(cause.into()),
                }
            };
            let asked = tokio::select! {
                biased;
                order = watch.order() => Err(order),
                asked = ask => Ok(asked),
                late = timer.run_out(|| watch.received(), is_queued) => {
                    effort.gave_up();
                    let error = effort.error(self.location(), late);
                    if !watch.persists() {
                        return Err(error);
                    }
                    self.outage.lasts(&error, Duration::ZERO);
                    // Whoever waits for it is told elsewhere that it takes long.
                    (effort, timer) = self.anew(filled);
                    timer.lost();
                    Err(Order::Cut)
                }
            };
            watch.pause();
            match asked {
                Ok(Ok(Asked::Part)) => {}
                Ok(Ok(Asked::End)) | Err(Order::Stop) => buffer.truncate(filled),
                Ok(Err(mut failure)) => {
                    failure.cause = failure.cause.of_open_source();
                    if failure.cause.is_outage() {
                        timer.lost();
                    }
                    // The node that failed may be out of service: let the original choose anew.
                    self.remember(self.client.original().clone());
                    let left = timer.step(filled as u64);
                    let next = tokio::select! {
                        biased;
                        // Nothing is there to be cut.
                        _ = watch.order() => {
                            buffer.truncate(filled);
                            Ok(())
                        }
                        next = effort.failed(failure, filled as u64, left) => next,
                    };
                    match next {
                        Err(cause) if watch.persists() && cause.is_transient() => {
                            let pause = match cause {
                                Cause::Busy(asked) => asked.min(LONGEST_PAUSE),
                                _ => self.retry.longest_pause,
                            };
                            self.outage
                                .lasts(&effort.error(self.location(), cause), pause);
                            timer.lost();
                            tokio::select! {
                                biased;
                                _ = watch.order() => buffer.truncate(filled),
                                () = tokio::time::sleep(pause) => {}
                            }
                            (effort, timer) = self.anew(filled);
                            timer.lost();
                        }
                        next => next.map_err(|cause| effort.error(self.location(), cause))?,
                    }
                }
                Err(Order::Cut) => {
                    self.stats.source_straggler_retries.increment();
                    self.stats.source_retries.increment();
                    self.remember(self.client.original().clone());
                }
            }
        }
        Ok(())
    }

    /// Waits for its turn: `left`, or, if it was asked for ahead, as long as anything comes for those
    /// before.
    async fn enter(&self, left: Duration, watch: &Watch) -> Result<Pass<'_>, Cause> {
        loop {
            let came = self.stats.source_read_bytes.get();
            tokio::select! {
                biased;
                entered = self.gate.enter(left) => return entered,
                () = tokio::time::sleep(left) => {}
            }
            if !watch.is_ahead() || self.stats.source_read_bytes.get() == came {
                return Err(silence());
            }
        }
    }

    /// All the time there is, `filled` bytes being there already.
    fn anew(&self, filled: usize) -> (Effort, Timer) {
        let mut effort = self.effort();
        effort.reached = filled as u64;
        let timer = Timer::new(self.timeout, filled as u64, &self.stats);
        (effort, timer)
    }

    /// To get something more of a server that was understood before.
    fn effort(&self) -> Effort {
        let (jitter, stats) = (Arc::clone(&self.jitter), Arc::clone(&self.stats));
        let mut effort = Effort::new(self.retry, jitter, stats);
        effort.is_open = true;
        effort
    }

    /// Copies what the first answer brought and returns how many bytes that are.
    fn copy_prefix(&self, offset: u64, buffer: &mut Buffer) -> Result<usize, Cause> {
        let Body::Prefix(prefix) = &self.body else {
            return Err(Cause::Spent);
        };
        let end = offset
            .checked_add(buffer.len() as u64)
            .ok_or(Cause::Truncated)?;
        if self.fingerprint.len.is_some_and(|len| end > len) {
            return Err(Cause::Truncated);
        }
        let known = usize::try_from(offset)
            .ok()
            .and_then(|start| prefix.get(start..))
            .unwrap_or_default();
        Ok(copy(known, buffer))
    }

    /// Asks once for what `buffer` lacks. Bytes that came before a failure stay and count.
    ///
    /// # Cancel safety
    /// Bytes that came stay and count.
    async fn ask(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        filled: &mut usize,
        pass: Pass<'_>,
        watch: &Watch,
    ) -> Result<Asked, Failure> {
        // Neither overflows: `copy_prefix` has added them up.
        let (start, end) = (offset + *filled as u64, offset + buffer.len() as u64);
        watch.begin();
        let kept = watch.sequel().and_then(|(_, kept)| kept.take(start));
        let is_continued = kept.is_some();
        let asked = if let Some(rest) = kept {
            self.stats.source_reused_responses.increment();
            pass.answered();
            Some(rest)
        } else {
            let len = self.fingerprint.len.unwrap_or(end);
            let beyond = watch.sequel().map_or(0, |(beyond, _)| *beyond);
            let wanted = (start, end.saturating_add(beyond).min(len).max(end));
            self.ask_for(wanted, &pass, watch).await?
        };
        let mut rest = match asked {
            Some(rest) if rest.end > start => rest,
            Some(_) => return Ok(Asked::End),
            None => return Ok(Asked::Part),
        };
        if skip(&mut rest, start, &self.stats, self.idle_timeout)
            .await
            .is_err()
        {
            return Ok(Asked::Part);
        }
        let part = usize::try_from(rest.end - start).unwrap_or(usize::MAX);
        let target_end = buffer.len().min(filled.saturating_add(part));
        let target = buffer.get_mut(..target_end).unwrap_or_default();
        let idle = self.idle_timeout;
        let received = receive(&mut rest, target, filled, &self.stats, idle, |received| {
            pass.received();
            if watch.persists() {
                let came = (received as u64).saturating_sub(watch.received());
                self.stats.scan_received_bytes.add(came);
            }
            watch.set_received(received);
        });
        match received.await {
            // The server had to wait: it may have given up, which is no failure.
            Err(_) if is_continued => return Ok(Asked::Part),
            received => received?,
        }
        if !is_continued {
            pass.went_well();
        }
        self.outage.ends(self.location());
        if let Some((beyond, keep)) = watch.sequel()
            && *beyond > 0
            && rest.start < rest.end
        {
            *self.continuation() = Arc::downgrade(keep);
            keep.put(rest);
        }
        // A server may send less than was asked for: the rest is asked for next.
        Ok(Asked::Part)
    }

    /// Sends a request for `wanted`, and judges the answer. An empty one says that the source ends before;
    /// `None` that the request was taken back, and another one should be sent.
    async fn ask_for(
        &self,
        wanted: (u64, u64),
        pass: &Pass<'_>,
        watch: &Watch,
    ) -> Result<Option<Rest>, Failure> {
        if self.gate.is_narrow() {
            // Its connection may be the only one that is served.
            let kept = self.continuation().upgrade();
            if let Some(kept) = kept {
                kept.clear();
            }
            tokio::time::sleep(RETURN).await;
        }
        let sent = Instant::now();
        let reply = tokio::select! {
            biased;
            reply = self.send(Some(wanted)) => reply?,
            () = pass.overtaken() => return Ok(None),
            () = pass.server_is_silent(self.idle_timeout) => return Err(silence().into()),
        };
        let Reply {
            answer,
            content,
            url,
        } = reply;
        pass.answered();
        match (answer.status, self.fingerprint.len) {
            (206, _) => {}
            (416, None) => {
                return Ok(Some(Rest {
                    start: wanted.0,
                    end: wanted.0,
                    came: Bytes::new(),
                    content,
                }));
            }
            (416, len) if answer.fingerprint().len == len => {
                return Err(broken("the server refuses a range inside its length"));
            }
            (416, _) => return Err(Cause::Changed.into()),
            (200, _) if !self.fingerprint.matches(&answer.fingerprint()) => {
                return Err(Cause::Changed.into());
            }
            (200, _) => return Err(broken("the server stopped answering with ranges")),
            (429 | 503, _) => {
                let is_for_number = pass.complained(answer.retry_after);
                return Err(Failure {
                    is_for_number,
                    ..Failure::refused(&answer)
                });
            }
            _ => return Err(Failure::refused(&answer)),
        }
        if !self.fingerprint.matches(&answer.fingerprint()) {
            return Err(Cause::Changed.into());
        }
        let len = part_len(&answer, wanted, self.encoding(&answer)?)?;
        self.remember(url);
        let mut rest = Rest {
            start: wanted.0,
            end: wanted.0 + len as u64,
            came: Bytes::new(),
            content,
        };
        // A server may send the header at once, and work on the content after that.
        tokio::select! {
            biased;
            filled = fill(&mut rest, &self.stats) => filled?,
            () = pass.server_is_silent(self.idle_timeout) => return Err(silence().into()),
        }
        pass.received();
        let latency = sent.elapsed();
        watch.answered(latency, self.cost(latency));
        self.answer_micros.store(micros(latency), Ordering::Relaxed);
        Ok(Some(rest))
    }

    /// What of the time from a request to its answer was not spent on the way: it may have needed a new
    /// connection, and then have gone there and back as often again.
    fn cost(&self, latency: Duration) -> Duration {
        latency.saturating_sub(self.client.connect_time() * 2)
    }

    fn continuation(&self) -> std::sync::MutexGuard<'_, Weak<Continuation>> {
        self.continuation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks where the redirects led last, and, should that have run out, the original URL.
    async fn send(&self, range: Option<(u64, u64)>) -> Result<Reply, Cause> {
        let etag = match &self.fingerprint.validator {
            Validator::StrongEtag(etag) => Some(etag.as_str()),
            _ => None,
        };
        let resolved = self.lock().clone();
        let reply = self.client.get(&resolved, range, etag).await?;
        if !reply.answer.may_be_stale() || resolved == *self.client.original() {
            return Ok(reply);
        }
        self.client.get(self.client.original(), range, etag).await
    }

    /// Asks a server without ranges for everything once more.
    async fn ask_again(&self) -> Result<Content, Failure> {
        let Reply {
            answer, content, ..
        } = within(self.idle_timeout, self.send(None)).await?;
        if answer.status != 200 {
            return Err(Failure::refused(&answer));
        }
        answer.check_encoding(self.encoding(&answer)?)?;
        if !self.fingerprint.matches(&answer.fingerprint()) {
            return Err(Cause::Changed.into());
        }
        Ok(content)
    }

    /// The Content-Encoding of the stored bytes: that of the first answer, which `answer` may be.
    fn encoding(&self, answer: &Answer) -> Result<Option<&str>, Cause> {
        if self.encoding.get().is_none() {
            let encoding = answer.stored_encoding()?.map(str::to_owned);
            self.encoding.get_or_init(|| encoding);
        }
        Ok(self.encoding.get().and_then(|encoding| encoding.as_deref()))
    }

    fn remember(&self, url: Url) {
        *self.lock() = url;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Url> {
        self.resolved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a request for the rest of a buffer ended.
enum Asked {
    /// It is full, or the rest must be asked for.
    Part,
    /// The source, whose length nobody knew, ends before.
    End,
}

/// A failed attempt.
struct Failure {
    cause: Cause,
    /// How long the server wants us to wait.
    retry_after: Option<Duration>,
    /// Whether the server may have refused the request because of the number of those under way: the gate
    /// keeps it back until there are fewer.
    is_for_number: bool,
}

impl Failure {
    fn refused(answer: &Answer) -> Self {
        Self {
            cause: answer.refusal(),
            retry_after: answer.retry_after,
            is_for_number: false,
        }
    }
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self {
            cause,
            retry_after: None,
            is_for_number: false,
        }
    }
}

fn broken(how: &str) -> Failure {
    Cause::Protocol(how.to_owned()).into()
}

/// How hard something is being tried.
struct Effort {
    retry: Retry,
    jitter: Arc<Jitter>,
    /// Whether the server was understood before.
    is_open: bool,
    attempts: u32,
    /// Attempts in a row that brought nothing worth the name.
    failures: u32,
    /// Of these, those after which there was no pause.
    without_pause: u32,
    /// Bytes that were there when the last attempt failed that had brought something.
    reached: u64,
    started: Instant,
    stats: Arc<Stats>,
}

impl Effort {
    fn new(retry: Retry, jitter: Arc<Jitter>, stats: Arc<Stats>) -> Self {
        Self {
            retry,
            jitter,
            is_open: false,
            attempts: 0,
            failures: 0,
            without_pause: 0,
            reached: 0,
            started: Instant::now(),
            stats,
        }
    }

    /// Waits until it is time to try again, `received` bytes being there and `left` to wait; the
    /// cause, when there is no point.
    async fn failed(
        &mut self,
        failure: Failure,
        received: u64,
        left: Duration,
    ) -> Result<(), Cause> {
        self.attempts += 1;
        if received.saturating_sub(self.reached) >= PROGRESS {
            self.reached = received;
            (self.failures, self.without_pause) = (0, 0);
        }
        self.failures += 1;
        let Failure {
            cause,
            retry_after,
            is_for_number,
        } = failure;
        // A server that was understood once may have a node that is not.
        let is_slip = self.is_open && matches!(cause, Cause::Protocol(_));
        if !cause.is_transient() && !is_slip {
            return Err(cause);
        }
        tracing::debug!(attempt = self.attempts, %cause, "an attempt failed");
        if is_for_number && retry_after.is_none() && self.without_pause < RETRIES_AT_ONCE {
            self.without_pause += 1;
            self.stats.source_retries.increment();
            return Ok(());
        }
        let failures = self.failures - self.without_pause;
        let pause = self
            .retry
            .next(failures, cause, retry_after, left, &self.jitter)?;
        self.stats.source_retries.increment();
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The time was over while an attempt was under way.
    fn gave_up(&mut self) {
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

/// Between two looks of a [`Timer`].
const STEP: Duration = Duration::from_secs(1);

/// After how long without a byte a source counts as out of reach.
const SILENCE: Duration = Duration::from_secs(2);

/// Whether a read is counted as one of a source that is out of reach; no longer once dropped.
#[derive(Debug)]
struct OutOfReach {
    stats: Arc<Stats>,
    is_counted: bool,
}

impl OutOfReach {
    fn set(&mut self, is_counted: bool) {
        match (self.is_counted, is_counted) {
            (false, true) => self.stats.reads_out_of_reach.raise(),
            (true, false) => self.stats.reads_out_of_reach.lower(),
            _ => {}
        }
        self.is_counted = is_counted;
    }
}

impl Drop for OutOfReach {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Runs while something is waited for of which it is told now and then how many bytes are there.
#[derive(Debug)]
struct Timer {
    time: TimeLeft,
    looked: Instant,
    counted: u64,
    /// Whether anything came.
    is_alive: bool,
    /// When something came last, or the wait began.
    heard: Instant,
    /// How much longer it may wait for an answer without that being counted.
    queue_left: Duration,
    out_of_reach: OutOfReach,
}

impl Timer {
    /// `received` bytes are there without having been waited for.
    fn new(timeout: Duration, received: u64, stats: &Arc<Stats>) -> Self {
        Self {
            time: TimeLeft::new(timeout),
            looked: Instant::now(),
            counted: received,
            is_alive: false,
            heard: Instant::now(),
            queue_left: timeout.saturating_mul(QUEUE_TIMES),
            out_of_reach: OutOfReach {
                stats: Arc::clone(stats),
                is_counted: false,
            },
        }
    }

    /// An attempt failed because the source cannot be reached.
    fn lost(&mut self) {
        self.out_of_reach.set(true);
    }

    /// What is left, now that `received` bytes are there.
    fn left(&mut self, received: u64) -> Duration {
        let waited = self.looked.elapsed();
        self.look(received, waited)
    }

    /// As [`left`](Self::left) where nothing was waited for since that but beside
    /// [`run_out`](Self::run_out), which looks at each step: where more time has passed, this process was
    /// stopped (a debugger, the freezer of a container) and nobody waited.
    fn step(&mut self, received: u64) -> Duration {
        let waited = self.looked.elapsed().min(STEP * 2);
        self.look(received, waited)
    }

    fn look(&mut self, received: u64, waited: Duration) -> Duration {
        let came = received.saturating_sub(self.counted);
        self.time.waited(waited, came);
        (self.looked, self.counted) = (Instant::now(), received);
        if came > 0 {
            self.is_alive = true;
            self.heard = self.looked;
            self.out_of_reach.set(false);
        } else if self.heard.elapsed() >= SILENCE {
            self.out_of_reach.set(true);
        }
        self.time.left()
    }

    /// Takes no account of the time since it was looked at: nobody waited.
    fn skip(&mut self) {
        self.looked = Instant::now();
        self.heard = self.looked;
    }

    /// Waits until nothing is left, and returns why. While `is_queued`, because the server answers other
    /// requests, no time is counted, up to [`QUEUE_TIMES`] the whole time.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn run_out(&mut self, received: impl Fn() -> u64, is_queued: impl Fn() -> bool) -> Cause {
        let mut left = self.left(received());
        while !left.is_zero() {
            tokio::time::sleep(left.min(STEP)).await;
            if is_queued() && !self.queue_left.is_zero() {
                self.queue_left = self.queue_left.saturating_sub(self.looked.elapsed());
                self.skip();
            } else {
                left = self.step(received());
            }
        }
        let obstacle = if self.is_alive {
            Obstacle::Crawl
        } else {
            Obstacle::Timeout
        };
        Cause::Unreachable {
            obstacle,
            detail: String::new(),
        }
    }
}

/// What the first request finds out.
struct Found {
    fingerprint: Fingerprint,
    /// As of [`Http`].
    encoding: OnceLock<Option<String>>,
    /// Where redirects led.
    url: Url,
    body: Body,
    /// How long the answer took.
    answer_time: Duration,
}

/// The first request: which version there is, where redirects lead, and what came along.
async fn probe(client: &Client, options: &Options, received: &AtomicU64) -> Result<Found, Failure> {
    let (wanted, idle) = ((0, PREFIX_LEN), idle_timeout(options));
    let sent = Instant::now();
    let Reply {
        answer,
        content,
        url,
    } = within(idle, client.get(client.original(), Some(wanted), None)).await?;
    let answer_time = sent.elapsed();
    let empty = Body::Prefix(Bytes::new());
    let body = match (answer.status, answer.range) {
        (206, _) => {
            let len = answer
                .fingerprint()
                .len
                .unwrap_or(PREFIX_LEN)
                .min(PREFIX_LEN);
            let len = part_len(&answer, (0, len), answer.stored_encoding()?)?;
            let mut prefix = vec![0; len];
            let note = |len: usize| {
                received.fetch_max(len as u64, Ordering::Relaxed);
            };
            let mut rest = Rest {
                start: 0,
                end: len as u64,
                came: Bytes::new(),
                content,
            };
            receive(&mut rest, &mut prefix, &mut 0, &options.stats, idle, note).await?;
            Body::Prefix(prefix.into())
        }
        (200, _) if answer.content_len == Some(0) => empty,
        (200, _) => {
            answer.stored_encoding()?;
            Body::Whole(Mutex::new(Some(content)))
        }
        (416, Some(ContentRange::Unsatisfied { total: Some(0) })) => empty,
        _ => return Err(Failure::refused(&answer)),
    };
    Ok(Found {
        fingerprint: answer.fingerprint(),
        encoding: OnceLock::from(answer.stored_encoding()?.map(str::to_owned)),
        url,
        body,
        answer_time,
    })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Bytes of the part in a 206, which must begin as was asked and may be shorter.
fn part_len(
    answer: &Answer,
    (start, end): (u64, u64),
    encoding: Option<&str>,
) -> Result<usize, Cause> {
    answer.check_encoding(encoding)?;
    let (from, to) = answer.part()?;
    if from != start || to > end {
        return Err(Cause::Protocol(format!(
            "the server sends bytes {from}..{to} instead of {start}..{end}"
        )));
    }
    usize::try_from(to - from).map_err(|_| Cause::Truncated)
}

/// How long a server may be silent, before its answer and between two pieces of it.
fn idle_timeout(options: &Options) -> Duration {
    options.idle_timeout.min(options.timeout / 2)
}

/// The server does not answer, or has stopped sending.
fn silence() -> Cause {
    Cause::Unreachable {
        obstacle: Obstacle::Timeout,
        detail: String::new(),
    }
}

/// What `work` returns, unless it takes longer than `limit`.
///
/// # Cancel safety
/// That of `work`.
async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Cause>>,
) -> Result<T, Cause> {
    let done = tokio::time::timeout(limit, work).await;
    done.unwrap_or_else(|_| Err(silence()))
}

/// Drops what lies before `start`.
async fn skip(rest: &mut Rest, start: u64, stats: &Stats, idle: Duration) -> Result<(), Cause> {
    while rest.start < start {
        within(idle, fill(rest, stats)).await?;
        let gap = usize::try_from(start - rest.start).unwrap_or(usize::MAX);
        let len = rest.came.len().min(gap);
        rest.came.advance(len);
        rest.start += len as u64;
    }
    Ok(())
}

/// Waits until some of `rest` has come.
async fn fill(rest: &mut Rest, stats: &Stats) -> Result<(), Cause> {
    if rest.came.is_empty() {
        rest.came = rest.content.next().await?.ok_or(Cause::Truncated)?;
        stats.source_read_bytes.add(rest.came.len() as u64);
    }
    Ok(())
}

/// Receives of `rest` until `target` is full, waiting up to `idle` for each piece; `received` counts, whatever
/// happens, and `note` is called with it.
async fn receive(
    rest: &mut Rest,
    target: &mut [u8],
    received: &mut usize,
    stats: &Stats,
    idle: Duration,
    note: impl Fn(usize),
) -> Result<(), Cause> {
    while *received < target.len() {
        within(idle, fill(rest, stats)).await?;
        let len = copy(&rest.came, target.get_mut(*received..).unwrap_or_default());
        rest.came.advance(len);
        rest.start += len as u64;
        *received += len;
        note(*received);
    }
    Ok(())
}

/// Copies as much as fits and returns how much that is.
fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let len = from.len().min(to.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
    len
}

impl Source for Http {
    fn location(&self) -> &str {
        self.location.as_str()
    }

    fn locator(&self) -> &str {
        self.location.locator()
    }

    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    fn access(&self) -> Access {
        match self.body {
            Body::Prefix(_) => Access::Ranges,
            Body::Whole(_) => Access::Stream,
        }
    }

    fn read_at(&self, offset: Packed, mut buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        async move {
            let watch = Watch::default();
            self.fill(offset.0, &mut buffer, &watch).await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn read_afresh(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        if let Body::Whole(_) = self.body {
            return self.read_at(offset, buffer);
        }
        match self.afresh() {
            Ok(afresh) => afresh.read_at(offset, buffer),
            Err(error) => async move { Err(error) }.boxed(),
        }
    }

    fn read_watched<'a>(
        &'a self,
        offset: Packed,
        mut buffer: Buffer,
        watch: &'a Watch,
    ) -> BoxFuture<'a, Result<Bytes, Error>> {
        async move {
            self.fill(offset.0, &mut buffer, watch).await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn bearable_reads(&self) -> usize {
        self.gate.allowed()
    }

    fn limit_reads(&self) {
        self.gate.limit_to_one();
    }

    fn answer_cost(&self) -> Option<Duration> {
        let micros = self.answer_micros.load(Ordering::Relaxed);
        Some(self.cost(Duration::from_micros(micros)))
    }

    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        let Body::Whole(content) = &self.body else {
            return super::pieces(self);
        };
        let taken = content
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(content) = taken else {
            let spent = Error::new(self.location(), Cause::Spent);
            return stream::iter([Err(spent)]).boxed();
        };
        let pour = Pour::new(self, content);
        stream::unfold(Some(pour), |pour| async {
            let mut pour = pour?;
            match pour.next().await {
                Ok(Some(piece)) => Some((Ok(piece), Some(pour))),
                Ok(None) => None,
                Err(cause) => Some((Err(pour.effort.error(pour.source.location(), cause)), None)),
            }
        })
        .boxed()
    }
}

/// Everything that a server without ranges sends, in as many answers as that takes.
struct Pour<'a> {
    source: &'a Http,
    content: Content,
    /// Bytes handed on.
    given: u64,
    /// Bytes of this answer; what lies before `given` an earlier one has brought.
    seen: u64,
    /// Bytes that are worth waiting for: those handed on, and of those that came again each once
    /// until [`PROGRESS`] is made.
    counted: u64,
    /// How far an answer that began anew has come since there was progress.
    again: u64,
    /// Bytes handed on when there was.
    reached: u64,
    effort: Effort,
    timer: Timer,
}

impl<'a> Pour<'a> {
    fn new(source: &'a Http, content: Content) -> Self {
        Self {
            source,
            content,
            given: 0,
            seen: 0,
            counted: 0,
            again: 0,
            reached: 0,
            effort: source.effort(),
            timer: Timer::new(source.timeout, 0, &source.stats),
        }
    }

    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Cause> {
        // Until now nobody waited for more.
        self.timer.skip();
        loop {
            match self.receive().await {
                Ok(Some(piece)) => {
                    if let Some(fresh) = self.fresh(piece) {
                        return Ok(Some(fresh));
                    }
                }
                Ok(None) if self.is_all() => return Ok(None),
                Ok(None) => self.start_again(Cause::Truncated.into()).await?,
                Err(cause) => self.start_again(cause.of_open_source().into()).await?,
            }
        }
    }

    async fn receive(&mut self) -> Result<Option<Bytes>, Cause> {
        let counted = self.counted;
        tokio::select! {
            biased;
            piece = within(self.source.idle_timeout, self.content.next()) => piece,
            late = self.timer.run_out(|| counted, || false) => {
                self.effort.stats.source_timeouts.increment();
                Err(late)
            }
        }
    }

    /// What of `piece` was not handed on before; `None` if that is nothing.
    fn fresh(&mut self, mut piece: Bytes) -> Option<Bytes> {
        let len = piece.len() as u64;
        self.source.stats.source_read_bytes.add(len);
        let known = self.given.saturating_sub(self.seen).min(len);
        let counted = self.counted;
        if known > 0 {
            let again = self.again.max(self.seen + known);
            self.counted += again - self.again;
            self.again = again;
        }
        self.seen += len;
        self.counted += len - known;
        let came = self.counted - counted;
        self.source.stats.scan_received_bytes.add(came);
        // The time that passed was waited for this.
        self.timer.step(self.counted);
        if known == len {
            return None;
        }
        let fresh = piece.split_off(usize::try_from(known).unwrap_or(piece.len()));
        self.given = self.seen;
        Some(fresh)
    }

    fn is_all(&self) -> bool {
        let len = self.source.fingerprint.len;
        self.seen >= self.given && len.is_none_or(|len| len == self.given)
    }

    /// Asks for everything once more, so that it goes on where it broke off: only of a version that
    /// the server promises to be the same in every byte.
    async fn start_again(&mut self, mut failure: Failure) -> Result<(), Cause> {
        if !self.source.fingerprint.is_strong() {
            return Err(failure.cause);
        }
        if self.given - self.reached >= PROGRESS {
            (self.reached, self.again) = (self.given, 0);
        }
        let counted = self.counted;
        loop {
            let left = self.timer.step(counted);
            self.effort.failed(failure, self.given, left).await?;
            // The pause counts.
            self.timer.left(counted);
            let asked = tokio::select! {
                biased;
                asked = self.source.ask_again() => asked,
                late = self.timer.run_out(|| counted, || false) => {
                    self.effort.gave_up();
                    return Err(late);
                }
            };
            match asked {
                Ok(content) => {
                    (self.content, self.seen) = (content, 0);
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
    fn the_time_for_which_the_process_stood_still_was_not_waited() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime.expect("a runtime").block_on(async {
            let mut timer = Timer::new(Duration::from_mins(1), 0, &Arc::default());
            tokio::time::advance(Duration::from_hours(1)).await;
            assert!(timer.step(0) >= Duration::from_secs(58));
            tokio::time::advance(Duration::from_hours(1)).await;
            assert!(timer.left(0).is_zero(), "it was looked at by nobody else");
            let mut timer = Timer::new(Duration::from_mins(1), 0, &Arc::default());
            let begun = Instant::now();
            timer.run_out(|| 0, || false).await;
            let lasted = begun.elapsed();
            assert!((60..62).contains(&lasted.as_secs()), "{lasted:?}");
        });
    }
}
