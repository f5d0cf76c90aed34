//! Promises of docs/semantics.md about the tree that all verbs show: the tree of a mount.
//!
//! `tests/library` has the tests without a mount.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

use crate::support::fixture::TestMount;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};

// Promises: hardlink-lost
#[test]
fn hard_link_without_target_is_reported_and_left_out() {
    let place = TestMount::new(&[]);
    let archive = Archive::new()
        .file("old", "kept")
        .hard_link("old", "gone")
        .hard_link("lost", "gone")
        .end();
    place.put("a.tar", archive);
    let listed = place.tarfs(&["ls", "-l", "a.tar"]);
    let line = "-rw-r--r-- 1 0 0 4 2001-09-09 01:46:40 old\n";
    assert_eq!(String::from_utf8_lossy(&listed.stdout), line);
    assert_eq!(listed.status.code(), Some(2));
    let reports =
        ["old", "lost"].map(|name| format!("{name}: the target of the hard link is missing"));
    let told = stderr_text(&listed);
    assert!(reports.iter().all(|report| told.contains(report)), "{told}");
    let missing = stderr_text(&place.tarfs(&["find", "a.tar", "lost"]));
    assert!(missing.contains("lost: not in the archive"), "{missing}");
    place.succeeds(&["mount", "--wait-index", "a.tar", "mnt"]);
    let names = fs::read_dir(place.path("mnt")).expect("mounted");
    let names: Vec<_> = names
        .map(|entry| entry.expect("read").file_name())
        .collect();
    assert_eq!(names, ["old"]);
    let old = place.mounted("old");
    assert_eq!(fs::read(&old).expect("there"), b"kept");
    assert_eq!(fs::metadata(old).expect("there").nlink(), 1);
    let lost = fs::symlink_metadata(place.mounted("lost")).expect_err("left out");
    assert_eq!(lost.kind(), ErrorKind::NotFound);
    let shown = place.succeeds(&["status", "mnt"]);
    assert!(
        reports.iter().all(|report| shown.contains(report)),
        "{shown}"
    );
}

// Promises: implied-in-mount, implied-written, root-time
#[test]
fn implied_directories_are_the_same_in_every_listing() {
    let place = TestMount::new(&[]);
    let archive = Archive::new()
        .file("a/b/c", "")
        .add(Header::new("a/d", b'0').mtime(5), "");
    place.put("a.tar", archive.end());
    // With a scan that saves its index, and with the saved index.
    for time in ["first", "second"] {
        assert_eq!(place.path("cache").exists(), time == "second");
        let output = place.tarfs(&["ls", "-l", "a.tar"]);
        let line = "drwxr-xr-x 3 0 0 0 1970-01-01 00:00:00 a\n";
        let listed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(listed, line, "{time}: {}", stderr_text(&output));
    }
    fs::remove_dir_all(place.path("cache")).expect("an index was saved");
    for scans in [1, 0] {
        let output = place.tarfs(&["mount", "a.tar", "mnt"]);
        assert!(output.status.success(), "{}", stderr_text(&output));
        let names = fs::read_dir(place.path("mnt/a")).expect("there");
        assert_eq!(names.count(), 2);
        assert_eq!(place.counter("scans"), scans);
        for name in ["mnt/a", "mnt/a/b"] {
            let shown = fs::metadata(place.path(name)).expect("there");
            assert_eq!(shown.mode(), 0o040_755, "{name}");
            assert_eq!((shown.uid(), shown.gid()), (0, 0), "{name}");
            assert_eq!((shown.mtime(), shown.mtime_nsec()), (0, 0), "{name}");
        }
        place.umount();
    }
}
