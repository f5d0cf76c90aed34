//! Extraction of every entry type and attribute, over existing entries, never outside the destination.
//!
//! `tests/mount` has the tests of owners, devices and mounts.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use rustix::process::geteuid;
use tarfs::ArchivePath;
use tarfs::archive::scan::{PayloadEnd, Sink};
use tarfs::materialize::{Existing, Materializer, Options, Problem, Reporter, Selection};
use tarfs::tar::{Member, MemberKind, Segment};

use crate::support::materialize::{
    assert_same_trees, content, directory, file, hard_link, link, materialize,
    materialize_without_problems, member, options, problems, run, status, temporary,
    try_materialize, with,
};

/// Collects warnings.
#[derive(Debug, Default)]
struct Warnings(Mutex<Vec<String>>);

impl Reporter for Warnings {
    fn problem(&self, _problem: &Problem) {}
    fn warning(&self, text: &str) {
        self.0.lock().expect("no panic").push(text.to_owned());
    }
}

// Promises: holes-kept
#[test]
fn holes_stay_holes_and_zeros_stay_data() {
    let root = temporary();
    let payload = [vec![1; 65_536], vec![2; 4096]].concat();
    let sparse = with(file("sparse", payload), |member| {
        member.size = 10 << 20;
        member.sparse = Some(vec![
            Segment {
                offset: 1 << 20,
                len: 65_536,
            },
            Segment {
                offset: 3 << 20,
                len: 0,
            },
            Segment {
                offset: 5 << 20,
                len: 4096,
            },
            Segment {
                offset: 10 << 20,
                len: 0,
            },
        ]);
    });
    let empty = with(file("hole", ""), |member| {
        member.size = 1 << 20;
        member.sparse = Some(Vec::new());
    });
    materialize_without_problems(
        root.path(),
        vec![sparse, empty, file("zeros", vec![0; 1 << 20])],
    );
    let bytes = fs::read(root.path().join("sparse")).expect("a file");
    assert_eq!(bytes.len(), 10 << 20);
    let data: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at] != 0).collect();
    assert_eq!(
        (data[0], data[65_535], data[65_536]),
        (1 << 20, (1 << 20) + 65_535, 5 << 20)
    );
    assert_eq!(data.len(), 65_536 + 4096);
    assert!(status(root.path().join("sparse")).blocks() * 512 < 1 << 20);
    assert_eq!(status(root.path().join("hole")).blocks(), 0);
    assert!(status(root.path().join("zeros")).blocks() * 512 >= 1 << 20);
}

// Promises: tree-repeated-name
#[test]
fn repeated_name_ends_as_its_last_member() {
    let root = temporary();
    let mut entries = Vec::new();
    for round in 0..200 {
        entries.push(file("f", format!("{round}").repeat(1000)));
        entries.push(link("l", "somewhere"));
        entries.push(file("l", "no longer a link"));
        entries.push(file("d", "x"));
        entries.push(directory("d"));
        entries.push(file("p", "x"));
        entries.push(member("p", MemberKind::Fifo));
    }
    materialize_without_problems(root.path(), entries);
    assert_eq!(content(root.path().join("f")), "199".repeat(1000));
    assert_eq!(content(root.path().join("l")), "no longer a link");
    assert!(status(root.path().join("d")).is_dir());
    assert!(status(root.path().join("p")).file_type().is_fifo());
}

// Promises: tree-repeated-name
#[test]
fn hard_link_finds_target_still_being_written() {
    let root = temporary();
    let mut entries = Vec::new();
    for number in 0..50 {
        entries.push(file(format!("a{number}/big"), vec![7; 1_000_000]));
        entries.push(hard_link(
            &format!("b/{number}"),
            &format!("./a{number}/big"),
        ));
        // Replacing one name leaves the other one unchanged.
        entries.push(file(format!("a{number}/big"), "new"));
    }
    materialize_without_problems(root.path(), entries);
    for number in 0..50 {
        let old = status(root.path().join(format!("b/{number}")));
        assert_eq!((old.len(), old.nlink()), (1_000_000, 1));
        assert_eq!(content(root.path().join(format!("a{number}/big"))), "new");
    }
}

