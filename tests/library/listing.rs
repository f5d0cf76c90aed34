//! `ls`, `find` and `du` against the programs of the same names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::fs::{CWD, Mode, OFlags, XattrFlags, mkdirat, openat, setxattr};

use crate::support::cli::Place;
use crate::support::fixture::PROGRAM;
use crate::support::http::{Resource, Response, Server};
use crate::support::program::stderr_text;
use crate::support::random_tree::make_tree;
use crate::support::raw::Archive;
use crate::support::rng::Rng;

/// Trees that are compared.
const TREES: u64 = 20;

/// Lengths around a block.
const LENS: [usize; 5] = [1, 512, 3073, 4096, 20_000];

/// A directory with the tree `tree`, and `a.tar` of what is in it.
fn place_with_tree(seed: u64) -> Place {
    let place = Place::new();
    make_tree(&place.path("tree"), &mut Rng::new(seed), &LENS);
    let packed = Command::new("tar")
        .args(["--format=posix", "-cf", "a.tar", "-C", "tree", "."])
        .current_dir(place.path(""))
        .status();
    assert!(packed.expect("GNU tar").success());
    place
}

/// Runs a program of the system in `place`, or in a directory of it.
fn run(place: &Place, directory: &str, words: &[&str]) -> Output {
    let (program, words) = words.split_first().expect("a program");
    let output = Command::new(program)
        .args(words)
        .current_dir(place.path(directory))
        .env("LC_ALL", "C")
        .env("TZ", "UTC")
        .output();
    output.expect("installed")
}

/// An archive with links to directories, below and beside which are files.
fn archive_with_links() -> Vec<u8> {
    Archive::new()
        .file("dir/f", "below")
        .file("dir/sub/g", "deeper")
        .symlink("lnk", "dir/sub")
        .symlink("loop", "loop")
        .file("top", "beside")
        .end()
}

/// Runs tarfs in `place`.
fn tarfs(place: &Place, words: &[&str]) -> Output {
    let output = place.tarfs().args(words).env("LC_ALL", "C").output();
    output.expect("started")
}

/// The pieces of `bytes` that `end` ends, sorted.
fn sorted(bytes: &[u8], end: u8) -> Vec<OsString> {
    let mut pieces: Vec<_> = bytes
        .split(|&byte| byte == end)
        .map(|piece| OsString::from_vec(piece.to_vec()))
        .collect();
    pieces.sort_unstable();
    pieces
}

// Promises: find-gnu
#[test]
fn find_prints_the_files_that_gnu_find_prints() {
    for seed in 0..TREES {
        let place = place_with_tree(seed);
        for expression in [
            &[][..],
            &["-type", "f", "-size", "+3k"],
            &["(", "-name", "*.txt", "-o", "-type", "d", "-empty", ")"],
            &["-name", "a", "-prune", "-o", "-type", "l", "-print0"],
            &["-mindepth", "2", "-maxdepth", "2", "-links", "+1"],
            &["-depth", "-perm", "-4000"],
            &["-depth", "-maxdepth", "0"],
            &["-depth", "-mindepth", "1", "-maxdepth", "2", "-print0"],
            &[
                "!", "-path", "*/a/*", "(", "-iname", "readme", "-o", "-name", ".*", ")",
            ],
            &["-newermt", "2001-01-01", "-type", "f"],
        ] {
            let mut words = expression.to_vec();
            if !words.contains(&"-print0") {
                words.push("-print0");
            }
            let theirs = run(&place, "tree", &[&["find", "."], &words[..]].concat());
            let archive = tarfs(&place, &[&["find", "a.tar"], &words[..]].concat());
            let expected = sorted(&theirs.stdout, 0);
            assert_eq!(sorted(&archive.stdout, 0), expected, "{seed} {words:?}");
            assert_eq!(archive.status.code(), Some(0), "{seed} {words:?}");
            let theirs = run(&place, "", &[&["find", "tree"], &words[..]].concat());
            let ours = tarfs(&place, &[&["find", "tree"], &words[..]].concat());
            let expected = sorted(&theirs.stdout, 0);
            assert_eq!(sorted(&ours.stdout, 0), expected, "{seed} {words:?}");
        }
    }
}

// Promises: find-gnu
#[test]
fn find_prints_mount_points_and_enters_none() {
    let place = Place::new();
    for order in ["-noleaf", "-depth"] {
        let words = [
            "find",
            "/",
            "-maxdepth",
            "2",
            "-xdev",
            order,
            "-path",
            "/proc*",
        ];
        let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
        assert_eq!(ours.stdout, theirs.stdout, "{order}");
    }
}

// Promises: du-gnu
#[test]
fn du_prints_what_gnu_du_prints() {
    for seed in 0..TREES {
        let place = place_with_tree(seed);
        fs::write(place.path("tree/file"), "x").expect("space");
        fs::hard_link(place.path("tree/file"), place.path("tree/second")).expect("ours");
        let ours = tarfs(&place, &["du", "-c", "tree", "tree/file", "tree/second"]);
        let theirs = ["du", "-c", "tree", "tree/file", "tree/second"];
        assert_eq!(ours.stdout, run(&place, "", &theirs).stdout, "{seed}");
        for options in [
            &[][..],
            &["-a"],
            &["-ad", "1"],
            &["-s"],
            &["-ch", "-d", "1"],
            &["--apparent-size"],
            &["--inodes", "-d", "2"],
        ] {
            let theirs = run(&place, "", &[&["du"], options, &["tree"]].concat());
            let ours = tarfs(&place, &[&["du"], options, &["tree"]].concat());
            assert_eq!(ours.stdout, theirs.stdout, "{seed} {options:?}");
        }
    }
}

// Promises: du-gnu
#[test]
fn du_counts_each_file_where_gnu_du_does() {
    let place = Place::new();
    for number in 0..30 {
        let directory = format!("t/d{number}");
        fs::create_dir_all(place.path(&format!("{directory}/sub"))).expect("new");
        for (name, len) in [("sub/f", 20_000), ("own", 10_000)] {
            place.put(&format!("{directory}/{name}"), vec![1; len]);
        }
        for (of, name) in [
            (format!("{directory}/sub/f"), format!("{directory}/beside")),
            (String::from("t/d0/own"), format!("{directory}/link")),
            (format!("{directory}/own"), format!("t/again{number}")),
        ] {
            fs::hard_link(place.path(&of), place.path(&name)).expect("ours");
        }
    }
    let tar = ["tar", "-cf", "a.tar", "-C", "t", "."];
    assert!(run(&place, "", &tar).status.success());
    for words in [
        "t",
        "-j 1 t",
        "-a t",
        "-ad 1 t",
        "-ac t/d1 t/d2 t/d1/sub",
        "-c t/. t/d3 t/.",
        "-cs t/d1/sub t/d1 t/d2/own t/d2",
        "-c t/d1 t/d1",
    ] {
        let of_verb = |line: &'static str| ["du"].into_iter().chain(line.split(' '));
        let gnu = of_verb(words.trim_start_matches("-j 1 "));
        let theirs = run(&place, "", &gnu.collect::<Vec<_>>());
        let found = tarfs(&place, &of_verb(words).collect::<Vec<_>>());
        assert_eq!(found.stdout, theirs.stdout, "{words}");
    }
    for flags in [&["--inodes"][..], &["--inodes", "-a"]] {
        let theirs = run(&place, "t", &[&["du"], flags, &["."]].concat());
        let ours = tarfs(&place, &[&["du"], flags, &["a.tar"]].concat());
        assert_eq!(sorted(&ours.stdout, b'\n'), sorted(&theirs.stdout, b'\n'));
    }
    let ours = tarfs(&place, &["du", "-cs", "a.tar", "d1", "d1/sub", "d1"]);
    assert_eq!(String::from_utf8_lossy(&ours.stdout).lines().count(), 2);
}

