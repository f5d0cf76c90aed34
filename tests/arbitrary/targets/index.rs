//! Index files of arbitrary bytes: each is an index or an error, and every iteration ends.

use tarfs::Plain;
use tarfs::index::{EntryKind, Index, Ino, LazyIndex, MemoryLimit, format};
use tarfs::layers::{WhiteoutFormat, merge};
use tarfs::list::{Columns, Style, json};
use tarfs::tree::{IndexTree, Item, Name, metadata};

use super::knobs::Knobs;
use super::walk::walk;

/// Number of sections.
const SECTIONS: usize = format::SECTIONS as usize;

/// Offset of the section table in the header.
const SECTION_TABLE_OFFSET: usize = 72;

/// Length of an index file's header, and of the trailer after its sections.
const HEADER_LEN: usize = SECTION_TABLE_OFFSET + 16 * SECTIONS;
const FOOTER_LEN: usize = 40;

/// Maximum number of inodes and directories that are checked. A file of a few bytes may claim that all
/// directories have the same thousand children.
const MAX_CHECKED_ENTRIES: usize = 300;

/// Content of an index, up to the checked number of entries.
#[derive(PartialEq, Eq, Debug, Default)]
pub(super) struct Description {
    lines: Vec<String>,
    /// Names in a listing that a lookup does not find.
    pub(super) unnamed: usize,
}

/// Loads `bytes` unchanged, and again with lengths, offsets and checksum made valid.
pub(super) fn run(bytes: &[u8]) {
    let (bytes, knobs) = Knobs::split(bytes);
    let is_valid = load(bytes);
    let (mut healed, fill) = (bytes.to_vec(), knobs.flag(0));
    fix_checksums(&mut healed, fill);
    let is_healed = load(&healed);
    assert!(
        is_healed || fill || !is_valid,
        "a valid file is not spoiled"
    );
}

/// Loads `bytes` and reads all of the index. Returns whether they are one.
fn load(bytes: &[u8]) -> bool {
    let len = bytes.len() as u64;
    // The file's length differs from the expected one.
    drop(format::read(bytes, len + 1));
    let Ok(index) = format::read(bytes, len) else {
        return false;
    };
    // Rows in memory are as large as in the file.
    assert!(index.memory_bytes() <= bytes.len() * 2 + 4096);
    description(&index);
    apply_as_layer(&index);
    true
}

/// Applies the tree as a layer over itself, which builds an index as well.
fn apply_as_layer(index: &Index) {
    let limit = MemoryLimit::none();
    for link in index.unresolved_links().take(MAX_CHECKED_ENTRIES) {
        assert!(index.entry(link.parent).is_some(), "a link in no directory");
    }
    for whiteout in index.whiteouts().take(MAX_CHECKED_ENTRIES) {
        let is_there = index.entry(whiteout.parent).is_some();
        assert!(is_there, "a whiteout in no directory");
    }
    for whiteouts in [
        WhiteoutFormat::Oci,
        WhiteoutFormat::Overlay,
        WhiteoutFormat::Keep,
    ] {
        if let Ok(merged) = merge(&[index, index], whiteouts, &limit) {
            description(&merged.index);
        }
    }
}

/// Makes offsets, length and checksum valid, so that the rows are checked. `fill` extends the last
/// section to the end of the file.
fn fix_checksums(file: &mut Vec<u8>, fill: bool) {
    if file.len() < HEADER_LEN + FOOTER_LEN {
        return;
    }
    let len = file.len() as u64;
    write(file, 16, len);
    let mut offset = HEADER_LEN as u64;
    for section in 0..SECTIONS {
        let at = SECTION_TABLE_OFFSET + 16 * section;
        write(file, at, offset);
        let section_len = read(file, at + 8);
        let end = offset.saturating_add(section_len);
        let is_last = section == SECTIONS - 1;
        if is_last && fill {
            write(
                file,
                at + 8,
                (len - FOOTER_LEN as u64).saturating_sub(offset),
            );
        }
        offset = end;
    }
    let footer = file.len() - FOOTER_LEN;
    let digest = blake3::hash(file.get(..footer).expect("long enough"));
    file.truncate(footer);
    file.extend_from_slice(digest.as_bytes());
    file.extend_from_slice(b"XDISFRAT");
}

fn read(file: &[u8], at: usize) -> u64 {
    let number = file.get(at..).and_then(<[u8]>::first_chunk);
    u64::from_le_bytes(*number.expect("in the header"))
}

fn write(file: &mut [u8], at: usize, number: u64) {
    let place = file.get_mut(at..at + 8).expect("inside");
    place.copy_from_slice(&number.to_le_bytes());
}

