//! Copies of archives in memory, with the reads they cause.

use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::fs::fstat;

use super::copy::this_boot_id;
use super::*;
use crate::archive::{
    self, BuiltIndex, Callback, IndexGuard, IsWanted, MemoryUse, ReadError, ReadReply, Volume,
    WaitFor,
};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::base::sync::Mutex;
use crate::base::xattr::filter::XattrFilter;
use crate::index::{self, Builder, Index, Ino, LazyIndex, Origin};
use crate::materialize::copy_plan::CopyPlan;
use crate::materialize::test_support;
use crate::tar::{Member, MemberKind, Segment};

/// An archive that counts its reads.
struct Archive {
    index: Arc<Index>,
    contents: Arc<BTreeMap<u32, Vec<u8>>>,
    reads: Arc<Mutex<Vec<Ino>>>,
}

impl Archive {
    fn new(members: Vec<(Member, &[u8])>) -> Self {
        let mut builder = Builder::new(index::Options::default());
        let mut contents = BTreeMap::new();
        let mut plain = Plain(0);
        for (mut member, content) in members {
            member.header = plain;
            member.payload = Extent::with_len(Plain(plain.0 + 512), content.len() as u64);
            plain = Plain(member.payload.end().0.next_multiple_of(512));
            let placed = builder.add_member(&member).expect("well-formed");
            if let index::Placement::Entry(ino) = placed {
                contents.insert(ino.0, content.to_vec());
            }
        }
        let origin = Origin {
            content_id: [7; 32],
            sha256: None,
            plain_bytes: plain.0,
            ..Origin::default()
        };
        Self {
            index: Arc::new(builder.finish(origin)),
            contents: Arc::new(contents),
            reads: Arc::default(),
        }
    }

    fn volume(&self) -> Arc<dyn Volume> {
        Arc::new(TestVolume {
            index: Arc::clone(&self.index),
            contents: Arc::clone(&self.contents),
            reads: Arc::clone(&self.reads),
        })
    }

    fn start(&self, dir: &TestDir) -> (Arc<BackgroundCopy>, RunningCopy) {
        let background = open(dir, dir.boot_id);
        let background = Arc::new(background);
        let running = background
            .start(
                &LazyIndex::new(Arc::clone(&self.index)),
                Ino::ROOT,
                self.volume(),
                &Arc::default(),
            )
            .expect("ours");
        (background, running)
    }

    /// Writes the whole copy. Returns its progress and the files read for it.
    fn write(&self, dir: &TestDir) -> (BackgroundCopyProgress, Vec<Ino>) {
        self.reads.lock().clear();
        let (background, running) = self.start(dir);
        let progress = wait_until_finished(&background);
        drop(running);
        let mut reads = self.reads.lock().clone();
        reads.sort_unstable();
        (progress, reads)
    }
}

/// A content that cannot be read.
const DAMAGED: &[u8] = b"damaged";

/// The contents of an [`Archive`].
#[derive(Debug)]
struct TestVolume {
    index: Arc<Index>,
    contents: Arc<BTreeMap<u32, Vec<u8>>>,
    reads: Arc<Mutex<Vec<Ino>>>,
}

impl Volume for TestVolume {
    fn index(&self) -> IndexGuard<'_> {
        IndexGuard::new(BuiltIndex::Complete(&self.index))
    }

    fn complete_index(&self) -> Option<LazyIndex> {
        Some(LazyIndex::new(Arc::clone(&self.index)))
    }

    fn is_scan_over(&self) -> bool {
        true
    }

    fn on_available(&self, _: WaitFor, callback: Callback) {
        callback.run();
    }

    fn try_read(&self, _: Ino, _: u64, _: u32) -> Option<Result<Bytes, ReadError>> {
        None
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, _: IsWanted, done: ReadReply) {
        done(self.read_blocking(ino, offset, len));
    }

    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        self.reads.lock().push(ino);
        let content = self.contents.get(&ino.0).expect("a file");
        let entry = self.index.entry(ino).expect("a file");
        let piece = entry.pieces(offset, 1).next().expect("stored");
        if content == DAMAGED {
            let extent = piece.plain;
            return Err(ReadError::Damaged {
                extent,
                cause: None,
            });
        }
        let first = entry.pieces(0, u64::MAX).next().expect("stored");
        let from = piece.plain.start().0 - first.plain.start().0 + offset - piece.offset;
        let from = usize::try_from(from).expect("small");
        Ok(Bytes::copy_from_slice(&content[from..from + len as usize]))
    }

    fn archives(&self) -> Vec<&archive::Archive> {
        Vec::new()
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::default()
    }
}

