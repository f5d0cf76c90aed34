//! Promises of docs/semantics.md about the tree that all verbs show, also where GNU tar makes another
//! one.
//!
//! `tests/mount` has the tests of the tree of a mount.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::support::fixture::TestDir;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;

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

#[test]
fn escaping_names_are_rejected_and_truncation_is_reported() {
    let place = place_with(
        Archive::new()
            .file("a/../../b", "")
            .file("//c", "")
            .file("//d", "")
            .hard_link("l", "../x/../c"),
    );
    let output = place.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
    assert_eq!(output.status.code(), Some(2));
    let told = stderr_text(&output);
    let cut = "removing leading '//' from member names";
    assert_eq!(told.matches(cut).count(), 1, "{told}");
    assert_eq!(told.matches("removing leading").count(), 1, "{told}");
    assert!(told.contains("the name contains '..'"), "{told}");
    let number = |name: &str| place.path(name).metadata().expect("made").ino();
    assert_eq!(number("out/l"), number("out/c"));
}

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