/// Reads everything that an index has, through every method.
pub(super) fn description(index: &Index) -> Description {
    let mut said = Description::default();
    said.lines.push(format!(
        "{:?} {} {} {} {:?} {} {} {}",
        index.origin(),
        index.entry_count(),
        index.stored_bytes(),
        index.problem_count(),
        index.last_ino(),
        index.has_xattrs(),
        index.is_hashed().expect("rows"),
        index.has_windows(),
    ));
    let last = index.last_ino().0;
    let some = u32::try_from(MAX_CHECKED_ENTRIES).expect("small");
    let numbers = (0..last.min(some)).chain([last, last.wrapping_add(1), u32::MAX]);
    for ino in numbers.map(Ino) {
        describe_entry(index, ino, &mut said);
    }
    for number in (0..index.span_count().min(some)).chain([u32::MAX]) {
        let span = index.span(number).expect("rows");
        let ways = (index.span_extent(number), index.seek_offset(number));
        said.lines.push(format!("{span:?} {ways:?}"));
    }
    for offset in [0, 1, 1 << 20, u64::MAX] {
        said.lines
            .push(format!("{:?}", index.span_at(Plain(offset))));
    }
    said.lines.push(format!("{}", index.has_xattr(b"user.a")));
    list(index, &mut said);
    said
}

fn describe_entry(index: &Index, ino: Ino, said: &mut Description) {
    let path = index.path(ino);
    let place = index.listing_position(ino);
    let Some(entry) = index.entry(ino) else {
        said.lines.push(format!("{ino:?} {path:?} {place:?}"));
        return;
    };
    let xattrs: Vec<_> = entry.xattrs().take(MAX_CHECKED_ENTRIES).collect();
    said.lines.push(format!(
        "{ino:?} {path:?} {place:?} {:?} {:o} {} {} {:?} {:?} {} {} {:?} {} {} {:?} {xattrs:?}",
        entry.kind(),
        entry.mode(),
        entry.uid(),
        entry.gid(),
        entry.user(),
        entry.group(),
        entry.size(),
        entry.stored_bytes(),
        entry.mtime(),
        entry.link_count(),
        entry.child_count(),
        entry.parent(),
    ));
    for (offset, len) in [(0, u64::MAX), (entry.size() / 2, 1), (u64::MAX, u64::MAX)] {
        let mut end = 0;
        for piece in entry.pieces(offset, len).take(MAX_CHECKED_ENTRIES) {
            assert!(piece.offset >= end, "out of order");
            end = piece.offset.checked_add(piece.plain.len()).expect("inside");
            assert!(end <= entry.size(), "a piece behind the end");
            said.lines.push(format!("{piece:?}"));
        }
    }
    for from in [0, 1, u32::MAX] {
        let by_name = index.children_by_name(ino, from).take(MAX_CHECKED_ENTRIES);
        said.lines
            .push(format!("{:?}", by_name.collect::<Vec<_>>()));
        let children: Vec<_> = index
            .children(ino, from)
            .take(MAX_CHECKED_ENTRIES)
            .collect();
        for child in &children {
            assert_eq!(entry.kind(), EntryKind::Directory);
            let found = index.lookup(ino, child.name);
            said.unnamed += usize::from(found.map(|found| found.ino()) != Some(child.ino));
        }
        said.lines.push(format!("{children:?}"));
        let names = index.names(ino, from, from == 0);
        let names: Vec<_> = names.take(MAX_CHECKED_ENTRIES).collect();
        said.lines.push(format!("{names:?}"));
    }
}

/// Lists recursively like `tarfs ls -lR`. The listing must end.
fn list(index: &Index, said: &mut Description) {
    let style = Style {
        long: true,
        escaped: true,
        ..Style::default()
    };
    let (tree, mut columns) = (
        IndexTree::new(LazyIndex::new(index), true),
        Columns::new(style),
    );
    // A directory entry takes 16 bytes and is a name in one directory.
    let most = index.memory_bytes() / 16;
    for (number, (path, entry)) in walk(index, Ino::ROOT, true).enumerate() {
        assert!(number < most, "the listing goes round in circles");
        if number < MAX_CHECKED_ENTRIES {
            let name = Name {
                name: path.as_bytes(),
                kind: metadata(&entry).kind,
                inode: entry.ino().0.into(),
            };
            let item = Item::at_start(&tree, &Ino::ROOT, name);
            let mut lines = Vec::new();
            columns.measure(&item);
            columns
                .write(&mut lines, path.as_bytes(), &item)
                .expect("an entry");
            json::write(&mut lines, path.as_bytes(), &item).expect("an entry");
            said.lines
                .push(String::from_utf8_lossy(&lines).into_owned());
        }
    }
}
