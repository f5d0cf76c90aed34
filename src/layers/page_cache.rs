//! The page cache from the view of one layer, with its own inode numbers.

use std::io;
use std::sync::Arc;

use crate::archive::PageCache;
use crate::index::{Index, Ino, LayerIno, MergedIndex};

/// Page cache of the visible files of a layer.
#[derive(Debug)]
pub(super) struct LayerPageCache {
    pub(super) layer: u32,
    pub(super) merged: Arc<MergedIndex>,
    pub(super) pages: Arc<dyn PageCache>,
}

impl LayerPageCache {
    /// The inode number that the kernel uses for entry `ino`; `None` when it is not visible.
    fn merged_ino(&self, ino: Ino) -> Option<Ino> {
        self.merged.merged_ino(LayerIno {
            layer: self.layer,
            ino,
        })
    }
}

impl PageCache for LayerPageCache {
    fn can_store(&self, ino: Ino) -> bool {
        self.merged_ino(ino)
            .is_some_and(|ino| self.pages.can_store(ino))
    }

    fn is_visible(&self, _index: &Index, ino: Ino) -> bool {
        let index = &self.merged.index;
        self.merged_ino(ino)
            .is_some_and(|ino| self.pages.is_visible(index, ino))
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let seen: Vec<_> = files
            .iter()
            .filter_map(|&ino| self.merged_ino(ino))
            .collect();
        self.pages.prime_inodes(&seen)
    }

    fn prime_dentries(&self, _index: &Index, ino: Ino) {
        if let Some(ino) = self.merged_ino(ino) {
            self.pages.prime_dentries(&self.merged.index, ino);
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.merged_ino(ino) {
            Some(ino) => self.pages.store(ino, offset, bytes),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }
}
