//! Evaluates an expression on a file.

use std::io;

use super::number::{Comparison, Size, TimeRange};
use super::pattern::{Pattern, Regex};
use super::permissions::Permissions;
use super::printf::{self, Format};
use crate::list::tree::{Candidate, FileKind, Metadata};
use crate::tar::Timestamp;

/// A part of an expression.
#[derive(Debug)]
pub(super) enum Node {
    /// `,`: the value of the last part.
    List(Vec<Self>),
    Or(Vec<Self>),
    And(Vec<Self>),
    Not(Box<Self>),
    Constant(bool),
    /// A test that no call of the system is needed for.
    Name(NameTest),
    /// A test of attributes.
    Attributes(AttributeTest),
    Action(Action),
}

/// A test of names and types.
#[derive(Debug)]
pub(super) enum NameTest {
    Name(Pattern),
    Path(Pattern),
    Target(Pattern),
    Regex(Regex),
    Kind(Vec<FileKind>),
}

/// A test of attributes.
#[derive(Debug)]
pub(super) enum AttributeTest {
    Size(Size),
    Time(TimeField, TimeRange),
    Permissions(Permissions),
    User(Owner),
    Group(Owner),
    UserId(Comparison),
    GroupId(Comparison),
    NoUser,
    NoGroup,
    Links(Comparison),
    Inode(Comparison),
    Empty,
    SameFile { file_system: u64, inode: u64 },
}

/// A time of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TimeField {
    Access,
    Change,
    Modification,
}

impl TimeField {
    /// The field with the letter `a`, `c` or `m`.
    pub(super) fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'a' => Some(Self::Access),
            'c' => Some(Self::Change),
            'm' => Some(Self::Modification),
            _ => None,
        }
    }

    pub(super) fn of(self, metadata: &Metadata) -> Timestamp {
        match self {
            Self::Access => metadata.atime,
            Self::Change => metadata.ctime,
            Self::Modification => metadata.mtime,
        }
    }
}

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
            Self::Attributes(_) | Self::Action(Action::Ls(_)) => true,
            Self::Action(Action::Format(format)) => format.needs_metadata(),
            Self::Constant(_) | Self::Name(_) | Self::Action(_) => false,
        }
    }
}

/// Ends the evaluation early.
pub(super) enum Stop {
    Quit,
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// The evaluation of an expression on one file.
pub(super) struct Evaluation<'a, C: ?Sized> {
    pub(super) candidate: &'a C,
    pub(super) output: &'a mut Vec<u8>,
    pub(super) is_pruned: bool,
}

impl<C: Candidate + ?Sized> Evaluation<'_, C> {
    pub(super) fn evaluate(&mut self, node: &Node) -> Result<bool, Stop> {
        match node {
            Node::List(parts) => {
                let mut last = true;
                for part in parts {
                    last = self.evaluate(part)?;
                }
                return Ok(last);
            }
            Node::Or(parts) => {
                for part in parts {
                    if self.evaluate(part)? {
                        return Ok(true);
                    }
                }
                return Ok(false);
            }
            Node::And(parts) => {
                for part in parts {
                    if !self.evaluate(part)? {
                        return Ok(false);
                    }
                }
            }
            Node::Not(part) => return Ok(!self.evaluate(part)?),
            Node::Constant(value) => return Ok(*value),
            Node::Name(test) => return Ok(matches_name(test, self.candidate)?),
            Node::Attributes(test) => return Ok(matches_attributes(test, self.candidate)?),
            Node::Action(action) => self.run(action)?,
        }
        Ok(true)
    }

    fn run(&mut self, action: &Action) -> Result<(), Stop> {
        match action {
            Action::Print(end) => {
                self.output.extend_from_slice(self.candidate.path());
                self.output.push(*end);
            }
            Action::Format(format) => format.write(self.candidate, self.output)?,
            Action::Ls(now) => printf::write_ls_line(self.candidate, *now, self.output)?,
            Action::Prune => self.is_pruned = true,
            Action::Quit => return Err(Stop::Quit),
        }
        Ok(())
    }
}

fn matches_name<C: Candidate + ?Sized>(test: &NameTest, candidate: &C) -> io::Result<bool> {
    Ok(match test {
        NameTest::Name(pattern) => pattern.matches(candidate.name()),
        NameTest::Path(pattern) => pattern.matches(candidate.path()),
        NameTest::Target(pattern) => {
            candidate.kind() == FileKind::Symlink && pattern.matches(&candidate.target()?)
        }
        NameTest::Regex(regex) => regex.matches(candidate.path()),
        NameTest::Kind(kinds) => kinds.contains(&candidate.kind()),
    })
}

fn matches_attributes<C: Candidate + ?Sized>(
    test: &AttributeTest,
    candidate: &C,
) -> io::Result<bool> {
    let kind = candidate.kind();
    if matches!(test, AttributeTest::Empty) {
        return match kind {
            FileKind::Directory => candidate.is_empty_directory(),
            FileKind::File => Ok(candidate.metadata()?.size == 0),
            _ => Ok(false),
        };
    }
    let metadata = candidate.metadata()?;
    Ok(match test {
        AttributeTest::Size(size) => size.matches(metadata.size),
        AttributeTest::Time(field, range) => range.contains(field.of(&metadata)),
        AttributeTest::Permissions(permissions) => {
            permissions.matches(metadata.mode, kind == FileKind::Directory)
        }
        AttributeTest::User(owner) => owner.owns(candidate.user()?.as_deref(), metadata.uid),
        AttributeTest::Group(owner) => owner.owns(candidate.group()?.as_deref(), metadata.gid),
        AttributeTest::UserId(id) => id.matches(metadata.uid.into()),
        AttributeTest::GroupId(id) => id.matches(metadata.gid.into()),
        AttributeTest::NoUser => candidate.user()?.is_none(),
        AttributeTest::NoGroup => candidate.group()?.is_none(),
        AttributeTest::Links(links) => links.matches(metadata.links),
        AttributeTest::Inode(inode) => inode.matches(metadata.inode),
        AttributeTest::SameFile { file_system, inode } => {
            (metadata.file_system, metadata.inode) == (*file_system, *inode)
        }
        AttributeTest::Empty => false,
    })
}
