//! `tarfs materialize --resume`: a run interrupted at any moment is resumed and makes the same tree.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use crate::support::cli::Place as CommandPlace;
use crate::support::fixture::{PROGRAM, TestDir};
use crate::support::http::{Resource, Response, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};
use crate::support::wait;

const PATH: &str = "/archive";

/// Formats in which decoding can start in the middle.
const PACKINGS: [Packing; 8] = [
    Packing::Plain,
    Packing::Gzip,
    Packing::Bgzf,
    Packing::Lz4,
    Packing::Lz4Linked,
    Packing::ZstdFrames,
    Packing::XzBlocks,
    Packing::Bzip2,
];

/// Entries that replace, link to and lead through each other.
///
/// A megabyte separates any two, so that a run can be interrupted between them.
fn entangled_archive() -> Vec<u8> {
    let mut archive = Archive::new().global(&[("uname", "somebody"), ("mtime", "1234567.25")]);
    let mut number = 0_u64;
    let mut filler = |archive: Archive| {
        number += 1;
        let noise =
            Rng::new(number).bytes(700_000 + 40_000 * usize::try_from(number).expect("few"));
        archive.file(&format!("filler/{number}"), noise)
    };
    archive = archive.directory("filler").directory("a").directory("b");
    archive = filler(archive.symlink("l", "a").file("l/one", "in a"));
    archive = filler(archive.symlink("l", "b").file("l/one", "in b"));
    archive = filler(archive.directory("l").file("l/two", "in l"));
    archive = filler(archive.file("x", "first").hard_link("y", "x"));
    archive = filler(archive.file("x", "second").hard_link("z", "x"));
    archive = filler(archive.hard_link("early", "late"));
    archive = filler(archive.file("late", "late").hard_link("later", "late"));
    archive = filler(archive.file("f", "file").file("f/in", "refused"));
    archive = filler(archive.directory("f").file("f/in", "in f"));
    archive = filler(archive.directory("d").fifo("d/fifo"));
    archive = filler(
        archive
            .symlink("dangling", "nowhere")
            .file("dangling", "no link"),
    );
    archive = filler(archive.file("late", "replaced"));
    archive.file("end", "end").end()
}

/// Times of members in these tests are not later.
const LATEST_MEMBER_TIME: i64 = 1_600_000_000;

/// All visible facts of a tree. An inode is shown as its first name.
pub(crate) fn tree_facts(top: &Path) -> BTreeMap<PathBuf, String> {
    let mut facts = BTreeMap::new();
    let mut paths = vec![top.to_owned()];
    let mut pending = vec![top.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if fs::symlink_metadata(&path).expect("there").is_dir() {
                pending.push(path.clone());
            }
            paths.push(path);
        }
    }
    paths.sort();
    let mut inodes = BTreeMap::new();
    for path in paths {
        let stat = fs::symlink_metadata(&path).expect("there");
        let name = path.strip_prefix(top).expect("below").to_owned();
        let content = if stat.is_file() {
            format!("{:x}", xxh3_64(&fs::read(&path).expect("readable")))
        } else if stat.is_symlink() {
            format!("{}", fs::read_link(&path).expect("a link").display())
        } else {
            format!("fifo {}", stat.file_type().is_fifo())
        };
        let first = inodes.entry(stat.ino()).or_insert_with(|| name.clone());
        let size = if stat.is_dir() { 0 } else { stat.size() };
        // Directories that no member describes have the time of writing.
        let has_time = !stat.is_dir() || stat.mtime() <= LATEST_MEMBER_TIME;
        let time = has_time.then(|| (stat.mtime(), stat.mtime_nsec()));
        let fact = format!(
            "{:o} {}:{} {} {size} {time:?} {} {content}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.nlink(),
            first.display(),
        );
        facts.insert(name, fact);
    }
    facts
}

#[track_caller]
fn assert_same(
    found: &BTreeMap<PathBuf, String>,
    expected: &BTreeMap<PathBuf, String>,
    what: &str,
) {
    for (name, fact) in expected {
        assert_eq!(found.get(name), Some(fact), "{what}: {}", name.display());
    }
    assert_eq!(found.len(), expected.len(), "{what}");
}

/// A directory, and a server with an archive that can be cut off.
struct Place {
    server: Server,
    directory: TestDir,
    /// The server sends no byte beyond this offset, and answers 404 to requests there.
    until: Arc<AtomicU64>,
    packed_len: u64,
}

