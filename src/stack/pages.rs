//! The page cache as one layer sees it: by its own numbers.

use std::io;
use std::sync::Arc;

use crate::archive::PageCache;
use crate::index::{Index, Ino, Merged, Place};

/// Pages of the files that are seen of a layer.
#[derive(Debug)]
pub(super) struct LayerPages {
    pub(super) layer: u32,
    pub(super) merged: Arc<Merged>,
    pub(super) pages: Arc<dyn PageCache>,
}

impl LayerPages {
    /// The number by which the kernel knows entry `ino` of the layer; `None` when that is not seen.
    fn number(&self, ino: Ino) -> Option<Ino> {
        self.merged.number(Place {
            layer: self.layer,
            ino,
        })
    }
}

impl PageCache for LayerPages {
    fn can_store(&self, ino: Ino) -> bool {
        self.number(ino).is_some_and(|ino| self.pages.can_store(ino))
    }

    fn is_visible(&self, _index: &Index, ino: Ino) -> bool {
        let index = &self.merged.index;
        self.number(ino)
            .is_some_and(|ino| self.pages.is_visible(index, ino))
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let seen: Vec<_> = files.iter().filter_map(|&ino| self.number(ino)).collect();
        self.pages.prime_inodes(&seen)
    }

    fn prime_dentries(&self, _index: &Index, ino: Ino) {
        if let Some(ino) = self.number(ino) {
            self.pages.prime_dentries(&self.merged.index, ino);
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.number(ino) {
            Some(ino) => self.pages.store(ino, offset, bytes),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }
}
