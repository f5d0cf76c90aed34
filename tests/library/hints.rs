//! The hints in errors about SOURCE: each fits its case.

use std::fs;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::program::stderr_text;
use crate::support::raw::Archive;

/// The only line of the error when `words` run in `directory`.
#[track_caller]
fn error_line(directory: &TestDir, words: &[&str]) -> String {
    let text = directory.error_of(words);
    assert_eq!(text.lines().count(), 1, "{words:?}: {text}");
    text
}

/// The error line of each verb that reads `source`.
#[track_caller]
fn error_lines(directory: &TestDir, source: &str) -> [String; 3] {
    [
        &["ls", source][..],
        &["mount", source, "mnt"],
        &["materialize", "-q", source, "-C", "out"],
    ]
    .map(|words| error_line(directory, words))
}

// Promises: error-hints
#[test]
fn unknown_scheme_error_lists_supported_schemes() {
    let place = TestDir::new(&["mnt", "out"]);
    for text in error_lines(&place, "ftp://host/a.tar") {
        assert!(text.contains("is not a known scheme"), "{text}");
        for word in [
            "ftp://", "http://", "s3://", "gs://", "az://", "oci://", "file://",
        ] {
            assert!(text.contains(word), "'{word}' in: {text}");
        }
    }
}

// Promises: error-hints
#[test]
fn url_without_scheme_gets_hint_with_scheme() {
    let place = TestDir::new(&["mnt", "out"]);
    fs::create_dir(place.path("release.d")).expect("fresh");
    for (source, url) in [
        ("example.com/a.tar", "https://example.com/a.tar"),
        (
            "example.com:8443/d/a.tar",
            "https://example.com:8443/d/a.tar",
        ),
        ("localhost:8000/a.tar", "http://localhost:8000/a.tar"),
        ("127.0.0.1:8000/a.tar", "http://127.0.0.1:8000/a.tar"),
    ] {
        for text in error_lines(&place, source) {
            let question = format!("(did you mean {url}?)");
            assert!(text.contains(&question), "{text}");
            assert!(text.contains("not found"), "{text}");
        }
    }
    let signed = error_line(&place, &["ls", "example.com/a.tar?sig=s3cret"]);
    assert!(
        signed.contains("did you mean https://example.com/a.tar"),
        "{signed}"
    );
    assert!(!signed.contains("s3cret"), "{signed}");
    for source in [
        "./a.tar",
        "/x.y/a.tar",
        "a.tar",
        "../example.com/a.tar",
        "dir/a.tar",
        "release.d/a.tar",
        "a.b:c",
    ] {
        let text = error_line(&place, &["ls", source]);
        assert!(text.contains("not found"), "{text}");
        assert!(!text.contains("did you mean"), "{text}");
    }
}

/// Magic bytes of encrypted files from several programs, and the command that decrypts each.
const ENCRYPTED: [(&[u8], &str); 10] = [
    // gpg -c, gpg -c --rfc2440, and gpg -e for keys of Curve25519, hidden or not, and of RSA.
    (b"\x8c\x0d\x04\x09\x03\x02\xbe\x28\x34\x5a", "gpg --decrypt"),
    (b"\x8c\x0d\x04\x02\x03\x02\x15\x7c\xd0\x38", "gpg --decrypt"),
    (
        b"\x84\x5e\x03\x91\x11\x7f\xa1\x21\x0b\x10\x6e\x12\x01\x07",
        "gpg --decrypt",
    ),
    (b"\x84\x5e\x03\0\0\0\0\0\0\0\0\x12\x01\x07", "gpg --decrypt"),
    (
        b"\x85\x01\x0c\x03\xed\xab\xc0\xff\x66\x34\xc2\x5a\x01\x07",
        "gpg --decrypt",
    ),
    (b"-----BEGIN PGP MESSAGE-----\n\njA0ECQMC", "gpg --decrypt"),
    (
        b"Salted__\x01\x02\x03\x04\x05\x06\x07\x08",
        "openssl enc -d",
    ),
    (b"U2FsdGVkX18BAgMEBQYHCA==\n", "openssl enc -d"),
    (b"age-encryption.org/v1\n-> X25519 ", "age --decrypt"),
    (
        b"-----BEGIN AGE ENCRYPTED FILE-----\nYWdlLWVuY3J5",
        "age --decrypt",
    ),
];

