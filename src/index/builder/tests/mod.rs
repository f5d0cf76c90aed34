//! Tests of the builder.

mod layers;
mod links;

use proptest::prelude::*;

use crate::base::span_hash;

use super::*;
use crate::index::test_support::{directory, file, hard_link, index, layer, member, symlink};
use crate::index::whiteouts::WhiteoutFormat;
use crate::tar::{Device, RECORD, Segment, Timestamp};

/// Every name of the tree: path, type letter, mode, number of links, size.
fn listing(index: &Index) -> Vec<String> {
    let mut lines = Vec::new();
    let mut stack = vec![(Ino::ROOT, String::new())];
    while let Some((directory, prefix)) = stack.pop() {
        for child in index.children(directory, 0) {
            let entry = index.entry(child.ino).unwrap();
            let path = format!("{prefix}{}", String::from_utf8_lossy(child.name));
            lines.push(format!(
                "{path} {} {:o} {} {}",
                letter(&entry.kind()),
                entry.mode(),
                entry.link_count(),
                entry.size()
            ));
            stack.push((child.ino, format!("{path}/")));
        }
    }
    lines.sort_unstable();
    lines
}

fn letter(kind: &crate::index::EntryKind<'_>) -> char {
    use crate::index::EntryKind;
    match kind {
        EntryKind::File => 'f',
        EntryKind::Directory => 'd',
        EntryKind::Symlink(_) => 'l',
        EntryKind::CharDevice(_) => 'c',
        EntryKind::BlockDevice(_) => 'b',
        EntryKind::Fifo => 'p',
    }
}

fn problems(index: &Index) -> Vec<String> {
    let text = |problem: &Problem| {
        let path = problem.path.as_ref().expect("members have names");
        format!("{path}: {}", problem.what)
    };
    index.problems().iter().map(text).collect()
}

// Promises: implied-in-mount, implied-written
#[test]
fn missing_parent_directories_are_created() {
    let index = index(&[Member {
        mtime: Timestamp {
            seconds: 7,
            nanoseconds: 8,
        },
        ..file("a/b/c", 512..515)
    }]);
    assert_eq!(
        listing(&index),
        ["a d 755 3 0", "a/b d 755 2 0", "a/b/c f 644 1 3"]
    );
    assert_eq!(index.entry(Ino(2)).unwrap().mtime(), Timestamp::default());
    assert_eq!(index.path(Ino(4)).unwrap().to_string(), "a/b/c");
    assert_eq!(index.entry(Ino(4)).unwrap().parent(), Ino(3));
}

// Promises: tree-repeated-name
#[test]
fn a_later_file_gets_a_new_number_and_its_old_siblings_keep_theirs() {
    let index = index(&[file("f", 0..1), hard_link("g", "f"), file("f", 5..7)]);
    assert_eq!(listing(&index), ["f f 644 1 2", "g f 644 1 1"]);
    assert_eq!(index.lookup(Ino::ROOT, b"f").unwrap().ino(), Ino(3));
    assert_eq!(index.path(Ino(2)).unwrap().to_string(), "g");
}

// Promises: inode-number
#[test]
fn a_replaced_number_stays_a_gap() {
    let index = index(&[file("f", 0..1), file("f", 5..7)]);
    assert!(index.entry(Ino(2)).is_none());
    assert_eq!((index.entry_count(), index.last_ino()), (2, Ino(3)));
}

