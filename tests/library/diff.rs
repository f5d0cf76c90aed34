//! `tarfs diff` between archives, indexes and directories.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::support::cli::{Outcome, Place};
use crate::support::http::{Resource, Server};
use crate::support::raw::{Archive, Header, random_bytes};

/// Files of each kind that an ordinary user can make, below `name`.
pub(crate) fn make(place: &Place, name: &str) {
    let root = place.path(name);
    fs::create_dir_all(root.join("sub/deep")).expect("made");
    fs::create_dir(root.join("empty")).expect("made");
    for (file, content) in [
        ("a", "one\n"),
        ("b", "two\n"),
        ("sub/c", "three\n"),
        ("sub/deep/d", "four\n"),
        ("sub/deep/e", ""),
    ] {
        fs::write(root.join(file), content).expect("written");
    }
    fs::hard_link(root.join("a"), root.join("hard")).expect("made");
    symlink("a", root.join("link")).expect("made");
    make_fifo(&root.join("fifo"));
    set_times(&root);
}

fn make_fifo(path: &std::path::Path) {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.expect("mkfifo").success());
}

/// Gives all files below `root` one time.
pub(crate) fn set_times(root: &std::path::Path) {
    let status = Command::new("find")
        .arg(root)
        .args(["-exec", "touch", "-h", "-d", "@1000000000", "{}", "+"])
        .status();
    assert!(status.expect("find").success());
}

pub(crate) fn pack(place: &Place, name: &str) {
    let status = Command::new("tar")
        .args(["--create", "--format=posix", "--sort=name", "--file"])
        .arg(place.path(&format!("{name}.tar")))
        .arg("--directory")
        .arg(place.path(name))
        .arg(".")
        .status();
    assert!(status.expect("GNU tar").success());
}

/// Two equal trees `one` and `two`, changed by `change` in the second, and archives of both.
pub(crate) fn pair(change: impl FnOnce(&std::path::Path)) -> Place {
    let place = Place::new();
    make(&place, "one");
    make(&place, "two");
    let root = place.path("two");
    change(&root);
    pack(&place, "one");
    pack(&place, "two");
    place
}

/// All ways to name the two trees.
const FORMS: [(&str, &str); 4] = [
    ("one", "two"),
    ("one.tar", "two.tar"),
    ("one.tar", "two"),
    ("one", "two.tar"),
];

#[track_caller]
fn lines(outcome: &Outcome, code: i32) -> Vec<&str> {
    assert_eq!((outcome.code, &*outcome.complaints), (code, ""));
    outcome.lines()
}

// Promises: diff-status
#[test]
fn diff_of_equal_trees_prints_nothing() {
    let place = pair(|_| ());
    for (one, two) in FORMS {
        for flags in [&[][..], &["--checksum"], &["--json"], &["-j", "1"]] {
            let outcome = place.run(&[&["diff", one, two], flags].concat());
            assert!(lines(&outcome, 0).is_empty(), "{one} {two} {flags:?}");
        }
    }
}

pub(crate) fn change_each(root: &std::path::Path) {
    fs::write(root.join("b"), "longer\n").expect("written");
    fs::remove_file(root.join("link")).expect("there");
    symlink("b", root.join("link")).expect("made");
    fs::remove_file(root.join("fifo")).expect("there");
    fs::create_dir(root.join("fifo")).expect("made");
    fs::write(root.join("fifo/below"), "").expect("written");
    fs::remove_dir_all(root.join("sub/deep")).expect("there");
    fs::write(root.join("sub/deep"), "file").expect("written");
    fs::remove_dir(root.join("empty")).expect("there");
    fs::write(root.join("new"), "").expect("written");
    fs::remove_file(root.join("hard")).expect("there");
    fs::write(root.join("hard"), "one\n").expect("written");
    set_times(root);
    let mode = fs::Permissions::from_mode(0o600);
    fs::set_permissions(root.join("sub/c"), mode).expect("ours");
    let later = UNIX_EPOCH + Duration::new(1_000_000_000, 5);
    let file = fs::File::open(root.join("sub/c")).expect("there");
    file.set_modified(later + Duration::from_secs(1))
        .expect("ours");
}

