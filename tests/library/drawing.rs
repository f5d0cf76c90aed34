//! `ls --tree`, as tree(1) draws directories.

use std::fs;
use std::os::unix::fs::symlink;

use crate::support::cli::{Outcome, Place};
use crate::support::raw::{Archive, Header};
use crate::support::terminal::on_terminal;

const DRAWN: &str = "\
├── .hidden
├── a
│   ├── b
│   │   └── last
│   └── link -> b/last
└── z

2 directories, 4 files
";

fn archive() -> Vec<u8> {
    Archive::new()
        .add(Header::new("z", b'0'), "")
        .add(Header::new(".hidden", b'0'), "")
        .add(Header::new("a/b/last", b'0'), "")
        .symlink("a/link", "b/last")
        .end()
}

fn drawn(place: &Place, locale: &str, source: &str) -> String {
    let mut command = place.tarfs();
    command.env_remove("LC_ALL").env("LC_CTYPE", locale);
    let outcome = Outcome::of(command.args(["ls", "--tree", source]));
    assert_eq!(
        (outcome.code, outcome.complaints.as_str()),
        (0, ""),
        "{source}"
    );
    outcome.text().to_owned()
}

// Promises: ls-tree
#[test]
fn archive_and_directory_are_drawn_as_by_tree() {
    let place = Place::new();
    place.put("a.tar", archive());
    assert_eq!(drawn(&place, "C.UTF-8", "a.tar"), format!(".\n{DRAWN}"));
    fs::create_dir_all(place.path("d/a/b")).expect("fresh");
    for name in ["d/z", "d/.hidden", "d/a/b/last"] {
        place.put(name, "");
    }
    symlink("b/last", place.path("d/a/link")).expect("fresh");
    assert_eq!(drawn(&place, "C.UTF-8", "d"), format!("d\n{DRAWN}"));
    let ascii = DRAWN
        .replace("├──", "|--")
        .replace("└──", "`--")
        .replace('│', "|");
    assert_eq!(drawn(&place, "C", "d"), format!("d\n{ascii}"));
}

// Promises: ls-tree, walk-terminal
#[test]
fn names_drawn_on_a_terminal_are_escaped() {
    let name = "a\x1b]0;owned\x07b\n c";
    let place = Place::new();
    let header = Header::new(name, b'0');
    place.put("a.tar", Archive::new().add(header, "").end());
    let (output, shown) = on_terminal(place.directory.root(), "ls --tree a.tar");
    assert!(output.status.success(), "{shown}");
    assert!(
        shown.contains(r"-- a\033]0;owned\007b\n\ c")
            || shown.contains(r"── a\033]0;owned\007b\n\ c"),
        "{shown:?}"
    );
    assert!(!shown.contains('\x1b'), "{shown:?}");
}