// Promises: scan-grows
#[test]
fn changed_attributes_mark_inodes_dirty() {
    let mut builder = Builder::new(Options {
        keeps_replaced: true,
        ..Options::default()
    });
    let mut changes = |member: Member| {
        builder.add_member(&member).unwrap();
        builder.take_dirty_inodes()
    };
    let (d, f) = (Ino(2), Ino(3));
    assert_eq!(changes(directory("d", 0o755)), []);
    assert_eq!(changes(file("d/f", 0..1)), []);
    assert_eq!(changes(hard_link("d/g", "d/f")), [f]);
    assert_eq!(changes(directory("d", 0o700)), [d]);
    assert_eq!(changes(file("d/f", 5..7)), [f]);
    assert_eq!(changes(hard_link("d/g", "d/f")), [f, Ino(4)]);
    // Its target comes later. The builder reports it when it resolves the link.
    assert_eq!(changes(hard_link("d/h", "d/i")), []);
    assert_eq!(changes(file("d/i", 7..8)), []);
    builder.resolve_forward_links();
    assert!(builder.take_dirty_inodes().contains(&Ino(6)));
}

// Promises: scan-grows, scan-waits, inode-number
#[test]
fn growing_index_looks_up_names_but_lists_none() {
    let mut builder = Builder::new(Options {
        keeps_replaced: true,
        ..Options::default()
    });
    assert!(builder.add_member(&file("d/f", 0..1)).is_ok());
    let index = builder.index();
    assert!(!index.is_complete());
    let d = index.lookup(Ino::ROOT, b"d").unwrap();
    assert_eq!((d.ino(), d.link_count()), (Ino(2), 2));
    assert_eq!(index.lookup(Ino(2), b"f").unwrap().size(), 1);
    assert!(index.lookup(Ino(2), b"g").is_none());
    assert_eq!(index.children(Ino(2), 0).count(), 0);
    assert_eq!(index.children_by_name(Ino(2), 0).count(), 0);
    assert_eq!(index.path(Ino(3)).unwrap().to_string(), "d/f");
    assert_eq!((index.entry_count(), index.stored_bytes()), (3, 1));

    assert!(builder.add_member(&hard_link("d/g", "h")).is_ok());
    let waits = builder.index().lookup(Ino(2), b"g");
    assert!(waits.is_none(), "its type is not known yet");

    assert!(builder.add_member(&file("d/f", 5..7)).is_ok());
    let index = builder.index();
    assert_eq!(index.lookup(Ino(2), b"f").unwrap().ino(), Ino(5));
    let replaced = index.entry(Ino(3)).unwrap();
    assert_eq!((replaced.size(), replaced.link_count()), (1, 0));
    let index = builder.finish(Origin::default());
    assert!(index.is_complete());
    assert_eq!(index.entry(Ino(3)).unwrap().size(), 1);
    assert_eq!(listing(&index), ["d d 755 2 0", "d/f f 644 1 2"]);
}

// Promises: tree-directory-again
#[test]
fn a_directory_over_a_directory_updates_it() {
    let index = index(&[
        directory("d", 0o755),
        file("d/x", 0..1),
        directory("d", 0o700),
    ]);
    assert_eq!(listing(&index), ["d d 700 2 0", "d/x f 644 1 1"]);
}

#[test]
fn directory_replaces_non_directory() {
    for before in [
        file("d", 0..1),
        symlink("d", "e"),
        member("d", MemberKind::Fifo),
    ] {
        let index = index(&[
            directory("e", 0o755),
            before,
            directory("d", 0o700),
            file("d/x", 0..1),
        ]);
        assert_eq!(
            listing(&index),
            ["d d 700 2 0", "d/x f 644 1 1", "e d 755 2 0"]
        );
    }
}

// Promises: tree-nonempty-directory
#[test]
fn file_replaces_empty_directory_but_not_full_one() {
    let index = index(&[
        file("f", 0..1),
        directory("a", 0o755),
        directory("b", 0o755),
        directory("c", 0o755),
        file("d/x", 0..1),
        file("a", 0..2),
        symlink("b", "q"),
        hard_link("c", "f"),
        file("d", 0..2),
        hard_link("d", "f"),
    ]);
    assert_eq!(
        listing(&index),
        [
            "a f 644 1 2",
            "b l 777 1 1",
            "c f 644 2 1",
            "d d 755 2 0",
            "d/x f 644 1 1",
            "f f 644 2 1"
        ]
    );
    assert_eq!(
        problems(&index),
        ["d: a directory that is not empty is in its place"; 2]
    );
    assert_eq!(index.entry(Ino::ROOT).unwrap().link_count(), 3);
}

