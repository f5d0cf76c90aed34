//! `tarfs verify`, and runs with an expected digest.

use serde_json::Value;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::sha256::sha256;
use crate::support::tree::Tree;

/// A field of a report.
#[track_caller]
fn field<'a>(report: &'a Value, name: &str) -> &'a Value {
    report.pointer(name).expect("a field")
}

/// Output of `verify --json`, and whether it succeeded.
fn verify(place: &TestDir, words: &[&str]) -> (Value, bool) {
    let output = place.tarfs(&[&["verify", "--json", "-q"], words].concat());
    let report = serde_json::from_slice(&output.stdout);
    let report: Value = report.unwrap_or_else(|_| panic!("{}", stderr_text(&output)));
    let is_good = field(&report, "/is_good").as_bool().expect("a verdict");
    assert_eq!(output.status.code(), Some(if is_good { 0 } else { 2 }));
    let problems = field(&report, "/problems").as_array().expect("problems");
    assert_eq!(problems.is_empty(), is_good, "{report}");
    (report, is_good)
}

fn packings() -> impl Iterator<Item = (Packing, Vec<u8>)> {
    let all = Packing::ALL.into_iter();
    all.map(|packing| (packing, packing.pack(&Tree::mixed().tar).to_vec()))
}

// Promises: verify-checks
#[test]
fn verify_reads_archive_to_its_end_and_reports_success() {
    let place = TestDir::new(&["out"]);
    for (packing, packed) in packings() {
        let name = "a";
        place.put(name, &packed);
        let (report, is_good) = verify(&place, &[name, "--expect-sha256", &sha256(&packed)]);
        assert!(is_good, "{packing:?}: {report}");
        assert_eq!(*field(&report, "/sha256"), sha256(&packed).as_str());
        assert_eq!(*field(&report, "/packed_bytes"), packed.len());
        assert_eq!(*field(&report, "/plain_bytes"), Tree::mixed().tar.len());
    }
    let name = "small.tar";
    place.put(name, Archive::new().file("f", "f").end());
    let output = place.tarfs(&["verify", "-q", name]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.starts_with("small.tar: good\n"), "{text}");
    assert!(text.contains("\nmembers       1\n"), "{text}");
    assert!(!place.path("cache/index").exists(), "nothing is kept");
}

// Promises: verify-checks
#[test]
fn verify_reports_damage_with_digest_of_whole_file() {
    let place = TestDir::new(&["out"]);
    for (packing, mut packed) in packings() {
        let has_checksums = !matches!(packing, Packing::Plain | Packing::Lz4Legacy);
        let middle = packed.len() / 2;
        packed[middle] ^= 0x10;
        let name = "a";
        place.put(name, &packed);
        let (report, is_good) = verify(&place, &[name]);
        assert_eq!(is_good, !has_checksums, "{packing:?}: {report}");
        assert_eq!(
            *field(&report, "/sha256"),
            sha256(&packed).as_str(),
            "{packing:?}"
        );
        assert_eq!(
            *field(&report, "/packed_bytes"),
            packed.len(),
            "{packing:?}"
        );
    }
    // An invalid header in the middle of an intact archive.
    let mut lost = Archive::new().file("a", "a").file("b", "b").end();
    lost[1024 + 150] ^= 1;
    let name = "lost.tar";
    place.put(name, &lost);
    let (report, is_good) = verify(&place, &[name]);
    assert!(!is_good, "{report}");
    assert_eq!(*field(&report, "/sha256"), sha256(&lost).as_str());
    // A truncated member.
    let cut = Archive::new()
        .file("a", Rng::new(1).bytes(5000))
        .unfinished();
    let name = "cut.tar";
    place.put(name, &cut[..4000]);
    let (report, is_good) = verify(&place, &[name]);
    assert!(!is_good, "{report}");
    assert!(
        field(&report, "/problems/0")
            .as_str()
            .expect("text")
            .contains("'a'")
    );
    assert_eq!(*field(&report, "/sha256"), sha256(&cut[..4000]).as_str());
    let output = place.tarfs(&["verify", "-q", name]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("cut.tar: in member 'a'"),
        "{}",
        stderr_text(&output)
    );
}

// Promises: verify-checks
#[test]
fn verify_of_a_tree_beyond_the_index_memory_warns_and_reads_all() {
    let place = TestDir::new(&[]);
    let names = (0..30_000).map(|number| format!("{number:064}"));
    let archive = names.fold(Archive::new(), |archive, name| archive.file(&name, ""));
    let packed = archive.end();
    place.put("a.tar", &packed);
    let (report, is_good) = verify(&place, &["a.tar", "--index-memory=1MiB"]);
    assert!(is_good, "{report}");
    assert_eq!(*field(&report, "/sha256"), sha256(&packed).as_str());
    assert_eq!(*field(&report, "/members"), 30_000);
    let warnings = field(&report, "/warnings").to_string();
    assert!(warnings.contains("--index-memory"), "{report}");
}

