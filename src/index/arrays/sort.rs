//! Sorting of the names of a built tree, while readers use it.
//! The order is found beside the tree, in eight bytes a name. Then the names move to their places in small steps.

use zerocopy::little_endian::U32;

use super::Arrays;
use super::places::{Bits, Places};
use crate::index::storage::row_types::{Dirent, NONE};

/// Names, or inodes of directories, that one step of [`SortedNames::apply`] changes.
const ROWS_PER_STEP: usize = 1 << 13;

/// The order of the names of a tree in an index file, and the steps that establish it.
#[derive(Debug)]
pub(in crate::index) struct SortedNames {
    /// Numbers of sorted dirents, by name within each directory.
    by_name: Vec<U32>,
    /// The places of the names, before the first step has passed them to the tree.
    places: Option<Places>,
    /// Number of names that are not removed.
    live: usize,
    /// The next dirent to place, and the next inode of a directory without the numbers of its dirents.
    next_dirent: usize,
    next_inode: usize,
    /// The next array whose spare room is freed.
    next_array: usize,
}

impl SortedNames {
    /// Bytes that the sort of `arrays` takes beside them.
    pub(in crate::index) fn memory_bytes(arrays: &Arrays) -> usize {
        let (dirents, inodes) = (arrays.dirents.len(), arrays.inodes.len());
        // First the ends of directories, then the places.
        (dirents + dirents.max(inodes + 1)) * size_of::<U32>() + (dirents + inodes) / 8 + 16
    }

    /// Finds the order of the names of `arrays`.
    pub(in crate::index) fn of(arrays: &Arrays) -> Self {
        let mut by_name = sorted_order(arrays);
        let mut sorted = vec![U32::default(); by_name.len()];
        for (place, number) in (0_u32..).zip(&by_name) {
            if let Some(sorted) = sorted.get_mut(number.get() as usize) {
                *sorted = place.into();
            }
        }
        let live = by_name.partition_point(|&number| directory_of(arrays, number).is_some());
        by_name.truncate(live);
        let name = |&number: &U32| arrays.arena.name(arrays.dirent(number.get())?.name);
        for siblings in siblings_mut(arrays, &mut by_name) {
            siblings.sort_unstable_by(|left, right| name(left).cmp(&name(right)));
        }
        for number in &mut by_name {
            *number = sorted
                .get(number.get() as usize)
                .copied()
                .unwrap_or_default();
        }
        Self {
            places: Some(Places {
                placed: Bits::new(sorted.len()),
                renumbered: Bits::new(arrays.inodes.len()),
                displaced: (NONE, NONE),
                sorted,
            }),
            by_name,
            live,
            next_dirent: 0,
            next_inode: 0,
            next_array: 0,
        }
    }

    /// Applies the next step to `arrays`, from which this was made: first names move to their places, then the
    /// directories get their numbers, then spare room is freed. Returns whether there are more steps.
    ///
    /// Readers may look up names between the steps, because the places show where the names are.
    pub(in crate::index) fn apply(&mut self, arrays: &mut Arrays) -> bool {
        if let Some(places) = self.places.take() {
            arrays.places = Some(places);
        }
        if self.next_dirent < arrays.dirents.len() {
            self.place_dirents(arrays);
            return true;
        }
        if self.next_inode < arrays.inodes.len() {
            self.number_children(arrays);
            return true;
        }
        arrays.dirents.vec_mut().truncate(self.live);
        self.next_array += 1;
        arrays.shrink(self.next_array - 1)
    }

    /// Moves names along the cycles of their order.
    fn place_dirents(&mut self, arrays: &mut Arrays) {
        let Some(mut places) = arrays.places.take() else {
            return;
        };
        for _ in 0..ROWS_PER_STEP {
            let here = self.next_dirent;
            if here == arrays.dirents.len() {
                break;
            }
            let number = u32::try_from(here).unwrap_or(NONE);
            if places.placed.contains(here) {
                self.next_dirent += 1;
                continue;
            }
            // The dirent that is here: that of a cycle which an earlier step began, or of a new one.
            let moving = match places.displaced {
                (NONE, _) => number,
                (moving, _) => moving,
            };
            let place = places.sorted.get(moving as usize).copied();
            let place = place.map_or(number, U32::get);
            arrays.dirents.vec_mut().swap(here, place as usize);
            places.placed.insert(place as usize);
            // The dirent that was at the place is here now.
            places.displaced = if place == number {
                (NONE, NONE)
            } else {
                (place, number)
            };
            set_first_dirent(arrays, &mut places.renumbered, place);
        }
        arrays.places = Some(places);
    }

