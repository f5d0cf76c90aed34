//! Members of archives as archives of their own: those that are mounted.
//!
//! `tests/library` has the tests without a mount.

use std::fs;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::nested::{content, outer};
use crate::support::packing::Packing;

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
