//! The library's front door: one archive, opened, scanned and read.

pub mod scan;

use bytes::Bytes;
use std::sync::Arc;

use crate::index::{Index, Ino};

/// An archive whose index is complete: any byte of any file, from memory or from the source.
#[derive(Debug)]
pub struct Archive {
    index: Arc<Index>,
}

/// Why a read failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// No such entry, or not a file.
    #[error("no such file")]
    NotAFile,
}

impl Archive {
    /// The tree.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// At most `len` bytes at `offset` of file `ino`, if no one has to be waited for: fewer only
    /// at the end of the file. `None` when some byte is neither a hole nor in memory.
    pub fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        todo!("{ino:?} {offset} {len}")
    }

    /// As [`Archive::try_read`], but never gives up: `done` gets the bytes on one of the
    /// archive's own threads, by the read deadline at the latest.
    pub fn read(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        done: impl FnOnce(Result<Bytes, ReadError>) + Send + 'static,
    ) {
        let _ = done;
        todo!("{ino:?} {offset} {len}")
    }
}
