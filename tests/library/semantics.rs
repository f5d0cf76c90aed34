//! Promises of docs/semantics.md about the tree that all verbs show, also where GNU tar makes another
//! one.
//!
//! `tests/mount` has the tests of the tree of a mount.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::support::fixture::TestDir;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};

/// A fixture with the archive `a.tar`.
fn place_with(archive: Archive) -> TestDir {
    let place = TestDir::new(&["out"]);
    place.put("a.tar", archive.end());
    place
}

/// The paths that `ls` lists.
fn listed(place: &TestDir) -> BTreeSet<String> {
    let output = place.tarfs(&["ls", "-R", "a.tar"]);
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(str::to_owned).collect()
}

/// The paths that `materialize` writes.
fn extracted(place: &TestDir) -> BTreeSet<String> {
    place.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
    let mut paths = BTreeSet::new();
    paths_below(&place.path("out"), "", &mut paths);
    paths
}

fn paths_below(directory: &Path, prefix: &str, paths: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).expect("readable") {
        let entry = entry.expect("readable");
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().expect("known").is_dir() {
            paths_below(&entry.path(), &format!("{path}/"), paths);
        }
        paths.insert(path);
    }
}

// Promises: tree-same-place, names-parent, names-cut, gnu-link-dot, gnu-link-parent
#[test]
fn listing_and_extraction_show_the_same_tree() {
    let new = Archive::new;
    let cases: [(Archive, &[&str]); 8] = [
        (
            new().symlink("l", "x/y").file("l/f", ""),
            &["l", "x", "x/y", "x/y/f"],
        ),
        (
            new()
                .directory("d")
                .directory("e")
                .symlink("d/l", "../e")
                .file("d/l/f", ""),
            &["d", "d/l", "e", "e/f"],
        ),
        (new().symlink("l", "../out").file("l/f", ""), &["l"]),
        (
            new().directory("d").symlink("l", "d").directory("l/."),
            &["d", "l"],
        ),
        (new().file("a/../../b", "").file("/c", ""), &["c"]),
        (new().hard_link("l", "t").file("t", ""), &["l", "t"]),
        (new().hard_link("l", "nowhere").file("t", ""), &["t"]),
        (new().file("f", "").file("f/g", ""), &["f"]),
    ];
    for (archive, paths) in cases {
        let place = place_with(archive);
        let expected: BTreeSet<String> = paths.iter().map(|&path| path.to_owned()).collect();
        assert_eq!(listed(&place), expected);
        assert_eq!(extracted(&place), expected);
    }
    let place = place_with(new().directory("d").symlink("l", "d").directory("l/."));
    extracted(&place);
    assert!(
        fs::symlink_metadata(place.path("out/l"))
            .expect("there")
            .is_dir()
    );
}

// Promises: link-itself
#[test]
fn link_on_the_way_to_its_own_place_is_removed_first() {
    let before = || {
        Archive::new()
            .directory("d")
            .file("f", "1")
            .symlink("e", ".")
    };
    let cases = [
        before().file("e/e", "2"),
        before().symlink("e/e", "."),
        before().directory("e/e"),
        before().fifo("e/e"),
        before().hard_link("e/e", "f"),
        before().file("e/./e/d/../e", "2"),
        before().symlink("d/e", ".").file("e/d/e/e", "2"),
        before().symlink("e/e", ".").symlink("e/e/e", "."),
        before()
            .symlink("g", ".")
            .hard_link("h", "g")
            .file("g/g", "2"),
        // Nothing is removed for these.
        before().hard_link("e/e", "e"),
        before().file("e/e/f", "2"),
    ];
    for (number, archive) in cases.into_iter().enumerate() {
        let place = place_with(archive);
        fs::create_dir(place.path("gnu")).expect("free");
        let words = ["-C", "gnu", "-xf", "a.tar"];
        let mut tar = Command::new("tar");
        let ended = tar.current_dir(place.path(".")).args(words).status();
        let is_whole = ended.expect("GNU tar").success();
        let mut expected = BTreeSet::new();
        paths_below(&place.path("gnu"), "", &mut expected);
        let extracted = extracted(&place);
        assert_eq!(listed(&place), extracted, "case {number}");
        assert_eq!(
            (extracted, is_whole),
            (expected, !matches!(number, 5)),
            "case {number}"
        );
        let kinds = |top: &str| -> Vec<_> {
            let kind = |path: &String| {
                let found = fs::symlink_metadata(place.path(format!("{top}/{path}")));
                let found = found.expect("there");
                (path.clone(), found.mode(), found.nlink())
            };
            listed(&place).iter().map(kind).collect()
        };
        assert_eq!(kinds("out"), kinds("gnu"), "case {number}");
    }
}

