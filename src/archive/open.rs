//! From a source to an archive: by a saved index that still fits, or by one pass over it.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::runtime::Handle;

use super::Archive;
use super::catalog::{Awaited, Catalog};
use super::error::Error;
use super::flights::Flights;
use super::packed::FirstRead;
use super::pass::Pass;
use super::read::{ReadError, Reader};
use super::scan::{self, Digest};
use super::share::{self, Purse, RESTING_SHARE, Share};
use super::spooler::{Spooler, keeps_spans};
use super::windows::Windows;
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::FreeList;
use crate::base::stats::Stats;
use crate::cache::{Shelf, Spool, SpoolOptions};
use crate::codec::{self, Compression, Detected};
use crate::fetch;
use crate::index::store::{self, InUse, Store};
use crate::index::{self, Builder, Index, Locator, MemoryLimit, Origin, Whiteouts};
use crate::source::{Access, Source};
use crate::tar;

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
    /// What indexes may have of memory, on top of that of the scan.
    pub index_memory: MemoryLimit,
    /// Whether an archive whose version nothing proves is scanned whatever was saved of it: for a
    /// caller that has files of an earlier scan.
    pub rescans_unproven: bool,
    /// Whether members that are damaged or not in the tree are logged as the scan finds them.
    pub logs_problems: bool,
    /// What to do with bytes that cost more to make again than to read back from disk.
    pub spooling: Spooling,
    /// How the archive says what of the layers below it is gone, if it is a layer.
    pub layer: Option<Whiteouts>,
}

/// Damaged members of an archive that are logged; all are counted.
const MAX_LOGGED_PROBLEMS: u64 = 10_000;

/// What to do with plain bytes that come from far away, or take long to decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spooling {
    /// Nothing: the tree is all that is wanted.
    TreeOnly,
    /// Write them to a file beside the index. All such files together take up to so many bytes;
    /// `None` is all the disk has but a tenth of it.
    ToDisk {
        /// The limit.
        limit_bytes: Option<u64>,
    },
    /// Fetch and decode them again whenever they are read.
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
         make a new one with `tarfs index --output`"
    )]
    ForeignIndex {
        /// Which file.
        path: String,
        /// Which archive.
        location: String,
    },
    /// The source gives its bytes once, and there is nowhere to keep them.
    #[error(
        "{location}: the server gives no byte ranges, so files can only be read from a disk cache; \
         allow one (no --no-disk-cache, enough --cache-size), or use `tarfs materialize`"
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
        Self::open_early(source, options, network, stats)?.whole()
    }

    /// As [`Archive::open`], for one of several archives with one memory and the same threads:
    /// number `layer` of them. While it is scanned it has the memory that `options` say besides.
    ///
    /// # Errors
    /// As [`Archive::open`].
    pub fn open_layer(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        (share, layer): (&Share, u16),
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let share = Some((share.clone(), layer));
        Self::begin(source, options, share, network, stats)?.whole()
    }

    /// Waits for the end of the scan.
    fn whole(self) -> Result<Self, OpenError> {
        self.reader.catalog.wait_for(Awaited::End);
        self.ended_well()?;
        Ok(self)
    }

    /// As [`Archive::open`], but returns as soon as the scan has found the first member: the rest
    /// of the tree appears while it goes on. An archive that must have a certain digest is returned
    /// when all of it has.
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
        Self::begin(source, options, None, network, stats)
    }

    fn begin(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        share: Option<(Share, u16)>,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let options = &OpenOptions {
            scan: options.scan.of(&*source),
            ..options.clone()
        };
        let free_list = match &share {
            Some((share, _)) => share.free_list.clone(),
            None => FreeList::new(options.scan.memory / RESTING_SHARE),
        };
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
            share,
            free_list,
        };
        let found = if let Some(path) = &options.index_file {
            opening.with_index_file(path)?
        } else {
            let found = opening.find_saved()?;
            if let Some(reader) = &found {
                opening.check_entries(&reader.catalog.known())?;
                if let Some(in_use) = reader.in_use.get() {
                    in_use.note();
                }
            }
            found
        };
        match found {
            Some(reader) => opening.archive(Arc::new(reader)),
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
    /// What it has together with others, and which of them it is.
    share: Option<(Share, u16)>,
    /// Where the memory of spans comes from.
    free_list: FreeList,
}