/// A copy in `dir`, during the boot `boot_id` of the system.
fn open(dir: &TestDir, boot_id: u64) -> BackgroundCopy {
    BackgroundCopy::new(&dir.copy(), XattrFilter::default(), boot_id).expect("ours")
}

struct TestDir {
    base: tempfile::TempDir,
    boot_id: u64,
}

impl TestDir {
    fn new() -> Self {
        let base = tempfile::tempdir().expect("a directory");
        Self { base, boot_id: 1 }
    }

    fn copy(&self) -> PathBuf {
        self.base.path().join("copy")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.copy().join(name)
    }
}

fn wait_until_finished(background: &BackgroundCopy) -> BackgroundCopyProgress {
    let start = Instant::now();
    loop {
        let progress = background.progress();
        let is_over = matches!(
            progress.state,
            CopyState::Complete | CopyState::Incomplete | CopyState::Stopped
        );
        if is_over || start.elapsed() > Duration::from_mins(1) {
            return progress;
        }
        std::thread::yield_now();
    }
}

fn sample() -> Archive {
    let mut sparse = test_support::file(b"d/sparse", b"AAAABBBB");
    sparse.0.size = 1 << 20;
    let segment = |offset| Segment { offset, len: 4 };
    sparse.0.sparse = Some(vec![segment(4096), segment(1 << 19)]);
    Archive::new(vec![
        test_support::file(b"d/one", b"first"),
        sparse,
        (
            test_support::member(b"l", MemberKind::HardLink(b"d/one".to_vec())),
            &[],
        ),
        (
            test_support::member(b"s", MemberKind::Symlink(b"d".to_vec())),
            &[],
        ),
        test_support::file(b"two", b"second"),
        test_support::file(b"empty", b""),
    ])
}

fn ino(archive: &Archive, path: &str) -> Ino {
    let path = ArchivePath::sanitize(path.as_bytes()).path;
    archive.index.find(&path).expect("there").ino()
}

#[test]
fn complete_copy_is_not_read_again_by_a_second_run() {
    let (archive, dir) = (sample(), TestDir::new());
    let (progress, reads) = archive.write(&dir);
    let expected = BackgroundCopyProgress {
        state: CopyState::Complete,
        files: 4,
        total_files: 4,
        bytes: 19,
        total_bytes: 19,
        failures: 0,
        note: None,
    };
    assert_eq!(progress, expected);
    let (one, sparse, two) = (
        ino(&archive, "d/one"),
        ino(&archive, "d/sparse"),
        ino(&archive, "two"),
    );
    assert_eq!(reads, [one, sparse, sparse, two]);
    assert_eq!(fs::read(dir.path("l")).expect("there"), b"first");
    assert_eq!(fs::read(dir.path("s/one")).expect("there"), b"first");
    let status = fs::metadata(dir.path("d/sparse")).expect("there");
    assert_eq!(status.size(), 1 << 20);
    assert!(status.blocks() * 512 < 1 << 19, "holes stay holes");
    let links = fs::metadata(dir.path("l")).expect("there").nlink();
    assert_eq!(links, 2);
    let (progress, reads) = archive.write(&dir);
    assert_eq!((progress, reads), (expected, vec![]));
}

