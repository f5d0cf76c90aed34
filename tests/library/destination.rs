//! Destination of `materialize`: errors for unusable ones, and the report of an interrupted run.
//!
//! `tests/mount` has the tests with other users and mounts.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::destination::{Place, error_lines, make};
use crate::support::http::{Resource, Server};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, random_bytes};
use crate::support::wait;

// Promises: write-no-destination
#[test]
fn empty_directory_as_path_is_rejected_before_fetching() {
    let place = Place::with_archive();
    make(&place.path("out"), 0o755);
    // No server listens on this port.
    let url = "http://127.0.0.1:1/a.tar";
    let lines = error_lines(&place.tarfs(&["materialize", url, "out"]));
    let [line] = lines.as_slice() else {
        panic!("{lines:?}")
    };
    assert!(line.contains("out: is an empty directory here"), "{line}");
    assert!(line.contains("-C out") && line.contains("-C ."), "{line}");
    // With -C, the word is a member.
    let lines = error_lines(&place.tarfs(&["materialize", "a.tar", "out", "-C", "."]));
    assert!(
        lines.concat().contains("out: not in the archive"),
        "{lines:?}"
    );
    fs::create_dir(place.path("d")).expect("fresh");
    fs::write(place.path("d/own"), "").expect("space");
    let output = place.tarfs(&["materialize", "-q", "a.tar", "d"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(place.path("d/f3").exists());
}

// Promises: write-no-destination
#[test]
fn path_like_destination_is_rejected_before_fetching() {
    let place = Place::with_archive();
    let server = Server::start();
    let archive = Archive::new().file("d/f", random_bytes(20 << 20)).end();
    server.serve("/a", Resource::new(archive).etag("\"1\""));
    let url = server.url("/a");
    for path in ["../d", "/srv/d", "~/d", ".."] {
        let before = server.sent_bytes("/a");
        let output = place.tarfs(&["materialize", "-q", &url, path]);
        assert_eq!(output.status.code(), Some(2), "{path}");
        let lines = error_lines(&output);
        let [line] = lines.as_slice() else {
            panic!("{lines:?}")
        };
        assert!(line.starts_with(&format!("tarfs: {path}: ")), "{line}");
        let hint = format!("-C {path}");
        assert!(line.contains(&hint) && line.contains("-C ."), "{line}");
        assert!(
            server.sent_bytes("/a") - before < 1 << 20,
            "fetched: {path}"
        );
    }
    // With -C, for a local file, or with -O, the word is a member.
    for words in [
        &["materialize", "-q", &url, "/d", "-C", "."][..],
        &["materialize", "-q", &url, "/d", "-O"],
        &["materialize", "-q", &url, "./d"],
        &["materialize", "-q", &url, "d/"],
        &["materialize", "-q", "a.tar", "/d"],
    ] {
        let output = place.tarfs(words);
        assert!(
            output.status.success(),
            "{words:?}: {}",
            stderr_text(&output)
        );
    }
    // A word that a saved index contains is a member, too.
    let output = place.tarfs(&["index", "-q", &url]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let output = place.tarfs(&["materialize", "-q", &url, "/d"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
}

// Promises: write-no-destination
#[test]
fn path_missing_in_saved_index_is_rejected_before_fetching() {
    let place = Place::with_archive();
    let server = Server::start();
    let archive = Archive::new().file("d/f", random_bytes(20 << 20)).end();
    server.serve("/a", Resource::new(archive).etag("\"1\""));
    let url = server.url("/a");
    let output = place.tarfs(&["index", "-q", &url]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let before = server.sent_bytes("/a");
    let lines = error_lines(&place.tarfs(&["materialize", "-q", &url, "missing", "other/x"]));
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(
        lines.iter().all(|line| line.contains("not in the archive")),
        "{lines:?}"
    );
    assert!(
        lines
            .iter()
            .all(|line| line.contains("-C names a directory")),
        "{lines:?}"
    );
    assert!(server.sent_bytes("/a") - before < 1 << 20, "fetched");
    let output = place.tarfs(&["materialize", "-q", &url, "missing", "d"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    assert!(place.path("d/f").exists(), "the other one is there");
}

// Promises: write-messages
#[test]
fn interrupted_run_reports_progress_and_how_to_resume() {
    let place = Place::with_archive();
    make(&place.path("out"), 0o755);
    let mut child = Command::new("env")
        .args(["--default-signal", env!("CARGO_BIN_EXE_tarfs")])
        .args(["materialize", "-q", "-", "-C", "out"])
        .current_dir(place.root())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let archive = Archive::new()
        .directory("d")
        .file("d/a", random_bytes(3000));
    let archive = archive.file("z", random_bytes(4 << 20)).unfinished();
    let front = archive.get(..3 << 20).expect("longer");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(front).expect("read");
    wait::wait_until("something is written", || place.path("out/d/a").exists());
    kill_process(Pid::from_child(&child), Signal::INT).expect("running");
    let output = child.wait_with_output().expect("an end");
    drop(input);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("out: interrupted, ") && text.contains(" entries and "),
        "{text}"
    );
    assert!(text.contains("--resume"), "{text}");
}
