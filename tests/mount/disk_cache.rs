//! The disk cache of real mounts: killed, shared, and on a full disk.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::support::fixture::{TestDir, TestMount, pid_of};
use crate::support::http::{Resource, Server};
use crate::support::mounts::is_mounted;
use crate::support::packing::Packing;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::sha256::sha256;
use crate::support::tree::Tree;
use crate::support::wait;

/// A server with archives, and directories for mounts and for files of tarfs.
struct ArchiveServer {
    server: Server,
}

type Place = TestMount<ArchiveServer>;

impl Place {
    /// Serves the mixed tree at `/mixed`, and another tree at `/other`.
    fn start() -> Self {
        let server = Server::start();
        for (path, tree) in [("/mixed", Tree::mixed()), ("/other", Tree::other())] {
            let packed = Packing::Gzip.pack(&tree.tar);
            server.serve(path, Resource::new(packed).etag("\"1\""));
        }
        let directory = TestDir::with(&["a", "b", "c", "cache"], ArchiveServer { server });
        TestMount::of(directory, &["a", "b", "c"])
    }

    #[track_caller]
    fn mount(&self, archive: &str, mountpoint: &str, more: &[&str]) {
        let url = self.server.url(archive);
        // A mount that is killed is not continued.
        self.succeeds(&[&["mount", "--isolated", &url, mountpoint], more].concat());
    }

    /// Kills the process of a mount, and waits until the mount is gone.
    fn kill(&self, mountpoint: &str) {
        let pid = pid_of(&self.status_of(mountpoint)).expect("a number");
        kill_process(pid, Signal::KILL).expect("running");
        wait::wait_until("it is gone", || !is_mounted(&self.path(mountpoint)));
    }

    #[track_caller]
    fn assert_file(&self, mountpoint: &str, name: &str, content: &[u8]) {
        let read = fs::read(self.path(mountpoint).join(name));
        let read = read.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(read == content, "{name} is wrong");
    }

    /// Makes the next read of a file one of the process that serves it.
    fn drop_cached_pages(&self, mountpoint: &str, name: &str) {
        let file = fs::File::open(self.path(mountpoint).join(name)).expect("there");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("clean pages");
    }

    fn cache_files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("cache/disk-cache"))
            .into_iter()
            .flatten();
        entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect()
    }

    /// Bytes of disk that all cache files take.
    fn disk_cache_bytes(&self) -> u64 {
        let files = self.cache_files();
        let metadata = files.iter().filter_map(|path| fs::metadata(path).ok());
        metadata.map(|file| file.blocks() * 512).sum()
    }
}

#[track_caller]
fn number(status: &Value, pointer: &str) -> u64 {
    let value = status.pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("{pointer} of {status}"))
}

/// The first note of a status that contains `part`.
fn note(status: &Value, part: &str) -> Option<String> {
    let notes = status.get("notes")?.as_array()?.iter();
    let mut notes = notes.filter_map(Value::as_str);
    notes.find(|note| note.contains(part)).map(str::to_owned)
}

// Promises: disk-damaged
#[test]
fn killed_mount_leaves_only_valid_disk_cache() {
    let (place, tree) = (Place::start(), Tree::mixed());
    // Without prefetching, the disk cache holds only spans that were read, and those are `whole`'s.
    let reads_alone = ["--prefetch", "none", "--cache-size", "1GiB"];
    place.succeeds(&["index", &place.server.url("/mixed")]);
    assert!(place.cache_files().is_empty());
    let (whole, rest) = tree.files.split_at(tree.files.len() / 2);
    place.mount("/mixed", "a", &reads_alone);
    for (name, content) in whole {
        place.assert_file("a", name, content);
    }
    wait::wait_until("what was decoded is on disk", || {
        let status = place.status_of("a");
        let [decoded, stored] = ["decoded_bytes", "disk_cache_written_bytes"]
            .map(|name| number(&status, &format!("/counters/{name}")));
        decoded > 0 && decoded == stored
    });
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (name, _) in rest.iter().rev() {
                // The error says that the process was killed.
                drop(fs::read(place.path("a").join(name)));
            }
            is_over.store(true, Ordering::SeqCst);
        });
        let before = place.server.requests("/mixed").len();
        wait::wait_until("it reads", || {
            place.server.requests("/mixed").len() > before || is_over.load(Ordering::SeqCst)
        });
        place.kill("a");
    });

    let before = place.server.sent_bytes("/mixed");
    place.mount("/mixed", "a", &reads_alone);
    let opened = place.server.sent_bytes("/mixed");
    assert!(opened - before <= 64 << 10);
    for (name, content) in whole {
        place.assert_file("a", name, content);
    }
    assert_eq!(place.server.sent_bytes("/mixed"), opened);
    let status = place.status_of("a");
    assert_eq!(number(&status, "/counters/decoded_bytes"), 0);
    for (name, content) in rest {
        place.assert_file("a", name, content);
    }
}

