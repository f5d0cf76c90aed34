//! Comparison of a published index with the headers of the files and links that are read.
//!
//! Digests prove that packed bytes are those of the index, but its names, sizes, modes and targets could be anything.
//! So the reader parses the header of each file and symbolic link before the first read of it. The header is usually in the
//! span that the read needs.

use std::slice;

use bytes::Bytes;

use super::Reader;
use super::assemble::plan_plain_parts;
use crate::archive::error::ReadError;
use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::index::{Entry, EntryKind, Index, Ino, Piece};
use crate::tar::{self, Member, MemberKind, Segment};

/// Plain bytes before a payload in which its header is searched first.
const NEAR_BYTES: u64 = 8 << 10;

/// Plain bytes before a payload in which its header must begin, with its extensions and sparse map.
const FAR_BYTES: u64 = 1 << 20;

impl Reader {
    /// Whether the header of `ino` must be compared before its bytes are returned.
    pub(crate) fn must_check_header(&self, ino: Ino) -> bool {
        let checks = self.header_checks.as_ref();
        checks.is_some_and(|checks| !checks.contains(ino))
    }

    /// Compares the header of `ino` with its entry, and remembers that they match. May wait for the source.
    ///
    /// # Errors
    /// When they differ, or the header or rows of the index are unavailable.
    pub(crate) fn check_header(&self, ino: Ino) -> Result<(), ReadError> {
        if !self.with_rows(|| self.matches_header(ino))? {
            let path = self.live_index.read().path(ino).unwrap_or_default();
            tracing::error!("{path}: the published index contradicts the archive");
            self.stats.index_mismatches.increment();
            if let Some(checks) = &self.header_checks {
                checks.record_mismatch();
            }
            return Err(ReadError::IndexMismatch);
        }
        if let Some(checks) = &self.header_checks {
            checks.insert(ino);
        }
        Ok(())
    }

    fn matches_header(&self, ino: Ino) -> Result<bool, ReadError> {
        let index = self.live_index.read();
        let entry = index.entry(ino).ok_or(ReadError::NotAFile)?;
        let payload = if let EntryKind::Symlink(_) = entry.kind() {
            let Some(header_end) = entry.header_end() else {
                return Ok(false);
            };
            header_end
        } else {
            // A file of holes only has no bytes, and its size is not compared.
            let Some(piece) = entry.pieces(0, entry.size()).next() else {
                return Ok(true);
            };
            piece.plain.start()
        };
        let near = self.member_before(&index, payload, NEAR_BYTES)?;
        let member = match near {
            Some(near) => Some(near),
            None => self.member_before(&index, payload, FAR_BYTES)?,
        };
        Ok(member.is_some_and(|member| is_same_entry(&index, entry, &member)))
    }

    /// The member whose payload begins at `payload`, searched in at most `len` bytes before.
    fn member_before(
        &self,
        index: &Index,
        payload: Plain,
        len: u64,
    ) -> Result<Option<Member>, ReadError> {
        let start = payload.0.saturating_sub(len).next_multiple_of(tar::RECORD);
        let Some(wanted) = Extent::new(Plain(start), payload).filter(|wanted| !wanted.is_empty())
        else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        for part in plan_plain_parts(index, wanted)? {
            let part = self.load_part(&part);
            let part = part.map_err(|error| error.unwrap_or(ReadError::Index))?;
            bytes.extend_from_slice(&part);
        }
        Ok(tar::member_before_payload(
            &Bytes::from(bytes),
            wanted.start(),
        ))
    }
}

/// Whether `member` is the file or symbolic link `entry` of `index`. Owner and time are not compared, because global pax
/// headers anywhere in the archive may replace them.
fn is_same_entry(index: &Index, entry: Entry<'_>, member: &Member) -> bool {
    let is_same = match (entry.kind(), &member.kind) {
        (EntryKind::File, MemberKind::File) => {
            entry.size() == member.size
                && entry.mode() == member.mode
                && entry.pieces(0, entry.size()).eq(stored_pieces(member))
        }
        (EntryKind::Symlink(target), MemberKind::Symlink(stored)) => target == stored,
        _ => false,
    };
    let path = ArchivePath::sanitize(&member.name).path;
    is_same && is_same_name(index, entry.ino(), &path)
}

/// The stored pieces of a file, which follow each other in its payload.
fn stored_pieces(member: &Member) -> impl Iterator<Item = Piece> {
    let whole = Segment {
        offset: 0,
        len: member.size,
    };
    let segments = member.sparse.as_deref().unwrap_or(slice::from_ref(&whole));
    let mut start = member.payload.start().0;
    let pieces: Vec<_> = segments
        .iter()
        .map(|segment| {
            let plain = Extent::with_len(Plain(start), segment.len);
            start = plain.end().0;
            let offset = segment.offset;
            Piece { offset, plain }
        })
        .filter(|piece| !piece.plain.is_empty())
        .collect();
    pieces.into_iter()
}

/// Whether `path` is or was the name of `ino`: its path, perhaps through links, or a later entry replaced it.
fn is_same_name(index: &Index, ino: Ino, path: &ArchivePath) -> bool {
    let own = index.path(ino);
    if own.as_ref() == Some(path) {
        return true;
    }
    let mut at = Ino::ROOT;
    for name in path.components() {
        match index.lookup(at, name) {
            Some(entry) if matches!(entry.kind(), EntryKind::Symlink(_)) => {
                // A link in the archive led to the entry's directory, but its last name stays the same.
                let last = |path: &ArchivePath| path.components().last().map(<[u8]>::to_vec);
                return own.as_ref().and_then(last) == last(path);
            }
            Some(entry) => at = entry.ino(),
            None => return false,
        }
    }
    at >= ino
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_member_follow_each_other_in_its_payload() {
        let mut member = Member::new("a", MemberKind::File);
        member.payload = Extent::with_len(Plain(512), 7);
        member.size = 7;
        let piece = |offset, start, len| Piece {
            offset,
            plain: Extent::with_len(Plain(start), len),
        };
        assert!(stored_pieces(&member).eq([piece(0, 512, 7)]));
        let segments = [(0, 0), (10, 3), (20, 4)];
        let segments = segments.map(|(offset, len)| Segment { offset, len });
        member.sparse = Some(segments.to_vec());
        assert!(stored_pieces(&member).eq([piece(10, 512, 3), piece(20, 515, 4)]));
    }
}
