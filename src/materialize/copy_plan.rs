//! Plan of a copy by an index: its entries in archive order. Pure.

use std::ops::Range;

use crate::base::archive_path::ArchivePath;
use crate::index::{EntryKind, Index, Ino};

const BATCH_ENTRIES: usize = 256;

/// One name of a non-directory entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Name {
    pub(super) ino: Ino,
    pub(super) parent: Ino,
    /// Number of the name in that directory.
    number: u32,
}

/// All entries below one directory of an index.
#[derive(Debug)]
pub(super) struct CopyPlan {
    root: Ino,
    /// Number of components of the root's own path.
    root_depth: usize,
    /// Directories below the root, parents first.
    pub(super) directories: Vec<Ino>,
    /// Names sorted by entry. Each entry is written under its first name.
    names: Vec<Name>,
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl CopyPlan {
    pub(super) fn new(index: &Index, root: Ino) -> Self {
        let mut plan = Self {
            root,
            root_depth: index.path(root).map_or(0, |path| path.components().count()),
            directories: Vec::new(),
            names: Vec::new(),
            files: 0,
            bytes: 0,
        };
        let mut pending = vec![root];
        while let Some(parent) = pending.pop() {
            for child in index.children(parent, 0) {
                let Some(entry) = index.entry(child.ino) else {
                    continue;
                };
                if entry.kind() == EntryKind::Directory {
                    plan.directories.push(child.ino);
                    pending.push(child.ino);
                    continue;
                }
                plan.names.push(Name {
                    ino: child.ino,
                    parent,
                    number: child.number,
                });
            }
        }
        // A directory has a higher number than its parent.
        plan.directories.sort_unstable();
        plan.names.sort_unstable();
        let entries = plan.names.chunk_by(|one, other| one.ino == other.ino);
        for entry in entries.filter_map(|names| index.entry(names.first()?.ino)) {
            if entry.kind() == EntryKind::File {
                plan.files += 1;
                plan.bytes = plan.bytes.saturating_add(entry.stored_bytes());
            }
        }
        plan
    }

    /// All names of the entry whose first name is at `position`.
    pub(super) fn names_at(&self, position: usize) -> &[Name] {
        let rest = self.names.get(position..).unwrap_or_default();
        let mut entries = rest.chunk_by(|one, other| one.ino == other.ino);
        entries.next().unwrap_or_default()
    }

    pub(super) fn names_of(&self, ino: Ino) -> &[Name] {
        let names = self.names_at(self.names.partition_point(|name| name.ino < ino));
        match names.first() {
            Some(name) if name.ino == ino => names,
            _ => &[],
        }
    }

    /// The next batch for one copy thread. Its files begin in one span, so that threads decode different spans.
    pub(super) fn batch(&self, index: &Index, position: usize) -> Range<usize> {
        let rest = self.names.get(position..).unwrap_or_default();
        let mut first = None;
        let len = rest
            .iter()
            .take(BATCH_ENTRIES)
            .take_while(|name| {
                let Some(span) = first_span(index, name.ino) else {
                    return true;
                };
                *first.get_or_insert(span) == span
            })
            .count();
        // Include all names of the last entry.
        let last = rest.get(..len).and_then(<[Name]>::last);
        let more = last.map_or(0, |last| {
            let rest = rest.get(len..).unwrap_or_default();
            rest.iter().take_while(|name| name.ino == last.ino).count()
        });
        position..position + len + more
    }

    /// Path of `name` below the root; `None` when the index is inconsistent.
    pub(super) fn path(&self, index: &Index, name: &Name) -> Option<ArchivePath> {
        let mut path = self.directory(index, name.parent)?;
        let child = index.children(name.parent, name.number).next()?;
        (child.ino == name.ino && child.number == name.number).then(|| path.push(child.name))?;
        Some(path)
    }

    pub(super) fn directory(&self, index: &Index, ino: Ino) -> Option<ArchivePath> {
        if ino == self.root {
            return Some(ArchivePath::root());
        }
        index.path(ino)?.strip_components(self.root_depth)
    }
}

fn first_span(index: &Index, ino: Ino) -> Option<u32> {
    let piece = index.entry(ino)?.pieces(0, u64::MAX).next()?;
    index.span_at(piece.plain.start())
}
