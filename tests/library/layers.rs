//! Stacked layers: scans, memory, limits, flags, and headers of requests.
//!
//! `tests/mount` has the tests of the tree that layers make.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bytes::Bytes;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::layers::Step::{File, Hard};
use crate::support::layers::{Place, bottom};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, random_bytes};
use crate::support::wait::WAIT_TIMEOUT;

/// Whether two layers are scanned concurrently with this much memory.
///
/// The server holds a scan's requests back until both scans have sent one, or until `timeout`.
fn are_scanned_in_parallel(memory: &str, timeout: Duration) -> bool {
    let server = Server::start();
    let asked = Arc::new((Mutex::new(BTreeSet::new()), Condvar::new()));
    let met = Arc::new(AtomicBool::new(false));
    for path in ["/below", "/above"] {
        let layer = Archive::new().file(path, random_bytes(3_000_000)).end();
        let resource = Resource::new(layer).etag("\"1\"");
        let (asked, met) = (Arc::clone(&asked), Arc::clone(&met));
        server.route(path, move |request| {
            // The first request only opens each layer, one after the other.
            if request.number > 1 {
                let (paths, came) = &*asked;
                let mut paths = paths.lock().expect("no panic");
                paths.insert(path);
                came.notify_all();
                let waited = came.wait_timeout_while(paths, timeout, |paths| paths.len() < 2);
                let (mut paths, waited) = waited.expect("no panic");
                if waited.timed_out() {
                    paths.remove(path);
                } else {
                    met.store(true, Ordering::SeqCst);
                }
            }
            resource.answer(request)
        });
    }
    let (below, above) = (server.url("/below"), server.url("/above"));
    let words = ["ls", "--memory", memory, "--layer", &above, &below];
    let output = TestDir::new(&[]).tarfs(&words);
    let listed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(listed, "above\nbelow\n", "{}", stderr_text(&output));
    met.load(Ordering::SeqCst)
}

// Promises: layer-scan, layer-memory
#[test]
fn layers_are_scanned_in_parallel_if_memory_allows() {
    // Shorter than the program's timeout for a silent server.
    assert!(are_scanned_in_parallel("128MiB", WAIT_TIMEOUT / 3));
    assert!(!are_scanned_in_parallel(
        "127MiB",
        Duration::from_millis(300)
    ));
}

// Promises: layer-flags
#[test]
fn headers_are_sent_to_layers_of_same_host_only() {
    let server = Server::start();
    let layer = Bytes::from(Archive::new().file("n", "above").end());
    for path in ["/bottom", "/near", "/far"] {
        server.serve(path, Resource::new(layer.clone()).etag("\"1\""));
    }
    let place = TestDir::new(&[]);
    let (bottom, near, far) = (
        server.url("/bottom"),
        server.url("/near"),
        server.other_url("/far"),
    );
    let words = ["ls", &bottom, "--layer", &near, "--layer", &far];
    let words = [&words[..], &["--header", "X-Key: secret"]].concat();
    let output = place.tarfs(&words);
    assert!(output.status.success(), "{}", stderr_text(&output));
    for (path, expected) in [
        ("/bottom", Some("secret")),
        ("/near", Some("secret")),
        ("/far", None),
    ] {
        let seen = server.requests(path);
        assert!(!seen.is_empty(), "{path}");
        for seen in seen {
            assert_eq!(seen.request.header("x-key"), expected, "{path}");
        }
    }
}

// Promises: whiteout-scope
#[test]
fn whiteout_stored_as_link_needs_no_target() {
    let above = vec![
        Hard(".wh.f", ".wh..wh.aufs"),
        Hard("d/.wh.x", "g"),
        Hard("d/sub/.wh..wh..opq", "nowhere"),
        Hard(".wh.kept/x", "nowhere"),
    ];
    let place = Place::of_steps(&[bottom(), above]);
    let output = place.run(&["ls", "-R"], &[]);
    let listed = "d\nd/sub\nd/y\ng\nl\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), listed);
    assert_eq!(stderr_text(&output), "");
    assert_eq!(output.status.code(), Some(0));
}

