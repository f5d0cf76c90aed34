//! Comparison of an index that others made with the headers of the entries that are used.
//!
//! Digests prove that packed bytes are those of the index, but its names and attributes could be anything. So the reader
//! parses the header of each file and symbolic link before the first read of it, and those of the directories above. A
//! name that another member's name would hide, such as that of a hard link, has its own header.

use std::collections::HashSet;
use std::iter;

use bytes::Bytes;

use super::Reader;
use super::assemble::plan_plain_parts;
use super::checked_headers::HeaderChecks;
use crate::archive::error::ReadError;
use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::base::resolve::{self, MAX_LINKS};
use crate::index::{Builder, DirentNumber, Entry, EntryKind, Index, IndexResolver, Ino, Options};
use crate::tar::{self, Event, Member, MemberKind, MemberTotals, Parser, RECORD};

/// Plain bytes of a header that are read first.
const FIRST_BYTES: u64 = 4 << 10;

/// Maximum plain bytes that are read at once.
const MAX_STEP_BYTES: u64 = 1 << 20;

/// Maximum plain bytes of a member's headers, most of which the parser drops.
const MAX_HEADER_BYTES: u64 = 1 << 30;

/// Plain bytes before a header in which no extension of it may end.
const BYTES_BEFORE: u64 = 8 << 10;

/// Maximum number of links and names through which one name is proven.
const MAX_DEPTH: usize = MAX_LINKS;

impl Reader {
    /// Whether the header of `ino` must be compared before its bytes are returned.
    pub(crate) fn must_check_header(&self, ino: Ino) -> bool {
        let checks = self.header_checks.as_ref();
        checks.is_some_and(|checks| !checks.contains(ino))
    }

    /// Whether `name` in `parent` must be compared before it leads to its entry: further names of an entry, and devices
    /// and FIFOs, which no read follows.
    pub(crate) fn must_check_name(&self, parent: Ino, name: &[u8]) -> bool {
        let Some(checks) = &self.header_checks else {
            return false;
        };
        let must_check = |index: &Index| {
            let dirent = index.find_dirent(parent, name)?;
            let ino = index.named_ino(dirent)?;
            let kind = index.entry(ino)?.kind();
            let is_further = kind != EntryKind::Directory && index.first_name(ino) != Some(dirent);
            let is_unknown = kind.is_special() && !checks.contains(ino);
            Some(is_further && !checks.contains_name(dirent) || is_unknown)
        };
        // The comparison reports rows that are missing.
        (self.live_index.read(must_check)).map_or(true, |must_check| must_check.unwrap_or(false))
    }

    /// Compares the header of `ino`, and those of the directories above, and remembers that they match. May wait for the
    /// source.
    pub(crate) fn check_header(&self, ino: Ino) -> Result<(), ReadError> {
        self.compare(|comparison| {
            let path = || comparison.index.path(ino);
            let path = path().unwrap_or_default();
            Ok((comparison.entry_below_directories(ino)?, path))
        })
    }

    /// Compares `name` in `parent` as well as its entry, or a link called so to an entry of a lower layer.
    pub(crate) fn check_name(&self, parent: Ino, name: &[u8]) -> Result<(), ReadError> {
        self.compare(|comparison| {
            let index = comparison.index;
            let Some(dirent) = index.find_dirent(parent, name) else {
                let is_same = comparison.unresolved_link(parent, name)?;
                return Ok((is_same, path_in(index, parent, name)));
            };
            let ino = index.named_ino(dirent).ok_or(ReadError::Index)?;
            let is_same = comparison.entry_below_directories(ino)?
                && comparison.entry_below_directories(parent)?
                && comparison.name(dirent)?;
            Ok((is_same, index.path_of(dirent).unwrap_or_default()))
        })
    }

