//! Stacked layers: their members, a place with their files, and the trees there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Output;

use rustix::fs::{major, minor};

use super::fixture::TestMount;
use super::program::stderr_text;
use super::raw::{Archive, Header};

/// A member of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// A directory with this mode.
    Directory(&'static str, u32),
    /// A file with this content.
    File(&'static str, &'static str),
    /// A symbolic link with this target.
    Link(&'static str, &'static str),
    /// A hard link to this path.
    Hard(&'static str, &'static str),
    /// A character device with these numbers.
    Device(&'static str, u32, u32),
    /// A directory with an extended attribute.
    Marked(&'static str, &'static str),
}
use Step::{Device, Directory, File, Hard, Link, Marked};

pub(crate) fn packed(steps: &[Step]) -> Vec<u8> {
    let add = |archive: Archive, step: &Step| match *step {
        Directory(name, mode) => archive.add(Header::new(name, b'5').mode(mode.into()), ""),
        File(name, content) if name.len() > 100 => archive.long(b'L', name).file("long", content),
        File(name, content) => archive.file(name, content),
        Link(name, target) => archive.symlink(name, target),
        Hard(name, target) => archive.hard_link(name, target),
        Device(name, major, minor) => archive.add(
            Header::new(name, b'3').device(major.into(), minor.into()),
            "",
        ),
        Marked(name, key) => archive
            .pax(&[(format!("SCHILY.xattr.{key}"), "y")])
            .directory(name),
    };
    steps.iter().fold(Archive::new(), add).end()
}

/// Kind and other names of the entry at each path.
pub(crate) type ObservedTree = BTreeMap<String, String>;

/// Description of an entry, with its inode number and link count.
pub(crate) type FoundEntry = (String, Option<(u64, u64)>);

/// The tree below `root` in the model's notation.
pub(crate) fn seen(root: &Path) -> ObservedTree {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).expect("listed") {
            let path = entry.expect("listed").path();
            let stat = path.symlink_metadata().expect("there");
            let kind = stat.file_type();
            let mode = stat.mode() & 0o7777;
            let text = if kind.is_dir() {
                pending.push(path.clone());
                format!("d {mode:o}")
            } else if kind.is_symlink() {
                format!("l {}", fs::read_link(&path).expect("a link").display())
            } else if kind.is_char_device() {
                format!("c {},{}", major(stat.rdev()), minor(stat.rdev()))
            } else {
                format!("f {}", fs::read_to_string(&path).expect("read"))
            };
            let name = path.strip_prefix(root).expect("below");
            let name = name.to_str().expect("UTF-8").to_owned();
            let inode = (!kind.is_dir()).then(|| (stat.ino(), stat.nlink()));
            found.insert(name, (text, inode));
        }
    }
    let leader = |inode: u64| {
        let is_same = |(_, (_, other)): &(&String, &FoundEntry)| {
            other.is_some_and(|(other, _)| other == inode)
        };
        found.iter().find(is_same).map(|(path, _)| path.clone())
    };
    let line = |(path, (text, inode)): (&String, &FoundEntry)| {
        let text = match inode {
            Some((inode, links)) => {
                format!("{text} x{links} ={}", leader(*inode).unwrap_or_default())
            }
            None => text.clone(),
        };
        (path.clone(), text)
    };
    found.iter().map(line).collect()
}

/// Files with layers, and directories to mount and write them.
pub(crate) struct Layers {
    pub(crate) names: Vec<String>,
}

pub(crate) type Place = TestMount<Layers>;

impl Place {
    pub(crate) fn with_layers(layers: &[Vec<u8>]) -> Self {
        let names = (0..layers.len()).map(|number| format!("{number}.tar"));
        let names = names.collect();
        let place = TestMount::with(&["out"], Layers { names });
        for (name, layer) in place.names.iter().zip(layers) {
            place.put(name, layer);
        }
        place
    }

    pub(crate) fn of_steps(layers: &[Vec<Step>]) -> Self {
        let packed: Vec<_> = layers.iter().map(|layer| packed(layer)).collect();
        Self::with_layers(&packed)
    }

    /// Runs `verb` on the layers.
    pub(crate) fn run(&self, verb: &[&str], more: &[&str]) -> Output {
        let (bottom, above) = self.names.split_first().expect("a layer");
        let mut words = verb.to_vec();
        for layer in above {
            words.extend(["--layer", layer]);
        }
        words.push(bottom);
        words.extend(more);
        self.tarfs(&words)
    }

    /// Calls `look` on a mount.
    pub(crate) fn with_mount<T>(&self, flags: &[&str], look: impl FnOnce(&Path) -> T) -> T {
        let verb = [&["mount"], flags].concat();
        let output = self.run(&verb, &["mnt"]);
        assert!(output.status.success(), "{}", stderr_text(&output));
        let found = look(&self.path("mnt"));
        self.umount();
        found
    }

    /// Writes to an empty directory. Returns the warnings.
    pub(crate) fn write(&self, flags: &[&str]) -> String {
        let out = self.path("out");
        fs::remove_dir_all(&out).expect("there");
        fs::create_dir(&out).expect("made");
        let verb = [&["materialize", "-C", "out"], flags].concat();
        stderr_text(&self.run(&verb, &[]))
    }

    /// Writes to an empty directory. Returns the tree and the warnings.
    pub(crate) fn materialize(&self, flags: &[&str]) -> (ObservedTree, String) {
        let complaints = self.write(flags);
        (seen(&self.path("out")), complaints)
    }

    /// The listed paths.
    pub(crate) fn listed(&self, flags: &[&str]) -> Vec<String> {
        let verb = [&["ls", "-RA"], flags].concat();
        let output = self.run(&verb, &[]);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let mut paths: Vec<_> = text.lines().map(str::to_owned).collect();
        paths.sort_unstable();
        paths
    }
}

/// A layer with every kind of entry.
pub(crate) fn bottom() -> Vec<Step> {
    vec![
        Directory("d", 0o750),
        File("d/x", "below"),
        File("d/y", "below"),
        Directory("d/sub", 0o700),
        File("d/sub/deep", "below"),
        File("f", "below"),
        Hard("g", "f"),
        Link("l", "d"),
    ]
}