// Promises: disk-damaged
#[test]
fn leftovers_of_killed_scan_are_removed_by_next_one() {
    let (place, tree) = (Place::start(), Tree::mixed());
    let packed = Packing::Gzip.pack(&tree.tar);
    let resource = Resource::new(packed.clone()).etag("\"1\"");
    place.server.route("/slow", move |request| {
        let response = resource.answer(request);
        match request.range() {
            Some((start, _)) if start >= 5 << 20 => response.stall_after(0),
            _ => response,
        }
    });
    let url = place.server.url("/slow");
    let sizes = ["--cache-size", "1GiB", "--chunk-size", "1MiB"];
    let mut command = place.command(&[&["mount", &url, "a", "--foreground"], &sizes[..]].concat());
    let mut process = command.stderr(Stdio::null()).spawn().expect("started");
    wait::wait_until("something is stored", || place.disk_cache_bytes() > 0);
    let server = wait::wait_for("a status", || {
        let status = place.tarfs(&["status", "a", "--json"]);
        pid_of(&serde_json::from_slice(&status.stdout).ok()?)
    });
    let exit = pidfd_open(server, PidfdFlags::empty()).expect("running");
    kill_process(server, Signal::KILL).expect("running");
    // Until then it holds the file.
    assert!(wait::process_exits(&exit));
    process.wait().expect("a child");
    assert!(!is_mounted(&place.path("a")));
    let [left] = &place.cache_files()[..] else {
        panic!("one file: {:?}", place.cache_files());
    };
    let is_unfinished = |path: &Path| path.to_string_lossy().contains("/.");
    assert!(is_unfinished(left));

    place
        .server
        .serve("/slow", Resource::new(packed).etag("\"1\""));
    place.mount("/slow", "a", &sizes);
    assert!(!left.exists());
    for (name, content) in &tree.files {
        place.assert_file("a", name, content);
    }
    assert_eq!(place.cache_files().len(), 1);
}

// Promises: disk-limit
#[test]
fn mounts_share_disk_cache_directory_and_its_limit() {
    // Together with the memory for spans, it is too small for two archives.
    const LIMIT: u64 = 5 << 20;
    let place = Place::start();
    let limit = LIMIT.to_string();
    // Spans that a scan decodes would be in the page cache, and not read from disk.
    let sizes = ["--cache-size", &limit, "--memory", "32MiB"];
    let flags = [&["--prefetch", "none"], &sizes[..]].concat();
    // Two mounts of one archive, and one of another. Each would fill the cache alone.
    let mounts = [
        ("/mixed", "a", Tree::mixed()),
        ("/mixed", "b", Tree::mixed()),
        ("/other", "c", Tree::other()),
    ];
    for (archive, mountpoint, _) in &mounts {
        place.mount(archive, mountpoint, &flags);
    }
    let (place, most) = (&place, &std::sync::atomic::AtomicU64::new(0));
    let read_all = || {
        std::thread::scope(|scope| {
            for (seed, (_, mountpoint, tree)) in (1..).zip(&mounts) {
                scope.spawn(move || {
                    let mut left: Vec<_> = tree.files.iter().collect();
                    let mut noise = Rng::new(seed);
                    while !left.is_empty() {
                        let number = usize::try_from(noise.below(left.len() as u64));
                        let (name, content) = left.swap_remove(number.expect("small"));
                        place.assert_file(mountpoint, name, content);
                        place.drop_cached_pages(mountpoint, name);
                        most.fetch_max(place.disk_cache_bytes(), Ordering::SeqCst);
                    }
                });
            }
        });
    };
    let statuses = || {
        let mountpoints = mounts.iter().map(|(_, mountpoint, _)| mountpoint);
        mountpoints.map(|mountpoint| place.status_of(mountpoint))
    };
    let evicted = |status| number(&status, "/counters/disk_cache_evicted_bytes");
    // Spans are left out while the disk is too slow for them.
    wait::wait_until("the disk cache is full", || {
        read_all();
        statuses().map(evicted).sum::<u64>() > 0
    });
    let most = most.load(Ordering::SeqCst);
    assert!(most <= LIMIT, "{most}");
    assert!(most > LIMIT / 2, "it is used: {most}");
    for status in statuses() {
        assert_eq!(number(&status, "/counters/failed_reads"), 0);
        assert_eq!(number(&status, "/disk_cache/limit_bytes"), LIMIT);
    }
}

/// A fixture whose cache is on its own disk of this size.
struct SmallDisk {
    place: Place,
}

impl SmallDisk {
    fn new(bytes: u64) -> Self {
        let place = Place::start();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "none"])
            .arg(place.path("cache"))
            .status();
        assert!(mounted.expect("installed").success());
        Self { place }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        drop(umount.arg("--lazy").arg(self.place.path("cache")).status());
    }
}

