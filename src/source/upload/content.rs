//! Contents of uploads, read while they are sent.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::stream;
use ring::digest::{Context, SHA256};
use rustix::fs::{CWD, ResolveFlags};

use crate::base::regular_file;
use crate::base::sha256::Sha256;
use crate::source::Cause;
use crate::source::http::{Content, RequestBody};

/// Bytes of a file that are read at a time.
const PIECE_LEN: usize = 256 << 10;

/// Bytes to upload: those of a file, or some in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct UploadContent {
    bytes: Stored,
    len: u64,
}

#[derive(Clone, Debug)]
enum Stored {
    File(Arc<File>),
    Memory(Bytes),
}

impl From<Bytes> for UploadContent {
    fn from(bytes: Bytes) -> Self {
        Self {
            len: bytes.len() as u64,
            bytes: Stored::Memory(bytes),
        }
    }
}

impl UploadContent {
    /// Opens the regular file at `path`.
    ///
    /// # Errors
    /// It cannot be opened, or is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let name = path.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
        let file = regular_file::open(CWD, name, ResolveFlags::empty())?;
        Self::from_file(file.ok_or_else(|| io::Error::other("it is not a regular file"))?)
    }

    /// All bytes of the open `file`, wherever its cursor is. The file must not change.
    ///
    /// # Errors
    /// Its length is unknown.
    pub fn from_file(file: File) -> io::Result<Self> {
        Ok(Self {
            len: file.metadata()?.len(),
            bytes: Stored::File(Arc::new(file)),
        })
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Computes the digest of the bytes.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter.
    pub(in crate::source) async fn sha256(&self) -> io::Result<Sha256> {
        let content = self.clone();
        let hashing = tokio::task::spawn_blocking(move || {
            let mut context = Context::new(&SHA256);
            content.for_each_piece(|piece| {
                context.update(piece);
                Ok(())
            })?;
            let digest = context.finish();
            let digest = digest.as_ref().try_into();
            digest.map(Sha256).map_err(io::Error::other)
        });
        hashing.await.map_err(io::Error::other)?
    }

    /// Passes all bytes to `consume`. Blocks on the disk.
    ///
    /// # Errors
    /// As [`sha256`](Self::sha256), or as `consume`.
    pub(super) fn for_each_piece(
        &self,
        mut consume: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut offset = 0;
        while offset < self.len {
            let piece = self.read_piece(offset)?;
            offset += piece.len() as u64;
            consume(&piece)?;
        }
        Ok(())
    }

    /// The bytes as the body of a request. `progress` is incremented by those that were read.
    pub(in crate::source) fn body(&self, progress: Arc<AtomicU64>) -> RequestBody {
        let content = self.clone();
        let pieces = stream::try_unfold(0, move |offset| {
            let (content, progress) = (content.clone(), Arc::clone(&progress));
            async move {
                if offset >= content.len {
                    return Ok(None);
                }
                let reading = tokio::task::spawn_blocking(move || content.read_piece(offset));
                // The task fails only if the runtime ends.
                let piece = reading.await.map_err(|_| Cause::Cancelled)??;
                progress.fetch_add(piece.len() as u64, Ordering::Relaxed);
                let next = offset + piece.len() as u64;
                Ok(Some((piece, next)))
            }
        });
        RequestBody {
            len: self.len,
            content: Content::new(pieces),
        }
    }

    /// Reads the next bytes at `offset`, at least one.
    fn read_piece(&self, offset: u64) -> io::Result<Bytes> {
        match &self.bytes {
            Stored::Memory(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                Ok(bytes.slice(start.min(bytes.len())..))
            }
            Stored::File(file) => {
                let left = usize::try_from(self.len - offset).unwrap_or(usize::MAX);
                let mut piece = vec![0; left.min(PIECE_LEN)];
                file.read_exact_at(&mut piece, offset)
                    .map_err(|error| match error.kind() {
                        io::ErrorKind::UnexpectedEof => {
                            io::Error::other("the file became shorter while it was uploaded")
                        }
                        _ => error,
                    })?;
                Ok(piece.into())
            }
        }
    }
}
