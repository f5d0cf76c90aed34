//! A file of an archive as a source of its own, for the archive that it is.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::BoxStream;
use tokio::sync::oneshot;

use super::read::ReadError;
use super::{Archive, Error};
use crate::base::buffer::Buffer;
use crate::base::extent::{Extent, Packed};
use crate::codec::Compression;
use crate::index::{Index, Ino, Kind, Piece};
use crate::source::{self, Access, Cause, Fingerprint, Location, Slice, Source, Validator};

impl Archive {
    /// File `ino` as a source, shown to the user as `name`. Where it lies in one piece in a plain
    /// archive it is a stretch of that one's source: read by ranges of it, with nothing in between
    /// but the source's own checks. Elsewhere it is read through this archive, span by span,
    /// verified as any read is.
    ///
    /// # Errors
    /// When it is no regular file, or lies where the source has nothing.
    pub fn file_as_source(
        self: &Arc<Self>,
        ino: Ino,
        name: &str,
    ) -> Result<Arc<dyn Source>, source::Error> {
        let index = self.index();
        let file = index.entry(ino).filter(|entry| entry.kind() == Kind::File);
        let size = file.map(|file| file.size()).ok_or_else(|| {
            let cause = Cause::Unsupported("what is no regular file".to_owned());
            source::Error::new(name, cause)
        })?;
        if let Some(extent) = self.stretch(&index, ino, size) {
            let whole = Arc::clone(self.source());
            return Ok(Arc::new(Slice::new(whole, extent, name)?));
        }
        let whole = self.source();
        let place = format!("file:{}:{}", ino.0, whole.locator());
        Ok(Arc::new(Inner {
            archive: Arc::clone(self),
            ino,
            location: Location::with_locator(name, place),
            fingerprint: Fingerprint {
                len: Some(size),
                // Which file it is says its locator.
                validator: Validator::Part {
                    start: 0,
                    whole: Box::new(whole.fingerprint().clone()),
                },
            },
        }))
    }

    /// Where in the source all of file `ino` lies, one byte behind the other.
    fn stretch(&self, index: &Index, ino: Ino, size: u64) -> Option<Extent<Packed>> {
        let is_plain = index.origin().compression == Compression::None;
        if !is_plain || self.source().access() == Access::Stream {
            return None;
        }
        if size == 0 {
            return Some(Extent::with_len(Packed(0), 0));
        }
        let piece: Piece = index.entry(ino)?.pieces(0, size).next()?;
        let is_whole = piece.offset == 0 && piece.plain.len() == size;
        is_whole.then(|| Extent::with_len(Packed(piece.plain.start().0), size))
    }
}

/// A file that is read through its archive.
#[derive(Debug)]
struct Inner {
    archive: Arc<Archive>,
    ino: Ino,
    location: Location,
    fingerprint: Fingerprint,
}

impl Inner {
    fn error(&self, cause: Cause) -> source::Error {
        source::Error::new(self.location.as_str(), cause)
    }

    /// Why a read of the archive failed, as the archive's own source would say it.
    fn failed(&self, error: &ReadError) -> source::Error {
        if let ReadError::Changed(error)
        | ReadError::Gone(error)
        | ReadError::Unreachable(error)
        | ReadError::TimedOut(error)
        | ReadError::Refused(error) = error
        {
            return match &**error {
                Error::Source(error) => error.clone(),
                error => self.error(Cause::Damaged(error.to_string())),
            };
        }
        self.error(Cause::Damaged(error.to_string()))
    }

    async fn fill(&self, offset: Packed, mut buffer: Buffer) -> Result<Bytes, source::Error> {
        let mut filled = 0;
        // Goes with this read, also when it is given up.
        let waiting = Arc::new(());
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let at = offset.0.saturating_add(filled as u64);
            let wanted = u32::try_from(rest.len()).unwrap_or(u32::MAX);
            let (sender, read) = oneshot::channel();
            // Who asked may have given up.
            let done = move |read| drop(sender.send(read));
            let waits = Arc::downgrade(&waiting);
            let is_wanted = Arc::new(move || waits.strong_count() > 0);
            self.archive.read(self.ino, at, wanted, is_wanted, done);
            // It is dropped unread only when the archive goes away.
            let read = read.await.map_err(|_| self.error(Cause::Cancelled))?;
            let bytes = read.map_err(|error| self.failed(&error))?;
            let Some(space) = rest
                .get_mut(..bytes.len())
                .filter(|space| !space.is_empty())
            else {
                return Err(self.error(Cause::Truncated));
            };
            space.copy_from_slice(&bytes);
            filled += bytes.len();
        }
        Ok(buffer.freeze())
    }
}

impl Source for Inner {
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
        Access::Ranges
    }

    fn read_at(
        &self,
        offset: Packed,
        buffer: Buffer,
    ) -> BoxFuture<'_, Result<Bytes, source::Error>> {
        self.fill(offset, buffer).boxed()
    }

    fn stream(&self) -> BoxStream<'_, Result<Bytes, source::Error>> {
        source::pieces(self)
    }
}
