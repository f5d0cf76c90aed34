//! Places to which malicious archives are written, and the trees there.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::fixture::TestDir;

/// Memory flag of each run.
pub(crate) const MEMORY: &str = "--memory=32MiB";

/// Limit of the peak memory of each run. The index is small here.
pub(crate) const MOST_BYTES: u64 = (32 + 64) << 20;

/// A directory for one case. Each program has a `root` to write to, with a neighbour.
pub(crate) struct Roots;

pub(crate) type Place = TestDir<Roots>;

impl Place {
    pub(crate) fn create() -> Self {
        let place = TestDir::with(&["gnu", "own"], Roots);
        for program in ["gnu", "own"] {
            let root = place.path(program);
            fs::create_dir(root.join("root")).expect("fresh");
            fs::create_dir(root.join("decoy")).expect("fresh");
            fs::write(root.join("decoy/secret"), "secret").expect("space");
        }
        place
    }

    /// Like [`Self::create`], with the archive `a`.
    pub(crate) fn with_archive(archive: &[u8]) -> Self {
        let place = Self::create();
        place.put("a", archive);
        place
    }

    pub(crate) fn root_of(&self, program: &str) -> PathBuf {
        self.path(program).join("root")
    }

    /// All entries around the roots, with their change times.
    pub(crate) fn around(&self, program: &str) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for (path, mut line) in walk(&self.path(program)) {
            let inside = path.starts_with("root");
            if !inside {
                let status = fs::symlink_metadata(self.path(program).join(&path)).expect("seen");
                write!(line, " {} {}", status.ctime(), status.ctime_nsec()).expect("memory");
                lines.insert(line);
            }
        }
        lines
    }
}

/// Every path below a directory with its attributes, except mtimes of directories.
pub(crate) fn walk(root: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).expect("readable") {
            let path = entry.expect("readable").path();
            let status = fs::symlink_metadata(&path).expect("there");
            let relative = path.strip_prefix(root).expect("below").to_owned();
            let mut line = format!(
                "{} {:o} {}:{}",
                relative.as_os_str().as_bytes().escape_ascii(),
                status.mode(),
                status.uid(),
                status.gid()
            );
            if !status.is_dir() {
                let (links, size) = (status.nlink(), status.len());
                let time = (status.mtime(), status.mtime_nsec());
                write!(line, " {links} {size} {} {time:?}", status.rdev()).expect("memory");
            }
            if status.is_symlink() {
                write!(line, " -> {:?}", fs::read_link(&path)).expect("memory");
            } else if status.is_file() && status.len() < 1 << 24 {
                let hash = blake3::hash(&fs::read(&path).expect("readable"));
                write!(line, " {hash}").expect("memory");
            } else if status.is_dir() {
                pending.push(path);
            }
            found.push((relative, line));
        }
    }
    found
}

pub(crate) fn tree(root: &Path) -> BTreeSet<String> {
    walk(root).into_iter().map(|(_, line)| line).collect()
}

/// Packs bytes with a tool.
pub(crate) fn pack(tool: &[&str], plain: &[u8]) -> Vec<u8> {
    let (program, arguments) = tool.split_first().expect("a tool");
    let mut child = Command::new(program)
        .args(arguments)
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{tool:?} is needed: {error}"));
    let mut input = child.stdin.take().expect("piped");
    let output = std::thread::scope(|scope| {
        scope.spawn(move || input.write_all(plain).expect("it reads all"));
        child.wait_with_output().expect("it ends")
    });
    assert!(output.status.success(), "{tool:?}");
    output.stdout
}
