//! The page caches of all mounts of one archive, as one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::options::PageCache;
use crate::base::sync::Mutex;
use crate::index::{Index, Ino};

/// Page caches, which mounts add, and which go with their mounts.
#[derive(Debug, Default)]
pub(super) struct PageCaches {
    all: Mutex<Arc<[Arc<dyn PageCache>]>>,
    /// Their number, so that a lookup takes no lock.
    count: AtomicUsize,
}

impl PageCaches {
    pub(super) fn add(&self, pages: Arc<dyn PageCache>) {
        let mut all = self.all.lock();
        let kept = all.iter().filter(|pages| pages.is_open()).cloned();
        *all = kept.chain([pages]).collect();
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Whether there are none. Those of mounts that have ended may still count.
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Those of mounts that have not ended. Without the lock, because a store may wait for a reader.
    fn open(&self) -> Arc<[Arc<dyn PageCache>]> {
        let mut all = self.all.lock();
        if !all.iter().all(|pages| pages.is_open()) {
            let kept = all.iter().filter(|pages| pages.is_open()).cloned();
            *all = kept.collect();
            self.count.store(all.len(), Ordering::Relaxed);
        }
        Arc::clone(&all)
    }
}

impl PageCache for PageCaches {
    fn is_open(&self) -> bool {
        !self.open().is_empty()
    }

    fn can_store(&self, ino: Ino) -> bool {
        self.open().iter().any(|pages| pages.can_store(ino))
    }

    fn is_visible(&self, index: &Index, ino: Ino) -> bool {
        self.open().iter().any(|pages| pages.is_visible(index, ino))
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let primed = |pages: &Arc<dyn PageCache>| pages.prime_inodes(files);
        self.open().iter().map(primed).sum()
    }

    fn prime_dentries(&self, index: &Index, ino: Ino) {
        for pages in &*self.open() {
            pages.prime_dentries(index, ino);
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<u64> {
        let mut result = Err(io::ErrorKind::NotConnected.into());
        for pages in &*self.open() {
            // A mount that has the start of a file gets the rest by itself.
            if offset == 0 && !pages.can_store(ino) {
                continue;
            }
            match (pages.store(ino, offset, bytes), &mut result) {
                (Ok(stored), Ok(sum)) => *sum += stored,
                (stored, Err(_)) => result = stored,
                (Err(_), Ok(_)) => {}
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;

    #[derive(Debug, Default)]
    struct FakeCache {
        is_closed: AtomicBool,
        is_full: AtomicBool,
        stored_bytes: AtomicU64,
    }

    impl PageCache for FakeCache {
        fn is_open(&self) -> bool {
            !self.is_closed.load(Ordering::Relaxed)
        }

        fn can_store(&self, _ino: Ino) -> bool {
            !self.is_full.load(Ordering::Relaxed)
        }

        fn is_visible(&self, _index: &Index, _ino: Ino) -> bool {
            true
        }

        fn prime_inodes(&self, files: &[Ino]) -> usize {
            files.len()
        }

        fn prime_dentries(&self, _index: &Index, _ino: Ino) {}

        fn store(&self, _ino: Ino, _offset: u64, bytes: &[u8]) -> io::Result<u64> {
            let len = bytes.len() as u64;
            self.stored_bytes.fetch_add(len, Ordering::Relaxed);
            Ok(len)
        }
    }

    #[test]
    fn each_open_cache_that_lacks_a_file_gets_it() {
        let caches = PageCaches::default();
        assert!(caches.is_empty() && !caches.can_store(Ino(2)));
        assert!(caches.store(Ino(2), 0, b"ab").is_err());
        let all = [(); 3].map(|()| Arc::<FakeCache>::default());
        for cache in &all {
            caches.add(Arc::clone(cache) as Arc<dyn PageCache>);
        }
        assert_eq!(caches.store(Ino(2), 0, b"ab").expect("stored"), 6);
        assert_eq!(caches.prime_inodes(&[Ino(2)]), 3);
        all[0].is_closed.store(true, Ordering::Relaxed);
        all[1].is_full.store(true, Ordering::Relaxed);
        assert_eq!(caches.store(Ino(3), 0, b"c").expect("stored"), 1);
        let stored = all
            .each_ref()
            .map(|cache| cache.stored_bytes.load(Ordering::Relaxed));
        assert_eq!(stored, [2, 2, 3]);
        assert_eq!(Arc::strong_count(&all[0]), 1, "the closed cache is kept");
        for cache in &all {
            cache.is_closed.store(true, Ordering::Relaxed);
        }
        assert!(!caches.is_open() && caches.is_empty());
    }
}