// Promises: link-itself
#[test]
fn link_that_replaced_a_waiting_link_is_removed_like_others() {
    let waiting = Archive::new().hard_link("e", "f").symlink("e", ".");
    let place = place_with(waiting.file("e/e", "").file("f", ""));
    let expected = ["e", "e/e", "f"].map(str::to_owned);
    assert_eq!(listed(&place), BTreeSet::from(expected));
    assert_eq!(extracted(&place), listed(&place));
    assert!(place.path("out/e/e").is_file());
}

// Promises: link-replaced
#[test]
fn place_behind_a_link_to_the_root_stays_when_the_link_is_replaced() {
    let private = Header::new("l/d", b'5').mode(0o700);
    let archive = Archive::new().symlink("l", ".").hard_link("l/h", "f");
    let place = place_with(archive.add(private, "").directory("l").file("f", ""));
    let expected = ["d", "f", "h", "l"].map(str::to_owned);
    assert_eq!(listed(&place), BTreeSet::from(expected));
    assert_eq!(extracted(&place), listed(&place));
    let mode = place.path("out/d").metadata().expect("made").mode();
    assert_eq!(mode & 0o7777, 0o700);
}

// Promises: implied-written
#[test]
fn implied_directories_and_the_destination_have_the_time_of_writing() {
    let archive = Archive::new().directory("d").symlink("d/l", "n/../m");
    let archive = archive.file("d/l/x", "").symlink("e", "o/../f/../../out");
    let place = place_with(archive.file("e/x", ""));
    let expected = ["d", "d/l", "d/m", "d/m/x", "d/n", "e", "f", "o"].map(str::to_owned);
    assert_eq!(listed(&place), BTreeSet::from(expected));
    assert_eq!(extracted(&place), listed(&place));
    let archive = place.path("a.tar").metadata().expect("made");
    let before = (archive.mtime(), archive.mtime_nsec());
    for path in ["out", "out/d/m", "out/d/n", "out/o", "out/f"] {
        let status = place.path(path).metadata().expect("made");
        assert!((status.mtime(), status.mtime_nsec()) >= before, "{path}");
    }
}

// Promises: names-parent, names-cut
#[test]
fn escaping_names_are_rejected_and_truncation_is_reported() {
    let place = place_with(
        Archive::new()
            .file("a/../../b", "")
            .file("//c", "")
            .file("//d", "")
            .hard_link("l", "../x/../c"),
    );
    let cut = "removing leading '//' from member names";
    let dry = place.tarfs(&["materialize", "--dry-run", "a.tar"]);
    assert_eq!(stderr_text(&dry).matches(cut).count(), 1);
    let output = place.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
    assert_eq!(output.status.code(), Some(2));
    let told = stderr_text(&output);
    assert_eq!(told.matches(cut).count(), 1, "{told}");
    assert_eq!(told.matches("removing leading").count(), 1, "{told}");
    assert!(told.contains("the name contains '..'"), "{told}");
    let number = |name: &str| place.path(name).metadata().expect("made").ino();
    assert_eq!(number("out/l"), number("out/c"));
}

// Promises: write-failed-entry, damaged-header
#[test]
fn file_as_path_component_fails_only_its_member() {
    let place = place_with(Archive::new().file("f", "").file("f/g", "").file("h", ""));
    let output = place.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("f/g: refused"),
        "{}",
        stderr_text(&output)
    );
    assert!(place.path("out/h").exists());
    let output = place.tarfs(&["index", "-q", "a.tar"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("1 member is"),
        "{}",
        stderr_text(&output)
    );
}
