//! `tarfs cat`: the contents that it prints, and its errors.

use std::fs;
use std::process::Command;

use crate::support::cli::Place;
use crate::support::fixture::PROGRAM;
use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::raw::{Archive, random_bytes};

fn archive() -> Vec<u8> {
    let sparse = [
        ("GNU.sparse.numblocks", "1"),
        ("GNU.sparse.size", "100003"),
        ("GNU.sparse.map", "100000,3"),
    ];
    Archive::new()
        .directory("d")
        .file("d/b", "bee\n")
        .file("a", random_bytes(3_000_000))
        .file("empty", "")
        .symlink("l", "d/b")
        .symlink("k", "d")
        .symlink("out", "../../a")
        .hard_link("h", "a")
        .fifo("p")
        .pax(&sparse)
        .file("sparse", "end")
        .file("d/b", "bees\n")
        .end()
}

// Promises: cat-files
#[test]
fn files_are_printed_in_the_order_of_their_paths() {
    let place = Place::new();
    place.put("a.tar", archive());
    let unpacked = Command::new("tar")
        .args(["-xf", "a.tar", "-C", "out"])
        .current_dir(place.path("."))
        .status();
    assert!(unpacked.expect("GNU tar").success());
    place.put("a.tar.gz", Packing::Gzip.pack(&archive().into()));
    let server = Server::start();
    server.serve("/a.tar.gz", Resource::new(archive()).etag("\"1\""));
    let url = server.url("/a.tar.gz");
    let paths = ["sparse", "l", "a", "empty", "./k/b", "h", "l", "/d/b"];
    let expected: Vec<u8> = paths
        .iter()
        .flat_map(|path| fs::read(place.path("out").join(path.trim_start_matches('/'))))
        .flatten()
        .collect();
    for source in ["a.tar", "a.tar.gz", &url] {
        let printed = place.succeeds(&[&["cat", source][..], &paths].concat());
        assert_eq!(printed.output.len(), expected.len(), "{source}");
        assert!(printed.output == expected, "{source}");
    }
}

// Promises: cat-files
#[test]
fn each_path_that_cannot_be_printed_is_named() {
    let place = Place::new();
    place.put("a.tar", archive());
    let paths = ["d", "none", "out", "p", "a/x", "l"];
    let outcome = place.run(&[&["cat", "a.tar"][..], &paths].concat());
    assert_eq!((outcome.code, outcome.text()), (1, "bees\n"));
    let errors: Vec<_> = outcome.complaints.lines().collect();
    assert_eq!(errors.len(), 5, "{errors:?}");
    for ((error, path), reason) in errors.iter().zip(paths).zip([
        "is a directory",
        "not in the archive",
        "leads outside",
        "is not a regular file",
        "not a directory",
    ]) {
        let is_named = error.starts_with(&format!("tarfs: {path}: ")) && error.contains(reason);
        assert!(is_named, "{path}: {error}");
    }
    assert_eq!(place.run(&["cat", "a.tar"]).code, 64);
}

#[test]
fn file_that_the_end_of_the_archive_cuts_is_printed_as_far_as_it_goes() {
    let place = Place::new();
    let content = random_bytes(3_000_000);
    let whole = Archive::new().file("a", "1").file("big", &content).end();
    let cut = 2_500_000;
    place.put("cut.tar", &whole[..cut]);
    let outcome = place.run(&["cat", "--allow-truncated", "cut.tar", "a", "big"]);
    let header = 3 * 512;
    assert_eq!(outcome.code, 2, "{}", outcome.complaints);
    let (first, rest) = outcome.output.split_at(1);
    assert!(first == b"1" && rest == &content[..cut - header]);
    assert!(
        outcome.complaints.contains("big: "),
        "{}",
        outcome.complaints
    );
}

#[test]
fn missing_path_counts_also_if_the_reader_ends() {
    let place = Place::new();
    place.put("a.tar", archive());
    let script = "\"$0\" cat a.tar none a | head -c 1 >out/x; exit ${PIPESTATUS[0]}";
    let mut shell = place.command("bash");
    let ended = shell.args(["-c", script]).arg(PROGRAM).output();
    assert_eq!(ended.expect("bash").status.code(), Some(1));
}

// Promises: cat-files
#[test]
fn files_of_layers_are_those_of_the_merged_tree() {
    let place = Place::new();
    place.put("low.tar", archive());
    let above = Archive::new().file("d/b", "above\n").file(".wh.a", "");
    place.put("above.tar", above.end());
    let outcome = place.run(&["cat", "low.tar", "--layer", "above.tar", "l", "a"]);
    assert_eq!((outcome.code, outcome.text()), (1, "above\n"));
    assert!(
        outcome.complaints.contains("a: not in"),
        "{}",
        outcome.complaints
    );
}