#[test]
fn damaged_file_is_named_and_not_in_the_copy() {
    let dir = TestDir::new();
    let archive = Archive::new(vec![
        test_support::file(b"bad", DAMAGED),
        (
            test_support::member(b"link", MemberKind::HardLink(b"bad".to_vec())),
            &[],
        ),
        test_support::file(b"good", b"whole"),
    ]);
    let (progress, _) = archive.write(&dir);
    assert_eq!(progress.state, CopyState::Incomplete);
    assert_eq!((progress.files, progress.failures), (1, 1));
    assert!(progress.note.is_some_and(|note| note.starts_with("bad: ")));
    let names = fs::read_dir(dir.copy()).expect("there");
    let names: Vec<_> = names.map(|file| file.expect("there").file_name()).collect();
    assert_eq!(names, ["good"]);
}

// Promises: copy-continues
#[test]
fn copy_rewrites_entries_changed_since_the_last_run() {
    let (archive, dir) = (sample(), TestDir::new());
    archive.write(&dir);
    fs::write(dir.path("two"), "SECOND").expect("written");
    fs::remove_file(dir.path("s")).expect("there");
    fs::write(dir.path("s"), "no link").expect("written");
    let (progress, reads) = archive.write(&dir);
    assert_eq!(progress.state, CopyState::Complete);
    assert_eq!(reads, [ino(&archive, "two")]);
    assert_eq!(fs::read(dir.path("two")).expect("there"), b"second");
    assert!(dir.path("s").is_symlink());
    // A new name changes no byte, but the ctime alone does not show that.
    fs::hard_link(dir.path("d/one"), dir.base.path().join("mine")).expect("made");
    let (_, reads) = archive.write(&dir);
    assert_eq!(reads, [ino(&archive, "d/one")]);
    assert_eq!(fs::read(dir.path("l")).expect("there"), b"first");
}

// Promises: copy-continues
#[test]
fn copy_verifies_contents_after_a_reboot() {
    let (archive, mut dir) = (sample(), TestDir::new());
    archive.write(&dir);
    let two = dir.path("two");
    let before = fs::metadata(&two).expect("there");
    dir.boot_id = 2;
    let (progress, reads) = archive.write(&dir);
    assert_eq!(progress.state, CopyState::Complete);
    let sparse = ino(&archive, "d/sparse");
    assert_eq!(reads, [sparse, sparse], "holes may hide what is lost");
    let (_, reads) = archive.write(&dir);
    assert_eq!(reads, [], "it is written down anew");
    // Simulates power loss: all attributes are right, but the content is wrong.
    dir.boot_id = 3;
    fs::write(&two, "SECOND").expect("written");
    let file = File::options().write(true).open(&two).expect("ours");
    file.set_modified(before.modified().expect("a time"))
        .expect("set");
    let task = {
        let background = open(&dir, 2);
        let stats = Arc::default();
        let task = background.build_task(&archive.index, Ino::ROOT, archive.volume(), &stats);
        task.expect("ours")
    };
    let number = ino(&archive, "two").0;
    let row = task.ledger.get(number).expect("written down");
    let stat = fstat(&file).expect("open");
    task.ledger.put(number, &stat, row.hash).expect("written");
    drop(task);
    let (progress, reads) = archive.write(&dir);
    assert_eq!(progress.state, CopyState::Complete);
    let expected = [sparse, sparse, ino(&archive, "two")];
    assert_eq!(reads, expected);
    assert_eq!(fs::read(two).expect("there"), b"second");
}