// Promises: find-refused
#[test]
fn find_refuses_owners_that_no_file_of_this_machine_has() {
    let place = place_with_tree(1);
    for (words, code) in [
        ("tree -user nosuchname", 1),
        ("tree -group nosuchname", 1),
        ("tree -user 77777", 0),
        ("a.tar -user nosuchname", 0),
        ("tree -type f,d", 0),
        ("tree -type f,f", 1),
    ] {
        let words: Vec<_> = words.split(' ').collect();
        let ours = tarfs(&place, &[&["find"], &*words].concat());
        assert_eq!(ours.status.code(), Some(code), "{words:?}");
    }
}

// Promises: find-gnu
#[test]
fn find_before_quit_prints_a_starting_point_once() {
    let place = place_with_tree(1);
    for words in [
        "tree -print -quit",
        "a.tar -printf [%p] -quit",
        "tree -depth -print -quit",
    ] {
        let words: Vec<_> = words.split(' ').collect();
        let ours = tarfs(&place, &[&["find"], &*words].concat());
        let expected = match words[0] {
            "a.tar" => b"[.]".to_vec(),
            _ => run(&place, "", &[&["find"], &*words].concat()).stdout,
        };
        assert_eq!(ours.stdout, expected, "{words:?}");
    }
}

// Promises: find-gnu
#[test]
fn find_writes_no_part_of_a_record_it_cannot_complete() {
    let place = Place::new();
    for name in ["t/n/a", "t/n/d/b", "t/z"] {
        let path = place.path(name);
        fs::create_dir_all(path.parent().expect("one")).expect("new");
        fs::write(path, "").expect("space");
    }
    symlink("a", place.path("t/n/l")).expect("new");
    place.give_to_user();
    // Its names can be read, but its files cannot be examined.
    let path = place.path("t/n");
    fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("ours");
    for words in [
        r"t -type f -printf %p\t%s\n",
        r"t -print -printf %p\t%m\n",
        "t ! -size 0 -print",
        "t -size 5 -o -print",
        r"t -depth -printf %p:%u\n -o -print",
        "t -empty",
    ] {
        let [theirs, ours] = ["env", "./tarfs"].map(|program| {
            let mut command = place.command_of_user(program);
            command.arg("find").args(words.split(' '));
            let output = command
                .current_dir(place.path(""))
                .env("LC_ALL", "C")
                .output();
            let output = output.expect("started");
            (sorted(&output.stdout, b'\n'), output.status.code())
        });
        assert_eq!(ours, theirs, "{words}");
    }
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("ours");
}

// Promises: walk-output
#[test]
fn closed_or_ended_output_is_treated_as_by_gnu_programs() {
    let place = place_with_tree(1);
    let status = |line: &str| {
        let line = line.replace("tarfs", PROGRAM);
        let mut bash = place.command("bash");
        let output = bash
            .arg("-c")
            .arg(line)
            .current_dir(place.path(""))
            .output();
        let output = output.expect("bash");
        (
            output.status.code(),
            String::from_utf8(output.stderr).expect("UTF-8"),
        )
    };
    for (line, code) in [
        ("tarfs ls tree >&-", 2),
        ("tarfs find tree >&-", 1),
        ("tarfs du a.tar >&-", 1),
        ("tarfs chmod -v 755 tree >&-", 1),
        ("tarfs verify a.tar >&-", 2),
        ("tarfs shard plan --shards 2 a.tar >&-", 2),
    ] {
        let (found, error) = status(line);
        assert_eq!(found, Some(code), "{line}: {error}");
        assert!(error.contains("Bad file descriptor"), "{line}: {error}");
    }
    for line in [
        "verify a.tar",
        "status",
        "materialize --to-stdout a.tar",
        "ls -R tree",
    ] {
        let line = format!("tarfs {line} > >(exit) 2>errors; cat errors >&2; exit 0");
        assert_eq!(status(&line), (Some(0), String::new()), "{line}");
    }
}

// Promises: names-order, ls-gnu, archives-place
#[test]
fn ls_prints_what_gnu_ls_prints() {
    for seed in 0..TREES {
        let place = place_with_tree(seed);
        for options in [
            &[][..],
            &["-A"],
            &["-l"],
            &["-lA"],
            &["-lnr"],
            &["-n"],
            &["-lS"],
            &["-lt"],
            &["-lhi"],
            &["-1tr"],
            &["-ld"],
            &["-U"],
            &["-AUi"],
            &["-lrU"],
        ] {
            let style = ["--time-style=+%Y-%m-%d %H:%M:%S"];
            let theirs = run(&place, "", &[&["ls"], options, &style, &["tree"]].concat());
            let ours = tarfs(&place, &[&["ls"], options, &["tree"]].concat());
            let theirs = String::from_utf8_lossy(&theirs.stdout);
            let lines = theirs.split_inclusive('\n');
            let theirs: String = lines.filter(|line| !line.starts_with("total ")).collect();
            let ours = String::from_utf8_lossy(&ours.stdout);
            assert_eq!(ours, theirs, "{seed} {options:?}");
        }
        let words = "find . -mindepth 1 -name .* -prune -o -mindepth 1 -printf %P\\n";
        let visible = run(&place, "tree", &words.split(' ').collect::<Vec<_>>());
        let expected = sorted(&visible.stdout, b'\n');
        for words in ["ls -R tree", "ls -RU tree", "ls -R a.tar", "ls -RU a.tar"] {
            let listed = tarfs(&place, &words.split(' ').collect::<Vec<_>>());
            assert_eq!(sorted(&listed.stdout, b'\n'), expected, "{seed} {words}");
        }
    }
}

/// Adds an ACL, devices with numbers of several lengths, and a link to a directory.
fn add_odd_files(place: &Place) {
    let acl = ["-m", "u:1:rw", "tree/with-acl"];
    place.put("tree/with-acl", "1");
    let set = place.command("setfacl").args(acl).status();
    assert!(set.expect("acl is installed").success());
    for (name, kind, minor) in [("n1", "c", "1"), ("n2", "b", "1234")] {
        let words = [&format!("tree/{name}"), kind, "259", minor];
        let made = place.command("mknod").args(words).status();
        assert!(made.expect("coreutils").success());
    }
    symlink("tree", place.path("link")).expect("new");
    symlink("one", place.path("tree/to-one")).expect("new");
    for name in ["tree/one", "tree/two"] {
        fs::create_dir_all(place.path(name)).expect("made");
        fs::write(place.path(name).join("file"), name).expect("space");
    }
}