impl Place {
    fn new(packed: Bytes) -> Self {
        let place = Self {
            server: Server::start(),
            directory: TestDir::new(&[]),
            until: Arc::new(AtomicU64::new(u64::MAX)),
            packed_len: packed.len() as u64,
        };
        place.serve(packed, "\"1\"");
        place.reset();
        place
    }

    fn serve(&self, packed: Bytes, etag: &str) {
        let until = Arc::clone(&self.until);
        let resource = Resource::new(packed).etag(etag);
        self.server.route(PATH, move |request| {
            let (start, end) = request.range().unwrap_or((0, u64::MAX));
            let until = until.load(Ordering::SeqCst);
            if end <= until {
                return resource.answer(request);
            }
            // A request may be long, and has the bytes before.
            let there = usize::try_from(until.saturating_sub(start)).expect("few");
            match there {
                0 => Response::new(404),
                there => resource.answer(request).cut_after(there),
            }
        });
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path(name)
    }

    fn journal(&self) -> PathBuf {
        self.path(".out.tarfs-journal")
    }

    /// Makes an empty destination and removes the journal.
    fn reset(&self) {
        drop(fs::remove_dir_all(self.path("out")));
        drop(fs::remove_file(self.journal()));
        fs::create_dir(self.path("out")).expect("made");
        // New directories inherit the set-group-id bit, which existing ones keep.
        let setgid = fs::Permissions::from_mode(0o2755);
        fs::set_permissions(self.path("out"), setgid).expect("ours");
    }

    fn words<'a>(url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let words = ["extract", "-q", "-C", "out", "--chunk-size", "128KiB"];
        let modes = ["--no-same-permissions", url];
        [&words[..], &modes, more].concat()
    }

    /// Runs or resumes. Returns the output and the number of bytes sent.
    fn run(&self, more: &[&str]) -> (Output, u64) {
        let before = self.server.sent_bytes(PATH);
        let url = self.server.url(PATH);
        let words = Self::words(&url, &[&["--resume"], more].concat());
        let output = self.directory.tarfs(&words);
        (output, self.server.sent_bytes(PATH) - before)
    }

    /// Runs until the end of the served bytes.
    fn run_interrupted(&self, until: u64) {
        self.until.store(until, Ordering::SeqCst);
        let (output, _) = self.run(&[]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
        assert!(
            stderr_text(&output).contains("not found"),
            "{}",
            stderr_text(&output)
        );
        self.until.store(u64::MAX, Ordering::SeqCst);
    }

    /// The tree of a run without interruption.
    fn expected(&self, code: i32) -> BTreeMap<PathBuf, String> {
        self.reset();
        let url = self.server.url(PATH);
        let output = self.directory.tarfs(&Self::words(&url, &[]));
        assert_eq!(output.status.code(), Some(code), "{}", stderr_text(&output));
        let facts = tree_facts(&self.path("out"));
        self.reset();
        facts
    }

    /// Starts a run and kills it after that many requests. Returns whether it had finished.
    fn kill_after_requests(&self, requests: usize) -> bool {
        let before = self.server.requests(PATH).len();
        let url = self.server.url(PATH);
        let words = Self::words(&url, &["--resume"]);
        let mut child = self
            .directory
            .command(&words)
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        wait::wait_until("it has asked, or is done", || {
            let has_ended = child.try_wait().expect("ours").is_some();
            has_ended || self.server.requests(PATH).len() - before >= requests
        });
        // The run may have ended already.
        drop(child.kill());
        child.wait().expect("an end");
        self.path("out/end").exists() && !self.journal().exists()
    }
}

// Promises: resume-point, resume-private, resume-checksums
#[test]
fn interrupted_run_resumes_and_fetches_only_the_rest() {
    let plain = Bytes::from(entangled_archive());
    for packing in PACKINGS {
        let place = Place::new(packing.pack(&plain));
        let expected = place.expected(2);
        let cut = place.packed_len * 3 / 4;
        place.run_interrupted(cut);
        let mode = fs::metadata(place.journal()).expect("a journal").mode();
        assert_eq!(mode & 0o777, 0o600);
        let (output, sent) = place.run(&[]);
        // The first run already refuses one member.
        assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
        assert_same(
            &tree_facts(&place.path("out")),
            &expected,
            &format!("{packing:?}"),
        );
        // A resumed run cannot check a checksum over the whole archive.
        let is_reported = stderr_text(&output).contains("were not verified");
        assert_eq!(
            is_reported,
            packing != Packing::Plain,
            "{}",
            stderr_text(&output)
        );
        // A seek point may be 4 MB of plain bytes before the cut, and a checkpoint 2 MB.
        let most = place.packed_len - cut + (7 << 20);
        assert!(
            sent <= most,
            "{packing:?}: {sent} of {}, {most}",
            place.packed_len
        );
        assert!(sent < place.packed_len * 7 / 8, "{packing:?}: {sent}");
        assert!(!place.journal().exists(), "{packing:?}");
    }
}

