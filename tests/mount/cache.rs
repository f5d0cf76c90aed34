//! `tarfs cache`: which files are kept between mounts, and which may be removed.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::Path;

use serde_json::Value;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::tree::Tree;

/// A fixture whose server has two archives.
type Place = TestMount<Server>;

fn place() -> Place {
    let server = Server::start();
    for (path, tree) in [("/mixed", Tree::mixed()), ("/other", Tree::other())] {
        let packed = Packing::Gzip.pack(&tree.tar);
        server.serve(path, Resource::new(packed).etag("\"1\""));
    }
    TestMount::with(&[], server)
}

/// Kind, source and use of every cached file.
fn cache_list(place: &Place) -> Vec<(String, String, bool)> {
    let text = place.succeeds(&["cache", "list", "--json"]);
    let mut listed: Vec<_> = text
        .lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let text = |name: &str| line.get(name).and_then(Value::as_str);
            let path = Path::new(text("path").expect("there"));
            assert!(path.starts_with(place.path("cache")) && path.exists());
            assert!(line.get("disk_bytes").and_then(Value::as_u64) > Some(0));
            let source = text("source").expect("known");
            let source = source.rsplit('/').next().expect("a name");
            (
                text("kind").expect("there").to_owned(),
                source.to_owned(),
                line.get("in_use").and_then(Value::as_bool).expect("there"),
            )
        })
        .collect();
    listed.sort();
    listed
}

/// Mounts `/mixed`, with an index and a disk cache, until the result is dropped.
fn mount(place: &Place) -> Mounted<'_> {
    place.succeeds(&["mount", "--wait-index", &place.url("/mixed"), "mnt"]);
    Mounted(place)
}

struct Mounted<'a>(&'a Place);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        drop(self.0.tarfs(&["umount", "--lazy", "mnt"]));
    }
}

fn cache_entry(kind: &str, source: &str, in_use: bool) -> (String, String, bool) {
    (kind.to_owned(), source.to_owned(), in_use)
}

// Promises: cache-list, cache-prune
#[test]
fn cache_entries_are_listed_and_pruned_unless_in_use() {
    let place = place();
    assert_eq!(place.succeeds(&["cache", "list"]), "");
    assert_eq!(
        place.succeeds(&["cache", "clear"]),
        "removed 0 files, 0 B, kept 0 files, 0 B\n"
    );
    let other = place.url("/other?key=value");
    place.succeeds(&["index", &other, "--quiet"]);
    let mounted = mount(&place);
    let expected = [
        cache_entry("disk-cache", "mixed", true),
        cache_entry("index", "mixed", true),
    ];
    let listed = cache_list(&place);
    assert_eq!(listed.len(), 3);
    assert_eq!(listed.get(..2), expected.get(..));
    let words = place.succeeds(&["cache", "list"]);
    assert!(
        words.starts_with("KIND ") && words.contains("in use"),
        "{words}"
    );
    assert!(
        words
            .lines()
            .last()
            .is_some_and(|sum| sum.starts_with("3 files, "))
    );

    let dry = place.succeeds(&["cache", "clear", "--dry-run"]);
    assert!(dry.contains("/other") && !dry.contains("/mixed"), "{dry}");
    assert_eq!(cache_list(&place).len(), 3);
    assert!(
        place
            .succeeds(&["cache", "prune"])
            .starts_with("removed 0 files")
    );
    assert!(
        place
            .succeeds(&["cache", "clear"])
            .starts_with("removed 1 file, ")
    );
    assert_eq!(cache_list(&place), expected);
    let pruned = place.succeeds(&["cache", "prune", "--max-size", "0", "--older-than", "0"]);
    assert!(pruned.starts_with("removed 0 files"), "{pruned}");

    // A later mount finds all of it.
    drop(mounted);
    let requests = place.requests("/mixed").len();
    drop(mount(&place));
    assert_eq!(
        place.requests("/mixed").len(),
        requests + 1,
        "the first one only"
    );
    assert_eq!(
        cache_list(&place),
        [
            cache_entry("disk-cache", "mixed", false),
            cache_entry("index", "mixed", false)
        ]
    );
    let pruned = place.succeeds(&["cache", "prune", "--max-size", "0"]);
    assert!(pruned.starts_with("removed 2 files"), "{pruned}");
    assert!(cache_list(&place).is_empty());
}

// Promises: cache-foreign
#[test]
fn cache_verbs_reject_non_cache_and_keep_foreign_files() {
    let place = place();
    fs::create_dir_all(place.path("home/documents")).expect("made");
    let told = place.error_of(&["cache", "clear", "--cache-dir", "home"]);
    assert!(told.contains("home is not a cache of tarfs"), "{told}");

    // Files with other names, behind links, and of other users.
    let (index, disk_cache) = (place.path("cache/index"), place.path("cache/disk-cache"));
    let name = "0".repeat(64);
    for directory in [&index, &disk_cache] {
        fs::create_dir_all(directory).expect("made");
        fs::write(directory.join("notes.txt"), b"mine").expect("written");
        fs::write(directory.join("a.data"), b"mine").expect("written");
    }
    fs::write(place.path("victim"), b"mine").expect("written");
    symlink("../../victim", index.join(format!("{name}.idx"))).expect("made");
    symlink("../../victim", disk_cache.join(format!("{name}.data"))).expect("made");
    let theirs = index.join(format!("{}.idx", "1".repeat(64)));
    fs::write(&theirs, b"theirs").expect("written");
    chown(&theirs, Some(1), None).expect("root runs the tests");
    assert_eq!(place.succeeds(&["cache", "list"]), "");
    assert!(
        place
            .succeeds(&["cache", "clear"])
            .starts_with("removed 0 files")
    );
    for left in [
        "index/notes.txt",
        "index/a.data",
        "disk-cache/notes.txt",
        "disk-cache/a.data",
    ] {
        assert!(place.path("cache").join(left).exists(), "{left}");
    }
    assert!(theirs.exists() && place.path("victim").exists());
    // A file that looks like an index but is none is removed, and so are indexes of other versions.
    fs::write(index.join(format!("{}.idx", "2".repeat(64))), b"old").expect("written");
    assert!(
        place
            .succeeds(&["cache", "clear"])
            .starts_with("removed 1 file")
    );
}

// Promises: trust-cache
#[test]
fn cache_writable_by_others_is_not_used() {
    let place = place();
    let url = place.url("/mixed");
    let open = place.path("open");
    fs::create_dir(&open).expect("made");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("set");
    let theirs = place.path("theirs");
    fs::create_dir(&theirs).expect("made");
    chown(&theirs, Some(1), None).expect("root runs the tests");
    fs::create_dir(place.path("real")).expect("made");
    symlink("real", place.path("link")).expect("made");
    lchown(place.path("link"), Some(1), None).expect("root");
    for (directory, why) in [
        ("open", "can be written to by other users"),
        ("theirs", "belongs to another user"),
        ("link", "is another user's symbolic link"),
    ] {
        let output = place.tarfs(&["index", &url, "--quiet", "--cache-dir", directory]);
        assert!(output.status.success(), "{}", stderr_text(&output));
        assert!(
            stderr_text(&output).contains(why),
            "{directory}: {}",
            stderr_text(&output)
        );
        let refused = place.error_of(&["cache", "list", "--cache-dir", directory]);
        assert!(refused.contains(why), "{refused}");
        let inside = fs::read_dir(place.path(directory)).expect("there");
        assert_eq!(inside.count(), 0, "{directory}");
    }
}