// Promises: diff-lines, diff-status
#[test]
fn diff_reports_each_kind_of_difference() {
    let place = pair(change_each);
    let mode = fs::metadata(place.path("one/sub/c")).expect("there");
    let mode = mode.permissions().mode() & 0o7777;
    let expected = [
        "./a: nlink 2 -> 1",
        "./b: size 4 -> 7",
        "Only in A: ./empty",
        "./fifo: type fifo -> directory",
        "./hard: nlink 2 -> 1",
        "./link: target a -> b",
        "Only in B: ./new",
        &format!(
            "./sub/c: mode {mode:04o} -> 0600, mtime 2001-09-09T01:46:40.000000000Z -> \
             2001-09-09T01:46:41.000000005Z"
        ),
        "./sub/deep: type directory -> file",
    ];
    for (one, two) in FORMS {
        let outcome = place.run(&["diff", one, two]);
        assert_eq!(lines(&outcome, 1), expected, "{one} {two}");
        let outcome = place.run(&["diff", two, one]);
        let lines = lines(&outcome, 1);
        assert_eq!(lines.len(), expected.len(), "{two} {one}");
        assert_eq!(lines[2], "Only in B: ./empty");
        assert_eq!(lines[5], "./link: target b -> a");
    }
}

// Promises: diff-json
#[test]
fn diff_as_json_has_the_properties_of_both_sides() {
    let place = pair(change_each);
    for (one, two) in FORMS {
        let outcome = place.run(&["diff", "--json", one, two]);
        let objects = lines(&outcome, 1).into_iter().map(serde_json::from_str);
        let objects: Vec<Value> = objects.map(Result::unwrap).collect();
        assert_eq!(objects.len(), 9);
        let fields = |object: &Value| {
            let keys = object.as_object().expect("an object").keys();
            keys.cloned().collect::<Vec<_>>().join(" ")
        };
        let sizes = (&objects[1]["a"]["size"], &objects[1]["b"]["size"]);
        assert_eq!(sizes, (&json!(4), &json!(7)));
        assert_eq!(objects[1]["properties"], json!(["size"]));
        assert_eq!(objects[1]["change"], "differs");
        assert_eq!(fields(&objects[1]), "a b change path properties");
        assert_eq!(
            (&objects[2]["change"], &objects[2]["path"]),
            (&json!("only_a"), &json!("empty"))
        );
        assert_eq!(objects[2]["a"]["type"], "directory");
        assert_eq!(fields(&objects[2]), "a change path properties");
        assert_eq!(objects[5]["a"]["target"], "a");
        assert_eq!(
            (&objects[6]["change"], &objects[6]["path"]),
            (&json!("only_b"), &json!("new"))
        );
        assert_eq!(objects[6]["b"]["path"], "new");
        assert_eq!(fields(&objects[6]), "b change path properties");
        assert_eq!(objects[7]["properties"], json!(["mode", "mtime"]));
        assert_eq!(objects[7]["b"]["mode"], "0600");
        assert_eq!(objects[7]["path"], "sub/c");
        assert_eq!(objects[8]["a"]["type"], "directory");
    }
}

// Promises: diff-checksum
#[test]
fn diff_compares_contents_only_with_checksum() {
    let place = pair(|root| {
        fs::write(root.join("b"), "ten\n").expect("written");
        set_times(root);
    });
    for (one, two) in FORMS {
        assert!(lines(&place.run(&["diff", one, two]), 0).is_empty());
        let outcome = place.run(&["diff", "--checksum", one, two]);
        assert_eq!(lines(&outcome, 1), ["./b: content"], "{one} {two}");
        let outcome = place.run(&["diff", "--checksum", "--json", one, two]);
        let found: Value = serde_json::from_str(lines(&outcome, 1)[0]).expect("JSON");
        assert_eq!(found["properties"], json!(["content"]));
    }
}