// Promises: hardlink-early, gnu-hardlink-early
#[test]
fn hard_links_before_their_targets_are_created_last() {
    let root = temporary();
    let summary = materialize(
        root.path(),
        vec![
            hard_link("first", "second"),
            hard_link("second", "third"),
            hard_link("third", "file"),
            hard_link("replaced", "file"),
            file("replaced", "by a later member"),
            file("file", "x"),
            hard_link("file", "file"),
            hard_link("lost", "nowhere/at/all"),
            hard_link("up", "../.."),
        ],
    );
    assert_eq!(
        problems(&summary),
        [
            "up: cannot link: nothing is left of the target's name",
            "lost: cannot link to nowhere/at/all: no such file"
        ]
    );
    let inode = status(root.path().join("file")).ino();
    for name in ["first", "second", "third"] {
        assert_eq!(status(root.path().join(name)).ino(), inode, "{name}");
    }
    assert_eq!(content(root.path().join("replaced")), "by a later member");
    assert!(!root.path().join("nowhere").exists());
}

// Promises: hardlink-lost, gnu-hardlink-directory
#[test]
fn failed_hard_link_keeps_older_file_of_its_name() {
    let root = temporary();
    fs::write(root.path().join("planted"), "kept").expect("a file");
    let summary = materialize(
        root.path(),
        vec![
            file("taken", "kept"),
            hard_link("taken", "nowhere"),
            hard_link("planted", "later"),
            file("later", "x"),
            directory("d"),
            file("over", "kept"),
            hard_link("over", "d"),
        ],
    );
    assert_eq!(
        problems(&summary),
        [
            "taken: cannot link to nowhere: no such file",
            "planted: cannot link to later: no such file",
            "over: cannot create the hard link: Operation not permitted (os error 1)",
        ]
    );
    for name in ["taken", "planted", "over"] {
        assert_eq!(content(root.path().join(name)), "kept", "{name}");
    }
}

// Promises: hardlink-early
#[test]
fn hard_link_reserves_its_name_before_target_exists() {
    let root = temporary();
    let entries = vec![
        hard_link("twice", "one"),
        hard_link("twice", "other"),
        hard_link("way", "one"),
        file("way/in", "x"),
        directory("d"),
        directory("e"),
        link("l", "d"),
        hard_link("l/late", "one"),
        link("l", "e"),
        hard_link("given", "one"),
        file("given", "later"),
        file("one", "1"),
        file("other", "2"),
    ];
    let summary = materialize(root.path(), entries);
    assert_eq!(
        problems(&summary),
        [
            "twice: cannot link to other: no such file",
            "way/in: refused: something on the way is not a directory",
        ]
    );
    for name in ["twice", "way", "d/late", "one"] {
        assert_eq!(content(root.path().join(name)), "1", "{name}");
    }
    assert_eq!(status(root.path().join("one")).nlink(), 4);
    assert_eq!(content(root.path().join("given")), "later");
}

// Promises: hardlink-early
#[test]
fn chained_late_links_find_their_targets() {
    for links in [["x", "l"], ["l", "x"]] {
        let root = temporary();
        let target = |name| if name == "x" { "l/f" } else { "s" };
        let mut entries: Vec<_> = links.map(|name| hard_link(name, target(name))).into();
        entries.extend([directory("d"), link("s", "d"), file("d/f", "x")]);
        materialize_without_problems(root.path(), entries);
        assert_eq!(content(root.path().join("x")), "x");
        assert_eq!(status(root.path().join("d/f")).nlink(), 2);
        assert_eq!(status(root.path().join("s")).nlink(), 2);
    }
}

