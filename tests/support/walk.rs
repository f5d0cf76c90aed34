//! Iterates over a tree in byte order.

use tarfs::ArchivePath;
use tarfs::index::{Child, Entry, EntryKind, Index, Ino};

/// Iterates over the names in directory `from`, in byte order. If `recursive`, descends into each directory
/// at once. If `from` is no directory, yields its entry, if any.
pub(crate) fn walk(index: &Index, from: Ino, recursive: bool) -> Walk<'_> {
    let mut walk = Walk {
        index,
        recursive,
        directory: index.path(from).unwrap_or_default(),
        levels: Vec::new(),
        single: None,
    };
    match index.entry(from) {
        Some(entry) if entry.kind() == EntryKind::Directory => walk.levels.push((from, 0)),
        single => walk.single = single,
    }
    walk
}

/// Iterator of [`walk()`], which needs memory for one path and a few bytes per level.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    index: &'a Index,
    recursive: bool,
    /// The path of the last level.
    directory: ArchivePath,
    /// The directories down to it, each with the number of its next child, by name.
    levels: Vec<(Ino, u32)>,
    single: Option<Entry<'a>>,
}

impl<'a> Walk<'a> {
    fn next_child(&mut self) -> Option<Child<'a>> {
        let (directory, next) = self.levels.last_mut()?;
        let child = self.index.children_by_name(*directory, *next).next()?;
        *next = child.number.saturating_add(1);
        Some(child)
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = (ArchivePath, Entry<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(entry) = self.single.take() {
            return Some((self.directory.clone(), entry));
        }
        while !self.levels.is_empty() {
            let Some(child) = self.next_child() else {
                self.levels.pop();
                if let Some((above, _)) = self.directory.split_last() {
                    self.directory = above;
                }
                continue;
            };
            let Some(entry) = self.index.entry(child.ino) else {
                continue;
            };
            let mut path = self.directory.clone();
            path.push(child.name);
            if self.recursive && entry.kind() == EntryKind::Directory {
                self.levels.push((child.ino, 0));
                self.directory = path.clone();
            }
            return Some((path, entry));
        }
        None
    }
}
