//! Promises of docs/semantics.md that concern the whole: one tree for all verbs, saved indexes,
//! spools, and what is refused.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use bytes::Bytes;
use tarfs::archive::{Archive, OpenError, OpenOptions, Spooling, scan};
use tarfs::base::path::ArchivePath;
use tarfs::base::stats::Stats;
use tarfs::source;
use tarfs::tar;
use tokio::runtime::{Builder, Runtime};

use crate::support::http::{Resource, Server};

/// Longer than all the memory that the archives here may use.
const LONG: usize = 40 << 20;

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

fn archive(members: &[Vec<u8>]) -> Bytes {
    [members.concat(), vec![0; 1024]].concat().into()
}

/// Bytes that cannot be packed, the same in every run.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()
    };
    (0..len.div_ceil(4))
        .flat_map(|_| next())
        .take(len)
        .collect()
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
        (&[file("a/../../b", ""), file("/c", "")], &["b", "c"]),
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

#[test]
fn exit_codes_are_0_2_and_64() {
    let place = Place::with(&[file("f", "")]);
    let code = |arguments: &[&str]| place.tarfs(arguments).status.code();
    assert_eq!(code(&["ls", "a.tar"]), Some(0));
    assert_eq!(code(&["ls", "missing.tar"]), Some(2));
    assert_eq!(code(&["ls", "a.tar", "missing"]), Some(2));
    assert_eq!(code(&["ls"]), Some(64));
    assert_eq!(code(&["ls", "--no-such-flag", "a.tar"]), Some(64));
}

#[test]
fn what_is_no_archive_is_refused() {
    let place = Place::new();
    for (content, word) in [
        ("", "neither"),
        ("text\n", "neither"),
        ("LZIP\u{1}", "lzip"),
    ] {
        fs::write(place.path("a.tar"), content).expect("written");
        for verb in ["ls", "materialize"] {
            let output = place.tarfs(&[verb, "a.tar"]);
            assert_eq!(output.status.code(), Some(2));
            assert!(told(&output).contains(word), "{}", told(&output));
        }
    }
}

#[test]
fn a_truncated_archive_is_an_error_unless_allowed() {
    let place = Place::new();
    let whole = archive(&[file("f", "x"), file("g", "y")]);
    fs::write(place.path("a.tar"), whole.slice(..1600)).expect("written");
    assert_eq!(place.tarfs(&["ls", "a.tar"]).status.code(), Some(2));
    let output = place.tarfs(&["ls", "--allow-truncated", "a.tar"]);
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
    assert_eq!(output.stdout, b"f\ng\n");
}

/// Opens archives, as a mount does, and counts.
struct Opener {
    runtime: Runtime,
    cache: tempfile::TempDir,
    server: Server,
    spooling: Spooling,
    index_file: Option<PathBuf>,
}

impl Opener {
    fn new() -> Self {
        Self {
            runtime: Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime"),
            cache: tempfile::tempdir().expect("a directory"),
            server: Server::start(),
            spooling: Spooling::ToDisk {
                limit_bytes: Some(1 << 30),
            },
            index_file: None,
        }
    }

    fn open(&self) -> Result<Archive, OpenError> {
        let stats = Arc::new(Stats::default());
        let options = source::Options {
            stats: Arc::clone(&stats),
            ..source::Options::default()
        };
        let source = self
            .runtime
            .block_on(source::open(&self.server.url("/a"), options))
            .expect("served");
        let options = OpenOptions {
            scan: scan::Options {
                compression: None,
                tar: tar::Options::default(),
                allow_truncated: false,
                spans: false,
                connections: 2,
                chunk_len: 1 << 20,
                memory: 32 << 20,
                workers: 1,
            },
            cache_dir: Some(self.cache.path().to_owned()),
            index_file: self.index_file.clone(),
            spooling: self.spooling,
        };
        Archive::open(source, &options, self.runtime.handle(), &stats)
    }

    fn spools(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.cache.path().join("spool")) else {
            return Vec::new();
        };
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry
                .expect("readable")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        entries.map(name).collect()
    }
}

/// The bytes of `name` from `offset` on.
fn bytes(archive: &Archive, name: &str, offset: usize, len: usize) -> Vec<u8> {
    try_bytes(archive, name, offset, len).expect("readable")
}

fn try_bytes(
    archive: &Archive,
    name: &str,
    offset: usize,
    len: usize,
) -> Result<Vec<u8>, tarfs::archive::ReadError> {
    let path = ArchivePath::sanitize(name.as_bytes()).path;
    let ino = archive.index().find(&path).expect("there").ino();
    let len = u32::try_from(len).expect("short");
    let read = archive.read_here(ino, offset as u64, len)?;
    Ok(read.to_vec())
}

/// An archive of one long file of noise, packed as a single zstd frame.
fn one_frame() -> (Vec<u8>, Bytes) {
    let content = noise(LONG);
    let plain = archive(&[file("long", &content)]);
    (
        content,
        zstd::encode_all(&plain[..], 1).expect("packed").into(),
    )
}

