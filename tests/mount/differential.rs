//! The same archives through GNU tar, bsdtar, `tarfs materialize` and `tarfs mount`.
//!
//! All give the same trees and GNU tar's exit status, except for listed differences with their
//! reasons. Run as root.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::fixture::{PROGRAM, TestMount};
use crate::support::raw::{Archive, GNU, Header, V7, random_bytes};

/// Options with which GNU tar extracts.
const TAR: [&str; 5] = [
    "--numeric-owner",
    "--delay-directory-restore",
    "--xattrs",
    "--xattrs-include=*",
    "--acls",
];

/// Option to restore all attributes, as GNU tar does above.
const ALL_XATTRS: &str = "--xattrs-include=*";

/// The only archive of a real program that bsdtar extracts differently.
const NAMED_ACLS: &str = "GNU tar's pax with xattrs";

/// Arguments with which bsdtar extracts.
const BSDTAR: [&str; 4] = ["-xpf", "a.tar", "--numeric-owner", "-C"];

/// Option with which GNU tar restores the attributes of a directory as soon as it leaves it.
const NO_DELAY: &str = "--no-delay-directory-restore";

/// Reason for several differences of bsdtar.
const NO_LINKS: &str = "nothing is extracted through a link there, unless asked for";
const NO_GLOBALS: &str = "global headers mean nothing there";
const NO_TAR: &str = "an archive that begins with such a header is none there";

/// An archive and its expected outcome.
struct Case {
    name: String,
    archive: Vec<u8>,
    options: &'static [&'static str],
    expected: Expected,
    /// Reason why bsdtar's tree differs from materialize's, if it does.
    unlike_bsdtar: Option<&'static str>,
}