/// What makes saved state belong to this archive, read this way.
pub(super) fn locator(source: &dyn Source, options: &OpenOptions) -> Locator {
    let scan = &options.scan;
    let compression = scan.compression.map(|compression| compression.to_string());
    let layer = match options.layer {
        None => "",
        Some(Whiteouts::Oci) => " layer=oci",
        Some(Whiteouts::Overlay | Whiteouts::Keep) => " layer=other",
    };
    Locator {
        canonical: source.locator().to_owned(),
        fingerprint: source.fingerprint().to_string(),
        options: format!(
            "compression={} ignore-zeros={} allow-truncated={}{layer}",
            compression.as_deref().unwrap_or("auto"),
            scan.tar.ignore_zeros,
            scan.allow_truncated,
        ),
    }
}

/// The index in the file at `path`, if it is of an archive as long as `source`.
pub(super) fn index_file(
    path: &Path,
    source: &dyn Source,
    limit: &MemoryLimit,
) -> Result<Index, OpenError> {
    let index = store::read(path, limit).map_err(OpenError::Index)?;
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

/// Says as long as `reader` lives that the saved index is in use.
pub(super) fn keep(reader: &Reader, in_use: Option<InUse>) {
    if let Some(in_use) = in_use {
        // It has none: it has read its index, or made it, once.
        drop(reader.in_use.set(in_use));
    }
}

impl Opening {
    /// The saved index, if there is one that fits the bytes as far as can be told cheaply.
    fn find_saved(&self) -> Result<Option<Reader>, OpenError> {
        let Some(store) = self.store.as_ref().filter(|_| !self.must_rescan()) else {
            return Ok(None);
        };
        let (index, in_use) = match store.find_held(&self.locator, &self.options.index_memory) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                // A damaged file is replaced by what the scan finds.
                tracing::warn!(error = in_words(&error), "a saved index cannot be used");
                return Ok(None);
            }
        };
        if !self.is_vouched_for(&index)? {
            return Ok(None);
        }
        let spool = self.found_spool(&index);
        let reader = self.reader(Catalog::complete(index), spool);
        keep(&reader, in_use);
        Ok(self.fits(&reader).then_some(reader))
    }

    /// Whether `index` was made from bytes with the digest that is wanted, if one is, and the source
    /// still gives the same: only a strong validator says so, as nothing else speaks of all bytes.
    ///
    /// # Errors
    /// When it says that the digest is another one.
    fn is_vouched_for(&self, index: &Index) -> Result<bool, OpenError> {
        // The locator of the saved index contains the source's own plain digest, and no other one.
        let own = self.source.fingerprint().plain_sha256();
        if let Digest::Expect(expected) = self.options.scan.plain_sha256
            && own != Some(expected)
        {
            return Ok(false);
        }
        let Digest::Expect(expected) = self.options.scan.sha256 else {
            return Ok(true);
        };
        let origin = index.origin();
        let is_ours = self.source.fingerprint().is_strong() && origin.locator == self.locator;
        match origin.sha256.filter(|_| is_ours) {
            None => Ok(false),
            Some(found) if found == expected => Ok(true),
            Some(found) => Err(self.failed(Error::OtherDigest { expected, found }, None)),
        }
    }

    /// Whether only a scan of this process counts.
    fn must_rescan(&self) -> bool {
        self.options.rescans_unproven && self.source.fingerprint().doubt().is_some()
    }

    /// Whether the index belongs to the bytes and they can be had: by a strong validator, or by
    /// samples that come from the source itself.
    fn fits(&self, reader: &Reader) -> bool {
        match (self.source.fingerprint().is_strong(), self.is_readable()) {
            (true, true) => true,
            // All of it, or a part that is lost could not be had again while the mount lasts.
            (true, false) => reader.is_spooled(),
            (false, _) => {
                let is_hashed = reader.catalog.known().is_hashed();
                is_hashed && reader.verify_samples(Reader::verify_source).is_ok()
            }
        }
    }

    fn is_readable(&self) -> bool {
        self.source.access() == Access::Ranges
    }

    /// The index in the file at `path`; `None` when the archive must be read all the same, for its
    /// digest.
    fn with_index_file(&self, path: &Path) -> Result<Option<Reader>, OpenError> {
        let index = index_file(path, &*self.source, &self.options.index_memory)?;
        // Whoever made the file may have written any digest into it.
        if self.options.scan.expects_digest() || self.must_rescan() {
            return Ok(None);
        }
        self.check_entries(&index)?;
        // The file may have been made elsewhere, from another URL: only the bytes can tell.
        let spool = self.found_spool(&index);
        let is_ours =
            self.source.fingerprint().is_strong() && index.origin().locator == self.locator;
        if !is_ours && !index.is_hashed() {
            return Err(foreign_index(path, &*self.source));
        }
        let reader = self.reader(Catalog::complete(index), spool);
        let verified = match (is_ours, reader.catalog.known().is_hashed()) {
            (true, false) => Ok(()),
            (true, true) => reader.verify_samples(Reader::verify),
            (false, _) => reader.verify_samples(Reader::verify_source),
        };
        match verified {
            Ok(()) => Ok(Some(reader)),
            Err(
                ReadError::Damaged { .. }
                | ReadError::Index
                | ReadError::Unscanned
                | ReadError::NotAFile,
            ) => Err(foreign_index(path, &*self.source)),
            Err(
                ReadError::Changed(error)
                | ReadError::Gone(error)
                | ReadError::Unreachable(error)
                | ReadError::TimedOut(error)
                | ReadError::Refused(error),
            ) => Err(self.failed(Error::clone(&error), None)),
        }
    }

    /// Starts a scan, and returns when it has come to the first member; with an expected digest when
    /// all of the archive has it.
    fn by_scanning(self) -> Result<Archive, OpenError> {
        let spool = self.new_spool()?;
        let kept = spool.clone();
        let spooler = kept.map(|spool| Spooler::new(spool, &*self.source));
        let builder = Builder::new(index::Options {
            keeps_replaced: true,
            whiteouts: self.options.layer,
            max_entries: self.max_numbers(),
            max_reported_problems: if self.options.logs_problems {
                MAX_LOGGED_PROBLEMS
            } else {
                0
            },
            ..index::Options::default()
        })
        .with_memory_limit(&self.options.index_memory);
        let reader = Arc::new(self.reader(Catalog::growing(builder), spool));
        let mut archive = self.archive(Arc::clone(&reader))?;
        let awaited = if self.options.scan.expects_digest() {
            Awaited::End
        } else {
            Awaited::Member
        };
        let pass = Pass::start(self, spooler, reader).map_err(OpenError::Threads)?;
        archive.pass = Some(pass);
        archive.reader.catalog.wait_for(awaited);
        if archive.reader.catalog.is_over() {
            archive.ended_well()?;
        }
        Ok(archive)
    }

    /// The packed format, for sources that tell it at once; `None` when it is not known yet.
    fn compression(&self) -> Option<Compression> {
        let given = self.options.scan.compression;
        let len = self.source.fingerprint().len?;
        if given.is_some() || self.source.is_remote() || !self.is_readable() {
            return given;
        }
        let len = len.min(codec::detect::DETECT_LEN as u64);
        let first = Extent::with_len(Packed(0), len);
        // The scan will say what is wrong.
        let bytes = fetch::read(&self.network, &self.source, first, &BufferPool::new(len)).ok()?;
        match codec::detect(&bytes) {
            Detected::Supported(compression) => Some(compression),
            Detected::Unsupported(_)
            | Detected::Encrypted(_)
            | Detected::WebPage
            | Detected::Unknown => None,
        }
    }

    /// How many entries there may be, the root aside.
    fn max_entries(&self) -> u64 {
        let most = index::Options::default().max_entries;
        self.options.scan.tar.limits.entries.min(most.into())
    }

    /// As many numbers, that of the root and 0 included.
    fn max_numbers(&self) -> u32 {
        let numbers = self.max_entries().saturating_add(2);
        u32::try_from(numbers).unwrap_or(u32::MAX)
    }

    /// What an index says that was made with another limit, or none.
    fn check_entries(&self, index: &Index) -> Result<(), OpenError> {
        let entries = index.entry_count().saturating_sub(1);
        let limit = self.max_entries();
        if entries > limit {
            return Err(self.failed(Error::TooManyEntries { entries, limit }, None));
        }
        Ok(())
    }

    /// That the member called `name`, whose header is at `at`, needs one entry too many.
    pub(super) fn too_many(&self, name: &[u8], at: Plain) -> Error {
        let limit = self.max_entries();
        Error::Tar(tar::Error {
            offset: at,
            cause: tar::Cause::too_many_entries(name, limit),
        })
    }

    /// Where spools lie; `None` when none are wanted, or there is nowhere to put them.
    fn shelf(&self) -> Option<Shelf> {
        share::shelf(&self.options)
    }

    fn spool_options(&self) -> SpoolOptions {
        SpoolOptions {
            queue_bytes: self.queue_bytes(),
            is_only_copy: !self.is_readable(),
            free_list: self.free_list.clone(),
            stats: Arc::clone(&self.stats),
        }
    }

    /// A spool to fill while scanning, unless none is wanted.
    fn new_spool(&self) -> Result<Option<Arc<Spool>>, OpenError> {
        let is_needed = !self.is_readable() && self.options.spooling != Spooling::TreeOnly;
        if !keeps_spans(&*self.source, self.compression()) {
            return Ok(None);
        }
        let Some(shelf) = self.shelf() else {
            return if is_needed {
                Err(self.no_spool(None))
            } else {
                Ok(None)
            };
        };
        match Spool::create(shelf, self.spool_options()) {
            Ok(spool) => Ok(Some(Arc::new(spool))),
            Err(error) if is_needed => Err(self.no_spool(Some(in_words(&error)))),
            Err(error) => {
                tracing::warn!(error = in_words(&error), "nothing is kept on disk");
                Ok(None)
            }
        }
    }

    /// The spool for an index that was found: an earlier mount's, or a new one, which fills as
    /// spans are made.
    fn found_spool(&self, index: &Index) -> Option<Arc<Spool>> {
        let shelf = self.shelf()?;
        if !keeps_spans(&*self.source, Some(index.origin().compression)) {
            return None;
        }
        let spool = if self.source.fingerprint().doubt().is_some() {
            // Of this process alone: nothing tells whether the source still is what others have read.
            Spool::create(shelf, self.spool_options())
        } else {
            Spool::open(shelf, &content(index.origin()), self.spool_options())
        };
        match spool {
            Ok(spool) => Some(Arc::new(spool)),
            Err(error) => {
                tracing::warn!(error = in_words(&error), "nothing is kept on disk");
                None
            }
        }
    }

    fn reader(&self, catalog: Catalog, spool: Option<Arc<Spool>>) -> Reader {
        let (purse, number) = match &self.share {
            Some((share, number)) => (share.purse.clone(), *number),
            None => (Purse::of(&self.options), 0),
        };
        let Purse {
            memory,
            budget,
            broker,
            foreground,
            memory_bytes,
        } = purse;
        // What was made by a saved index that did not fit is nothing to who scans.
        let layer = 2 * number + u16::from(!catalog.is_over());
        let (network, source) = (self.network.clone(), Arc::clone(&self.source));
        let stats = Arc::clone(&self.stats);
        Reader {
            reads: fetch::RangeReader::new(network, source, budget.clone(), stats),
            source: Arc::clone(&self.source),
            catalog,
            memory,
            free_list: self.free_list.clone(),
            spool,
            long_way: Mutex::default(),
            flights: Flights::default(),
            windows: Windows::default(),
            foreground,
            layer,
            leash: Arc::default(),
            network: self.network.clone(),
            budget,
            broker,
            memory_bytes,
            stats: Arc::clone(&self.stats),
            first_read: FirstRead::default(),
            in_use: OnceLock::new(),
            is_closed: AtomicBool::default(),
        }
    }

    /// The archive of `reader`, without a pass.
    fn archive(&self, reader: Arc<Reader>) -> Result<Archive, OpenError> {
        let workers = match &self.share {
            Some((share, _)) => Arc::clone(&share.workers),
            None => share::workers().map_err(OpenError::Threads)?,
        };
        Ok(Archive {
            pass: None,
            prefetch: OnceLock::new(),
            shares_workers: self.share.is_some(),
            workers,
            reader,
        })
    }

    /// What may wait to be written to disk.
    fn queue_bytes(&self) -> u64 {
        share::queue_bytes(&self.options)
    }

    /// Half the memory, which buffers and decoders have while the archive is read.
    pub(super) fn half(&self) -> u64 {
        share::half(&self.options)
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

/// What a spool is found by.
pub(super) fn content(origin: &Origin) -> String {
    if origin.content_id == [0; 32] {
        // Not all of it was seen: it is known by its place and version alone.
        let name = origin.locator.file_name();
        return name.trim_end_matches(".idx").to_owned();
    }
    blake3::Hash::from(origin.content_id).to_hex().to_string()
}

/// An error and its causes.
pub(super) fn in_words(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", in_words(cause)),
        None => error.to_string(),
    }
}
