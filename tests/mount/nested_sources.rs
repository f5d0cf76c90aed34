//! Members of archives, and byte ranges, as archives of their own.

use std::fs;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::raw::Archive;
use crate::support::rng::Rng;

/// Content of the file in the innermost archive.
fn content() -> Vec<u8> {
    Rng::new(3).text(400_000)
}

fn inner(packing: Packing) -> bytes::Bytes {
    let plain = Archive::new().directory("d/").file("d/f", content()).end();
    packing.pack(&plain.into())
}

/// The archive behind other files, and behind a link.
fn outer(packing: Packing) -> bytes::Bytes {
    let plain = Archive::new()
        .file("before", Rng::new(1).bytes(300_000))
        .file("kept/inner", inner(Packing::Gzip))
        .file("after", Rng::new(2).bytes(3_000_000))
        .symlink("latest", "kept/inner")
        .end();
    packing.pack(&plain.into())
}

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

#[test]
fn nested_sources_nest_and_slices_begin_anywhere() {
    let place = TestMount::new(&["out"]);
    let box_of = |name: &str, bytes: &[u8]| Archive::new().file(name, bytes).end();
    place.put("a.tar", box_of("b.tar", &box_of("c", &outer(Packing::Lz4))));
    let source = "tar:tar:tar:a.tar!/b.tar!/c!/kept/inner";
    assert_eq!(place.succeeds(&["ls", "-R", source]), "d\nd/f\n");
    let packed = inner(Packing::Xz);
    place.put("image", [&[7; 1000], &packed[..], &[9; 500]].concat());
    let (all, rest) = (
        format!("slice:1000+{}:image", packed.len()),
        "slice:512:a.tar",
    );
    assert_eq!(place.succeeds(&["ls", "-R", &all]), "d\nd/f\n");
    assert_eq!(place.succeeds(&["ls", rest]), "c\n");
    let digest = crate::support::sha256::sha256(&packed);
    place.succeeds(&["verify", "-q", "--expect-sha256", &digest, &all]);
}

#[test]
fn missing_nested_member_error_names_its_location() {
    let place = TestMount::new(&["out"]);
    let outer = outer(Packing::Plain);
    place.put("outer", &outer);
    let has = format!("it has only {} bytes", outer.len());
    for (source, words) in [
        (
            "tar:outer!/kept/nothing",
            ["outer: kept/nothing", "not found"],
        ),
        ("tar:outer!/kept", ["outer: kept", "no regular file"]),
        ("tar:outer!/../kept", ["outer: ../kept", "leads out"]),
        ("tar:nowhere!/x", ["nowhere", "not found"]),
        ("tar:-!/x", ["standard input", "store it in a file"]),
        (
            "slice:9000000:outer",
            ["outer: the bytes from 9000000", &has],
        ),
        (
            "slice:0+9000000:outer",
            ["outer: 9000000 bytes from 0", &has],
        ),
        (
            "slice:1+18446744073709551615:outer",
            ["outer: 18446744073709551615 bytes from 1", &has],
        ),
    ] {
        let complaint = place.error_of(&["ls", source]);
        assert!(
            words.iter().all(|word| complaint.contains(word)),
            "{source}: {complaint}"
        );
    }
}
