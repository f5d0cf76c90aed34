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

use crate::base::sha256::Sha256;
use crate::source::Cause;
use crate::source::network::Content;

/// Bytes of a file that are read at a time.
const PIECE_LEN: usize = 256 << 10;

/// Bytes to upload: those of a file, or some in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct UploadContent {
    bytes: Stored,
    size: u64,
    progress: Arc<AtomicU64>,
}

#[derive(Clone, Debug)]
enum Stored {
    File(Arc<File>),
    Memory(Bytes),
}

impl From<Bytes> for UploadContent {
    fn from(bytes: Bytes) -> Self {
        let size = bytes.len() as u64;
        Self::new(Stored::Memory(bytes), size)
    }
}

impl UploadContent {
    fn new(bytes: Stored, size: u64) -> Self {
        Self {
            bytes,
            size,
            progress: Arc::default(),
        }
    }

    /// The contents of the regular file at `path`, which must not change.
    ///
    /// # Errors
    /// It cannot be opened, or is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Opening a named pipe would wait.
        if !path.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Self::from_file(File::open(path)?)
    }

    /// All bytes of the open `file`, wherever its cursor is.
    ///
    /// # Errors
    /// Its length is unknown.
    pub fn from_file(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self::new(Stored::File(Arc::new(file)), size))
    }

    /// Number of bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Counter of the bytes that were read to be sent, also repeatedly.
    pub(crate) fn progress(&self) -> &Arc<AtomicU64> {
        &self.progress
    }

    /// Computes the digest of the bytes. It fails if the file has become shorter.
    pub(crate) async fn sha256(&self) -> Result<Sha256, Cause> {
        let content = self.clone();
        let hashing = tokio::task::spawn_blocking(move || {
            let mut context = Context::new(&SHA256);
            content.for_each_piece(|piece| {
                context.update(piece);
                Ok(())
            })?;
            let digest = context.finish().as_ref().try_into();
            digest.map(Sha256).map_err(io::Error::other)
        });
        // The task fails only if the runtime ends.
        Ok(hashing.await.map_err(|_| Cause::Cancelled)??)
    }

    /// Passes all bytes to `consume`. Blocks on the disk.
    pub(crate) fn for_each_piece(
        &self,
        mut consume: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut offset = 0;
        while offset < self.size {
            let piece = self.read_piece(offset)?;
            offset += piece.len() as u64;
            consume(&piece)?;
        }
        Ok(())
    }

    /// The bytes as the body of a request.
    pub(crate) fn body(&self) -> Content {
        let content = self.clone();
        Content::new(stream::try_unfold(
            (content, 0),
            |(content, offset)| async move {
                if offset >= content.size {
                    return Ok(None);
                }
                let reader = content.clone();
                let reading = tokio::task::spawn_blocking(move || reader.read_piece(offset));
                let piece = reading.await.map_err(|_| Cause::Cancelled)??;
                let len = piece.len() as u64;
                content.progress.fetch_add(len, Ordering::Relaxed);
                Ok(Some((piece, (content, offset + len))))
            },
        ))
    }

    /// Reads the next bytes at `offset`, at least one.
    fn read_piece(&self, offset: u64) -> io::Result<Bytes> {
        let file = match &self.bytes {
            // They are one piece.
            Stored::Memory(bytes) => return Ok(bytes.clone()),
            Stored::File(file) => file,
        };
        let left = usize::try_from(self.size - offset).unwrap_or(usize::MAX);
        let mut piece = vec![0; left.min(PIECE_LEN)];
        match file.read_exact_at(&mut piece, offset) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(io::Error::other(
                "the file became shorter while it was uploaded",
            )),
            read => read.map(|()| piece.into()),
        }
    }
}
