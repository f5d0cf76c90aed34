//! Several archives as one tree: the layers of an image, or of an overlay.
//!
//! Opening merges the indexes of the layers into one, which all modules above use like any other.

mod comparison;
mod merge;
mod open;

use std::io;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::archive::BuiltIndex;
use crate::archive::{
    AccessLog, AccessedRange, Archive, Callback, Compared, IndexGuard, IsWanted, MemoryUse,
    PageCache, PrefetchMode, PrefetchOptions, ReadError, ReadReply, TreePart, Volume, WaitFor,
};
use crate::base::extent::Plain;
use crate::base::sync::Mutex;
use crate::index::MissingRow;
use crate::index::{Index, Ino, LayerIno, LazyIndex, MergedIndex};
use comparison::LayerComparison;

pub use crate::index::WhiteoutFormat;
pub use merge::merge;
pub use open::{Layer, LayeredArchiveError};

/// Archives merged into one tree, all completely indexed.
#[derive(Debug)]
pub struct LayeredArchive {
    /// From the bottom.
    layers: Vec<Arc<Archive>>,
    merged: Arc<MergedIndex>,
    /// Comparison with layers whose indexes others made.
    comparison: Option<Arc<LayerComparison>>,
    /// Accesses to files of all layers in one order, if they are recorded.
    access_log: OnceLock<Mutex<AccessLog>>,
}

impl LayeredArchive {
    /// The layer that contains entry `ino`, and the entry's number there.
    fn locate(&self, ino: Ino) -> Option<(&Arc<Archive>, Ino)> {
        let layer_ino = self.merged.layer_ino(ino)?;
        Some((self.layers.get(layer_ino.layer as usize)?, layer_ino.ino))
    }

    /// Divides `accesses` among the layers, from the bottom, with the inode numbers of each.
    fn split_accesses(&self, accesses: Vec<AccessedRange>) -> Vec<Vec<AccessedRange>> {
        let mut of_layers = vec![Vec::new(); self.layers.len()];
        for access in accesses {
            if let Some(LayerIno { layer, ino }) = self.merged.layer_ino(access.ino)
                && let Some(of_layer) = of_layers.get_mut(layer as usize)
            {
                of_layer.push(AccessedRange { ino, ..access });
            }
        }
        of_layers
    }
}

