//! The interface of the kernel's page cache.

use std::fmt;
use std::io;

use crate::index::{Index, Ino};

/// The kernel's page cache, which answers reads of pushed files without a request.
pub trait PageCache: Send + Sync + fmt::Debug {
    /// Whether the file can be stored, and was not stored yet.
    fn can_store(&self, ino: Ino) -> bool;

    /// Whether the mounted subtree contains the file.
    fn is_visible(&self, index: &Index, ino: Ino) -> bool;

    /// Makes these regular files storable if possible, and returns how many were not before. The caller must
    /// not hold an [`IndexGuard`](crate::archive::IndexGuard) of a growing index.
    fn prime_inodes(&self, files: &[Ino]) -> usize;

    /// Primes the dentries of `ino` and of the following names in its directory, so that opens need no
    /// lookups. Does nothing if too few names follow to be worth it.
    fn prime_dentries(&self, index: &Index, ino: Ino);

    /// Stores `bytes` from `offset` on, in whole pages except at the end of the file. May wait for a reader
    /// of the same page.
    ///
    /// # Errors
    /// When they cannot be stored.
    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()>;
}