    /// Stores in the rows of the next directories the range of their dirents.
    fn number_children(&mut self, arrays: &mut Arrays) {
        let end = arrays.inodes.len().min(self.next_inode + ROWS_PER_STEP);
        let (dirents, inodes) = (arrays.dirents.range(0..self.live), arrays.inodes.vec_mut());
        let dirents = dirents.unwrap_or_default();
        let parent = |dirent: &Dirent| dirent.parent.get() as usize;
        let mut number = dirents.partition_point(|dirent| parent(dirent) < self.next_inode);
        while let Some(rest) = dirents.get(number..)
            && let Some(directory) = rest.first().map(parent)
            && directory < end
        {
            let len = rest.partition_point(|dirent| parent(dirent) == directory);
            if let Some(inode) = inodes.get_mut(directory) {
                inode.data = (number as u64).into();
                inode.children = u32::try_from(len).unwrap_or(NONE).into();
            }
            number += len;
        }
        self.next_inode = end;
    }

    /// Adds the order by name to `arrays` after the last step. Takes what readers need no more, which takes long to free.
    pub(in crate::index) fn complete(&mut self, arrays: &mut Arrays) {
        std::mem::swap(arrays.by_name.vec_mut(), &mut self.by_name);
        self.places = arrays.places.take();
    }

    /// Sorts the names of `arrays`, without readers.
    pub(in crate::index) fn sort_all(arrays: &mut Arrays) {
        let mut sorted = Self::of(arrays);
        while sorted.apply(arrays) {}
        sorted.complete(arrays);
    }
}

/// The directory of dirent `number`; `None` if it was removed.
fn directory_of(arrays: &Arrays, number: U32) -> Option<u32> {
    let dirent = arrays.dirent(number.get())?;
    (dirent.ino.get() != 0).then_some(dirent.parent.get())
}

/// Numbers of dirents by directory, then by entry, then by age. Removed ones are last.
fn sorted_order(arrays: &Arrays) -> Vec<U32> {
    let removed = arrays.inodes.len();
    let bucket = |dirent: &Dirent| match dirent.ino.get() {
        0 => removed,
        _ => removed.min(dirent.parent.get() as usize),
    };
    let mut ends = vec![0_u32; removed + 1];
    for dirent in &arrays.dirents {
        if let Some(count) = ends.get_mut(bucket(dirent)) {
            *count += 1;
        }
    }
    let mut start = 0;
    for end in &mut ends {
        (start, *end) = (start + *end, start);
    }
    let mut order = vec![U32::default(); arrays.dirents.len()];
    for (number, dirent) in (0_u32..).zip(&arrays.dirents) {
        if let Some(end) = ends.get_mut(bucket(dirent))
            && let Some(place) = order.get_mut(*end as usize)
        {
            *place = number.into();
            *end += 1;
        }
    }
    drop(ends);
    let by_age = |&number: &U32| {
        let dirent = arrays.dirent(number.get());
        dirent.map(|dirent| (dirent.ino.get(), dirent.name.offset()))
    };
    for siblings in siblings_mut(arrays, &mut order) {
        siblings.sort_unstable_by_key(by_age);
    }
    order
}

/// Parts of `numbers`, each with the dirents of a directory, or the removed ones.
fn siblings_mut<'a>(
    arrays: &'a Arrays,
    numbers: &'a mut [U32],
) -> impl Iterator<Item = &'a mut [U32]> {
    numbers.chunk_by_mut(|&left, &right| directory_of(arrays, left) == directory_of(arrays, right))
}

