//! Hard links.

use super::*;

#[test]
fn a_name_that_became_a_link_is_younger_than_the_name_it_links_to() {
    let index = index(&[file("x", 0..1), file("y", 0..2), hard_link("x", "y")]);
    assert_eq!(index.path(Ino(3)).unwrap().to_string(), "y");
    assert_eq!(listing(&index), ["x f 644 2 2", "y f 644 2 2"]);
}

// Promises: hardlink-itself
#[test]
fn a_hard_link_to_itself_changes_nothing() {
    let index = index(&[
        file("f", 0..1),
        hard_link("f", "./f"),
        hard_link("g", "/f"),
        hard_link("g", "f"),
        // A directory can have no other name, but it already has this one.
        directory("d", 0o755),
        hard_link("d", "d"),
    ]);
    let expected = ["d d 755 2 0", "f f 644 2 1", "g f 644 2 1"];
    assert_eq!(listing(&index), expected);
    assert_eq!(index.problem_count(), 0);
}

// Promises: hardlink-symlink
#[test]
fn a_hard_link_to_a_symbolic_link_names_the_link() {
    let index = index(&[symlink("s", "f"), hard_link("g", "s")]);
    assert_eq!(listing(&index), ["g l 777 2 1", "s l 777 2 1"]);
}

// Promises: link-itself
#[test]
fn a_layer_replaces_a_link_on_the_way_to_its_own_place() {
    let members = [symlink("e", "."), file("e/e", 0..1)];
    assert_eq!(listing(&index(&members)), ["e d 755 2 0", "e/e f 644 1 1"]);
    let layer = layer(&members, WhiteoutFormat::Oci);
    assert_eq!(listing(&layer), ["e f 644 1 1"]);
}

// Promises: link-inside
#[test]
fn a_hard_link_is_found_through_a_symbolic_link() {
    let index = index(&[
        file("usr/lib/x", 0..1),
        symlink("lib", "usr/lib"),
        hard_link("lib/y", "lib/x"),
    ]);
    assert_eq!(index.entry(Ino(4)).unwrap().link_count(), 2);
    assert!(
        index
            .find(&ArchivePath::sanitize(b"usr/lib/y").path)
            .is_some()
    );
}

// Promises: hardlink-lost, gnu-hardlink-directory
#[test]
fn hard_link_to_directory_is_rejected_and_old_entry_stays() {
    let index = index(&[
        directory("d", 0o755),
        file("g", 0..1),
        hard_link("g", "d"),
        hard_link("r", "."),
    ]);
    assert_eq!(listing(&index), ["d d 755 2 0", "g f 644 1 1"]);
    assert_eq!(index.problem_count(), 2);
}

// Promises: layerlink-target
#[test]
fn link_in_layer_before_its_target_is_left_to_lower_layers() {
    let index = layer(
        &[
            symlink("s", "/d"),
            hard_link("l", "s/f"),
            hard_link("m", "l"),
            file("l", 0..1),
            hard_link("n", "l"),
            file("x/f", 0..1),
            hard_link("x", "y"),
        ],
        WhiteoutFormat::Oci,
    );
    let links: Vec<_> = index
        .unresolved_links()
        .map(|link| (link.name.to_vec(), link.target.to_vec()))
        .collect();
    let link = |name: &[u8], target: &[u8]| (name.to_vec(), target.to_vec());
    assert_eq!(links, [link(b"m", b"d/f"), link(b"x", b"y")]);
    assert_eq!(
        listing(&index),
        ["l f 644 2 1", "n f 644 2 1", "s l 777 1 2"]
    );
}

#[test]
fn unresolved_links_of_a_layer_have_their_headers() {
    let at = |header: u64, member: Member| Member {
        header: Plain(header),
        ..member
    };
    let index = layer(
        &[
            at(0, file("own", 0..1)),
            at(1024, hard_link("h", "own")),
            at(2048, hard_link("l", "below")),
            at(3072, hard_link("h", "below")),
            at(4096, hard_link("m", "l")),
        ],
        WhiteoutFormat::Oci,
    );
    let found = [&b"h"[..], b"l", b"m"].map(|name| {
        let target = index.unresolved_target(Ino::ROOT, name);
        (target, index.unresolved_header(Ino::ROOT, name))
    });
    let of = |header| (Some(&b"below"[..]), Some(Plain(header)));
    assert_eq!(found, [of(3072), of(2048), of(4096)]);
    assert_eq!(index.unresolved_header(Ino::ROOT, b"own"), None);
}

// Promises: whiteout-hidden
#[test]
fn file_in_layer_is_shown_by_links_to_hidden_directories() {
    let index = layer(
        &[
            file(".wh..wh.plnk/1.2", 0..1),
            hard_link("a", ".wh..wh.plnk/1.2"),
        ],
        WhiteoutFormat::Oci,
    );
    assert_eq!(index.lookup(Ino::ROOT, b"a").map(|a| a.size()), Some(1));
}

// Promises: hardlink-early
#[test]
fn forward_links_find_their_targets_in_chains() {
    let index = index(&[
        hard_link("a", "b"),
        hard_link("b", "d/c"),
        hard_link("never", "nothing"),
        file("d/c", 0..3),
        hard_link("also", "a"),
    ]);
    assert_eq!(
        listing(&index),
        [
            "a f 644 4 3",
            "also f 644 4 3",
            "b f 644 4 3",
            "d d 755 2 0",
            "d/c f 644 4 3"
        ]
    );
    assert_eq!(
        problems(&index),
        ["never: the target of the hard link is missing"]
    );
    assert_eq!(
        index
            .path(index.lookup(Ino::ROOT, b"a").unwrap().ino())
            .unwrap()
            .to_string(),
        "d/c"
    );
}

// Promises: hardlink-early
#[test]
fn forward_links_find_their_targets_behind_each_other() {
    let ways = [
        [hard_link("x", "l/f"), hard_link("l", "s")],
        [hard_link("l", "s"), hard_link("x", "l/f")],
    ];
    for links in ways {
        let rest = [directory("d", 0o755), symlink("s", "d"), file("d/f", 0..3)];
        let index = index(&[&links[..], &rest[..]].concat());
        assert_eq!(problems(&index), Vec::<String>::new());
        let ino = |path: &str| {
            let path = ArchivePath::sanitize(path.as_bytes()).path;
            index.find(&path).expect("there").ino()
        };
        assert_eq!(ino("x"), ino("d/f"));
        assert_eq!(ino("l"), ino("s"));
    }
}

#[test]
fn forward_links_in_a_circle_end() {
    let index = index(&[
        hard_link("a", "b"),
        hard_link("b", "a"),
        hard_link("c", "a"),
        hard_link("s", "s"),
        hard_link("d", "e"),
        directory("e", 0o755),
    ]);
    assert_eq!(listing(&index), ["e d 755 2 0"]);
    assert_eq!(index.problem_count(), 5);
    assert_eq!(index.entry(Ino::ROOT).unwrap().link_count(), 3);
}

#[test]
fn member_replaces_forward_link_of_its_name() {
    let index = index(&[hard_link("a", "b"), file("a", 0..3), file("b", 0..1)]);
    assert_eq!(listing(&index), ["a f 644 1 3", "b f 644 1 1"]);
    assert_eq!(index.problem_count(), 0);
}
