//! An index whose rows may have to be loaded when they are used.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use super::{Index, Ino, Origin};
use crate::index::problem::Problem;
use crate::index::storage::{MissingRow, find_missing};

/// An index whose rows may have to be loaded.
///
/// Its rows are seen only by functions that return no reference to them, and whose result is replaced by an error if a
/// row was missing. So a row that cannot be loaded never looks like one that does not exist.
#[derive(Clone, Debug)]
pub struct LazyIndex<I = Arc<Index>>(I);

impl<I: Deref<Target = Index>> LazyIndex<I> {
    /// `index`, of which any part may be loaded.
    pub fn new(index: I) -> Self {
        Self(index)
    }

    /// The result of `access`, which waits for rows.
    ///
    /// # Errors
    /// When one of the rows cannot be loaded.
    pub fn read<T>(&self, access: impl FnOnce(&Index) -> T) -> Result<T, MissingRow> {
        find_missing(true, || access(&self.0))
    }

    /// The result of `access`, which does not wait for rows. Accesses within it do not wait either.
    ///
    /// # Errors
    /// When one of the rows is not loaded.
    pub fn try_read<T>(&self, access: impl FnOnce(&Index) -> T) -> Result<T, MissingRow> {
        find_missing(false, || access(&self.0))
    }

    /// The index with all rows of its tree in memory. Those that only reads of contents need may be missing.
    ///
    /// # Errors
    /// When one of them cannot be loaded.
    pub fn tree(&self) -> Result<&Index, MissingRow> {
        self.read(Index::load_tree_rows)?;
        Ok(&self.0)
    }

    /// As [`Self::tree`], for callers that keep it.
    ///
    /// # Errors
    /// When one of the rows cannot be loaded.
    pub fn into_tree(self) -> Result<I, MissingRow> {
        self.tree()?;
        Ok(self.0)
    }

    /// As [`Index::load_next_rows`].
    ///
    /// # Errors
    /// When they cannot be loaded.
    pub fn load_next_rows(&self) -> io::Result<bool> {
        self.0.load_next_rows()
    }
}

/// Methods of [`Index`] that use no rows.
macro_rules! without_rows {
    ($($name:ident: $type:ty),* $(,)?) => {
        impl<I: Deref<Target = Index>> LazyIndex<I> {
            $(
                #[doc = concat!("As [`Index::", stringify!($name), "`].")]
                pub fn $name(&self) -> $type {
                    self.0.$name()
                }
            )*
        }
    };
}

without_rows! {
    origin: &Origin,
    is_complete: bool,
    is_on_demand: bool,
    is_published: bool,
    published_bytes: u64,
    entry_count: u64,
    member_count: u64,
    file_bytes: u64,
    stored_bytes: u64,
    problem_count: u64,
    problems: &[Problem],
    memory_bytes: usize,
    has_xattrs: bool,
    span_count: u32,
    last_ino: Ino,
    block_len: u64,
}