// Promises: root-time, root-member
#[test]
fn the_root_takes_attributes_and_nothing_else() {
    let at = |seconds, member: Member| Member {
        mtime: Timestamp {
            seconds,
            nanoseconds: 5,
        },
        ..member
    };
    let members = [
        at(7, file("f", 0..1)),
        at(8, file("g", 0..1)),
        at(9, directory("./", 0o700)),
        at(10, symlink(".", "f")),
        at(11, file("..", 0..1)),
    ];
    let root = |index: &Index| {
        let root = index.entry(Ino::ROOT).unwrap();
        let Timestamp {
            seconds,
            nanoseconds,
        } = root.mtime();
        (root.mode(), seconds, nanoseconds)
    };
    assert_eq!(root(&index(&members[..2])), (0o755, 0, 0));
    let index = index(&members);
    assert_eq!(root(&index), (0o700, 9, 5));
    assert_eq!(
        problems(&index),
        [
            ".: only a directory can take the root's place",
            ".: the name contains '..': .."
        ]
    );
}

// Promises: link-outside
#[test]
fn member_paths_do_not_escape_the_root() {
    let index = index(&[
        symlink("l", "/etc"),
        file("l/x", 0..1),
        file("f", 0..1),
        file("f/x", 0..1),
    ]);
    assert_eq!(
        problems(&index),
        [
            "l/x: a symbolic link on the way leads outside the root",
            "f/x: something on the way is not a directory"
        ]
    );
}

// Promises: names-length
#[test]
fn names_too_long_for_linux_are_rejected() {
    let long = "x".repeat(256);
    let index = index(&[
        file(&long, 0..1),
        file(&format!("{long}/y"), 0..1),
        file(&"a/".repeat(40_000), 0..1),
        symlink("e", ""),
        symlink("l", &"y".repeat(4096)),
    ]);
    assert_eq!(index.entry_count(), 1);
    assert_eq!(index.problem_count(), 5);
}

// Promises: hostile-device-number
#[test]
fn device_number_that_linux_would_cut_is_a_problem() {
    let device = |(major, minor)| {
        let device = Device { major, minor };
        index(&[member("d", MemberKind::CharDevice(device))]).problem_count()
    };
    assert_eq!([(0, 0), (4095, 1_048_575)].map(device), [0, 0]);
    assert_eq!([(4096, 0), (0, 1_048_576)].map(device), [1, 1]);
}

// Promises: names-length
#[test]
fn a_deep_path_is_walked_without_recursion() {
    let path = "a/".repeat(32_000) + "f";
    let index = index(&[file(&path, 0..1)]);
    assert_eq!(
        index.path(index.last_ino()).unwrap().as_bytes(),
        path.as_bytes()
    );
}

#[test]
fn entries_have_the_offset_of_their_first_header() {
    // Beyond what 32 bits of records can say.
    let far = 5 << 40;
    let at = |header: u64, records: u64, member: Member| Member {
        header: Plain(header),
        payload: Extent::with_len(Plain(header + records * RECORD), member.payload.len()),
        ..member
    };
    let index = index(&[
        at(0, 1, directory("d/", 0o755)),
        at(far, 3, file("d/f", 0..7)),
        at(far + 2048, 1, symlink("l", "d")),
        at(far + 4096, 2, hard_link("h", "d/f")),
        at(far + 8192, 1, file("i/empty", 0..0)),
    ]);
    let header = |path: &str| {
        let path = ArchivePath::sanitize(path.as_bytes()).path;
        index.find(&path).unwrap().header().map(|header| header.0)
    };
    assert_eq!(header("d"), Some(0));
    assert_eq!(header("d/f"), Some(far));
    assert_eq!(header("l"), Some(far + 2048));
    assert_eq!(header("i/empty"), Some(far + 8192));
    assert_eq!(header("i"), None, "implied");
    let link = |name: &[u8]| index.link_header(index.find_dirent(Ino::ROOT, name).unwrap());
    assert_eq!(link(b"h"), Some(Plain(far + 4096)));
    assert_eq!(link(b"l"), None);
}

