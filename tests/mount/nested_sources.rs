//! Members of archives as archives of their own: those that are mounted.
//!
//! `tests/library` has the tests without a mount.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::nested::{content, outer};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::wait;

// Promises: nested-tar, nested-everywhere
#[test]
fn nested_archive_is_a_source_of_every_verb() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::ZstdFrames] {
        let place = TestMount::new(&["out"]);
        place.put("outer", outer(packing));
        let source = "tar:outer!/kept/inner";
        for _ in 0..2 {
            assert_eq!(place.succeeds(&["ls", "-R", source]), "d\nd/f\n");
        }
        assert_eq!(
            place.succeeds(&["ls", "-R", "tar:outer!/latest"]),
            "d\nd/f\n"
        );
        place.succeeds(&["verify", "-q", source]);
        place.succeeds(&["index", "-q", "--output", "i", source]);
        place.succeeds(&["materialize", "-q", "--index", "i", "-C", "out", source]);
        assert!(fs::read(place.path("out/d/f")).expect("readable") == content());
        place.succeeds(&["mount", source, "mnt"]);
        assert!(fs::read(place.path("mnt/d/f")).expect("readable") == content());
        let status = place.succeeds(&["status", "--json", "mnt"]);
        assert!(status.contains("outer: kept/inner\""), "{status}");
        place.succeeds(&["umount", "mnt"]);
        let over = ["ls", "-R", "outer", "--layer", source];
        let listed = place.succeeds(&over);
        assert!(
            listed.contains("d/f\n") && listed.contains("kept\n"),
            "{listed}"
        );
    }
}

// Promises: source-bytes
#[test]
fn sources_and_copies_with_any_bytes_in_their_paths_are_mounted() {
    let place = TestMount::new(&[]);
    let bytes = |path: &[u8]| OsString::from_vec(path.to_vec());
    let directory = place.path(bytes(b"caf\xe9"));
    fs::create_dir(&directory).expect("made");
    fs::write(directory.join("outer.tar"), outer(Packing::Gzip)).expect("space");
    let inner = b"caf\xe9/outer.tar!/kept/inner";
    let source = bytes(&[b"tar:", &inner[..]].concat());
    let mount = |source: &OsStr, more: &[&OsStr]| {
        let mut command = place.command(&["mount"]);
        let output = command.arg(source).arg("mnt").args(more).output();
        let output = output.expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
    };
    let copy = bytes(b"caf\xe9/copy");
    mount(&source, &[OsStr::new("--copy-to"), &copy]);
    assert!(fs::read(place.path("mnt/d/f")).expect("readable") == content());
    let status = place.succeeds(&["status", "--json", "mnt"]);
    assert!(
        status.contains("/caf%E9/outer.tar: kept/inner\""),
        "{status}"
    );
    let copied = directory.join("copy/d/f");
    wait::wait_until("it is copied", || {
        fs::read(&copied).is_ok_and(|bytes| bytes == content())
    });
    place.succeeds(&["umount", "mnt"]);
    mount(&bytes(b"caf\xe9"), &[]);
    assert!(place.path("mnt/outer.tar/kept").exists());
    place.succeeds(&["umount", "mnt"]);
    mount(&bytes(b"caf\xe9/outer.tar"), &[]);
    assert!(place.path("mnt/kept").exists());
}

// Promises: nested-everywhere
#[test]
fn indexes_of_nested_and_outer_archive_are_cached() {
    let place = TestMount::new(&["out"]);
    let server = Server::start();
    server.serve("/a.tar", Resource::new(outer(Packing::Plain)).etag("\"1\""));
    let source = format!("tar:{}!/kept/inner", server.url("/a.tar"));
    place.succeeds(&["mount", "--wait-index", &source, "mnt"]);
    assert!(fs::read(place.path("mnt/d/f")).expect("readable") == content());
    place.succeeds(&["umount", "mnt"]);
    // Both indexes are kept, and the bytes that were read.
    let before = server.sent_bytes("/a.tar");
    place.succeeds(&["mount", "--wait-index", &source, "mnt"]);
    assert!(fs::read(place.path("mnt/d/f")).expect("readable") == content());
    let again = server.sent_bytes("/a.tar") - before;
    assert!(again < 100_000, "{again}");
}