/// Two trees with files of a tebibyte that have few bytes, and archives of both. Those of `equal` have the same bytes.
fn sparse_pair() -> Place {
    let place = Place::new();
    let file = |name: &str, stored: &[(u64, &[u8])]| {
        let file = fs::File::create(place.path(name)).expect("made");
        file.set_len(1 << 40).expect("sparse");
        for (at, bytes) in stored {
            file.write_all_at(bytes, *at).expect("written");
        }
    };
    for name in ["one", "two"] {
        fs::create_dir(place.path(name)).expect("made");
    }
    let (middle, end) = ((1 << 39) + 12_345, (1 << 40) - 1);
    file("one/equal", &[(middle, b"x")]);
    file(
        "two/equal",
        &[(0, &vec![0; 1 << 20]), (middle, b"x"), (end, b"\0")],
    );
    file("one/end", &[(middle, b"x")]);
    file("two/end", &[(middle, b"x"), (end, b"y")]);
    file("one/none", &[]);
    file("two/none", &[(middle, b"x")]);
    for name in ["one", "two"] {
        set_times(&place.path(name));
        let packed = Command::new("tar")
            .args(["--create", "--sparse", "--format=posix", "--file"])
            .arg(place.path(&format!("{name}.tar")))
            .arg("--directory")
            .arg(place.path(name))
            .arg(".")
            .status();
        assert!(packed.expect("GNU tar").success());
    }
    place
}

// Promises: diff-checksum
#[test]
fn comparison_of_contents_skips_common_holes() {
    let place = sparse_pair();
    for (one, two) in FORMS {
        let outcome = place.run(&["diff", "--checksum", one, two]);
        let mut found = lines(&outcome, 1);
        found.sort_unstable();
        assert_eq!(found, ["./end: content", "./none: content"], "{one} {two}");
        let same = [one, one.strip_suffix(".tar").unwrap_or(one)];
        let outcome = place.run(&["diff", "--checksum", same[0], same[1]]);
        assert!(lines(&outcome, 0).is_empty(), "{one}");
    }
    let outcome = place.run(&["sync", "--checksum", "--dry-run", "one.tar", "two"]);
    let mut found = lines(&outcome, 0);
    found.sort_unstable();
    assert_eq!(found, ["write end", "write none"]);
}

#[test]
fn diff_compares_roots_devices_and_ends_of_contents() {
    let place = Place::new();
    for (name, mode, minor, end) in [("one", 0o755, 3, "a"), ("two", 0o700, 5, "b")] {
        let content = "x".repeat(300_000) + end;
        let archive = Archive::new()
            .add(Header::new("./", b'5').mode(mode), "")
            .add(Header::new("./device", b'3').device(1, minor), "")
            .file("./large", content);
        place.put(&format!("{name}.tar"), archive.end());
    }
    let outcome = place.run(&["diff", "--checksum", "one.tar", "two.tar"]);
    let expected = [
        ".: mode 0755 -> 0700",
        "./device: device 1:3 -> 1:5",
        "./large: content",
    ];
    assert_eq!(lines(&outcome, 1), expected);
}

#[test]
fn options_of_archives_are_for_the_first_one() {
    let place = pair(change_each);
    let summed = place.command("sha256sum").arg("one.tar").output();
    let summed = String::from_utf8(summed.expect("coreutils").stdout).expect("ASCII");
    let digest = summed.split(' ').next().expect("a digest");
    let outcome = place.run(&["diff", "--expect-sha256", digest, "one.tar", "two.tar"]);
    assert_eq!(outcome.code, 1, "{}", outcome.complaints);
    place.succeeds(&["index", "one.tar", "--output", "one.tarfs"]);
    let outcome = place.run(&["diff", "--index", "one.tarfs", "one.tar", "two.tar"]);
    assert_eq!(lines(&outcome, 1).len(), 9);
    let outcome = place.run(&["diff", "--layer", "two.tar", "one.tar", "one.tar"]);
    assert_ne!(lines(&outcome, 1), Vec::<&str>::new());
}