// Promises: ls-gnu
#[test]
fn ls_of_several_paths_acls_and_links_is_that_of_gnu_ls() {
    let place = place_with_tree(3);
    add_odd_files(&place);
    let packed = run(
        &place,
        "",
        &[
            "tar",
            "--acls",
            "--format=posix",
            "-cf",
            "a.tar",
            "-C",
            "tree",
            ".",
        ],
    );
    assert!(packed.status.success());
    let style = "--time-style=+%Y-%m-%d %H:%M:%S";
    for (options, paths) in [
        (&["-l"][..], &[][..]),
        (&["-n"], &["two", "one", "n2", "with-acl", "n1"]),
        (&["-r"], &["two", "one", "to-one", "n1"]),
        (&[], &["to-one", "none", "one"]),
        (&["-ld"], &["to-one", "one", "with-acl"]),
        (&["-l"], &["to-one"]),
        (&[], &["to-one"]),
        (&["-tr"], &["two", "one", "n1"]),
    ] {
        let theirs = run(&place, "tree", &[&["ls", style], options, paths].concat());
        let theirs = String::from_utf8_lossy(&theirs.stdout);
        let lines = theirs.split_inclusive('\n');
        let expected: String = lines.filter(|line| !line.starts_with("total ")).collect();
        let shows_directories = options == ["-ld"] || options == ["-l"] && paths.is_empty();
        let in_directory = run(&place, "tree", &[&[PROGRAM, "ls"], options, paths].concat());
        let ours = String::from_utf8_lossy(&in_directory.stdout);
        assert_eq!(ours, expected, "{options:?} {paths:?}");
        // Directories of an archive have no size.
        if !shows_directories {
            let ours = tarfs(&place, &[&["ls"], options, &["a.tar"], paths].concat());
            let ours = String::from_utf8_lossy(&ours.stdout);
            assert_eq!(ours, expected, "{options:?} {paths:?}");
        }
    }
    let ours = tarfs(&place, &["ls", "link"]).stdout;
    assert_eq!(ours, run(&place, "", &["ls", "link"]).stdout);
}

// Promises: ls-gnu
#[test]
fn ls_shows_files_that_cannot_be_examined_as_gnu_ls() {
    let place = Place::new();
    for name in ["closed/k", "closed/j", "none/x"] {
        fs::create_dir_all(place.path(name).parent().expect("it has one")).expect("made");
        fs::write(place.path(name), "1").expect("space");
    }
    fs::create_dir(place.path("closed/kd")).expect("made");
    place.give_to_user();
    for (name, mode) in [("closed", 0o644), ("none", 0o000)] {
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).expect("ours");
    }
    let run = |program: &str, words: &[&str]| {
        let mut command = place.command_of_user(program);
        command
            .args(words)
            .env("LC_ALL", "C")
            .output()
            .expect("started")
    };
    let style = "--time-style=+%Y-%m-%d %H:%M:%S";
    for (option, source) in [
        ("-l", "closed"),
        ("-i", "closed"),
        ("-1", "closed"),
        ("-S", "closed"),
        ("-lt", "closed"),
        ("-l", "none"),
    ] {
        let theirs = run("ls", &[option, style, source]);
        let ours = run("./tarfs", &["ls", option, source]);
        let text = String::from_utf8_lossy(&theirs.stdout).replace("total 0\n", "");
        assert_eq!(
            String::from_utf8_lossy(&ours.stdout),
            text,
            "{option} {source}"
        );
        assert_eq!(
            ours.status.code(),
            theirs.status.code(),
            "{option} {source}"
        );
        let theirs = String::from_utf8_lossy(&theirs.stderr).replace('\'', "");
        let expected: BTreeSet<_> = theirs
            .lines()
            .filter_map(|line| line.split(' ').find(|word| word.starts_with(source)))
            .map(str::to_owned)
            .collect();
        let ours = String::from_utf8_lossy(&ours.stderr).into_owned();
        let named = ours.lines().filter_map(|line| line.split(": ").nth(1));
        let named: BTreeSet<_> = named.map(|path| format!("{path}:")).collect();
        assert_eq!(named, expected, "{option} {source}: {ours}");
    }
}

// Promises: ls-gnu, walk-paths
#[test]
fn several_directories_are_shown_as_by_the_namesakes() {
    let place = place_with_tree(2);
    fs::create_dir(place.path("tree/below")).expect("made");
    for name in ["out/file", "tree/inside"] {
        fs::write(place.path(name), "x").expect("space");
    }
    symlink("none", place.path("dangling")).expect("made");
    let absolute = place.path("out");
    let absolute = absolute.to_str().expect("UTF-8");
    for verb in ["ls", "find", "du"] {
        for operands in [
            &["tree", absolute][..],
            &[absolute, "tree/inside", "tree"],
            &["out/../tree/below", "tree/below/../inside"],
            &["tree", "none", "out"],
            &["tree/below", "../none"],
            &["none", "tree"],
            &["dangling", "tree"],
            &["tree/", "out/"],
        ] {
            let words = [&[verb], operands].concat();
            let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
            let told = String::from_utf8_lossy(&ours.stderr);
            assert_eq!(
                ours.status.code(),
                theirs.status.code(),
                "{words:?}: {told}"
            );
            let (ours, theirs) = (sorted(&ours.stdout, b'\n'), sorted(&theirs.stdout, b'\n'));
            assert_eq!(ours, theirs, "{words:?}");
        }
        let outcome = place.run(&[verb, "--layer", "a.tar"]);
        assert!(
            outcome.complaints.contains("--layer is for archives"),
            "{verb}"
        );
        // Without operands it is the current directory.
        let (theirs, ours) = (
            run(&place, "tree", &[verb]),
            run(&place, "tree", &[PROGRAM, verb]),
        );
        assert_eq!(
            sorted(&ours.stdout, b'\n'),
            sorted(&theirs.stdout, b'\n'),
            "{verb}"
        );
        // In an archive, a leading slash is that of the archive's root.
        let root = tarfs(&place, &[verb, "a.tar", "/"]);
        assert_eq!(root.status.code(), Some(0), "{verb}");
    }
    for expression in [
        &["-name", "below"][..],
        &["!", "-type", "f"],
        &["-maxdepth", "0"],
    ] {
        let theirs = run(&place, "tree", &[&["find"], expression].concat());
        let ours = run(&place, "tree", &[&[PROGRAM, "find"], expression].concat());
        assert_eq!(
            sorted(&ours.stdout, b'\n'),
            sorted(&theirs.stdout, b'\n'),
            "{expression:?}"
        );
    }
}

// Promises: source-kinds
#[test]
fn file_url_names_what_its_path_names() {
    let place = Place::new();
    fs::create_dir_all(place.path("a b/sub")).expect("new");
    place.put("a b/file", "content");
    place.put("a b/sub/other", "more");
    place.put("a.tar", archive_with_links());
    place.succeeds(&["index", "--quiet", "a.tar", "--output", "a.idx"]);
    let path = |name: &str| place.path(name).display().to_string();
    let url = |name: &str| format!("file://{}", path(name));
    for (plain, encoded) in [("a b", "a%20b"), ("a.idx", "a.idx")] {
        for verb in [&["ls"][..], &["ls", "-R"], &["find"], &["du"]] {
            let by_path = place.succeeds(&[verb, &[&*path(plain)]].concat());
            let by_url = place.succeeds(&[verb, &[&*url(encoded)]].concat());
            let [by_path, by_url] = [by_path, by_url].map(|run| sorted(&run.output, b'\n'));
            assert_eq!(by_url, by_path, "{verb:?} {plain}");
        }
    }
    let source = &*url("a%20b");
    place.fails(
        &["cat", source, "file"],
        &["is a directory, not an archive"],
    );
    for verb in ["sync", "copy"] {
        let written = place.run(&[verb, source, verb]);
        assert_eq!(written.code, 0, "{verb}: {}", written.complaints);
        let copied = fs::read_to_string(place.path(verb).join("sub/other"));
        assert_eq!(copied.expect("written"), "more", "{verb}");
    }
    assert_eq!(place.succeeds(&["diff", source, "a b"]).text(), "");
}

