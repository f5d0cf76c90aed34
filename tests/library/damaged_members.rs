//! Damaged members: what verbs report.
//!
//! `tests/mount` has the tests of mounts.

use std::fmt::Write;

use crate::support::damaged::{archive, damaged_member_line};
use crate::support::fixture::TestDir;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;

/// A directory with the archive `a.tar`.
fn place_with(archive: &[u8]) -> TestDir {
    let place = TestDir::new(&[]);
    place.put("a.tar", archive);
    place
}

// Promises: damaged-listed
#[test]
fn ls_names_damaged_members() {
    let place = place_with(&archive(120));
    for source in ["scanned", "saved"] {
        let output = place.tarfs(&["ls", "a.tar"]);
        assert_eq!(output.status.code(), Some(2), "{source}");
        let mut expected = String::new();
        for number in 0..100 {
            writeln!(expected, "tarfs: {}", damaged_member_line(number)).expect("a string");
        }
        expected += "tarfs: 20 more are not shown\n\
                     tarfs: 120 members are damaged or not in the tree\n";
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, expected, "{source}");
    }
}

// Promises: damaged-listed
#[test]
fn ls_names_members_missing_in_the_tree() {
    let archive = Archive::new().file("../out", "1").file("in", "2").end();
    let place = place_with(&archive);
    let output = place.tarfs(&["ls", "a.tar"]);
    let said = stderr_text(&output);
    for line in [
        "tarfs: out: ",
        " (header at byte 0 of the tar stream)\n",
        "tarfs: 1 member is damaged or not in the tree\n",
    ] {
        assert!(said.contains(line), "{said}");
    }
}

// Promises: damaged-header, shard-finish, cat-files, exit-status
#[test]
fn verbs_that_read_by_an_index_report_members_missing_in_the_tree() {
    let place = TestDir::new(&["out"]);
    let archive = Archive::new().file("../out", "1").file("in", "2").end();
    place.put("a.tar", archive);
    // A scheduler may repeat a shard whose status is not 0.
    for shard in ["1/2", "2/2"] {
        let output = place.tarfs(&["shard", "write", "-q", "a.tar", shard, "-C", "out"]);
        assert!(output.status.success(), "{}", stderr_text(&output));
    }
    for verb in [
        &["cat", "a.tar", "in"][..],
        &["cat", "a.tar", "in", "none"],
        &["du", "a.tar"],
        &["find", "a.tar"],
        &["index", "-q", "a.tar"],
        &["shard", "plan", "--shards=2", "a.tar"],
        &["shard", "finish", "-q", "a.tar", "-C", "out"],
        &["shard", "tar", "a.tar"],
        &["sync", "-q", "a.tar", "out"],
    ] {
        let output = place.tarfs(verb);
        let said = stderr_text(&output);
        assert_eq!(output.status.code(), Some(2), "{verb:?}: {said}");
        let count = "tarfs: 1 member is damaged or not in the tree\n";
        assert!(said.contains(count), "{verb:?}: {said}");
    }
    assert_eq!(std::fs::read(place.path("out/in")).expect("written"), b"2");
}

// Promises: damaged-header, verify-checks
#[test]
fn verify_reports_members_missing_in_the_tree() {
    let archive = Archive::new()
        .file("../out", "1")
        .file("in", "2")
        .hard_link("linked", "lost");
    let place = place_with(&archive.end());
    let output = place.tarfs(&["verify", "-q", "a.tar"]);
    let said = stderr_text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.starts_with(b"a.tar: not good\n"), "{said}");
    for path in ["out", "linked"] {
        assert!(said.contains(&format!("tarfs: a.tar: {path}: ")), "{said}");
    }
}

// Promises: damaged-header, truncated-allowed, select-dry-run
#[test]
fn materialize_reports_damage_alike_for_each_destination() {
    let place = TestDir::new(&["out"]);
    let cut = Archive::new().file("a", "1").file("big", [b'2'; 5000]);
    place.put("bad.tar", archive(1));
    place.put("big.tar", &cut.end()[..4000]);
    for (name, member) in [("bad.tar", "bad0: "), ("big.tar", "big: ")] {
        let reports = [&["-C", "out"][..], &["-O"], &["--dry-run"]].map(|to| {
            let words = [&["materialize", "--allow-truncated", name][..], to].concat();
            let output = place.tarfs(&words);
            let said = stderr_text(&output);
            assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
            let line = said.lines().find(|line| line.contains(member));
            line.expect("a report").to_owned()
        });
        let [written, streamed, planned] = &reports;
        assert!(!written.contains("warning"), "{written}");
        assert_eq!(written, streamed);
        // A dry run keeps no bytes.
        assert!(written.starts_with(&**planned), "{reports:?}");
    }
}
