//! Parses the words of an expression.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use thiserror::Error;

use super::dialect::Dialect;
use super::evaluate::Node;
use super::number::{DAY, nanoseconds};
use crate::base::escape::escape;
use crate::base::passwd::Accounts;
use crate::tar::Timestamp;
use crate::tree::{FollowedLinks, Metadata};

/// The reason why words are no expression, or one that is not supported.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Error(pub(super) String);

/// Facts from outside of the tree that an expression may refer to.
#[expect(
    missing_debug_implementations,
    reason = "functions have no form for it"
)]
#[derive(Clone, Copy)]
pub struct ParseContext<'a> {
    /// The current time.
    pub now: Timestamp,
    /// Resolves the names of `-user` and `-group`.
    pub accounts: &'a Accounts,
    /// Whether names are written to a terminal.
    pub is_terminal: bool,
    /// The links that are followed without `-follow`.
    pub links: FollowedLinks,
    /// Examines the file of `-newer` or `-samefile`, or the file behind the link there.
    pub metadata: &'a dyn Fn(&Path, bool) -> io::Result<Metadata>,
}

/// Options within an expression, which hold for the whole walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WalkOptions {
    /// `-maxdepth`: files below this depth are not visited.
    pub max_depth: Option<usize>,
    /// `-mindepth`: the expression is not evaluated on files above this depth.
    pub min_depth: usize,
    /// `-depth`: a directory is evaluated after the files in it.
    pub is_depth_first: bool,
    /// `-xdev`: the walk must not enter other file systems.
    pub is_one_file_system: bool,
    /// The links that are followed: all with `-follow`.
    pub links: FollowedLinks,
    /// `-xtype` or `%Y`: files behind links are examined, followed or not.
    pub examines_targets: bool,
}

/// Parentheses in each other.
const MAX_NESTING: usize = 200;

/// A parser between two words.
pub(super) struct Parser<'a> {
    words: &'a [OsString],
    position: usize,
    pub(super) context: &'a ParseContext<'a>,
    pub(super) dialect: Dialect,
    /// A day before the time from which ages count, in nanoseconds since the epoch.
    pub(super) day_start: i128,
    nesting: usize,
    pub(super) options: WalkOptions,
    pub(super) has_action: bool,
    /// An owner that this machine does not know.
    pub(super) unknown_owner: Option<String>,
}

pub(super) fn text(word: &OsStr) -> String {
    escape(word.as_bytes())
}

impl<'a> Parser<'a> {
    pub(super) fn new(words: &'a [OsString], context: &'a ParseContext<'a>) -> Self {
        Self {
            words,
            position: 0,
            context,
            dialect: Dialect::Emacs,
            day_start: nanoseconds(context.now) - DAY,
            nesting: 0,
            options: WalkOptions {
                links: context.links,
                ..WalkOptions::default()
            },
            has_action: false,
            unknown_owner: None,
        }
    }

    pub(super) fn parse(&mut self) -> Result<Node, Error> {
        if self.words.is_empty() {
            return Ok(Node::Constant(true));
        }
        let node = self.list()?;
        match self.peek() {
            None => Ok(node),
            Some(_) => syntax("you have too many ')'"),
        }
    }

    fn peek(&self) -> Option<&'a OsStr> {
        self.words.get(self.position).map(OsString::as_os_str)
    }

    fn is_next(&self, operators: &[&str]) -> bool {
        let word = self.peek();
        word.is_some_and(|word| operators.iter().any(|operator| word == *operator))
    }

    fn skip(&mut self, operators: &[&str]) -> bool {
        let is_next = self.is_next(operators);
        self.position += usize::from(is_next);
        is_next
    }

    fn list(&mut self) -> Result<Node, Error> {
        let mut parts = vec![self.or()?];
        while self.skip(&[","]) {
            parts.push(self.or()?);
        }
        Ok(single(parts, Node::List))
    }

    fn or(&mut self) -> Result<Node, Error> {
        let mut parts = vec![self.and()?];
        while self.skip(&["-o", "-or"]) {
            parts.push(self.and()?);
        }
        Ok(single(parts, Node::Or))
    }

    fn and(&mut self) -> Result<Node, Error> {
        let mut parts = vec![self.not()?];
        while self.peek().is_some() && !self.is_next(&[")", ",", "-o", "-or"]) {
            self.skip(&["-a", "-and"]);
            parts.push(self.not()?);
        }
        Ok(single(parts, Node::And))
    }

    fn not(&mut self) -> Result<Node, Error> {
        let mut is_negated = false;
        while self.skip(&["!", "-not"]) {
            is_negated = !is_negated;
        }
        let node = self.operand()?;
        Ok(if is_negated {
            Node::Not(Box::new(node))
        } else {
            node
        })
    }

    fn operand(&mut self) -> Result<Node, Error> {
        let Some(word) = self.peek() else {
            let before = self.words.last().map(|word| text(word));
            let before = before.unwrap_or_default();
            return syntax(format!("expected an expression after '{before}'"));
        };
        self.position += 1;
        match word.as_bytes() {
            b"(" => self.group(),
            b")" | b"-a" | b"-and" | b"-o" | b"-or" | b"," => {
                syntax(format!("expected an expression before '{}'", text(word)))
            }
            [b'-', ..] => {
                let name = word.to_str();
                self.primary(name.ok_or_else(|| unknown(&text(word)))?)
            }
            _ => Err(Error(format!(
                "paths must precede expression: '{}'",
                text(word)
            ))),
        }
    }

    fn group(&mut self) -> Result<Node, Error> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            let problem = format!("more than {MAX_NESTING} parentheses are in each other");
            return syntax(problem);
        }
        let node = self.list()?;
        self.nesting -= 1;
        if self.skip(&[")"]) {
            return Ok(node);
        }
        syntax("I was expecting to find a ')' somewhere but did not see one")
    }

    pub(super) fn argument(&mut self, name: &str) -> Result<&'a OsStr, Error> {
        let argument = self.peek();
        self.position += 1;
        argument.ok_or_else(|| Error(format!("missing argument to '{name}'")))
    }

    /// The next word as `parse` understands it. `expected` says what it must be.
    pub(super) fn parsed<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, Error> {
        let argument = self.argument(name)?;
        let value = argument.to_str().and_then(parse);
        value.ok_or_else(|| invalid(name, argument, expected))
    }
}

/// The only part itself, or all of them under `wrap`.
fn single(mut parts: Vec<Node>, wrap: fn(Vec<Node>) -> Node) -> Node {
    match parts.pop() {
        Some(part) if parts.is_empty() => part,
        last => {
            parts.extend(last);
            wrap(parts)
        }
    }
}

fn syntax(problem: impl Display) -> Result<Node, Error> {
    Err(Error(format!("invalid expression: {problem}")))
}

pub(super) fn unknown(primary: &str) -> Error {
    Error(format!("unknown predicate '{primary}'"))
}

pub(super) fn invalid(primary: &str, argument: &OsStr, reason: &str) -> Error {
    let argument = text(argument);
    Error(format!(
        "invalid argument '{argument}' to '{primary}': {reason}"
    ))
}
