//! The one pass in the background that makes an archive's index, and what is kept of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{io, mem};

use super::error::Error;
use super::indexing::{Indexing, Stop};
use super::open::{OpenError, Opening, Spooling, content, in_words, keep};
use super::read::Reader;
use super::scan::{self, ScanError, Summary};
use super::spooler::Spooler;
use crate::base::extent::{Extent, Plain};
use crate::base::memory_reclaim::{Reclaim, MemoryGrant, MemoryBroker};
use crate::base::thread::Thread;
use crate::index::Origin;
use crate::source::Access;

/// A pass that is under way, or over. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Pass {
    shared: Arc<Shared>,
    _thread: Thread<()>,
}

#[derive(Debug, Default)]
struct Shared {
    abandoned: AtomicBool,
    outcome: Mutex<Outcome>,
}

/// What the pass has to say besides the index.
#[derive(Debug, Default)]
struct Outcome {
    notes: Vec<String>,
    failure: Option<Arc<OpenError>>,
}

impl Pass {
    /// Starts the pass that completes `reader`'s catalog.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn start(
        opening: Opening,
        spooler: Option<Spooler>,
        reader: Arc<Reader>,
    ) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let pass = Scanning {
            opening,
            reader,
            shared: Arc::clone(&shared),
        };
        let thread = Thread::spawn("tarfs-index", move || {
            // Also when it panics: who waits must not wait for ever.
            let _end = End(&pass);
            if let Err(error) = pass.run(spooler) {
                pass.fail(error);
            }
        })?;
        Ok(Self {
            shared,
            _thread: thread,
        })
    }

    /// What the user should know, one line each.
    pub(super) fn notes(&self) -> Vec<String> {
        self.shared.outcome().notes.clone()
    }

    /// Why it ended before the archive.
    pub(super) fn failure(&self) -> Option<Arc<OpenError>> {
        self.shared.outcome().failure.clone()
    }

    /// As [`failure`](Self::failure), and nobody else asks.
    pub(super) fn take_failure(&self) -> Option<OpenError> {
        let failure = mem::take(&mut self.shared.outcome().failure);
        failure.and_then(Arc::into_inner)
    }

    /// Says that nobody wants the index any more.
    pub(super) fn abandon(&self) {
        self.shared.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Shared {
    fn outcome(&self) -> std::sync::MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells the catalog's waiters when dropped.
struct End<'a>(&'a Scanning);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .fail(Some(self.0.opening.failed(Error::Interrupted, None)));
        }
        self.0.reader.catalog.end();
    }
}

/// The pass on its thread.
struct Scanning {
    opening: Opening,
    reader: Arc<Reader>,
    shared: Arc<Shared>,
}

impl Scanning {
    /// Remembers why there will be no index; `None` when nobody wants to know.
    fn fail(&self, error: Option<OpenError>) {
        self.shared.outcome().failure = error.map(Arc::new);
    }

    /// Scans, completes the index and saves it; `None` as an error when nobody wants it any more.
    fn run(&self, spooler: Option<Spooler>) -> Result<(), Option<OpenError>> {
        let Opening {
            source,
            options,
            network,
            stats,
            ..
        } = &self.opening;
        let reader = &*self.reader;
        let scan_memory = self.opening.scan_memory();
        // While the scan goes on, reads have less, and with little memory kept spans, too.
        let reads = borrow(reader.budget.clone(), reader.budget.reclaimable_bytes());
        let lent = scan_memory - self.opening.half();
        let spans = borrow(reader.memory.clone(), lent);
        let mut sink = Indexing {
            catalog: &reader.catalog,
            packed_bytes: source.fingerprint().len,
            abandoned: &self.shared.abandoned,
            memory: (options.spooling != Spooling::TreeOnly).then_some(&reader.memory),
            layer: reader.layer,
            leash: &reader.leash,
            spooler,
            gathered: None,
            free_list: reader.free_list.clone(),
            last: Extent::with_len(Plain(0), 0),
            room: Ok(()),
            warnings: Vec::new(),
        };
        let scan_options = scan::Options {
            spans: true,
            memory: scan_memory,
            lenders: match lent {
                0 => vec![Arc::new(reader.memory.clone())],
                _ => Vec::new(),
            },
            ..options.scan.clone()
        };
        let summary =
            scan::scan(source, &scan_options, network, stats, &mut sink).map_err(|error| {
                match error {
                    ScanError::Archive { error, member, .. } => {
                        Some(self.opening.failed(error, member))
                    }
                    ScanError::Sink(Stop::Abandoned) => None,
                    ScanError::Sink(Stop::Memory(error)) => {
                        Some(self.opening.failed(error.into(), None))
                    }
                    ScanError::Sink(Stop::Full { name, at }) => {
                        Some(self.opening.failed(self.opening.too_many(&name, at), None))
                    }
                }
            })?;
        drop((reads, spans));
        let Indexing {
            warnings: mut notes,
            ..
        } = sink;
        reader.catalog.finish(self.origin(&summary));
        let kept = self.settle_spool(&summary, &mut notes);
        if let Some(store) = &self.opening.store
            && let Some(index) = reader.catalog.completed()
        {
            match store.publish(&self.opening.locator, index) {
                Ok(in_use) => keep(reader, in_use),
                Err(error) => {
                    let error = in_words(&error);
                    notes.push(format!("the index could not be saved: {error}"));
                }
            }
        }
        self.shared.outcome().notes = notes;
        kept.map_err(Some)
    }

    fn origin(&self, summary: &Summary) -> Origin {
        Origin {
            locator: self.opening.locator.clone(),
            content_id: summary.content_id.unwrap_or_default(),
            sha256: summary.sha256,
            compression: summary.compression,
            packed_bytes: summary.packed_len,
            plain_bytes: summary.plain_len,
        }
    }

    /// Keeps the spool for the next mounts.
    fn settle_spool(&self, summary: &Summary, notes: &mut Vec<String>) -> Result<(), OpenError> {
        let Some(spool) = &self.reader.spool else {
            return Ok(());
        };
        if self.opening.source.access() == Access::Stream {
            spool.flush();
            if let Some(trouble) = spool.trouble() {
                return Err(self.opening.no_spool(Some(trouble)));
            }
        }
        if let Err(error) = spool.publish(&content(&self.origin(summary))) {
            notes.push(format!(
                "the disk cache could not be kept for later mounts: {error}"
            ));
        }
        Ok(())
    }
}

/// Takes `bytes` from `lender` for a while.
fn borrow(lender: impl Reclaim + 'static, bytes: u64) -> Option<MemoryGrant> {
    MemoryBroker::new(vec![Arc::new(lender)]).grant(bytes).ok()
}