// Promises: link-replaced
#[test]
fn no_file_is_written_through_link_being_replaced() {
    let ways = [
        vec![
            link("m", "d"),
            link("l", "m"),
            file("l/b/x", "x"),
            file("m", "f"),
        ],
        vec![link("l", "d"), file("l/b/x", "x"), file("l", "f")],
        vec![link("l", "a/../d"), file("l/b/x", "x"), file("l", "f")],
    ];
    for (number, way) in ways.into_iter().enumerate() {
        for writers in [1, 1, 1, 4, 4, 4] {
            let root = temporary();
            let mut entries = vec![directory("a"), directory("d")];
            entries.extend(way.clone());
            entries.push(file("l/b/y", "y"));
            let options = Options {
                writers: Some(writers),
                ..options()
            };
            let summary = try_materialize(root.path(), options, entries).expect("all fits");
            assert_eq!(
                problems(&summary),
                ["l/b/y: refused: something on the way is not a directory"],
                "way {number}"
            );
            assert!(root.path().join("d/b/x").exists());
            assert!(!root.path().join("d/b/y").exists());
        }
    }
}

// Promises: link-destination, hostile-paths, gnu-link-existing
#[test]
fn links_are_followed_inside_root_only() {
    let parent = temporary();
    let root = parent.path().join("root");
    let outside = parent.path().join("outside");
    fs::create_dir_all(root.join("usr")).expect("a directory");
    fs::create_dir(&outside).expect("a directory");
    fs::write(outside.join("secret"), "secret").expect("a file");
    symlink(&outside, root.join("planted")).expect("a link");
    symlink("../outside", root.join("climbing")).expect("a link");
    let summary = materialize(
        &root,
        vec![
            link("lib", "usr/lib"),
            file("lib/x", "inside"),
            link("usr/back", "../opt/./y"),
            file("usr/back/z", "inside"),
            file("planted/x", "outside"),
            directory("climbing/d"),
            link("archived", "/etc"),
            file("archived/x", "outside"),
            hard_link("stolen", "planted/secret"),
            link("round", "round"),
            file("round/x", "nowhere"),
            file("../../up", "inside"),
            file("/absolute", "inside"),
            hard_link("linked", "../../absolute"),
            file("f", "a file"),
            file("f/x", "below a file"),
            file(".", "the root"),
        ],
    );
    assert_eq!(content(root.join("usr/lib/x")), "inside");
    assert_eq!(content(root.join("opt/y/z")), "inside");
    assert_eq!(content(root.join("linked")), "inside");
    let escaped = "refused: a symbolic link on the way leads outside the root";
    assert_eq!(
        problems(&summary),
        [
            format!("planted/x: {escaped}"),
            format!("climbing/d: {escaped}"),
            format!("archived/x: {escaped}"),
            format!("stolen: {escaped}"),
            "round/x: refused: too many levels of symbolic links".to_owned(),
            "up: refused: the name contains '..': ../../up".to_owned(),
            "f/x: refused: something on the way is not a directory".to_owned(),
            ".: refused: the name is that of the destination itself".to_owned(),
        ]
    );
    assert_eq!(fs::read_dir(&outside).expect("a directory").count(), 1);
    assert!(!Path::new("/etc/x").exists());
    assert_eq!(fs::read_dir(parent.path()).expect("a directory").count(), 2);
}

// Promises: link-destination, hostile-paths
#[test]
fn directory_swapped_for_link_writes_nothing_outside() {
    let parent = temporary();
    let root = parent.path().join("root");
    let outside = parent.path().join("outside");
    fs::create_dir(&root).expect("a directory");
    fs::create_dir(&outside).expect("a directory");
    let target = outside.to_str().expect("UTF-8");
    let mut entries = Vec::new();
    for round in 0..50 {
        let name = format!("d{round}");
        entries.push(directory(&name));
        entries.push(link(&name, target));
        entries.push(file(format!("{name}/x"), "outside"));
        entries.push(file(&name, "now a file"));
        entries.push(file(format!("{name}/x"), "below a file"));
        entries.push(directory(&name));
        entries.push(file(format!("{name}/y"), "inside"));
    }
    let summary = materialize(&root, entries);
    assert_eq!(summary.errors, 100);
    assert_eq!(fs::read_dir(&outside).expect("a directory").count(), 0);
    for round in 0..50 {
        assert_eq!(content(root.join(format!("d{round}/y"))), "inside");
        assert_eq!(
            fs::read_dir(root.join(format!("d{round}")))
                .expect("a directory")
                .count(),
            1
        );
    }
}

