//! The receiver of the files of a walk.

use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::level::Level;

use crate::tree::interface::{Batch, Name, Tree};
use crate::tree::item::{Item, Place};

/// Names of a directory that one thread visits at once, if that takes system calls.
pub(crate) const CALL_CHUNK: usize = 64;
/// Likewise, if it takes none.
const CHUNK: usize = 4096;

/// Names of an open directory, for a [`Visitor`].
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
pub struct Visit<'a, T: Tree, S> {
    pub(super) tree: &'a T,
    /// The directory.
    pub level: &'a Arc<Level<T, S>>,
    /// The same, while it is open.
    pub place: Place<'a, T>,
    pub(super) batch: &'a Batch,
    pub(super) numbers: Range<usize>,
}

impl<T: Tree, S> Visit<'_, T, S> {
    /// The names with their numbers, as [`Visitor::visit`] is to give them.
    pub fn names(&self) -> impl Iterator<Item = (usize, Name<'_>)> {
        let numbers = self.numbers.clone();
        numbers.filter_map(|number| Some((number, self.batch.get(number)?)))
    }

    /// The files with the numbers of their names.
    pub fn items(&self) -> impl Iterator<Item = (usize, Item<'_, T>)> {
        let names = self.names();
        names.map(|(number, name)| (number, Item::in_directory(self.tree, &self.place, name)))
    }

    /// The place of the name with this number among all names of the directory.
    pub fn place_of(&self, number: usize) -> u64 {
        self.batch.first().saturating_add(number as u64)
    }
}

/// Receives the files of a walk, in several threads.
pub trait Visitor<T: Tree>: Send + Sync + 'static {
    /// State of a directory, from its opening until it is left.
    type State: Send + Sync + 'static;

    /// Whether a visit takes system calls for each name. Then a thread visits fewer names at once.
    fn makes_calls(&self) -> bool {
        true
    }

    /// Whether one thread visits all names, whatever number of threads is asked for.
    fn is_sequential(&self) -> bool {
        false
    }

    /// Number of trees in which a directory is open for each one of the walk, which is one of them.
    fn open_trees(&self) -> usize {
        1
    }

    /// Most names of a directory that one thread visits at once.
    fn chunk(&self) -> usize {
        if self.makes_calls() {
            CALL_CHUNK
        } else {
            CHUNK
        }
    }

    /// Visits names of a directory. Adds to `descend` the numbers of the directories to walk next, with their states.
    /// A break ends the walk.
    fn visit(
        &self,
        names: &Visit<'_, T, Self::State>,
        descend: &mut Vec<(usize, Self::State)>,
    ) -> ControlFlow<()>;

    /// Whether a directory is done, after all below it has been visited and left. Otherwise it is read again, from
    /// its beginning.
    fn is_done(&self, _: &Arc<Level<T, Self::State>>) -> bool {
        true
    }

    /// Leaves a directory, when all below it has been visited and left.
    fn leave(&self, _: &Arc<Level<T, Self::State>>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// Reports and leaves a directory that could not be opened.
    fn skip(&self, level: &Arc<Level<T, Self::State>>, error: io::Error) -> ControlFlow<()> {
        self.report(&level.path(), error);
        self.leave(level)
    }

    /// Reports that the directory at `path` cannot be opened or read.
    fn report(&self, path: &[u8], error: io::Error);

    /// Reports that the file at `path` cannot be examined.
    fn report_file(&self, path: &[u8], error: io::Error) {
        self.report(path, error);
    }
}
