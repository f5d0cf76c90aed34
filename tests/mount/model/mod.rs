//! Random archives against a simple model of tar semantics.
//!
//! An index, a tree on disk, a mount during its scan and a mount with a saved index must show the
//! model's tree. Run as root.

mod member;
mod observe;
mod tree;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tarfs::archive::{Archive, DiskCacheMode, OpenOptions, scan};
use tarfs::source;
use tokio::runtime::Runtime;

use crate::support::fixture::TestMount;
use crate::support::http::{Fault, Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};
use crate::support::wait::WAIT_TIMEOUT;
use member::{Member, joined, pick};
use observe::{ObservedTree, difference, in_archive, on_disk, sum};
use tree::{Lookup, Tree};

/// Default number of archives.
const DEFAULT_ROUNDS: u64 = 24;

/// Number of files that are read during the scan.
const EARLY_READS: usize = 6;

/// Number of pieces that the server sends during the scan, with pauses between them.
const PIECES: usize = 12;
const PAUSE: Duration = Duration::from_millis(4);

/// Option to restore all attributes, also those that are off by default.
const ALL_XATTRS: &str = "--xattrs-include=*";

/// Paths of the archive on the server: fast and slow.
const FAST: &str = "/fast";
const SLOW: &str = "/slow";

/// An archive behind a server, and directories for the mount, the copy and the cache.
struct ArchiveServer {
    server: Server,
    packed: Bytes,
}

type Place = TestMount<ArchiveServer>;

impl Place {
    fn serve(packed: Bytes) -> Self {
        let server = Server::start();
        let resource = Resource::new(packed.clone()).etag("\"1\"");
        server.serve(FAST, resource.clone());
        let piece = packed.len() / PIECES + 1;
        server.serve_with_faults(SLOW, resource, move |_| Some(Fault::Paced(piece, PAUSE)));
        TestMount::with(&["own"], ArchiveServer { server, packed })
    }

    fn mount(&self) {
        let url = self.server.url(SLOW);
        self.succeeds(&["mount", ALL_XATTRS, "-o", "suid,dev", &url, "mnt"]);
    }
}

/// An archive, its expected tree, and its fixture.
struct Round {
    members: Vec<Member>,
    tree: Tree,
    sight: ObservedTree,
    place: Place,
}

impl Round {
    fn new(rng: &mut Rng) -> Self {
        let (members, plain) = member::archive(rng);
        let tree = Tree::of(&members);
        let packing = pick(rng, &Packing::ALL);
        Self {
            members,
            sight: tree.observed(),
            tree,
            place: Place::serve(packing.pack(&plain.into())),
        }
    }

    fn same(&self, what: &str, found: &ObservedTree) {
        Self::assert_same(what, &self.sight, found);
    }

    #[track_caller]
    fn assert_same(what: &str, expected: &ObservedTree, found: &ObservedTree) {
        let difference = difference(expected, found);
        assert!(
            difference.is_empty(),
            "{what} is another tree:\n{difference}"
        );
    }

    fn check_index(&self, network: &Runtime) {
        let source = source::MemorySource::new("archive", self.place.packed.clone());
        let opened = Archive::open(
            Arc::new(source),
            &options(),
            network.handle(),
            &Arc::default(),
        );
        let archive = opened.expect("an archive");
        self.same("the index", &in_archive(&archive, self.tree.has_root()));
        assert_eq!(archive.index().problem_count(), self.tree.lost);
    }

    fn check_copy(&self) {
        let url = self.place.server.url(FAST);
        let words = [
            "materialize",
            "-q",
            "--numeric-owner",
            ALL_XATTRS,
            "-C",
            "own",
            &url,
        ];
        let output = self.place.tarfs(&words);
        let code = if self.tree.lost == 0 { 0 } else { 2 };
        assert_eq!(output.status.code(), Some(code), "{}", stderr_text(&output));
        let found = on_disk(&self.place.path("own"), self.tree.has_root());
        let (mut found, mut expected) = (found.expect("readable"), self.sight.clone());
        // Implied directories have the mode that mkdir(1) gives, and the time of writing.
        for path in self.tree.implied() {
            for sight in [&mut found, &mut expected] {
                if let Some((_, attributes, _)) = sight.get_mut(&path) {
                    (attributes.mode, attributes.mtime) = (0, (0, 0));
                }
            }
        }
        Self::assert_same("what was written", &expected, &found);
    }

