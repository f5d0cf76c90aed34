//! Stacked layers of servers: when they are scanned, and which of them get headers.
//!
//! `tests/mount` has the tests of the tree that layers make.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bytes::Bytes;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
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

#[test]
fn layers_are_scanned_in_parallel_if_memory_allows() {
    // Shorter than the program's timeout for a silent server.
    assert!(are_scanned_in_parallel("128MiB", WAIT_TIMEOUT / 3));
    assert!(!are_scanned_in_parallel(
        "127MiB",
        Duration::from_millis(300)
    ));
}

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
