//! [`Http`] as a [`Source`].

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::FutureExt;
use futures_util::stream::{self, BoxStream, StreamExt};

use super::unranged::UnrangedStream;
use super::{Http, InitialBody};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::source::{
    Cause, Error, ReadHandle, ReadMode, Reading, Revalidation, Source, SourceInfo, stream_by_ranges,
};

impl Source for Http {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read<'a>(&'a self, offset: Packed, mut buffer: Buffer, mode: ReadMode<'a>) -> Reading<'a> {
        async move {
            let (source, read_handle) = match (mode, &self.body) {
                (ReadMode::Controlled(read_handle), _) => (self, read_handle),
                (ReadMode::Uncached(_), InitialBody::Prefix(_)) => {
                    (self.uncached()?, &ReadHandle::default())
                }
                _ => (self, &ReadHandle::default()),
            };
            let filling = source.fill_buffer(offset.0, &mut buffer, read_handle);
            filling.await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn outage(&self) -> Option<&'static str> {
        if self.options.revalidation == Revalidation::Never {
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