// Promises: times-nanoseconds
#[test]
fn directory_attributes_are_set_after_their_entries() {
    let root = temporary();
    let warnings = Arc::new(Warnings::default());
    let read_only = |name| with(directory(name), |member: &mut Member| member.mode = 0o2555);
    let options = Options {
        reporter: Some(Arc::clone(&warnings) as Arc<dyn Reporter>),
        ..options()
    };
    let entries = vec![
        with(directory("./"), |member| member.mode = 0o711),
        read_only("a"),
        read_only("a/b"),
        file("a/b/c/implied/f", "x"),
        directory("replaced"),
        directory("twice"),
        with(directory("twice"), |member| member.mode = 0o700),
        // Last, because a directory made after it might reuse its inode number and be mistaken for it.
        file("replaced", "by a file"),
    ];
    let summary = try_materialize(root.path(), options, entries).expect("a fine destination");
    assert_eq!(problems(&summary), Vec::<String>::new());
    for name in ["a", "a/b"] {
        let status = status(root.path().join(name));
        assert_eq!(status.mode() & 0o7777, 0o2555, "{name}");
        assert_eq!(
            (status.mtime(), status.mtime_nsec()),
            (1_000_000_000, 123_456_789),
            "{name}"
        );
    }
    assert_eq!(status(root.path().to_owned()).mode() & 0o7777, 0o711);
    assert_eq!(status(root.path().join("twice")).mode() & 0o7777, 0o700);
    assert_eq!(
        *warnings.0.lock().expect("no panic"),
        ["replaced: the directory was replaced before it got its attributes, left as it is"]
    );
}

// Promises: owner-written
#[test]
fn umask_applies_and_set_id_bits_drop_without_permissions() {
    let root = temporary();
    let options = Options {
        same_owner: false,
        same_permissions: false,
        ..options()
    };
    let umask = run(Command::new("sh").args(["-c", "umask"]));
    let umask = u32::from_str_radix(umask.trim(), 8).expect("octal");
    let loose = |entry| {
        with(entry, |member: &mut Member| {
            member.mode = 0o7777;
            member.uid = 4242;
        })
    };
    let entries = vec![
        loose(file("f", "x")),
        loose(directory("d")),
        loose(member("p", MemberKind::Fifo)),
    ];
    try_materialize(root.path(), options, entries).expect("a fine destination");
    for name in ["f", "d", "p"] {
        let status = status(root.path().join(name));
        assert_eq!(
            (status.mode() & 0o7777, status.uid()),
            (0o777 & !umask, geteuid().as_raw()),
            "{name}"
        );
    }
}

// Promises: write-existing
#[test]
fn existing_files_are_kept_on_request() {
    let plant = |root: &Path| {
        fs::write(root.join("f"), "old").expect("a file");
        fs::create_dir(root.join("d")).expect("a directory");
        fs::set_permissions(root.join("d"), fs::Permissions::from_mode(0o700)).expect("a mode");
        symlink("d", root.join("l")).expect("a link");
    };
    let entries = || {
        vec![
            file("f", "new"),
            directory("d"),
            directory("l"),
            file("l/x", "new"),
            directory("f"),
        ]
    };
    for (existing, expected) in [
        (Existing::Keep, vec!["f: cannot create the file"]),
        (Existing::Skip, vec![]),
    ] {
        let root = temporary();
        plant(root.path());
        let options = Options {
            existing,
            ..options()
        };
        let summary = try_materialize(root.path(), options, entries()).expect("a fine destination");
        let problems = problems(&summary);
        assert_eq!(problems.len(), expected.len(), "{problems:?}");
        assert!(
            problems
                .iter()
                .zip(expected)
                .all(|(problem, start)| problem.starts_with(start))
        );
        assert_eq!(content(root.path().join("f")), "old");
        assert_eq!(status(root.path().join("d")).mode() & 0o7777, 0o700);
        assert_eq!(content(root.path().join("d/x")), "new");
    }
}