// Promises: hostile-memory, limit-index-entries
#[test]
fn member_beyond_max_entries_is_rejected() {
    let options = Options {
        max_entries: 4,
        max_problems: 1,
        max_reported_problems: 0,
        keeps_replaced: false,
        whiteouts: None,
    };
    let mut builder = Builder::new(options);
    assert_eq!(
        builder.add_member(&file("a/b", 0..1)),
        Ok(Placement::Entry(Ino(3)))
    );
    assert_eq!(
        builder.add_member(&file("c", 0..1)),
        Err(MemberError::TooManyEntries)
    );
    assert_eq!(
        builder.add_member(&file("a/b", 0..1)),
        Err(MemberError::TooManyEntries)
    );
    let index = builder.finish(Origin::default());
    assert_eq!(listing(&index), ["a d 755 2 0", "a/b f 644 1 1"]);
    assert_eq!((index.problems().len(), index.problem_count()), (1, 2));
}

#[test]
fn equal_attributes_share_a_row() {
    let with = |name: &str, value: &str| Member {
        xattrs: vec![(b"user.a".to_vec(), value.as_bytes().to_vec())],
        user: b"root".to_vec(),
        group: b"wheel".to_vec(),
        ..file(name, 0..1)
    };
    let index = index(&[
        with("a", "1"),
        with("b", "1"),
        with("c", "2"),
        file("d", 0..1),
    ]);
    let xattrs = |ino| index.entry(Ino(ino)).unwrap().xattrs().collect::<Vec<_>>();
    assert_eq!(xattrs(3), [(&b"user.a"[..], &b"1"[..])]);
    assert_eq!(xattrs(4), [(&b"user.a"[..], &b"2"[..])]);
    assert_eq!(xattrs(5), []);
    assert_eq!(index.arrays.extras.len(), 3);
    assert_eq!(index.arrays.owners.len(), 3);
    let entry = index.entry(Ino(2)).unwrap();
    assert_eq!((entry.user(), entry.group()), (&b"root"[..], &b"wheel"[..]));
    assert!(index.has_xattrs());
}

#[test]
fn a_sparse_file_has_its_pieces_and_keeps_its_attributes() {
    let segment = |offset, len| Segment { offset, len };
    let index = index(&[Member {
        sparse: Some(vec![segment(10, 5), segment(100, 20), segment(1000, 0)]),
        size: 1000,
        xattrs: vec![(b"user.a".to_vec(), b"1".to_vec())],
        ..file("s", 512..537)
    }]);
    let entry = index.entry(Ino(2)).unwrap();
    let pieces = |offset, len| {
        let piece =
            |piece: crate::index::Piece| (piece.offset, piece.plain.start().0, piece.plain.len());
        entry.pieces(offset, len).map(piece).collect::<Vec<_>>()
    };
    assert_eq!(pieces(0, u64::MAX), [(10, 512, 5), (100, 517, 20)]);
    assert_eq!(pieces(0, 10), []);
    assert_eq!(pieces(14, 1), [(10, 512, 5)]);
    assert_eq!(pieces(15, 86), [(100, 517, 20)]);
    assert_eq!(pieces(119, 1), [(100, 517, 20)]);
    assert_eq!(pieces(120, 1000), []);
    assert_eq!(
        (entry.size(), entry.stored_bytes(), index.stored_bytes()),
        (1000, 25, 25)
    );
    assert_eq!(entry.xattrs().count(), 1);
}

