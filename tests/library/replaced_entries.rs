//! Shards of archives in which later members replace earlier ones, by indexes in all their forms.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::io::Cursor;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use bytes::Bytes;
use tarfs::archive::scan::Sink;
use tarfs::archive::{Archive, OpenOptions, Volume};
use tarfs::index::format::framed;
use tarfs::index::{EntryKind, Index, Ino, ShardPlan};
use tarfs::materialize::read_entries;
use tarfs::tar::{Member, MemberKind};

use crate::support::archive_env::{TestEnv, scan_options};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::raw;
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};

const COUNTS: [u32; 3] = [2, 7, 64];

/// Entries by path.
type Tree = BTreeMap<String, Entry>;

#[derive(Clone, PartialEq, Eq, Debug)]
enum Entry {
    File(Vec<u8>),
    Link(Vec<u8>),
    Directory,
    Other,
}

/// Collects members into a tree, in which no path may be twice.
#[derive(Default)]
struct Collector {
    tree: Tree,
    current: String,
}

impl Sink for Collector {
    type Error = Infallible;

    fn member(&mut self, member: Member) -> Result<(), Infallible> {
        let name = String::from_utf8(member.name).expect("UTF-8");
        let name = name.trim_end_matches('/').to_owned();
        let entry = match member.kind {
            MemberKind::File => Entry::File(Vec::new()),
            MemberKind::Symlink(target) => Entry::Link(target),
            MemberKind::Directory => Entry::Directory,
            MemberKind::HardLink(target) => {
                let target = String::from_utf8(target).expect("UTF-8");
                self.tree.get(&target).expect("in the same shard").clone()
            }
            _ => Entry::Other,
        };
        let before = self.tree.insert(name.clone(), entry);
        assert!(before.is_none(), "{name} is there twice");
        self.current = name;
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Infallible> {
        let Some(Entry::File(content)) = self.tree.get_mut(&self.current) else {
            panic!("{} has a content", self.current);
        };
        content.extend_from_slice(&bytes);
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn damage(&mut self, _offset: tarfs::Plain, text: &str) {
        panic!("{text}");
    }
}

/// The tree that `archive` shows, perhaps without implied directories.
fn shown(archive: &Archive, index: &Index, with_implied: bool) -> Tree {
    let mut tree = Tree::new();
    let mut pending = vec![(Ino::ROOT, ".".to_owned())];
    while let Some((ino, path)) = pending.pop() {
        let entry = index.entry(ino).expect("an entry");
        let found = match entry.kind() {
            EntryKind::File => {
                let len = u32::try_from(entry.size()).expect("small");
                let bytes = archive.read_blocking(ino, 0, len).expect("readable");
                Entry::File(bytes.to_vec())
            }
            EntryKind::Symlink(target) => Entry::Link(target.to_vec()),
            EntryKind::Directory => {
                for child in index.children(ino, 0) {
                    let name = str::from_utf8(child.name).expect("UTF-8");
                    let below = if path == "." { "" } else { &format!("{path}/") };
                    pending.push((child.ino, format!("{below}{name}")));
                }
                Entry::Directory
            }
            _ => Entry::Other,
        };
        if with_implied || !entry.is_implied() {
            tree.insert(path, found);
        }
    }
    tree
}

/// The tree below `top`, without its top.
fn on_disk(top: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut pending = vec![top.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            let kind = fs::symlink_metadata(&path).expect("there").file_type();
            let found = if kind.is_symlink() {
                let target = fs::read_link(&path).expect("a link");
                Entry::Link(target.into_os_string().into_encoded_bytes())
            } else if kind.is_dir() {
                pending.push(path.clone());
                Entry::Directory
            } else if kind.is_file() {
                Entry::File(fs::read(&path).expect("readable"))
            } else {
                Entry::Other
            };
            let name = path.strip_prefix(top).expect("below");
            tree.insert(name.display().to_string(), found);
        }
    }
    tree
}

/// Each path with its type.
fn names_of(tree: &Tree) -> Vec<String> {
    let line = |(path, entry): (&String, &Entry)| match entry {
        Entry::File(content) => format!("{path} {}", content.len()),
        entry => format!("{path} {entry:?}"),
    };
    tree.iter().map(line).collect()
}

/// Runs GNU tar in `directory`. Returns its output, and whether it succeeded.
fn tar(directory: &Path, words: &[&str]) -> (String, bool) {
    let mut tar = Command::new("tar");
    tar.arg("-C")
        .arg(directory)
        .args(words)
        .stderr(Stdio::null());
    let ended = tar.output().expect("GNU tar");
    let output = String::from_utf8(ended.stdout).expect("UTF-8");
    (output, ended.status.success())
}

fn pick<'a>(names: &[&'a str], random: &mut Rng) -> &'a str {
    let number = usize::try_from(random.below(names.len() as u64)).expect("small");
    names.get(number).copied().expect("one of them")
}