// Promises: tree-nonempty-directory
#[test]
fn nonempty_directory_is_never_replaced() {
    let root = temporary();
    let full = |name: &str| file(format!("{name}/x"), "x");
    let summary = materialize(
        root.path(),
        vec![
            full("a"),
            file("a", "x"),
            full("b"),
            link("b", "x"),
            full("c"),
            hard_link("c", "a/x"),
            full("d"),
            member("d", MemberKind::Fifo),
        ],
    );
    assert_eq!(problems(&summary).len(), 4);
    for name in ["a/x", "b/x", "c/x", "d/x"] {
        assert_eq!(content(root.path().join(name)), "x");
    }
}

#[test]
fn missing_destination_is_an_error() {
    let error = Materializer::new(Path::new("/nowhere"), options(), Arc::default());
    let error = error.expect_err("no such directory");
    assert_eq!(
        error.to_string(),
        "/nowhere: cannot open the destination directory"
    );
}

// Promises: truncated-error, truncated-allowed
#[test]
fn truncated_file_keeps_its_received_bytes() {
    let root = temporary();
    let mut sink = Materializer::new(root.path(), options(), Arc::default()).expect("a sink");
    let (member, _) = file("f", vec![1; 1000]);
    sink.member(member).expect("a member");
    sink.payload(Bytes::from_static(b"half"))
        .expect("a payload");
    sink.member_end(PayloadEnd::Cut).expect("an end");
    let summary = sink.finish().expect("a summary");
    assert_eq!(
        problems(&summary),
        ["f: the archive ends in the middle of this file; the bytes before that are kept"]
    );
    assert_eq!(content(root.path().join("f")), "half");
}

// Promises: link-replaced, write-threads
#[test]
fn any_number_of_writers_creates_the_same_tree() {
    let entries = || {
        let mut entries = vec![directory("./")];
        for number in 0..5000 {
            let name = format!("d{}/e{}/f{number}", number % 7, number % 300);
            entries.push(file(&name, format!("{number}").repeat(number % 100)));
            if number % 10 == 0 {
                entries.push(hard_link(&format!("links/{number}"), &name));
            }
            if number % 50 == 0 {
                entries.push(file("again", format!("{number}")));
                entries.push(file("swapped", vec![7; 250_000]));
                entries.push(directory("swapped"));
            }
        }
        for number in 0..7 {
            entries.push(directory(&format!("d{number}")));
        }
        for number in 0..300 {
            (0..7).for_each(|d| entries.push(directory(&format!("d{d}/e{number}"))));
        }
        entries.push(directory("links"));
        entries
    };
    let one = temporary();
    for writers in [1, 4, 64] {
        let another = temporary();
        let root = if writers == 1 { &one } else { &another };
        let options = Options {
            writers: Some(writers),
            ..options()
        };
        let summary = try_materialize(root.path(), options, entries()).expect("a fine destination");
        assert_eq!(problems(&summary), Vec::<String>::new());
        // All entries but the root.
        assert_eq!(summary.entries, entries().len() as u64 - 1);
        assert_same_trees(one.path(), root.path());
    }
}

// Promises: select-strip
#[test]
fn strip_components_applies_to_hard_link_targets() {
    let root = temporary();
    let options = Options {
        selection: Selection {
            strip_components: 1,
            ..Selection::default()
        },
        ..options()
    };
    let entries = vec![
        directory("top/"),
        file("top/a/f", "x"),
        hard_link("top/h", "top/a/f"),
        link("top/l", "a/f"),
        file("short", "x"),
    ];
    let summary = try_materialize(root.path(), options, entries).expect("a fine destination");
    assert_eq!(problems(&summary), Vec::<String>::new());
    assert_eq!(status(root.path().join("h")).nlink(), 2);
    assert_eq!(content(root.path().join("l")), "x");
    assert!(!root.path().join("short").exists());
}

#[test]
fn arbitrarily_deep_path_is_walked() {
    let root = temporary();
    let name = "d/".repeat(3000) + "f";
    materialize_without_problems(
        root.path(),
        vec![file(&name, "x"), file(name.replace('f', "g"), "x")],
    );
    let path = ArchivePath::sanitize(name.as_bytes()).path;
    assert_eq!(path.components().count(), 3001);
    assert!(root.path().join("d/d/d").is_dir());
}