#[test]
fn spans_end_where_the_next_begins() {
    let mut builder = Builder::new(Options::default());
    let point = SeekPoint {
        packed: crate::base::extent::Packed(40),
        bit: 3,
        plain: Plain(100),
        state: 9,
        window: bytes::Bytes::from_static(b"window"),
    };
    builder.add_span(Extent::with_len(Plain(0), 100), Some(&[1]), None);
    builder.add_span(Extent::with_len(Plain(100), 50), Some(&[2]), Some(&point));
    let index = builder.finish(Origin {
        plain_bytes: 150,
        ..Origin::default()
    });
    let at = |offset| index.span_at(Plain(offset));
    assert_eq!(
        [at(0), at(99), at(100), at(149), at(150)],
        [Some(0), Some(0), Some(1), Some(1), None]
    );
    let span = index.span(1).unwrap().unwrap();
    assert_eq!(span.plain, Extent::with_len(Plain(100), 50));
    let hash = span_hash::of_checksums([2].into_iter());
    assert_eq!((span.hash, span.seek_point), (Some(hash), Some(point)));
    assert_eq!(index.span(0).unwrap().unwrap().seek_point, None);
    assert_eq!(index.span(2), Ok(None));
}

/// A model of extraction with maps: the same rules, written for clarity.
#[derive(Default)]
struct Model {
    names: std::collections::BTreeMap<String, usize>,
    /// (is a directory, size or mode)
    inodes: Vec<(bool, u64)>,
}

impl Model {
    fn is_directory(&self, path: &str) -> bool {
        path.is_empty()
            || self
                .names
                .get(path)
                .is_some_and(|&inode| self.inodes[inode].0)
    }

    fn put(&mut self, path: &str, inode: (bool, u64)) {
        self.names.insert(path.to_owned(), self.inodes.len());
        self.inodes.push(inode);
    }

    fn make_parents(&mut self, path: &str) -> bool {
        for (slash, _) in path.match_indices('/') {
            let parent = &path[..slash];
            if !self.names.contains_key(parent) {
                self.put(parent, (true, 0o755));
            }
            if !self.is_directory(parent) {
                return false;
            }
        }
        true
    }

    fn can_replace(&self, path: &str) -> bool {
        let inside = format!("{path}/");
        !self.names.keys().any(|name| name.starts_with(&inside))
    }

    fn apply(&mut self, step: &Step) -> bool {
        let path = step.path();
        if !self.make_parents(path) {
            return false;
        }
        match step {
            Step::Directory(_, mode) if self.is_directory(path) => {
                let inode = self.names[path];
                self.inodes[inode].1 = u64::from(*mode);
                true
            }
            Step::Directory(_, mode) => {
                self.put(path, (true, u64::from(*mode)));
                true
            }
            Step::File(_, size) => {
                let fits = self.can_replace(path);
                if fits {
                    self.put(path, (false, *size));
                }
                fits
            }
            Step::Link(_, target) => {
                let Some(&inode) = self.names.get(target) else {
                    return false;
                };
                // A link to itself exists already, of any type.
                if path == target {
                    return true;
                }
                let fits = !self.inodes[inode].0 && self.can_replace(path);
                if fits {
                    self.names.insert(path.to_owned(), inode);
                }
                fits
            }
        }
    }

    fn listing(&self) -> Vec<String> {
        let line = |(path, &inode): (&String, &usize)| {
            let inside = format!("{path}/");
            let (is_directory, number) = self.inodes[inode];
            if is_directory {
                let holds = |name: &&String| {
                    name.strip_prefix(&inside)
                        .is_some_and(|rest| !rest.contains('/'))
                        && self.is_directory(name)
                };
                let links = 2 + self.names.keys().filter(holds).count();
                format!("{path} d {number:o} {links} 0")
            } else {
                let links = self.names.values().filter(|&&other| other == inode).count();
                format!("{path} f 644 {links} {number}")
            }
        };
        let mut lines: Vec<String> = self.names.iter().map(line).collect();
        lines.sort_unstable();
        lines
    }
}

#[derive(Clone, Debug)]
enum Step {
    File(String, u64),
    Directory(String, u32),
    Link(String, String),
}

