//! `tarfs cache`: what is kept between mounts, and who may take it away.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::{tarfs, told};
use crate::support::tree::Tree;

/// A server with two archives, a place to mount one, and a cache.
struct Place {
    server: Server,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let server = Server::start();
        for (path, tree) in [("/mixed", Tree::mixed()), ("/other", Tree::other())] {
            let packed = Packing::Gzip.pack(&tree.tar);
            server.serve(path, Resource::new(packed).etag("\"1\""));
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("mnt")).expect("made");
        Self { server, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn tarfs(&self, words: &[&str]) -> Output {
        tarfs(self.directory.path(), words)
    }

    #[track_caller]
    fn says(&self, words: &[&str]) -> String {
        let output = self.tarfs(words);
        assert!(output.status.success(), "{}", told(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    #[track_caller]
    fn refuses(&self, words: &[&str]) -> String {
        let output = self.tarfs(words);
        assert_eq!(output.status.code(), Some(2), "{}", told(&output));
        told(&output)
    }

    /// Kind, source and whether it is in use of everything that is kept.
    fn listed(&self) -> Vec<(String, String, bool)> {
        let text = self.says(&["cache", "list", "--json"]);
        let mut listed: Vec<_> = text
            .lines()
            .map(|line| {
                let line: Value = serde_json::from_str(line).expect("JSON");
                let text = |name: &str| line.get(name).and_then(Value::as_str);
                let path = Path::new(text("path").expect("there"));
                assert!(path.starts_with(self.path("cache")) && path.exists());
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

    /// Mounts `/mixed`, with an index and a spool, and keeps it mounted.
    fn mount(&self) -> Mounted<'_> {
        let url = self.server.url("/mixed");
        self.says(&["mount", "--wait-index", &url, "mnt"]);
        Mounted(self)
    }
}

struct Mounted<'a>(&'a Place);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        drop(self.0.tarfs(&["umount", "--lazy", "mnt"]));
    }
}

fn kept(kind: &str, source: &str, in_use: bool) -> (String, String, bool) {
    (kind.to_owned(), source.to_owned(), in_use)
}

#[test]
fn what_is_kept_is_listed_and_goes_but_for_what_a_mount_uses() {
    let place = Place::new();
    assert_eq!(place.says(&["cache", "list"]), "");
    assert_eq!(
        place.says(&["cache", "clear"]),
        "removed 0 files, 0 B, kept 0 files, 0 B\n"
    );
    let other = place.server.url("/other?key=value");
    place.says(&["index", &other, "--quiet"]);
    let mount = place.mount();
    let expected = [
        kept("disk-cache", "mixed", true),
        kept("index", "mixed", true),
    ];
    let listed = place.listed();
    assert_eq!(listed.len(), 3);
    assert_eq!(listed.get(..2), expected.get(..));
    let words = place.says(&["cache", "list"]);
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

    let dry = place.says(&["cache", "clear", "--dry-run"]);
    assert!(dry.contains("/other") && !dry.contains("/mixed"), "{dry}");
    assert_eq!(place.listed().len(), 3);
    assert!(
        place
            .says(&["cache", "prune"])
            .starts_with("removed 0 files")
    );
    assert!(
        place
            .says(&["cache", "clear"])
            .starts_with("removed 1 file, ")
    );
    assert_eq!(place.listed(), expected);
    let pruned = place.says(&["cache", "prune", "--max-size", "0", "--older-than", "0"]);
    assert!(pruned.starts_with("removed 0 files"), "{pruned}");

    // A later mount finds it all.
    drop(mount);
    let requests = place.server.seen("/mixed").len();
    drop(place.mount());
    assert_eq!(
        place.server.seen("/mixed").len(),
        requests + 1,
        "the first one only"
    );
    assert_eq!(
        place.listed(),
        [
            kept("disk-cache", "mixed", false),
            kept("index", "mixed", false)
        ]
    );
    let pruned = place.says(&["cache", "prune", "--max-size", "0"]);
    assert!(pruned.starts_with("removed 2 files"), "{pruned}");
    assert!(place.listed().is_empty());
}

#[test]
fn what_is_no_cache_is_refused_and_what_is_not_of_tarfs_stays() {
    let place = Place::new();
    fs::create_dir_all(place.path("home/documents")).expect("made");
    let told = place.refuses(&["cache", "clear", "--cache-dir", "home"]);
    assert!(told.contains("home is not a cache of tarfs"), "{told}");

    // Names of its own, and behind links, and of others.
    let (index, spool) = (place.path("cache/index"), place.path("cache/disk-cache"));
    let name = "0".repeat(64);
    for directory in [&index, &spool] {
        fs::create_dir_all(directory).expect("made");
        fs::write(directory.join("notes.txt"), b"mine").expect("written");
        fs::write(directory.join("a.data"), b"mine").expect("written");
    }
    fs::write(place.path("victim"), b"mine").expect("written");
    symlink("../../victim", index.join(format!("{name}.idx"))).expect("made");
    symlink("../../victim", spool.join(format!("{name}.data"))).expect("made");
    let theirs = index.join(format!("{}.idx", "1".repeat(64)));
    fs::write(&theirs, b"theirs").expect("written");
    chown(&theirs, Some(1), None).expect("root runs the tests");
    assert_eq!(place.says(&["cache", "list"]), "");
    assert!(
        place
            .says(&["cache", "clear"])
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
    // What looks like an index and is none goes, as do those of other versions.
    fs::write(index.join(format!("{}.idx", "2".repeat(64))), b"old").expect("written");
    assert!(
        place
            .says(&["cache", "clear"])
            .starts_with("removed 1 file")
    );
}

#[test]
fn a_cache_that_others_can_change_is_not_used() {
    let place = Place::new();
    let url = place.server.url("/mixed");
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
        assert!(output.status.success(), "{}", told(&output));
        assert!(
            told(&output).contains(why),
            "{directory}: {}",
            told(&output)
        );
        let refused = place.refuses(&["cache", "list", "--cache-dir", directory]);
        assert!(refused.contains(why), "{refused}");
        let inside = fs::read_dir(place.path(directory)).expect("there");
        assert_eq!(inside.count(), 0, "{directory}");
    }
}
