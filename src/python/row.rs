//! Entries of an index as rows for Python, and paths that lead to them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use pyo3::prelude::*;

use crate::base::resolve::{MAX_LINKS, PathError};
use crate::index::{Entry, EntryKind, Index, Ino};
use crate::tar::{Member, MemberKind, Timestamp};

/// Attributes of an entry, in the order of the fields of `tarfs.Entry`.
///
/// Python gets names as `os.fsdecode` returns them, so that those that are not UTF-8 survive.
#[derive(IntoPyObject)]
pub(super) struct Row(
    OsString,
    &'static str,
    u64,
    i64,
    u32,
    u32,
    u32,
    OsString,
    OsString,
    OsString,
    u32,
);

impl Row {
    /// The entry at `path`.
    pub(super) fn of_entry(path: &[u8], entry: &Entry<'_>) -> Self {
        let (kind, target) = match entry.kind() {
            EntryKind::File => ("file", &[][..]),
            EntryKind::Directory => ("directory", &[][..]),
            EntryKind::Symlink(target) => ("symlink", target),
            EntryKind::CharDevice(_) => ("char_device", &[][..]),
            EntryKind::BlockDevice(_) => ("block_device", &[][..]),
            EntryKind::Fifo => ("fifo", &[][..]),
        };
        Self(
            text(path),
            kind,
            entry.size(),
            time(entry.mtime()),
            entry.mode(),
            entry.uid(),
            entry.gid(),
            text(entry.user()),
            text(entry.group()),
            text(target),
            entry.ino().0,
        )
    }

    /// A member of the archive.
    pub(super) fn of_member(member: &Member) -> Self {
        let (kind, target) = match &member.kind {
            MemberKind::File => ("file", &[][..]),
            MemberKind::Directory => ("directory", &[][..]),
            MemberKind::Symlink(target) => ("symlink", &**target),
            MemberKind::HardLink(target) => ("hard_link", &**target),
            MemberKind::CharDevice(_) => ("char_device", &[][..]),
            MemberKind::BlockDevice(_) => ("block_device", &[][..]),
            MemberKind::Fifo => ("fifo", &[][..]),
        };
        let name = member.name.strip_suffix(b"/").unwrap_or(&member.name);
        Self(
            text(if name == b"." { b"" } else { name }),
            kind,
            member.size,
            time(member.mtime),
            member.mode,
            member.uid,
            member.gid,
            text(&member.user),
            text(&member.group),
            text(target),
            0,
        )
    }
}

fn text(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// Nanoseconds since 1970.
fn time(time: Timestamp) -> i64 {
    let seconds = time.seconds.saturating_mul(1_000_000_000);
    seconds.saturating_add(time.nanoseconds.into())
}

/// Reason why a path leads to no entry.
#[derive(Debug)]
pub(super) enum Missing {
    /// A name is not in its directory.
    Name,
    /// The path cannot be followed.
    Path(PathError),
}

/// Finds the entry at `path`, and follows symbolic links inside the archive: the last one only with `follow`.
pub(super) fn find(index: &Index, path: &[u8], follow: bool) -> Result<Ino, Missing> {
    let split = |path: &[u8]| -> Vec<Vec<u8>> {
        let names = path.split(|&byte| byte == b'/').rev();
        names.map(<[u8]>::to_vec).collect()
    };
    // The next name is the last.
    let (mut pending, mut ancestors, mut links) = (split(path), vec![Ino::ROOT], 0);
    while let Some(name) = pending.pop() {
        match &*name {
            b"" | b"." => continue,
            b".." if ancestors.len() > 1 => {
                ancestors.pop();
                continue;
            }
            b".." => return Err(Missing::Path(PathError::EscapesRoot)),
            _ => {}
        }
        let parent = ancestors.last().copied().unwrap_or(Ino::ROOT);
        let is_last = pending.iter().all(|name| matches!(&**name, b"" | b"."));
        let entry = index.lookup(parent, &name).ok_or(Missing::Name)?;
        match entry.kind() {
            EntryKind::Symlink(target) if follow || !is_last => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Missing::Path(PathError::TooManyLinks));
                }
                if target.first() == Some(&b'/') {
                    return Err(Missing::Path(PathError::EscapesRoot));
                }
                pending.extend(split(target));
            }
            EntryKind::Directory => ancestors.push(entry.ino()),
            _ if is_last => return Ok(entry.ino()),
            _ => return Err(Missing::Path(PathError::NotADirectory)),
        }
    }
    Ok(ancestors.last().copied().unwrap_or(Ino::ROOT))
}

/// All entries in the directory `ino` at `path`, or with `deep` also those below.
pub(super) fn list(index: &Index, ino: Ino, path: &[u8], deep: bool) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut pending = vec![(ino, path.to_vec())];
    while let Some((directory, path)) = pending.pop() {
        for child in index.children(directory, 0) {
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            let mut name = path.clone();
            if !name.is_empty() {
                name.push(b'/');
            }
            name.extend_from_slice(child.name);
            rows.push(Row::of_entry(&name, &entry));
            if deep && entry.kind() == EntryKind::Directory {
                pending.push((entry.ino(), name));
            }
        }
    }
    rows
}