// Promises: format-error
#[test]
fn encrypted_file_error_names_decryption_command() {
    let place = TestDir::new(&["mnt", "out"]);
    for (first, command) in ENCRYPTED {
        place.put("a.tar.x", [first, &[7; 2000]].concat());
        for text in error_lines(&place, "a.tar.x") {
            assert!(text.contains("a.tar.x: it is encrypted"), "{text}");
            assert!(text.contains(command), "'{command}' in: {text}");
        }
    }
    // The name of a member may start with these bytes.
    let archive = Archive::new().file("Salted__", "x").end();
    place.put("a.tar", archive);
    place.succeeds(&["ls", "a.tar"]);
}

// Promises: error-hints
#[test]
fn hints_for_local_files_name_no_servers() {
    let place = TestDir::new(&["mnt", "out"]);
    let whole = Archive::new().file("f", "content").end();
    for (name, bytes) in [
        ("text", &b"hello\n"[..]),
        ("page", b"<!DOCTYPE html><html></html>"),
        ("empty", b""),
        ("cut.tar", whole.get(..600).expect("longer")),
        ("cut.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x01"),
    ] {
        place.put(name, bytes);
    }
    let mut texts = Vec::new();
    for source in ["text", "page", "empty", "cut.gz", "missing"] {
        texts.extend(error_lines(&place, source));
    }
    let directory = ["materialize", "-q", "out", "-C", "out"];
    texts.push(error_line(&place, &directory));
    // A mount shows the readable part.
    let cut = ["materialize", "-q", "cut.tar", "-C", "out"];
    for words in [&["ls", "cut.tar"][..], &cut] {
        texts.push(error_line(&place, words));
    }
    for text in texts {
        let (_, hint) = text.rsplit_once(" (").expect("a hint");
        for word in ["server", "URL", "http", "page", "fetch", "download"] {
            assert!(!hint.contains(word), "'{word}' in: {text}");
        }
    }

    let server = Server::start();
    server.serve("/page", Resource::new(b"<!DOCTYPE html>".to_vec()));
    let text = error_line(&place, &["ls", &server.url("/page")]);
    assert!(text.contains("error page"), "{text}");
}

/// A file of this machine may be missing beside directories, as of the namesakes.
// Promises: error-hints
#[test]
fn missing_source_beside_directory_is_an_archive_if_it_may_be() {
    let place = TestDir::new(&["usr"]);
    place.put("usr/here", "");
    for verb in ["ls", "find", "du"] {
        for (source, url) in [
            ("localhost:8000/a.tar", "http://localhost:8000/a.tar"),
            ("example.com:80/a.tar", "https://example.com:80/a.tar"),
        ] {
            let done = place.tarfs(&[verb, source, "usr"]);
            let text = stderr_text(&done);
            assert_eq!(done.status.code(), Some(2), "{verb}: {text}");
            assert!(text.contains(&format!("(did you mean {url}?)")), "{text}");
            assert!(done.stdout.is_empty(), "{verb}");
        }
        let words = [verb, "--compression", "gzip", "typo.tar", "usr"];
        let text = place.error_of(&words);
        assert!(text.contains("typo.tar: not found"), "{verb}: {text}");
        let listed = place.tarfs(&[verb, "missing", "usr"]);
        assert!(!listed.stdout.is_empty(), "{verb}");
        let text = place.failure_of(64, &[verb, "--compression", "gzip", "usr"]);
        assert!(text.contains("is a directory"), "{verb}: {text}");
    }
}

