//! Iterates over a tree in byte order.

use crate::base::archive_path::ArchivePath;
use crate::index::{Child, Entry, EntryKind, Index, Ino};

/// Iterates over the names in directory `from`, in byte order. If `recursive`, descends into each directory
/// at once. If `from` is no directory, yields its entry, if any.
pub fn walk(index: &Index, from: Ino, recursive: bool) -> Walk<'_> {
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
pub struct Walk<'a> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::test_support::{directory, file, hard_link, index};

    fn paths(index: &Index, from: Ino, recursive: bool) -> Vec<String> {
        walk(index, from, recursive)
            .map(|(path, _)| path.to_string())
            .collect()
    }

    fn tree() -> Index {
        index(&[
            file("b/c/d", 0..1),
            file("b/a", 0..1),
            directory("empty", 0o755),
            file("a", 0..1),
            file("b.txt", 0..1),
            hard_link("z", "a"),
        ])
    }

    #[test]
    fn walk_yields_names_in_byte_order_depth_first() {
        assert_eq!(
            paths(&tree(), Ino::ROOT, true),
            ["a", "b", "b/a", "b/c", "b/c/d", "b.txt", "empty", "z"]
        );
    }

    #[test]
    fn without_recursion_only_one_directory_is_listed() {
        assert_eq!(
            paths(&tree(), Ino::ROOT, false),
            ["a", "b", "b.txt", "empty", "z"]
        );
    }

    #[test]
    fn walk_below_root_yields_paths_from_root() {
        let tree = tree();
        let b = tree.lookup(Ino::ROOT, b"b").unwrap().ino();
        assert_eq!(paths(&tree, b, true), ["b/a", "b/c", "b/c/d"]);
    }

    #[test]
    fn walk_of_file_yields_itself_and_of_missing_nothing() {
        let tree = tree();
        let a = tree.lookup(Ino::ROOT, b"a").unwrap().ino();
        assert_eq!(paths(&tree, a, true), ["a"]);
        assert!(paths(&tree, Ino(999), true).is_empty());
        assert!(paths(&index(&[]), Ino::ROOT, true).is_empty());
    }

    #[test]
    fn deep_tree_is_walked_completely() {
        let tree = index(&[file(&("a/".repeat(2000) + "f"), 0..1)]);
        assert_eq!(walk(&tree, Ino::ROOT, true).count(), 2001);
    }
}