    fn compare(
        &self,
        compare: impl Fn(&mut HeaderComparison<'_>) -> Result<(bool, ArchivePath), ReadError>,
    ) -> Result<(), ReadError> {
        let Some(checks) = &self.header_checks else {
            return Ok(());
        };
        let compared = self.live_index.read(|index| {
            compare(&mut HeaderComparison {
                reader: self,
                checks,
                index,
                depth: 0,
                begun: HashSet::new(),
            })
        });
        let compared = compared?.map_err(|error| self.index_error(error));
        let (is_same, path) = compared?;
        if is_same {
            return Ok(());
        }
        Err(self.report_mismatch(&path))
    }

    /// Reports that the index contradicts the archive at `path`, and returns the error for it.
    pub(crate) fn report_mismatch(&self, path: &ArchivePath) -> ReadError {
        tracing::error!("{path}: the published index contradicts the archive");
        self.stats.index_mismatches.increment();
        if let Some(checks) = &self.header_checks {
            checks.record_mismatch();
        }
        ReadError::IndexMismatch
    }
}

/// The path of `name` in the directory `parent` of `index`.
fn path_in(index: &Index, parent: Ino, name: &[u8]) -> ArchivePath {
    let mut path = index.path(parent).unwrap_or_default();
    path.push(name);
    path
}

/// A comparison of entries and names with the archive.
struct HeaderComparison<'a> {
    reader: &'a Reader,
    checks: &'a HeaderChecks,
    index: &'a Index,
    /// Links and names that are being proven.
    depth: usize,
    /// Entries whose comparison began. One that has not matched yet proves nothing, so none is compared twice.
    begun: HashSet<Ino>,
}

