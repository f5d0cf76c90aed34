//! Requests other than reads of ranges, with the retries and timeouts of reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use reqwest::Method;
use reqwest::header::HeaderMap;
use url::Url;

use super::content::UploadContent;
use crate::base::sha256::Sha256;
use crate::source::http::{
    Client, Failure, Message, RawResponse, Transport, Upload, idle_timeout, repeat, silent_server,
};
use crate::source::retry::Jitter;
use crate::source::{Cause, Error, Options, Target};

/// Sends requests for one target.
#[derive(Debug)]
pub(in crate::source) struct Sender {
    client: Client,
    location: String,
    options: Options,
    jitter: Arc<Jitter>,
    /// Increases with each byte that is read to be sent, or received.
    progress: Arc<AtomicU64>,
}

/// A response with its body.
#[derive(Debug)]
pub(in crate::source) struct Answer {
    pub(in crate::source) status: u16,
    pub(in crate::source) headers: HeaderMap,
    /// At most one byte more than the limit of the request.
    pub(in crate::source) body: Bytes,
}

impl Sender {
    /// Sends requests for `target` through `transport`.
    ///
    /// # Errors
    /// A header of `options` is malformed.
    pub(in crate::source) fn new(
        target: &Target,
        transport: Box<dyn Transport>,
        options: Options,
    ) -> Result<Self, Error> {
        let location = target.location.to_string();
        let client = Client::new(target, &options, transport)
            .map_err(|cause| Error::new(&location, cause))?;
        Ok(Self {
            client,
            location,
            jitter: Arc::new(Jitter::new(options.jitter_seed)),
            options,
            progress: Arc::default(),
        })
    }

    /// A PUT of `content` at `url`, with its digest if the server compares that.
    pub(in crate::source) fn put<'a>(
        &'a self,
        url: Url,
        content: &'a UploadContent,
        sha256: Option<Sha256>,
    ) -> Message<'a> {
        let upload = Upload {
            content,
            sha256,
            progress: &self.progress,
        };
        Message {
            upload: Some(upload),
            ..Message::new(Method::PUT, url)
        }
    }

    /// Repeats `attempt`, which sends requests, until it succeeds.
    ///
    /// # Errors
    /// It fails finally, or too often, or too late.
    pub(in crate::source) async fn repeat<T, A: Future<Output = Result<T, Failure>>>(
        &self,
        attempt: impl FnMut() -> A,
    ) -> Result<T, Error> {
        let (options, jitter) = (&self.options, &self.jitter);
        repeat(&self.location, options, jitter, &self.progress, attempt).await
    }

    /// Sends one request, and receives at most `limit` bytes of the answer, and one more if it is longer.
    ///
    /// # Errors
    /// The status of the answer is not one of `accepted`, or there is none in time.
    pub(in crate::source) async fn send(
        &self,
        message: Message<'_>,
        accepted: &[u16],
        limit: usize,
    ) -> Result<Answer, Failure> {
        let is_upload = message.method != Method::GET;
        let exchange = async {
            let (head, raw) = self.client.exchange(message).await?;
            if !accepted.contains(&head.status) {
                let mut failure = Failure::from_status(&head);
                if is_upload && matches!(head.status, 405 | 501) {
                    failure.cause = Cause::NoUploads(head.status);
                }
                return Err(failure);
            }
            Ok(self.receive(raw, limit).await?)
        };
        let mut exchange = std::pin::pin!(exchange);
        let idle = idle_timeout(&self.options);
        loop {
            let before = self.progress.load(Ordering::Relaxed);
            match tokio::time::timeout(idle, &mut exchange).await {
                Ok(done) => return done,
                Err(_) if self.progress.load(Ordering::Relaxed) > before => {}
                Err(_) => return Err(silent_server().into()),
            }
        }
    }

    async fn receive(&self, raw: RawResponse, limit: usize) -> Result<Answer, Cause> {
        let mut content = raw.content;
        let mut body = Vec::new();
        while body.len() <= limit
            && let Some(piece) = content.next().await?
        {
            self.progress
                .fetch_add(piece.len() as u64, Ordering::Relaxed);
            body.extend_from_slice(&piece);
        }
        body.truncate(limit.saturating_add(1));
        Ok(Answer {
            status: raw.status.as_u16(),
            headers: raw.headers,
            body: body.into(),
        })
    }
}
