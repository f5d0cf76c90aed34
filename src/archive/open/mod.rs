//! Opens an archive.
//! 1. The opener looks for a saved index that still matches the source.
//! 2. With or without one, it builds the reader, with the memory and threads of [`resources`].
//! 3. Without one, it starts the background scan, which completes the reader's index and saves it.

pub(super) mod background_scan;
mod imported_index;
pub(super) mod opener;
mod published_opener;
pub(super) mod resources;

use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

use self::background_scan::BackgroundScan;
use self::opener::{Opener, locator};
use super::Archive;
use super::directory::ScanTurn;
use super::error::OpenError;
use super::live_index::{Callback, LiveIndex, WaitFor};
use super::options::OpenOptions;
use super::read::Reader;
use super::scan::disk_cache_policy::ScanDiskCache;
use crate::base::buffer_pool::BufferPool;
use crate::base::free_list::FreeList;
use crate::base::stats::Stats;
use crate::index::store::{RowsToLoad, Store};
use crate::index::{self, Builder, Index};
use crate::source::{Access, Source};

/// Maximum number of damaged members that are logged. All are counted.
const MAX_LOGGED_PROBLEMS: u64 = 10_000;

impl Archive {
    /// Opens the archive at `source`, with a matching saved index or by a scan, whose index it saves. If
    /// saving fails, the archive has a note for the user, and no error.
    ///
    /// # Errors
    /// When the archive cannot be read, or `options` cannot be met.
    pub fn open(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let archive = Self::open_early(source, options, network, stats)?;
        archive.wait_for(WaitFor::End, options.index_rows)
    }

    /// As [`Archive::open`], for one of several layers. During the scan the archive also has the memory that
    /// `options` give. Returns when the tree is known, and saves the index in the background.
    pub(crate) fn open_layer(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let awaited = whole_tree(&*source);
        let archive = Self::open_early(source, options, network, stats)?;
        archive.wait_for(awaited, RowsToLoad::All)
    }

    fn wait_for(self, awaited: WaitFor, rows: RowsToLoad) -> Result<Self, OpenError> {
        self.reader.live_index.wait_for(awaited);
        self.check_scan_result()?;
        let index = self.reader.live_index.completed();
        if let Some(index) = index.filter(|_| rows == RowsToLoad::All) {
            index.tree().map_err(OpenError::IndexRows)?;
        }
        Ok(self)
    }

    /// As [`Archive::open`], but returns when the scan has found the first member. With an expected digest,
    /// it returns only after the whole archive has been verified.
    ///
    /// # Errors
    /// As [`Archive::open`], if the scan found no member, or not the expected digest. [`Archive::failure`] returns
    /// other errors of the scan, however soon they come.
    pub fn open_early(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        match Self::open_indexed(source, options, network, stats)? {
            Ok(archive) => Ok(archive),
            Err(unscanned) => unscanned.scan_with_own_memory(),
        }
    }

    /// Shows `index`, whose entries are no files, with the resources of `options`.
    pub(crate) fn with_index(
        index: Index,
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let opener = Opener::new(source, options, network, stats);
        let reader = opener.build_reader(LiveIndex::complete(index), None, None);
        opener.build_archive(Arc::new(reader))
    }

    /// As [`Archive::open_early`], but without a scan. Returns the archive to scan if it has no index.
    pub(crate) fn open_indexed(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Result<Self, UnscannedArchive>, OpenError> {
        let opener = Opener::new(source, options, network, stats);
        let options = &opener.options;
        let found = if let Some(path) = &options.index_file {
            opener.open_index_file(path)?
        } else {
            let saved = opener.find_saved_index()?;
            let found =
                saved.map_or_else(|| opener.find_peer_index(), |reader| Ok(Some(reader)))?;
            if let Some(reader) = &found {
                opener.check_limits(&reader.live_index.lock())?;
            }
            match found {
                Some(reader) => Some(reader),
                None => opener.open_published_index()?,
            }
        };
        match found {
            Some(reader) => {
                opener.check_decoder_memory(&reader)?;
                Ok(Ok(opener.build_archive(Arc::new(reader))?))
            }
            None => Ok(Err(UnscannedArchive(opener))),
        }
    }
}

/// An archive without an index.
pub(crate) struct UnscannedArchive(Opener);

impl UnscannedArchive {
    /// Returns the archive when the scan has found the first member, as [`Archive::open_early`] does.
    pub(crate) fn scan(mut self, turn: ScanTurn) -> Result<Archive, OpenError> {
        if turn == ScanTurn::Spare {
            // The scan borrows all that it needs.
            self.0.options.scan.memory = 0;
        }
        self.0.start_scan()
    }

