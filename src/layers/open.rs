//! Opens all layers, as many at once as memory allows, and merges them.

use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

use super::LayeredArchive;
use super::comparison::LayerComparison;
use super::merge::merge;
use crate::archive::scan::Digest;
use crate::archive::{Archive, OpenError, OpenOptions, PublishedIndex, SharedResources, Volume};
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::index::{Index, LazyIndex, MergeError, WhiteoutFormat};
use crate::index::{MissingRow, WITHOUT_PUBLISHED_INDEX};
use crate::source::Source;

/// A layer to open.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Where its bytes come from.
    pub source: Arc<dyn Source>,
    /// How to treat the SHA-256 of its bytes.
    pub digest: Digest,
    /// Where its index is published.
    pub published_index: Option<PublishedIndex>,
}

/// Why layers cannot be merged into one tree.
#[derive(Debug, thiserror::Error)]
pub enum LayeredArchiveError {
    /// One of them cannot be opened.
    #[error(transparent)]
    Layer(#[from] OpenError),
    /// They have too many entries for one tree, or exceed the memory limit.
    #[error(transparent)]
    Merge(#[from] MergeError),
    /// They exceed the limit on entries.
    #[error("the layers together have {entries} entries, and {limit} are allowed")]
    TooManyEntries {
        /// Number of their entries.
        entries: u64,
        /// The limit.
        limit: u64,
    },
    /// They exceed the limit on bytes of files.
    #[error("the files of the layers together have {bytes} bytes, and {limit} are allowed")]
    TooLarge {
        /// Bytes of their files, holes included.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The layers are more than layer numbers.
    #[error("there are {0} layers, and {most} are the most", most = u16::MAX)]
    TooManyLayers(usize),
    /// The published index of a layer cannot be loaded.
    #[error(
        "cannot load the published index of a layer; leave it out ({})",
        WITHOUT_PUBLISHED_INDEX
    )]
    IndexRows(#[source] MissingRow),
    /// No thread could be started.
    #[error("cannot start a thread")]
    Threads(#[source] std::io::Error),
}

impl LayeredArchive {
    /// Opens `layers`, from the bottom, and merges them as `whiteouts` says. They share the memory of
    /// `options`. The limit on entries holds for each layer, and for all together.
    ///
    /// # Errors
    /// When a layer cannot be opened, or the merge fails. Reports the lowest failed layer of those tried.
    pub fn open(
        layers: &[Layer],
        options: &OpenOptions,
        whiteouts: WhiteoutFormat,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, LayeredArchiveError> {
        let Ok(count) = u16::try_from(layers.len()) else {
            return Err(LayeredArchiveError::TooManyLayers(layers.len()));
        };
        let own = options.resources.clone();
        let share = own.map_or_else(|| options.create_resources(), Ok);
        let share = share.map_err(LayeredArchiveError::Threads)?;
        let opener = Arc::new(Opener {
            layers: (0..count).zip(layers.iter().cloned()).collect(),
            share,
            network: network.clone(),
            stats: Arc::clone(stats),
            whiteouts,
            queue: Mutex::new(Queue {
                next: 0,
                results: layers.iter().map(|_| None).collect(),
                has_failed: false,
            }),
        });
        let layers = opener.open_all(options)?;
        let limits = &options.scan.tar.limits;
        let sum = |count: fn(&Archive) -> u64| {
            let counts = layers.iter().map(|layer| count(layer));
            counts.fold(0, u64::saturating_add)
        };
        let (entries, limit) = (sum(|layer| layer.index().member_count()), limits.entries);
        if entries > limit {
            return Err(LayeredArchiveError::TooManyEntries { entries, limit });
        }
        let (bytes, limit) = (sum(|layer| layer.index().file_bytes()), limits.size);
        if bytes > limit {
            return Err(LayeredArchiveError::TooLarge { bytes, limit });
        }
        let indexes = layers.iter().filter_map(|layer| layer.complete_index());
        let indexes: Vec<_> = indexes.collect();
        let indexes = indexes.iter().map(LazyIndex::tree);
        let indexes: Vec<&Index> = indexes
            .collect::<Result<_, _>>()
            .map_err(LayeredArchiveError::IndexRows)?;
        let merged = Arc::new(merge(&indexes, whiteouts, &options.index_memory)?);
        let comparison = LayerComparison::new(&layers, &merged);
        Ok(Self {
            layers,
            merged,
            comparison,
            access_log: OnceLock::new(),
        })
    }
}

#[derive(Debug)]
struct Opener {
    /// Each with its number from the bottom.
    layers: Vec<(u16, Layer)>,
    share: SharedResources,
    network: Handle,
    stats: Arc<Stats>,
    whiteouts: WhiteoutFormat,
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Queue {
    next: usize,
    results: Vec<Option<Result<Archive, OpenError>>>,
    /// Whether a layer failed, so that no more need to be opened.
    has_failed: bool,
}

impl Opener {
    fn open_all(
        self: &Arc<Self>,
        options: &OpenOptions,
    ) -> Result<Vec<Arc<Archive>>, LayeredArchiveError> {
        // Minimum memory of a scan. Readers need none, because there are none during the scans.
        let concurrency = options.budget().scan_count(self.layers.len() as u64);
        let mut layer_options = options.clone();
        layer_options.scan.memory = options.scan.memory / concurrency;
        let mut threads = Vec::new();
        for _ in 0..concurrency {
            let (opener, options) = (Arc::clone(self), layer_options.clone());
            match Thread::spawn("tarfs-layer", move || opener.open_from_queue(&options)) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => {
                    return Err(LayeredArchiveError::Threads(error));
                }
                // The threads started so far open all layers.
                Err(_) => break,
            }
        }
        for thread in threads {
            thread.join();
        }
        let result = std::mem::take(&mut self.queue.lock().results);
        let mut layers = Vec::new();
        for (layer, result) in self.layers.iter().zip(result) {
            // Retries with all memory if the layer's decoder needs more than its share.
            let needs_more =
                |result: &Result<_, _>| result.as_ref().is_err_and(OpenError::is_out_of_memory);
            let result = result.filter(|result| concurrency == 1 || !needs_more(result));
            let archive = result.unwrap_or_else(|| self.open(layer, options))?;
            layers.push(Arc::new(archive));
        }
        Ok(layers)
    }

    fn open_from_queue(&self, options: &OpenOptions) {
        loop {
            let layer = {
                let mut queue = self.queue.lock();
                let layer = self.layers.get(queue.next).filter(|_| !queue.has_failed);
                let Some(layer) = layer else {
                    return;
                };
                queue.next += 1;
                layer
            };
            let result = self.open(layer, options);
            let mut queue = self.queue.lock();
            if let Err(error) = &result {
                queue.has_failed |= !error.is_out_of_memory();
            }
            if let Some(slot) = queue.results.get_mut(usize::from(layer.0)) {
                *slot = Some(result);
            }
        }
    }

    fn open(&self, (_, layer): &(u16, Layer), options: &OpenOptions) -> Result<Archive, OpenError> {
        let mut options = options.clone();
        options.scan.sha256 = layer.digest;
        options.published_index.clone_from(&layer.published_index);
        options.layer = Some(self.whiteouts);
        options.scan.tar.accepts_empty = true;
        options.resources = Some(self.share.clone());
        let source = Arc::clone(&layer.source);
        Archive::open_layer(source, &options, &self.network, &self.stats)
    }
}
