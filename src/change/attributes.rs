//! Changes of modes and owners.

use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::base::AttributeTarget;

use super::log::{ChangeLog, Verbosity, quote};
use crate::base::escape::{escape, owner_text};
use crate::tree::{
    DirectoryTree, FileKind, Level, Metadata, Start, Tree, Visit, Visitor, apply_mode, is_root,
    metadata_of, metadata_of_open, mode_string,
};

/// An owner and a group; `None` for any, or to keep it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Owner {
    /// The owner.
    pub user: Option<u32>,
    /// The group.
    pub group: Option<u32>,
}

impl Owner {
    /// Whether a file has this owner and this group.
    fn matches(self, metadata: &Metadata) -> bool {
        let is = |wanted: Option<u32>, id| wanted.is_none_or(|wanted| wanted == id);
        is(self.user, metadata.uid) && is(self.group, metadata.gid)
    }
}

/// The attributes to set.
#[derive(Clone, Debug)]
pub enum Attributes {
    /// The mode.
    Mode {
        /// An octal or symbolic mode, which [`apply_mode`] accepts.
        mode: String,
        /// Bits that a symbolic mode without classes leaves alone.
        umask: u32,
        /// Whether it is an error if a file keeps a bit because of `umask`.
        reports_umask: bool,
    },
    /// Owner and group.
    Owner {
        /// Those to set.
        to: Owner,
        /// Those that a file must have; others are left alone.
        from: Owner,
        /// Names of those to set, for messages.
        names: (String, Option<String>),
        /// Whether messages are about the group alone.
        is_group: bool,
    },
}

/// Attributes to set, and on which files.
#[derive(Clone, Debug)]
pub struct ChangeOptions {
    /// The attributes.
    pub attributes: Attributes,
    /// Whether the files below a directory are changed, too.
    pub recursive: bool,
    /// Whether a link that is given as a path stands for its target.
    pub follow: bool,
    /// Whether the files below `/` may be changed.
    pub root: bool,
}

/// The attributes of a directory that is changed when it is left; `None` if it was changed before.
#[derive(Clone, Copy, Debug)]
pub struct LateChange(Option<Metadata>);

type Directory = Level<DirectoryTree, LateChange>;

/// Changes the attributes of files that differ from those to set.
#[derive(Debug)]
pub struct Changer {
    tree: Arc<DirectoryTree>,
    options: ChangeOptions,
    log: Arc<ChangeLog>,
}

impl Changer {
    /// Tells `log` about each file.
    pub fn new(tree: Arc<DirectoryTree>, options: ChangeOptions, log: Arc<ChangeLog>) -> Self {
        Self { tree, options, log }
    }

    /// Changes the file at `path`, or returns the directory at which a walk must start.
    pub fn start(&self, path: &[u8]) -> Option<Start<DirectoryTree, LateChange>> {
        let flags = if self.options.follow {
            OFlags::PATH | OFlags::CLOEXEC
        } else {
            OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW
        };
        let opened = openat(CWD, path, flags, Mode::empty()).map_err(io::Error::from);
        let found = opened.and_then(|file| Ok((metadata_of_open(&file)?, file)));
        let (found, file) = match found {
            Ok(found) => found,
            Err(error) => {
                self.fail_access(path, &error);
                return None;
            }
        };
        if self.options.recursive && !self.options.root && is_root(&found) {
            self.log.fail_on_root(path);
            return None;
        }
        let state = self.examine(file.as_fd(), b"", path, &found)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat(&file, ".", flags, Mode::empty()) {
            Ok(directory) => Some(Start {
                path: path.to_owned(),
                inode: found.inode,
                directory: directory.into(),
                state,
            }),
            Err(error) => {
                self.report(path, error.into());
                if let LateChange(Some(found)) = state {
                    self.apply(file.as_fd(), b"", path, &found);
                }
                None
            }
        }
    }

