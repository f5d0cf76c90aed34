//! Processes that are killed at any moment: the next start works, and never serves a wrong byte.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;

use tarfs::base::task::Thread;

use crate::support::http::{Resource, Server};
use crate::support::mounts::is_mounted;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::program;
use crate::support::raw::Archive;
use crate::support::rounds::{rounds, seed};
use crate::support::wait;

/// Rounds when nobody asks for more.
const FEW: u64 = 16;

/// Files of the archive, and their lengths: some in many spans, many in one.
const FILES: usize = 60;

const PACKINGS: [Packing; 4] = [
    Packing::Plain,
    Packing::Gzip,
    Packing::Lz4,
    Packing::ZstdFrames,
];

fn content(number: usize) -> Vec<u8> {
    let len = match number % 4 {
        0 => 1_000,
        1 => 40_000,
        2 => 120_000,
        _ => 600_000,
    };
    Noise::new(number as u64 + 1).text(len)
}

fn name(number: usize) -> String {
    format!("d{}/f{number}", number / 16)
}

/// A server, and a place with a cache that outlives everyone who is killed.
struct Place {
    server: Server,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let plain = (0..FILES).fold(Archive::new(), |archive, number| {
            archive.file(&name(number), content(number))
        });
        let plain = Bytes::from(plain.end());
        let server = Server::start();
        for packing in PACKINGS {
            let resource = Resource::new(packing.pack(&plain)).etag("\"1\"");
            server.serve(&format!("/{packing:?}"), resource);
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("mnt")).expect("made");
        Self { server, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn url(&self, packing: Packing) -> String {
        self.server.url(&format!("/{packing:?}"))
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tarfs"));
        command
            .args(words)
            .current_dir(self.directory.path())
            .env("XDG_RUNTIME_DIR", self.directory.path())
            .env("TARFS_CACHE_DIR", self.path("cache"))
            .env("no_proxy", "*")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    fn start(&self, words: &[&str]) -> Child {
        self.command(words).spawn().expect("started")
    }

    /// Reads everything as long as it can; what can be read must be right.
    fn read_what_can_be_read(&self, order: u64) -> Thread<()> {
        let mut dice = Noise::new(order);
        let mount = self.path("mnt");
        let read = move || {
            for _ in 0..2 * FILES {
                let number = usize::try_from(dice.below(FILES as u64)).expect("small");
                let all = content(number);
                let offset = usize::try_from(dice.below(all.len() as u64)).expect("small");
                let expected = all.get(offset..).expect("inside");
                let mut bytes = vec![0; expected.len()];
                let file = fs::File::open(mount.join(name(number)));
                let read = file.and_then(|file| file.read_exact_at(&mut bytes, offset as u64));
                assert!(read.is_err() || bytes == expected, "{number}");
            }
        };
        Thread::spawn("reader", read).expect("a thread")
    }

    /// A mount, and all of it is right.
    fn check_mount(&self, packing: Packing) {
        let output = program::tarfs(self.directory.path(), &["mount", &self.url(packing), "mnt"]);
        assert!(output.status.success(), "{}", program::told(&output));
        for number in 0..FILES {
            let read = fs::read(self.path("mnt").join(name(number))).expect("readable");
            assert!(read == content(number), "{number}");
        }
        let output = program::tarfs(self.directory.path(), &["umount", "mnt"]);
        assert!(output.status.success(), "{}", program::told(&output));
    }

    /// A tree on disk, over whatever was left there, and all of it is right.
    fn check_tree(&self, packing: Packing) {
        let words = ["materialize", &self.url(packing), "-C", "tree"];
        let output = program::tarfs(self.directory.path(), &words);
        assert!(output.status.success(), "{}", program::told(&output));
        for number in 0..FILES {
            let read = fs::read(self.path("tree").join(name(number))).expect("readable");
            assert!(read == content(number), "{number}");
        }
        fs::remove_dir_all(self.path("tree")).expect("removed");
    }

    /// Kills `victim` after a while, and waits until nothing of it is left.
    fn kill(&self, mut victim: Child, pause: Duration) {
        std::thread::sleep(pause);
        // It may have ended by itself.
        drop(victim.kill());
        victim.wait().expect("a child");
        wait::until("its mount is taken out", || !is_mounted(&self.path("mnt")));
    }
}

#[test]
#[expect(
    clippy::print_stderr,
    reason = "the rounds of a failure are shown with it"
)]
fn whoever_is_killed_at_whatever_moment_the_next_start_is_right() {
    let place = Place::new();
    let mut dice = Noise::new(seed());
    for round in 0..rounds(FEW) {
        let packing = PACKINGS[usize::try_from(dice.below(4)).expect("small")];
        let url = place.url(packing);
        let pause = Duration::from_micros(dice.below(250_000));
        eprintln!("round {round}: {packing:?}, {pause:?}");
        if dice.below(3) == 0 {
            // Without what the rounds before have left.
            drop(fs::remove_dir_all(place.path("cache")));
        }
        match dice.below(4) {
            0 => place.kill(place.start(&["mount", "-f", &url, "mnt"]), pause),
            1 => {
                let mount = place.start(&["mount", "-f", &url, "mnt"]);
                let readers = [1, 2].map(|reader| place.read_what_can_be_read(round * 2 + reader));
                place.kill(mount, pause);
                for reader in readers {
                    reader.join();
                }
            }
            2 => {
                fs::create_dir(place.path("tree")).expect("made");
                place.kill(place.start(&["materialize", &url, "-C", "tree"]), pause);
                place.check_tree(packing);
            }
            _ => place.kill(place.start(&["index", &url]), pause),
        }
        place.check_mount(packing);
    }
}
