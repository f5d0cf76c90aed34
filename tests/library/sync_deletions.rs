//! `tarfs sync --delete` of archives that may lack members, and of those that surely have all.

use std::fs;

use crate::support::cli::{Outcome, Place};
use crate::support::image::{Image, docker, oci};
use crate::support::packing::Packing;
use crate::support::raw::Archive;
use crate::support::sha256::sha256;

/// A place whose directory `out` has an old file `a` and a file that no archive has.
fn place_with_tree() -> Place {
    let place = Place::new();
    fs::create_dir_all(place.path("out")).expect("made");
    place.put("out/a", "old content");
    place.put("out/extra", "precious");
    place
}

fn cut_archive() -> Archive {
    Archive::new().file("a", "new").file("d/b", "b")
}

fn sync(place: &Place, source: &str, flags: &[&str]) -> Outcome {
    place.run(&[&["sync", "--delete", source, "out"], flags].concat())
}

/// A run updates files, deletes nothing, and reports that `archive` has no end marker.
#[track_caller]
fn assert_keeps(place: &Place, source: &str, flags: &[&str], archive: &str) {
    let refusal = format!("{archive}: nothing is deleted, because the archive has no end marker");
    let words = [flags, &["--dry-run"]].concat();
    let dry = sync(place, source, &words);
    assert_eq!(dry.code, 2, "{source}: {}", dry.complaints);
    assert!(dry.complaints.contains(&refusal), "{}", dry.complaints);
    assert!(!dry.text().contains("delete"), "{source}: {}", dry.text());
    let outcome = sync(place, source, flags);
    assert_eq!(outcome.code, 2, "{source}: {}", outcome.complaints);
    let complaints = outcome.complaints;
    assert!(complaints.contains(&refusal), "{complaints}");
    let [new, extra] =
        ["out/a", "out/extra"].map(|name| fs::read(place.path(name)).expect("there"));
    assert_eq!(new, b"new", "{source}: {complaints}");
    assert_eq!(extra, b"precious", "{source}");
}

/// A run makes `out` equal to its source.
#[track_caller]
fn assert_deletes(place: &Place, source: &str, flags: &[&str]) {
    let dry = sync(place, source, &[flags, &["--dry-run"]].concat());
    assert!(
        dry.lines().contains(&"delete extra"),
        "{source}: {}",
        dry.complaints
    );
    let outcome = sync(place, source, flags);
    assert_eq!(outcome.code, 0, "{source}: {}", outcome.complaints);
    assert!(!place.path("out/extra").exists(), "{source}");
}

// Promises: sync-end-marker
#[test]
fn archive_without_an_end_marker_deletes_nothing() {
    let packings = Packing::ALL.into_iter();
    for (number, packing) in packings.enumerate() {
        let place = place_with_tree();
        let name = format!("cut{number}");
        // The packed stream is complete, with its checksums.
        place.put(&name, packing.pack(&cut_archive().unfinished().into()));
        assert_keeps(&place, &name, &[], &name);
        // By its saved index.
        assert_keeps(&place, &name, &[], &name);
        let kept = place.run(&["sync", &name, "out"]);
        assert_eq!(kept.code, 0, "{packing:?}: {}", kept.complaints);
        fs::create_dir(place.path("fresh")).expect("made");
        let fresh = place.run(&["materialize", "-q", &name, "-C", "fresh"]);
        assert_eq!((fresh.code, &*fresh.complaints), (0, ""), "{packing:?}");
        assert_eq!(place.run(&["diff", &name, "fresh"]).code, 0, "{packing:?}");
        place.put(&name, packing.pack(&cut_archive().end().into()));
        assert_deletes(&place, &name, &[]);
    }
}

// Promises: sync-end-marker
#[test]
fn archive_without_an_end_marker_updates_a_tree_without_other_files() {
    let place = place_with_tree();
    fs::remove_file(place.path("out/extra")).expect("there");
    place.put("cut.tar", cut_archive().unfinished());
    let outcome = sync(&place, "cut.tar", &[]);
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
    assert_eq!(fs::read(place.path("out/a")).expect("there"), b"new");
}

