//! The tree and bytes of one archive or of several layers.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::{fmt, io};

use bytes::Bytes;

use super::prefetch::Prefetcher;
use super::read::assemble::required_scan_end;
use super::{
    AccessedRange, Archive, Callback, IndexGuard, IsWanted, MemoryUse, PageCache, PrefetchOptions,
    ReadError, WaitFor, Watcher,
};
use crate::base::extent::Plain;
use crate::index::MissingRow;
use crate::index::{Index, Ino, LazyIndex};

/// Callback that receives the result of a read.
pub type ReadReply = Box<dyn FnOnce(Result<Bytes, ReadError>) + Send>;

/// Uses the rows of an index that a request needs.
pub type TouchRows = Box<dyn FnOnce(&Index) + Send>;

/// Callback that receives whether rows could be loaded.
pub type RowsLoaded = Box<dyn FnOnce(Result<(), MissingRow>) + Send>;

/// Callback that receives whether an entry equals its header in the archive.
pub type Compared = Box<dyn FnOnce(Result<(), ReadError>) + Send>;

/// A part of a tree that others may have made up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TreePart<'a> {
    /// An entry under its first name, and the directories above.
    Entry(Ino),
    /// A name in a directory, and its entry.
    Name(Ino, &'a [u8]),
}

/// An opened tree, for a mount, a listing or a copy.
pub trait Volume: Send + Sync + fmt::Debug + 'static {
    /// As [`Archive::index`].
    fn index(&self) -> IndexGuard<'_>;

    /// Returns the tree once it is complete, for callers that keep it.
    fn complete_index(&self) -> Option<LazyIndex>;

    /// Whether the scan is over, if there was one. After that, no entry is added to the index.
    fn is_scan_over(&self) -> bool;

    /// Reads as [`Self::read_blocking`], but of a read across the end of a truncated archive returns the bytes before it.
    ///
    /// # Errors
    /// As of [`Self::read_blocking`], if there are no bytes before the end.
    fn read_before_cut(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        let read = self.read_blocking(ino, offset, len);
        if !matches!(read, Err(ReadError::Truncated)) {
            return read;
        }
        let cut = self.cut_offset(ino).ok().flatten().unwrap_or(offset);
        match u32::try_from(cut.saturating_sub(offset)) {
            Ok(there) if there > 0 && there < len => self.read_blocking(ino, offset, there),
            _ => read,
        }
    }

    /// Offset in file `ino` of its first byte behind the end of the archive, or of the part that is scanned.
    ///
    /// # Errors
    /// When rows of the index cannot be loaded.
    fn cut_offset(&self, ino: Ino) -> Result<Option<u64>, MissingRow> {
        self.index().read(|index| {
            let end = Plain(index.origin().plain_bytes);
            index.entry(ino)?.cut_offset(end)
        })
    }

    /// Runs `callback` when `awaited` is available or the scan is over, at once or later on the scan thread.
    /// It must not block, and may never run if no longer wanted. The caller must not hold an [`IndexGuard`].
    fn on_available(&self, awaited: WaitFor, callback: Callback);

    /// Runs `touch`, which uses rows of the index, on another thread if they must be loaded, and then `done`
    /// with whether they were. Only for indexes on demand.
    fn load_rows(&self, _touch: TouchRows, done: RowsLoaded) {
        done(Ok(()));
    }

    /// Whether the tree is merged from layers. Its implied directories then have the attributes that it shows.
    fn is_merged(&self) -> bool {
        false
    }

    /// Whether others may have made up the tree, so that its parts are compared with their headers before use.
    fn is_compared(&self) -> bool {
        false
    }

    /// Whether `part` must be compared with its headers in the archive before it is used. Of names, only those that no
    /// comparison of an entry covers.
    fn must_compare(&self, _part: TreePart<'_>) -> bool {
        false
    }

    /// Compares `part` with its headers on another thread, and then runs `done`.
    fn compare(&self, _part: TreePart<'_>, done: Compared) {
        done(Ok(()));
    }

    /// As [`Self::compare`], if that must be done, but blocks.
    ///
    /// # Errors
    /// When they differ, or a header is unavailable.
    fn compare_blocking(&self, part: TreePart<'_>) -> Result<(), ReadError> {
        if !self.must_compare(part) {
            return Ok(());
        }
        let (sender, compared) = sync_channel(1);
        self.compare(part, Box::new(move |result| drop(sender.send(result))));
        // Without an answer the archive is closed.
        compared.recv().unwrap_or(Err(ReadError::Unscanned))
    }

    /// Compares the symbolic links that lead to the entry at `path`, and its name, with their headers, but blocks.
    ///
    /// # Errors
    /// As [`Self::compare_blocking`].
    fn compare_path_blocking(&self, path: &[u8], follows_last: bool) -> Result<(), ReadError> {
        if !self.is_compared() {
            return Ok(());
        }
        let steps = self
            .index()
            .read(|index| index.steps_on(path, follows_last));
        let (links, last) = steps.map_err(|_| ReadError::IndexUnavailable)?;
        for link in links {
            self.compare_blocking(TreePart::Entry(link))?;
        }
        last.map_or(Ok(()), |(parent, name)| {
            self.compare_blocking(TreePart::Name(parent, &name))
        })
    }

    /// Adds a watcher, which the scan thread calls with the inodes whose attributes later members change, until it
    /// returns false. It must not block.
    fn watch(&self, _watcher: Watcher) {}

    /// Reads up to `len` bytes at `offset` of `ino`, fewer only at the end of the file, without blocking.
    /// Returns `None` if some byte is neither in a hole nor in memory. Memory includes the page cache of a
    /// local archive or of the disk cache.
    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>>;

    /// Reads as [`Self::try_read`] does, but waits for missing bytes. Calls `done` on a thread of the archive, or drops it
    /// if the read is no longer `wanted`.
    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply);

    /// Reads as [`Self::read`] does, but blocks. Must not be called on a thread of the async runtime.
    ///
    /// # Errors
    /// When the bytes are unavailable, or differ from the indexed ones.
    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError>;

    /// Starts to prefetch in all archives as `options` say. The rate is for all of them together. A second
    /// call has no effect.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    fn start_prefetch(&self, _options: PrefetchOptions) -> io::Result<()> {
        Ok(())
    }

    /// Recorded accesses and the number of reads, if more than `reads`; `None` also without recording.
    fn accesses_since(&self, _reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        None
    }

    /// Reports a read of `len` bytes at `offset` of `ino` to prefetch. Never blocks.
    fn report_read(&self, _ino: Ino, _offset: u64, _len: u32) {}

    /// Reports a lookup of `ino` by name to prefetch. Never blocks.
    fn report_lookup(&self, _ino: Ino) {}

    /// Adds a page cache that prefetch pushes files to, until its mount ends.
    fn add_page_cache(&self, _page_cache: Arc<dyn PageCache>) {}

    /// The only archive, if its index is the tree's.
    fn as_archive(&self) -> Option<&Archive> {
        None
    }

    /// The archives that form the tree, from the bottom.
    fn archives(&self) -> Vec<&Archive>;

    /// Current memory use of all archives together, by purpose.
    fn memory_use(&self) -> MemoryUse;

    /// Ends the scan, prefetch and all reads soon, including those that wait for memory. From now on reads
    /// fail in all archives that share their memory.
    fn close(&self) {}
}

