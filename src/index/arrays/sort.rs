//! Sorting of the names of a built tree, while readers use it.
//! The sorted names are made beside the tree. Its inodes get their new numbers in small steps. Then the sorted
//! names replace the others.

use std::mem;

use zerocopy::little_endian::U32;

use super::Arrays;
use crate::index::rows::{Dirent, NONE};

/// Inodes that one step of [`SortedNames::apply`] changes.
const INODES_PER_STEP: usize = 1 << 14;

/// The names of a tree in the order of an index file.
#[derive(Debug)]
pub(in crate::index) struct SortedNames {
    dirents: Vec<Dirent>,
    by_name: Vec<U32>,
    /// By inode number: its first dirent among the sorted ones, and among those of the tree.
    first: Vec<U32>,
    unsorted_first: Vec<U32>,
    /// The next inode that still has its old numbers.
    next_inode: usize,
    /// The next array whose spare room is freed.
    next_array: usize,
}

impl SortedNames {
    /// Bytes that the sorted names of `arrays` take beside them.
    pub(in crate::index) fn memory_bytes(arrays: &Arrays) -> usize {
        let name_bytes = size_of::<Dirent>() + size_of::<U32>();
        arrays.dirents.len() * name_bytes + arrays.inodes.len() * 2 * size_of::<U32>()
    }

    /// Sorts the names of `arrays`, without those that were removed.
    pub(in crate::index) fn of(arrays: &Arrays) -> Self {
        let live = arrays.dirents.iter().filter(|dirent| dirent.ino.get() != 0);
        let mut dirents = Vec::with_capacity(live.clone().count());
        dirents.extend(live.copied());
        dirents.sort_unstable_by(|left, right| {
            let key = |dirent: &Dirent| (dirent.parent.get(), dirent.ino.get());
            let by_age = || left.name.offset().cmp(&right.name.offset());
            key(left).cmp(&key(right)).then_with(by_age)
        });
        let first = first_dirents(&dirents, arrays.inodes.len());
        let unsorted_first = arrays.inodes.iter().map(|inode| match inode.mode.get() {
            0 => NONE.into(),
            _ => inode.dirent,
        });
        let mut sorted = Self {
            by_name: order_by_name(arrays, &dirents),
            unsorted_first: unsorted_first.collect(),
            next_inode: 0,
            next_array: 0,
            first,
            dirents,
        };
        sorted.set_kinds(arrays);
        sorted
    }

    /// Stores in each name the type of its entry; 0 if a lookup does not find the name.
    fn set_kinds(&mut self, arrays: &Arrays) {
        for (number, dirent) in (0_u32..).zip(&mut self.dirents) {
            let ino = dirent.ino.get();
            let first = self.first.get(ino as usize);
            let is_first = first.is_some_and(|first| first.get() == number);
            let named = arrays.name_and_kind(dirent, |_| is_first);
            let kind = named.map_or(0, |(_, kind)| kind);
            dirent.name = dirent.name.with_kind(kind);
        }
    }

    /// Applies the next step to `arrays`, from which this was made: first inodes get their new numbers, then the
    /// names are replaced, then spare room is freed. Returns whether there are more steps.
    ///
    /// Readers may look up names between the steps, because `unsorted_first` has the old numbers.
    pub(in crate::index) fn apply(&mut self, arrays: &mut Arrays) -> bool {
        if self.next_inode == 0 {
            arrays.unsorted_first = mem::take(&mut self.unsorted_first);
        }
        if self.next_inode < arrays.inodes.len() {
            self.renumber_inodes(arrays);
            return true;
        }
        self.next_array += 1;
        arrays.shrink(self.next_array - 1)
    }

    fn renumber_inodes(&mut self, arrays: &mut Arrays) {
        let end = arrays.inodes.len().min(self.next_inode + INODES_PER_STEP);
        for ino in self.next_inode..end {
            if let (Some(inode), Some(&first)) = (arrays.inodes.get_mut(ino), self.first.get(ino)) {
                inode.dirent = first;
            }
        }
        let parent = |dirent: &Dirent| dirent.parent.get() as usize;
        let mut number = self
            .dirents
            .partition_point(|dirent| parent(dirent) < self.next_inode);
        while let Some(rest) = self.dirents.get(number..)
            && let Some(directory) = rest.first().map(parent)
            && directory < end
        {
            let len = rest.partition_point(|dirent| parent(dirent) == directory);
            if let Some(inode) = arrays.inodes.get_mut(directory) {
                inode.data = (number as u64).into();
                inode.children = u32::try_from(len).unwrap_or(NONE).into();
            }
            number += len;
        }
        self.next_inode = end;
    }

    /// Replaces the names of `arrays` after the last step. Takes the old ones, which take long to free.
    pub(in crate::index) fn replace_names(&mut self, arrays: &mut Arrays) {
        mem::swap(arrays.dirents.vec_mut(), &mut self.dirents);
        mem::swap(arrays.by_name.vec_mut(), &mut self.by_name);
        mem::swap(&mut arrays.unsorted_first, &mut self.unsorted_first);
    }

    /// Sorts the names of `arrays`, without readers.
    pub(in crate::index) fn sort_all(arrays: &mut Arrays) {
        let mut sorted = Self::of(arrays);
        while sorted.apply(arrays) {}
        sorted.replace_names(arrays);
    }
}

/// Dirent numbers, sorted by name within each directory.
fn order_by_name(arrays: &Arrays, dirents: &[Dirent]) -> Vec<U32> {
    let count = u32::try_from(dirents.len()).expect("checked by check_name");
    let mut by_name: Vec<U32> = (0..count).map(U32::from).collect();
    let name = |number: &U32| arrays.arena.name(dirents.get(number.get() as usize)?.name);
    let mut rest = by_name.as_mut_slice();
    for siblings in dirents.chunk_by(|left, right| left.parent == right.parent) {
        let (ours, after) = rest.split_at_mut(siblings.len());
        ours.sort_unstable_by(|left, right| name(left).cmp(&name(right)));
        rest = after;
    }
    by_name
}

/// Each entry's first dirent: that with the lowest arena offset, because the builder appends names.
fn first_dirents(dirents: &[Dirent], inodes: usize) -> Vec<U32> {
    let mut firsts = vec![U32::from(NONE); inodes];
    for (number, dirent) in (0_u32..).zip(dirents) {
        let Some(known) = firsts.get_mut(dirent.ino.get() as usize) else {
            continue;
        };
        let first = dirents.get(known.get() as usize);
        if first.is_none_or(|first| dirent.name.offset() < first.name.offset()) {
            *known = number.into();
        }
    }
    firsts
}
