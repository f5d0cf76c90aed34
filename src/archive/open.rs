//! From a source to an archive: by a saved index that still fits, or by one pass over it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use tokio::runtime::Handle;

use super::Archive;
use super::catalog::{Awaited, Catalog};
use super::error::Error;
use super::flights::Flights;
use super::foreground::Foreground;
use super::indexing::Spooler;
use super::pass::Pass;
use super::read::{ReadError, Reader};
use super::scan;
use crate::base::buffer::Pool;
use crate::base::loan::Loans;
use crate::base::stats::Stats;
use crate::base::workers::Workers;
use crate::cache::{self, Memory, Spool};
use crate::index::store::{self, Store};
use crate::index::{self, Builder, Index, Locator};
use crate::source::{Access, Source};

/// Threads that answer reads whose bytes are not in memory: they mostly wait for the network, and
/// more would only decode against each other.
const READERS: usize = 4;

/// How an archive is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// How it is scanned when no saved index fits. Its memory is the archive's: while scanning
    /// it is shared between buffers and kept spans.
    pub scan: scan::Options,
    /// Where indexes are saved and found, if anywhere.
    pub cache_dir: Option<PathBuf>,
    /// An index file to use instead of looking for one.
    pub index_file: Option<PathBuf>,
    /// What to do with bytes that cannot be read again from the middle.
    pub spooling: Spooling,
}

/// What to do with plain bytes that cannot be read again from the middle of the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spooling {
    /// Nothing: the tree is all that is wanted.
    TreeOnly,
    /// Write them to a file beside the index, up to so many bytes; `None` is all the disk has but
    /// a tenth of it.
    ToDisk {
        /// The limit.
        limit_bytes: Option<u64>,
    },
    /// Decode them again whenever they are read.
    Refused,
}

/// Why an archive cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be read.
    #[error("{location}{}", member_text(.member.as_deref()))]
    Archive {
        /// Where it is, without secrets.
        location: String,
        /// The member it happened in.
        member: Option<Vec<u8>>,
        /// Why.
        #[source]
        error: Box<Error>,
    },
    /// The index file that was to be used is none, or is another archive's.
    #[error(transparent)]
    Index(store::Error),
    /// The index file that was to be used belongs to another archive, or another version of it.
    #[error(
        "the index {path} does not belong to {location} as it is now; \
         make a new one with `tarfs index -o`"
    )]
    ForeignIndex {
        /// Which file.
        path: String,
        /// Which archive.
        location: String,
    },
    /// The source gives its bytes once, and there is nowhere to keep them.
    #[error(
        "{location}: the server gives no byte ranges, so files can only be read from a spool; \
         allow one (no --no-spool, enough --cache-size), or use `tarfs materialize`"
    )]
    NoSpool {
        /// Where it is, without secrets.
        location: String,
        /// Why the spool failed, if it was tried.
        #[source]
        cause: Option<SpoolFailure>,
    },
    /// No thread could be started.
    #[error("cannot start a thread")]
    Threads(#[source] std::io::Error),
}

/// Why a spool failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SpoolFailure(String);

fn member_text(member: Option<&[u8]>) -> String {
    member.map_or_else(String::new, |name| {
        format!(": in member '{}'", name.escape_ascii())
    })
}

impl Archive {
    /// Opens the archive at `source`: with a saved index if one fits, else by scanning it. A
    /// fresh index is saved; that it could not be is a note, not an error.
    ///
    /// # Errors
    /// When the archive cannot be read, or `options` cannot be satisfied.
    pub fn open(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let archive = Self::open_early(source, options, network, stats)?;
        archive.reader.catalog.wait_for(Awaited::End);
        archive.ended_well()?;
        Ok(archive)
    }

    /// As [`Archive::open`], but returns as soon as the scan has found the first member: the rest
    /// of the tree appears while it goes on.
    ///
    /// # Errors
    /// As [`Archive::open`], as far as anything is wrong before that. What goes wrong later is
    /// told by [`Archive::failure`].
    pub fn open_early(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let opening = Opening {
            locator: locator(&*source, options),
            store: options
                .cache_dir
                .as_ref()
                .map(|directory| Store::new(directory)),
            source,
            options: options.clone(),
            network: network.clone(),
            stats: Arc::clone(stats),
        };
        if let Some(path) = &options.index_file {
            return opening.with_index_file(path);
        }
        match opening.find_saved() {
            Some(reader) => archive(Arc::new(reader), None),
            None => opening.by_scanning(),
        }
    }
}

/// An archive being opened.
pub(super) struct Opening {
    pub(super) source: Arc<dyn Source>,
    pub(super) locator: Locator,
    pub(super) store: Option<Store>,
    pub(super) options: OpenOptions,
    pub(super) network: Handle,
    pub(super) stats: Arc<Stats>,
}