impl Volume for LayeredArchive {
    fn index(&self) -> IndexGuard<'_> {
        IndexGuard::new(BuiltIndex::Complete(&self.merged.index))
    }

    fn complete_index(&self) -> Option<LazyIndex> {
        Some(LazyIndex::new(Arc::clone(&self.merged.index)))
    }

    fn is_scan_over(&self) -> bool {
        true
    }

    fn on_available(&self, _awaited: WaitFor, then: Callback) {
        then.run();
    }

    fn cut_offset(&self, ino: Ino) -> Result<Option<u64>, MissingRow> {
        let (Some(found), Some(entry)) = (self.merged.layer_ino(ino), self.merged.index.entry(ino))
        else {
            return Ok(None);
        };
        let layers = self
            .layers
            .iter()
            .take((found.layer as usize).saturating_add(1));
        let lens = layers.map(|layer| layer.index().origin().plain_bytes);
        let end = Plain(lens.fold(0, u64::saturating_add));
        Ok(entry.cut_offset(end))
    }

    fn is_merged(&self) -> bool {
        true
    }

    fn is_compared(&self) -> bool {
        self.comparison.is_some()
    }

    fn must_compare(&self, part: TreePart<'_>) -> bool {
        let comparison = self.comparison.as_ref();
        comparison.is_some_and(|comparison| comparison.must_compare(part))
    }

    fn compare(&self, part: TreePart<'_>, done: Compared) {
        match &self.comparison {
            Some(comparison) => comparison.compare(part, done),
            None => done(Ok(())),
        }
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        if self.must_compare(TreePart::Entry(ino)) {
            return None;
        }
        match self.locate(ino) {
            Some((layer, ino)) => layer.try_read(ino, offset, len),
            None => Some(Err(ReadError::NotAFile)),
        }
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply) {
        let Some((layer, layer_ino)) = self.locate(ino) else {
            return done(Err(ReadError::NotAFile));
        };
        if !self.must_compare(TreePart::Entry(ino)) {
            return layer.read(layer_ino, offset, len, wanted, done);
        }
        let layer = Arc::clone(layer);
        let read = move |compared: Result<(), ReadError>| match compared {
            Ok(()) => layer.read(layer_ino, offset, len, wanted, done),
            Err(error) => done(Err(error)),
        };
        self.compare(TreePart::Entry(ino), Box::new(read));
    }

    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        self.compare_blocking(TreePart::Entry(ino))?;
        let (layer, ino) = self.locate(ino).ok_or(ReadError::NotAFile)?;
        layer.read_blocking(ino, offset, len)
    }

    /// Resolves the profile at once. Each layer replays its part in order, at the same time as the others.
    fn start_prefetch(&self, options: PrefetchOptions) -> io::Result<()> {
        if options.record {
            self.access_log.get_or_init(Mutex::default);
        }
        let accesses = options.replay.map(|profile| profile(&self.merged.index));
        let replays = self.split_accesses(accesses.unwrap_or_default());
        let layers = self.layers.len() as u64;
        let busy_layers = match options.mode {
            PrefetchMode::All => layers,
            _ => replays.iter().filter(|replay| !replay.is_empty()).count() as u64,
        };
        for (layer, replay) in self.layers.iter().zip(replays) {
            layer.start_prefetch(PrefetchOptions {
                mode: options.mode,
                bytes_per_second: options.bytes_per_second.map(|rate| rate.div_ceil(layers)),
                replay: (!replay.is_empty()).then(|| Box::new(move |_: &Index| replay) as _),
                record: false,
                other_archives: busy_layers.saturating_sub(1),
            })?;
        }
        Ok(())
    }

    fn accesses_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        self.access_log.get()?.lock().ranges_since(reads)
    }

    fn report_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(access_log) = self.access_log.get() {
            let size = self.merged.index.entry(ino).map(|entry| entry.size());
            let size = size.unwrap_or_default();
            access_log.lock().add_read(ino, size, offset, len);
        }
        if let Some((layer, ino)) = self.locate(ino) {
            layer.report_read(ino, offset, len);
        }
    }

    fn report_lookup(&self, ino: Ino) {
        if let Some((layer, ino)) = self.locate(ino) {
            layer.report_lookup(ino);
        }
    }

    fn add_page_cache(&self, pages: Arc<dyn PageCache>) {
        if self.access_log.get().is_some() {
            return;
        }
        for (number, layer) in (0_u32..).zip(&self.layers) {
            layer.add_page_cache(Arc::new(LayerPageCache {
                layer: number,
                merged: Arc::clone(&self.merged),
                pages: Arc::clone(&pages),
            }));
        }
    }

    fn archives(&self) -> Vec<&Archive> {
        self.layers.iter().map(|layer| &**layer).collect()
    }

    /// The layers share all memory except that of their indexes.
    fn memory_use(&self) -> MemoryUse {
        let uses = self.layers.iter().map(|layer| layer.memory_use());
        let layer_indexes: u64 = uses.clone().map(|layer| layer.index_bytes).sum();
        let merged = self.merged.memory_bytes() + self.merged.index.memory_bytes();
        MemoryUse {
            index_bytes: layer_indexes + merged as u64,
            ..uses.into_iter().next().unwrap_or_default()
        }
    }

    fn close(&self) {
        self.layers.iter().for_each(|layer| layer.close());
    }
}

/// The page cache from the view of one layer, with its own inode numbers.
#[derive(Debug)]
struct LayerPageCache {
    layer: u32,
    merged: Arc<MergedIndex>,
    pages: Arc<dyn PageCache>,
}

impl LayerPageCache {
    /// The inode number that the kernel uses for entry `ino`; `None` when it is not visible.
    fn merged_ino(&self, ino: Ino) -> Option<Ino> {
        let layer = self.layer;
        self.merged.merged_ino(LayerIno { layer, ino })
    }
}

impl PageCache for LayerPageCache {
    fn is_open(&self) -> bool {
        self.pages.is_open()
    }

    fn can_store(&self, ino: Ino) -> bool {
        let ino = self.merged_ino(ino);
        ino.is_some_and(|ino| self.pages.can_store(ino))
    }

    fn is_visible(&self, _index: &Index, ino: Ino) -> bool {
        let ino = self.merged_ino(ino);
        ino.is_some_and(|ino| self.pages.is_visible(&self.merged.index, ino))
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let visible = files.iter().filter_map(|&ino| self.merged_ino(ino));
        self.pages.prime_inodes(&visible.collect::<Vec<_>>())
    }

    fn prime_dentries(&self, _index: &Index, ino: Ino) {
        if let Some(ino) = self.merged_ino(ino) {
            self.pages.prime_dentries(&self.merged.index, ino);
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<u64> {
        match self.merged_ino(ino) {
            Some(ino) => self.pages.store(ino, offset, bytes),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }
}
