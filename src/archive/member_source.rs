//! A file of an archive as a source, for a nested archive.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::FutureExt;
use tokio::sync::oneshot;

use super::error::{Error, ReadError};
use super::{Archive, TreePart, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::buffer_pool::Buffer;
use crate::base::extent::{Extent, Packed};
use crate::codec::Compression;
use crate::index::MissingRow;
use crate::index::{EntryKind, Index, Ino, Piece};
use crate::source::{
    self, Access, Cause, Fingerprint, ReadMode, Reading, Slice, Source, SourceInfo, Validator,
};

impl Archive {
    /// Opens the file at `path` as a source, and follows links within the archive.
    ///
    /// # Errors
    /// When the file does not exist, or is not a regular file.
    pub fn file(self: &Arc<Self>, path: &str) -> Result<Arc<dyn Source>, source::Error> {
        let name = format!("{}: {path}", self.source().location());
        let compared = self.compare_path_blocking(path.as_bytes(), true);
        compared.map_err(|error| source::Error::new(&*name, Cause::Damaged(error.to_string())))?;
        let found = self.index().read(|index| find_file(index, path.as_bytes()));
        let found = found
            .map_err(missing_row)
            .flatten()
            .map_err(|cause| source::Error::new(&*name, cause))?;
        let compared = self.compare_blocking(TreePart::Entry(found));
        compared.map_err(|error| source::Error::new(&*name, Cause::Damaged(error.to_string())))?;
        self.file_as_source(found, &name)
    }

    /// Opens file `ino` as a source, shown to the user as `name`.
    /// A contiguous file of an uncompressed archive is a slice of its source, which alone checks reads. Any
    /// other file is read and verified by spans.
    fn file_as_source(
        self: &Arc<Self>,
        ino: Ino,
        name: &str,
    ) -> Result<Arc<dyn Source>, source::Error> {
        let found = self.index().read(|index| {
            let file = index.entry(ino);
            let size = file.filter(|entry| entry.kind() == EntryKind::File)?.size();
            Some((size, self.contiguous_extent(index, ino, size)))
        });
        let found = found.map_err(|missing| source::Error::new(name, missing_row(missing)))?;
        let (size, extent) = found.ok_or_else(|| {
            let cause = Cause::Unsupported("what is no regular file".to_owned());
            source::Error::new(name, cause)
        })?;
        if let Some(extent) = extent {
            let whole = Arc::clone(self.source());
            return Ok(Arc::new(Slice::new(whole, extent, name)?));
        }
        let whole = self.source();
        let place = format!("file:{}:{}", ino.0, whole.canonical_location());
        Ok(Arc::new(MemberSource {
            archive: Arc::clone(self),
            ino,
            info: SourceInfo {
                location: whole.info().location.derive(name, place),
                fingerprint: Fingerprint {
                    len: Some(size),
                    // The locator identifies the file.
                    validator: Validator::Part {
                        start: 0,
                        whole: Box::new(whole.fingerprint().clone()),
                    },
                },
                access: Access::Ranges,
            },
        }))
    }

    fn contiguous_extent(&self, index: &Index, ino: Ino, size: u64) -> Option<Extent<Packed>> {
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

fn missing_row(missing: MissingRow) -> Cause {
    io::Error::other(missing).into()
}

fn find_file(index: &Index, path: &[u8]) -> Result<Ino, Cause> {
    let name = ArchivePath::sanitize(path);
    if name.has_parent_component || !name.stripped.is_empty() {
        return Err(Cause::Malformed(
            "its name leads out of the archive".to_owned(),
        ));
    }
    let found = index.resolve(path, true);
    let found = found.map_err(|error| Cause::Malformed(error.to_string()))?;
    Ok(found.ok_or(Cause::NotFound)?.ino())
}

#[derive(Debug)]
struct MemberSource {
    archive: Arc<Archive>,
    ino: Ino,
    info: SourceInfo,
}

impl MemberSource {
    fn error(&self, cause: Cause) -> source::Error {
        source::Error::new(self.location(), cause)
    }

    fn source_error(&self, error: &ReadError) -> source::Error {
        let text = match error.archive_error() {
            Some(Error::Source(error)) => return error.clone(),
            Some(error) => error.to_string(),
            None => error.to_string(),
        };
        self.error(Cause::Damaged(text))
    }

    async fn read_into(&self, offset: Packed, mut buffer: Buffer) -> Result<Bytes, source::Error> {
        let mut filled = 0;
        // Dropped with this read, also if the read is cancelled.
        let waiting = Arc::new(());
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let at = offset.0.saturating_add(filled as u64);
            let wanted = u32::try_from(rest.len()).unwrap_or(u32::MAX);
            let (sender, read) = oneshot::channel();
            // Sending fails if the caller has given up.
            let done = Box::new(move |read| drop(sender.send(read)));
            let waiter = Arc::downgrade(&waiting);
            let is_wanted = Arc::new(move || waiter.strong_count() > 0);
            self.archive.read(self.ino, at, wanted, is_wanted, done);
            // The sender is dropped unused only if the archive is closed.
            let read = read.await.map_err(|_| self.error(Cause::Cancelled))?;
            let bytes = read.map_err(|error| self.source_error(&error))?;
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

impl Source for MemberSource {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn outage(&self) -> Option<&'static str> {
        self.archive.source().outage()
    }

    fn read<'a>(&'a self, offset: Packed, buffer: Buffer, _: ReadMode<'a>) -> Reading<'a> {
        self.read_into(offset, buffer).boxed()
    }
}