impl Volume for Archive {
    fn index(&self) -> IndexGuard<'_> {
        Self::index(self)
    }

    fn complete_index(&self) -> Option<LazyIndex> {
        self.reader.live_index.completed()
    }

    fn is_scan_over(&self) -> bool {
        self.reader.live_index.is_scan_over()
    }

    fn on_available(&self, awaited: WaitFor, callback: Callback) {
        self.reader.live_index.await_part(awaited, callback);
    }

    fn load_rows(&self, touch: TouchRows, done: RowsLoaded) {
        let reader = Arc::clone(&self.reader);
        self.read_threads.submit(move || {
            let loaded = reader.live_index.read(touch);
            done(loaded);
        });
    }

    fn is_compared(&self) -> bool {
        self.reader.header_checks.is_some()
    }

    fn must_compare(&self, part: TreePart<'_>) -> bool {
        match part {
            TreePart::Entry(ino) => self.reader.must_check_header(ino),
            TreePart::Name(parent, name) => self.reader.must_check_name(parent, name),
        }
    }

    fn compare(&self, part: TreePart<'_>, done: Compared) {
        let reader = Arc::clone(&self.reader);
        match part {
            TreePart::Entry(ino) => self
                .read_threads
                .submit(move || done(reader.check_header(ino))),
            TreePart::Name(parent, name) => {
                let name = name.to_vec();
                let compare = move || done(reader.check_name(parent, &name));
                self.read_threads.submit(compare);
            }
        }
    }

    fn watch(&self, watcher: Watcher) {
        self.reader.live_index.watch(watcher);
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        self.reader.try_read(ino, offset, len)
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply) {
        let (read_threads, reader) = (Arc::clone(&self.read_threads), Arc::clone(&self.reader));
        let is_wanted = Arc::clone(&wanted);
        let work = move || {
            if is_wanted() {
                done(reader.read(ino, offset, len));
            }
        };
        if self.reader.live_index.completed().is_some() {
            return read_threads.submit(work);
        }
        // An index that is not complete has all its rows.
        let scan_end = self
            .index()
            .read(|index| required_scan_end(index, ino, offset, len));
        let scan_end = scan_end.unwrap_or_default();
        // A read thread never waits for the scan, because the next read in the queue may not need to.
        let callback = Callback::while_wanted(wanted, move || read_threads.submit(work));
        self.on_available(WaitFor::Plain(scan_end), callback);
    }

    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        self.reader.read(ino, offset, len)
    }

    fn start_prefetch(&self, options: PrefetchOptions) -> io::Result<()> {
        let prefetcher = Prefetcher::start(&self.reader, self.fill_threads()?, options)?;
        drop(self.prefetch.set(prefetcher));
        Ok(())
    }

    fn accesses_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        self.prefetch.get()?.accesses_since(reads)
    }

    fn report_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(prefetch) = self.prefetch.get() {
            prefetch.report_read(ino, offset, len);
        }
    }

    fn report_lookup(&self, ino: Ino) {
        if let Some(prefetch) = self.prefetch.get() {
            prefetch.report_lookup(ino);
        }
    }

    fn add_page_cache(&self, pages: Arc<dyn PageCache>) {
        if let Some(prefetch) = self.prefetch.get() {
            prefetch.add_page_cache(pages);
        }
    }

    fn as_archive(&self) -> Option<&Archive> {
        Some(self)
    }

    fn archives(&self) -> Vec<&Archive> {
        vec![self]
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            budget_bytes: self.reader.memory_bytes,
            spans_bytes: self.cached_bytes(),
            reads_bytes: self.reader.budget.used_bytes(),
            decoders_bytes: self.reader.broker.granted_bytes(),
            index_bytes: self.index().memory_bytes() as u64,
        }
    }

    fn close(&self) {
        self.reader.close();
        self.read_threads.discard_queue();
    }
}
