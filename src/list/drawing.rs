//! Pictures of trees, as tree(1) draws them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::tree::FileKind;

/// Characters of the lines of a picture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drawing {
    /// Box characters.
    Unicode,
    /// Those that every locale has.
    Ascii,
}

impl Drawing {
    /// Lines before a name, and before the names below it.
    pub(super) fn branch(self, is_last: bool) -> (&'static str, &'static str) {
        match (self, is_last) {
            (Self::Unicode, false) => ("├── ", "│   "),
            (Self::Unicode, true) => ("└── ", "    "),
            (Self::Ascii, false) => ("|-- ", "|   "),
            (Self::Ascii, true) => ("`-- ", "    "),
        }
    }
}

/// Numbers of drawn directories and of other files.
#[derive(Debug, Default)]
pub(super) struct Counts {
    directories: AtomicU64,
    files: AtomicU64,
}

impl Counts {
    pub(super) fn add(&self, kind: FileKind) {
        let count = match kind {
            FileKind::Directory => &self.directories,
            _ => &self.files,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn line(&self) -> String {
        let number = |count: &AtomicU64, one: &str, many: &str| match count.load(Ordering::Relaxed)
        {
            1 => format!("1 {one}"),
            count => format!("{count} {many}"),
        };
        let directories = number(&self.directories, "directory", "directories");
        format!(
            "\n{directories}, {}\n",
            number(&self.files, "file", "files")
        )
    }
}
