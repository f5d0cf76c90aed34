//! An index whose rows may have to be loaded when they are used.

use std::ops::Deref;
use std::sync::Arc;

use super::on_demand::{MissingRow, with_loading};
use crate::index::tree::Index;

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
        if self.0.is_on_demand() {
            with_loading(|| access(&self.0))
        } else {
            Ok(access(&self.0))
        }
    }

    /// The index with all rows of its tree in memory.
    ///
    /// # Errors
    /// When one of them cannot be loaded.
    pub fn tree(&self) -> Result<&Index, MissingRow> {
        self.0.load_tree_rows()?;
        Ok(&self.0)
    }
}