// Promises: resume-same
#[test]
fn run_killed_at_any_moment_resumes_to_the_same_tree() {
    let plain = Bytes::from(entangled_archive());
    let mut noise = Rng::new(seed());
    for packing in PACKINGS {
        let place = Place::new(packing.pack(&plain));
        let expected = place.expected(2);
        for round in 0..rounds(1) {
            place.reset();
            let mut what = format!("{packing:?}, {round}");
            let mut requests = || usize::try_from(noise.below(60)).expect("few");
            // A finished run has nothing to resume.
            if !(0..3).any(|_| place.kill_after_requests(requests())) {
                let (output, _) = place.run(&[]);
                assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
                what += &stderr_text(&output);
            }
            assert_same(&tree_facts(&place.path("out")), &expected, &what);
            assert!(!place.journal().exists(), "{what}");
        }
    }
}

// Promises: resume-same
#[test]
fn losses_before_interruption_count_after_resume() {
    let noise = |seed| Rng::new(seed).bytes(2_500_000);
    let plain = Archive::new()
        .file("filler/1", noise(1))
        .raw([b'?'; 512])
        .file("filler/2", noise(2))
        .file("filler/3", noise(3))
        .file("end", "end")
        .end();
    let place = Place::new(plain.into());
    place.run_interrupted(place.packed_len * 7 / 8);
    let (output, sent) = place.run(&[]);
    assert!(sent < place.packed_len / 2, "{sent}");
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    assert!(place.path("out/end").exists() && !place.journal().exists());
}

// Promises: resume-only-if
#[test]
fn resume_distrusts_files_touched_since() {
    let place = Place::new(entangled_archive().into());
    let expected = place.expected(2);
    let touches: [fn(&Path); 3] = [
        |out| fs::write(out.join("filler/1"), "other").expect("written"),
        |out| fs::remove_file(out.join("y")).expect("removed"),
        |out| {
            let mode = fs::Permissions::from_mode(0o600);
            fs::set_permissions(out.join("filler/2"), mode).expect("ours");
        },
    ];
    for touch in touches {
        place.reset();
        place.run_interrupted(place.packed_len * 3 / 4);
        touch(&place.path("out"));
        let (output, sent) = place.run(&[]);
        assert!(
            stderr_text(&output).contains("changed since"),
            "{}",
            stderr_text(&output)
        );
        assert!(sent >= place.packed_len, "{sent}");
        let found = tree_facts(&place.path("out"));
        for name in ["filler/1", "filler/2", "end"] {
            let name = Path::new(name);
            assert_eq!(found.get(name), expected.get(name));
        }
    }
}

// Promises: resume-journal
#[test]
fn journal_is_written_over_no_other_file() {
    let place = CommandPlace::new();
    place.put("a.tar", Archive::new().file("a", "1").end());
    place.put("precious", "text of the user");
    let journal = place.path(".out.tarfs-journal");
    let run = ["materialize", "--resume", "a.tar", "-C", "out"];
    fs::copy(place.path("precious"), &journal).expect("space");
    place.fails(&run, &["it is no journal of tarfs"]);
    assert_eq!(fs::read(&journal).expect("there"), b"text of the user");
    fs::remove_file(&journal).expect("ours");
    fs::hard_link(place.path("precious"), &journal).expect("ours");
    place.fails(&run, &[".out.tarfs-journal"]);
    assert_eq!(
        fs::read(place.path("precious")).expect("there"),
        b"text of the user"
    );
    // An empty file is that of a run that was killed at its start.
    fs::remove_file(&journal).expect("ours");
    fs::write(&journal, "").expect("ours");
    place.succeeds(&run);
}