#[test]
fn diff_reports_owners() {
    let owned = ["--owner=5", "--group=6", "--numeric-owner"];
    let place = pair(|_| ());
    let packed = place
        .command("tar")
        .args(["--format=posix", "-C", "one", "-cf", "owned.tar"])
        .args(owned)
        .arg("b")
        .status();
    assert!(packed.expect("GNU tar").success());
    let outcome = place.run(&["diff", "owned.tar", "one.tar"]);
    let line = outcome
        .lines()
        .into_iter()
        .find(|line| line.starts_with("./b: "));
    let line = line.expect("a line of it");
    assert!(
        line.contains("uid 5 -> ") && line.contains("gid 6 -> "),
        "{line}"
    );
}

// Promises: diff-lines
#[test]
fn diff_reports_other_names_of_a_file() {
    let place = Place::new();
    for (name, links) in [("one", [0, 0, 1, 1]), ("two", [0, 1, 0, 1])] {
        fs::create_dir(place.path(name)).expect("made");
        for (number, first) in links.into_iter().enumerate() {
            let path = place.path(&format!("{name}/{number}"));
            let first = links.iter().position(|&other| other == first).expect("one");
            if first == number {
                fs::write(path, "x").expect("written");
            } else {
                fs::hard_link(place.path(&format!("{name}/{first}")), path).expect("made");
            }
        }
        set_times(&place.path(name));
        pack(&place, name);
    }
    let is_about_names = |line: &&str| line.ends_with(": names of the file");
    for (one, two) in FORMS {
        let outcome = place.run(&["diff", one, two]);
        let lines = lines(&outcome, 1);
        assert!(!lines.is_empty());
        assert!(lines.iter().all(is_about_names), "{lines:?}");
        assert!(place.run(&["diff", one, one]).code == 0);
    }
    // Two files, which have other names elsewhere, are one in the other tree.
    for name in ["three", "four"] {
        fs::create_dir(place.path(name)).expect("made");
    }
    fs::write(place.path("four/0"), "x").expect("written");
    for (first, name) in [
        ("one/0", "three/0"),
        ("one/2", "three/1"),
        ("four/0", "four/1"),
        ("four/0", "out/0"),
    ] {
        fs::hard_link(place.path(first), place.path(name)).expect("made");
    }
    set_times(&place.path("three"));
    set_times(&place.path("four"));
    for (one, two) in [("three", "four"), ("four", "three")] {
        let outcome = place.run(&["diff", "-j", "1", one, two]);
        let lines = lines(&outcome, 1);
        assert!(lines.len() == 1 && is_about_names(&lines[0]), "{lines:?}");
    }
}

// Promises: diff-equal
#[test]
fn time_in_whole_seconds_equals_any_time_in_its_second() {
    let place = pair(|root| {
        let file = fs::File::open(root.join("b")).expect("there");
        let time = UNIX_EPOCH + Duration::new(1_000_000_000, 999_999_999);
        file.set_modified(time).expect("ours");
    });
    for (one, two) in FORMS {
        assert!(lines(&place.run(&["diff", one, two]), 0).is_empty());
        assert!(lines(&place.run(&["diff", two, one]), 0).is_empty());
    }
}

// Promises: diff-equal
#[test]
fn attributes_of_implied_directories_are_not_compared() {
    let place = pair(|_| ());
    let packed = Command::new("tar")
        .args(["--create", "--file"])
        .arg(place.path("implied.tar"))
        .arg("--directory")
        .arg(place.path("one"))
        .args(["sub/c", "sub/deep/d"])
        .status();
    assert!(packed.expect("GNU tar").success());
    for (one, two, side) in [("implied.tar", "one", "B"), ("one", "implied.tar", "A")] {
        let missing = ["a", "b", "empty", "fifo", "hard", "link", "sub/deep/e"];
        let expected = missing.map(|name| format!("Only in {side}: ./{name}"));
        assert_eq!(lines(&place.run(&["diff", one, two]), 1), expected);
    }
}

