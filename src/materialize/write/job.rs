//! Entries to make: of one member, and hard links at the end of the run.

use super::directory::{Directory, name_of};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::index::{Entry, EntryKind};
use crate::tar::{self, Member, Segment, Timestamp};

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) directory: Directory,
    /// Path in the archive. Its last component is the name in `directory`, unless `name` is set.
    pub(crate) path: ArchivePath,
    /// Name in `directory`, if it differs from the archive's.
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) member: Box<Member>,
    /// Number of members before it.
    pub(crate) number: u64,
    /// Time of last access, if it is kept.
    pub(crate) atime: Option<Timestamp>,
}

impl Job {
    /// An entry with the archive's name, of a member without a number.
    pub(crate) fn new(directory: Directory, path: ArchivePath, member: Member) -> Self {
        Self {
            directory,
            path,
            name: None,
            member: Box::new(member),
            number: 0,
            atime: None,
        }
    }

    pub(crate) fn name(&self) -> &[u8] {
        self.name.as_deref().unwrap_or_else(|| name_of(&self.path))
    }
}

/// A hard link to be made at the end, because its target does not exist yet.
#[derive(Debug)]
pub(crate) struct DeferredLink {
    pub(crate) path: ArchivePath,
    pub(crate) target: ArchivePath,
}

/// A member that makes `entry`.
pub(crate) fn member_of(entry: Entry<'_>) -> Member {
    let kind = match entry.kind() {
        EntryKind::File => tar::MemberKind::File,
        EntryKind::Directory => tar::MemberKind::Directory,
        EntryKind::Symlink(target) => tar::MemberKind::Symlink(target.to_vec()),
        EntryKind::CharDevice(device) => tar::MemberKind::CharDevice(device),
        EntryKind::BlockDevice(device) => tar::MemberKind::BlockDevice(device),
        EntryKind::Fifo => tar::MemberKind::Fifo,
    };
    Member {
        header: Plain(0),
        payload: Extent::with_len(Plain(0), entry.stored_bytes()),
        name: Vec::new(),
        kind,
        mode: entry.mode(),
        uid: entry.uid(),
        gid: entry.gid(),
        user: entry.user().to_vec(),
        group: entry.group().to_vec(),
        mtime: entry.mtime(),
        size: entry.size(),
        sparse: sparse_segments(entry),
        xattrs: entry
            .xattrs()
            .map(|(name, value)| (name.to_vec(), value.to_vec()))
            .collect(),
        has_global_keywords: false,
    }
}

/// The segments of a file with holes; `None` without holes.
fn sparse_segments(entry: Entry<'_>) -> Option<Vec<Segment>> {
    let size = entry.size();
    let mut pieces = entry.pieces(0, size);
    let first = pieces.next();
    let is_all = first.is_none_or(|piece| piece.offset == 0 && piece.plain.len() == size);
    if entry.kind() != EntryKind::File || size == 0 || (first.is_some() && is_all) {
        return None;
    }
    let segments = first.into_iter().chain(pieces).map(|piece| Segment {
        offset: piece.offset,
        len: piece.plain.len(),
    });
    Some(segments.collect())
}