// Promises: source-kinds
#[test]
fn path_with_colon_and_slashes_is_no_url() {
    let place = Place::new();
    fs::create_dir(place.path("a:")).expect("new");
    place.put("a:/b.tar", archive_with_links());
    let expected = place.succeeds(&["ls", "-R", "a:/b.tar"]);
    for source in ["./a://b.tar", "join:./a://b.tar"] {
        assert_eq!(
            place.succeeds(&["ls", "-R", source]).text(),
            expected.text()
        );
    }
    assert_eq!(place.succeeds(&["ls", "./a://"]).text(), "b.tar\n");
}

// Promises: walk-paths, json-inodes
#[test]
fn json_has_the_path_without_links_and_lines_have_path() {
    let place = Place::new();
    place.put("a.tar", archive_with_links());
    let field = |line: &str, field: &str| {
        let object: serde_json::Value = serde_json::from_str(line).expect("JSON");
        object.get(field).expect("a field").clone()
    };
    let json = |path: &str| {
        let words = ["ls", "--json", "a.tar", path];
        place.succeeds(&words).text().to_owned()
    };
    let directory = field(
        place
            .succeeds(&["ls", "--json", "-d", "a.tar", "dir"])
            .text(),
        "fileid",
    );
    for path in ["dir/f", "lnk/../f", "./dir//f", "/lnk/../../dir/f"] {
        let line = json(path);
        assert_eq!(field(&line, "path"), "dir/f", "{path}");
        assert_eq!(field(&line, "dirid"), directory, "{path}");
    }
    assert_eq!(field(&json("lnk"), "path"), "dir/sub/g");
    assert_eq!(field(&json("lnk/."), "path"), "dir/sub/g");
    let root = place.succeeds(&["ls", "--json", "-d", "a.tar"]);
    assert_eq!(field(root.text(), "dirid"), 0);
    let listed = place.succeeds(&["ls", "a.tar", "lnk/../f", "lnk/.."]);
    assert_eq!(listed.text(), "lnk/../f\n\nlnk/..:\nf\nsub\n");
    place.succeeds(&["materialize", "-q", "a.tar", "-C", "out"]);
    let listed = place.succeeds(&["ls", "--json", "out/dir", "out/dir/f"]);
    let above = fs::metadata(place.path("out/dir")).expect("there");
    assert_eq!(field(listed.lines()[0], "dirid"), above.ino());
}

// Promises: select-missing
#[test]
fn materialize_refuses_parent_components_and_names_loops() {
    let place = Place::new();
    place.put("a.tar", archive_with_links());
    for path in ["lnk/..", "lnk/../f", "../dir", "dir/..", ".."] {
        for words in [
            &["-C", "out"][..],
            &["-O"],
            &["--dry-run"],
            &["-C", "out", "--resume"],
        ] {
            let words = [&["materialize", "-q", "a.tar"], words, &[path]].concat();
            let told = place.fails(&words, &["cannot contain `..`", "`tarfs find`"]);
            assert!(told.contains(&format!("{path}: ")), "{told}");
        }
    }
    place.fails(
        &["materialize", "-q", "a.tar", "-C", "out", "loop/x"],
        &["loop/x: ", "too many levels of symbolic links"],
    );
    let written = fs::read_dir(place.path("out")).expect("there");
    assert_eq!(written.count(), 0);
    // GNU tar ignores the slash, too.
    place.succeeds(&["materialize", "-q", "a.tar", "-C", "out", "dir/f/"]);
    assert!(place.path("out/dir/f").exists() && !place.path("out/dir/sub").exists());
}

// Promises: walk-paths, select-path, select-late-link
#[test]
fn path_through_a_link_of_an_archive_is_found() {
    let place = Place::new();
    let archive = Archive::new()
        .symlink("bin", "usr/bin")
        .file("usr/bin/sh", "shell")
        .file("usr/bin/ls", "list")
        .symlink("out", "../etc")
        .symlink("late", "usr/bin");
    place.put("a.tar", archive.end());
    let text = |words: &str| {
        let words: Vec<_> = words.split(' ').collect();
        place.succeeds(&words).text().to_owned()
    };
    assert_eq!(text("ls a.tar bin/sh late/ls"), "bin/sh\nlate/ls\n");
    assert_eq!(text("ls a.tar bin"), "ls\nsh\n");
    assert_eq!(text("ls a.tar bin/"), "ls\nsh\n");
    assert_eq!(
        text("find a.tar bin/sh late/../bin/ls"),
        "bin/sh\nlate/../bin/ls\n"
    );
    assert_eq!(text("find a.tar bin"), "bin\n");
    assert!(text("du --apparent-size -a a.tar bin/sh").ends_with("\tbin/sh\n"));
    assert_eq!(text("materialize -O a.tar bin/sh"), "shell");
    place.succeeds(&["materialize", "-q", "a.tar", "-C", "out", "bin/sh"]);
    assert_eq!(
        fs::read(place.path("out/usr/bin/sh")).expect("written"),
        b"shell"
    );
    assert!(!place.path("out/usr/bin/ls").exists());
    let archive = Archive::new()
        .directory("a/b")
        .symlink("x", "a/b")
        .symlink("l", "x/../c")
        .file("a/c/f", "of the kernel")
        .file("c/f", "of the text");
    place.put("b.tar", archive.end());
    assert_eq!(text("materialize -O b.tar l/f"), "of the kernel");
    assert_eq!(text("ls b.tar l/f"), "l/f\n");
    place.fails(
        &["materialize", "-q", "a.tar", "-C", "out", "late/ls"],
        &[
            "late/ls: goes through a symbolic link",
            "name usr/bin/ls instead",
        ],
    );
    for verb in ["ls", "find", "du"] {
        let output = tarfs(&place, &[verb, "a.tar", "out/passwd"]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            told.contains("out/passwd: a symbolic link on the way leads outside"),
            "{told}"
        );
        let output = tarfs(&place, &[verb, "a.tar", "../usr"]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            told.contains("../usr: its `..` leads above the root"),
            "{told}"
        );
        let output = tarfs(&place, &[verb, "a.tar", "bin/none"]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("bin/none: not in the archive"), "{told}");
    }
}

#[test]
fn columns_of_an_archive_are_aligned() {
    let place = Place::new();
    let mut archive = Archive::new().symlink("0", "target");
    for number in 1..11 {
        archive = archive.file(&number.to_string(), vec![b'x'; 1 << number]);
    }
    place.put("a.tar", archive.end());
    let listed = place.succeeds(&["ls", "-iU", "a.tar"]);
    // As GNU ls, which prints each line at once.
    let expected = (0..11).map(|number| format!("{} {number}", number + 2));
    assert_eq!(listed.lines(), expected.collect::<Vec<_>>());
    let listed = place.succeeds(&["ls", "-lU", "a.tar"]);
    let starts = listed.lines().into_iter().map(|line| line.find("2001"));
    assert_eq!(starts.collect::<BTreeSet<_>>().len(), 1);
    let sizes = ["find", "a.tar", "-name", "10", "-printf", "%b %k "];
    assert_eq!(place.succeeds(&sizes).text(), "2 1 ");
    let sizes = ["find", "a.tar", "-name", "1", "-printf", "%b %k "];
    assert_eq!(place.succeeds(&sizes).text(), "1 1 ");
}

#[test]
fn large_directory_is_listed_in_order() {
    let place = Place::new();
    fs::create_dir(place.path("large")).expect("new");
    for number in 0..4000 {
        fs::create_dir(place.path(&format!("large/{number:0>60}"))).expect("new");
    }
    for words in ["du large", "ls large", "ls -r large"] {
        let words: Vec<_> = words.split(' ').collect();
        let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
        assert!(ours.stdout == theirs.stdout, "{words:?}");
    }
}