#[test]
fn what_has_no_seek_points_is_spooled_for_a_mount() {
    let (content, packed) = one_frame();
    let mut opener = Opener::new();
    opener
        .server
        .serve("/a", Resource::new(packed).etag("\"1\""));
    opener.spooling = Spooling::TreeOnly;
    drop(opener.open().expect("opened"));
    assert!(opener.spools().is_empty(), "for a listing");
    fs::remove_dir_all(opener.cache.path().join("index")).expect("there");

    opener.spooling = Spooling::ToDisk {
        limit_bytes: Some(1 << 30),
    };
    let opened = opener.open().expect("opened");
    let content_id = blake3::Hash::from(opened.index().origin().content_id);
    let hex = content_id.to_hex();
    assert_eq!(opener.spools(), [format!("{hex}.spool")]);
    let sent = opener.server.sent_bytes("/a");
    let middle = LONG / 2..LONG / 2 + 1000;
    assert_eq!(bytes(&opened, "long", middle.start, 1000), content[middle]);
    assert_eq!(opener.server.sent_bytes("/a"), sent, "from the spool");
    assert!(opened.stats().unspooled_bytes.get() > 0);
}

#[test]
fn without_a_spool_reads_decode_again() {
    let (content, packed) = one_frame();
    let mut opener = Opener::new();
    opener
        .server
        .serve("/a", Resource::new(packed).etag("\"1\""));
    opener.spooling = Spooling::Refused;
    let opened = opener.open().expect("opened");
    assert!(opener.spools().is_empty());
    let sent = opener.server.sent_bytes("/a");
    assert_eq!(
        bytes(&opened, "long", 20 << 20, 1000),
        content[20 << 20..][..1000]
    );
    assert!(
        opener.server.sent_bytes("/a") > sent + (15 << 20),
        "from the beginning"
    );
}

#[test]
fn a_server_without_ranges_is_spooled_whole_or_refused() {
    let content = noise(LONG);
    let plain = archive(&[file("long", &content)]);
    let mut opener = Opener::new();
    opener
        .server
        .serve("/a", Resource::new(plain).without_ranges());
    for refused in [
        Spooling::Refused,
        Spooling::ToDisk {
            limit_bytes: Some(1 << 20),
        },
    ] {
        opener.spooling = refused;
        let error = opener.open().expect_err("nowhere to keep the bytes");
        assert!(matches!(error, OpenError::NoSpool { .. }), "{error}");
    }
    opener.spooling = Spooling::ToDisk {
        limit_bytes: Some(1 << 30),
    };
    let opened = opener.open().expect("opened");
    for offset in [0, LONG / 2, LONG - 1000] {
        assert_eq!(
            bytes(&opened, "long", offset, 1000),
            content[offset..][..1000]
        );
    }
}

#[test]
fn a_saved_index_with_a_strong_validator_is_used_at_once() {
    let opener = Opener::new();
    let plain = archive(&[file("f", noise(3 << 20))]);
    opener
        .server
        .serve("/a", Resource::new(plain).etag("\"1\""));
    drop(opener.open().expect("opened"));
    let before = opener.server.seen("/a").len();
    let opened = opener.open().expect("opened");
    assert_eq!(opened.stats().scans.get(), 0);
    assert_eq!(opener.server.seen("/a").len(), before + 1);
}

#[test]
fn a_saved_index_without_one_is_used_only_when_a_span_fits() {
    let opener = Opener::new();
    let content = noise(3 << 20);
    let other: Vec<u8> = content.iter().map(|byte| !byte).collect();
    opener
        .server
        .serve("/a", Resource::new(archive(&[file("f", &content)])));
    drop(opener.open().expect("opened"));
    let opened = opener.open().expect("opened");
    assert_eq!(opened.stats().scans.get(), 0);
    opener
        .server
        .serve("/a", Resource::new(archive(&[file("f", &other)])));
    let opened = opener.open().expect("opened");
    assert_eq!(opened.stats().scans.get(), 1);
    assert_eq!(bytes(&opened, "f", 2 << 20, 100), other[2 << 20..][..100]);
}

#[test]
fn an_index_of_another_archive_is_refused() {
    let mut opener = Opener::new();
    let content = noise(3 << 20);
    opener.server.serve(
        "/a",
        Resource::new(archive(&[file("f", &content)])).etag("\"1\""),
    );
    let path = opener.cache.path().join("own.idx");
    tarfs::index::store::write(&path, opener.open().expect("opened").index()).expect("written");
    opener.index_file = Some(path);
    assert!(opener.open().is_ok());
    let other: Vec<u8> = content.iter().map(|byte| !byte).collect();
    for foreign in [
        archive(&[file("f", &other)]),
        archive(&[file("f", "short")]),
    ] {
        opener
            .server
            .serve("/a", Resource::new(foreign).etag("\"2\""));
        let error = opener.open().expect_err("another archive's");
        assert!(matches!(error, OpenError::ForeignIndex { .. }), "{error}");
    }
}

#[test]
fn a_span_with_another_hash_is_never_served() {
    let opener = Opener::new();
    let content = noise(3 << 20);
    let other: Vec<u8> = content.iter().map(|byte| !byte).collect();
    let serve = |content: &[u8]| {
        let resource = Resource::new(archive(&[file("f", content)]));
        opener.server.serve("/a", resource.etag("\"1\""));
    };
    serve(&content);
    drop(opener.open().expect("opened"));
    serve(&other);
    let opened = opener
        .open()
        .expect("a server that lies is believed until it is read");
    assert_eq!(opened.stats().scans.get(), 0);
    assert!(try_bytes(&opened, "f", 2 << 20, 100).is_err());
}
