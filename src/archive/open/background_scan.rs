//! The background scan, which builds the index of an archive.

use std::io;
use std::sync::Arc;

use super::opener::{Opener, disk_cache_name, keep_index_lock};
use crate::archive::error::{Error, OpenError};
use crate::archive::options::DiskCacheMode;
use crate::archive::read::Reader;
use crate::archive::scan::disk_cache_policy::{ScanDiskCache, recovery_cost};
use crate::archive::scan::index_sink::{IndexSink, IndexSinkError};
use crate::archive::scan::{self, ScanError, Summary};
use crate::base::cancel_token::CancelToken;
use crate::base::error_chain::error_chain;
use crate::base::extent::{Extent, Plain};
use crate::base::memory_reclaim::{MemoryBroker, MemoryGrant, Reclaim};
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::codec::Compression;
use crate::index::Origin;
use crate::source::Access;

/// A background scan, running or over. It ends early with the reads of its archive.
#[derive(Debug)]
pub(crate) struct BackgroundScan {
    shared: Arc<Shared>,
    cancel_token: CancelToken,
    _thread: Thread<()>,
}

#[derive(Debug, Default)]
struct Shared {
    notes: Mutex<Vec<String>>,
    failure: Mutex<Option<Arc<OpenError>>>,
}

impl BackgroundScan {
    pub(crate) fn start(
        opener: Opener,
        disk_cache_writer: Option<ScanDiskCache>,
        reader: Arc<Reader>,
    ) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let cancel_token = reader.cancel_token().clone();
        let scan_thread = ScanThread {
            opener,
            reader,
            shared: Arc::clone(&shared),
        };
        let thread = Thread::spawn("tarfs-index", move || {
            if let Err(error) = scan_thread.run(disk_cache_writer) {
                scan_thread.set_failure(error);
            }
        })?;
        Ok(Self {
            shared,
            cancel_token,
            _thread: thread,
        })
    }

    pub(crate) fn notes(&self) -> Vec<String> {
        self.shared.notes.lock().clone()
    }

    pub(crate) fn failure(&self) -> Option<Arc<OpenError>> {
        self.shared.failure.lock().clone()
    }

    pub(crate) fn take_failure(&self) -> Option<OpenError> {
        let failure = self.shared.failure.lock().take()?;
        Some(Arc::try_unwrap(failure).unwrap_or_else(OpenError::Shared))
    }
}

impl Drop for BackgroundScan {
    fn drop(&mut self) {
        self.cancel_token.cancel();
    }
}

struct ScanThread {
    opener: Opener,
    reader: Arc<Reader>,
    shared: Arc<Shared>,
}

impl Drop for ScanThread {
    /// Ends the live index's scan, even after a panic, so that no waiter waits for ever.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.set_failure(Some(self.opener.archive_error(Error::Interrupted, None)));
        }
        self.reader.live_index.end_scan();
    }
}

impl ScanThread {
    fn set_failure(&self, error: Option<OpenError>) {
        *self.shared.failure.lock() = error.map(Arc::new);
    }

    /// Scans, completes the index and saves it. `None` as an error means that the scan was cancelled.
    fn run(&self, disk_cache_writer: Option<ScanDiskCache>) -> Result<(), Option<OpenError>> {
        let Opener {
            source,
            options,
            network,
            stats,
            ..
        } = &self.opener;
        let reader = &*self.reader;
        let scan_memory = options.budget().scan_bytes();
        // During the scan, reads have less memory. If memory is small, cached spans have less, too.
        let lendable = reader.budget.reclaimable_bytes().min(scan_memory);
        let reads = borrow_memory(reader.budget.clone(), lendable);
        let lent = options.budget().borrowed_span_bytes();
        let spans = borrow_memory(reader.spans.memory().clone(), lent);
        let mut sink = self.index_sink(disk_cache_writer);
        let mut reclaimers = options.scan.reclaimers.clone();
        if lent == 0 {
            reclaimers.push(Arc::new(reader.spans.memory().clone()));
        }
        let scan_options = scan::Options {
            spans: true,
            memory: scan_memory,
            cancel_token: reader.cancel_token().clone(),
            readers: Some(reader.broker.clone()),
            reclaimers,
            ..options.scan.clone()
        };
        let scanned = scan::scan(source, &scan_options, network, stats, &mut sink);
        let summary = scanned.map_err(|error| self.open_error(error))?;
        drop((reads, spans));
        let mut notes = sink.warnings;
        reader.live_index.finish(self.origin(&summary));
        let published = self.publish_disk_cache(&summary, &mut notes);
        if let Some(store) = &self.opener.store
            && let Some(index) = reader.live_index.completed()
            && let Ok(index) = index.tree()
        {
            match store.publish(&self.opener.locator, index) {
                Ok(index_lock) => keep_index_lock(reader, index_lock),
                Err(error) => {
                    let error = error_chain(&error);
                    notes.push(format!("the index could not be saved: {error}"));
                }
            }
        }
        *self.shared.notes.lock() = notes;
        published.map_err(Some)
    }