impl Step {
    fn path(&self) -> &str {
        match self {
            Self::File(path, _) | Self::Directory(path, _) | Self::Link(path, _) => path,
        }
    }

    fn member(&self) -> Member {
        match self {
            Self::File(path, size) => file(path, 0..*size),
            Self::Directory(path, mode) => directory(path, *mode),
            Self::Link(path, target) => hard_link(path, target),
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || "[ab](/[ab]){0,3}";
    let step = prop_oneof![
        (path(), 0..1000_u64).prop_map(|(path, size)| Step::File(path, size)),
        (path(), 0..0o1000_u32).prop_map(|(path, mode)| Step::Directory(path, mode)),
        (path(), path()).prop_map(|(path, target)| Step::Link(path, target)),
    ];
    prop::collection::vec(step, 0..40)
}

proptest! {
    #[test]
    fn tree_equals_model_of_extraction(steps in steps()) {
        let mut model = Model::default();
        let mut builder = Builder::new(Options::default());
        for step in &steps {
            // The model does not support links to missing targets.
            if matches!(step, Step::Link(_, target) if !model.names.contains_key(target)) {
                continue;
            }
            prop_assert_eq!(builder.add_member(&step.member()).is_ok(), model.apply(step), "{:?}", step);
        }
        let index = builder.finish(Origin::default());
        prop_assert_eq!(listing(&index), model.listing());
        prop_assert_eq!(index.entry_count(), model.names.values().collect::<std::collections::BTreeSet<_>>().len() as u64 + 1);
        for number in 1..=index.last_ino().0 {
            let Some(entry) = index.entry(Ino(number)) else { continue };
            let path = index.path(entry.ino()).unwrap();
            prop_assert_eq!(index.find(&path).unwrap().ino(), entry.ino());
        }
    }
}

#[test]
fn children_are_listed_in_archive_order() {
    let index = index(&[
        file("d/m", 0..1),
        file("z", 1..2),
        file("d/a", 2..3),
        file("c", 3..4),
        hard_link("b", "z"),
        hard_link("a", "z"),
        file("z", 4..5),
    ]);
    let names = |parent: &str, from| -> Vec<String> {
        let parent = index.find(&ArchivePath::sanitize(parent.as_bytes()).path);
        index
            .children(parent.unwrap().ino(), from)
            .map(|child| format!("{}{}", child.number, child.name.escape_ascii()))
            .collect()
    };
    // The first z still exists as b and a. The second one is last.
    assert_eq!(names("", 0), ["0d", "1b", "2a", "3c", "4z"]);
    assert_eq!(names("", 3), ["3c", "4z"]);
    assert_eq!(names("d", 0), ["0m", "1a"]);
}

// Promises: limit-index-entries, memory-index
#[test]
fn index_of_100k_names_in_one_directory_stays_small() {
    let count = 100_000_usize;
    let mut builder = Builder::new(Options::default());
    let mut name_bytes = 0;
    for number in (0..count).rev() {
        let name = format!("file-{number}");
        name_bytes += name.len();
        builder.add_member(&file(&name, 0..1)).unwrap();
    }
    let building = builder.memory_bytes();
    assert!(
        building <= 160 * count + name_bytes,
        "{building} bytes for {count} entries"
    );
    let index = builder.finish(Origin::default());
    assert!(index.memory_bytes() <= 85 * count + name_bytes);
    assert_eq!(index.children(Ino::ROOT, 0).count(), count);
    assert_eq!(
        index.lookup(Ino::ROOT, b"file-77").unwrap().ino(),
        Ino(99_924)
    );
    let page: Vec<_> = index
        .children_by_name(Ino::ROOT, 99_999)
        .map(|child| (child.name, child.number))
        .collect();
    assert_eq!(page, [(&b"file-99999"[..], 99_999)]);
    let last = index.children(Ino::ROOT, 99_999).next().unwrap();
    assert_eq!((last.name, last.number), (&b"file-0"[..], 99_999));
}
