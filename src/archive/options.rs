//! Options for opening an archive.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::index_source::published_index::PublishedIndex;
use super::open::resources::SharedResources;
use super::peers::Peers;
use super::scan;
use crate::base::memory_budget::Budget;
use crate::base::memory_reclaim::Reserve;
use crate::cache::DiskCacheDir;
use crate::index::store::RowsToLoad;
use crate::index::{MemoryLimit, WhiteoutFormat};

/// Options for opening an archive.
#[derive(Clone, Default, Debug)]
pub struct OpenOptions {
    /// Options of the scan, which runs if no saved index matches. Its memory is that of the whole archive.
    pub scan: scan::Options,
    /// Directory for saved indexes; `None` saves and finds none.
    pub cache_dir: Option<PathBuf>,
    /// Index file to use; no other index is searched for.
    pub index_file: Option<PathBuf>,
    /// Where an index is published, to use if no index is saved.
    pub published_index: Option<PublishedIndex>,
    /// Memory limit for indexes, in addition to the scan's memory.
    pub index_memory: MemoryLimit,
    /// The rows of a saved index that must be in memory when the archive is open.
    pub index_rows: RowsToLoad,
    /// Whether to ignore saved data of unproven version, for a caller that holds files of an earlier scan.
    pub should_rescan_unproven: bool,
    /// Whether to log damaged members, and members that are not in the tree, during the scan.
    pub should_log_problems: bool,
    /// Whether expensive spans are cached on disk.
    pub disk_cache: DiskCacheMode,
    /// Whiteout format, if the archive is a layer. A whiteout removes entries of the layers below.
    pub layer: Option<WhiteoutFormat>,
    /// Memory and threads that the archive shares with others; `None` for its own.
    pub resources: Option<SharedResources>,
    /// Other processes that may have the archive open.
    pub peers: Option<Arc<dyn Peers>>,
}

impl OpenOptions {
    pub(crate) fn budget(&self) -> Budget {
        Budget::new(self.scan.memory)
    }

    /// Leaves `bytes` of memory to buffers and caches. Decoders can borrow as much as before, so nothing fails that
    /// could be decoded.
    pub(crate) fn cut_memory(&mut self, bytes: u64) {
        let decoder_bytes = self.budget().read_decoder_bytes();
        self.scan.memory = bytes;
        let reserve = decoder_bytes.saturating_sub(self.budget().read_decoder_bytes());
        if reserve > 0 {
            self.scan.reclaimers.push(Arc::new(Reserve::new(reserve)));
        }
    }

    /// Creates resources for archives that share the memory of these options. Fails if the system cannot start a
    /// thread.
    pub(crate) fn create_resources(&self) -> io::Result<SharedResources> {
        let share = self.scan.memory_share;
        SharedResources::new(self.budget(), share, &self.scan.reclaimers)
    }

    pub(super) fn disk_cache_dir(&self) -> Option<DiskCacheDir> {
        let DiskCacheMode::Enabled { limit_bytes } = self.disk_cache else {
            return None;
        };
        Some(DiskCacheDir::new(self.cache_dir.as_deref()?, limit_bytes))
    }
}

/// Disk caching of spans that are expensive to fetch or decode again.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub enum DiskCacheMode {
    /// Caches nothing, because the caller wants only the tree.
    #[default]
    IndexOnly,
    /// Writes spans to a file next to the index.
    Enabled {
        /// Limit of all such files together; `None` allows the whole disk but a tenth of it.
        limit_bytes: Option<u64>,
    },
    /// Fetches and decodes spans again whenever they are read.
    Disabled,
}
