//! Files of archives, and stretches of bytes, as archives of their own.

use std::fs;

use crate::support::http::{Resource, Server};
use crate::support::mounts::is_mounted;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::program::{tarfs, told};
use crate::support::raw::Archive;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        for name in ["out", "mnt"] {
            fs::create_dir(place.0.path().join(name)).expect("made");
        }
        place
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.0.path().join(name), bytes).expect("space");
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.0.path().join(name)).expect("readable")
    }

    /// What it writes when all goes well.
    #[track_caller]
    fn says(&self, words: &[&str]) -> String {
        let output = tarfs(self.0.path(), words);
        assert!(output.status.success(), "{words:?}: {}", told(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// What it complains about when it fails.
    #[track_caller]
    fn complains(&self, words: &[&str]) -> String {
        let output = tarfs(self.0.path(), words);
        assert_eq!(output.status.code(), Some(2), "{}", told(&output));
        told(&output)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if is_mounted(&self.0.path().join("mnt")) {
            tarfs(self.0.path(), &["umount", "--lazy", "mnt"]);
        }
    }
}

/// What the innermost archive holds.
fn content() -> Vec<u8> {
    Noise::new(3).text(400_000)
}

fn inner(packing: Packing) -> bytes::Bytes {
    let plain = Archive::new().directory("d/").file("d/f", content()).end();
    packing.pack(&plain.into())
}

/// The same behind other files, and behind a link.
fn outer(packing: Packing) -> bytes::Bytes {
    let plain = Archive::new()
        .file("before", Noise::new(1).bytes(300_000))
        .file("kept/inner", inner(Packing::Gzip))
        .file("after", Noise::new(2).bytes(3_000_000))
        .symlink("latest", "kept/inner")
        .end();
    packing.pack(&plain.into())
}

#[test]
fn a_file_of_an_archive_is_an_archive_for_every_verb() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::ZstdFrames] {
        let place = Place::new();
        place.put("outer", outer(packing));
        let source = "tar:outer!/kept/inner";
        for _ in 0..2 {
            assert_eq!(place.says(&["ls", "-R", source]), "d\nd/f\n");
        }
        assert_eq!(place.says(&["ls", "-R", "tar:outer!/latest"]), "d\nd/f\n");
        place.says(&["verify", "-q", source]);
        place.says(&["index", "-q", "--output", "i", source]);
        place.says(&["materialize", "-q", "--index", "i", "-C", "out", source]);
        assert!(place.read("out/d/f") == content());
        place.says(&["mount", source, "mnt"]);
        assert!(place.read("mnt/d/f") == content());
        let status = place.says(&["status", "--json", "mnt"]);
        assert!(status.contains("outer: kept/inner\""), "{status}");
        place.says(&["umount", "mnt"]);
        let over = ["ls", "-R", "outer", "--layer", source];
        let listed = place.says(&over);
        assert!(
            listed.contains("d/f\n") && listed.contains("kept\n"),
            "{listed}"
        );
    }
}

#[test]
fn what_is_known_of_a_part_and_of_what_lies_around_it_is_kept() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/a.tar", Resource::new(outer(Packing::Plain)).etag("\"1\""));
    let source = format!("tar:{}!/kept/inner", server.url("/a.tar"));
    place.says(&["mount", "--wait-index", &source, "mnt"]);
    assert!(place.read("mnt/d/f") == content());
    place.says(&["umount", "mnt"]);
    // Indexes of both are kept, and what was read.
    let before = server.sent_bytes("/a.tar");
    place.says(&["mount", "--wait-index", &source, "mnt"]);
    assert!(place.read("mnt/d/f") == content());
    let again = server.sent_bytes("/a.tar") - before;
    assert!(again < 100_000, "{again}");
}

#[test]
fn parts_are_of_parts_too_and_a_slice_begins_anywhere() {
    let place = Place::new();
    let box_of = |name: &str, bytes: &[u8]| Archive::new().file(name, bytes).end();
    place.put("a.tar", box_of("b.tar", &box_of("c", &outer(Packing::Lz4))));
    let source = "tar:tar:tar:a.tar!/b.tar!/c!/kept/inner";
    assert_eq!(place.says(&["ls", "-R", source]), "d\nd/f\n");
    let packed = inner(Packing::Xz);
    place.put("image", [&[7; 1000], &packed[..], &[9; 500]].concat());
    let (all, rest) = (
        format!("slice:1000+{}:image", packed.len()),
        "slice:512:a.tar",
    );
    assert_eq!(place.says(&["ls", "-R", &all]), "d\nd/f\n");
    assert_eq!(place.says(&["ls", rest]), "c\n");
    let digest = crate::support::sums::sha256(&packed);
    place.says(&["verify", "-q", "--expect-sha256", &digest, &all]);
}

#[test]
fn a_part_that_is_not_there_is_told_with_its_place() {
    let place = Place::new();
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
        let complaint = place.complains(&["ls", source]);
        assert!(
            words.iter().all(|word| complaint.contains(word)),
            "{source}: {complaint}"
        );
    }
}
