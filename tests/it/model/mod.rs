//! Archives by chance against a model that knows nothing but what members mean: what it says is what
//! an index, a tree on disk, a mount that is still being scanned and a mount with a saved index show.
//! Run as root.

mod member;
mod seen;
mod tree;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use tarfs::archive::{Archive, OpenOptions, DiskCacheMode, scan};
use tarfs::source;
use tokio::runtime::Runtime;

use crate::support::http::{Fault, Resource, Server};
use crate::support::mounts::is_mounted;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::program::{self, told};
use crate::support::rounds::{rounds, seed};
use member::{Member, joined, one};
use seen::{Sight, difference, in_archive, on_disk, sum};
use tree::{Look, Tree};

/// Archives when nobody asks for more.
const FEW: u64 = 24;

/// Files of an archive that are read while it is scanned.
const READ_EARLY: usize = 6;

/// Pieces in which a server sends what is scanned, and the pauses between them.
const PIECES: usize = 12;
const PAUSE: Duration = Duration::from_millis(4);

/// How long a name may be believed that a later member has taken, and some time to look.
const STALE: Duration = Duration::from_secs(5);

/// Asks for all attributes, also those that are left out by default.
const ALL_XATTRS: &str = "--xattrs-include=*";

/// Where the archive is served: at once, or slowly.
const FAST: &str = "/fast";
const SLOW: &str = "/slow";

/// An archive behind a server, and a place for mount, copy and cache.
struct Place {
    server: Server,
    directory: tempfile::TempDir,
    packed: Bytes,
}

impl Place {
    fn new(packed: Bytes) -> Self {
        let server = Server::start();
        let resource = Resource::new(packed.clone()).etag("\"1\"");
        server.serve(FAST, resource.clone());
        let piece = packed.len() / PIECES + 1;
        server.serve_badly(SLOW, resource, move |_| Some(Fault::Paced(piece, PAUSE)));
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["mnt", "own"] {
            fs::create_dir(directory.path().join(name)).expect("fresh");
        }
        Self {
            server,
            directory,
            packed,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn tarfs(&self, words: &[&str]) -> std::process::Output {
        program::tarfs(self.directory.path(), words)
    }

    fn mount(&self) {
        let url = self.server.url(SLOW);
        let output = self.tarfs(&["mount", ALL_XATTRS, "-o", "suid,dev", &url, "mnt"]);
        assert!(output.status.success(), "{}", told(&output));
    }

    fn unmount(&self) {
        let output = self.tarfs(&["umount", "mnt"]);
        assert!(output.status.success(), "{}", told(&output));
    }

    /// How often the mount's archive was scanned.
    fn scans(&self) -> Option<u64> {
        let output = self.tarfs(&["status", "mnt", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).ok()?;
        status.pointer("/counters/scans")?.as_u64()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if is_mounted(&self.path("mnt")) {
            self.tarfs(&["umount", "--lazy", "mnt"]);
        }
    }
}

/// An archive, what it should be, and where it is.
struct Round {
    members: Vec<Member>,
    tree: Tree,
    sight: Sight,
    place: Place,
}

impl Round {
    fn new(dice: &mut Noise) -> Self {
        let (members, plain) = member::archive(dice);
        let tree = Tree::of(&members);
        let packing = one(dice, &Packing::ALL);
        Self {
            members,
            sight: tree.sight(),
            tree,
            place: Place::new(packing.pack(&plain.into())),
        }
    }

    fn same(&self, what: &str, found: &Sight) {
        Self::are_same(what, &self.sight, found);
    }

    #[track_caller]
    fn are_same(what: &str, expected: &Sight, found: &Sight) {
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
        assert_eq!(output.status.code(), Some(code), "{}", told(&output));
        let found = on_disk(&self.place.path("own"), self.tree.has_root());
        let (mut found, mut expected) = (found.expect("readable"), self.sight.clone());
        // Which come to be when they are written, as for GNU tar.
        for path in self.tree.implied() {
            for sight in [&mut found, &mut expected] {
                if let Some((_, attributes, _)) = sight.get_mut(&path) {
                    (attributes.mtime, attributes.mode) = ((0, 0), 0);
                }
            }
        }
        Self::are_same("what was written", &expected, &found);
    }

    /// A mount that is scanned, and the same archive mounted again.
    fn check_mounts(&self, dice: &mut Noise) {
        self.place.mount();
        self.read_early(dice);
        let start = Instant::now();
        let mount = self.place.path("mnt");
        loop {
            // In this order: what was late to be looked at may have been in time.
            let is_late = start.elapsed() > STALE;
            let found = on_disk(&mount, self.tree.has_root());
            let is_same = found.as_ref().is_ok_and(|found| *found == self.sight);
            if is_same || is_late {
                self.same("the mount", &found.expect("readable"));
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(self.place.scans(), Some(1));
        self.place.unmount();
        self.place.mount();
        let found = on_disk(&mount, self.tree.has_root()).expect("readable");
        self.same("the mount with a saved index", &found);
        assert_eq!(self.place.scans(), Some(0));
        self.place.unmount();
    }

    /// Reads files while the archive is scanned: each is what the archive has made of it so far, at
    /// some time.
    fn read_early(&self, dice: &mut Noise) {
        let paths = self.tree.paths();
        for _ in 0..READ_EARLY {
            let path = one(dice, &paths);
            let mut tree = Tree::default();
            let looks = self.members.iter().map(|member| {
                tree.apply(member);
                tree.look(&path)
            });
            let looks: Vec<Look> = looks.collect();
            if looks.contains(&Look::Other) {
                continue;
            }
            let place = self
                .place
                .path("mnt")
                .join(OsStr::from_bytes(&joined(&path)));
            let read = fs::read(&place).map(|bytes| Look::File(sum(&bytes)));
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
        should_rescan_unproven: false,
        should_log_problems: false,
        layer: None,
        index_file: None,
        index_memory: tarfs::index::MemoryLimit::default(),
        disk_cache: DiskCacheMode::Disabled,
    }
}

#[test]
#[expect(
    clippy::print_stderr,
    reason = "the members of a failure are shown with it, and what all came to"
)]
fn whatever_members_say_index_copy_and_mounts_are_what_the_model_is() {
    let network = Runtime::new().expect("a runtime");
    let (mut members, mut lost) = (0, 0);
    for number in 0..rounds(FEW) {
        let mut dice = Noise::new(seed().wrapping_mul(1 << 32) + number);
        let round = Round::new(&mut dice);
        members += round.members.len() as u64;
        lost += round.tree.lost;
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            round.check_index(&network);
            round.check_copy();
            round.check_mounts(&mut dice);
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
