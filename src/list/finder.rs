//! A walk that evaluates an expression of `find` on every file.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::find::{Expression, Outcome};
use super::item::Item;
use super::output::SharedOutput;
use super::parallel_walk::{Level, Visitor};
use super::tree::{Batch, Candidate, FileKind, Name, Tree};

/// Evaluates an expression on the files of a walk.
#[derive(Debug)]
pub struct Finder<T> {
    tree: Arc<T>,
    expression: Expression,
    output: Arc<SharedOutput>,
}

/// A directory of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FoundDirectory {
    /// The file system of its starting point, for `-xdev`.
    file_system: Option<u64>,
}

impl<T: Tree + Send + 'static> Finder<T> {
    /// Writes to `output`.
    pub fn new(tree: Arc<T>, expression: Expression, output: Arc<SharedOutput>) -> Self {
        Self {
            tree,
            expression,
            output,
        }
    }

    /// Evaluates a starting point. Breaks if the walk must end, and returns a state if it is a directory to walk.
    pub fn start(&self, item: &Item<'_, T>) -> ControlFlow<(), Option<FoundDirectory>> {
        let mut text = Vec::new();
        let found = self.examine(item, None, &mut text);
        self.output.write(&text)?;
        found
    }

    /// Evaluates a starting point after the files below it, if the expression wants that.
    pub fn end(&self, item: &Item<'_, T>) -> ControlFlow<()> {
        let mut text = Vec::new();
        if self.expression.is_depth_first() && self.expression.min_depth() == 0 {
            let flow = self.evaluate(item, &mut text);
            self.output.write(&text)?;
            flow?;
        }
        ControlFlow::Continue(())
    }

    fn examine(
        &self,
        item: &Item<'_, T>,
        mut file_system: Option<u64>,
        text: &mut Vec<u8>,
    ) -> ControlFlow<(), Option<FoundDirectory>> {
        let is_directory = item.kind() == FileKind::Directory;
        let is_later = self.expression.is_depth_first() && is_directory;
        let mut outcome = Outcome::default();
        if !is_later && item.depth() >= self.expression.min_depth() {
            outcome = self.evaluate(item, text)?;
        }
        let max_depth = self.expression.max_depth().unwrap_or(usize::MAX);
        if !is_directory || outcome.is_pruned || item.depth() >= max_depth {
            // It is not left later.
            if is_later && item.depth() > 0 && item.depth() >= self.expression.min_depth() {
                self.evaluate(item, text)?;
            }
            return ControlFlow::Continue(None);
        }
        if self.expression.is_one_file_system() {
            let found = item.metadata().map(|found| found.file_system);
            match (found, file_system) {
                (Ok(found), None) => file_system = Some(found),
                (Ok(found), Some(wanted)) if found != wanted => return ControlFlow::Continue(None),
                _ => {}
            }
        }
        ControlFlow::Continue(Some(FoundDirectory { file_system }))
    }

    fn evaluate(&self, item: &Item<'_, T>, text: &mut Vec<u8>) -> ControlFlow<(), Outcome> {
        match self.expression.evaluate(item, text) {
            Ok(outcome) if outcome.is_quit => {
                self.output.write_last(text);
                ControlFlow::Break(())
            }
            Ok(outcome) => ControlFlow::Continue(outcome),
            Err(error) => {
                self.output.report(item.path(), &error);
                ControlFlow::Continue(Outcome::default())
            }
        }
    }
}

impl<T: Tree + Send + 'static> Visitor<T> for Finder<T> {
    type State = FoundDirectory;

    fn makes_calls(&self) -> bool {
        self.expression.needs_metadata()
    }

    fn visit(
        &self,
        level: &Arc<Level<T, FoundDirectory>>,
        directory: &T::Directory,
        batch: &Batch,
        descend: &mut Vec<(usize, FoundDirectory)>,
    ) -> ControlFlow<()> {
        let mut text = Vec::new();
        let path = level.path();
        let place = level.place(directory, &path);
        for (number, item) in Item::of_batch(&*self.tree, &place, batch).enumerate() {
            if let Some(found) = self.examine(&item, level.state.file_system, &mut text)? {
                descend.push((number, found));
            }
        }
        self.output.write(&text)
    }

    fn leave(&self, level: &Arc<Level<T, FoundDirectory>>) -> ControlFlow<()> {
        let Some(parent) = level.parent() else {
            return ControlFlow::Continue(());
        };
        let name = Name {
            name: level.name(),
            kind: FileKind::Directory,
            inode: level.inode(),
        };
        self.evaluate_late(parent, name)
    }

    fn skip(
        &self,
        level: &Arc<Level<T, FoundDirectory>>,
        name: Name<'_>,
        _: &FoundDirectory,
        error: io::Error,
    ) -> ControlFlow<()> {
        self.report(&level.path_of(name.name), error);
        self.evaluate_late(level, name)
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.output.report(path, &error);
    }
}

impl<T: Tree + Send + 'static> Finder<T> {
    /// Evaluates a directory after the files below it, if the expression wants that.
    fn evaluate_late(
        &self,
        level: &Arc<Level<T, FoundDirectory>>,
        name: Name<'_>,
    ) -> ControlFlow<()> {
        let is_late = self.expression.is_depth_first();
        if is_late && level.depth() >= self.expression.min_depth().saturating_sub(1) {
            let mut text = Vec::new();
            let path = level.path();
            let directory = match level.open(&self.tree) {
                Ok(directory) => directory,
                Err(error) => {
                    self.report(&path, error);
                    return ControlFlow::Continue(());
                }
            };
            let place = level.place(&directory, &path);
            let item = Item::in_directory(&*self.tree, &place, name);
            self.evaluate(&item, &mut text)?;
            self.output.write(&text)?;
        }
        ControlFlow::Continue(())
    }
}
