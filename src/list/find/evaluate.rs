//! Evaluates an expression on a file.

use std::io;

use super::number::{DAY, NumericTest, Size, TimeRange, nanoseconds};
use super::pattern::{Pattern, Regex};
use super::permissions::Permissions;
use super::printf::{self, Format};
use crate::base::escape::without_controls;
use crate::tar::Timestamp;
use crate::tree::{FileId, FileKind, FollowedLinks, Item, Metadata, Tree, is_missing};

/// A part of an expression.
#[derive(Debug)]
pub(super) enum Node {
    /// `,`: the value of the last part.
    List(Vec<Self>),
    Or(Vec<Self>),
    And(Vec<Self>),
    Not(Box<Self>),
    Constant(bool),
    Test(Test),
    Action(Action),
}

/// A primary without an effect.
#[derive(Debug)]
pub(super) enum Test {
    Name(Pattern),
    Path(Pattern),
    Target(Pattern),
    Regex(Regex),
    Kind(Vec<FileKind>),
    /// The type behind a link that is not followed, or of a link that is.
    OtherKind(Vec<FileKind>),
    Empty,
    Size(Size),
    Time(TimeField, TimeRange),
    Permissions(Permissions),
    User(Owner),
    Group(Owner),
    NoUser,
    NoGroup,
    Number(fn(&Metadata) -> u64, NumericTest),
    SameFile(FileId),
    /// Days between the last change of the attributes and the last access.
    Used(NumericTest),
}

/// A time of a file.
pub(super) type TimeField = fn(&Metadata) -> Timestamp;

pub(super) const ACCESS: TimeField = |found| found.atime;
pub(super) const CHANGE: TimeField = |found| found.ctime;
pub(super) const MODIFICATION: TimeField = |found| found.mtime;

/// The argument of `-user` or `-group`.
#[derive(Debug)]
pub(super) struct Owner {
    /// The name, unless a number was given.
    pub(super) name: Option<Vec<u8>>,
    pub(super) id: Option<u32>,
}

impl Owner {
    /// Whether a file belongs to it. The file's own name of its owner is preferred to the id that this machine
    /// gives to the name.
    fn owns(&self, name: Option<&[u8]>, id: u32) -> bool {
        match (&self.name, name) {
            (Some(wanted), Some(name)) => wanted == name,
            _ => self.id == Some(id),
        }
    }
}

/// A primary with an effect.
#[derive(Debug)]
pub(super) enum Action {
    /// `-print`, or `-print0`, with the byte behind the path.
    Print(u8),
    Format(Format),
    /// `-ls`, with the current time.
    Ls(Timestamp),
    /// `-prune`. Without effect if a directory follows its files (`-depth`).
    Prune,
    Quit,
}

impl Node {
    /// Whether evaluation may ask for attributes, or read a directory.
    pub(super) fn needs_metadata(&self) -> bool {
        match self {
            Self::List(parts) | Self::Or(parts) | Self::And(parts) => {
                parts.iter().any(Self::needs_metadata)
            }
            Self::Not(part) => part.needs_metadata(),
            Self::Constant(_) => false,
            Self::Test(test) => !matches!(
                test,
                Test::Name(_) | Test::Path(_) | Test::Target(_) | Test::Regex(_) | Test::Kind(_)
            ),
            Self::Action(Action::Format(format)) => format.needs_metadata(),
            Self::Action(action) => matches!(action, Action::Ls(_)),
        }
    }
}

/// `-quit` ends the evaluation.
pub(super) struct Quit;

/// The evaluation of an expression on one file.
pub(super) struct Evaluation<'a, T: Tree> {
    pub(super) item: &'a Item<'a, T>,
    pub(super) output: &'a mut Vec<u8>,
    pub(super) is_terminal: bool,
    pub(super) links: FollowedLinks,
    pub(super) is_pruned: bool,
    /// The first attribute that could not be read.
    pub(super) error: Option<io::Error>,
}