/// What makes saved state belong to this archive, read this way.
pub(super) fn locator(source: &dyn Source, options: &OpenOptions) -> Locator {
    let scan = &options.scan;
    let compression = scan.compression.map(|compression| compression.to_string());
    Locator {
        canonical: source.locator().to_owned(),
        fingerprint: source.fingerprint().to_string(),
        options: format!(
            "compression={} ignore-zeros={} allow-truncated={}",
            compression.as_deref().unwrap_or("auto"),
            scan.tar.ignore_zeros,
            scan.allow_truncated,
        ),
    }
}

/// The index in the file at `path`, if it is of an archive as long as `source`.
pub(super) fn index_file(path: &Path, source: &dyn Source) -> Result<Index, OpenError> {
    let index = store::read(path).map_err(OpenError::Index)?;
    let len = source.fingerprint().len;
    if len.is_some_and(|len| len != index.origin().packed_bytes) {
        return Err(foreign_index(path, source));
    }
    Ok(index)
}

fn foreign_index(path: &Path, source: &dyn Source) -> OpenError {
    OpenError::ForeignIndex {
        path: path.display().to_string(),
        location: source.location().to_owned(),
    }
}

impl Opening {
    /// The saved index, if there is one that fits the bytes as far as can be told cheaply.
    fn find_saved(&self) -> Option<Reader> {
        let index = match self.store.as_ref()?.find(&self.locator) {
            Ok(index) => index?,
            Err(error) => {
                // A damaged file is replaced by what the scan finds.
                tracing::warn!(error = %error, "a saved index cannot be used");
                return None;
            }
        };
        let spool = self.found_spool(&index);
        let reader = self.reader(Catalog::complete(index), spool);
        self.fits(&reader).then_some(reader)
    }

    /// Whether the index belongs to the bytes and they can be had: by a strong validator, or by
    /// the hash of one span, which for want of the former must come from the source itself.
    fn fits(&self, reader: &Reader) -> bool {
        match (self.source.fingerprint().is_strong(), self.is_readable()) {
            (true, true) => true,
            // All of it, or a part that is lost could not be had again while the mount lasts.
            (true, false) => reader.is_spooled(),
            (false, _) => {
                let is_hashed = reader.catalog.known().is_hashed();
                is_hashed && reader.verify_source(reader.sample()).is_ok()
            }
        }
    }

    fn is_readable(&self) -> bool {
        self.source.access() == Access::Ranges
    }

    fn with_index_file(&self, path: &Path) -> Result<Archive, OpenError> {
        let index = index_file(path, &*self.source)?;
        // The file may have been made elsewhere, from another URL: only the bytes can tell.
        let spool = self.found_spool(&index);
        let is_ours =
            self.source.fingerprint().is_strong() && index.origin().locator == self.locator;
        if !is_ours && !index.is_hashed() {
            return Err(foreign_index(path, &*self.source));
        }
        let reader = self.reader(Catalog::complete(index), spool);
        let span = reader.sample();
        let verified = if is_ours && !reader.catalog.known().is_hashed() {
            Ok(())
        } else if is_ours {
            reader.verify(span)
        } else {
            reader.verify_source(span)
        };
        match verified {
            Ok(()) => archive(Arc::new(reader), None),
            Err(
                ReadError::Damaged { .. }
                | ReadError::Index
                | ReadError::Unscanned
                | ReadError::NotAFile,
            ) => Err(foreign_index(path, &*self.source)),
            Err(ReadError::Changed(error) | ReadError::Unreachable(error)) => {
                Err(self.failed(Error::clone(&error), None))
            }
        }
    }

    /// Starts a scan, and returns when it has come to the first member.
    fn by_scanning(self) -> Result<Archive, OpenError> {
        let spooler = self.spooler()?;
        let spool = spooler.as_ref().map(|spooler| Arc::clone(&spooler.spool));
        let builder = Builder::new(index::Options {
            keeps_replaced: true,
            ..index::Options::default()
        });
        let reader = Arc::new(self.reader(Catalog::growing(builder), spool));
        let pass = Pass::start(self, spooler, Arc::clone(&reader)).map_err(OpenError::Threads)?;
        let archive = archive(reader, Some(pass))?;
        archive.reader.catalog.wait_for(Awaited::Member);
        if archive.reader.catalog.is_over() {
            archive.ended_well()?;
        }
        Ok(archive)
    }

    fn spool_directory(&self) -> Option<PathBuf> {
        Some(self.options.cache_dir.as_ref()?.join("spool"))
    }