/// Allowed differences and their reasons.
#[derive(Clone, Copy)]
enum Expected {
    /// Nothing.
    Same,
    /// The trees are the same, but the exit status is not.
    OtherVerdict(&'static str),
    /// The trees differ.
    OtherTree(&'static str),
    /// A mount differs from GNU tar's tree, because it knows the whole archive first.
    OtherMount(&'static str),
}

impl Expected {
    fn reason(self) -> &'static str {
        match self {
            Self::Same => "",
            Self::OtherVerdict(reason) | Self::OtherTree(reason) | Self::OtherMount(reason) => {
                reason
            }
        }
    }
}

fn case(name: impl Into<String>, archive: Archive) -> Case {
    Case {
        name: name.into(),
        archive: archive.end(),
        options: &[],
        expected: Expected::Same,
        unlike_bsdtar: None,
    }
}

impl Case {
    fn expecting(mut self, expected: Expected) -> Self {
        self.expected = expected;
        self
    }

    /// bsdtar's tree differs.
    fn unlike_bsdtar(mut self, reason: &'static str) -> Self {
        self.unlike_bsdtar = Some(reason);
        self
    }

    fn with(mut self, options: &'static [&'static str]) -> Self {
        self.options = options;
        self
    }

    fn bytes(mut self, archive: Vec<u8>) -> Self {
        self.archive = archive;
        self
    }
}

/// Results of all programs for one archive.
struct Findings {
    /// Whether GNU tar, materialize and the mount succeeded.
    verdicts: [bool; 3],
    /// Their messages.
    complaints: String,
    /// Differences of materialize's tree and of the mount from GNU tar's. Empty if there are none.
    differences: [String; 2],
    /// Differences of materialize's tree from bsdtar's.
    unlike_bsdtar: String,
}

/// A fixture with a destination for each program.
fn place() -> TestMount {
    TestMount::new(&["gnu", "bsd", "own"])
}

fn run(place: &TestMount, program: &str, arguments: &[&str]) -> Output {
    place
        .command_of(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"))
}

/// Processes the archive `a.tar` in all four ways.
fn examine(place: &TestMount, options: &[&str]) -> Findings {
    let gnu = ["-xpf", "a.tar", "-C", "gnu"];
    let gnu = run(place, "tar", &[&gnu[..], &TAR, options].concat());
    let options = options.iter().copied();
    let options: Vec<&str> = options.filter(|&option| option != NO_DELAY).collect();
    let bsd = options.iter().map(|option| match *option {
        "-i" => "--ignore-zeros",
        same => same,
    });
    let bsd: Vec<&str> = BSDTAR.into_iter().chain(["bsd"]).chain(bsd).collect();
    // A member that bsdtar fails to extract is not in its tree.
    let bsd = run(place, "bsdtar", &bsd);
    let own = [
        "materialize",
        "--numeric-owner",
        ALL_XATTRS,
        "a.tar",
        "-C",
        "own",
    ];
    let own = run(place, PROGRAM, &[&own[..], &options].concat());
    let mount = [
        "mount",
        "--wait-index",
        ALL_XATTRS,
        "-o",
        "suid,dev",
        "a.tar",
        "mnt",
    ];
    let mount = run(place, PROGRAM, &[&mount[..], &options].concat());
    let differences = ["own", "mnt"].map(|tree| compare(place, "gnu", tree));
    if mount.status.success() {
        let umount = run(place, PROGRAM, &["umount", "mnt"]);
        assert!(umount.status.success(), "{}", text(&umount.stderr));
    }
    let unlike_bsdtar = compare(place, "bsd", "own");
    let told = [&gnu, &bsd, &own, &mount].map(|output| text(&output.stderr));
    let all = [gnu, own, mount];
    Findings {
        complaints: told.concat(),
        unlike_bsdtar,
        verdicts: all.map(|output| output.status.success()),
        differences,
    }
}

/// The differences of two trees.
fn compare(place: &TestMount, a: &str, b: &str) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/compare-trees");
    let output = run(
        place,
        "/usr/bin/python3",
        &[script, "--ignore-mtime-of-root", a, b],
    );
    if output.status.success() {
        String::new()
    } else {
        text(&output.stdout) + &text(&output.stderr)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks all cases, and reports all unexpected results.
#[track_caller]
fn check(cases: impl IntoIterator<Item = Case>) {
    let surprises: Vec<String> = cases
        .into_iter()
        .filter_map(|case| mismatch(&case))
        .collect();
    assert!(surprises.is_empty(), "\n{}", surprises.join("\n"));
}

fn mismatch(case: &Case) -> Option<String> {
    let place = place();
    fs::write(place.path("a.tar"), &case.archive).expect("space");
    let finding = examine(&place, case.options);
    let [own, mount] = finding.differences.each_ref().map(String::is_empty);
    let [gnu_verdict, own_verdict, mounted] = finding.verdicts;
    let same_verdict = gnu_verdict == own_verdict;
    let as_expected = match case.expected {
        Expected::Same => own && mount && same_verdict,
        Expected::OtherVerdict(_) => own && (mount || !mounted) && !same_verdict,
        Expected::OtherTree(_) => !own,
        Expected::OtherMount(_) => own && same_verdict && !mount,
    };
    let as_expected =
        as_expected && case.unlike_bsdtar.is_some() != finding.unlike_bsdtar.is_empty();
    (!as_expected).then(|| {
        format!(
            "== {} (expected: '{}', unlike bsdtar: '{}')\nsucceeded: tar {gnu_verdict}, \
             materialize {own_verdict}, mount {mounted}\n{}own: {}\nmnt: {}\nbsdtar's: {}",
            case.name,
            case.expected.reason(),
            case.unlike_bsdtar.unwrap_or_default(),
            finding.complaints,
            finding.differences[0],
            finding.differences[1],
            finding.unlike_bsdtar,
        )
    })
}

/// An entry that later members can link to and replace.
fn base() -> Archive {
    Archive::new().file("keep", "kept\n")
}

#[test]
fn each_type_replaces_each_type() {
    type Add = fn(Archive, &str) -> Archive;
    let types: [(&str, Add); 5] = [
        ("file", |archive, name| archive.file(name, "content\n")),
        ("directory", |archive, name| archive.directory(name)),
        ("symlink", |archive, name| archive.symlink(name, "keep")),
        ("hard link", |archive, name| archive.hard_link(name, "keep")),
        ("fifo", |archive, name| archive.fifo(name)),
    ];
    check(types.iter().flat_map(|(first_name, first)| {
        types.iter().map(move |(second_name, second)| {
            let archive = second(first(base(), "x"), "x");
            case(format!("{second_name} over {first_name}"), archive)
        })
    }));
}

#[test]
fn directories_behind_removed_link_get_their_attributes() {
    let directory = |name: &str, mode| Header::new(name, b'5').mode(mode).mtime(1_000_000_007);
    let behind = || {
        let archive = base().directory("to/").directory("to/a/");
        let archive = archive.symlink("l", "to").file("l/a/x", "1");
        let archive = archive.add(directory("l/a/b/", 0o711), "");
        // GNU tar restores a directory's attributes when it leaves the directory. It fails if a later
        // entry has replaced the link on the path.
        let archive = archive.add(directory("l/a/b/c/", 0o500), "");
        archive.file("elsewhere", "")
    };
    // GNU tar had left that directory before the other members.
    let end = |archive: Archive| archive.directory("to/a/");
    let cases = [
        case("a link stays", end(behind())),
        case("a file takes its place", end(behind().file("l", "2"))),
        case("a link takes its place", end(behind().symlink("l", "keep"))),
        case(
            "more comes by its target",
            end(behind().file("l", "3").file("to/a/y", "4")),
        ),
    ];
    check(cases.map(|case| case.with(&[NO_DELAY]).unlike_bsdtar(NO_LINKS)));
}

#[test]
fn entry_reusing_directory_inode_keeps_its_attributes() {
    let directory = Header::new("x/", b'5').mode(0o711).mtime(1_000_000_007);
    let first = || base().add(directory.clone(), "");
    check([
        case("a file", first().file("x", "1")),
        case(
            "a file that is linked",
            first().file("x", "1").hard_link("y", "x"),
        ),
        case("a fifo", first().fifo("x")),
        case("a symbolic link", first().symlink("x", "keep")),
    ]);
}

#[test]
fn path_longer_than_path_max_is_written_and_shown() {
    let mut archive = Archive::new();
    let mut path = String::new();
    for _ in 0..20 {
        path = path + &"d".repeat(250) + "/";
        archive = archive.pax(&[("path", &path)]).directory("x/");
    }
    let place = place();
    let archive = archive.pax(&[("path", path + "file")]).file("x", "1").end();
    fs::write(place.path("a.tar"), archive).expect("space");
    let finding = examine(&place, &[]);
    // GNU tar resolves each name from the current directory, and fails.
    assert_eq!(
        finding.verdicts,
        [false, true, true],
        "{}",
        finding.complaints
    );
    let found = run(&place, "find", &["own", "-name", "file", "-size", "1c"]);
    assert_eq!(text(&found.stdout).lines().count(), 1);
}

#[test]
fn names_of_every_length_match_in_every_dialect() {
    let long = "n".repeat(200);
    let deep = ["d".repeat(99), "e".repeat(99), "f".repeat(50)].join("/");
    let most = "m".repeat(255);
    let beyond = "m".repeat(256);
    let split = |archive: Archive| archive.directory("pre/");
    check([
        case(
            "a name without its NUL",
            Archive::new().file(&"a".repeat(100), "1"),
        ),
        case(
            "a prefix",
            split(Archive::new()).add(Header::new("name", b'0').put(345, "pre"), "1"),
        ),
        case(
            "a prefix in v7 means nothing",
            Archive::new().add(Header::new("name", b'0').magic(V7).put(345, "pre"), "1"),
        ),
        case(
            "gnu long name",
            Archive::new().long(b'L', &long).file("x", "1"),
        ),
        case("gnu long link", base().long(b'K', &deep).symlink("x", "y")),
        case(
            "gnu long name and link",
            base().long(b'L', &long).long(b'K', &deep).symlink("x", "y"),
        ),
        case(
            "two long names: the last counts",
            Archive::new()
                .long(b'L', "first")
                .long(b'L', &long)
                .file("x", "1"),
        ),
        case(
            "pax path",
            Archive::new().pax(&[("path", &long)]).file("x", "1"),
        ),
        case(
            "pax linkpath",
            base().pax(&[("linkpath", &deep)]).symlink("x", "y"),
        ),
        case(
            "pax before gnu",
            Archive::new()
                .long(b'L', &long)
                .pax(&[("path", "p")])
                .file("x", "1"),
        )
        .unlike_bsdtar("of pax and GNU names the later one counts there"),
        case(
            "255 bytes",
            Archive::new().pax(&[("path", &most)]).file("x", "1"),
        ),
        case("256 bytes", base().pax(&[("path", &beyond)]).file("x", "1")),
        case(
            "control characters",
            Archive::new().file("a\nb\x01c\\d", "1"),
        ),
    ]);
}

#[test]
fn names_stay_inside_the_root() {
    check([
        case("absolute", Archive::new().file("/absolute", "1")),
        case("above", Archive::new().file("../above", "1")),
        case(
            "dots in between",
            Archive::new().directory("a/").file("a/../b", "1"),
        ),
        case(
            "dots and slashes",
            Archive::new()
                .directory("./")
                .directory("./a/")
                .file(".//a/./b", "1"),
        ),
        case("just the root", Archive::new().directory("./")),
        case("a file with a slash", Archive::new().file("a/", "1")),
        case(
            "hard link to an absolute name",
            base().hard_link("x", "/keep"),
        ),
        case("hard link above", base().hard_link("x", "../keep"))
            .unlike_bsdtar("links with .. are refused there"),
        case("symlink to an absolute name", base().symlink("x", "/keep")),
        case("symlink above", base().symlink("x", "../../../etc")),
        case(
            "a loop of symlinks",
            Archive::new().symlink("a", "b").symlink("b", "a"),
        ),
        case("a symlink to itself", Archive::new().symlink("a", "a")),
        case(
            "below a loop",
            Archive::new()
                .symlink("a", "b")
                .symlink("b", "a")
                .file("a/x", "1"),
        ),
        case("below a file", base().file("keep/x", "1")),
        case(
            "usrmerge",
            Archive::new()
                .directory("usr/")
                .directory("usr/lib/")
                .symlink("lib", "usr/lib")
                .file("lib/x", "1"),
        )
        .unlike_bsdtar(NO_LINKS),
        case(
            "a symlink over a directory with something in it",
            Archive::new()
                .directory("usr/")
                .directory("usr/lib/")
                .directory("lib/")
                .file("lib/x", "1")
                .symlink("lib", "usr/lib"),
        ),
        case(
            "a directory over a symlink to a directory",
            Archive::new()
                .directory("usr/")
                .directory("usr/lib/")
                .symlink("lib", "usr/lib")
                .directory("lib/")
                .file("lib/x", "1"),
        ),
    ]);
}

#[test]
fn hard_links_of_every_kind_match() {
    check([
        case(
            "a chain",
            base()
                .hard_link("a", "keep")
                .hard_link("b", "a")
                .hard_link("c", "b"),
        ),
        case(
            "to a symlink",
            base().symlink("s", "keep").hard_link("h", "s"),
        ),
        case(
            "to a dangling symlink",
            Archive::new().symlink("s", "nothing").hard_link("h", "s"),
        ),
        case("to a fifo", Archive::new().fifo("f").hard_link("h", "f")),
        case(
            "to a directory",
            Archive::new().directory("d/").hard_link("h", "d"),
        ),
        case("to itself", base().hard_link("keep", "keep")),
        case(
            "to what is replaced later",
            base().hard_link("h", "keep").file("keep", "new\n"),
        ),
        case(
            "to what was replaced before",
            base().file("keep", "new\n").hard_link("h", "keep"),
        ),
        case("to nothing", base().hard_link("h", "nothing")),
        case(
            "forward",
            Archive::new().hard_link("h", "later").file("later", "1"),
        )
        .expecting(Expected::OtherTree(
            "a forward link is made at the end; GNU tar gives it up",
        ))
        .unlike_bsdtar("it is given up there, too"),
        case(
            "with a payload in pax",
            base().add(Header::new("h", b'1').link("keep").size(0), ""),
        ),
        case(
            "with a size that means nothing",
            base()
                .add(Header::new("h", b'1').link("keep").size(5), "")
                .file("after", "1"),
        ),
    ]);
}

// Promises: format-checksum-field, gnu-owner-max
#[test]
fn numbers_and_times_at_their_limits_match() {
    let file = |header: Header| Archive::new().add(header, "1");
    let header = || Header::new("x", b'0');
    check([
        case("uid beyond octal", file(header().binary(108, 8, 1 << 30))),
        case(
            "negative time in base 256",
            file(header().binary(136, 12, -86_400)),
        ),
        case(
            "large time in base 256",
            file(header().binary(136, 12, 1 << 33)),
        ),
        case("size in base 256", file(header().binary(124, 12, 1))),
        case(
            "pax owners",
            Archive::new()
                .pax(&[("uid", "3000000"), ("gid", "4000000000")])
                .file("x", "1"),
        ),
        case(
            "pax nanoseconds",
            Archive::new()
                .pax(&[("mtime", "1.000000001")])
                .file("x", "1"),
        ),
        case(
            "pax negative time",
            Archive::new().pax(&[("mtime", "-1.5")]).file("x", "1"),
        )
        .unlike_bsdtar("a fraction counts forward there, although the time is negative"),
        case("more digits than there are", {
            Archive::new()
                .pax(&[("mtime", "7.1234567899")])
                .file("x", "1")
        }),
        case("pax size", {
            Archive::new()
                .pax(&[("size", "3")])
                .add(header().size(0), "abc")
                .file("y", "2")
        }),
        case("spaces for zeros", file(header().put(100, "   644 \0"))),
        case(
            "a time that makes no sense",
            file(header().put(136, "nonsense\0\0\0\0")),
        )
        .unlike_bsdtar(NO_TAR),
        case(
            "an owner that makes no sense",
            file(header().put(108, "zzzzzzz\0")),
        )
        .expecting(Expected::OtherMount(
            "4294967295 asks chown(2) for no change; a mount has no owner to keep",
        ))
        .unlike_bsdtar(NO_TAR),
        case("every permission", file(header().mode(0o7777))),
        case("no permission", file(header().mode(0))),
        case(
            "directories without permissions",
            Archive::new()
                .add(Header::new("d/", b'5').mode(0o555), "")
                .file("d/x", "1")
                .add(Header::new("e/", b'5').mode(0), "")
                .file("e/x", "1")
                .add(Header::new("t/", b'5').mode(0o1777), ""),
        ),
        case(
            "a file's type in its mode",
            file(header().octal(100, 8, 0o100_644)),
        ),
        case("devices", {
            Archive::new()
                .add(Header::new("null", b'3').device(1, 3), "")
                .add(Header::new("loop", b'4').device(7, 200), "")
        }),
        case("device numbers beyond a byte", {
            Archive::new().add(Header::new("d", b'3').device(300, 70_000), "")
        }),
        case(
            "contiguous",
            Archive::new().add(Header::new("c", b'7'), "1"),
        ),
        case(
            "an unknown type",
            Archive::new().add(Header::new("u", b'Q'), "1"),
        ),
        case(
            "an old file",
            Archive::new().add(Header::new("o", 0).magic(V7), "1"),
        ),
        case(
            "an old directory",
            Archive::new().add(Header::new("o/", 0).magic(V7).mode(0o755), ""),
        ),
        case(
            "a volume label",
            base().add(Header::new("label", b'V').magic(GNU), ""),
        ),
        case("a dumpdir", {
            Archive::new().add(Header::new("d/", b'D').magic(GNU).mode(0o755), "Yx\0\0")
        }),
    ]);
}

#[test]
fn pax_headers_and_attributes_match() {
    let acl = "user::rw-,user:7:r--,group::r--,mask::r--,other::---";
    check([
        case("a global header", {
            Archive::new()
                .global(&[("mtime", "5")])
                .file("a", "1")
                .file("b", "2")
        })
        .unlike_bsdtar(NO_GLOBALS),
        case("a local one goes first", {
            Archive::new()
                .global(&[("mtime", "5")])
                .pax(&[("mtime", "7")])
                .file("a", "1")
        }),
        case("two global headers", {
            Archive::new()
                .global(&[("uid", "5")])
                .global(&[("gid", "7")])
                .file("a", "1")
        })
        .expecting(Expected::OtherTree(
            "global headers add up, as POSIX has it",
        ))
        .unlike_bsdtar(NO_GLOBALS),
        case("an empty value", {
            Archive::new().pax(&[("path", "")]).file("a", "1")
        })
        .expecting(Expected::OtherTree(
            "an empty value deletes, as POSIX has it",
        )),
        case("an unknown keyword", {
            Archive::new()
                .pax(&[("VENDOR.key", "value")])
                .file("a", "1")
        }),
        case("a malformed header", {
            Archive::new()
                .add(Header::new("pax", b'x'), "this is none\n")
                .file("a", "1")
        }),
        case("xattrs", {
            Archive::new()
                .pax(&[
                    ("SCHILY.xattr.user.comment", &b"a\0b"[..]),
                    ("SCHILY.xattr.trusted.secret", b"1"),
                    ("SCHILY.xattr.user.empty", b""),
                    (
                        "SCHILY.xattr.security.capability",
                        b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
                    ),
                ])
                .file("a", "1")
        }),
        case("xattrs of libarchive", {
            Archive::new()
                .pax(&[("LIBARCHIVE.xattr.user.key", "dmFsdWU=")])
                .file("a", "1")
        })
        .expecting(Expected::OtherTree("LIBARCHIVE.xattr is known")),
        case("an access ACL", {
            Archive::new()
                .pax(&[("SCHILY.acl.access", acl)])
                .add(Header::new("a", b'0').mode(0o640), "1")
        }),
        case("a default ACL", {
            Archive::new()
                .pax(&[(
                    "SCHILY.acl.default",
                    "user::rwx,group::r-x,other::---,user:7:rwx,mask::rwx",
                )])
                .directory("d/")
        }),
    ]);
}

/// The header of a sparse file in the old GNU format, with the first entries of its map.
fn old_sparse(name: &str, pieces: &[(u64, u64)], real: u64, extended: bool) -> Header {
    let mut header = Header::new(name, b'S').magic(GNU).octal(483, 12, real);
    for (number, (offset, len)) in pieces.iter().enumerate() {
        header =
            header
                .octal(386 + number * 24, 12, *offset)
                .octal(386 + number * 24 + 12, 12, *len);
    }
    header.put(482, [u8::from(extended)])
}

fn number(value: u64) -> String {
    format!("{value:011o}\0")
}

// Promises: gnu-sparse-end
#[test]
fn sparse_files_of_every_format_match() {
    let piece = random_bytes(4096);
    let two = [&piece[..], &piece].concat();
    // GNU tar ends a map with an empty piece at the end of the file.
    let mut many: Vec<(u64, u64)> = (0..30).map(|n| (n * 8192, 4096)).collect();
    many.push((30 * 8192, 0));
    let mut extension = vec![];
    for chunk in many.get(4..).expect("more").chunks(21) {
        let mut record: Vec<u8> = chunk
            .iter()
            .flat_map(|(offset, len)| (number(*offset) + &number(*len)).into_bytes())
            .collect();
        record.resize(512, 0);
        extension.push(record);
    }
    if let Some(first) = extension.first_mut() {
        first[504] = 1;
    }
    let long = piece.repeat(30);
    let extended =
        old_sparse("x", many.get(..4).expect("more"), 30 * 8192, true).size(long.len() as u64);
    let map_1_0 = {
        let mut map = b"3\n4096\n4096\n12288\n4096\n20480\n0\n".to_vec();
        map.resize(512, 0);
        [map, two.clone()].concat()
    };
    check([
        case("old GNU", {
            Archive::new().add(
                old_sparse(
                    "x",
                    &[(4096, 4096), (12288, 4096), (20480, 0)],
                    20480,
                    false,
                ),
                &two,
            )
        }),
        case("old GNU with extensions", {
            Archive::new()
                .add(extended, "")
                .raw(extension.concat())
                .raw(long)
        }),
        case("a map that ends before the file", {
            Archive::new().add(old_sparse("x", &[(4096, 4096)], 20480, false), &piece)
        })
        .expecting(Expected::OtherTree(
            "a sparse file's size is the one in its header",
        )),
        case("all hole", {
            Archive::new().add(old_sparse("x", &[(1 << 20, 0)], 1 << 20, false), "")
        }),
        case("pax 0.0", {
            Archive::new()
                .pax(&[
                    ("GNU.sparse.size", "20480"),
                    ("GNU.sparse.numblocks", "3"),
                    ("GNU.sparse.offset", "4096"),
                    ("GNU.sparse.numbytes", "4096"),
                    ("GNU.sparse.offset", "12288"),
                    ("GNU.sparse.numbytes", "4096"),
                    ("GNU.sparse.offset", "20480"),
                    ("GNU.sparse.numbytes", "0"),
                ])
                .file("x", &two)
        }),
        case("pax 0.1", {
            Archive::new()
                .pax(&[
                    ("GNU.sparse.size", "20480"),
                    ("GNU.sparse.numblocks", "3"),
                    ("GNU.sparse.name", "x"),
                    ("GNU.sparse.map", "4096,4096,12288,4096,20480,0"),
                ])
                .file("GNUSparseFile.1/x", &two)
        }),
        case("pax 1.0", {
            Archive::new()
                .pax(&[
                    ("GNU.sparse.major", "1"),
                    ("GNU.sparse.minor", "0"),
                    ("GNU.sparse.name", "x"),
                    ("GNU.sparse.realsize", "20480"),
                ])
                .file("GNUSparseFile.1/x", map_1_0)
        }),
        case("a map out of order", {
            Archive::new().add(
                old_sparse("x", &[(12288, 4096), (4096, 4096)], 20480, false),
                &two,
            )
        })
        .expecting(Expected::OtherTree(
            "maps must be in order, or the file is lost",
        ))
        .unlike_bsdtar("such maps are taken there"),
    ]);
}

// Promises: gnu-cut-file
#[test]
fn archive_ends_of_every_kind_match() {
    let one = || Archive::new().file("a", "1");
    let two = || Archive::new().file("b", "2").end();
    let twice = [one().end(), two()].concat();
    let lone = one().raw([0; 512]).file("b", "2").end();
    let garbage = [one().unfinished(), vec![7; 1024], two()].concat();
    let cut = one().file("b", random_bytes(5000)).unfinished();
    check([
        case("concatenated", one()).bytes(twice.clone()),
        case("concatenated, all of them", one())
            .bytes(twice)
            .with(&["-i"]),
        case("a lone zero record", one()).bytes(lone.clone()),
        case("a lone zero record, read on", one())
            .bytes(lone)
            .with(&["-i"]),
        case("no zero record at all", one()).bytes(one().unfinished()),
        case("just zeros", one()).bytes(vec![0; 10240]),
        case("garbage in the middle", one()).bytes(garbage),
        case("cut in a payload", one())
            .bytes(cut.get(..4000).expect("longer").to_vec())
            .expecting(Expected::OtherTree(
                "all there is of a cut file is kept, with its attributes",
            ))
            .unlike_bsdtar("there it has the length it should have had"),
        case("cut in a header", one())
            .bytes(cut.get(..1200).expect("longer").to_vec())
            .expecting(Expected::OtherVerdict(
                "a header that is cut is a truncation; GNU tar is silent",
            )),
        case(
            "a damaged header",
            one()
                .add(Header::new("b", b'0').damaged(), "2")
                .file("c", "3"),
        ),
    ]);
}

/// A tree with most kinds of entries. `modest` omits those that v7 cannot represent.
fn create_tree(root: &Path, modest: bool) {
    let at = |name: &str| root.join(name);
    for name in ["d", "d/e", "closed", "sticky"] {
        fs::create_dir(at(name)).expect("fresh");
    }
    fs::write(at("d/a"), "hello\n").expect("space");
    fs::write(at("d/e/noise"), random_bytes(20_000)).expect("space");
    fs::write(at("empty"), "").expect("space");
    fs::write(at("setuid"), "s").expect("space");
    fs::hard_link(at("d/a"), at("hard")).expect("same file system");
    symlink("d/a", at("link")).expect("fresh");
    let mode = |name: &str, mode: u32| {
        fs::set_permissions(at(name), PermissionsExt::from_mode(mode)).expect("ours");
    };
    mode("setuid", 0o4755);
    mode("closed", 0o555);
    mode("sticky", 0o1777);
    std::os::unix::fs::chown(at("d/e"), Some(1234), Some(4321)).expect("root");
    if !modest {
        fs::write(at(&format!("d/e/{}", "n".repeat(97))), "long").expect("space");
        for (program, arguments) in [
            ("mkfifo", &["fifo"][..]),
            ("mknod", &["device", "c", "1", "3"]),
            ("touch", &["-d", "2001-02-03 04:05:06", "empty"]),
        ] {
            let made = Command::new(program)
                .args(arguments)
                .current_dir(root)
                .status();
            assert!(made.expect("a program").success(), "{program}");
        }
    }
}

#[test]
fn archives_of_other_programs_match() {
    let python = "import sys,tarfile; \
        t=tarfile.open('a.tar','w',format=getattr(tarfile,sys.argv[1])); \
        t.add('tree','.'); t.close()";
    let mut surprises = Vec::new();
    let mut examine = |name: &str, modest: bool, program: &str, arguments: &[&str]| {
        let place = place();
        fs::create_dir(place.path("tree")).expect("fresh");
        create_tree(&place.path("tree"), modest);
        if name.contains("xattrs") {
            for (program, arguments) in [
                (
                    "setfattr",
                    &["-n", "user.comment", "-v", "hello", "tree/empty"][..],
                ),
                ("setfattr", &["-n", "trusted.key", "-v", "1", "tree/d"]),
                ("setfacl", &["-m", "u:7:rx", "tree/setuid"]),
                ("setfacl", &["-d", "-m", "g:9:rwx", "tree/d/e"]),
            ] {
                let output = run(&place, program, arguments);
                assert!(
                    output.status.success(),
                    "{program}: {}",
                    text(&output.stderr)
                );
            }
        }
        let packed = run(&place, program, arguments);
        assert!(packed.status.success(), "{name}: {}", text(&packed.stderr));
        let finding = examine(&place, &[]);
        let [own, mnt] = &finding.differences;
        let differences = [own, mnt, &finding.unlike_bsdtar].map(String::as_str);
        let is_same = differences.map(str::is_empty);
        // The ACLs of this archive are by name, and bsdtar does not find the numbers.
        let is_as_bsdtars = name != NAMED_ACLS;
        if finding.verdicts != [true; 3] || is_same != [true, true, is_as_bsdtars] {
            surprises.push(format!(
                "== {name}: {:?}\n{}{}",
                finding.verdicts,
                finding.complaints,
                differences.concat(),
            ));
        }
    };
    for format in ["v7", "ustar", "oldgnu", "gnu", "pax"] {
        let flag = format!("--format={format}");
        let name = format!("GNU tar's {format}");
        examine(
            &name,
            format == "v7",
            "tar",
            &["-cf", "a.tar", &flag, "-C", "tree", "."],
        );
    }
    let attributes = [
        "--format=pax",
        "--xattrs",
        "--xattrs-include=*",
        "--acls",
        "-cf",
        "a.tar",
    ];
    let arguments = [&attributes[..], &["-C", "tree", "."]].concat();
    examine(NAMED_ACLS, false, "tar", &arguments);
    for format in ["ustar", "pax", "gnutar", "v7"] {
        let name = format!("bsdtar's {format}");
        let arguments = ["-cf", "a.tar", "--format", format, "-C", "tree", "."];
        examine(&name, format == "v7", "bsdtar", &arguments);
    }
    let arguments = [
        "-cf", "a.tar", "--format", "pax", "--xattrs", "--acls", "-C", "tree", ".",
    ];
    examine("bsdtar's pax with xattrs", false, "bsdtar", &arguments);
    for format in ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"] {
        let name = format!("Python's {format}");
        examine(&name, false, "/usr/bin/python3", &["-c", python, format]);
    }
    assert!(surprises.is_empty(), "\n{}", surprises.join("\n"));
}

/// An operation that builds a random tree.
#[derive(Clone, Debug)]
enum TreeOperation {
    File { name: u8, len: usize, mode: u32 },
    Directory { name: u8, mode: u32 },
    Symlink { name: u8, target: u8 },
    HardLink { name: u8, target: u8 },
    Sparse { name: u8, at: u64 },
}

fn tree_operations() -> impl Strategy<Value = Vec<TreeOperation>> {
    let name = || 0_u8..24;
    let mode = || {
        prop_oneof![
            Just(0o644_u32),
            Just(0o4755),
            Just(0),
            Just(0o1777),
            Just(0o555)
        ]
    };
    let plant = prop_oneof![
        3 => (name(), 0_usize..20_000, mode())
            .prop_map(|(name, len, mode)| TreeOperation::File { name, len, mode }),
        2 => (name(), mode()).prop_map(|(name, mode)| TreeOperation::Directory { name, mode }),
        1 => (name(), name()).prop_map(|(name, target)| TreeOperation::Symlink { name, target }),
        1 => (name(), name()).prop_map(|(name, target)| TreeOperation::HardLink { name, target }),
        1 => (name(), 1_u64..50).prop_map(|(name, at)| TreeOperation::Sparse { name, at: at * 8192 }),
    ];
    proptest::collection::vec(plant, 0..16)
}

/// The path of operation `number`. Some are below others, which may not be directories.
fn operation_path(root: &Path, number: u8) -> PathBuf {
    let name = |number: u8| format!("n{}", "é".repeat(usize::from(number) * 4));
    if number < 8 {
        root.join(name(number))
    } else {
        root.join(name(number % 8)).join(name(number))
    }
}

impl TreeOperation {
    /// Applies the operation. It does nothing if the path is taken or has no parent.
    fn apply(&self, root: &Path) {
        let set = |path: &Path, mode: u32| {
            fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("ours");
        };
        match *self {
            Self::File { name, len, mode } => {
                let path = operation_path(root, name);
                if !path.is_symlink() && fs::write(&path, random_bytes(len)).is_ok() {
                    set(&path, mode);
                }
            }
            Self::Directory { name, mode } => {
                let path = operation_path(root, name);
                if fs::create_dir(&path).is_ok() {
                    set(&path, mode);
                }
            }
            Self::Symlink { name, target } => {
                drop(symlink(format!("n{target}"), operation_path(root, name)));
            }
            Self::HardLink { name, target } => {
                drop(fs::hard_link(
                    operation_path(root, target),
                    operation_path(root, name),
                ));
            }
            Self::Sparse { name, at } => {
                let path = operation_path(root, name);
                if !path.exists() && fs::write(&path, random_bytes(4096)).is_ok() {
                    let file = fs::File::options().write(true).open(&path).expect("ours");
                    file.set_len(at + 4096).expect("space");
                }
            }
        }
    }
}

#[test]
fn random_trees_survive_a_round_trip() {
    let packings = ["cat", "gzip", "lz4", "zstd", "xz", "bzip2"];
    let strategy = (tree_operations(), 0_usize..2, 0..packings.len());
    let mut runner = TestRunner::new(Config {
        cases: 60,
        failure_persistence: None,
        max_shrink_iters: 100,
        ..Config::default()
    });
    let result = runner.run(&strategy, |(plants, format, packing)| {
        let place = place();
        let tree = place.path("gnu");
        for plant in &plants {
            plant.apply(&tree);
        }
        // GNU's own format stores whole seconds.
        let (format, time) = [("--format=gnu", "@1000"), ("--format=pax", "@-1000.25")][format];
        let touch = format!("find gnu -depth -print0 | xargs -0 touch -h -d {time}");
        prop_assert!(run(&place, "sh", &["-c", &touch]).status.success());
        let packing = packings[packing];
        let script = format!("tar -c {format} --sparse -C gnu . | {packing} > a.tar");
        let packed = run(&place, "sh", &["-c", &script]);
        prop_assert!(packed.status.success(), "{}", text(&packed.stderr));
        let own = run(
            &place,
            PROGRAM,
            &[
                "materialize",
                "--numeric-owner",
                ALL_XATTRS,
                "a.tar",
                "-C",
                "own",
            ],
        );
        prop_assert!(own.status.success(), "{}", text(&own.stderr));
        let mount = run(
            &place,
            PROGRAM,
            &["mount", "--wait-index", "-o", "suid,dev", "a.tar", "mnt"],
        );
        prop_assert!(mount.status.success(), "{}", text(&mount.stderr));
        for tree in ["own", "mnt"] {
            let difference = compare(&place, "gnu", tree);
            prop_assert!(difference.is_empty(), "{tree}, {format}: {difference}");
        }
        prop_assert!(run(&place, PROGRAM, &["umount", "mnt"]).status.success());
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
