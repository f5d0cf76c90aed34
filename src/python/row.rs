//! Entries of an index as rows for Python, and paths that lead to them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::LazyLock;

use pyo3::prelude::*;

use crate::base::passwd::Accounts;
use crate::base::xattr::posix_acl;
use crate::index::{Entry, EntryKind, Index, Ino};
use crate::materialize::member_of;
use crate::tar::{Member, MemberKind};

/// The users and groups that ACLs name.
static ACCOUNTS: LazyLock<Accounts> = LazyLock::new(Accounts::load_system);

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
    pub(super) fn of_entry(path: &[u8], entry: Entry<'_>) -> Self {
        Self::new(path, &member_of(entry), entry.ino().0)
    }

    pub(super) fn of_member(member: &Member) -> Self {
        let name = member.name.strip_suffix(b"/").unwrap_or(&member.name);
        Self::new(if name == b"." { b"" } else { name }, member, 0)
    }

    fn new(path: &[u8], member: &Member, ino: u32) -> Self {
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let (kind, target) = match &member.kind {
            MemberKind::File => ("file", &[][..]),
            MemberKind::Directory => ("directory", &[][..]),
            MemberKind::Symlink(target) => ("symlink", &**target),
            MemberKind::HardLink(target) => ("hard_link", &**target),
            MemberKind::CharDevice(_) => ("char_device", &[][..]),
            MemberKind::BlockDevice(_) => ("block_device", &[][..]),
            MemberKind::Fifo => ("fifo", &[][..]),
        };
        let seconds = member.mtime.seconds.saturating_mul(1_000_000_000);
        Self(
            text(path),
            kind,
            member.size,
            seconds.saturating_add(member.mtime.nanoseconds.into()),
            mode(member),
            member.uid,
            member.gid,
            text(&member.user),
            text(&member.group),
            text(target),
            ino,
        )
    }
}

/// The mode that a mount shows.
fn mode(member: &Member) -> u32 {
    let is_link = matches!(member.kind, MemberKind::Symlink(_));
    if is_link || member.xattrs.is_empty() {
        return member.mode;
    }
    let xattrs = member
        .xattrs
        .iter()
        .map(|(name, value)| (&**name, &**value));
    posix_acl::mode_with_acl(member.mode, posix_acl::find_access(xattrs, &ACCOUNTS))
}

/// The wanted entries in the directory `ino` at `path`, or with `deep` also those below.
pub(super) fn list(
    index: &Index,
    ino: Ino,
    path: &[u8],
    deep: bool,
    is_wanted: impl Fn(Ino) -> bool,
) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut pending = vec![(ino, path.to_vec())];
    while let Some((directory, path)) = pending.pop() {
        for child in index.children(directory, 0) {
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            let slash: &[u8] = if path.is_empty() { b"" } else { b"/" };
            let name = [&*path, slash, child.name].concat();
            if is_wanted(entry.ino()) {
                rows.push(Row::of_entry(&name, entry));
            }
            if deep && entry.kind() == EntryKind::Directory {
                pending.push((entry.ino(), name));
            }
        }
    }
    rows
}