// Promises: verify-checks, damaged-header
#[test]
fn verify_names_members_refused_before_the_index_memory_ends() {
    let place = TestDir::new(&[]);
    let mut archive = Archive::new().file("../x", "").file("a/../../y", "");
    let value = vec![b'v'; 1 << 17];
    for number in 0..101 {
        let attribute = [("SCHILY.xattr.user.a", &*value)];
        archive = archive.pax(&attribute).file(&format!("w{number}"), "");
    }
    let names = (0..30_000).map(|number| format!("{number:064}"));
    let archive = names.fold(archive, |archive, name| archive.file(&name, ""));
    place.put("a.tar", archive.end());
    let (report, is_good) = verify(&place, &["a.tar", "--index-memory=1MiB"]);
    assert!(!is_good, "{report}");
    let problems = field(&report, "/problems").as_array().expect("a list");
    let [first, second] = &problems[..] else {
        panic!("{report}");
    };
    let is_named = |problem: &Value, name: &str| problem.as_str().expect("text").contains(name);
    assert!(is_named(first, "../x"), "{report}");
    assert!(is_named(second, "a/../../y"), "{report}");
    // More warnings than are kept come before the one about the memory.
    let warnings = field(&report, "/warnings").as_array().expect("a list");
    let [first, .., last] = &warnings[..] else {
        panic!("{report}");
    };
    assert!(is_named(first, "--index-memory"), "{report}");
    assert_eq!(*last, "and 1 more", "{report}");
}

// Promises: verify-index
#[test]
fn verify_compares_index_with_archive() {
    let place = TestDir::new(&["out"]);
    for (packing, packed) in packings() {
        let name = "a";
        place.put(name, &packed);
        let indexed = place.tarfs(&["index", "-q", "--output", "a.idx", name]);
        assert!(indexed.status.success(), "{}", stderr_text(&indexed));
        let (report, is_good) = verify(&place, &["--index", "a.idx", name]);
        assert!(is_good, "{packing:?}: {report}");
    }
    // The same length, with other bytes in the second of three spans.
    let large = Rng::new(1).bytes(9 << 20);
    let good = Archive::new().file("f", &large).end();
    let name = "b.tar";
    place.put(name, &good);
    let indexed = place.tarfs(&["index", "-q", "--output", "b.idx", name]);
    assert!(indexed.status.success(), "{}", stderr_text(&indexed));
    let mut other = good.clone();
    other[5 << 20] ^= 1;
    let name = "b.tar";
    place.put(name, &other);
    let (report, is_good) = verify(&place, &["--index", "b.idx", name]);
    assert!(!is_good);
    let problems = field(&report, "/problems").as_array().expect("problems");
    let hashes = problems.iter().filter(|problem| {
        let text = problem.as_str().expect("text");
        text.contains("another hash")
    });
    assert_eq!(hashes.count(), 1, "{report}");
    let (report, is_good) = verify(&place, &["--index", "a.idx", name]);
    assert!(!is_good, "{report}");
    let output = place.tarfs(&["verify", "-q", "--index", "b.tar", name]);
    assert_eq!(output.status.code(), Some(2));
}

// Promises: verify-index
#[test]
fn verify_takes_an_index_by_its_file_url_and_refuses_one_of_a_server() {
    let place = TestDir::new(&[]);
    place.put("a.tar", Archive::new().file("f", "1").end());
    let indexed = place.tarfs(&["index", "-q", "--output", "a.idx", "a.tar"]);
    assert!(indexed.status.success(), "{}", stderr_text(&indexed));
    let url = format!("file://{}", place.path("a.idx").display());
    let (report, is_good) = verify(&place, &["--index", &url, "a.tar"]);
    assert!(is_good, "{report}");
    let server = "http://name:secret@127.0.0.1:1/a.idx";
    let refused = place.tarfs(&["verify", "--index", server, "a.tar"]);
    let said = stderr_text(&refused);
    assert_eq!(refused.status.code(), Some(64), "{said}");
    assert!(said.contains("--index: ") && said.contains("/a.idx is no local file"));
    assert!(!said.contains("secret"), "{said}");
}

// Promises: expect-materialize
#[test]
fn materialize_accepts_only_expected_digest() {
    let place = TestDir::new(&["out"]);
    for (packing, packed) in packings() {
        let name = "a";
        place.put(name, &packed);
        let right = sha256(&packed);
        let output = place.tarfs(&[
            "extract",
            "-q",
            "-C",
            "out",
            name,
            "--expect-sha256",
            &right,
        ]);
        assert!(
            output.status.success(),
            "{packing:?}: {}",
            stderr_text(&output)
        );
        // The same when decoded along an index.
        let indexed = place.tarfs(&["index", "-q", name]);
        assert!(indexed.status.success(), "{}", stderr_text(&indexed));
        let output = place.tarfs(&[
            "extract",
            "-q",
            "-C",
            "out",
            name,
            "--expect-sha256",
            &right,
        ]);
        assert!(
            output.status.success(),
            "{packing:?}: {}",
            stderr_text(&output)
        );
    }
    let server = Server::start();
    let packed = Packing::Gzip.pack(&Tree::mixed().tar);
    let right = sha256(&packed);
    server.serve("/a", Resource::new(packed).etag("\"1\""));
    let url = server.url("/a");
    let wrong = "5a".repeat(32);
    for to in [&["-C", "out"][..], &["--atomic", "-C", "whole"]] {
        let words = ["extract", "-q", &url, "--expect-sha256", &wrong];
        let output = place.tarfs(&[&words, to].concat());
        assert_eq!(output.status.code(), Some(2));
        let text = stderr_text(&output);
        assert!(text.contains(&right) && text.contains(&wrong), "{text}");
        assert!(text.contains("must not be trusted"), "{text}");
    }
    assert!(!place.path("whole").exists());
    let listed = place.tarfs(&["ls", &url, "--expect-sha256", &wrong]);
    assert_eq!((listed.status.code(), listed.stdout), (Some(2), Vec::new()));
    let listed = place.tarfs(&["ls", &url, "--expect-sha256", &right]);
    assert!(listed.status.success(), "{}", stderr_text(&listed));
    let output = place.tarfs(&["ls", &url, "--expect-sha256", "abc"]);
    assert_eq!(output.status.code(), Some(64));
}