// Promises: walk-missing
#[test]
fn missing_paths_have_the_exit_codes_of_the_namesakes() {
    let place = place_with_tree(1);
    for source in ["a.tar", "tree"] {
        for (verb, code) in [("ls", 2), ("find", 1), ("du", 1)] {
            let output = tarfs(&place, &[verb, source, "none", "."]);
            assert_eq!(output.status.code(), Some(code), "{verb} {source}");
            assert!(!output.stdout.is_empty(), "{verb} {source}");
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(told.contains("none: "), "{verb} {source}: {told}");
        }
    }
}

/// Runs `line` in `place` with at most 64 open files.
fn run_limited(place: &Place, line: &str) -> Output {
    let line = format!("ulimit -n 64; {line}");
    place
        .command("sh")
        .args(["-c", &line])
        .output()
        .expect("a shell")
}

// Promises: walk-deep
#[test]
fn tree_deeper_than_the_limit_of_open_files_is_walked() {
    let place = Place::new();
    fs::create_dir(place.path("deep")).expect("new");
    let mut level = openat(CWD, place.path("deep"), OFlags::PATH, Mode::empty()).expect("new");
    for _ in 0..1000 {
        for name in ["d", "e"] {
            mkdirat(&level, name, Mode::from(0o755)).expect("new");
        }
        let file = openat(&level, "f", OFlags::CREATE, Mode::from(0o644));
        drop(file.expect("new"));
        level = openat(&level, "d", OFlags::PATH, Mode::empty()).expect("there");
    }
    for words in ["find deep", "find deep -depth -links 2", "du -a deep"] {
        let theirs = run(&place, "", &words.split(' ').collect::<Vec<_>>());
        let ours = run_limited(&place, &format!("exec {PROGRAM} {words}"));
        assert_eq!(String::from_utf8_lossy(&ours.stderr), "", "{words}");
        let (ours, theirs) = (sorted(&ours.stdout, b'\n'), sorted(&theirs.stdout, b'\n'));
        assert!(
            ours == theirs && ours.len() > 1000,
            "{words}: {}",
            ours.len()
        );
    }
    let listed = run_limited(&place, &format!("exec {PROGRAM} ls -R deep"));
    assert_eq!(String::from_utf8_lossy(&listed.stderr), "");
    let all = run(
        &place,
        "deep",
        &["find", ".", "-mindepth", "1", "-printf", "%P\\n"],
    );
    assert_eq!(sorted(&listed.stdout, b'\n'), sorted(&all.stdout, b'\n'));
    fs::create_dir(place.path("copy")).expect("new");
    for words in [
        "copy -q deep copy",
        "diff deep copy",
        "sync -q --delete deep copy",
        "diff deep copy",
    ] {
        let ours = run_limited(&place, &format!("exec {PROGRAM} {words}"));
        assert_eq!(String::from_utf8_lossy(&ours.stderr), "", "{words}");
        assert!(ours.status.success() && ours.stdout.is_empty(), "{words}");
        // The update has something to do at each level.
        let times = "find copy -depth -name f -exec touch -d @1 {} +; rm -r copy/e";
        if words.ends_with("diff deep copy") {
            run(&place, "", &["sh", "-c", times]);
        }
    }
    for words in ["chmod -R go= deep", "rm -r deep"] {
        let ours = run_limited(&place, &format!("exec {PROGRAM} {words}"));
        assert_eq!(String::from_utf8_lossy(&ours.stderr), "", "{words}");
    }
    assert!(!place.path("deep").exists());
}

/// Undoes the escapes of composefs-dump(5).
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut parts = field.split(|&byte| byte == b'\\');
    let mut bytes = parts.next().expect("one").to_vec();
    for part in parts {
        let (code, rest) = part.split_at(3);
        let code = std::str::from_utf8(code).expect("ASCII");
        let number = code.strip_prefix('x').expect("hexadecimal");
        bytes.push(u8::from_str_radix(number, 16).expect("two digits"));
        bytes.extend_from_slice(rest);
    }
    bytes
}

/// Returns the fields of each path, and checks the grammar of composefs-dump(5).
fn parse_dump(text: &[u8]) -> BTreeMap<PathBuf, Vec<Vec<u8>>> {
    let mut entries: BTreeMap<PathBuf, Vec<Vec<u8>>> = BTreeMap::new();
    for line in text
        .strip_suffix(b"\n")
        .expect("lines")
        .split(|&byte| byte == b'\n')
    {
        assert!(line.iter().all(|&byte| (b' '..=b'~').contains(&byte)));
        let fields: Vec<_> = line.split(|&byte| byte == b' ').map(unescape).collect();
        assert!(fields.len() >= 11, "eleven fields: {line:?}");
        let path = PathBuf::from(OsString::from_vec(fields.first().expect("a path").clone()));
        let parent = path.parent().map(Path::to_owned);
        assert!(
            parent.is_none_or(|parent| entries.contains_key(&parent)),
            "{}",
            path.display()
        );
        assert!(entries.insert(path, fields).is_none(), "one line a path");
    }
    entries
}

// Promises: ls-composefs
#[test]
fn composefs_dump_describes_the_tree() {
    for seed in 0..3 {
        let place = place_with_tree(seed);
        let file = place.path("tree/xattr=file");
        fs::write(&file, "content").expect("space");
        let has_xattr = setxattr(&file, "user.a=b", b"c =\0", XattrFlags::empty()).is_ok();
        fs::write(place.path("tree/empty"), "").expect("space");
        symlink("-", place.path("tree/dash")).expect("ours");
        let mut packed = place.command("tar");
        packed.args([
            "--format=posix",
            "--xattrs",
            "-cf",
            "a.tar",
            "-C",
            "tree",
            ".",
        ]);
        assert!(packed.status().expect("GNU tar").success());
        for source in ["a.tar", "tree"] {
            let output = tarfs(&place, &["ls", "--format", "composefs", source]);
            assert_eq!(String::from_utf8_lossy(&output.stderr), "");
            // A dash alone would be no target.
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains(r" \x2d - -"), "{text}");
            let entries = parse_dump(&output.stdout);
            let mut firsts: BTreeMap<u64, PathBuf> = BTreeMap::new();
            let mut count = 0;
            let mut left = vec![place.path("tree")];
            while let Some(path) = left.pop() {
                count += 1;
                let found = path.symlink_metadata().expect("there");
                let inner = path.strip_prefix(place.path("tree")).expect("below");
                let fields = &entries[&Path::new("/").join(inner)];
                let text = |number: usize| String::from_utf8_lossy(&fields[number]).into_owned();
                let payload = Path::new(OsStr::from_bytes(&fields[8]));
                if found.is_dir() {
                    left.extend(
                        fs::read_dir(&path)
                            .expect("ours")
                            .map(|it| it.unwrap().path()),
                    );
                } else {
                    assert_eq!(text(1), found.len().to_string(), "{path:?}");
                    assert_eq!(text(3), found.nlink().to_string(), "{path:?}");
                }
                let is_link = text(2).starts_with('@');
                let mode = format!("{:o}", found.mode());
                assert_eq!(text(2).trim_start_matches('@'), mode, "{path:?}");
                assert_eq!(text(4), found.uid().to_string(), "{path:?}");
                assert_eq!(text(5), found.gid().to_string(), "{path:?}");
                let time = format!("{}.{}", found.mtime(), found.mtime_nsec());
                assert_eq!(text(7), time, "{path:?}");
                if found.is_symlink() {
                    assert_eq!(payload, fs::read_link(&path).expect("a link"));
                } else if is_link {
                    let target = &entries[payload];
                    assert!(!target[2].starts_with(b"@"), "{path:?}");
                    assert_eq!(target[8], payload.as_os_str().as_bytes()[1..], "{path:?}");
                } else if found.is_file() && found.len() > 0 {
                    assert_eq!(payload, inner);
                    assert!(firsts.insert(found.ino(), inner.to_owned()).is_none());
                } else {
                    assert_eq!(text(8), "-", "{path:?}");
                }
                assert_eq!((text(9), text(10)), ("-".to_owned(), "-".to_owned()));
            }
            assert_eq!(entries.len(), count);
            let line = &entries[Path::new("/xattr=file")];
            let xattrs: Vec<_> = line[11..]
                .iter()
                .filter(|it| it.starts_with(b"user"))
                .collect();
            let expected = b"user.a=b=c =\0".to_vec();
            assert_eq!(
                xattrs,
                if has_xattr {
                    vec![&expected]
                } else {
                    Vec::new()
                }
            );
        }
    }
}

