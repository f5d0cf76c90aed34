//! The tree and the bytes behind a mount.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::archive::{
    Archive, Callback, IndexGuard, IsWanted, PageCache, ReadError, WaitFor, Watcher,
};
use crate::index::Ino;
use crate::layers::LayeredArchive;

/// Callback that receives the result of a read.
pub type ReadReply = Box<dyn FnOnce(Result<Bytes, ReadError>) + Send>;

/// The tree and the bytes behind a mount.
pub trait Content: Send + Sync + fmt::Debug + 'static {
    /// As [`Archive::index`].
    fn index(&self) -> IndexGuard<'_>;

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

    /// As [`Archive::note_read`].
    fn note_read(&self, _ino: Ino, _offset: u64, _len: u32) {}

    /// As [`Archive::note_lookup`].
    fn note_lookup(&self, _ino: Ino) {}

    /// As [`Archive::set_page_cache`].
    fn set_page_cache(&self, _page_cache: Arc<dyn PageCache>) {}

    /// As [`Archive::close`].
    fn close(&self) {}
}

impl Content for Archive {
    fn index(&self) -> IndexGuard<'_> {
        Self::index(self)
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

    fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        Self::note_read(self, ino, offset, len);
    }

    fn note_lookup(&self, ino: Ino) {
        Self::note_lookup(self, ino);
    }

    fn set_page_cache(&self, page_cache: Arc<dyn PageCache>) {
        Self::set_page_cache(self, page_cache);
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Content for LayeredArchive {
    fn index(&self) -> IndexGuard<'_> {
        IndexGuard::Complete(Self::index(self))
    }

    fn is_scanned(&self) -> bool {
        true
    }

    fn on_available(&self, _awaited: WaitFor, then: Callback) {
        then.run();
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        Self::try_read(self, ino, offset, len)
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply) {
        Self::read(self, ino, offset, len, wanted, done);
    }

    fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        Self::note_read(self, ino, offset, len);
    }

    fn note_lookup(&self, ino: Ino) {
        Self::note_lookup(self, ino);
    }

    fn set_page_cache(&self, page_cache: Arc<dyn PageCache>) {
        Self::set_page_cache(self, &page_cache);
    }

    fn close(&self) {
        Self::close(self);
    }
}