impl<T: Tree> Evaluation<'_, T> {
    pub(super) fn evaluate(&mut self, node: &Node) -> Result<bool, Quit> {
        Ok(match node {
            Node::List(parts) => {
                let mut last = true;
                for part in parts {
                    last = self.evaluate(part)?;
                }
                last
            }
            // Both end at the first part that decides.
            Node::Or(parts) | Node::And(parts) => {
                let decides = matches!(node, Node::Or(_));
                for part in parts {
                    if self.evaluate(part)? == decides {
                        return Ok(decides);
                    }
                }
                !decides
            }
            Node::Not(part) => !self.evaluate(part)?,
            Node::Constant(value) => *value,
            Node::Action(Action::Quit) => return Err(Quit),
            Node::Test(test) => {
                let result = matches(test, self.item, self.links);
                self.value_or_false(result)
            }
            Node::Action(action) => {
                let len = self.output.len();
                let result = self.run(action).map(|()| true);
                if result.is_err() {
                    // No part of a record stays.
                    self.output.truncate(len);
                }
                self.value_or_false(result)
            }
        })
    }

    /// As in GNU find, what cannot be found out is false, and the evaluation goes on.
    fn value_or_false(&mut self, result: io::Result<bool>) -> bool {
        result.unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            false
        })
    }

    fn run(&mut self, action: &Action) -> io::Result<()> {
        match action {
            Action::Print(b'\n') if self.is_terminal => {
                let path = without_controls(self.item.path());
                self.output.extend_from_slice(&path);
                self.output.push(b'\n');
            }
            Action::Print(end) => {
                self.item.push_path(self.output);
                self.output.push(*end);
            }
            Action::Format(format) => {
                let unknown = format.write(self.item, self.is_terminal, self.output)?;
                self.error = self.error.take().or(unknown);
            }
            Action::Ls(now) => printf::write_ls_line(self.item, *now, self.output)?,
            Action::Prune => self.is_pruned = true,
            Action::Quit => {}
        }
        Ok(())
    }
}

fn matches(test: &Test, item: &Item<'_, impl Tree>, links: FollowedLinks) -> io::Result<bool> {
    let kind = item.kind();
    let metadata = || item.metadata();
    Ok(match test {
        Test::Name(pattern) => pattern.matches(item.name()),
        Test::Path(pattern) => pattern.matches(item.path()),
        Test::Target(pattern) => kind == FileKind::Symlink && pattern.matches(&item.target()?),
        Test::Regex(regex) => regex.matches(item.path()),
        Test::Kind(kinds) => kinds.contains(&kind),
        Test::OtherKind(kinds) => kinds.contains(&other_kind(item, links)?),
        Test::Empty => match kind {
            FileKind::Directory => item.is_empty_directory()?,
            FileKind::File => metadata()?.size == 0,
            _ => false,
        },
        Test::Size(size) => size.matches(metadata()?.size),
        Test::Time(field, range) => range.contains(field(&metadata()?)),
        Test::Permissions(permissions) => {
            permissions.matches(metadata()?.mode, kind == FileKind::Directory)
        }
        Test::User(owner) => owner.owns(item.user()?.as_deref(), metadata()?.uid),
        Test::Group(owner) => owner.owns(item.group()?.as_deref(), metadata()?.gid),
        Test::NoUser => item.user()?.is_none(),
        Test::NoGroup => item.group()?.is_none(),
        Test::Number(number, wanted) => wanted.matches(number(&metadata()?)),
        Test::SameFile(id) => metadata()?.id() == *id,
        Test::Used(wanted) => {
            let found = metadata()?;
            let age = nanoseconds(found.atime) - nanoseconds(found.ctime);
            wanted.matches_age(age, DAY)
        }
    })
}

/// The type behind a link that is not followed, or of a link that is. A link that leads to nothing is itself.
fn other_kind(item: &Item<'_, impl Tree>, links: FollowedLinks) -> io::Result<FileKind> {
    if links.includes(item.depth()) {
        return item.unfollowed_kind();
    }
    match item.target_kind() {
        Err(error) if is_missing(&error) => Ok(FileKind::Symlink),
        target => target,
    }
}