    fn fail_access(&self, path: &[u8], error: &io::Error) {
        let is_missing = error.kind() == io::ErrorKind::NotFound;
        let is_dangling = is_missing && metadata_of(Path::new(OsStr::from_bytes(path))).is_ok();
        match &self.options.attributes {
            Attributes::Mode { .. } if is_dangling => {
                let text = "cannot operate on dangling symlink";
                self.log.fail_with(&format!("{text} {}", quote(path)));
            }
            Attributes::Owner { .. } if is_dangling => {
                self.log.fail("cannot dereference", path, error);
            }
            _ => self.log.fail("cannot access", path, error),
        }
        self.log_inaccessible(path);
    }

    fn log_inaccessible(&self, path: &[u8]) {
        self.log
            .write(Verbosity::All, || match &self.options.attributes {
                Attributes::Mode { .. } => format!("{} could not be accessed", quote(path)),
                Attributes::Owner {
                    names, is_group, ..
                } => {
                    let (what, wanted) = (owner_word(*is_group), wanted_owner(names, *is_group));
                    format!("failed to change {what} of {} to {wanted}", quote(path))
                }
            });
    }

    /// Changes a file, or returns the state of a directory to walk: its attributes, if it is changed when it is left.
    fn examine(
        &self,
        directory: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
        found: &Metadata,
    ) -> Option<LateChange> {
        let is_walked = self.options.recursive && found.kind == FileKind::Directory;
        // Without these two bits its owner could not walk it.
        let is_opened = |mode| mode & !found.mode & 0o500 != 0;
        if is_walked && !self.wanted_mode(found).is_some_and(is_opened) {
            return Some(LateChange(Some(*found)));
        }
        self.apply(directory, name, path, found);
        is_walked.then_some(LateChange(None))
    }

    fn wanted_mode(&self, found: &Metadata) -> Option<u32> {
        match &self.options.attributes {
            Attributes::Mode { mode, umask, .. } => {
                apply_mode(mode, found.mode, found.kind == FileKind::Directory, *umask)
            }
            Attributes::Owner { .. } => None,
        }
    }

    /// Changes the file `name`, or the open `directory` itself.
    fn apply(&self, directory: BorrowedFd<'_>, name: &[u8], path: &[u8], found: &Metadata) {
        let target = AttributeTarget::Name(directory, name);
        let result = match &self.options.attributes {
            Attributes::Mode { .. } if found.kind == FileKind::Symlink => None,
            Attributes::Mode { .. } => {
                let wanted = self.wanted_mode(found).filter(|&mode| mode != found.mode);
                wanted.map(|mode| target.chmod(mode))
            }
            Attributes::Owner { to, from, .. } => {
                let is_wanted = from.matches(found) && !to.matches(found);
                is_wanted.then(|| target.chown(to.user, to.group))
            }
        };
        if let Some(Err(errno)) = result {
            self.log.fail(self.action(), path, &errno.into());
        }
        let is_changed = result.map(|result| result.is_ok());
        if is_changed != Some(false) {
            self.report_umask(path, found);
        }
        let verbosity = match is_changed {
            Some(true) => Verbosity::Changes,
            _ => Verbosity::All,
        };
        self.log
            .write(verbosity, || self.describe(path, found, is_changed));
    }

    /// Reports the bits that a file keeps because of the umask, if that is wanted.
    fn report_umask(&self, path: &[u8], found: &Metadata) {
        let Attributes::Mode {
            mode,
            reports_umask: true,
            ..
        } = &self.options.attributes
        else {
            return;
        };
        let is_directory = found.kind == FileKind::Directory;
        let expected = apply_mode(mode, found.mode, is_directory, 0);
        let (Some(expected), Some(new)) = (expected, self.wanted_mode(found)) else {
            return;
        };
        if new & !expected != 0 && found.kind != FileKind::Symlink {
            let letters = |mode| mode_string(FileKind::File, mode).split_off(1);
            let (path, new, expected) = (escape(path), letters(new), letters(expected));
            let text = format!("{path}: new permissions are {new}, not {expected}");
            self.log.fail_with(&text);
        }
    }

