//! [`Http`] as a [`Source`].

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt};

use super::unranged::UnrangedStream;
use super::{Http, InitialBody};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::source::{
    Cause, Error, FirstContact, IsIntact, ReadHandle, Source, SourceInfo, stream_by_ranges,
};

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

    fn read_uncached<'a>(
        &'a self,
        offset: Packed,
        buffer: Buffer,
        _is_intact: IsIntact<'a>,
    ) -> BoxFuture<'a, Result<Bytes, Error>> {
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

    fn outage(&self) -> Option<&'static str> {
        if self.options.first_contact == FirstContact::Never {
            return Some("--offline forbids requests");
        }
        self.outage
            .is_under_way()
            .then_some("the source cannot be read at present")
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
            return stream_by_ranges(self);
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
                        .attempts
                        .retry_state
                        .error(stream_state.source.location(), cause)),
                    None,
                )),
            }
        })
        .boxed()
    }
}
