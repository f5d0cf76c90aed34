//! Local files and block devices.

use std::fs::{File as StdFile, Metadata};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::BoxStream;

use super::pipe::Pipe;
use super::{Access, Cause, Error, Fingerprint, Location, Source, Validator};
use crate::base::buffer::Buffer;
use crate::base::extent::Packed;
use crate::base::stats::Stats;

/// A file of the local system, held open: renaming or replacing it changes nothing, writing to it
/// is noticed.
#[derive(Debug)]
pub struct File {
    opened: Arc<Opened>,
    location: Location,
    fingerprint: Fingerprint,
}

#[derive(Debug)]
struct Opened {
    file: StdFile,
    state: State,
    stats: Arc<Stats>,
}

/// What a write to a file changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State {
    size: u64,
    mtime_ns: i128,
}

impl State {
    fn of(metadata: &Metadata) -> Self {
        Self {
            size: metadata.size(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Opens whatever stands at `path`: files and block devices by range, FIFOs and character devices
/// as a stream. Blocks on a FIFO without a writer.
pub(super) fn open(path: &Path, stats: Arc<Stats>) -> Result<Arc<dyn Source>, Cause> {
    let mut file = StdFile::open(path)?;
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    let name = path.to_string_lossy();
    if kind.is_dir() {
        return Err(Cause::Unsupported("a directory".to_owned()));
    }
    if kind.is_fifo() || kind.is_char_device() {
        return Ok(Arc::new(Pipe::new(&name, file, stats)));
    }
    let len = if kind.is_block_device() {
        file.seek(SeekFrom::End(0))?
    } else {
        metadata.size()
    };
    Ok(held(file, &metadata, len, &name, stats))
}

/// The open `file`, which must be a regular one, shown to the user as `name`.
pub(super) fn of(file: StdFile, name: &str, stats: Arc<Stats>) -> Result<Arc<dyn Source>, Cause> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Cause::Unsupported("what is no regular file".to_owned()));
    }
    Ok(held(file, &metadata, metadata.size(), name, stats))
}

fn held(
    file: StdFile,
    metadata: &Metadata,
    len: u64,
    name: &str,
    stats: Arc<Stats>,
) -> Arc<dyn Source> {
    Arc::new(File {
        location: Location::from_file(name, metadata.dev(), metadata.ino()),
        fingerprint: Fingerprint {
            len: Some(len),
            validator: Validator::File {
                dev: metadata.dev(),
                ino: metadata.ino(),
                mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
                ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
            },
        },
        opened: Arc::new(Opened {
            file,
            state: State::of(metadata),
            stats,
        }),
    })
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

impl Opened {
    fn fill(&self, offset: u64, buffer: &mut Buffer) -> Result<(), Cause> {
        let filled = self.file.read_exact_at(buffer, offset);
        // Looked at after the bytes were read: what was written before is seen.
        if State::of(&self.file.metadata()?) != self.state {
            return Err(Cause::Changed);
        }
        filled.map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Cause::Truncated,
            _ => Cause::from(error),
        })?;
        self.stats.source_read_bytes.add(buffer.len() as u64);
        Ok(())
    }
}

impl Source for File {
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

    fn read_at(&self, offset: Packed, mut buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        let opened = Arc::clone(&self.opened);
        let work = move || opened.fill(offset.0, &mut buffer).map(|()| buffer.freeze());
        async move {
            // The task ends without a result only when the runtime goes away.
            let done = tokio::task::spawn_blocking(work).await;
            done.unwrap_or(Err(Cause::Cancelled))
                .map_err(|cause| Error::new(self.location(), cause))
        }
        .boxed()
    }

    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        super::pieces(self)
    }
}