// Promises: resume-only-if, resume-journal, resume-private
#[test]
fn journal_is_used_only_for_same_run_and_intact_part() {
    let plain = Bytes::from(entangled_archive());
    let place = Place::new(plain.clone());
    let expected = place.expected(2);
    let cut = place.packed_len * 3 / 4;
    // Another selection, other attributes, and another version of the source.
    for more in [
        &["--exclude", "end"][..],
        &["--no-xattrs"],
        &["--no-acls"],
        &["--xattrs-include=*"],
        &["--xattrs-exclude=user.*"],
    ] {
        place.run_interrupted(cut);
        let (_, sent) = place.run(more);
        assert!(sent >= place.packed_len, "{more:?}: {sent}");
        place.reset();
    }
    // Another umask.
    place.run_interrupted(cut);
    let (before, url) = (place.server.sent_bytes(PATH), place.server.url(PATH));
    let mut command = place.directory.command_of("sh");
    command.args(["-c", "umask 077; exec \"$0\" \"$@\"", PROGRAM]);
    command.args(Place::words(&url, &["--resume"]));
    let output = command.output().expect("started");
    let sent = place.server.sent_bytes(PATH) - before;
    assert!(sent >= place.packed_len, "{sent}: {}", stderr_text(&output));
    place.reset();
    place.run_interrupted(cut);
    place.serve(plain, "\"2\"");
    let (_, sent) = place.run(&[]);
    assert!(sent >= place.packed_len, "{sent}");
    // After damage at any offset, the part before it is used.
    let mut noise = Rng::new(3);
    for number in 0..12 {
        place.reset();
        place.run_interrupted(cut);
        let mut journal = fs::read(place.journal()).expect("a journal");
        let at = usize::try_from(noise.below(journal.len() as u64)).expect("small");
        if number % 2 == 0 {
            journal.truncate(at);
        } else {
            journal[at] ^= 1 << noise.below(8);
        }
        fs::write(place.journal(), journal).expect("written");
        let (output, _) = place.run(&[]);
        let found = tree_facts(&place.path("out"));
        for name in ["filler/1", "filler/9", "end", "x", "f/in"] {
            let name = Path::new(name);
            assert_eq!(
                found.contains_key(name),
                expected.contains_key(name),
                "{}",
                stderr_text(&output)
            );
        }
    }
    // A file that another user could have put there.
    place.reset();
    fs::write(place.path("victim"), "kept").expect("written");
    symlink("victim", place.journal()).expect("made");
    let (output, sent) = place.run(&[]);
    assert_eq!((output.status.code(), sent < 1 << 20), (Some(2), true));
    assert_eq!(fs::read(place.path("victim")).expect("there"), b"kept");
    fs::remove_file(place.journal()).expect("ours");
    fs::write(place.journal(), "").expect("written");
    let open = fs::Permissions::from_mode(0o622);
    fs::set_permissions(place.journal(), open).expect("ours");
    let (output, _) = place.run(&[]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
}

#[test]
fn replaced_hard_link_reserves_no_name_in_the_next_run() {
    let archive = Archive::new().hard_link("e", "f").symlink("e", ".");
    let place = Place::new(archive.file("e/e", "1").file("f", "2").end().into());
    // The third entry is the directory that takes the place of the link.
    let (output, _) = place.run(&["--max-entries", "3"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    assert!(fs::symlink_metadata(place.path("out/e")).is_err());
    let (output, _) = place.run(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr_text(&output));
    let content = |path: &str| fs::read_to_string(place.path(path)).expect("a file");
    assert_eq!(
        (content("out/e/e"), content("out/f")),
        ("1".to_owned(), "2".to_owned())
    );
}

// Promises: resume-same
#[test]
fn limits_apply_to_all_runs_together() {
    let place = Place::new(entangled_archive().into());
    // 38 members and eleven megabytes: the resumed run has far less left.
    let limits = [
        (["--max-entries", "30"], "30"),
        (
            ["--max-unpacked-size", "7MiB"],
            "brings the sizes of all files to",
        ),
    ];
    for (limit, word) in limits {
        place.reset();
        place.run_interrupted(place.packed_len * 3 / 4);
        let (output, sent) = place.run(&limit);
        assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
        assert!(
            stderr_text(&output).contains(word),
            "{}",
            stderr_text(&output)
        );
        assert!(sent < place.packed_len / 2, "{sent}");
        assert!(!place.path("out/end").exists());
    }
}

// Promises: resume-only-if, resume-weak
#[test]
fn run_without_version_is_not_resumed_and_says_so() {
    let place = Place::new(entangled_archive().into());
    let resource = Resource::new(entangled_archive());
    place.server.serve(PATH, resource);
    let (output, _) = place.run(&[]);
    assert!(
        stderr_text(&output).contains("starts again from the beginning"),
        "{}",
        stderr_text(&output)
    );
    assert!(place.path("out/end").exists() && !place.journal().exists());
}