    /// A new spool in `directory`; old ones make room for it.
    fn new_spool(&self, directory: &Path) -> Result<Spool, cache::SpoolError> {
        let limit_bytes = Spool::make_room(directory, self.spool_limit(directory));
        Spool::create(directory, limit_bytes)
    }

    /// What all spools in `directory` may hold.
    fn spool_limit(&self, directory: &Path) -> u64 {
        match self.options.spooling {
            Spooling::ToDisk { limit_bytes } => {
                limit_bytes.unwrap_or_else(|| cache::spare_bytes(directory))
            }
            Spooling::TreeOnly | Spooling::Refused => 0,
        }
    }

    /// A spool to write while scanning, unless none is wanted.
    fn spooler(&self) -> Result<Option<Spooler>, OpenError> {
        let once = !self.is_readable();
        let directory = match self.options.spooling {
            Spooling::TreeOnly => return Ok(None),
            Spooling::Refused => None,
            Spooling::ToDisk { .. } => self.spool_directory(),
        };
        let made = directory.map(|directory| self.new_spool(&directory));
        match made {
            Some(Ok(spool)) => Ok(Some(Spooler {
                spool: Arc::new(spool),
                everything: once,
                undecided: None,
                failure: None,
            })),
            Some(Err(error)) if once => Err(self.no_spool(Some(error.to_string()))),
            None if once => Err(self.no_spool(None)),
            Some(Err(error)) => {
                tracing::warn!(error = %error, "no spool");
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// The spool for an index that was found: an earlier mount's; or a new one, which fills as
    /// its bytes are decoded, when the stream has stretches without a seek point.
    fn found_spool(&self, index: &Index) -> Option<Arc<Spool>> {
        if self.options.spooling == Spooling::Refused {
            return None;
        }
        let directory = self.spool_directory()?;
        let name = spool_name(index.origin().content_id);
        let limit_bytes = self.spool_limit(&directory);
        if let Some(spool) = Spool::open(&directory, &name, limit_bytes) {
            return Some(Arc::new(spool));
        }
        let mut spans = 0..index.span_count();
        if limit_bytes == 0 || spans.all(|number| index.seek_offset(number).is_some()) {
            return None;
        }
        let spool = self.new_spool(&directory).ok()?;
        // Without a name it serves this mount only.
        drop(spool.publish(&name));
        Some(Arc::new(spool))
    }

    fn reader(&self, catalog: Catalog, spool: Option<Arc<Spool>>) -> Reader {
        let memory = self.memory();
        let budget = Pool::new(self.half());
        // Kept spans last: they would have to be decoded again.
        let loans = Loans::new(vec![Arc::new(budget.clone()), Arc::new(memory.clone())]);
        Reader {
            source: Arc::clone(&self.source),
            catalog,
            memory,
            spool: RwLock::new(spool),
            long_way: Mutex::default(),
            flights: Flights::default(),
            foreground: Foreground::default(),
            network: self.network.clone(),
            budget,
            loans,
            memory_bytes: self.options.scan.memory.max(scan::MIN_MEMORY),
            stats: Arc::clone(&self.stats),
        }
    }

    /// Room for decoded spans: three eighths of the memory. Half is a scan's, and later what reads
    /// hold while they decode; the rest is what neither counts, such as the allocator's own.
    fn memory(&self) -> Memory {
        Memory::new(self.options.scan.memory / 8 * 3)
    }

    /// Half the memory, which buffers and decoders have while the archive is read.
    pub(super) fn half(&self) -> u64 {
        self.options.scan.memory.max(scan::MIN_MEMORY) / 2
    }

    /// What a scan has for its buffers.
    pub(super) fn scan_memory(&self) -> u64 {
        self.half().max(scan::MIN_MEMORY)
    }

    pub(super) fn failed(&self, error: Error, member: Option<Vec<u8>>) -> OpenError {
        OpenError::Archive {
            location: self.source.location().to_string(),
            member,
            error: Box::new(error),
        }
    }

    pub(super) fn no_spool(&self, cause: Option<String>) -> OpenError {
        OpenError::NoSpool {
            location: self.source.location().to_string(),
            cause: cause.map(SpoolFailure),
        }
    }
}

fn archive(reader: Arc<Reader>, pass: Option<Pass>) -> Result<Archive, OpenError> {
    let workers = Workers::start("tarfs-read", READERS).map_err(OpenError::Threads)?;
    Ok(Archive {
        pass,
        prefetch: OnceLock::new(),
        workers: Arc::new(workers),
        reader,
    })
}

pub(super) fn spool_name(content_id: [u8; 32]) -> String {
    format!("{}.spool", blake3::Hash::from(content_id).to_hex())
}
