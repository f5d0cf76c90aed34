//! Destination of `materialize`: read-only, full, or of another user.
//!
//! `tests/library` has the tests that need no root.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::support::destination::{Place, error_lines, make};
use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};
use crate::support::rng::Rng;

// Promises: write-full-disk
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
                .all(|line| line.contains("name a directory that you may write to"))
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

// Promises: write-full-disk
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

// Promises: write-full-disk
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
        assert!(
            line.contains(reason) && line.contains("that you may write to"),
            "{line}"
        );
    }
    // These flags write nothing to the destination.
    for flag in ["-O", "--dry-run"] {
        let output = place.run_as_nobody(&["materialize", "-q", "a.tar", "-C", "closed", flag]);
        assert!(output.status.success(), "{flag}: {}", stderr_text(&output));
    }
}

// Promises: resume-same
#[test]
fn full_disk_leaves_directories_writable_for_next_run() {
    let closed = || Archive::new().add(Header::new("d", b'5').mode(0o555), "");
    let last = || Rng::new(2).bytes(100_000);
    let cases = [
        (
            closed()
                .file("d/filler", Rng::new(1).bytes(3_900_000))
                .file("d/last", last()),
            "size=3900k",
            "no space left",
        ),
        // The link is made at the very end.
        (
            closed().hard_link("d/last", "f").file("f", last()),
            "size=8m,nr_inodes=3",
            "no inode left",
        ),
    ];
    for (archive, options, reason) in cases {
        let server = Server::start();
        server.serve("/archive", Resource::new(archive.end()).etag("\"1\""));
        let place = TestDir::new(&["out"]);
        let (out, url) = (place.path("out"), server.url("/archive"));
        let words = ["extract", "-q", "--no-same-permissions", "--resume"];
        let words = [&words[..], &["--chunk-size", "128KiB", "-C", "out", &url]].concat();
        let mount = |options: &str| {
            let mut command = Command::new("mount");
            command.args(["-t", "tmpfs", "-o", options, "none"]);
            let status = command.arg(&out).status().expect("mount is installed");
            assert!(status.success());
        };
        mount(options);
        let output = place.tarfs(&words);
        let mode = fs::metadata(out.join("d")).map(|stat| stat.mode() & 0o777);
        mount("remount,size=8m,nr_inodes=100");
        let again = place.tarfs(&words);
        let last_mode = fs::metadata(out.join("d")).map(|stat| stat.mode() & 0o777);
        let found = fs::read(out.join("d/last"));
        let status = Command::new("umount").arg(&out).status();
        assert!(status.expect("installed").success());
        let said = stderr_text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(reason), "{said}");
        assert!(
            said.contains("run the same command again to continue"),
            "{said}"
        );
        assert_eq!(mode.expect("made"), 0o700, "{reason}");
        assert_eq!(again.status.code(), Some(0), "{}", stderr_text(&again));
        assert_eq!(last_mode.expect("there"), 0o555, "{reason}");
        assert_eq!(found.expect("whole"), last(), "{reason}");
    }
}
