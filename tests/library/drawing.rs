//! `ls --tree`, as tree(1) draws directories.

use std::fs;
use std::os::unix::fs::symlink;

use crate::support::cli::{Outcome, Place};
use crate::support::fixture::PROGRAM;
use crate::support::program::stderr_text;
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
fn memory_of_a_drawing_does_not_grow_with_the_square_of_the_depth() {
    let place = Place::new();
    let chain = "a/".repeat(1900);
    let chain = chain.trim_end_matches('/').to_owned();
    let archive = Archive::new().pax(&[("path", &chain)]).directory("d");
    let (mut archive, mut above) = (archive, chain.clone());
    // Through links, members are deeper than a path can be long.
    for number in 0..14 {
        let link = format!("l{number}");
        archive = archive.pax(&[("linkpath", &above)]).symlink(&link, "t");
        above = format!("{link}/{chain}");
        archive = archive.pax(&[("path", &above)]).directory("d");
    }
    place.put("a.tar", archive.end());
    for verb in ["ls --tree", "ls -R"] {
        let line = format!("ulimit -v 1000000; {PROGRAM} {verb} --memory 32MiB a.tar | wc -l");
        let output = place.command("bash").args(["-c", &line]).output();
        let output = output.expect("a shell");
        let lines = String::from_utf8_lossy(&output.stdout);
        let count: usize = lines.trim().parse().expect("a number");
        assert!(
            count > 15 * 1900,
            "{verb}: {count}, {}",
            stderr_text(&output)
        );
    }
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
