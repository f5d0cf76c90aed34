//! Destination of `materialize`: errors for unusable ones, and the report of an interrupted run.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::program::{self, stderr_text};
use crate::support::raw::{Archive, random_bytes};
use crate::support::wait;

/// A directory that other users can access, with the archive `a.tar` of many files and a copy of the
/// program.
struct ManyFiles;

type Place = TestDir<ManyFiles>;

impl Place {
    fn with_archive() -> Self {
        let place = TestDir::with(&[], ManyFiles);
        let many = (0..50).fold(Archive::new().directory("d"), |archive, number| {
            let top = archive.file(&format!("f{number}"), "top");
            top.file(&format!("d/f{number}"), "below")
        });
        place.put("a.tar", many.end());
        fs::set_permissions(place.root(), Permissions::from_mode(0o755)).expect("ours");
        program::copy_to(&place.path("tarfs"));
        place
    }

    /// Like [`TestDir::tarfs`], as a user who owns nothing here.
    fn run_as_nobody(&self, words: &[&str]) -> Output {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(self.path("tarfs"))
            .args(words)
            .current_dir(self.root())
            .env("TARFS_CACHE_DIR", "/nonexistent")
            .output()
            .expect("setpriv is installed")
    }
}

fn error_lines(output: &Output) -> Vec<String> {
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(output));
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().map(str::to_owned).collect()
}

fn make(path: &Path, mode: u32) {
    fs::create_dir(path).expect("fresh");
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
}

#[test]
fn unwritable_destination_is_reported_in_one_line() {
    let place = Place::with_archive();
    make(&place.path("closed"), 0o755);
    fs::write(place.path("closed/own"), "").expect("space");
    make(&place.path("half"), 0o755);
    make(&place.path("half/d"), 0o777);
    for (directory, missing) in [("closed", 101), ("half", 51)] {
        let output = place.run_as_nobody(&["materialize", "-q", "a.tar", "-C", directory]);
        let lines = error_lines(&output);
        let expected = format!("tarfs: {directory}: cannot write to the destination directory: ");
        let about: Vec<_> = lines
            .iter()
            .filter(|line| line.starts_with(&expected))
            .collect();
        assert_eq!(about.len(), 1, "{lines:?}");
        assert!(
            about
                .iter()
                .all(|line| line.contains("name a directory with -C"))
        );
        // This user may not set the attributes of half/d, which is a separate error.
        assert!(lines.len() <= 3, "{lines:?}");
        let last = lines.last().expect("several");
        assert!(
            last.contains(&format!("{missing} entries are missing")),
            "{last}"
        );
    }
    let written = fs::read(place.path("half/d/f7")).expect("where it can be written");
    assert_eq!(written, b"below");
}

/// Runs `body` while an empty, read-only file system is mounted on `path`.
fn with_read_only_mount<T>(path: &Path, body: impl FnOnce() -> T) -> T {
    let mount = ["-t", "tmpfs", "-o", "ro", "none"];
    let output = Command::new("mount").args(mount).arg(path).output();
    assert!(output.expect("mount is installed").status.success());
    let result = body();
    let unmounted = Command::new("umount").arg(path).output();
    assert!(unmounted.expect("umount is installed").status.success());
    result
}

#[test]
fn read_only_destination_is_named() {
    let place = Place::with_archive();
    make(&place.path("mounted"), 0o755);
    let output = with_read_only_mount(&place.path("mounted"), || {
        place.tarfs(&["materialize", "-q", "a.tar", "-C", "mounted"])
    });
    let lines = error_lines(&output);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let line = lines.first().expect("one");
    assert!(line.starts_with("tarfs: mounted: "), "{line}");
    assert!(line.contains("Read-only file system"), "{line}");
}

#[test]
fn empty_unwritable_destination_is_rejected_before_fetching() {
    let place = Place::with_archive();
    make(&place.path("closed"), 0o755);
    make(&place.path("mounted"), 0o755);
    // No server listens on this port.
    let words = |directory| {
        [
            "materialize",
            "-q",
            "http://127.0.0.1:1/a.tar",
            "-C",
            directory,
        ]
    };
    let closed = error_lines(&place.run_as_nobody(&words("closed")));
    let mounted = with_read_only_mount(&place.path("mounted"), || {
        error_lines(&place.tarfs(&words("mounted")))
    });
    for (lines, name, reason) in [
        (closed, "closed", "Permission denied"),
        (mounted, "mounted", "Read-only file system"),
    ] {
        let [line] = lines.as_slice() else {
            panic!("{lines:?}")
        };
        assert!(line.starts_with(&format!("tarfs: {name}: ")), "{line}");
        assert!(line.contains(reason) && line.contains("-C"), "{line}");
    }
    // These flags write nothing to the destination.
    for flag in ["-O", "--dry-run"] {
        let output = place.run_as_nobody(&["materialize", "-q", "a.tar", "-C", "closed", flag]);
        assert!(output.status.success(), "{flag}: {}", stderr_text(&output));
    }
}

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
