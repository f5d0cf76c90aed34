//! Damaged members: what `ls` reports.
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