const TOPS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// A path of few names, so that many members have the same.
fn path(random: &mut Rng) -> String {
    let mut path = pick(&TOPS, random).to_owned();
    while random.below(3) == 0 {
        path = format!("{path}/{}", pick(&TOPS, random));
    }
    path
}

fn content(random: &mut Rng) -> Vec<u8> {
    let len = match random.below(4) {
        0 => 0,
        1 => random.below(60_000),
        _ => random.below(3000),
    };
    random.bytes(usize::try_from(len).expect("small"))
}

/// Puts another entry at a random path below `top`, and returns the path.
fn change(top: &Path, random: &mut Rng) -> Option<String> {
    let name = path(random);
    let place = top.join(&name);
    let parent = place.parent().expect("below top");
    fs::create_dir_all(parent).ok()?;
    let other = top.join(path(random));
    if fs::symlink_metadata(&place).is_ok_and(|it| it.is_dir()) {
        fs::remove_dir_all(&place).expect("ours");
    } else {
        drop(fs::remove_file(&place));
    }
    // A link on the way may have been the entry that was there.
    let made = match random.below(6) {
        0 => fs::create_dir(&place),
        1 => symlink(".", &place),
        2 if other.is_file() => fs::hard_link(other, &place),
        _ => fs::write(&place, content(random)),
    };
    made.is_ok().then_some(name)
}

