//! Mounts of cached archives whose server cannot be reached.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Response, Server};
use crate::support::packing::Packing;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::wait;

const ARCHIVE: &str = "/archive";

/// Number of files in the archive, each of several spans.
const FILES: usize = 6;

const FILE_BYTES: usize = 9_000_000;

/// A server that can be unavailable.
struct UnstableServer {
    server: Server,
    is_down: Arc<AtomicBool>,
}

type Place = TestMount<UnstableServer>;

fn content(number: usize) -> Vec<u8> {
    Rng::new(number as u64 + 1).bytes(FILE_BYTES)
}

impl Place {
    fn new() -> Self {
        let files = (0..FILES).fold(Archive::new(), |archive, number| {
            archive.file(&format!("f{number}"), content(number))
        });
        let resource = Resource::new(Packing::Gzip.pack(&files.end().into())).etag("\"1\"");
        let (server, is_down) = (Server::start(), Arc::new(AtomicBool::new(false)));
        let flag = Arc::clone(&is_down);
        server.route(ARCHIVE, move |request| {
            if flag.load(Ordering::SeqCst) {
                return Response::new(503);
            }
            resource.answer(request)
        });
        TestMount::with(&[], UnstableServer { server, is_down })
    }

    fn mount(&self, flags: &[&str]) {
        let url = self.server.url(ARCHIVE);
        self.succeeds(
            &[
                &["mount", "--wait-index", "--log-file", "log"],
                flags,
                &[&url, "mnt"],
            ]
            .concat(),
        );
    }

    fn read(&self, number: usize) -> io::Result<Vec<u8>> {
        fs::read(self.mounted(format!("f{number}")))
    }

    #[track_caller]
    fn assert_readable(&self, number: usize) {
        let read = self.read(number).expect("readable");
        assert!(read == content(number), "{number}");
    }

    /// Whether the status says that only cached data can be read.
    fn is_known_to_be_offline(&self) -> bool {
        let notes = self.status().get("notes").map(ToString::to_string);
        notes.expect("notes").contains("only cached data")
    }
}

// Promises: offline-start, offline-reads
#[test]
fn cached_archive_is_mounted_without_its_server() {
    let place = Place::new();
    place.mount(&["--prefetch", "all"]);
    wait::wait_until("all is cached", || {
        let status = place.status();
        status
            .pointer("/prefetch/state")
            .is_some_and(|state| state == "complete")
    });
    assert!(!place.is_known_to_be_offline());
    place.umount();
    let requests = place.server.requests(ARCHIVE).len();

    place.mount(&["--offline"]);
    assert!(place.is_known_to_be_offline());
    (0..FILES).for_each(|number| place.assert_readable(number));
    place.umount();
    assert_eq!(place.server.requests(ARCHIVE).len(), requests);

    place.is_down.store(true, Ordering::SeqCst);
    place.mount(&["--retries", "0"]);
    assert!(place.is_known_to_be_offline());
    (0..FILES).for_each(|number| place.assert_readable(number));
    place.umount();
}

// Promises: offline-reads
#[test]
fn uncached_data_is_read_once_the_server_is_back() {
    let place = Place::new();
    let url = place.server.url(ARCHIVE);
    place.succeeds(&["ls", &url]);
    let flags = ["--prefetch", "none", "--timeout", "3"];
    place.mount(&flags);
    place.assert_readable(1);
    place.umount();

    place.is_down.store(true, Ordering::SeqCst);
    place.mount(&flags);
    place.assert_readable(1);
    let error = place.read(4).expect_err("not cached");
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::TIMEDOUT.raw_os_error())
    );
    assert!(place.is_known_to_be_offline());

    place.is_down.store(false, Ordering::SeqCst);
    place.assert_readable(4);
    assert!(!place.is_known_to_be_offline());
    place.umount();

    // A user who forbids requests waits for nothing.
    place.mount(&["--prefetch", "none", "--offline"]);
    place.assert_readable(1);
    let requests = place.server.requests(ARCHIVE).len();
    let error = place.read(5).expect_err("not cached");
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::IO.raw_os_error())
    );
    assert_eq!(place.server.requests(ARCHIVE).len(), requests);
}
