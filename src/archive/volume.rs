//! The tree and bytes of one archive or of several layers.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::{
    Archive, Callback, IndexGuard, IsWanted, MemoryUse, PageCache, ReadError, WaitFor, Watcher,
};
use crate::index::{Index, Ino};

/// Callback that receives the result of a read.
pub type ReadReply = Box<dyn FnOnce(Result<Bytes, ReadError>) + Send>;

/// An opened tree, for a mount, a listing or a copy.
pub trait Volume: Send + Sync + fmt::Debug + 'static {
    /// As [`Archive::index`].
    fn index(&self) -> IndexGuard<'_>;

    /// As [`Archive::complete_index`].
    fn complete_index(&self) -> Option<Arc<Index>>;

    /// As [`Archive::is_scanned`].
    fn is_scanned(&self) -> bool;

    /// As [`Archive::on_available`].
    fn on_available(&self, awaited: WaitFor, then: Callback);

    /// As [`Archive::watch`].
    fn watch(&self, _watcher: Watcher) {}

    /// As [`Archive::try_read`].
    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>>;

    /// As [`Archive::read`].
    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply);

    /// As [`Archive::read_blocking`].
    ///
    /// # Errors
    /// When the bytes are unavailable, or differ from the indexed ones.
    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError>;

    /// As [`Archive::note_read`].
    fn note_read(&self, _ino: Ino, _offset: u64, _len: u32) {}

    /// As [`Archive::note_lookup`].
    fn note_lookup(&self, _ino: Ino) {}

    /// As [`Archive::set_page_cache`].
    fn set_page_cache(&self, _page_cache: Arc<dyn PageCache>) {}

    /// The archives that form the tree, from the bottom.
    fn archives(&self) -> Vec<&Archive>;

    /// As [`Archive::memory_use`], for all archives together.
    fn memory_use(&self) -> MemoryUse;

    /// As [`Archive::close`].
    fn close(&self) {}
}

impl Volume for Archive {
    fn index(&self) -> IndexGuard<'_> {
        Self::index(self)
    }

    fn complete_index(&self) -> Option<Arc<Index>> {
        Self::complete_index(self)
    }

    fn is_scanned(&self) -> bool {
        Self::is_scanned(self)
    }

    fn on_available(&self, awaited: WaitFor, then: Callback) {
        Self::on_available(self, awaited, then);
    }

    fn watch(&self, watcher: Watcher) {
        Self::watch(self, watcher);
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        Self::try_read(self, ino, offset, len)
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply) {
        Self::read(self, ino, offset, len, wanted, done);
    }

    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        Self::read_blocking(self, ino, offset, len)
    }

    fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        Self::note_read(self, ino, offset, len);
    }

    fn note_lookup(&self, ino: Ino) {
        Self::note_lookup(self, ino);
    }

    fn set_page_cache(&self, page_cache: Arc<dyn PageCache>) {
        Self::set_page_cache(self, page_cache);
    }

    fn archives(&self) -> Vec<&Archive> {
        vec![self]
    }

    fn memory_use(&self) -> MemoryUse {
        Self::memory_use(self)
    }

    fn close(&self) {
        Self::close(self);
    }
}