    /// As [`Self::scan`], but waits until archives with the same resources leave memory for the scan.
    fn scan_with_own_memory(self) -> Result<Archive, OpenError> {
        let bytes = self.0.options.budget().half();
        let resources = self.0.resources.clone();
        let memory = resources.map(|(resources, _)| resources.wait_for_scan_memory(bytes));
        let archive = self.scan(ScanTurn::Regular)?;
        archive
            .reader
            .live_index
            .on_available(WaitFor::End, Callback::new(move || drop(memory)));
        Ok(archive)
    }
}

/// The event after which the whole tree of `source` is known, and all its bytes can be read.
fn whole_tree(source: &dyn Source) -> WaitFor {
    match source.access() {
        // Its bytes are only in the disk cache, which the scan checks last.
        Access::Stream => WaitFor::End,
        Access::Ranges => WaitFor::Index,
    }
}

impl Opener {
    fn new(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Self {
        let resources = options.resources.clone();
        let resources = resources.map(|resources| {
            let number = resources.next_number();
            (resources, number)
        });
        let options = OpenOptions {
            scan: options.scan.for_source(&*source),
            ..options.clone()
        };
        let (free_list, write_pool) = match &resources {
            Some((resources, _)) => (resources.free_list.clone(), resources.write_pool.clone()),
            None => (
                FreeList::new(options.budget().free_list_bytes()),
                BufferPool::new(options.budget().queue_bytes()),
            ),
        };
        let store = options.cache_dir.as_deref().map(Store::new);
        Self {
            locator: locator(&*source, &options),
            store: store.map(|store| store.of_archive(source.info().location.local_path())),
            source,
            options,
            network: network.clone(),
            stats: Arc::clone(stats),
            resources,
            free_list,
            write_pool,
        }
    }

    /// A builder for the options of the archive. Readers during a scan need replaced entries, too.
    fn builder(&self, keeps_replaced: bool) -> Builder {
        Builder::new(index::Options {
            keeps_replaced,
            whiteouts: self.options.layer,
            // The builder also counts the root and number 0.
            max_entries: u32::try_from(self.max_entries() + 2).unwrap_or(u32::MAX),
            max_reported_problems: if self.options.should_log_problems {
                MAX_LOGGED_PROBLEMS
            } else {
                0
            },
            ..index::Options::default()
        })
        .with_memory_limit(&self.options.index_memory)
    }

    fn start_scan(self) -> Result<Archive, OpenError> {
        let disk_cache = self.create_disk_cache()?;
        let cached = disk_cache.clone();
        let disk_cache_writer = cached.map(|disk_cache| {
            ScanDiskCache::new(disk_cache, &*self.source, Arc::clone(&self.stats))
        });
        let builder = self.builder(true);
        let reader =
            Arc::new(self.build_reader(LiveIndex::growing(builder, &self.stats), disk_cache, None));
        let mut archive = self.build_archive(Arc::clone(&reader))?;
        let is_whole_awaited = self.options.scan.expects_digest();
        let awaited = if is_whole_awaited {
            whole_tree(&*self.source)
        } else {
            WaitFor::Member
        };
        let background_scan =
            BackgroundScan::start(self, disk_cache_writer, reader).map_err(OpenError::Threads)?;
        archive.background_scan = Some(background_scan);
        let live_index = &archive.reader.live_index;
        live_index.wait_for(awaited);
        if is_whole_awaited || !live_index.has(&WaitFor::Member) {
            archive.check_scan_result()?;
        }
        Ok(archive)
    }

    fn build_archive(&self, reader: Arc<Reader>) -> Result<Archive, OpenError> {
        let read_threads = match &self.resources {
            Some((resources, _)) => Arc::clone(&resources.read_threads),
            None => resources::start_read_threads().map_err(OpenError::Threads)?,
        };
        published_opener::load_in_background(&reader, &read_threads);
        Ok(Archive {
            background_scan: None,
            prefetch: OnceLock::new(),
            fill_threads: self
                .resources
                .as_ref()
                .map(|(shared, _)| Arc::clone(&shared.fill_threads)),
            read_threads,
            reader,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemorySource;

    #[test]
    fn scan_waits_until_other_scans_leave_memory() {
        // The scan fetches on its own thread.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let runtime = runtime.expect("a runtime");
        let mut options = OpenOptions::default();
        let resources = options.create_resources().expect("threads");
        options.resources = Some(resources.clone());
        let taken = resources.wait_for_scan_memory(options.budget().half());
        let source: Arc<dyn Source> = Arc::new(MemorySource::new("a.tar", &b""[..]));
        let was_left = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The archive is empty, which is an error of the scan.
                let opened = Archive::open(source, &options, runtime.handle(), &Arc::default());
                assert!(opened.is_err() && was_left.load(std::sync::atomic::Ordering::SeqCst));
            });
            was_left.store(true, std::sync::atomic::Ordering::SeqCst);
            drop(taken);
        });
    }

    // Promises: archives-memory
    #[test]
    fn archives_with_shared_resources_queue_disk_writes_in_one_pool() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("a runtime");
        let mut options = OpenOptions::default();
        let queue_bytes = options.budget().queue_bytes();
        options.resources = Some(options.create_resources().expect("threads"));
        // Each scan has half the memory.
        options.scan.memory /= 2;
        let source: Arc<dyn Source> = Arc::new(MemorySource::new("a.tar", &b""[..]));
        let pools = [(); 2].map(|()| {
            let source = Arc::clone(&source);
            Opener::new(source, &options, runtime.handle(), &Arc::default()).write_pool
        });
        let _reserved = pools[0].reserve(queue_bytes).expect("open");
        assert_eq!(pools[1].used_bytes(), queue_bytes);
        assert_eq!(pools[1].budget(), queue_bytes);
    }
}
