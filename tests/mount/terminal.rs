//! Output on a terminal that is not printed to a pipe.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::fixture::TestMount;
use crate::support::http::{Fault, Resource, Response, Server};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};

/// Runs the program in `directory` on a terminal of 80 columns. Returns what the terminal shows.
fn on_terminal(directory: &Path, words: &str) -> (Output, String) {
    let program = env!("CARGO_BIN_EXE_tarfs");
    let line = format!("stty cols 80 rows 24; exec {program} {words}");
    let output = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(directory)
        .env("TARFS_CACHE_DIR", directory.join("cache"))
        .env("XDG_RUNTIME_DIR", directory)
        // Without TERM, as for services, progress is not shown.
        .env("TERM", "xterm")
        .output()
        .expect("script (bsdutils) is installed");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, shown)
}

#[test]
fn names_written_to_a_terminal_are_escaped() {
    let name = "a\x1b]0;owned\x07b\n c";
    let archive = Archive::new().add(Header::new(name, b'0'), "").end();
    let directory = TestMount::new(&["out"]);
    directory.put("a.tar", archive);
    for flags in ["-v -C out", "--dry-run"] {
        let (output, shown) = on_terminal(directory.root(), &format!("materialize {flags} a.tar"));
        assert!(output.status.success(), "{shown}");
        assert!(
            !shown.contains('\x1b') || !shown.contains("]0;"),
            "{shown:?}"
        );
        assert!(shown.contains(r"a\033]0;owned\007b\n\ c"), "{shown:?}");
        let words: Vec<_> = ["materialize"]
            .into_iter()
            .chain(flags.split(' '))
            .chain(["a.tar"])
            .collect();
        let piped = directory.tarfs(&words);
        let line = format!("{name}\n");
        assert_eq!(piped.stdout, line.as_bytes(), "{}", stderr_text(&piped));
    }
}

#[test]
fn materialize_reports_entries_and_bytes_on_a_terminal() {
    let archive = Archive::new().file("d/f", [7; 5000]).end();
    let directory = TestMount::new(&["out"]);
    directory.put("a.tar", archive);
    for (number, flags) in ["", "--atomic", "--resume"].iter().enumerate() {
        if *flags != "--atomic" {
            fs::create_dir(directory.path(format!("out{number}"))).expect("fresh");
        }
        let words = format!("materialize {flags} a.tar -C out{number}");
        let (output, shown) = on_terminal(directory.root(), &words);
        assert!(output.status.success(), "{shown}");
        assert!(
            shown.contains("entries, 4.88 KiB in "),
            "{flags}: {shown:?}"
        );
    }
    fs::create_dir(directory.path("quiet")).expect("fresh");
    let (_, shown) = on_terminal(directory.root(), "materialize -q a.tar -C quiet");
    assert_eq!(shown, "");
    let piped = directory.tarfs(&["materialize", "a.tar", "-C", "quiet"]);
    assert!(
        piped.status.success() && piped.stderr.is_empty(),
        "{}",
        stderr_text(&piped)
    );
}

#[test]
fn mount_shows_progress_of_awaited_index() {
    let archive = Archive::new().file("f", vec![7; 300_000]).end();
    let directory = TestMount::new(&["out"]);
    let server = Server::start();
    let resource = Resource::new(archive).etag("\"1\"");
    server.serve_with_faults("/a.tar", resource, |_| {
        Some(Fault::Paced(16 << 10, Duration::from_millis(50)))
    });
    let url = server.url("/a.tar");
    let (output, shown) = on_terminal(directory.root(), &format!("mount --wait-index {url} mnt"));
    let unmounted = directory.tarfs(&["umount", "mnt"]);
    assert!(
        output.status.success() && unmounted.status.success(),
        "{shown}"
    );
    assert!(shown.contains("indexing "), "{shown:?}");
    assert!(!shown.contains("listings"), "{shown:?}");
}

#[test]
fn mount_explains_on_terminal_what_waits_for_index() {
    let archive = Archive::new()
        .file("a", "1")
        .file("f", vec![7; 9 << 20])
        .end();
    let directory = TestMount::new(&["out"]);
    let server = Server::start();
    let resource = Resource::new(archive).etag("\"1\"");
    server.route("/a.tar", move |request| match request.range() {
        Some((start, _)) if start > 4 << 20 => Response::silence(),
        _ => resource.answer(request),
    });
    let url = server.url("/a.tar");
    let (output, shown) = on_terminal(
        directory.root(),
        &format!("mount --chunk-size 1MiB {url} mnt"),
    );
    let unmounted = directory.tarfs(&["umount", "--lazy", "mnt"]);
    assert!(
        output.status.success() && unmounted.status.success(),
        "{shown}"
    );
    let line = "tarfs: mounted; files can be opened by name now, but directory listings (`ls`) wait \
                until the archive has been read";
    assert!(shown.contains(line), "{shown:?}");
    assert_eq!(shown.lines().count(), 1, "{shown:?}");
}

#[test]
fn mount_with_saved_index_prints_nothing_on_terminal() {
    let directory = TestMount::new(&["out"]);
    let archive = Archive::new().file("a", "1").end();
    directory.put("a.tar", archive);
    let (output, shown) = on_terminal(directory.root(), "mount a.tar mnt");
    let unmounted = directory.tarfs(&["umount", "mnt"]);
    assert!(
        output.status.success() && unmounted.status.success(),
        "{shown}"
    );
    assert_eq!(shown, "");
}
