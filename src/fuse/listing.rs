//! Directory listings: their order and offsets; pure.

use super::subtree::Subtree;
use crate::index::{Entry, Index};

/// Longest name in a listing (`FUSE_NAME_MAX`). The kernel rejects a listing with a longer name.
const FUSE_NAME_MAX_BYTES: usize = 1024;

/// Calls `add` for each entry of `directory` from `offset` on, until `add` is full.
///
/// `add` also gets the next entry's offset. `.` has offset 0, `..` has 1, and the names follow.
pub(super) fn list<'a>(
    subtree: Subtree,
    index: &'a Index,
    directory: Entry<'a>,
    offset: u64,
    mut add: impl FnMut(Entry<'a>, u64, &[u8]) -> bool,
) {
    if offset == 0 && add(directory, 1, b".") {
        return;
    }
    if offset <= 1 && add(subtree.parent(index, directory), 2, b"..") {
        return;
    }
    let Ok(from) = u32::try_from(offset.saturating_sub(2)) else {
        return;
    };
    for child in index.children(directory.ino(), from) {
        if is_listable_name(child.name)
            && let Some(entry) = index.entry(child.ino)
            && add(entry, next_offset(child.number), child.name)
        {
            return;
        }
    }
}

pub(super) fn is_listable_name(name: &[u8]) -> bool {
    name.len() <= FUSE_NAME_MAX_BYTES && !name.contains(&0)
}

/// The offset of the entry after child `number` in a listing.
pub(super) fn next_offset(number: u32) -> u64 {
    u64::from(number) + 3
}
