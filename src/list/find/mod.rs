//! The expressions of `tarfs find`, which are those of GNU find; pure.
//!
//! [`Expression::parse`] reads the words behind the starting points. [`Expression::evaluate`] tests a file, and
//! appends the text of actions to an output. These parts differ from GNU find:
//!
//! - Times are in UTC, and names of days and months are English.
//! - A byte that is not UTF-8 counts as the character with that number in patterns and regular expressions.
//! - Classes such as `[:upper:]` match both cases in `-iname`.
//! - Regular expressions have no back-references, and the syntaxes of awk and grep are missing.
//! - `-user` and `-group` compare the names that an archive has. They compare numbers where a file has no name.
//! - Columns of `-ls` do not widen, and characters outside ASCII are not escaped there.
//! - A directive or an escape of `-printf` that is unknown is an error.
//! - Primaries that change files or run programs are refused.

mod dialect;
mod evaluate;
mod number;
mod parse;
mod pattern;
mod permissions;
mod primaries;
mod printf;
mod strftime;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io;

use evaluate::{Action, Evaluation, Node};
use parse::Parser;

pub use parse::{Error, ParseContext, WalkOptions};

use crate::tree::{Item, Tree};

/// A parsed expression. Several threads may evaluate it at the same time.
#[derive(Debug)]
pub struct Expression {
    root: Node,
    is_terminal: bool,
    /// The reason why an owner can own no file of this machine. An archive may know the name.
    pub unknown_owner: Option<String>,
    /// Options for the whole walk.
    pub options: WalkOptions,
}

/// Effects of an expression on the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// The walk must not descend into this directory.
    pub is_pruned: bool,
    /// The walk must end.
    pub is_quit: bool,
}

impl Expression {
    /// Parses the words of an expression. Without an action other than `-prune` and `-quit` it prints the files for
    /// which it is true.
    ///
    /// # Errors
    /// The words are no expression, or a primary is not supported.
    pub fn parse(words: &[OsString], context: &ParseContext<'_>) -> Result<Self, Error> {
        let mut parser = Parser::new(words, context);
        let mut root = parser.parse()?;
        if !parser.has_action {
            root = Node::And(vec![root, Node::Action(Action::Print(b'\n'))]);
        }
        Ok(Self {
            root,
            is_terminal: context.is_terminal,
            options: parser.options,
            unknown_owner: parser.unknown_owner,
        })
    }

    /// Evaluates the expression on a file, and appends the text of actions to `output`. Depths are the caller's concern.
    /// Returns the first error of reading an attribute, too. Parts of the expression that need it are false.
    pub fn evaluate(
        &self,
        item: &Item<'_, impl Tree>,
        output: &mut Vec<u8>,
    ) -> (Outcome, Option<io::Error>) {
        let mut evaluation = Evaluation {
            item,
            output,
            is_terminal: self.is_terminal,
            links: self.options.links,
            is_pruned: false,
            error: None,
        };
        let is_quit = evaluation.evaluate(&self.root).is_err();
        let outcome = Outcome {
            is_pruned: evaluation.is_pruned && !self.options.is_depth_first,
            is_quit,
        };
        (outcome, evaluation.error)
    }

    /// Whether evaluation may ask for attributes, or whether a directory is empty.
    pub fn needs_metadata(&self) -> bool {
        self.root.needs_metadata()
    }
}