#[test]
fn json_names_the_directory_of_each_file() {
    let place = Place::new();
    fs::create_dir_all(place.path("t/a")).expect("new");
    place.put("t/a/f", "");
    let touched = place
        .command("sh")
        .args(["-c", "touch -ad@5 t/a/f; touch -md@7 t/a/f"])
        .status();
    assert!(touched.expect("a shell").success());
    let listed = place.succeeds(&["ls", "-R", "--json", "t"]);
    let number = |path: &str, field: &str| {
        let mut objects = listed.lines().into_iter().map(|line| {
            let object: serde_json::Value = serde_json::from_str(line).expect("JSON");
            object
        });
        let object = objects.find(|object| object["path"] == path);
        object.expect("listed")[field].as_u64()
    };
    assert_eq!(number("a/f", "dirid"), number("a", "fileid"));
    let root = place.path("t").metadata().expect("there").ino();
    assert_eq!(number("a", "dirid"), Some(root));
    let times = ["atime", "mtime"].map(|field| number("a/f", field));
    assert_eq!(times, [Some(5), Some(7)]);
}

// Promises: find-refused
#[test]
fn wrong_expression_is_named() {
    let place = place_with_tree(1);
    for (words, expected) in [
        (&["-foo"][..], "unknown predicate '-foo'"),
        (&["-exec", "rm"], "xargs"),
        (&["-fstype", "x"], "'-fstype' is not supported"),
        (&["-true", "-L"], "'-L' is not supported"),
    ] {
        let outcome = place.run(&[&["find", "a.tar"], words].concat());
        assert_eq!(outcome.code, 1, "as GNU find");
        assert!(outcome.complaints.contains(expected), "{words:?}");
    }
}

/// Makes `t` with links of each kind, a link to it, and `a.tar` with what is in it.
fn make_links(place: &Place) {
    let script = "mkdir -p t/d/sub outside; echo inside > t/d/f; ln t/d/f t/hard; echo g > t/d/sub/g
        ln -s d t/l; ln -s d/f t/lf; ln -s none t/dangling; ln -s self t/self; ln -s . t/loop; ln -s .. t/d/up
        ln -s f/x t/d/not; ln -s t tl; ln -s t/d/f tf; ln -s none tn; tar cf a.tar -C t .
        head -c 100000 /dev/zero > outside/o; ln -s ../outside t/out";
    let made = place.command("sh").args(["-c", script]).status();
    assert!(made.expect("a shell").success());
}

