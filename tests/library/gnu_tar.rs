//! Single members, repeated directories and incremental archives, beside GNU tar.

use std::fs;

use crate::support::cli::{Outcome, Place};
use crate::support::raw::Archive;

/// Runs a program of the system.
fn run(place: &Place, words: &str) -> Outcome {
    let mut words = words.split(' ');
    let mut command = place.command(words.next().expect("a program"));
    Outcome::of(command.args(words).env("TZ", "UTC").env("LC_ALL", "C"))
}

// Promises: hardlink-selected, hardlink-listed
#[test]
fn hard_link_selected_alone_needs_its_target_in_the_destination() {
    let place = Place::new();
    let archive = Archive::new()
        .file("first", "content")
        .hard_link("link", "first");
    place.put("a.tar", archive.end());
    for is_indexed in [false, true] {
        if is_indexed {
            place.succeeds(&["index", "-q", "a.tar"]);
        }
        place.fails(
            &["materialize", "-q", "a.tar", "-C", "out", "link"],
            &["link: cannot link to first: no such file"],
        );
        assert_eq!(run(&place, "tar -xf a.tar -C out link").code, 2);
        // The target that is there is linked to, whatever it holds.
        for extraction in ["tar -xf a.tar", "tarfs materialize -q a.tar"] {
            place.put("out/first", "there before");
            let words = format!("{extraction} -C out link");
            let outcome = match words.strip_prefix("tarfs ") {
                Some(words) => place.run(&words.split(' ').collect::<Vec<_>>()),
                None => run(&place, &words),
            };
            assert_eq!(outcome.code, 0, "{}", outcome.complaints);
            let linked = fs::read(place.path("out/link")).expect("written");
            assert_eq!(linked, b"there before");
            for name in ["out/first", "out/link"] {
                fs::remove_file(place.path(name)).expect("there");
            }
        }
        for words in ["tar -xOf a.tar link", "tar -xOf a.tar ./link"] {
            assert!(run(&place, words).output.is_empty());
        }
        let content = place.run(&["materialize", "-O", "a.tar", "link"]);
        assert!(content.output.is_empty());
    }
    // Verbs that read a tree show the content by each name.
    let sizes = place.succeeds(&["find", "a.tar", "link", "-printf", "%s %n"]);
    assert_eq!(sizes.text(), "7 2");
    // A directory has no first name.
    fs::create_dir(place.path("tree")).expect("new");
    place.put("tree/first", "content");
    fs::hard_link(place.path("tree/first"), place.path("tree/link")).expect("new");
    place.succeeds(&["copy", "-q", "tree", "out", "--include=link"]);
    let copied = fs::read(place.path("out/link")).expect("written");
    assert_eq!(copied, b"content");
}

// Promises: tree-directory-again, gnu-xattrs-again
#[test]
fn second_member_of_a_directory_replaces_its_attributes() {
    let place = Place::new();
    let attributes = |name: &'static str| (name, "1");
    let archive = Archive::new()
        .pax(&["SCHILY.xattr.user.a", "SCHILY.xattr.user.b"].map(attributes))
        .directory("d")
        .file("d/f", "below")
        .pax(&[("SCHILY.xattr.user.a", "2"), ("mtime", "5.5")])
        .directory("./d/.");
    place.put("a.tar", archive.end());
    place.succeeds(&["materialize", "-q", "a.tar", "-C", "out"]);
    let written = |path: &str| run(&place, &format!("getfattr --absolute-names -d {path}"));
    let written = written("out/d");
    assert_eq!(written.text(), "# file: out/d\nuser.a=\"2\"\n\n");
    let listed = |operands: &[&str]| {
        let words = [&["find"], operands, &["-printf", "%f %y %T@\\n"]].concat();
        place.succeeds(&words).text().to_owned()
    };
    assert_eq!(
        listed(&["a.tar", "d"]),
        "d d 5.5000000000\nf f 1000000000.0000000000\n"
    );
    assert_eq!(listed(&["out/d"]), listed(&["a.tar", "d"]));
}

// Promises: tree-incremental
#[test]
fn incremental_archives_have_the_entries_that_gnu_tar_lists() {
    let place = Place::new();
    fs::create_dir_all(place.path("tree/d/sub")).expect("new");
    place.put("tree/d/old", "old");
    place.put("tree/d/sub/g", "below");
    for (number, format) in [(0, "gnu"), (1, "gnu"), (2, "posix")] {
        let archive = format!("{number}.tar");
        let pack = "--listed-incremental=snapshot -C tree d";
        let packed = run(
            &place,
            &format!("tar --format={format} -cf {archive} {pack}"),
        );
        assert_eq!(packed.code, 0, "{}", packed.complaints);
        let names = run(&place, &format!("tar -tf {archive}"));
        let found = place.succeeds(&["find", &archive, "-mindepth", "1", "-printf", "%P\\n"]);
        let sorted = |text: &str| {
            let names = text
                .lines()
                .map(|name| name.trim_end_matches('/').to_owned());
            let mut names: Vec<_> = names.collect();
            names.sort_unstable();
            names
        };
        assert_eq!(sorted(found.text()), sorted(names.text()), "{archive}");
        // The copy by `shard tar` has directories with their times, and no lists of names.
        fs::write(
            place.path("copy.tar"),
            place.succeeds(&["shard", "tar", &archive]).output,
        )
        .expect("written");
        let times = |archive: &str| {
            let listed = run(&place, &format!("tar --full-time -tvf {archive}"));
            let lines = listed.lines().into_iter().map(|line| {
                let words: Vec<_> = line.split_whitespace().collect();
                let [mode, owner, _, day, time, name] = words[..] else {
                    panic!("{line}");
                };
                [mode, owner, day, time, name].join(" ")
            });
            let mut lines: Vec<_> = lines.collect();
            lines.sort_unstable();
            lines
        };
        assert_eq!(times("copy.tar"), times(&archive), "{archive}");
        fs::remove_file(place.path("tree/d/old")).ok();
        place.put("tree/d/new", "new");
    }
}