    /// Checks a mount during its scan, and a second mount with the saved index.
    fn check_mounts(&self, rng: &mut Rng) {
        self.place.mount();
        self.read_early(rng);
        let start = Instant::now();
        let mount = self.place.path("mnt");
        loop {
            // The kernel caches names for a while that later members replace. The read itself may be late.
            let is_late = start.elapsed() > WAIT_TIMEOUT;
            let found = on_disk(&mount, self.tree.has_root());
            let is_same = found.as_ref().is_ok_and(|found| *found == self.sight);
            if is_same || is_late {
                self.same("the mount", &found.expect("readable"));
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(self.place.counter("scans"), 1);
        self.place.umount();
        self.place.mount();
        let found = on_disk(&mount, self.tree.has_root()).expect("readable");
        self.same("the mount with a saved index", &found);
        assert_eq!(self.place.counter("scans"), 0);
        self.place.umount();
    }

    /// Reads files during the scan. Each must equal some state of the file in the archive so far.
    fn read_early(&self, rng: &mut Rng) {
        let paths = self.tree.paths();
        for _ in 0..EARLY_READS {
            let path = pick(rng, &paths);
            let mut tree = Tree::default();
            let looks = self.members.iter().map(|member| {
                tree.apply(member);
                tree.look(&path)
            });
            let looks: Vec<Lookup> = looks.collect();
            if looks.contains(&Lookup::Other) {
                continue;
            }
            let place = self
                .place
                .path("mnt")
                .join(OsStr::from_bytes(&joined(&path)));
            let read = fs::read(&place).map(|bytes| Lookup::File(sum(&bytes)));
            let read = read.unwrap_or_else(|error| panic!("{}: {error}", place.display()));
            assert!(looks.contains(&read), "{} was never so", place.display());
        }
    }
}

fn options() -> OpenOptions {
    OpenOptions {
        scan: scan::Options {
            connections: 4,
            chunk_len: 100_000,
            memory: 64 << 20,
            workers: 2,
            ..scan::Options::default()
        },
        cache_dir: None,
        index_rows: tarfs::index::store::RowsToLoad::All,
        should_rescan_unproven: false,
        should_log_problems: false,
        layer: None,
        resources: None,
        peers: None,
        index_file: None,
        published_index: None,
        index_memory: tarfs::index::MemoryLimit::default(),
        disk_cache: DiskCacheMode::Disabled,
    }
}

// Promises: tree-same-place
#[test]
#[expect(
    clippy::print_stderr,
    reason = "the members of a failure are shown with it, and what all came to"
)]
fn index_copy_and_mounts_match_model_for_random_members() {
    let network = Runtime::new().expect("a runtime");
    let (mut members, mut lost) = (0, 0);
    for number in 0..rounds(DEFAULT_ROUNDS) {
        let mut rng = Rng::new(seed().wrapping_mul(1 << 32) + number);
        let round = Round::new(&mut rng);
        members += round.members.len() as u64;
        lost += round.tree.lost;
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            round.check_index(&network);
            round.check_copy();
            round.check_mounts(&mut rng);
        }));
        if let Err(panic) = tried {
            let path = std::env::temp_dir().join(format!("tarfs-model-{number}"));
            fs::write(&path, &round.place.packed).expect("space");
            eprintln!("round {number}, now in {}:", path.display());
            for member in &round.members {
                eprintln!("  {member:?}");
            }
            drop(round);
            std::panic::resume_unwind(panic);
        }
    }
    eprintln!("of {members} members {lost} found no place");
    assert!(lost > 0 && members > 4 * lost, "chance had no say");
}
