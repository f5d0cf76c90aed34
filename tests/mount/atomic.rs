//! `materialize --atomic` for other users, and beside mounts.
//!
//! `tests/library` has the tests that need no root.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::support::atomic::{
    FIRST_BYTES, Place, assert_failed, assert_success, beginning, long, shell, whole,
};
use crate::support::fixture::PROGRAM;
use crate::support::http::{Resource, Server};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};

fn assert_same_trees(one: &Path, other: &Path, more: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/compare-trees");
    let output = Command::new(script).args(more).args([one, other]).output();
    let output = output.expect("Python");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

/// An archive with a member for the root.
fn with_root(mode: u64) -> Vec<u8> {
    let root = Header::new("./", b'5').mode(mode).owner(5, 6);
    Archive::new()
        .add(root, "")
        .directory("d/")
        .file("d/f", "x")
        .end()
}

/// Script for a directory `$1` with special attributes and this owner.
fn special_directory(owner: &str) -> String {
    format!(
        "mkdir $1; chown {owner} $1; setfacl -m u:9:rwx $1; setfacl -d -m g:10:rx $1
         chmod 2750 $1; setfattr -n user.k -v v $1"
    )
}

// Promises: atomic-same
#[test]
fn atomic_tree_equals_tree_written_in_place() {
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    for archive in [whole(), with_root(0o1711), with_root(0o555)] {
        for (user, before) in [
            ("", String::new()),
            ("", special_directory("7:8")),
            (user, String::new()),
            (user, special_directory("65534:65534")),
        ] {
            let place = Place::with_archive(&archive);
            let program = place.public_program();
            let script = format!(
                "umask 027
                 set in/plain; {before}
                 test -d $1 || {user} mkdir $1
                 {user} {program} materialize -q a.tar -C $1
                 set in/out; {before}
                 {user} {program} materialize -q a.tar -C $1 --atomic"
            );
            shell(&place, &script);
            assert_eq!(place.names(), ["out", "plain"], "{script}");
            // Without a member for it, the root's mtime is the time of its last entry.
            let more: &[&str] = if archive == whole() {
                &["--ignore-mtime-of-root"]
            } else {
                &[]
            };
            assert_same_trees(&place.path("in/plain"), &place.path("in/out"), more);
        }
    }
}

// Promises: atomic-same
#[test]
fn staging_directory_is_private_in_set_group_id_parent() {
    for group in [65534, 100] {
        let place = Place::open();
        let script = format!("chgrp {group} in && chmod 2777 in && setfacl -d -m g:10:rx in");
        shell(&place, &script);
        let mut user = Command::new("setpriv");
        let program = place.public_program();
        user.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]);
        let mut fed = place.feed(&mut user);
        fed.write(&long()[..FIRST_BYTES]);
        let tree = place.staging_path();
        let mode = fs::metadata(&tree).expect("there").mode();
        assert_eq!(mode & 0o777, 0o700, "not for others yet");
        fed.write(&long()[FIRST_BYTES..]);
        assert_success(&fed.end());
        shell(
            &place,
            "setpriv --reuid=65534 --regid=65534 --clear-groups mkdir in/plain",
        );
        let [made, plain] = ["in/out", "in/plain"]
            .map(|name| fs::metadata(place.path(name)).expect("there"))
            .map(|status| (status.mode() & 0o777, status.gid()));
        assert_eq!(made, plain);
    }
}

// Promises: atomic-ended
#[test]
fn unfinished_tree_of_another_user_is_removed_in_any_mode() {
    let place = Place::with_archive(beginning().file("top/closed/../x", "").end());
    let program = place.public_program();
    let script = format!(
        "setpriv --reuid=65534 --regid=65534 --clear-groups \
         {program} materialize a.tar --atomic -C in/out"
    );
    let output = place.run(Command::new("sh").args(["-c", &script]));
    assert_failed(
        &output,
        &["the name contains '..'", "nothing was written there"],
    );
    assert_eq!(place.names(), Vec::<String>::new());
}

// Promises: atomic-destination
#[test]
fn existing_destination_is_reported_before_fetching() {
    let server = Server::start();
    server.serve("/a.tar", Resource::new(whole()));
    let place = Place::open();
    shell(
        &place,
        "mkdir in/full in/mounted; echo kept >in/full/file; echo kept >in/file",
    );
    symlink("nowhere", place.path("in/dangling")).expect("made");
    let refused = |directory: &str, words: &[&str]| {
        let script = format!(
            "mount -t tmpfs tmpfs in/mounted
             exec {PROGRAM} materialize {} --atomic -C '{directory}'",
            server.url("/a.tar")
        );
        let output = place.run(Command::new("unshare").args(["-m", "sh", "-ec", &script]));
        assert_failed(&output, words);
        assert_eq!(stderr_text(&output).lines().count(), 1);
    };
    refused(
        "in/full",
        &["in/full: is there already and not empty", "remove it, or"],
    );
    refused("in/full/", &["in/full/: is there already and not empty"]);
    refused(
        "in/mounted",
        &["in/mounted: is a mount point", "without --atomic"],
    );
    refused("in/file", &["in/file: cannot open", "Not a directory"]);
    refused("in/dangling", &["in/dangling: cannot open", "No such file"]);
    refused(
        "in/none/out",
        &["in/none: cannot open", "No such file", "make the directory"],
    );
    for nameless in [".", "/", "in/.."] {
        refused(nameless, &["has no name"]);
    }
    assert!(server.requests("/a.tar").is_empty());
    assert_eq!(place.names(), ["dangling", "file", "full", "mounted"]);
    assert_eq!(
        fs::read(place.path("in/full/file")).expect("kept"),
        b"kept\n"
    );
}
