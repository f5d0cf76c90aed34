//! Output of `mount` on a terminal that is not printed to a pipe.

use std::time::Duration;

use crate::support::fixture::TestMount;
use crate::support::http::{Fault, Resource, Response, Server};
use crate::support::raw::Archive;
use crate::support::terminal::on_terminal;

// Promises: start-messages, scan-answers
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

// Promises: start-messages
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

// Promises: start-messages
#[test]
fn mount_with_saved_index_prints_nothing_on_terminal() {
    let directory = TestMount::new(&["out"]);
    let archive = Archive::new().file("a", "1").end();
    directory.put("a.tar", archive);
    directory.succeeds(&["index", "a.tar"]);
    let (output, shown) = on_terminal(directory.root(), "mount a.tar mnt");
    let unmounted = directory.tarfs(&["umount", "mnt"]);
    assert!(
        output.status.success() && unmounted.status.success(),
        "{shown}"
    );
    assert_eq!(shown, "");
}