// Promises: disk-full
#[test]
fn reads_continue_without_disk_cache_on_full_disk() {
    let (disk, tree) = (SmallDisk::new(6 << 20), Tree::mixed());
    let place = &disk.place;
    let log = place.path("log");
    let log = log.to_str().expect("UTF-8");
    let flags = [
        "--cache-size",
        "1GiB",
        "--memory",
        "32MiB",
        "--log-file",
        log,
    ];
    place.mount("/mixed", "a", &flags);
    wait::wait_until("it is noted", || {
        note(&place.status_of("a"), "the disk cache is incomplete").is_some()
    });
    for (name, content) in tree.files.iter().rev() {
        place.assert_file("a", name, content);
    }
    let status = place.status_of("a");
    let note = note(&status, "the disk cache is incomplete").expect("as before");
    assert!(note.contains("No space left on device"), "{note}");
    assert_eq!(number(&status, "/counters/failed_reads"), 0);
    place.succeeds(&["umount", "a"]);
    let log = fs::read_to_string(log).expect("written");
    assert_eq!(
        log.matches("cannot write the disk cache").count(),
        1,
        "{log}"
    );
}

// Promises: disk-zeros
#[test]
fn zeros_of_an_archive_take_no_disk() {
    const ZEROS: usize = 48 << 20;
    let place = Place::start();
    let mut noise = Rng::new(1);
    let mut random = |len: usize| {
        let words = (0..len / 8).flat_map(|_| noise.below(u64::MAX).to_le_bytes());
        words.collect::<Vec<u8>>()
    };
    let files = [
        ("zeros", vec![0; ZEROS]),
        ("random", random(1 << 20)),
        (
            "mixed",
            [
                random(1000),
                vec![0; 5 << 20],
                random(1 << 20),
                vec![0; 1 << 20],
            ]
            .concat(),
        ),
    ];
    let archive = files
        .iter()
        .fold(Archive::new(), |archive, (name, content)| {
            archive.file(name, content.clone())
        })
        .end();
    for (packing, path) in [(Packing::Gzip, "/gzip"), (Packing::Plain, "/plain")] {
        let packed = packing.pack(&Bytes::from(archive.clone()));
        place
            .server
            .serve(path, Resource::new(packed.clone()).etag("\"1\""));
        // With a digest, a scan skips no content.
        let digest = sha256(&packed);
        place.mount(path, "a", &["--wait-index", "--expect-sha256", &digest]);
        for (name, content) in &files {
            place.assert_file("a", name, content);
        }
        // The next mount does not fetch what is in the queue of this one.
        place.succeeds(&["umount", "a"]);
        let used = place.disk_cache_bytes();
        assert!((2 << 20..4 << 20).contains(&used), "{path}: {used}");

        let before = place.server.sent_bytes(path);
        place.mount(path, "a", &["--prefetch", "none"]);
        for (name, content) in &files {
            place.assert_file("a", name, content);
        }
        let status = place.status_of("a");
        assert_eq!(number(&status, "/counters/decoded_bytes"), 0, "{path}");
        let sent = place.server.sent_bytes(path) - before;
        assert!(sent <= 64 << 10, "{path}: {sent}");
        place.succeeds(&["umount", "a"]);

        // Other bytes in place of the zeros of the file are never read.
        for file in place.cache_files() {
            let file = fs::File::options().write(true).open(file).expect("there");
            std::os::unix::fs::FileExt::write_all_at(&file, &vec![9; 4 << 20], 8 << 20)
                .expect("room");
        }
        place.mount(path, "a", &["--prefetch", "none"]);
        place.assert_file("a", "zeros", &files[0].1);
        let damaged = "/counters/disk_cache_damaged_spans";
        assert_eq!(number(&place.status_of("a"), damaged), 0, "{path}");
        place.succeeds(&["umount", "a"]);
        place.succeeds(&["cache", "clear"]);
    }
}

// Promises: disk-limit
#[test]
fn disk_cache_of_an_archive_takes_half_of_the_free_disk() {
    const SIZE: u64 = 10 << 20;
    let (disk, tree) = (SmallDisk::new(SIZE), Tree::mixed());
    let place = &disk.place;
    place.mount("/mixed", "a", &["--memory", "32MiB"]);
    for (name, content) in tree.files.iter().rev() {
        place.assert_file("a", name, content);
    }
    wait::wait_until("it is noted", || {
        note(&place.status_of("a"), "the disk cache is incomplete").is_some()
    });
    let note = note(&place.status_of("a"), "the disk cache is incomplete").expect("as before");
    assert!(
        note.contains("its limit for this archive"),
        "not full: {note}"
    );
    place.succeeds(&["umount", "a"]);
    let free = rustix::fs::statvfs(place.path("cache")).expect("mounted");
    let free = free.f_bavail * free.f_frsize;
    assert!(free >= SIZE * 9 / 20, "{free}");
    let used = place.disk_cache_bytes();
    assert!(used > SIZE / 4 && used <= SIZE / 2, "{used}");
}