// Promises: diff-status
#[test]
fn diff_that_cannot_read_a_tree_ends_with_2() {
    let place = pair(|_| ());
    for (one, two) in [
        ("one", "missing"),
        ("missing.tar", "two"),
        ("one.tar", "one/a"),
    ] {
        let outcome = place.run(&["diff", one, two]);
        assert_eq!(outcome.code, 2, "{}", outcome.complaints);
        assert!(!outcome.complaints.is_empty());
    }
    place.give_to_user();
    let closed = place.path("two/sub/deep");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).expect("ours");
    for (one, two) in [("one", "two"), ("two", "one"), ("one.tar", "two")] {
        let mut command = place.command_of_user("./tarfs");
        let outcome = Outcome::of(command.args(["diff", one, two]));
        assert_eq!(outcome.code, 2);
        assert!(outcome.complaints.contains("./sub/deep: "));
        assert!(!outcome.text().contains("Only in"), "{}", outcome.text());
    }
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("ours");
}

// Promises: diff-checksum
#[test]
fn diff_of_archives_reads_no_contents() {
    let place = pair(change_each);
    let server = Server::start();
    for name in ["one", "two"] {
        let large = random_bytes(4 << 20);
        fs::write(place.path(&format!("{name}/large")), large).expect("written");
        set_times(&place.path(name));
        pack(&place, name);
        let packed = place.path(&format!("{name}.tar"));
        let status = Command::new("gzip").arg("-1").arg(&packed).status();
        assert!(status.expect("gzip").success());
        let archive = fs::read(packed.with_extension("tar.gz")).expect("there");
        let etag = format!("\"{name}\"");
        server.serve(&format!("/{name}"), Resource::new(archive).etag(&etag));
    }
    let (one, two) = (server.url("/one"), server.url("/two"));
    let sent_bytes = || server.sent_bytes("/one") + server.sent_bytes("/two");
    let words = ["diff", &one, &two];
    let differences = place.run(&words).output;
    assert!(!differences.is_empty());
    let before = sent_bytes();
    assert!(before > 8 << 20, "{before}");
    assert_eq!(place.run(&words).output, differences);
    // Only what shows that the archives have not changed.
    let more = sent_bytes() - before;
    assert!(more < 500_000, "{more}");
}

// Promises: diff-header
#[test]
fn headers_are_not_sent_to_the_host_of_the_second_tree() {
    let place = pair(|_| ());
    let archive = fs::read(place.path("one.tar")).expect("there");
    let server = Server::start();
    server.serve("/one.tar", Resource::new(archive));
    let header = ["--header", "X-Key: secret"];
    for (words, count) in [
        (["two.tar", &server.url("/one.tar")], 0),
        ([&server.url("/one.tar"), "two.tar"], 1),
    ] {
        let outcome = place.run(&[&["diff"], &header[..], &words].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.complaints);
        let requests = server.requests("/one.tar");
        let with_key = requests
            .iter()
            .filter(|it| it.request.header("x-key").is_some());
        assert_eq!(with_key.count().min(1), count);
    }
}

#[test]
fn mirrors_are_those_of_the_first_tree() {
    let place = pair(|_| ());
    let archive = fs::read(place.path("one.tar")).expect("there");
    let server = Server::start();
    for path in ["/one.tar", "/mirror.tar"] {
        let resource = Resource::new(archive.clone()).etag("\"one\"");
        server.serve(path, resource);
    }
    let (url, mirror) = (server.url("/one.tar"), server.url("/mirror.tar"));
    let outcome = place.run(&["diff", "--mirror-url", &mirror, &url, "two.tar"]);
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
}
