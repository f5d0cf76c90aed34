//! Promises of docs/semantics.md that concern the tree as all verbs show it, also where GNU tar
//! makes another one.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A member as a ustar record with its payload.
fn member(kind: u8, name: &str, target: &str, content: &[u8]) -> Vec<u8> {
    let mut record = [0; 512];
    let mut put = |offset: usize, bytes: &[u8]| {
        let field = record.get_mut(offset..offset + bytes.len());
        field.expect("inside").copy_from_slice(bytes);
    };
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{:011o}\0", content.len()).as_bytes());
    put(136, b"00000001750\0");
    put(148, b"        ");
    put(156, &[kind]);
    put(157, target.as_bytes());
    put(257, b"ustar\x0000");
    let sum: u32 = record.iter().map(|&byte| u32::from(byte)).sum();
    let sum = format!("{sum:06o}\0 ");
    let field = record.get_mut(148..156).expect("inside");
    field.copy_from_slice(sum.as_bytes());
    let padding = vec![0; content.len().next_multiple_of(512) - content.len()];
    [&record[..], content, &padding].concat()
}

fn file(name: &str, content: impl AsRef<[u8]>) -> Vec<u8> {
    member(b'0', name, "", content.as_ref())
}

fn directory(name: &str) -> Vec<u8> {
    member(b'5', name, "", b"")
}

fn link(name: &str, target: &str) -> Vec<u8> {
    member(b'2', name, target, b"")
}

fn hard_link(name: &str, target: &str) -> Vec<u8> {
    member(b'1', name, target, b"")
}

fn archive(members: &[Vec<u8>]) -> Vec<u8> {
    [members.concat(), vec![0; 1024]].concat()
}

/// A directory for files, the cache and what is extracted.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        fs::create_dir(place.path("out")).expect("a directory");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn with(members: &[Vec<u8>]) -> Self {
        let place = Self::new();
        fs::write(place.path("a.tar"), archive(members)).expect("written");
        place
    }

    fn tarfs(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tarfs"));
        command
            .args(arguments)
            .current_dir(self.0.path())
            .env("TARFS_CACHE_DIR", self.path("cache"));
        command.output().expect("started")
    }

    /// What `ls` lists.
    fn listed(&self) -> BTreeSet<String> {
        let output = self.tarfs(&["ls", "-R", "a.tar"]);
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().map(str::to_owned).collect()
    }

    /// What `materialize` leaves.
    fn extracted(&self) -> BTreeSet<String> {
        self.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
        let mut paths = BTreeSet::new();
        paths_below(&self.path("out"), "", &mut paths);
        paths
    }
}

fn paths_below(directory: &Path, prefix: &str, paths: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).expect("readable") {
        let entry = entry.expect("readable");
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().expect("known").is_dir() {
            paths_below(&entry.path(), &format!("{path}/"), paths);
        }
        paths.insert(path);
    }
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn listing_and_extraction_show_the_same_tree() {
    let cases: [(&[Vec<u8>], &[&str]); 8] = [
        (
            &[link("l", "x/y"), file("l/f", "")],
            &["l", "x", "x/y", "x/y/f"],
        ),
        (
            &[
                directory("d"),
                directory("e"),
                link("d/l", "../e"),
                file("d/l/f", ""),
            ],
            &["d", "d/l", "e", "e/f"],
        ),
        (&[link("l", "../out"), file("l/f", "")], &["l"]),
        (
            &[directory("d"), link("l", "d"), directory("l/.")],
            &["d", "l"],
        ),
        (&[file("a/../../b", ""), file("/c", "")], &["c"]),
        (&[hard_link("l", "t"), file("t", "")], &["l", "t"]),
        (&[hard_link("l", "nowhere"), file("t", "")], &["t"]),
        (&[file("f", ""), file("f/g", "")], &["f"]),
    ];
    for (members, paths) in cases {
        let place = Place::with(members);
        let expected: BTreeSet<String> = paths.iter().map(|&path| path.to_owned()).collect();
        assert_eq!(place.listed(), expected);
        assert_eq!(place.extracted(), expected);
    }
    let place = Place::with(&[directory("d"), link("l", "d"), directory("l/.")]);
    place.extracted();
    assert!(
        fs::symlink_metadata(place.path("out/l"))
            .expect("there")
            .is_dir()
    );
}

#[test]
fn implied_directories_are_the_same_in_every_listing() {
    let place = Place::with(&[file("a/b/c", "")]);
    let output = place.tarfs(&["ls", "-l", "a.tar"]);
    let line = "drwxr-xr-x 3 0 0 0 1970-01-01 00:16:40 a\n";
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        line,
        "{}",
        told(&output)
    );
    place.extracted();
    let made = fs::metadata(place.path("out/a")).expect("there");
    assert!(made.mtime() > 1_000_000_000, "made now");
}

#[test]
fn a_file_on_the_way_fails_its_member_only() {
    let place = Place::with(&[file("f", ""), file("f/g", ""), file("h", "")]);
    let output = place.tarfs(&["materialize", "-q", "a.tar", "-C", "out"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(told(&output).contains("f/g: refused"), "{}", told(&output));
    assert!(place.path("out/h").exists());
    let output = place.tarfs(&["index", "-q", "a.tar"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(told(&output).contains("1 members"), "{}", told(&output));
}