// Promises: sync-end-marker
#[test]
fn cut_within_the_end_marker_deletes_nothing() {
    for len in [0, 1, 511, 512, 1000, 1023] {
        let place = place_with_tree();
        let mut archive = cut_archive().unfinished();
        archive.resize(archive.len() + len, 0);
        place.put("cut.tar", archive);
        assert_keeps(&place, "cut.tar", &[], "cut.tar");
    }
}

/// Zero records end none of several archives in one file.
// Promises: sync-end-marker
#[test]
fn archives_in_one_file_delete_nothing_with_ignored_zeros() {
    let place = place_with_tree();
    let second = Archive::new().file("c", "c").end();
    place.put("two.tar", [cut_archive().end(), second].concat());
    assert_keeps(&place, "two.tar", &["--ignore-zeros"], "two.tar");
    assert!(place.path("out/c").exists());
}

// Promises: sync-end-marker
#[test]
fn directory_that_the_archive_replaces_by_a_file_stays_without_an_end_marker() {
    let place = place_with_tree();
    fs::create_dir(place.path("out/c")).expect("made");
    place.put("out/c/below", "precious");
    place.put("cut.tar", cut_archive().file("c", "a file").unfinished());
    assert_keeps(&place, "cut.tar", &[], "cut.tar");
    assert!(place.path("out/c/below").exists());
}

// Promises: sync-end-marker
#[test]
fn index_file_says_whether_the_archive_has_an_end_marker() {
    let place = place_with_tree();
    place.put("cut.tar", cut_archive().unfinished());
    place.put("whole.tar", cut_archive().end());
    for name in ["cut.tar", "whole.tar"] {
        let index = format!("{name}.tarfs");
        let indexed = place.run(&["index", "-q", "--output", &index, name]);
        assert_eq!(indexed.code, 0, "{}", indexed.complaints);
        let flags = ["--index", &*index];
        match name {
            "cut.tar" => assert_keeps(&place, name, &flags, name),
            _ => assert_deletes(&place, name, &flags),
        }
    }
}

// Promises: sync-end-marker
#[test]
fn expected_digest_proves_that_no_member_is_lost() {
    let place = place_with_tree();
    let archive = cut_archive().unfinished();
    let digest = sha256(&archive);
    place.put("cut.tar", archive);
    assert_keeps(&place, "cut.tar", &[], "cut.tar");
    // The saved index was made without the digest, and then with it.
    for _ in 0..2 {
        place.put("out/extra", "precious");
        assert_deletes(&place, "cut.tar", &["--expect-sha256", &digest]);
    }
    place.put("out/extra", "precious");
    assert_keeps(&place, "cut.tar", &[], "cut.tar");
}

/// Layers of images have digests, and some programs write them without an end marker.
// Promises: sync-end-marker
#[test]
fn layers_without_an_end_marker_delete_only_with_a_digest() {
    let place = place_with_tree();
    let upper = || Archive::new().file("e", "e");
    let layers = vec![cut_archive().unfinished(), upper().unfinished(), Vec::new()];
    let image = Image::new("i:1", layers);
    oci(std::slice::from_ref(&image)).write(&place.path("layout"));
    place.put("docker.tar", docker(&image).end());
    for source in ["oci:layout", "docker-archive:docker.tar"] {
        place.put("out/extra", "precious");
        assert_deletes(&place, source, &[]);
    }
    let empty = Image::new("i:2", Vec::new());
    oci(&[empty]).write(&place.path("empty"));
    place.put("out/extra", "precious");
    assert_deletes(&place, "oci:empty", &[]);
    place.put("out/a", "old content");
    place.put("out/extra", "precious");
    place.put("lower.tar", cut_archive().end());
    place.put("cut.tar", upper().unfinished());
    place.put("upper.tar", upper().end());
    assert_keeps(&place, "lower.tar", &["--layer", "cut.tar"], "cut.tar");
    assert_deletes(&place, "lower.tar", &["--layer", "upper.tar"]);
}

// Promises: sync-end-marker
#[test]
fn directory_as_source_deletes() {
    let place = place_with_tree();
    fs::create_dir(place.path("source")).expect("made");
    place.put("source/a", "new");
    assert_deletes(&place, "source", &[]);
}
