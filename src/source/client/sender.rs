//! Requests other than reads of ranges, with the retries and timeouts of reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use reqwest::header::HeaderMap;
use reqwest::{Method, Url};

use super::target::Target;
use super::{Client, Message, resolve_redirect};
use crate::source::network::Transport;
use crate::source::retry::attempts::repeat;
use crate::source::retry::{Failure, Jitter};
use crate::source::{Cause, Error, Options};

/// Maximum length of an answer that can be used.
pub(crate) const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Sends requests for one target.
#[derive(Debug)]
pub(crate) struct Sender {
    client: Client,
    location: String,
    options: Options,
    jitter: Arc<Jitter>,
}

/// A response with its body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    /// It may be cut, but is then longer than [`MAX_ANSWER_BYTES`].
    pub(crate) body: Bytes,
}

impl Sender {
    /// Resolves the address `target`, to which the answer for `from` refers, as [`resolve_redirect`] does.
    pub(crate) fn resolve(&self, from: &Url, target: &str) -> Result<Url, Cause> {
        resolve_redirect(from, target, self.options.allow_insecure_redirects)
    }

    /// Sends requests for `target` through `transport`. Malformed headers of `options` are an error.
    pub(crate) fn new(
        target: &Target,
        transport: Box<dyn Transport>,
        options: Options,
    ) -> Result<Self, Error> {
        let location = target.location.to_string();
        let client = Client::new(target, &options, transport);
        Ok(Self {
            client: client.map_err(|cause| Error::new(&location, cause))?,
            location,
            jitter: Arc::new(Jitter::new(options.jitter_seed)),
            options,
        })
    }

    /// Repeats `attempt`, which sends requests, until it succeeds, or fails finally, too often or too late. `progress`
    /// counts the bytes that it sends.
    pub(crate) async fn repeat<T, A: Future<Output = Result<T, Failure>>>(
        &self,
        progress: &AtomicU64,
        attempt: impl FnMut() -> A,
    ) -> Result<T, Error> {
        let (options, jitter) = (&self.options, &self.jitter);
        repeat(&self.location, options, jitter, progress, attempt).await
    }

    /// Repeats [`send`](Self::send) until it succeeds.
    pub(crate) async fn request(
        &self,
        message: Message<'_>,
        accepted: &[u16],
    ) -> Result<Answer, Error> {
        let none = AtomicU64::new(0);
        let progress = message.content.map_or(&none, |content| content.progress());
        let attempt = || self.send(&message, accepted);
        self.repeat(progress, attempt).await
    }

    /// Sends `message` once, and receives the answer. A status not in `accepted` is an error.
    pub(crate) async fn send(
        &self,
        message: &Message<'_>,
        accepted: &[u16],
    ) -> Result<Answer, Failure> {
        let sent = || {
            let content = message.content;
            content.map_or(0, |content| content.progress().load(Ordering::Relaxed))
        };
        let mut exchange = std::pin::pin!(self.exchange(message, accepted));
        loop {
            let before = sent();
            match tokio::time::timeout(self.options.idle_limit(), &mut exchange).await {
                Ok(done) => return done,
                Err(_) if sent() > before => {}
                Err(_) => return Err(Cause::silent_server().into()),
            }
        }
    }

    async fn exchange(&self, message: &Message<'_>, accepted: &[u16]) -> Result<Answer, Failure> {
        let (head, mut raw, _) = self.client.exchange(message).await?;
        if message.method != Method::GET && matches!(head.status, 405 | 501) {
            return Err(Cause::NoUploads(head.status).into());
        }
        if !accepted.contains(&head.status) {
            return Err(Failure::from(&head));
        }
        let mut body = Vec::new();
        while body.len() <= MAX_ANSWER_BYTES
            && let Some(piece) = raw.content.next().await?
        {
            body.extend_from_slice(&piece);
        }
        Ok(Answer {
            status: head.status,
            headers: raw.headers,
            body: body.into(),
        })
    }
}