    fn index_sink(&self, disk_cache_writer: Option<ScanDiskCache>) -> IndexSink<'_> {
        let reader = &*self.reader;
        let caches_spans = self.opener.options.disk_cache != DiskCacheMode::IndexOnly;
        IndexSink {
            live_index: &reader.live_index,
            packed_bytes: self.opener.source.fingerprint().len,
            cancel_token: reader.cancel_token(),
            span_cache: caches_spans.then_some(reader.spans.memory()),
            span_owner: reader.spans.owner(),
            lag_limit: &reader.lag_limit,
            disk_cache_writer,
            span_bytes: None,
            free_list: reader.free_list.clone(),
            last_span: Extent::with_len(Plain(0), 0),
            memory_check: Ok(()),
            warnings: Vec::new(),
        }
    }

    fn open_error(&self, error: ScanError<IndexSinkError>) -> Option<OpenError> {
        if self.reader.cancel_token().is_cancelled() {
            return None;
        }
        let (error, member) = match error {
            ScanError::Archive { error, member, .. } => (error, member),
            ScanError::Sink(IndexSinkError::Cancelled) => return None,
            ScanError::Sink(IndexSinkError::Memory(error)) => (error.into(), None),
            ScanError::Sink(IndexSinkError::TooManyEntries { name, at }) => {
                (self.opener.too_many_entries(&name, at), None)
            }
        };
        Some(self.opener.archive_error(error, member))
    }

    fn origin(&self, summary: &Summary) -> Origin {
        Origin {
            locator: self.opener.locator.clone(),
            local_path: Vec::new(),
            content_id: summary.content_id.unwrap_or_default(),
            sha256: summary.sha256,
            plain_sha256: match summary.compression {
                // Its packed bytes are the plain ones.
                Compression::None => summary.plain_sha256.or(summary.sha256),
                _ => summary.plain_sha256,
            },
            compression: summary.compression,
            packed_bytes: summary.packed_len,
            plain_bytes: summary.plain_len,
            decoder_bytes: summary.decoder_bytes,
            is_truncated: summary.truncated,
            has_end_marker: summary.has_end_marker,
        }
    }

    fn publish_disk_cache(
        &self,
        summary: &Summary,
        notes: &mut Vec<String>,
    ) -> Result<(), OpenError> {
        let Some(disk_cache) = self.reader.spans.disk() else {
            return Ok(());
        };
        if self.opener.source.access() == Access::Stream {
            disk_cache.flush();
            if let Some(problem) = disk_cache.problem_text() {
                return Err(self.opener.no_disk_cache_error(Some(problem)));
            }
        }
        if let Err(error) = disk_cache.publish(&disk_cache_name(&self.origin(summary))) {
            notes.push(format!(
                "the disk cache could not be kept for later mounts: {error}"
            ));
        }
        if let Some(index) = self.reader.live_index.completed()
            && let Ok(index) = index.tree()
        {
            disk_cache.set_recovery_cost(recovery_cost(index));
        }
        Ok(())
    }
}

fn borrow_memory(pool: impl Reclaim + 'static, bytes: u64) -> Option<MemoryGrant> {
    MemoryBroker::new(vec![Arc::new(pool)]).grant(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_that_others_hold_is_no_success() {
        let shared = Arc::<Shared>::default();
        let failure = OpenError::Threads(io::ErrorKind::Other.into());
        *shared.failure.lock() = Some(Arc::new(failure));
        let scan = BackgroundScan {
            shared,
            cancel_token: CancelToken::default(),
            _thread: Thread::spawn("test", || ()).expect("a thread"),
        };
        let held = scan.failure().expect("it failed");
        let taken = scan.take_failure().expect("it failed");
        assert_eq!(taken.to_string(), held.to_string());
        assert!(scan.take_failure().is_none());
    }
}