// Promises: walk-missing
#[test]
fn missing_local_operand_does_not_end_the_listing() {
    let place = TestDir::new(&["usr"]);
    place.put("usr/here", "");
    for (verb, code) in [("ls", 2), ("find", 1), ("du", 1)] {
        for missing in [
            "/nowhere/no:such",
            "12:30.log",
            "12:30",
            "a:1/b",
            "h:99999/x",
            "a.b/c",
            "./a:1/b",
            "x:y",
        ] {
            let done = place.tarfs(&[verb, missing, "usr"]);
            let text = stderr_text(&done);
            assert_eq!(done.status.code(), Some(code), "{verb} {missing}: {text}");
            let reason = format!("tarfs: {missing}: No such file or directory\n");
            assert_eq!(text, reason, "{verb}");
            let listed = String::from_utf8_lossy(&done.stdout);
            assert!(listed.contains("usr"), "{verb} {missing}: {listed}");
        }
        for source in [
            "oci:missing:tag",
            "gcs:/b/k",
            "s3:b/k",
            "docker:x",
            "tar:a.tar",
        ] {
            let done = place.tarfs(&[verb, source, "usr"]);
            assert!(done.stdout.is_empty(), "{verb} {source}");
        }
    }
}

// Promises: error-line
#[test]
fn control_characters_of_arguments_are_escaped() {
    let place = TestDir::new(&["d"]);
    let fake = "gzp\ntarfs: /etc/shadow: fake line";
    for words in [
        &["ls", "--compression", fake, "t.tar"][..],
        &["ls", &format!("--{fake}"), "t.tar"],
        &["ls", "--retries", fake, "t.tar"],
        &[fake],
    ] {
        let text = place.failure_of(64, words);
        assert!(text.contains("gzp\\ntarfs: /etc/shadow"), "{text}");
        let forged = text.lines().any(|line| line.starts_with("tarfs: /etc"));
        assert!(!forged, "{text}");
    }
    let text = place.failure_of(64, &["ver\u{1b}b"]);
    assert!(text.contains("'ver\\u{1b}b'"), "{text}");
    let text = error_line(&place, &["ls", "d/a\nb"]);
    assert!(text.contains("d/a\\nb"), "{text}");
}

// Promises: error-line
#[test]
fn line_breaks_of_usage_errors_are_kept() {
    let place = TestDir::new(&[]);
    for value in ["A\u{1}: b", "A\n: b", "A\u{1b}[31m\n\n: b"] {
        let text = place.failure_of(64, &["ls", "t.tar", "--header", value]);
        let plain = place.failure_of(64, &["ls", "t.tar", "--header", "A B: b"]);
        assert_eq!(text.lines().count(), plain.lines().count(), "{text}");
        assert!(!text.contains(['\u{1}', '\u{1b}']), "{text}");
        assert!(text.contains("\n\nFor more information"), "{text}");
    }
}

// Promises: exit-status, error-line
#[test]
fn entries_that_cannot_be_printed_end_with_2() {
    let place = TestDir::new(&["d", "out", "new"]);
    place.put("t.tar", Archive::new().file("f", "").file("g", "").end());
    place.put("d/f", "");
    for words in [
        &["materialize", "-q", "-v", "t.tar", "-C", "new"][..],
        &["materialize", "-q", "--dry-run", "t.tar", "-C", "out"],
        &["copy", "-q", "-v", "d", "new-copy"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full");
        let mut command = place.command(words);
        let done = command.stdout(full.expect("there")).output();
        let done = done.expect("started");
        let text = stderr_text(&done);
        assert_eq!(done.status.code(), Some(2), "{words:?}: {text}");
        let reason = "tarfs: cannot write the output: ";
        assert_eq!(text.matches(reason).count(), 1, "{words:?}: {text}");
    }
    assert!(place.path("new/g").exists());
}

// Promises: select-dry-run, truncated-error
#[test]
fn dry_run_of_cut_archive_keeps_no_bytes() {
    let place = TestDir::new(&["out"]);
    let whole = Archive::new().file("f", vec![7_u8; 2000]).end();
    place.put("cut.tar", whole.get(..1000).expect("longer"));
    for flags in [&["-q"][..], &["-q", "--allow-truncated"]] {
        let words = ["materialize", "--dry-run", "cut.tar", "-C", "out"];
        let text = place.error_of(&[&words, flags].concat());
        assert!(!text.contains("kept"), "{text}");
    }
}
