//! Stream of a server without ranges.

use bytes::Bytes;

use super::Http;
use super::receive::with_idle_timeout;
use crate::source::retry::attempts::{Attempts, Failure, MIN_PROGRESS_BYTES};
use crate::source::{Cause, Content};

/// Stream of a server without ranges, over as many responses as needed.
pub(super) struct UnrangedStream<'a> {
    pub(super) source: &'a Http,
    content: Content,
    delivered: u64,
    /// Bytes of this response. An earlier response delivered those before `delivered`.
    received_in_response: u64,
    /// Bytes that count as progress: delivered ones, and repeated ones, each once until
    /// [`MIN_PROGRESS_BYTES`] are delivered.
    counted: u64,
    /// Bytes that a restarted response repeated since the last progress.
    received_again: u64,
    progress_mark: u64,
    pub(super) attempts: Attempts,
}

impl<'a> UnrangedStream<'a> {
    pub(super) fn new(source: &'a Http, content: Content) -> Self {
        Self {
            source,
            content,
            delivered: 0,
            received_in_response: 0,
            counted: 0,
            received_again: 0,
            progress_mark: 0,
            attempts: source.new_attempts(0),
        }
    }

    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Cause> {
        // The reader did not wait until now.
        self.attempts.timer.ignore_elapsed();
        loop {
            match self.receive().await? {
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

    /// Receives a piece, or why this response has no further one. Fails at the deadline.
    async fn receive(&mut self) -> Result<Result<Option<Bytes>, Cause>, Cause> {
        let counted = self.counted;
        let receiving = with_idle_timeout(self.source.idle_timeout, self.content.next());
        self.attempts.run(receiving, || counted, || false).await
    }

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
        let new_bytes = self.counted - counted;
        self.source.stats.scan_received_bytes.add(new_bytes);
        // The elapsed time was spent waiting for these bytes.
        self.attempts.timer.update_running(self.counted);
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

    /// Requests everything again after a failure, if the server promises identical bytes for the version.
    async fn restart(&mut self, failure: Failure) -> Result<(), Cause> {
        if !self.source.info.fingerprint.is_strong() {
            return Err(failure.cause);
        }
        if self.delivered - self.progress_mark >= MIN_PROGRESS_BYTES {
            (self.progress_mark, self.received_again) = (self.delivered, 0);
        }
        let (counted, delivered, source) = (self.counted, self.delivered, self.source);
        let attempts = &mut self.attempts;
        attempts.pause_after(failure, counted, delivered).await?;
        let asking = attempts.repeat(|| counted, delivered, || source.request_all());
        (self.content, self.received_in_response) = (asking.await?, 0);
        Ok(())
    }
}
