//! Copies of archives in memory, and what they read.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

use super::*;
use crate::base::extent::{Extent, Plain};
use crate::index::{Builder, Origin};
use crate::materialize::testing;
use crate::tar::{Kind as TarKind, Member, Segment};

/// An archive whose reads are counted.
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

    /// Reads of stored pieces, one after the other.
    fn read(&self) -> Read {
        let (index, contents) = (Arc::clone(&self.index), Arc::clone(&self.contents));
        let reads = Arc::clone(&self.reads);
        Arc::new(move |ino, offset, len| {
            lock(&reads).push(ino);
            let content = contents.get(&ino.0).expect("a file");
            let entry = index.entry(ino).expect("a file");
            let piece = entry.pieces(offset, 1).next().expect("stored");
            let first = entry.pieces(0, u64::MAX).next().expect("stored");
            let from = piece.plain.start().0 - first.plain.start().0 + offset - piece.offset;
            let from = usize::try_from(from).expect("small");
            Ok(Bytes::copy_from_slice(&content[from..from + len as usize]))
        })
    }

    fn start(&self, place: &Place) -> (Arc<Background>, Running) {
        let background = Background {
            boot: place.boot,
            ..Background::new(&place.copy()).expect("ours")
        };
        let background = Arc::new(background);
        let running = background
            .start(&self.index, Ino::ROOT, self.read(), &Arc::default())
            .expect("ours");
        (background, running)
    }

    /// Writes all, and says what had to be read for it.
    fn write(&self, place: &Place) -> (Progress, Vec<Ino>) {
        lock(&self.reads).clear();
        let (background, running) = self.start(place);
        let progress = settled(&background);
        drop(running);
        let mut reads = lock(&self.reads).clone();
        reads.sort_unstable();
        (progress, reads)
    }
}

struct Place {
    base: tempfile::TempDir,
    boot: u64,
}

impl Place {
    fn new() -> Self {
        let base = tempfile::tempdir().expect("a directory");
        Self { base, boot: 1 }
    }

    fn copy(&self) -> PathBuf {
        self.base.path().join("copy")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.copy().join(name)
    }
}

fn settled(background: &Background) -> Progress {
    let start = Instant::now();
    loop {
        let progress = background.progress();
        let is_over = matches!(
            progress.state,
            State::Complete | State::Incomplete | State::Stopped
        );
        if is_over || start.elapsed() > Duration::from_secs(20) {
            return progress;
        }
        std::thread::yield_now();
    }
}

fn sample() -> Archive {
    let mut sparse = testing::file(b"d/sparse", b"AAAABBBB");
    sparse.0.size = 1 << 20;
    let segment = |offset| Segment { offset, len: 4 };
    sparse.0.sparse = Some(vec![segment(4096), segment(1 << 19)]);
    Archive::new(vec![
        testing::file(b"d/one", b"first"),
        sparse,
        (
            testing::member(b"l", TarKind::HardLink(b"d/one".to_vec())),
            &[],
        ),
        (testing::member(b"s", TarKind::Symlink(b"d".to_vec())), &[]),
        testing::file(b"two", b"second"),
        testing::file(b"empty", b""),
    ])
}

fn ino(archive: &Archive, path: &str) -> Ino {
    let path = ArchivePath::sanitize(path.as_bytes()).path;
    archive.index.find(&path).expect("there").ino()
}

