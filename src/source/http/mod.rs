//! A file on a web server.
//!
//! The first request is a ranged GET, because HEAD may be refused: it finds the length, whether
//! ranges work, the version, and where redirects lead, and its bytes are kept and served from
//! memory. Every later answer must be of the same version. Later requests go straight to where
//! the redirects led; when that runs out, the original URL is asked again.

mod client;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt};
use reqwest::Response;
use url::Url;

use self::client::{Client, Reply};
use super::answer::{Answer, ContentRange};
use super::retry::{Retry, spread};
use super::watch::Order;
use super::{Access, Cause, Error, Fingerprint, Location, Options, Source, Validator, Watch};
use crate::base::buffer::Buffer;
use crate::base::extent::Packed;
use crate::base::stats::Stats;

/// Bytes asked for by the first request: what detecting a format needs, and little enough to be
/// sent with the answer's header.
const PREFIX_LEN: u64 = 64 << 10;

/// A source behind HTTP or HTTPS.
#[derive(Debug)]
pub struct Http {
    client: Client,
    retry: Retry,
    stats: Arc<Stats>,
    location: Location,
    fingerprint: Fingerprint,
    /// Where the last redirects led.
    resolved: Mutex<Url>,
    body: Body,
    options: Options,
    /// The same for who got bytes that cannot be right, made when the first one did.
    afresh: OnceLock<Box<Self>>,
}

/// What the first answer left us.
#[derive(Debug)]
enum Body {
    /// The first bytes of a source with ranges.
    Prefix(Bytes),
    /// All of a source without; taken by whoever streams it.
    Whole(Mutex<Option<Response>>),
}

impl Http {
    /// Finds out what `url` is.
    ///
    /// # Errors
    /// When the server cannot be reached, refuses, or answers what cannot be used.
    pub async fn open(url: Url, options: Options) -> Result<Self, Error> {
        let location = Location::from_url(&url);
        let client =
            Client::new(url, &options).map_err(|cause| Error::new(location.as_str(), cause))?;
        let mut effort = Effort::new(options.retry, Arc::clone(&options.stats));
        let (fingerprint, resolved, body) = loop {
            match probe(&client, &options.stats).await {
                Ok(found) => break found,
                Err(failure) => effort
                    .failed(failure)
                    .await
                    .map_err(|cause| effort.error(location.as_str(), cause))?,
            }
        };
        Ok(Self {
            fingerprint,
            resolved: Mutex::new(resolved),
            client,
            retry: options.retry,
            stats: Arc::clone(&options.stats),
            location,
            body,
            options,
            afresh: OnceLock::new(),
        })
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
        let no_cache = ("Cache-Control".to_owned(), "no-cache".to_owned());
        options.headers.push(no_cache);
        let original = self.client.original().clone();
        let client = Client::new(original.clone(), &options)
            .map_err(|cause| Error::new(self.location(), cause))?;
        let afresh = Self {
            client,
            retry: self.retry,
            stats: Arc::clone(&self.stats),
            location: self.location.clone(),
            fingerprint: self.fingerprint.clone(),
            resolved: Mutex::new(original),
            body: Body::Prefix(Bytes::new()),
            options,
            afresh: OnceLock::new(),
        };
        Ok(self.afresh.get_or_init(|| Box::new(afresh)))
    }

    async fn fill(&self, offset: u64, buffer: &mut Buffer, watch: &Watch) -> Result<(), Error> {
        let mut effort = Effort::new(self.retry, Arc::clone(&self.stats));
        let mut filled = self
            .copy_prefix(offset, buffer)
            .map_err(|cause| effort.error(self.location(), cause))?;
        watch.set_received(filled);
        while filled < buffer.len() {
            watch.begin();
            let attempt = self.attempt(offset, buffer, &mut filled, &mut effort, watch);
            let asked = tokio::select! {
                biased;
                order = watch.order() => Err(order),
                asked = attempt => Ok(asked),
            };
            match asked {
                Ok(asked) => match asked.map_err(|cause| effort.error(self.location(), cause))? {
                    Asked::All | Asked::Failed => {}
                    Asked::End => buffer.truncate(filled),
                },
                Err(Order::Stop) => buffer.truncate(filled),
                Err(Order::Cut) => {
                    self.stats.source_cuts.increment();
                    self.stats.source_retries.increment();
                    self.remember(self.client.original().clone());
                }
            }
        }
        Ok(())
    }

