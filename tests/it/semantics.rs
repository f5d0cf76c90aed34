//! Promises of docs/semantics.md about the tree that all verbs show, also where GNU tar makes another
//! one.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::support::mounts::is_mounted;
use crate::support::program::{self, stderr_text};
use crate::support::raw::{Archive, Header};

/// A directory for files, the cache and extracted trees.
struct Place(tempfile::TempDir);

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn with(archive: Archive) -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        for name in ["mnt", "out"] {
            fs::create_dir(place.path(name)).expect("fresh");
        }
        fs::write(place.path("a.tar"), archive.end()).expect("written");
        place
    }

    fn tarfs(&self, arguments: &[&str]) -> Output {
        program::tarfs(self.0.path(), arguments)
    }

    /// The paths that `ls` lists.
    fn listed(&self) -> BTreeSet<String> {
        let output = self.tarfs(&["ls", "-R", "a.tar"]);
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().map(str::to_owned).collect()
    }

    /// Number of scans of the mounted archive.
    fn scan_count(&self) -> Option<u64> {
        let output = self.tarfs(&["status", "mnt", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).ok()?;
        status.pointer("/counters/scans")?.as_u64()
    }

    fn unmount(&self) {
        let output = self.tarfs(&["umount", "mnt"]);
        assert!(output.status.success(), "{}", stderr_text(&output));
    }

    /// The paths that `materialize` writes.
    fn extracted(&self) -> BTreeSet<String> {
        self.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
        let mut paths = BTreeSet::new();
        paths_below(&self.path("out"), "", &mut paths);
        paths
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if is_mounted(&self.path("mnt")) {
            self.tarfs(&["umount", "--lazy", "mnt"]);
        }
    }
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
        let place = Place::with(archive);
        let expected: BTreeSet<String> = paths.iter().map(|&path| path.to_owned()).collect();
        assert_eq!(place.listed(), expected);
        assert_eq!(place.extracted(), expected);
    }
    let place = Place::with(new().directory("d").symlink("l", "d").directory("l/."));
    place.extracted();
    assert!(
        fs::symlink_metadata(place.path("out/l"))
            .expect("there")
            .is_dir()
    );
}

#[test]
fn implied_directories_are_the_same_in_every_listing() {
    let place = Place::with(
        Archive::new()
            .file("a/b/c", "")
            .add(Header::new("a/d", b'0').mtime(5), ""),
    );
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
        assert_eq!(place.scan_count(), Some(scans));
        for name in ["mnt/a", "mnt/a/b"] {
            let shown = fs::metadata(place.path(name)).expect("there");
            assert_eq!(shown.mode(), 0o040_755, "{name}");
            assert_eq!((shown.uid(), shown.gid()), (0, 0), "{name}");
            assert_eq!((shown.mtime(), shown.mtime_nsec()), (0, 0), "{name}");
        }
        place.unmount();
    }
    place.extracted();
    for name in ["out", "out/a", "out/a/b"] {
        let made = fs::metadata(place.path(name)).expect("there");
        assert_eq!((made.mtime(), made.mtime_nsec()), (0, 0), "{name}");
    }
}

#[test]
fn escaping_names_are_rejected_and_truncation_is_reported() {
    let place = Place::with(
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
    let place = Place::with(Archive::new().file("f", "").file("f/g", "").file("h", ""));
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
