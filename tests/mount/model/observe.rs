//! Observed trees: of an index, or of a file system.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{lgetxattr, llistxattr};
use rustix::io::Errno;
use tarfs::archive::{Archive, Volume};
use tarfs::index::{Entry, EntryKind, Ino};
use xxhash_rust::xxh3::xxh3_64;

use super::member::Attributes;
use crate::support::walk::walk;

/// Kind, attributes and all paths of the inode, by path.
pub(super) type ObservedTree = BTreeMap<Vec<u8>, (ObservedKind, Attributes, Vec<Vec<u8>>)>;

/// Checksum of a file's bytes.
pub(super) type Sum = u64;

/// Checksum of bytes.
pub(super) fn sum(bytes: &[u8]) -> Sum {
    xxh3_64(bytes)
}

/// Observed kind of an entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ObservedKind {
    /// Length and checksum.
    File(u64, Sum),
    Directory,
    Symlink(Vec<u8>),
    Fifo,
}

/// The same with an inode number instead of the paths that share it.
type NumberedTree = BTreeMap<Vec<u8>, (ObservedKind, Attributes, u64)>;

/// Replaces inode numbers by paths. Removes the root if its attributes are unspecified.
fn shared(numbered: NumberedTree, has_root: bool) -> ObservedTree {
    let mut names: BTreeMap<u64, Vec<Vec<u8>>> = BTreeMap::new();
    for (path, (_, _, number)) in &numbered {
        names.entry(*number).or_default().push(path.clone());
    }
    numbered
        .into_iter()
        .filter(|(path, _)| has_root || !path.is_empty())
        .map(|(path, (thing, attributes, number))| {
            let names = names.get(&number).cloned().unwrap_or_default();
            (path, (thing, attributes, names))
        })
        .collect()
}

/// The tree of an index, with contents read through it.
pub(super) fn in_archive(archive: &Archive, has_root: bool) -> ObservedTree {
    let index = archive
        .complete_index()
        .expect("it is over")
        .into_tree()
        .expect("rows");
    let mut numbered = NumberedTree::new();
    let root = index.entry(Ino::ROOT).expect("always there");
    let walked = walk(&index, Ino::ROOT, true);
    let walked = walked.map(|(path, entry)| (path.as_bytes().to_vec(), entry));
    for (path, entry) in walked.chain([(Vec::new(), root)]) {
        let thing = match entry.kind() {
            EntryKind::File => {
                let bytes = content(archive, &entry);
                ObservedKind::File(entry.size(), sum(&bytes))
            }
            EntryKind::Directory => ObservedKind::Directory,
            EntryKind::Symlink(target) => ObservedKind::Symlink(target.to_vec()),
            EntryKind::Fifo => ObservedKind::Fifo,
            other => panic!("there are none: {other:?}"),
        };
        let mtime = entry.mtime();
        let attributes = Attributes {
            mode: entry.mode() & 0o7777,
            uid: entry.uid(),
            gid: entry.gid(),
            mtime: (mtime.seconds, mtime.nanoseconds),
            xattrs: entry
                .xattrs()
                .map(|(name, value)| (name.to_vec(), value.to_vec()))
                .collect(),
        };
        numbered.insert(path, (thing, attributes, entry.ino().0.into()));
    }
    shared(numbered, has_root)
}

fn content(archive: &Archive, entry: &Entry<'_>) -> Vec<u8> {
    let mut content = Vec::new();
    while (content.len() as u64) < entry.size() {
        let piece = archive.read_blocking(entry.ino(), content.len() as u64, 1 << 20);
        content.extend_from_slice(&piece.expect("it can be read"));
    }
    content
}

/// The tree below `root`, which may change during the walk.
pub(super) fn on_disk(root: &Path, has_root: bool) -> io::Result<ObservedTree> {
    let mut numbered = NumberedTree::new();
    let mut left = vec![Vec::new()];
    while let Some(path) = left.pop() {
        let place = root.join(OsStr::from_bytes(&path));
        let found = fs::symlink_metadata(&place)?;
        let kind = found.file_type();
        let thing = if kind.is_dir() {
            for entry in fs::read_dir(&place)? {
                let name = entry?.file_name().into_vec();
                left.push(if path.is_empty() {
                    name
                } else {
                    [&path[..], b"/", &name].concat()
                });
            }
            ObservedKind::Directory
        } else if kind.is_symlink() {
            ObservedKind::Symlink(fs::read_link(&place)?.into_os_string().into_vec())
        } else if kind.is_fifo() {
            ObservedKind::Fifo
        } else {
            let bytes = fs::read(&place)?;
            ObservedKind::File(found.len(), sum(&bytes))
        };
        let attributes = Attributes {
            mode: found.mode() & 0o7777,
            uid: found.uid(),
            gid: found.gid(),
            mtime: (
                found.mtime(),
                u32::try_from(found.mtime_nsec()).expect("less than a second"),
            ),
            xattrs: xattrs(&place)?,
        };
        let links = found.nlink();
        let number = found.ino();
        numbered.insert(path, (thing, attributes, number));
        let same = numbered.values().filter(|(.., other)| *other == number);
        assert!(kind.is_dir() || links >= same.count() as u64);
    }
    Ok(shared(numbered, has_root))
}

fn xattrs(path: &Path) -> io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut names = vec![0; 4096];
    let len = match llistxattr(path, &mut names) {
        Err(Errno::OPNOTSUPP) => 0,
        found => found?,
    };
    let names = names.get(..len).unwrap_or_default();
    let names = names
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 4096];
            let len = lgetxattr(path, OsStr::from_bytes(name), &mut value)?;
            value.truncate(len);
            Ok((name.to_vec(), value))
        })
        .collect()
}

/// Readable difference of two trees.
pub(super) fn difference(expected: &ObservedTree, found: &ObservedTree) -> String {
    let paths = expected.keys().chain(found.keys());
    let mut lines: Vec<String> = paths
        .filter(|&path| expected.get(path) != found.get(path))
        .map(|path| {
            format!(
                "'{}':\n  expected {:?}\n  found    {:?}\n",
                path.escape_ascii(),
                expected.get(path),
                found.get(path)
            )
        })
        .collect();
    lines.sort();
    lines.dedup();
    lines.concat()
}
