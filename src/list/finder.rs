//! A walk that evaluates an expression of `find` on every file.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::find::{Expression, Outcome};
use crate::base::escape::escape;
use crate::tree::{FileId, FileKind, Item, Level, SharedOutput, Tree, Visit, Visitor};

/// Evaluates an expression on the files of a walk.
#[derive(Debug)]
pub struct Finder<T> {
    tree: Arc<T>,
    expression: Expression,
    output: Arc<SharedOutput>,
}

/// A directory of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FoundDirectory {
    /// The file system of its starting point, for `-xdev`.
    file_system: Option<u64>,
    /// Tells it from others, if links are followed.
    id: Option<FileId>,
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
        let options = self.expression.options;
        if options.is_depth_first && options.min_depth == 0 {
            self.evaluate_alone(item)?;
        }
        ControlFlow::Continue(())
    }

    fn evaluate_alone(&self, item: &Item<'_, T>) -> ControlFlow<()> {
        let mut text = Vec::new();
        let outcome = self.evaluate(item, &mut text);
        self.output.write(&text)?;
        outcome.map_continue(drop)
    }

    fn examine(
        &self,
        item: &Item<'_, T>,
        above: Option<&Arc<Level<T, FoundDirectory>>>,
        text: &mut Vec<u8>,
    ) -> ControlFlow<(), Option<FoundDirectory>> {
        let options = self.expression.options;
        let is_directory = item.kind() == FileKind::Directory;
        let mut file_system = above.and_then(|above| above.state.file_system);
        let is_followed = is_directory && self.tree.follows_links();
        let id = is_followed.then(|| item.metadata().ok()).flatten();
        let id = id.map(|metadata| metadata.id());
        if let Some(same) = id.and_then(|id| level_with(above, id)) {
            let [path, same] = [item.path(), &same.path()].map(escape);
            let text = format!(
                "file system loop detected; '{path}' is part of the same file system loop as '{same}'"
            );
            self.output.fail(&text);
            return ControlFlow::Continue(None);
        }
        let is_later = options.is_depth_first && is_directory;
        let mut outcome = Outcome::default();
        if !is_later && item.depth() >= options.min_depth {
            outcome = self.evaluate(item, text)?;
        }
        let max_depth = options.max_depth.unwrap_or(usize::MAX);
        let mut is_walked = is_directory && !outcome.is_pruned && item.depth() < max_depth;
        if is_walked && options.is_one_file_system {
            let found = item.metadata().map(|found| found.file_system);
            match (found, file_system) {
                (Ok(found), None) => file_system = Some(found),
                (Ok(found), Some(wanted)) => is_walked = found == wanted,
                _ => {}
            }
        }
        // It is not left later.
        if !is_walked && is_later && item.depth() >= options.min_depth {
            self.evaluate(item, text)?;
        }
        ControlFlow::Continue(is_walked.then_some(FoundDirectory { file_system, id }))
    }

    fn evaluate(&self, item: &Item<'_, T>, text: &mut Vec<u8>) -> ControlFlow<(), Outcome> {
        let (outcome, error) = self.expression.evaluate(item, text);
        if let Some(error) = error {
            self.output.report(item.path(), &error);
        }
        if outcome.is_quit {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(outcome)
    }
}

/// The directory `id`, if `level` is it or is below it.
fn level_with<T: Tree>(
    level: Option<&Arc<Level<T, FoundDirectory>>>,
    id: FileId,
) -> Option<&Arc<Level<T, FoundDirectory>>> {
    let mut levels = std::iter::successors(level, |level| level.parent.as_ref());
    levels.find(|level| level.state.id == Some(id))
}

impl<T: Tree + Send + 'static> Visitor<T> for Finder<T> {
    type State = FoundDirectory;

    fn makes_calls(&self) -> bool {
        self.expression.needs_metadata()
    }

    fn visit(
        &self,
        names: &Visit<'_, T, FoundDirectory>,
        descend: &mut Vec<(usize, FoundDirectory)>,
    ) -> ControlFlow<()> {
        let mut text = Vec::new();
        let flow = names.items().try_for_each(|(number, item)| {
            let found = self.examine(&item, Some(names.level), &mut text)?;
            descend.extend(found.map(|found| (number, found)));
            ControlFlow::Continue(())
        });
        self.output.write(&text)?;
        flow
    }

    /// Evaluates a directory after the files below it, if the expression wants that.
    fn leave(&self, level: &Arc<Level<T, FoundDirectory>>) -> ControlFlow<()> {
        let options = self.expression.options;
        let is_evaluated = options.is_depth_first && level.depth >= options.min_depth;
        let Some(parent) = level.parent.as_ref().filter(|_| is_evaluated) else {
            return ControlFlow::Continue(());
        };
        let path = parent.path();
        match parent.open(&self.tree) {
            Ok(directory) => {
                let place = parent.place(&directory, &path);
                self.evaluate_alone(&Item::in_directory(&*self.tree, &place, level.as_name()))
            }
            Err(error) => {
                self.report(&path, error);
                ControlFlow::Continue(())
            }
        }
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.output.report(path, &error);
    }
}