// Promises: copy-changed
#[test]
fn changed_file_of_a_copy_is_not_opened() {
    let (archive, dir) = (sample(), TestDir::new());
    let (background, running) = archive.start(&dir);
    assert_eq!(wait_until_finished(&background).state, CopyState::Complete);
    let two = ino(&archive, "two");
    assert!(background.is_complete(two) && background.open_copy(two).is_some());
    fs::write(dir.path("two"), "SECOND").expect("written");
    assert!(background.open_copy(two).is_none());
    assert!(!background.is_complete(two));
    let progress = background.progress();
    assert_eq!(
        (progress.state, progress.files, progress.failures),
        (CopyState::Incomplete, 3, 1)
    );
    assert!(progress.note.is_some_and(|note| note.starts_with("two: ")));
    assert!(background.open_copy(ino(&archive, "d/one")).is_some());
    drop(running);
}

// Promises: copy-failure
#[test]
fn entry_that_cannot_be_created_does_not_stop_the_copy() {
    let (archive, dir) = (sample(), TestDir::new());
    fs::create_dir(dir.copy()).expect("made");
    let (background, running) = {
        let background = Arc::new(open(&dir, this_boot_id()));
        // Interferes with a non-empty directory, which the copy does not replace.
        let taken = dir.path("two");
        let volume = archive.volume();
        let task = background.build_task(&archive.index, Ino::ROOT, volume, &Arc::default());
        drop(task.expect("empty"));
        fs::create_dir_all(taken.join("mine")).expect("made");
        let volume = archive.volume();
        let index = LazyIndex::new(Arc::clone(&archive.index));
        let running = background.start(&index, Ino::ROOT, volume, &Arc::default());
        (background, running.expect("ours"))
    };
    let progress = wait_until_finished(&background);
    assert_eq!(progress.state, CopyState::Incomplete);
    assert_eq!((progress.files, progress.failures), (3, 1));
    assert!(dir.path("two/mine").is_dir());
    assert!(!background.is_complete(ino(&archive, "two")));
    drop(running);
}

// Promises: copy-order
#[test]
fn requested_file_is_copied_before_its_turn() {
    let names: Vec<_> = (0..2000).map(|number| format!("{number:04}")).collect();
    let members = names
        .iter()
        .map(|name| test_support::file(name.as_bytes(), b"x"));
    let (archive, dir) = (Archive::new(members.collect()), TestDir::new());
    let background = Arc::new(open(&dir, this_boot_id()));
    let task = background.build_task(&archive.index, Ino::ROOT, archive.volume(), &Arc::default());
    let task = Arc::new(task.expect("empty"));
    assert!(background.task.set(Arc::clone(&task)).is_ok());
    let last = ino(&archive, "1999");
    background.prioritize(last);
    background.prioritize(last);
    task.run();
    let reads = archive.reads.lock();
    assert_eq!(reads.len(), 2000);
    let position = reads.iter().position(|&read| read == last);
    assert!(
        position.is_some_and(|position| position < 1000),
        "{position:?}"
    );
}

#[test]
fn batches_cover_every_entry_once() {
    let names: Vec<_> = (0..1000).map(|number| format!("{number:04}")).collect();
    let files = names
        .iter()
        .map(|name| test_support::file(name.as_bytes(), b"x"));
    let links = (0..300).map(|number| {
        let kind = MemberKind::HardLink(b"0255".to_vec());
        let name = format!("l{number}");
        let member = test_support::member(name.as_bytes(), kind);
        (member, &b""[..])
    });
    let archive = Archive::new(files.chain(links).collect());
    let plan = CopyPlan::new(&archive.index, Ino::ROOT);
    let mut next = 0;
    let mut seen = Vec::new();
    loop {
        let batch = plan.batch(&archive.index, next);
        if batch.is_empty() {
            break;
        }
        assert_eq!(batch.start, next);
        let mut position = batch.start;
        while position < batch.end {
            let names = plan.names_at(position);
            seen.push(names[0].ino.0);
            assert_eq!(plan.names_of(names[0].ino), names);
            position += names.len();
        }
        assert_eq!(position, batch.end, "all names of its last entry");
        next = batch.end;
    }
    assert!(seen.is_sorted_by(|one, other| one < other));
    assert_eq!(seen.len(), 1000);
}
