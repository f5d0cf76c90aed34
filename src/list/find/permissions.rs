//! The argument of `-perm`.

use crate::tree::{ALL_MODE_BITS, apply_mode};

/// How permission bits are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Match {
    /// `MODE`: all twelve bits.
    Exact,
    /// `-MODE`: each of these bits is set.
    Each,
    /// `/MODE`: one of them is set.
    Any,
}

/// Permission bits that a test accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Permissions {
    kind: Match,
    of_file: u32,
    /// Of a directory. `X` sets bits only here.
    of_directory: u32,
}

impl Permissions {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (kind, mode) = match text.split_at_checked(1)? {
            ("/", mode) => (Match::Any, mode),
            ("-", mode) => (Match::Each, mode),
            _ => (Match::Exact, text),
        };
        // As in GNU find, because it meant `/644` in old versions.
        if matches!(text.as_bytes(), [b'+', b'0'..=b'7', ..]) {
            return None;
        }
        let (of_file, of_directory) = (
            apply_mode(mode, 0, false, 0)?,
            apply_mode(mode, 0, true, 0)?,
        );
        // No bit at all is set in every file.
        let kind = match kind {
            Match::Any if of_file == 0 && of_directory == 0 => Match::Each,
            kind => kind,
        };
        Some(Self {
            kind,
            of_file,
            of_directory,
        })
    }

    pub(super) fn matches(self, mode: u32, is_directory: bool) -> bool {
        let wanted = if is_directory {
            self.of_directory
        } else {
            self.of_file
        };
        match self.kind {
            Match::Exact => mode & ALL_MODE_BITS == wanted,
            Match::Each => mode & wanted == wanted,
            Match::Any => mode & wanted != 0,
        }
    }
}
