//! Sources that are read once: standard input, FIFOs, character devices.

use std::fmt;
use std::io::Read;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::FutureExt;
use futures_util::stream::{self, BoxStream, StreamExt};

use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::Packed;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::source::{
    Access, Cause, Error, Fingerprint, Location, ReadMode, Reading, Source, SourceInfo, Validator,
};

/// Maximum bytes per read: four times the default capacity of a Linux pipe.
const PIECE_LEN: usize = 256 << 10;
const MAX_QUEUED_PIECES: u64 = 4;

/// A source that can be read once, from the front.
pub struct Pipe {
    reader: Mutex<Option<Reader>>,
    info: SourceInfo,
    stats: Arc<Stats>,
}

type Reader = Box<dyn Read + Send>;

impl Pipe {
    /// Wraps `reader`, which the user sees as `name`.
    pub fn new(name: &str, reader: impl Read + Send + 'static, stats: Arc<Stats>) -> Self {
        Self {
            reader: Mutex::new(Some(Box::new(reader))),
            info: SourceInfo {
                location: Location::from_name(name),
                fingerprint: Fingerprint {
                    len: None,
                    validator: Validator::None,
                },
                access: Access::Stream,
            },
            stats,
        }
    }

    /// Wraps standard input.
    pub fn stdin(stats: Arc<Stats>) -> Self {
        Self::new("standard input", std::io::stdin(), stats)
    }

    fn error(&self, cause: Cause) -> Error {
        Error::new(self.location(), cause)
    }
}

fn read_piece(mut reader: Reader, mut buffer: Buffer) -> Result<Option<(Bytes, Reader)>, Cause> {
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(None),
            Ok(len) => {
                buffer.truncate(len);
                return Ok(Some((buffer.freeze(), reader)));
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Source for Pipe {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read<'a>(&'a self, _: Packed, _: Buffer, _: ReadMode<'a>) -> Reading<'a> {
        std::future::ready(Err(self.error(Cause::AlreadyRead))).boxed()
    }

    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        let taken = self.reader.lock().take();
        let Some(reader) = taken else {
            return stream::iter([Err(self.error(Cause::AlreadyRead))]).boxed();
        };
        let pool = BufferPool::new(MAX_QUEUED_PIECES * PIECE_LEN as u64);
        stream::unfold(Some(reader), move |reader| {
            let pool = pool.clone();
            async move {
                let reader = reader?;
                let buffer = pool.acquire_async(PIECE_LEN).await;
                // The task fails only if the runtime ends.
                let done = tokio::task::spawn_blocking(|| read_piece(reader, buffer)).await;
                match done.unwrap_or(Err(Cause::Cancelled)) {
                    Ok(None) => None,
                    Ok(Some((bytes, reader))) => {
                        self.stats.source_read_bytes.add(bytes.len() as u64);
                        self.stats.scan_received_bytes.add(bytes.len() as u64);
                        Some((Ok(bytes), Some(reader)))
                    }
                    Err(cause) => Some((Err(self.error(cause)), None)),
                }
            }
        })
        .boxed()
    }
}

impl fmt::Debug for Pipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipe")
            .field("location", &self.info.location)
            .finish_non_exhaustive()
    }
}