// Promises: layer-refused
#[test]
fn flags_in_conflict_with_layers_are_rejected() {
    let place = Place::of_steps(&[bottom(), vec![File("n", "above")]]);
    let digest = "0".repeat(64);
    for (verb, words) in [
        ("mount", &["--index", "i", "mnt"][..]),
        ("mount", &["--compression", "gzip", "mnt"]),
        ("ls", &["--index", "i"]),
        ("ls", &["--index-sha256", &digest[..]]),
        ("materialize", &["--resume", "-C", "out"]),
        ("materialize", &["--exclude", "x", "-C", "out"]),
        ("materialize", &["--strip-components", "1", "-C", "out"]),
        ("materialize", &["--keep-old-files", "-C", "out"]),
        ("materialize", &["--to-stdout"]),
        ("materialize", &["--dry-run"]),
        ("materialize", &["-C", "out", "d/x"]),
    ] {
        let output = place.run(&[verb], words);
        assert_eq!(
            output.status.code(),
            Some(64),
            "{words:?}: {}",
            stderr_text(&output)
        );
    }
    assert!(!place.is_mounted());
    fs::write(place.path("out/mine"), "mine").expect("written");
    let output = place.run(&["materialize", "-C", "out"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("is not empty"),
        "{}",
        stderr_text(&output)
    );
    assert_eq!(fs::read_dir(place.path("out")).expect("listed").count(), 1);
}

// Promises: layer-flags
#[test]
fn limits_apply_to_all_layers_together() {
    let place = Place::of_steps(&[bottom(), vec![File("n", "above"), File("o", "above")]]);
    for verb in [&["ls"][..], &["materialize", "-C", "out"]] {
        let output = place.run(verb, &["--max-entries", "8"]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
        assert!(
            stderr_text(&output).contains("--max-entries"),
            "{}",
            stderr_text(&output)
        );
    }
    let layers = [random_bytes(600_000), random_bytes(600_000)]
        .map(|content| Archive::new().file("a", content).end());
    let large = Place::with_layers(&layers);
    let output = large.run(
        &["materialize", "-C", "out", "--max-unpacked-size", "1MB"],
        &[],
    );
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    assert!(
        stderr_text(&output).contains("--max-unpacked-size"),
        "{}",
        stderr_text(&output)
    );
    let output = large.run(
        &[
            "materialize",
            "-C",
            "out2",
            "--atomic",
            "--max-unpacked-size",
            "1MB",
        ],
        &[],
    );
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    assert!(!large.path("out2").exists());
    let output = large.run(
        &[
            "materialize",
            "-C",
            "out2",
            "--atomic",
            "--max-unpacked-size",
            "2MB",
        ],
        &[],
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr_text(&output));
    assert!(fs::read(large.path("out2/a")).expect("there") == random_bytes(600_000));
}

// Promises: layer-memory
#[test]
fn layer_with_large_decoder_may_use_all_memory() {
    let layers: Vec<_> = ["below", "above"]
        .iter()
        .map(|content| {
            let directory = TestDir::new(&[]);
            directory.put("a.tar", Archive::new().file(content, content).end());
            // A dictionary of 64 MiB, so 128 MiB of memory hold only one of two decoders.
            let packed = Command::new("xz")
                .args(["-9", "-c"])
                .arg(directory.path("a.tar"))
                .output();
            packed.expect("xz").stdout
        })
        .collect();
    let place = Place::with_layers(&layers);
    assert_eq!(place.listed(&["--memory", "128MiB"]), ["above", "below"]);
    let output = place.run(&["ls", "--memory", "64MiB"], &["--cache-dir", "other"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    assert!(
        stderr_text(&output).contains("--memory"),
        "{}",
        stderr_text(&output)
    );
}
