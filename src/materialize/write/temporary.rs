//! Entries of an update under temporary names, which replace the old entries when they are complete.

use rustix::fs::{AtFlags, renameat, unlinkat};
use rustix::io::Errno;

use super::directory::{Directory, is_directory, is_empty, lstat_at};
use crate::base::publish::{SUFFIX_LEN, random_suffix};
use crate::tree::remove_tree;

/// Prefix of temporary names in a tree that is updated.
const PREFIX: &[u8] = b".tarfs-update-";

/// How an update replaces entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplaceRules {
    /// Whether a directory with entries is removed for a file in its place.
    pub(crate) removes_directories: bool,
}

/// Whether an update makes such names. A killed one leaves them.
pub(crate) fn is_temporary(name: &[u8]) -> bool {
    name.strip_prefix(PREFIX)
        .is_some_and(|suffix| suffix.len() == SUFFIX_LEN && suffix.is_ascii())
}

/// An entry under a temporary name, which is removed unless it is placed.
#[derive(Debug)]
pub(crate) struct TemporaryEntry {
    directory: Directory,
    name: Vec<u8>,
    rules: ReplaceRules,
    is_placed: bool,
}

impl TemporaryEntry {
    /// A temporary name for the entry `name`. `EXIST` if a directory with entries is in its place and stays.
    pub(super) fn new(
        directory: &Directory,
        name: &[u8],
        rules: ReplaceRules,
    ) -> Result<Self, Errno> {
        let is_blocked = !rules.removes_directories
            && is_directory(directory, name)
            && !is_empty(directory.open_child(name, false)?)?;
        if is_blocked {
            return Err(Errno::EXIST);
        }
        Ok(Self {
            directory: directory.clone(),
            name: [PREFIX, random_suffix().as_bytes()].concat(),
            rules,
            is_placed: false,
        })
    }

    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Gives the entry its name, and removes the old entry. Calls `note_replacement` if cached paths may go through that.
    /// After an error the old entry stays.
    pub(crate) fn place(
        mut self,
        name: &[u8],
        note_replacement: impl FnOnce(),
    ) -> Result<(), Errno> {
        let directory = &self.directory;
        let old = lstat_at(directory, name);
        if old.is_ok_and(|old| old.st_mode & 0o170_000 != 0o100_000) {
            note_replacement();
        }
        let rename = || renameat(directory, &*self.name, directory, name);
        let renamed = match rename() {
            Err(Errno::ISDIR) => {
                let removed = if self.rules.removes_directories {
                    remove_tree(directory, name)
                } else {
                    unlinkat(directory, name, AtFlags::REMOVEDIR)
                };
                match removed {
                    Ok(()) | Err(Errno::NOENT) => rename(),
                    Err(Errno::NOTEMPTY | Errno::BUSY | Errno::XDEV) => Err(Errno::EXIST),
                    removed => removed,
                }
            }
            renamed => renamed,
        };
        self.is_placed = renamed.is_ok();
        renamed
    }
}

impl Drop for TemporaryEntry {
    fn drop(&mut self) {
        if !self.is_placed {
            // It may not exist yet. The next run removes one that stays.
            unlinkat(&self.directory, &*self.name, AtFlags::empty()).ok();
        }
    }
}