/// The words of a command line of `find`.
fn words_of<'a>(starts: &'a str, words: &[&'a str]) -> Vec<&'a str> {
    let starts = starts.split(' ').filter(|word| !word.is_empty());
    ["find"]
        .into_iter()
        .chain(starts)
        .chain(words.iter().copied())
        .collect()
}

// Promises: walk-links
#[test]
fn find_follows_the_links_that_gnu_find_follows() {
    let place = Place::new();
    make_links(&place);
    // GNU find shows it as a link, and has an error, too.
    fs::remove_file(place.path("t/d/not")).expect("ours");
    run(&place, "", &["tar", "--delete", "-f", "a.tar", "./d/not"]);
    let print = ["-printf", "%p %y %d %l\\n"];
    for (starts, archive, words) in [
        ("-L t", "-L", &print[..]),
        ("-H t", "-H", &print),
        ("-P t", "-P", &print),
        ("-H tl t/l tf tn", "", &print),
        ("-P tl tf", "", &print),
        ("-L tl/d", "", &print),
        ("-H -L t", "-H -L", &print),
        ("-L -P t", "-L -P", &print),
        ("-L t", "-L", &["-depth"]),
        ("-L t", "-L", &["-type", "l"]),
        ("-L t", "-L", &["-lname", "*n*"]),
        ("-L t", "-L", &["-xdev", "-empty"]),
        (
            "-L t",
            "-L",
            &["-maxdepth", "1", "-size", "-2", "!", "-type", "d"],
        ),
        ("-L t", "", &["-samefile", "t/lf"]),
        ("-H t", "", &["-samefile", "t/lf"]),
        ("-P t", "", &["-samefile", "t/lf"]),
    ] {
        let compare = |theirs: Output, ours: Output| {
            let lines = |output: &Output| sorted(&output.stdout, b'\n');
            assert_eq!(lines(&ours), lines(&theirs), "{starts} {words:?}");
            let (found, expected) = (stderr_text(&ours), stderr_text(&theirs));
            let counts = [&found, &expected].map(|text| text.lines().count());
            assert_eq!(
                counts[0], counts[1],
                "{starts} {words:?}: {found} {expected}"
            );
            assert_eq!(
                ours.status.code(),
                theirs.status.code(),
                "{starts} {words:?}"
            );
        };
        let find = words_of(starts, words);
        compare(run(&place, "", &find), tarfs(&place, &find));
        if !archive.is_empty() {
            fs::rename(place.path("t/out"), place.path("kept")).expect("ours");
            let find = format!("{archive} .");
            let theirs = run(&place, "t", &words_of(&find, words));
            fs::rename(place.path("kept"), place.path("t/out")).expect("ours");
            let find = format!("{archive} a.tar");
            compare(theirs, tarfs(&place, &words_of(&find, words)));
        }
    }
    // The same error for a starting point, in a directory and in an archive.
    for words in [
        ["find", "-H", "t", "t/self"],
        ["find", "-H", "a.tar", "self"],
    ] {
        let ours = tarfs(&place, &words);
        assert_eq!(ours.status.code(), Some(1), "{words:?}");
        let told = stderr_text(&ours);
        assert!(
            told.contains("self: Too many levels of symbolic links"),
            "{told}"
        );
    }
    let told = stderr_text(&tarfs(&place, &["find", "-L", "t/d"]));
    let expected =
        "file system loop detected; 't/d/up/d' is part of the same file system loop as 't/d'";
    assert!(told.contains(expected), "{told}");
}

// Promises: find-gnu, walk-links
#[test]
fn find_examines_files_behind_links_as_gnu_find() {
    let place = Place::new();
    make_links(&place);
    let script = "ln -s lf t/chain; ln -s dangling t/broken; ln -s self/x t/below; mkfifo t/p; ln -s p t/lp
        ln -s loop/./d/../l t/dots; ln -s /dev/null t/null; tar cf out.tar -C t out null; rm t/out t/null t/d/not
        tar cf a.tar -C t .";
    let made = place.command("sh").args(["-c", script]).status();
    assert!(made.expect("a shell").success());
    for flag in ["-P", "-H", "-L"] {
        for expression in [
            "-printf %p|%y|%3Y|%-2Y|\\n",
            "-name self -prune -o -xtype f",
            "-name [a-m]* -xtype f,d -printf %p|%Y|%y|\\n",
            "-name l* -xtype l -o -xtype p",
            "-name [d-n]* ! -xtype d",
            "-maxdepth 1 -follow -type l",
            "-lname * -o -xtype l -follow",
            "-newer ../tf -follow -newer ../tf -samefile lf",
        ] {
            for paths in ["", "l lf loop dangling chain self", "./l d/../lf"] {
                let words: Vec<_> = expression.split(' ').collect();
                let start = if paths.is_empty() { "." } else { paths };
                let (starts, entries) = (
                    format!("{flag} {start}"),
                    format!("{flag} ../a.tar {paths}"),
                );
                let line = words_of(&starts, &words);
                let theirs = run(&place, "t", &line);
                let [here, archive] = [line, words_of(&entries, &words)].map(|line| {
                    let mut program = place.tarfs();
                    program.current_dir(place.path("t")).env("LC_ALL", "C");
                    program.args(line).output().expect("started")
                });
                for ours in [here, archive] {
                    let lines = |output: &Output| sorted(&output.stdout, b'\n');
                    let told = [&ours, &theirs].map(stderr_text);
                    let line = format!("{flag} {paths} {expression}: {told:?}");
                    assert_eq!(lines(&ours), lines(&theirs), "{line}");
                    let counts = told.each_ref().map(|text| text.lines().count());
                    assert_eq!(counts[0], counts[1], "{line}");
                    assert_eq!(ours.status.code(), theirs.status.code(), "{line}");
                }
            }
        }
    }
    // A link that leads out of an archive is one that leads to nothing.
    let words = ["find", "out.tar", "-xtype", "l", "-printf", "%p %Y\\n"];
    let ours = tarfs(&place, &words);
    assert_eq!(sorted(&ours.stdout, b'\n'), ["", "./null N", "./out N"]);
    symlink("f/x", place.path("t/d/not")).expect("new");
    symlink("n".repeat(300), place.path("t/d/long")).expect("new");
    let words = ["find", "t/d", "-printf", "%p <%Y>\\n"];
    let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
    assert_eq!(sorted(&ours.stdout, b'\n'), sorted(&theirs.stdout, b'\n'));
    assert_eq!(stderr_text(&ours), "tarfs: t/d/long: File name too long\n");
}

// Promises: walk-links
#[test]
fn du_follows_the_links_that_gnu_du_follows() {
    let place = Place::new();
    make_links(&place);
    // It is an error of GNU du, too, but its directories then come in another order.
    fs::remove_file(place.path("t/self")).expect("ours");
    for line in [
        "-sL t",
        "-sL --inodes t",
        "-csL --apparent-size t tl outside",
        "-H tl tf",
        "-D tl tf",
        "--dereference-args tl",
        "-P tl t",
        "tl t",
        "-sD tl -P",
        "-s -P tl -D",
        "-s -D tl -L",
        "-s -L tl -D",
    ] {
        let words: Vec<_> = ["du"].into_iter().chain(line.split(' ')).collect();
        let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
        let lines = |output: &Output| sorted(&output.stdout, b'\n');
        assert_eq!(
            lines(&ours),
            lines(&theirs),
            "{line}: {}",
            stderr_text(&ours)
        );
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}");
    }
    // GNU du has no reason for `dangling`.
    let words = ["du", "-L", "t"];
    let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
    let expected = stderr_text(&theirs)
        .replace("du: cannot access '", "tarfs: ")
        .replace("':", ":");
    let expected = expected.replace("t/dangling'", "t/dangling: No such file or directory");
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(lines(&stderr_text(&ours)), lines(&expected));
    let told = stderr_text(&tarfs(&place, &["du", "-L", "a.tar", "dangling"]));
    assert_eq!(told, "tarfs: dangling: No such file or directory\n");
    let ours = tarfs(&place, &["du", "-sL", "--inodes", "a.tar"]);
    fs::remove_file(place.path("t/out")).expect("ours");
    let theirs = run(&place, "t", &["du", "-sL", "--inodes", "."]);
    assert_eq!(ours.stdout, theirs.stdout);
}

// Promises: find-used
#[test]
fn find_compares_times_of_access_with_times_of_change() {
    let place = Place::new();
    let script = "mkdir t; touch t/now t/later; touch -a -d '+5 days +1 hour' t/later";
    let made = place.command("sh").args(["-c", script]).status();
    assert!(made.expect("a shell").success());
    for age in ["+3", "+5", "+6", "-5", "-6", "-1", "+0"] {
        let words = ["find", "t", "-type", "f", "-used", age];
        let (theirs, ours) = (run(&place, "", &words), tarfs(&place, &words));
        assert_eq!(
            sorted(&ours.stdout, b'\n'),
            sorted(&theirs.stdout, b'\n'),
            "{age}"
        );
    }
    // GNU find 4.9 finds nothing with a number alone.
    let found = |age| tarfs(&place, &["find", "t", "-type", "f", "-used", age]).stdout;
    assert_eq!(found("5"), b"t/later\n");
    assert_eq!(found("6"), b"");
}

// Promises: du-gnu
#[test]
fn du_counts_directories_that_cannot_be_opened() {
    let place = Place::new();
    fs::create_dir_all(place.path("t/closed/below")).expect("new");
    fs::write(place.path("t/closed/f"), "x").expect("space");
    place.give_to_user();
    let mode = |mode| fs::set_permissions(place.path("t/closed"), PermissionsExt::from_mode(mode));
    mode(0o0).expect("ours");
    for words in [
        "du t",
        "du -c t/closed",
        "find t",
        "find t -depth",
        "find t/closed -depth",
        "ls -R t",
    ] {
        let words: Vec<_> = words.split(' ').collect();
        let theirs = place.command_of_user(words[0]).args(&words[1..]).output();
        let ours = place.command_of_user("./tarfs").args(&words).output();
        let (theirs, ours) = (theirs.expect("installed"), ours.expect("installed"));
        if words[0] != "ls" {
            assert_eq!(
                sorted(&ours.stdout, b'\n'),
                sorted(&theirs.stdout, b'\n'),
                "{words:?}"
            );
        }
        assert_eq!(ours.status.code(), Some(1), "{words:?}");
        let told = String::from_utf8_lossy(&ours.stderr);
        assert!(
            told.contains("closed: Permission denied"),
            "{words:?}: {told}"
        );
    }
    mode(0o755).expect("ours");
}