    /// Asks once for what `buffer` lacks; if that fails, waits until it is time to ask again.
    ///
    /// # Cancel safety
    /// Bytes that came stay and count.
    async fn attempt(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        filled: &mut usize,
        effort: &mut Effort,
        watch: &Watch,
    ) -> Result<Asked, Cause> {
        match self.ask(offset, buffer, filled, watch).await {
            Ok(asked) => Ok(asked),
            Err(failure) => {
                // The node that failed may be out of service: let the original choose anew.
                self.remember(self.client.original().clone());
                watch.pause();
                effort.failed(failure).await?;
                Ok(Asked::Failed)
            }
        }
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
    async fn ask(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        filled: &mut usize,
        watch: &Watch,
    ) -> Result<Asked, Failure> {
        // Neither overflows: `copy_prefix` has added them up.
        let wanted = (offset + *filled as u64, offset + buffer.len() as u64);
        let sent = Instant::now();
        let Reply {
            answer,
            mut response,
            url,
        } = self.send(wanted).await?;
        watch.answered(sent.elapsed());
        match answer.status {
            206 => {}
            416 if self.fingerprint.len.is_none() => return Ok(Asked::End),
            416 => return Err(Cause::Changed.into()),
            200 if !self.fingerprint.matches(&answer.fingerprint()) => {
                return Err(Cause::Changed.into());
            }
            200 => {
                return Err(
                    Cause::Protocol("the server stopped answering with ranges".to_owned()).into(),
                );
            }
            _ => return Err(Failure::refused(&answer)),
        }
        if !self.fingerprint.matches(&answer.fingerprint()) {
            return Err(Cause::Changed.into());
        }
        let len = part_len(&answer, wanted)?;
        self.remember(url);
        let target = buffer.get_mut(..*filled + len).unwrap_or_default();
        receive(&mut response, target, filled, &self.stats, watch).await?;
        Ok(if *filled < buffer.len() {
            Asked::End
        } else {
            Asked::All
        })
    }

    /// Asks where the redirects led last, and, should that have run out, the original URL.
    async fn send(&self, wanted: (u64, u64)) -> Result<Reply, Cause> {
        let etag = match &self.fingerprint.validator {
            Validator::StrongEtag(etag) => Some(etag.as_str()),
            _ => None,
        };
        let resolved = self.lock().clone();
        let reply = self.client.get(&resolved, wanted, etag).await?;
        if !reply.answer.may_be_stale() || resolved == *self.client.original() {
            return Ok(reply);
        }
        self.client.get(self.client.original(), wanted, etag).await
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
    /// It is full.
    All,
    /// The source, whose length nobody knew, ends before.
    End,
    /// It did not, and is worth another try.
    Failed,
}

/// A failed attempt.
struct Failure {
    cause: Cause,
    /// How long the server wants us to wait.
    retry_after: Option<Duration>,
}

impl Failure {
    fn refused(answer: &Answer) -> Self {
        Self {
            cause: answer.refusal(),
            retry_after: answer.retry_after,
        }
    }
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self {
            cause,
            retry_after: None,
        }
    }
}

/// How hard something is being tried.
struct Effort {
    retry: Retry,
    attempts: u32,
    started: Instant,
    stats: Arc<Stats>,
}

impl Effort {
    fn new(retry: Retry, stats: Arc<Stats>) -> Self {
        Self {
            retry,
            attempts: 0,
            started: Instant::now(),
            stats,
        }
    }

    /// Waits until it is time to try again; the cause, when there is no point.
    async fn failed(&mut self, failure: Failure) -> Result<(), Cause> {
        self.attempts += 1;
        let pause = self.retry.pause(self.attempts, failure.retry_after);
        let (Some(pause), true) = (pause, failure.cause.is_transient()) else {
            return Err(failure.cause);
        };
        tracing::debug!(attempt = self.attempts, cause = %failure.cause, "trying again");
        self.stats.source_retries.increment();
        tokio::time::sleep(spread(pause)).await;
        Ok(())
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

/// The first request: which version there is, where redirects lead, and what came along.
async fn probe(client: &Client, stats: &Stats) -> Result<(Fingerprint, Url, Body), Failure> {
    let wanted = (0, PREFIX_LEN);
    let Reply {
        answer,
        mut response,
        url,
    } = client.get(client.original(), wanted, None).await?;
    let empty = Body::Prefix(Bytes::new());
    let body = match (answer.status, answer.range) {
        (206, _) => {
            let len = answer
                .fingerprint()
                .len
                .unwrap_or(PREFIX_LEN)
                .min(PREFIX_LEN);
            let len = part_len(&answer, (0, len))?;
            let mut prefix = vec![0; len];
            let watch = Watch::default();
            receive(&mut response, &mut prefix, &mut 0, stats, &watch).await?;
            Body::Prefix(prefix.into())
        }
        (200, _) if answer.content_len == Some(0) => empty,
        (200, _) => {
            answer.check_encoding()?;
            Body::Whole(Mutex::new(Some(response)))
        }
        (416, Some(ContentRange::Unsatisfied { total: Some(0) })) => empty,
        _ => return Err(Failure::refused(&answer)),
    };
    Ok((answer.fingerprint(), url, body))
}

/// Bytes of the part in a 206, which must be what was asked for; only where nobody knows the
/// length of the whole may it be shorter.
fn part_len(answer: &Answer, (start, end): (u64, u64)) -> Result<usize, Cause> {
    answer.check_encoding()?;
    let (from, to) = answer.part()?;
    let ends_well = to == end || (to < end && answer.fingerprint().len.is_none());
    if from != start || !ends_well {
        return Err(Cause::Protocol(format!(
            "the server sends bytes {from}..{to} instead of {start}..{end}"
        )));
    }
    usize::try_from(to - from).map_err(|_| Cause::Truncated)
}

/// Receives until `target` is full; `received` counts, whatever happens.
async fn receive(
    response: &mut Response,
    target: &mut [u8],
    received: &mut usize,
    stats: &Stats,
    watch: &Watch,
) -> Result<(), Cause> {
    while *received < target.len() {
        let piece = response
            .chunk()
            .await
            .map_err(|error| client::cause_of(&error))?;
        let piece = piece.ok_or(Cause::Truncated)?;
        stats.source_read_bytes.add(piece.len() as u64);
        *received += copy(&piece, target.get_mut(*received..).unwrap_or_default());
        watch.set_received(*received);
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

    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        let Body::Whole(response) = &self.body else {
            return super::pieces(self);
        };
        let error = |cause| Error::new(self.location(), cause);
        let taken = response
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(response) = taken else {
            return stream::iter([Err(error(Cause::Spent))]).boxed();
        };
        stream::unfold(Some(response), move |response| async move {
            let mut response = response?;
            match response.chunk().await {
                Ok(None) => None,
                Ok(Some(piece)) => {
                    self.stats.source_read_bytes.add(piece.len() as u64);
                    Some((Ok(piece), Some(response)))
                }
                Err(failure) => Some((Err(error(client::cause_of(&failure))), None)),
            }
        })
        .boxed()
    }
}