/// Stores in the name at `place` the type of its entry, or 0 if a lookup does not find it; and in the row of the entry its
/// first dirent of those that are in their places. That is the one with the lowest arena offset, because the builder
/// appends names.
fn set_first_dirent(arrays: &mut Arrays, renumbered: &mut Bits, place: u32) {
    let Some(&dirent) = arrays.dirent(place).filter(|dirent| dirent.ino.get() != 0) else {
        return;
    };
    // A directory has one name only.
    let named = arrays.name_and_kind(&dirent, |_| true);
    let kind = named.map_or(0, |(_, kind)| kind);
    if let Some(dirent) = arrays.dirents.get_mut(place as usize) {
        dirent.name = dirent.name.with_kind(kind);
    }
    let ino = dirent.ino.get() as usize;
    let known = arrays.inodes.get(ino).map(|inode| inode.dirent.get());
    let known = known.filter(|_| renumbered.contains(ino));
    let known = known.and_then(|known| arrays.dirent(known));
    if known.is_none_or(|known| dirent.name.offset() < known.name.offset())
        && let Some(inode) = arrays.inodes.get_mut(ino)
    {
        inode.dirent = place.into();
        renumbered.insert(ino);
    }
}

#[cfg(test)]
mod tests {
    use super::super::capacity_bytes;
    use super::*;
    use crate::base::archive_path::ArchivePath;
    use crate::index::test_support::{file, hard_link};
    use crate::index::{Builder, Ino, Options, Origin};

    const FILES: u32 = 30_000;

    /// Names of many directories in an order without any locality, each file with a hard link.
    fn names() -> impl Iterator<Item = (String, String)> {
        (0..FILES).map(|number| {
            let mixed = number.wrapping_mul(7919) % FILES;
            let name = format!("{}/{mixed:x}", mixed % 113);
            (format!("links/{}/{number}", mixed % 7), name)
        })
    }

    fn builder() -> Builder {
        let mut builder = Builder::new(Options::default());
        for (link, name) in names() {
            builder.add_member(&file(&name, 0..1)).expect("added");
            builder.add_member(&hard_link(&link, &name)).expect("added");
        }
        // The first name of an entry goes away, and one with another age comes in its place.
        for (_, name) in names().step_by(10) {
            builder.add_member(&file(&name, 1..2)).expect("replaced");
        }
        builder
    }

    // Promises: memory-lock
    #[test]
    fn all_names_are_found_between_the_steps() {
        let mut builder = builder();
        let find = |builder: &Builder, name: &str| {
            let path = ArchivePath::sanitize(name.as_bytes()).path;
            builder.index().find(&path).map(|entry| entry.ino())
        };
        let all: Vec<_> = names().flat_map(|(link, name)| [link, name]).collect();
        let inos: Vec<_> = all.iter().map(|name| find(&builder, name)).collect();
        let mut completion = builder.prepare_completion();
        let mut steps = 0;
        while builder.apply(&mut completion) {
            steps += 1;
            for (name, ino) in all.iter().zip(&inos).step_by(7) {
                assert_eq!(find(&builder, name), *ino, "{name}");
                assert!(
                    builder.index().path(ino.expect("there")).is_some(),
                    "{name}"
                );
            }
        }
        assert!(steps > 10, "{steps}");
        builder.complete(&mut completion, Origin::default());
        let index = builder.into_index();
        for (name, ino) in all.iter().zip(&inos) {
            let path = ArchivePath::sanitize(name.as_bytes()).path;
            assert_eq!(index.find(&path).map(|entry| entry.ino()), *ino);
        }
        let listed = (1..=index.last_ino().0).flat_map(|ino| index.children(Ino(ino), 0));
        assert_eq!(listed.count(), all.len() + 113 + 8);
    }

    // Promises: memory-index
    #[test]
    fn sort_takes_eight_bytes_a_name_beside_the_tree() {
        let builder = builder();
        let arrays = &builder.index().arrays;
        let sorted = SortedNames::of(arrays);
        let places = sorted.places.as_ref().map(Places::memory_bytes);
        let bytes = capacity_bytes(&sorted.by_name) + places.expect("not applied");
        assert!(bytes <= SortedNames::memory_bytes(arrays), "{bytes}");
        assert!(SortedNames::memory_bytes(arrays) <= arrays.dirents.len() * 17 / 2);
    }
}