// Promises: find-gnu
#[test]
fn quit_ends_a_walk_and_a_closed_pipe_is_no_error() {
    let place = place_with_tree(2);
    let output = tarfs(&place, &["find", "a.tar", "-type", "f", "-print", "-quit"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(!output.stdout.is_empty());
    let mut line = OsString::from(PROGRAM);
    line.push(" find tree | head -n 1; exit ${PIPESTATUS[0]}");
    let output = Command::new("bash")
        .arg("-c")
        .arg(line)
        .current_dir(place.path(""))
        .output();
    let output = output.expect("bash");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stderr, b"");
}

// Promises: walk-index
#[test]
fn index_file_is_listed_without_its_archive() {
    let place = place_with_tree(1);
    let indexed = tarfs(&place, &["index", "a.tar", "--output", "a.tarfs"]);
    assert!(indexed.status.success());
    for words in [
        &["find", "SOURCE", "-ls"][..],
        &["ls", "-lAR", "SOURCE"],
        &["du", "-a", "SOURCE"],
    ] {
        let of = |source| {
            let mut words = words.to_vec();
            for word in &mut words {
                if *word == "SOURCE" {
                    *word = source;
                }
            }
            tarfs(&place, &words)
        };
        let (archive, index) = (of("a.tar"), of("a.tarfs"));
        assert!(index.status.success() && !index.stdout.is_empty());
        assert_eq!(sorted(&index.stdout, b'\n'), sorted(&archive.stdout, b'\n'));
    }
    fs::remove_file(place.path("a.tar")).expect("there");
    let path = place.path("a.tarfs");
    let listed = tarfs(&place, &["find", "a.tarfs"]);
    assert!(listed.status.success() && !listed.stdout.is_empty());
    let mut bytes = fs::read(&path).expect("there");
    let middle = bytes.len() / 2;
    *bytes.get_mut(middle).expect("there") ^= 1;
    fs::write(&path, bytes).expect("ours");
    let damaged = tarfs(&place, &["find", "a.tarfs"]);
    let text = String::from_utf8_lossy(&damaged.stderr).into_owned();
    assert_eq!(damaged.status.code(), Some(2), "{text}");
    assert!(
        text.contains("a.tarfs") && damaged.stdout.is_empty(),
        "{text}"
    );
}

/// An archive whose index has several frames, and the name of one of its directories.
fn many_directories() -> (Archive, &'static str) {
    let names = (0..12_000).map(|number| format!("dir{:03}/{number:064x}", number / 100));
    let archive = names.fold(Archive::new(), |archive, name| archive.file(&name, "x"));
    (archive, "dir061")
}

// Promises: index-damaged
#[test]
fn damaged_saved_index_is_replaced_by_each_verb() {
    let place = Place::new();
    let (archive, directory) = many_directories();
    fs::write(place.path("a.tar"), archive.end()).expect("space");
    let saved = || {
        let found = tarfs(&place, &["index", "a.tar", "--quiet"]);
        assert!(found.status.success());
        let directory = fs::read_dir(place.path("cache/index")).expect("saved");
        let paths = directory.map(|entry| entry.expect("read").path());
        paths
            .filter(|path| path.extension() == Some(OsStr::new("idx")))
            .collect::<Vec<_>>()
    };
    let [path] = &*saved() else {
        panic!("one index");
    };
    let whole = fs::read(path).expect("saved");
    for words in [
        &["ls", "-d", "a.tar", directory][..],
        &["ls", "-R", "a.tar"],
        &["find", "a.tar"],
        &["du", "a.tar"],
        &["shard", "tar", "a.tar"],
        &["diff", "a.tar", "a.tar"],
        &["shard", "plan", "--shards=2", "a.tar"],
        &["materialize", "a.tar", "-C", "out", directory],
    ] {
        let expected = tarfs(&place, words);
        assert_eq!(expected.status.code(), Some(0), "{words:?}: {expected:?}");
        for place_in_file in [2, 30, 60, 97] {
            let mut damaged = whole.clone();
            let position = whole.len() * place_in_file / 100;
            *damaged.get_mut(position).expect("inside") ^= 0x55;
            fs::write(path, &damaged).expect("ours");
            fs::remove_dir_all(place.path("out")).ok();
            fs::create_dir(place.path("out")).expect("free");
            let got = tarfs(&place, words);
            assert_eq!(got.status.code(), Some(0), "{words:?}: {got:?}");
            assert!(
                sorted(&got.stdout, b'\n') == sorted(&expected.stdout, b'\n'),
                "{words:?}"
            );
            // A run that writes the tree reads the archive itself.
            let is_used = words.first() != Some(&"materialize");
            let is_replaced = fs::read(path).expect("saved") != damaged;
            assert_eq!(is_replaced, is_used, "{words:?}");
        }
    }
}

// Promises: shard-cuts, published-damaged
#[test]
fn missing_part_of_a_published_index_is_an_error_with_path_and_advice() {
    let (place, server) = (Place::new(), Server::start());
    let (archive, directory) = many_directories();
    let bytes = archive.end();
    fs::write(place.path("a.tar"), &bytes).expect("space");
    server.route("/a.tar", move |request| {
        Resource::new(bytes.clone()).etag("\"a\"").answer(request)
    });
    let url = server.url("/a.tar");
    let indexed = tarfs(&place, &["index", &url, "--output", "a.tarfs"]);
    assert!(indexed.status.success(), "{indexed:?}");
    fs::remove_dir_all(place.path("cache")).ok();
    let index = fs::read(place.path("a.tarfs")).expect("written");
    assert!(index.len() > 128 << 10, "{}", index.len());
    server.route("/a.tar.tarfs", move |request| match request.range() {
        Some((start, _)) if start >= 64 << 10 => Response::new(404),
        _ => Resource::new(index.clone()).etag("\"i\"").answer(request),
    });
    for words in [
        &["ls", "-d", &url, directory][..],
        &["ls", "-R", &url, directory],
        &["find", &url, directory],
        &["du", &url, directory],
    ] {
        let got = tarfs(&place, words);
        let text = String::from_utf8_lossy(&got.stderr).into_owned();
        assert!(!got.status.success(), "{words:?}: {got:?}");
        assert!(!text.contains("not in the archive"), "{words:?}: {text}");
        assert!(text.contains("--no-published-index"), "{words:?}: {text}");
        assert!(!text.contains("tarfs: :"), "{words:?}: {text}");
        fs::remove_dir_all(place.path("cache")).ok();
    }
    let whole = tarfs(
        &place,
        &["ls", "-d", "--no-published-index", &url, directory],
    );
    assert!(whole.status.success(), "{whole:?}");
    fs::remove_dir_all(place.path("cache")).ok();
    let planned = tarfs(&place, &["shard", "plan", "--shards=2", &url]);
    assert!(
        planned.status.success(),
        "a publisher's index is used: {planned:?}"
    );
}

// Promises: memory-files
#[test]
fn too_few_descriptors_are_named_and_no_fault_of_the_server() {
    let (place, server) = (Place::new(), Server::start());
    let bytes = Archive::new().file("f", "x").end();
    server.route("/a.tar", move |request| {
        Resource::new(bytes.clone()).etag("\"a\"").answer(request)
    });
    let (url, other) = (server.url("/a.tar"), server.url("/a.tar?2"));
    let mut succeeded = 0;
    for limit in 4..32 {
        fs::remove_dir_all(place.path("cache")).ok();
        let line = format!("ulimit -n {limit}; exec \"$TARFS\" ls --mirror-url '{other}' '{url}'");
        let mut command = place.command("bash");
        let done = command.args(["-c", &line]).env("TARFS", PROGRAM).output();
        let done = done.expect("bash");
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        if done.status.success() {
            assert_eq!(
                (done.stdout.as_slice(), text.as_str()),
                (&b"f\n"[..], ""),
                "{limit}"
            );
            succeeded += 1;
        } else {
            assert_eq!(done.status.code(), Some(2), "{limit}: {text}");
            assert!(text.contains("`ulimit -n`"), "{limit}: {text}");
            assert!(!text.contains("attempts"), "{limit}: {text}");
        }
    }
    assert!(succeeded > 0);
}