    /// Changes the directory `level`, unless that is done. It is `name` in `above`, or that itself.
    fn apply_late(&self, level: &Directory, above: &Arc<Directory>, name: &[u8]) {
        let LateChange(Some(found)) = &level.state else {
            return;
        };
        match above.open(&self.tree) {
            Ok(directory) => self.apply(directory.as_fd(), name, &level.path(), found),
            Err(error) => self.log.fail(self.action(), &level.path(), &error),
        }
    }

    fn action(&self) -> &'static str {
        match self.options.attributes {
            Attributes::Mode { .. } => "changing permissions of",
            Attributes::Owner { to, .. } if to.user.is_none() => "changing group of",
            Attributes::Owner { .. } => "changing ownership of",
        }
    }

    /// The line of a file that was changed, could not be, or was left alone.
    fn describe(&self, path: &[u8], found: &Metadata, is_changed: Option<bool>) -> String {
        let path = quote(path);
        let (what, before, after) = match &self.options.attributes {
            Attributes::Mode { .. } if found.kind == FileKind::Symlink => {
                return format!("neither symbolic link {path} nor referent has been changed");
            }
            Attributes::Mode { .. } => {
                let letters = |mode| mode_string(FileKind::File, mode).split_off(1);
                let text = |mode| format!("{mode:04o} ({})", letters(mode));
                let wanted = self.wanted_mode(found).unwrap_or(found.mode);
                ("mode", text(found.mode), text(wanted))
            }
            Attributes::Owner { names, .. } if names.0.is_empty() && names.1.is_none() => {
                return format!("ownership of {path} retained");
            }
            Attributes::Owner {
                names, is_group, ..
            } => {
                let user = owner_text(self.tree.user(found).unwrap_or_default(), found.uid);
                let group = owner_text(self.tree.group(found).unwrap_or_default(), found.gid);
                let current = if *is_group {
                    group
                } else {
                    joined(&user, names.1.is_some().then_some(&group))
                };
                (
                    owner_word(*is_group),
                    current,
                    wanted_owner(names, *is_group),
                )
            }
        };
        match (is_changed, what) {
            (None, _) => format!("{what} of {path} retained as {before}"),
            (Some(false), _) => {
                format!("failed to change {what} of {path} from {before} to {after}")
            }
            (Some(true), "mode") => format!("mode of {path} changed from {before} to {after}"),
            (Some(true), _) => format!("changed {what} of {path} from {before} to {after}"),
        }
    }
}

fn owner_word(is_group: bool) -> &'static str {
    if is_group { "group" } else { "ownership" }
}

fn wanted_owner((user, group): &(String, Option<String>), is_group: bool) -> String {
    match group {
        Some(group) if is_group => group.clone(),
        group => joined(user, group.as_ref()),
    }
}

fn joined(user: &str, group: Option<&String>) -> String {
    group.map_or_else(|| user.to_owned(), |group| format!("{user}:{group}"))
}

impl Visitor<DirectoryTree> for Changer {
    type State = LateChange;

    fn visit(
        &self,
        names: &Visit<'_, DirectoryTree, LateChange>,
        descend: &mut Vec<(usize, LateChange)>,
    ) -> ControlFlow<()> {
        let directory = names.place.directory.as_fd();
        for (number, item) in names.items() {
            match item.metadata() {
                Ok(found) => {
                    let state = self.examine(directory, item.name(), item.path(), &found);
                    descend.extend(state.map(|state| (number, state)));
                }
                Err(error) => self.fail_access(item.path(), &error),
            }
        }
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Directory>) -> ControlFlow<()> {
        self.apply_late(level, level, b"");
        ControlFlow::Continue(())
    }

    fn skip(&self, level: &Arc<Directory>, error: io::Error) -> ControlFlow<()> {
        self.report(&level.path(), error);
        if let Some(parent) = &level.parent {
            self.apply_late(level, parent, &level.name);
        }
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.log.fail("cannot read directory", path, &error);
        self.log_inaccessible(path);
    }

    fn report_file(&self, path: &[u8], error: io::Error) {
        self.fail_access(path, &error);
    }
}