/// An archive that GNU tar has appended to, updated, and deleted from, and the tree that it unpacks without an error.
fn changed_by_tar(random: &mut Rng) -> (Vec<u8>, Option<Tree>) {
    let place = tempfile::tempdir().expect("a directory");
    let (top, out) = (place.path().join("top"), place.path().join("out"));
    fs::create_dir(&top).expect("free");
    fs::create_dir(&out).expect("free");
    for _ in 0..25 {
        change(&top, random);
    }
    let archive = place.path().join("a.tar");
    let archive = archive.to_str().expect("UTF-8");
    tar(&top, &["-cf", archive, "."]);
    for _ in 0..=random.below(4) {
        let changed: Vec<_> = (0..6).filter_map(|_| change(&top, random)).collect();
        let there = changed
            .iter()
            .filter(|name| fs::symlink_metadata(top.join(name)).is_ok());
        let names: Vec<_> = there.map(|name| format!("./{name}")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        match random.below(3) {
            0 => tar(&top, &[&["-rf", archive][..], &names].concat()),
            1 => tar(&top, &["-uf", archive, "."]),
            _ => {
                let (listed, _) = tar(&top, &["-tf", archive]);
                let listed = listed.lines().filter(|name| !name.ends_with('/'));
                let listed: Vec<_> = listed.collect();
                if listed.is_empty() {
                    continue;
                }
                tar(&top, &["--delete", "-f", archive, pick(&listed, random)])
            }
        };
    }
    let (_, is_whole) = tar(&out, &["-xf", archive]);
    let unpacked = is_whole.then(|| on_disk(&out));
    (fs::read(archive).expect("written"), unpacked)
}

/// An archive of members with few names.
fn made_by_hand(random: &mut Rng) -> Vec<u8> {
    let mut archive = raw::Archive::new();
    for _ in 0..20 + random.below(60) {
        let name = path(random);
        archive = match random.below(8) {
            0 | 1 => archive.directory(&format!("{name}/")),
            2 => archive.symlink(&name, pick(&[".", ".", "..", "a", "b/c", "../d"], random)),
            3 => archive.hard_link(&name, &path(random)),
            4 => archive.fifo(&name),
            _ => archive.file(&name, content(random)),
        };
    }
    archive.end()
}

/// The archive with an index in each form: of its own scan, saved, and framed as published ones are.
fn in_all_forms(env: &TestEnv, packed: &Bytes) -> [Archive; 3] {
    let open = |options: &OpenOptions| env.open_bytes(packed.clone(), options).expect("opened");
    let fresh = open(&env.options_without_disk_cache());
    let index = fresh
        .complete_index()
        .expect("complete")
        .into_tree()
        .expect("rows");
    let mut framed = Cursor::new(Vec::new());
    let locator = &index.origin().locator;
    framed::write(&index, locator, framed::Packing::Small, &mut framed).expect("written");
    let path = env.cache.path().join("framed");
    fs::write(&path, framed.into_inner()).expect("written");
    let saved = open(&env.options_without_disk_cache());
    let framed = open(&OpenOptions {
        index_file: Some(path),
        ..env.options_without_disk_cache()
    });
    [fresh, saved, framed]
}

/// Reads all shards, each by an index in another form, and returns their members.
fn union(archives: &[Archive; 3], count: u32, random: &mut Rng) -> Tree {
    let forms = archives.iter().map(|archive| {
        let index = archive
            .complete_index()
            .expect("complete")
            .into_tree()
            .expect("rows");
        index.load_all_rows().expect("loaded");
        let plan = ShardPlan::new(&index, count);
        (archive, index, plan)
    });
    let forms: Vec<_> = forms.collect();
    let mut union = Collector::default();
    for number in 1..=count {
        let form = usize::try_from(random.below(3)).expect("small");
        let (archive, index, plan) = forms.get(form).expect("one of three");
        let read = read_entries(*archive, index, plan.entries(number), &mut union);
        assert_eq!(read.expect("read"), 0, "damaged files");
    }
    union.tree
}

// Promises: shard-entries, shard-cuts
#[test]
fn shards_of_mixed_indexes_are_the_tree_whatever_was_replaced() {
    for round in 0..rounds(16) {
        let mut random = Rng::new(seed() * 1_000_003 + round);
        let (tar, unpacked) = if random.below(2) == 0 {
            changed_by_tar(&mut random)
        } else {
            (made_by_hand(&mut random), None)
        };
        let packings = [Packing::Plain, Packing::Gzip, Packing::ZstdFrames];
        let packing = usize::try_from(random.below(3)).expect("small");
        let packing = packings.get(packing).expect("one of three");
        let env = TestEnv::new();
        let packed = packing.pack(&Bytes::from(tar));
        let archives = in_all_forms(&env, &packed);
        let index = archives[0]
            .complete_index()
            .expect("complete")
            .into_tree()
            .expect("rows");
        let members = shown(&archives[0], &index, false);
        let mut whole = shown(&archives[0], &index, true);
        whole.remove(".");
        let out = tempfile::tempdir().expect("a directory");
        env.serve(Resource::new(packed).etag("\"1\""));
        env.materialize(&scan_options(), out.path());
        assert!(
            on_disk(out.path()) == whole,
            "round {round}: written {:?} instead of {:?}",
            names_of(&on_disk(out.path())),
            names_of(&whole)
        );
        for count in COUNTS {
            let union = union(&archives, count, &mut random);
            assert!(
                union == members,
                "round {round}, {count} shards: {:?} instead of {:?}",
                union.keys(),
                members.keys()
            );
        }
        if let Some(unpacked) = unpacked {
            assert_eq!(names_of(&whole), names_of(&unpacked), "round {round}");
            assert!(
                whole == unpacked,
                "round {round}: not as GNU tar unpacks it"
            );
        }
    }
}