#[test]
fn a_copy_is_whole_and_a_second_run_reads_nothing() {
    let (archive, place) = (sample(), Place::new());
    let (progress, reads) = archive.write(&place);
    let expected = Progress {
        state: State::Complete,
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
    assert_eq!(fs::read(place.path("l")).expect("there"), b"first");
    assert_eq!(fs::read(place.path("s/one")).expect("there"), b"first");
    let status = fs::metadata(place.path("d/sparse")).expect("there");
    assert_eq!(status.size(), 1 << 20);
    assert!(status.blocks() * 512 < 1 << 19, "holes stay holes");
    let links = fs::metadata(place.path("l")).expect("there").nlink();
    assert_eq!(links, 2);
    let (progress, reads) = archive.write(&place);
    assert_eq!((progress, reads), (expected, vec![]));
}

#[test]
fn what_was_touched_since_is_written_again() {
    let (archive, place) = (sample(), Place::new());
    archive.write(&place);
    fs::write(place.path("two"), "SECOND").expect("written");
    fs::remove_file(place.path("s")).expect("there");
    fs::write(place.path("s"), "no link").expect("written");
    let (progress, reads) = archive.write(&place);
    assert_eq!(progress.state, State::Complete);
    assert_eq!(reads, [ino(&archive, "two")]);
    assert_eq!(fs::read(place.path("two")).expect("there"), b"second");
    assert!(place.path("s").is_symlink());
    // Another name changes no byte, but who can tell.
    fs::hard_link(place.path("d/one"), place.base.path().join("mine")).expect("made");
    let (_, reads) = archive.write(&place);
    assert_eq!(reads, [ino(&archive, "d/one")]);
    assert_eq!(fs::read(place.path("l")).expect("there"), b"first");
}

#[test]
fn after_a_start_of_the_system_only_contents_are_believed() {
    let (archive, mut place) = (sample(), Place::new());
    archive.write(&place);
    let two = place.path("two");
    let before = fs::metadata(&two).expect("there");
    place.boot = 2;
    let (progress, reads) = archive.write(&place);
    assert_eq!(progress.state, State::Complete);
    let sparse = ino(&archive, "d/sparse");
    assert_eq!(reads, [sparse, sparse], "holes may hide what is lost");
    let (_, reads) = archive.write(&place);
    assert_eq!(reads, [], "it is written down anew");
    // What lost power may do: all that can be seen of it is right but the content.
    place.boot = 3;
    fs::write(&two, "SECOND").expect("written");
    let file = File::options().write(true).open(&two).expect("ours");
    file.set_modified(before.modified().expect("a time"))
        .expect("set");
    let work = {
        let background = Background {
            boot: 2,
            ..Background::new(&place.copy()).expect("ours")
        };
        let stats = Arc::default();
        let work = background.work(&archive.index, Ino::ROOT, archive.read(), &stats);
        work.expect("ours")
    };
    let number = ino(&archive, "two").0;
    let record = work.ledger.get(number).expect("written down");
    let stat = fstat(&file).expect("open");
    work.ledger
        .put(number, &stat, record.hash)
        .expect("written");
    drop(work);
    let (progress, reads) = archive.write(&place);
    assert_eq!(progress.state, State::Complete);
    let expected = [sparse, sparse, ino(&archive, "two")];
    assert_eq!(reads, expected);
    assert_eq!(fs::read(two).expect("there"), b"second");
}

#[test]
fn a_copy_is_opened_only_while_it_is_what_was_written() {
    let (archive, place) = (sample(), Place::new());
    let (background, running) = archive.start(&place);
    assert_eq!(settled(&background).state, State::Complete);
    let two = ino(&archive, "two");
    assert!(background.has(two) && background.open_copy(two).is_some());
    fs::write(place.path("two"), "SECOND").expect("written");
    assert!(background.open_copy(two).is_none());
    assert!(!background.has(two));
    let progress = background.progress();
    assert_eq!(
        (progress.state, progress.files, progress.failures),
        (State::Incomplete, 3, 1)
    );
    assert!(progress.note.is_some_and(|note| note.starts_with("two: ")));
    assert!(background.open_copy(ino(&archive, "d/one")).is_some());
    drop(running);
}

#[test]
fn an_entry_that_cannot_be_made_leaves_the_others() {
    let (archive, place) = (sample(), Place::new());
    fs::create_dir(place.copy()).expect("made");
    let (background, running) = {
        let background = Arc::new(Background::new(&place.copy()).expect("ours"));
        // Comes between: a directory with something in it, which nothing replaces.
        let taken = place.path("two");
        let read = archive.read();
        let work = background.work(&archive.index, Ino::ROOT, read, &Arc::default());
        drop(work.expect("empty"));
        fs::create_dir_all(taken.join("mine")).expect("made");
        let read = archive.read();
        let running = background.start(&archive.index, Ino::ROOT, read, &Arc::default());
        (background, running.expect("ours"))
    };
    let progress = settled(&background);
    assert_eq!(progress.state, State::Incomplete);
    assert_eq!((progress.files, progress.failures), (3, 1));
    assert!(place.path("two/mine").is_dir());
    assert!(!background.has(ino(&archive, "two")));
    drop(running);
}

#[test]
fn a_file_that_is_asked_for_comes_before_its_turn() {
    let names: Vec<_> = (0..2000).map(|number| format!("{number:04}")).collect();
    let members = names
        .iter()
        .map(|name| testing::file(name.as_bytes(), b"x"));
    let (archive, place) = (Archive::new(members.collect()), Place::new());
    let background = Arc::new(Background::new(&place.copy()).expect("ours"));
    let work = background.work(&archive.index, Ino::ROOT, archive.read(), &Arc::default());
    assert!(background.work.set(work.expect("empty")).is_ok());
    let last = ino(&archive, "1999");
    background.wanted(last);
    background.wanted(last);
    let work = background.work.get().expect("set");
    background.run(work);
    let reads = lock(&archive.reads);
    assert_eq!(reads.len(), 2000);
    let place = reads.iter().position(|&read| read == last);
    assert!(place.is_some_and(|place| place < 1000), "{place:?}");
}

#[test]
fn batches_cover_every_entry_once() {
    let names: Vec<_> = (0..1000).map(|number| format!("{number:04}")).collect();
    let files = names
        .iter()
        .map(|name| testing::file(name.as_bytes(), b"x"));
    let links = (0..300).map(|number| {
        let kind = TarKind::HardLink(b"0255".to_vec());
        let name = format!("l{number}");
        let member = testing::member(name.as_bytes(), kind);
        (member, &b""[..])
    });
    let archive = Archive::new(files.chain(links).collect());
    let plan = Plan::new(&archive.index, Ino::ROOT);
    let mut next = 0;
    let mut seen = Vec::new();
    loop {
        let batch = plan.batch(&archive.index, next);
        if batch.is_empty() {
            break;
        }
        assert_eq!(batch.start, next);
        let mut place = batch.start;
        while place < batch.end {
            let names = plan.names_at(place);
            seen.push(names[0].ino.0);
            assert_eq!(plan.names_of(names[0].ino), names);
            place += names.len();
        }
        assert_eq!(place, batch.end, "all names of its last entry");
        next = batch.end;
    }
    assert!(seen.is_sorted_by(|one, other| one < other));
    assert_eq!(seen.len(), 1000);
}
