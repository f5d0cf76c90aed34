use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use proptest::prelude::*;

use super::UNPLACED_DIRECTORY;
use crate::index::MemoryLimit;
use crate::index::{Builder, Entry, EntryKind, Index, Ino, Options, Origin};
use crate::layers::{WhiteoutFormat, merge};
use crate::materialize::test_support::{feed, member};
use crate::materialize::{Materializer, Summary};
use crate::tar::Member;
use crate::tar::{self, Timestamp};

/// For each path: kind with size or target, mtime, owner and group, link count.
/// Later times of directories are those of writing.
const LATEST_MEMBER_TIME: i64 = 1_600_000_000;

/// Type and attributes, time if a member gives one, owner, and number of links, by path.
type TreeListing = BTreeMap<String, (String, Option<i64>, (u32, u32), u64)>;

fn list_index(index: &Index) -> TreeListing {
    let mut listing = TreeListing::new();
    let root = index.entry(Ino::ROOT).expect("there");
    let own = (
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let is_root = rustix::process::geteuid().is_root();
    let time = |entry: Entry<'_>| (!entry.is_implied()).then(|| entry.mtime().seconds);
    listing.insert(String::new(), ("d".to_owned(), time(root), own, 0));
    let mut pending = vec![(String::new(), Ino::ROOT)];
    while let Some((path, ino)) = pending.pop() {
        for child in index.children(ino, 0) {
            let name = std::str::from_utf8(child.name).expect("ASCII");
            let path = format!("{path}/{name}");
            let entry = index.entry(child.ino).expect("there");
            let links = entry.link_count().into();
            let (what, links) = match entry.kind() {
                EntryKind::Directory => (format!("d {:o}", entry.mode()), 0),
                EntryKind::File => (format!("f {}", entry.size()), links),
                EntryKind::Symlink(target) => (format!("l {}", target.escape_ascii()), links),
                _ => ("other".to_owned(), links),
            };
            if entry.kind() == EntryKind::Directory {
                pending.push((path.clone(), child.ino));
            }
            // Only root gives entries, implied directories included, to their owners.
            let owner = if is_root {
                (entry.uid(), entry.gid())
            } else {
                own
            };
            listing.insert(path, (what, time(entry), owner, links));
        }
    }
    listing
}

fn list_disk(root: &Path) -> TreeListing {
    let mut listing = TreeListing::new();
    let stat = fs::metadata(root).expect("there");
    let owner = (stat.uid(), stat.gid());
    let time = |stat: &fs::Metadata| {
        let is_given = !stat.is_dir() || stat.mtime() <= LATEST_MEMBER_TIME;
        is_given.then(|| stat.mtime())
    };
    listing.insert(String::new(), ("d".to_owned(), time(&stat), owner, 0));
    let mut pending = vec![(String::new(), root.to_owned())];
    while let Some((above, directory)) = pending.pop() {
        for entry in fs::read_dir(directory).expect("listed") {
            let entry = entry.expect("listed");
            let stat = entry.metadata().expect("there");
            let name = entry.file_name().into_string().expect("ASCII");
            let path = format!("{above}/{name}");
            let kind = stat.file_type();
            let (what, links) = if kind.is_dir() {
                pending.push((path.clone(), entry.path()));
                (format!("d {:o}", stat.mode() & 0o7777), 0)
            } else if kind.is_symlink() {
                let target = fs::read_link(entry.path()).expect("a link");
                (format!("l {}", target.display()), stat.nlink())
            } else if kind.is_char_device() {
                ("other".to_owned(), stat.nlink())
            } else {
                (format!("f {}", stat.len()), stat.nlink())
            };
            let owner = (stat.uid(), stat.gid());
            listing.insert(path, (what, time(&stat), owner, links));
        }
    }
    listing
}

fn build_index(layer: &[(Member, Vec<u8>)], whiteouts: WhiteoutFormat) -> Index {
    let mut builder = Builder::new(Options {
        whiteouts: Some(whiteouts),
        ..Options::default()
    });
    for (member, _) in layer {
        // The index lists refused members as problems.
        builder.add_member(member).ok();
    }
    builder.finish(Origin::default())
}

fn write_layers(
    layers: &[Vec<(Member, Vec<u8>)>],
    place: &Path,
    whiteouts: WhiteoutFormat,
) -> Summary {
    let mut options = crate::materialize::Options::for_this_user();
    options.same_permissions = true;
    options.writers = Some(2);
    let mut materializer =
        Materializer::new(place, options, std::sync::Arc::default()).expect("a directory");
    materializer.begin_layers(whiteouts);
    for layer in layers {
        materializer.begin_layer();
        let members = layer.iter();
        feed(
            &mut materializer,
            members.map(|(member, content)| (member.clone(), content.as_slice())),
        );
        materializer.end_layer().expect("nothing fatal");
    }
    materializer.finish().expect("nothing fatal")
}

#[derive(Clone, Debug)]
enum Step {
    File(String),
    Directory(String, u32),
    Symlink(String, String),
    Hard(String, String),
    Device(String),
    Marked(String),
}

/// Members with distinct contents and times.
fn members(layers: &[Vec<Step>]) -> Vec<Vec<(Member, Vec<u8>)>> {
    let mut count = 0;
    let mut one = |step: &Step| {
        count += 1;
        let plain = |name: &str, kind| Member {
            uid: count % 3,
            gid: count % 2,
            // Owners in layers are numbers, so these names have no effect.
            user: b"daemon".to_vec(),
            group: b"daemon".to_vec(),
            mtime: Timestamp {
                seconds: i64::from(count),
                nanoseconds: 0,
            },
            ..member(name.as_bytes(), kind)
        };
        let len = usize::try_from(count).expect("few");
        match step {
            Step::File(name) => {
                let (sized, content) = (plain(name, tar::MemberKind::File), vec![7; len]);
                let payload = crate::base::extent::Extent::with_len(
                    crate::base::extent::Plain(512),
                    len as u64,
                );
                let size = len as u64;
                (
                    Member {
                        payload,
                        size,
                        ..sized
                    },
                    content,
                )
            }
            Step::Directory(name, mode) => {
                let mode = *mode;
                (
                    Member {
                        mode,
                        ..plain(name, tar::MemberKind::Directory)
                    },
                    Vec::new(),
                )
            }
            Step::Symlink(name, target) => (
                plain(name, tar::MemberKind::Symlink(target.as_bytes().to_vec())),
                Vec::new(),
            ),
            Step::Hard(name, target) => (
                plain(name, tar::MemberKind::HardLink(target.as_bytes().to_vec())),
                Vec::new(),
            ),
            Step::Device(name) => (
                plain(name, tar::MemberKind::CharDevice(tar::Device::default())),
                Vec::new(),
            ),
            Step::Marked(name) => {
                let directory = plain(name, tar::MemberKind::Directory);
                let xattrs = vec![(b"user.overlay.opaque".to_vec(), b"y".to_vec())];
                (
                    Member {
                        mode: 0o755,
                        xattrs,
                        ..directory
                    },
                    Vec::new(),
                )
            }
        }
    };
    let mut one_layer = |layer: &Vec<Step>| layer.iter().map(&mut one).collect();
    layers.iter().map(&mut one_layer).collect()
}

fn layers() -> impl Strategy<Value = Vec<Vec<Step>>> {
    let path = || "[abc](/[abc]){0,2}";
    let step = prop_oneof![
        4 => path().prop_map(Step::File),
        2 => (path(), 0o700..=0o777_u32).prop_map(|(path, mode)| Step::Directory(path, mode)),
        1 => (path(), "(\\.\\./)?[abc](/[abc])?").prop_map(|(path, target)| Step::Symlink(path, target)),
        2 => (path(), path()).prop_map(|(path, target)| Step::Hard(path, target)),
        2 => "([abc]/){0,2}\\.wh\\.[abc]".prop_map(Step::File),
        1 => "([abc]/){0,2}\\.wh\\.\\.wh\\.\\.opq".prop_map(Step::File),
        1 => "([abc]/){0,2}\\.wh\\.[abc]/[abc]".prop_map(Step::File),
        2 => ("([abc]/){0,2}\\.wh\\.([abc]|\\.wh\\.(opq|aufs))", path())
            .prop_map(|(path, target)| Step::Hard(path, target)),
        1 => ("([abc]/){0,2}\\.wh\\.c/[abc]", path())
            .prop_map(|(path, target)| Step::Hard(path, target)),
        2 => ("([abc]/){0,2}\\.wh\\.[abc]", path(), "[abc]").prop_map(|(path, target, name)| {
            Step::Hard(path, format!("{target}/{name}"))
        }),
        1 => path().prop_map(Step::Device),
        1 => path().prop_map(Step::Marked),
    ];
    let layer = prop::collection::vec(step, 0..10);
    prop::collection::vec(layer, 1..4)
}

/// Checks that the tree on disk matches the merged index, and that the same entries are left out.
fn check_written_layers(
    steps: &[Vec<Step>],
    whiteouts: WhiteoutFormat,
) -> Result<(), TestCaseError> {
    let layers = members(steps);
    let indexes: Vec<_> = layers
        .iter()
        .map(|layer| build_index(layer, whiteouts))
        .collect();
    let indexes: Vec<_> = indexes.iter().collect();
    let merged = merge(&indexes, whiteouts, &MemoryLimit::none()).expect("few");
    let expected = list_index(&merged.index);
    let place = tempfile::tempdir().expect("a directory");
    let summary = write_layers(&layers, place.path(), whiteouts);
    let found = list_disk(place.path());
    prop_assert_eq!(found, expected, "{:#?}", summary.problems);
    prop_assert_eq!(
        summary.errors,
        merged.index.problem_count(),
        "{:#?}",
        summary.problems
    );
    Ok(())
}

/// Writes `a` and `b` as one layer. Calls `interfere` after each with the directory of unplaced files.
fn write_two_files(interfere: impl Fn(&Path, usize)) -> (Vec<String>, TreeListing) {
    let place = tempfile::tempdir().expect("a directory");
    let unplaced = place.path().join(UNPLACED_DIRECTORY);
    let mut options = crate::materialize::Options::for_this_user();
    options.writers = Some(1);
    let mut materializer =
        Materializer::new(place.path(), options, std::sync::Arc::default()).expect("opened");
    materializer.begin_layers(WhiteoutFormat::Oci);
    materializer.begin_layer();
    for (count, name) in [b"a", b"b"].into_iter().enumerate() {
        feed(
            &mut materializer,
            [crate::materialize::test_support::file(name, b"content")],
        );
        materializer.tree.destination.writers.wait_for_all();
        interfere(&unplaced, count);
    }
    materializer.end_layer().expect("nothing fatal");
    let summary = materializer.finish().expect("nothing fatal");
    let reported = summary.problems.iter().map(ToString::to_string);
    (reported.collect(), list_disk(place.path()))
}

#[test]
fn file_removed_before_it_is_placed_is_reported() {
    let (reported, listing) = write_two_files(|unplaced, count| {
        if count == 1 {
            fs::remove_file(unplaced.join("0-0/0-2")).expect("removed");
        }
    });
    assert_eq!(
        reported,
        ["a: cannot move the file to its place: No such file or directory (os error 2)"]
    );
    assert_eq!(listing.keys().collect::<Vec<_>>(), ["", "/b"]);
}

#[test]
fn file_that_cannot_be_created_is_reported_once() {
    let (reported, _) = write_two_files(|unplaced, count| {
        if count == 0 {
            fs::remove_dir_all(unplaced.join("0-0")).expect("removed");
        }
    });
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert!(
        reported[0].starts_with("b: cannot create the file"),
        "{reported:?}"
    );
    assert!(
        reported[1].starts_with("a: cannot move the file"),
        "{reported:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    // Promises: layer-written
    #[test]
    fn written_layers_equal_the_merged_index(steps in layers(), oci in any::<bool>()) {
        let whiteouts = if oci { WhiteoutFormat::Oci } else { WhiteoutFormat::Overlay };
        check_written_layers(&steps, whiteouts)?;
    }
}
