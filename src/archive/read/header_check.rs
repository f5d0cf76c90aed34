//! Comparison of a published index with the headers of the files that are read.
//!
//! Digests prove that packed bytes are those of the index, but its names, sizes and modes could be anything.
//! So the reader parses the header of each file before the first read of it. The header is usually in the
//! span that the read needs.

use bytes::Bytes;

use super::Reader;
use super::assemble::plan_plain_parts;
use crate::archive::error::ReadError;
use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::index::{EntryKind, Index, Ino};
use crate::tar::{self, Member, MemberKind};

/// Plain bytes before a payload in which its header is searched first.
const NEAR_BYTES: u64 = 8 << 10;

/// Plain bytes before a payload in which its header must begin, with its extensions and sparse map.
const FAR_BYTES: u64 = 1 << 20;

impl Reader {
    /// Whether the header of `ino` must be compared before its bytes are returned.
    pub(super) fn must_check_header(&self, ino: Ino) -> bool {
        let checks = self.header_checks.as_ref();
        checks.is_some_and(|checks| !checks.contains(ino))
    }

    /// Compares the header of `ino` with its entry. May wait for the source.
    ///
    /// # Errors
    /// When they differ, or the header is unavailable.
    pub(super) fn check_header(&self, ino: Ino) -> Result<(), ReadError> {
        let index = self.live_index.read();
        let entry = index.entry(ino);
        let piece = entry.and_then(|entry| entry.pieces(0, entry.size()).next());
        let matches = match piece {
            // A file of holes only has no bytes, and its size is not compared.
            None => true,
            Some(piece) => {
                let payload = piece.plain.start();
                let member = self.member_before(&index, payload, NEAR_BYTES)?;
                let member = match member {
                    None => self.member_before(&index, payload, FAR_BYTES)?,
                    near => near,
                };
                member.is_some_and(|member| is_same_file(&index, ino, &member))
            }
        };
        if !matches {
            let path = index.path(ino).unwrap_or_default();
            tracing::error!("{path}: the published index contradicts the archive");
            self.stats.index_mismatches.increment();
            return Err(ReadError::IndexMismatch);
        }
        if let Some(checks) = &self.header_checks {
            checks.insert(ino);
        }
        Ok(())
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

/// Whether `member` is the file `ino` of `index`. Owner and time are not compared, because global pax headers
/// anywhere in the archive may replace them.
fn is_same_file(index: &Index, ino: Ino, member: &Member) -> bool {
    let Some(entry) = index.entry(ino) else {
        return false;
    };
    let mut pieces = entry.pieces(0, entry.size());
    let payload = member.payload.start();
    let starts_there = pieces
        .next()
        .is_some_and(|piece| piece.plain.start() == payload);
    entry.kind() == EntryKind::File
        && member.kind == MemberKind::File
        && starts_there
        && entry.size() == member.size
        && entry.mode() == member.mode
        && is_same_name(index, ino, &ArchivePath::sanitize(&member.name).path)
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