impl HeaderComparison<'_> {
    /// Whether `ino` and the directories above equal their headers.
    fn entry_below_directories(&mut self, ino: Ino) -> Result<bool, ReadError> {
        // A hostile index could name parents in a circle, but a path ends.
        if self.index.path(ino).is_none() {
            return Ok(false);
        }
        let chain = iter::once(ino).chain(self.index.directories_above(ino));
        let unknown: Vec<Ino> = chain
            .take_while(|&ino| !self.checks.contains(ino))
            .collect();
        // The directories first, because an entry that matched is not compared again.
        for &ino in unknown.iter().rev() {
            if self.reader.read_priority.is_closed() {
                return Err(ReadError::Unscanned);
            }
            if !self.begun.insert(ino) || !self.entry(ino)? {
                return Ok(false);
            }
            self.checks.insert(ino);
        }
        Ok(true)
    }

    /// Whether `ino` equals its header, and has the name in it.
    fn entry(&mut self, ino: Ino) -> Result<bool, ReadError> {
        let entry = self.index.entry(ino).ok_or(ReadError::NotAFile)?;
        let Some(header) = entry.header() else {
            return Ok(entry.is_unchanged_implied());
        };
        match self.member_at(header)? {
            Some(member) if is_same_entry(self.index, entry, &member) => {
                self.has_name(ino, &member)
            }
            _ => Ok(false),
        }
    }

    fn has_name(&mut self, ino: Ino, member: &Member) -> Result<bool, ReadError> {
        match self.index.first_name(ino) {
            Some(dirent) => self.is_name_of(dirent, member),
            None => self.leads_to(&member.name, &ArchivePath::root()),
        }
    }

    /// Whether `dirent` is a name of its entry: the one in its header, or that of a hard link.
    fn name(&mut self, dirent: DirentNumber) -> Result<bool, ReadError> {
        let index = self.index;
        let ino = index.named_ino(dirent).ok_or(ReadError::Index)?;
        if self.checks.contains_name(dirent) || index.first_name(ino) == Some(dirent) {
            return Ok(true);
        }
        let header = index.entry(ino).and_then(|entry| entry.header());
        let member = header.map(|header| self.member_at(header)).transpose()?;
        let is_name = match member.flatten() {
            Some(member) => self.is_name_of(dirent, &member)?,
            None => false,
        };
        if is_name {
            self.checks.insert_name(dirent);
        }
        Ok(is_name)
    }

    /// Whether `dirent` is a name of `member`, by itself or by hard links.
    fn is_name_of(&mut self, dirent: DirentNumber, member: &Member) -> Result<bool, ReadError> {
        let path = self.index.path_of(dirent).ok_or(ReadError::Index)?;
        if self.leads_to(&member.name, &path)? {
            return Ok(true);
        }
        let header = self.index.link_header(dirent);
        let link = header.map(|header| self.member_at(header)).transpose()?;
        let Some(link) = link.flatten() else {
            return Ok(false);
        };
        let MemberKind::HardLink(target) = &link.kind else {
            return Ok(false);
        };
        if !self.leads_to(&link.name, &path)? {
            return Ok(false);
        }
        let target = ArchivePath::sanitize(target).path;
        if target == ArchivePath::sanitize(&member.name).path
            || self.leads_to(&member.name, &target)?
        {
            return Ok(true);
        }
        // A link to another link, perhaps through symbolic links.
        let targets = [false, true].map(|is_chroot| self.resolve(&target, is_chroot));
        for (resolved, links) in targets.into_iter().flatten() {
            if self.are_same(&links)? && self.leads_to(&member.name, &resolved)? {
                return Ok(true);
            }
            let other = resolved.split_last().and_then(|(directory, name)| {
                let directory = self.index.find(&directory)?;
                self.index.find_dirent(directory.ino(), name)
            });
            let ino = self.index.named_ino(dirent);
            if let Some(other) = other.filter(|&other| other != dirent)
                && self.index.named_ino(other) == ino
                && self.are_same(&links)?
            {
                return self.deeper(|this| this.is_name_of(other, member));
            }
        }
        Ok(false)
    }

    /// Whether the link to a lower layer called `name` in `parent` equals its header, by itself or through another such
    /// link.
    fn unresolved_link(&mut self, parent: Ino, name: &[u8]) -> Result<bool, ReadError> {
        let index = self.index;
        let header = index.unresolved_header(parent, name);
        let (Some(header), Some(target)) = (header, index.unresolved_target(parent, name)) else {
            return Ok(false);
        };
        let Some(link) = self.member_at(header)? else {
            return Ok(false);
        };
        let MemberKind::HardLink(to) = &link.kind else {
            return Ok(false);
        };
        if !self.entry_below_directories(parent)?
            || !self.leads_to(&link.name, &path_in(index, parent, name))?
        {
            return Ok(false);
        }
        if self.leads_to(to, &ArchivePath::sanitize(target).path)? {
            return Ok(true);
        }
        let to = ArchivePath::sanitize(to).path;
        let resolved = [false, true].map(|is_chroot| self.resolve(&to, is_chroot));
        for (path, links) in resolved.into_iter().flatten() {
            let Some((directory, last)) = path.split_last() else {
                continue;
            };
            let directory = index.find(&directory).map(|directory| directory.ino());
            if let Some(directory) = directory.filter(|&found| (found, last) != (parent, name))
                && index.unresolved_target(directory, last) == Some(target)
                && self.are_same(&links)?
            {
                return self.deeper(|this| this.unresolved_link(directory, last));
            }
        }
        Ok(false)
    }

    /// Whether a member called `name` is at `path`, where symbolic links of the archive may lead.
    fn leads_to(&mut self, name: &[u8], path: &ArchivePath) -> Result<bool, ReadError> {
        let name = ArchivePath::sanitize(name).path;
        if name == *path {
            return Ok(true);
        }
        for is_chroot in [false, true] {
            if let Some((resolved, links)) = self.resolve(&name, is_chroot)
                && resolved == *path
                && self.are_same(&links)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The path of `name` without symbolic links before its last component, and these links.
    fn resolve(&self, name: &ArchivePath, is_chroot: bool) -> Option<(ArchivePath, Vec<Ino>)> {
        let (directory, last) = name.split_last()?;
        let mut resolver = IndexResolver::new(self.index);
        (resolver.is_chroot, resolver.passes_missing) = (is_chroot, true);
        let found = resolve::directory_with_path(&mut resolver, directory.components());
        let (_, mut path) = found.ok()?;
        path.push(last);
        Some((path, resolver.links))
    }

    fn are_same(&mut self, links: &[Ino]) -> Result<bool, ReadError> {
        for &link in links {
            if !self.deeper(|this| this.entry_below_directories(link))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn deeper(
        &mut self,
        prove: impl FnOnce(&mut Self) -> Result<bool, ReadError>,
    ) -> Result<bool, ReadError> {
        if self.depth == MAX_DEPTH {
            return Ok(false);
        }
        self.depth += 1;
        let proven = prove(self);
        self.depth -= 1;
        proven
    }

    /// The member whose first header is at `start`. Global pax headers before it are not applied.
    fn member_at(&mut self, start: Plain) -> Result<Option<Member>, ReadError> {
        let before = Plain(
            start
                .0
                .saturating_sub(BYTES_BEFORE)
                .next_multiple_of(RECORD),
        );
        let end = self.index.origin().plain_bytes;
        if start.0 >= end {
            return Ok(None);
        }
        let has_extension = tar::ends_with_extension(&self.read_plain(before, start)?);
        if has_extension && !self.ends_content(start)? {
            return Ok(None);
        }
        let parser = Parser::resume(tar::Options::default(), start, MemberTotals::default(), &[]);
        let Ok(mut parser) = parser else {
            return Ok(None);
        };
        let (mut at, mut step) = (start, FIRST_BYTES);
        loop {
            match parser.pull() {
                Ok(Event::Member(member)) => return Ok(Some(*member)),
                Ok(Event::NeedInput) if at.0 - start.0 < MAX_HEADER_BYTES && at.0 < end => {
                    let next = Plain(at.0.saturating_add(step).min(end));
                    parser.push(self.read_plain(at, next)?);
                    (at, step) = (next, (2 * step).min(MAX_STEP_BYTES));
                }
                Ok(Event::Warning(_) | Event::Damaged(_)) => {}
                _ => return Ok(None),
            }
        }
    }

    /// Whether the content of a file that equals its header ends at `end`, so that no extension does.
    fn ends_content(&mut self, end: Plain) -> Result<bool, ReadError> {
        let ends_here = |entry: &Entry<'_>| {
            let last = entry.pieces(0, entry.size()).last();
            let last = last.and_then(|piece| piece.plain.end().0.checked_next_multiple_of(RECORD));
            last == Some(end.0)
        };
        match self.index.entries().find(ends_here) {
            Some(file) => self.deeper(|this| this.entry_below_directories(file.ino())),
            None => Ok(false),
        }
    }

    fn read_plain(&self, start: Plain, end: Plain) -> Result<Bytes, ReadError> {
        let wanted = Extent::new(start, end).filter(|wanted| !wanted.is_empty());
        let Some(wanted) = wanted else {
            return Ok(Bytes::new());
        };
        let mut bytes = Vec::new();
        for part in plan_plain_parts(self.index, wanted)? {
            let part = self.reader.load_part(&part);
            let part = part.map_err(|error| error.unwrap_or(ReadError::Index))?;
            bytes.extend_from_slice(&part);
        }
        Ok(Bytes::from(bytes))
    }
}

/// Whether `entry` of `index` is the one that a scan makes of `member`, apart from names. Global pax headers anywhere in
/// the archive may replace owner, time and attributes.
fn is_same_entry(index: &Index, entry: Entry<'_>, member: &Member) -> bool {
    let mut builder = Builder::new(Options::default());
    let unnamed = Member {
        name: b"entry".to_vec(),
        ..member.clone()
    };
    if builder.add_member(&unnamed).is_err() {
        return false;
    }
    let scanned = builder.index().lookup(Ino::ROOT, b"entry");
    let is_same = |scanned: Entry<'_>| {
        let is_same_content = scanned.kind() == entry.kind()
            && scanned.mode() == entry.mode()
            && scanned.size() == entry.size()
            && (scanned.pieces(0, scanned.size())).eq(entry.pieces(0, entry.size()));
        let is_same_owner = (scanned.uid(), scanned.gid()) == (entry.uid(), entry.gid())
            && (scanned.user(), scanned.group()) == (entry.user(), entry.group());
        let is_same_rest =
            || scanned.mtime() == entry.mtime() && scanned.xattrs().eq(entry.xattrs());
        is_same_content && (index.has_global_keywords() || is_same_owner && is_same_rest())
    };
    scanned.is_some_and(is_same)
}
