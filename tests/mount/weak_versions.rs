//! Local archives without a reliable version: block devices, and files in a FUSE mount.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::fixture::{TestDir, TestMount};
use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::rng::Rng;
use crate::support::tree::Tree;
use crate::support::wait;

/// A fixture on tmpfs, which records change times. Other file systems may not.
fn place() -> TestMount {
    TestMount::of(TestDir::new_in("/dev/shm", &MOUNTPOINTS), &MOUNTPOINTS)
}

/// Whether a note in the status of `mountpoint` contains `text`.
fn has_note(place: &TestMount, mountpoint: &str, text: &str) -> bool {
    let status = place.status_of(mountpoint);
    let notes = status.get("notes").and_then(Value::as_array);
    let mut notes = notes.into_iter().flatten().filter_map(Value::as_str);
    notes.any(|note| note.contains(text))
}

/// The mountpoints. A mount that reads from another one comes first.
const MOUNTPOINTS: [&str; 2] = ["inner", "outer"];

/// An archive of one file `name` of noise.
fn archive(name: &str, seed: u64) -> Tree {
    Tree::of(vec![(name.to_owned(), Rng::new(seed).bytes(3 << 20))])
}

/// Two archives of noise that gzip packs to the same length.
fn same_len_gzips() -> [(Tree, Vec<u8>); 2] {
    let mut by_len = BTreeMap::new();
    for seed in 1.. {
        let tree = archive("file", seed);
        let packed = Packing::Gzip.pack(&tree.tar).to_vec();
        if let Some(found) = by_len.insert(packed.len(), (tree, packed)) {
            let newer = by_len.remove(&found.1.len()).expect("inserted");
            return [found, newer];
        }
    }
    unreachable!("lengths differ by a few bytes")
}

#[track_caller]
fn assert_content(path: &Path, content: &[u8]) {
    let read = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(read == content, "{} is wrong", path.display());
}

// Promises: version-file
#[test]
fn archive_in_another_mount_is_reread_after_remount() {
    let place = place();
    // Device and inode number, length and times are equal in both mounts.
    let [old, new] = same_len_gzips();
    for (number, (tree, inner)) in [old, new].into_iter().enumerate() {
        let outer = Tree::of(vec![("inner.tar".to_owned(), inner)]);
        fs::write(place.path("outer.tar"), outer.tar).expect("written");
        place.succeeds(&["mount", "outer.tar", "outer"]);
        place.succeeds(&["mount", "outer/inner.tar", "inner", "--wait-index"]);
        for (name, content) in &tree.files {
            assert_content(&place.path("inner").join(name), content);
        }
        if number == 1 {
            assert!(has_note(&place, "inner", "version"), "the status says why");
            assert!(!has_note(&place, "outer", "version"), "that one is proven");
        }
        place.succeeds(&["umount", "inner"]);
        place.succeeds(&["umount", "outer"]);
    }
}

// Promises: resume-weak
#[test]
fn run_from_file_system_without_ctime_is_not_resumed() {
    let place = place();
    let inner = Packing::Gzip.pack(&archive("file", 1).tar);
    let outer = Tree::of(vec![("inner.tar".to_owned(), inner.to_vec())]);
    fs::write(place.path("1.tar"), outer.tar).expect("written");
    fs::create_dir(place.path("tree")).expect("made");
    place.succeeds(&["mount", "1.tar", "outer"]);
    let output = place.tarfs(&["materialize", "--resume", "outer/inner.tar", "-C", "tree"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(
        stderr_text(&output).contains("starts again from the beginning"),
        "{}",
        stderr_text(&output)
    );
}

/// A loop device, detached when dropped.
struct Loop {
    device: String,
}

impl Loop {
    /// Attaches a file. Returns `None` where there are no loop devices or no permission.
    fn new(file: &Path) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show", "--read-only"])
            .arg(file)
            .output();
        let output = output.ok().filter(|output| output.status.success())?;
        let device = String::from_utf8(output.stdout).expect("a path");
        let device = device.trim().to_owned();
        Some(Self { device })
    }

    fn detach(&self) -> bool {
        let status = Command::new("losetup")
            .args(["--detach", &self.device])
            .status();
        status.is_ok_and(|status| status.success())
    }

    /// Replaces the medium of the device.
    fn replace(&self, file: &Path) {
        wait::wait_until("it is detached", || self.detach());
        wait::wait_until("it is attached", || {
            let mut command = Command::new("losetup");
            command.args(["--read-only", &self.device]).arg(file);
            command.status().is_ok_and(|status| status.success())
        });
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        self.detach();
    }
}

// Promises: version-file, version-weak
#[test]
fn other_medium_in_same_block_device_is_another_archive() {
    let place = place();
    let versions = [("old", 1), ("new", 2)].map(|(name, seed)| archive(name, seed));
    let media = ["1.tar", "2.tar"].map(|name| place.path(name));
    for (tree, medium) in versions.iter().zip(&media) {
        fs::write(medium, &tree.tar).expect("written");
    }
    let [first, second] = &media;
    let Some(device) = Loop::new(first) else {
        // Only root has loop devices, and some containers have none.
        return;
    };
    for (number, tree) in versions.iter().enumerate() {
        if number > 0 {
            device.replace(second);
        }
        place.succeeds(&["mount", &device.device, "inner", "--wait-index"]);
        for (name, content) in &tree.files {
            assert_content(&place.path("inner").join(name), content);
        }
        if number == 1 {
            assert!(has_note(&place, "inner", "version"), "the status says why");
        }
        place.succeeds(&["umount", "inner"]);
    }
}

// Promises: copy-unproven
#[test]
fn copy_without_version_is_reused_only_for_same_bytes() {
    let place = place();
    let server = Server::start();
    // The last file changes, which one sample from the middle does not show.
    let [old, new] = [1, 2].map(|seed| {
        let file = |name: &str, seed| (name.to_owned(), Rng::new(seed).bytes(6 << 20));
        Tree::of(vec![
            file("first", 5),
            file("second", 6),
            file("third", seed),
        ])
    });
    let url = server.url("/archive");
    let words = ["mount", &url, "inner", "--wait-index", "--copy-to", "copy"];
    server.serve("/archive", Resource::new(old.tar.clone()));
    for _ in 0..2 {
        place.succeeds(&words);
        wait::wait_until("the copy is complete", || {
            let status = place.status_of("inner");
            status.pointer("/copy/state").and_then(Value::as_str) == Some("complete")
        });
        for (name, content) in &old.files {
            assert_content(&place.path("inner").join(name), content);
        }
        place.succeeds(&["umount", "inner"]);
    }
    server.serve("/archive", Resource::new(new.tar));
    let output = place.tarfs(&words);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    let text = "no copy that a mount of this archive keeps";
    assert!(
        stderr_text(&output).contains(text),
        "{}",
        stderr_text(&output)
    );
}

// Promises: version-weak
#[test]
fn status_reports_server_without_version() {
    let place = place();
    let server = Server::start();
    let tree = archive("file", 1);
    for (resource, is_named) in [
        (Resource::new(tree.tar.clone()), false),
        (Resource::new(tree.tar.clone()).etag("\"1\""), true),
    ] {
        server.serve("/archive", resource);
        place.succeeds(&["mount", &server.url("/archive"), "inner", "--wait-index"]);
        assert_eq!(has_note(&place, "inner", "names no version"), !is_named);
        place.succeeds(&["umount", "inner"]);
    }
}
