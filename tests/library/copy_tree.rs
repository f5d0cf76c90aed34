//! Copies of directories of this machine, against `cp -a` and GNU tar.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::support::cli::Place;
use crate::support::materialize::{assert_same_trees, content, run, status};
use crate::support::random_tree::{make_tree, set_time};
use crate::support::rng::Rng;
use crate::support::wait::WAIT_TIMEOUT;

/// Trees that are compared.
const TREES: u64 = 6;

/// Lengths that are copied differently.
const LENS: [usize; 6] = [0, 1, 4096, 131_072, 131_073, 1_100_000];

/// A place with the tree `source`, its copy by `cp -a` in `expected`, and the empty directory `copy`.
fn place_with_copy(seed: u64) -> Place {
    let place = Place::new();
    make_tree(&place.path("source"), &mut Rng::new(seed), &LENS);
    run(Command::new("cp")
        .arg("-a")
        .args([place.path("source"), place.path("expected")]));
    fs::create_dir(place.path("copy")).expect("a new directory");
    place
}

// Promises: cp-attributes, cp-owners
#[test]
fn copy_of_directory_equals_that_of_cp() {
    for seed in 0..TREES {
        let place = place_with_copy(seed);
        // The second run replaces every file, and makes no link to itself.
        for _ in 0..2 {
            place.succeeds(&["copy", "source", "copy"]);
            assert_same_trees(&place.path("expected"), &place.path("copy"));
        }
        assert_same_trees(&place.path("expected"), &place.path("source"));
        symlink("source", place.path("link")).expect("ours");
        place.succeeds(&["copy", "link", "new", "--atomic", "--writers=1"]);
        assert_same_trees(&place.path("expected"), &place.path("new"));
    }
}

// Promises: cp-attributes
#[test]
fn copy_keeps_times_of_last_access() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/d")).expect("a new directory");
    place.put("source/d/file", "1");
    symlink("d", place.path("source/link")).expect("ours");
    let names = ["d/file", "d", "link", "."];
    for (name, second) in names.into_iter().zip(1_000_000_000..) {
        run(Command::new("touch")
            .args(["-h", "-a", "-d", &format!("@{second}.5")])
            .arg(place.path("source").join(name)));
    }
    let times = |tree: &str| {
        names.map(|name| {
            let found = place
                .path(tree)
                .join(name)
                .symlink_metadata()
                .expect("there");
            (found.atime(), found.atime_nsec())
        })
    };
    let expected = times("source");
    fs::create_dir(place.path("copy")).expect("a new directory");
    place.succeeds(&["copy", "source", "copy"]);
    assert_eq!(times("copy"), expected);
}

// Promises: cp-flags
#[test]
fn copy_of_chosen_files_equals_that_of_tar() {
    for (flags, packing, unpacking) in [
        (&["--exclude=*.o"][..], &["--exclude=*.o"][..], &[][..]),
        (
            &["--exclude=a", "--exclude=b*"],
            &["--exclude=a", "--exclude=b*"],
            &[],
        ),
        (&["--no-same-permissions"], &[], &["--no-same-permissions"]),
        (&["--skip-old-files"], &[], &["--skip-old-files"]),
    ] {
        let place = place_with_copy(100);
        let archive = place.path("a.tar");
        run(Command::new("tar")
            .args(["--sparse", "--xattrs", "--format=posix"])
            .args(packing)
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(place.path("source"))
            .arg("."));
        fs::remove_dir_all(place.path("expected")).expect("ours");
        for directory in ["expected", "copy"] {
            fs::create_dir_all(place.path(directory)).expect("ours");
            fs::write(place.path(directory).join("README"), "old").expect("space");
            set_time(&place.path(directory).join("README"), &mut Rng::new(5));
            set_time(&place.path(directory), &mut Rng::new(5));
        }
        run(Command::new("tar")
            .args(["--xattrs", "-p", "-xf"])
            .arg(&archive)
            .arg("-C")
            .arg(place.path("expected"))
            .args(unpacking));
        let arguments = ["copy", "source", "copy"];
        place.succeeds(&[&arguments[..], flags].concat());
        if flags == ["--skip-old-files"] {
            // The two directories are old, too, and were changed one after the other.
            for directory in ["expected", "copy"] {
                set_time(&place.path(directory), &mut Rng::new(5));
            }
        }
        assert_same_trees(&place.path("expected"), &place.path("copy"));
    }
}

// Promises: cp-flags
#[test]
fn copy_of_selected_names_has_their_parents() {
    let place = Place::new();
    for name in ["source/a/b/c", "source/a/d"] {
        fs::create_dir_all(place.path(name)).expect("a new directory");
    }
    place.put("source/a/b/c/file", "1");
    place.put("source/a/b/other", "2");
    place.put("source/a/d/file", "3");
    let copy = ["copy", "source", "out"];
    place.succeeds(&[&copy[..], &["--include=a/b/c", "--include=a/d/file"]].concat());
    assert_eq!(content(place.path("out/a/b/c/file")), "1");
    assert_eq!(content(place.path("out/a/d/file")), "3");
    assert!(!place.path("out/a/b/other").exists());
    place.succeeds(&[&copy[..], &["--include=a/b", "--strip-components=2"]].concat());
    assert_eq!(content(place.path("out/c/file")), "1");
    assert_eq!(content(place.path("out/other")), "2");
}

// Promises: cp-inside
#[test]
fn copy_makes_a_missing_destination_but_not_its_parents() {
    let place = Place::new();
    fs::create_dir(place.path("source")).expect("a new directory");
    place.put("source/file", "1");
    let mode = fs::Permissions::from_mode(0o750);
    fs::set_permissions(place.path("source"), mode).expect("ours");
    for source in ["source", "source/"] {
        place.succeeds(&["copy", source, "new"]);
        assert_eq!(content(place.path("new/file")), "1");
        assert_eq!(status(place.path("new")).mode() & 0o7777, 0o750);
    }
    place.fails(&["copy", "source", "no/new"], &["no/new", "cannot make"]);
    place.fails(&["copy", "missing", "newer"], &["missing", "cannot read"]);
    place.fails(&["copy", "new/file", "newer"], &["not a directory"]);
    place.fails(
        &["copy", "--dry-run", "source", "newer"],
        &["newer", "missing"],
    );
    assert!(!place.path("newer").exists());
    // Nothing says which mode a directory gets of which only some names are copied.
    let archive = Command::new("tar")
        .args(["-cf", "a.tar", "-C", "source", "file"])
        .current_dir(place.path("."))
        .status();
    assert!(archive.expect("GNU tar").success());
    fs::create_dir(place.path("made")).expect("a new directory");
    for words in [
        &["copy", "--include=file", "source", "some"][..],
        &["sync", "a.tar", "synced"],
    ] {
        place.succeeds(words);
        let made = words.last().expect("a directory");
        let modes = [made, "made"].map(|name| status(place.path(name)).mode());
        assert_eq!(modes[0], modes[1], "{words:?}");
    }
}

// Promises: cp-flags
#[test]
fn dry_run_of_copy_lists_its_entries_and_writes_nothing() {
    let place = place_with_copy(3);
    let arguments = ["copy", "source", "copy", "--dry-run"];
    let listed = place.succeeds(&arguments);
    let mut names: Vec<_> = listed.output.split(|&byte| byte == b'\n').collect();
    let found = Command::new("find")
        .args([".", "-mindepth", "1", "-printf", "%P\\n"])
        .current_dir(place.path("source"))
        .output();
    let found = found.expect("GNU find").stdout;
    let mut expected: Vec<_> = found.split(|&byte| byte == b'\n').collect();
    // The destination itself.
    expected.push(b"./");
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!(fs::read_dir(place.path("copy")).expect("ours").count(), 0);
}

// Promises: cp-inside
#[test]
fn copy_into_itself_is_refused() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/below/deep")).expect("a new directory");
    for directory in ["source", "source/below", "source/below/deep"] {
        let arguments = ["copy", "source", directory];
        place.fails(&arguments, &["contains the destination", "outside"]);
    }
    for words in [
        &["copy", "source", "source/new", "--atomic"][..],
        &["copy", "source", "source/new"],
        &["sync", "source", "source/new"],
    ] {
        place.fails(words, &["contains the destination"]);
    }
    assert_eq!(fs::read_dir(place.path("source")).expect("ours").count(), 1);
}

// Promises: cp-changing, sync-result
#[test]
fn copy_warns_of_sockets() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/a")).expect("a new directory");
    let _socket = UnixListener::bind(place.path("source/a/socket")).expect("a short path");
    place.put("source/a/file", "content");
    let warning = "tarfs: warning: a/socket: socket ignored\n";
    for verb in ["copy", "sync"] {
        let dry = place.run(&[verb, "--dry-run", "source", "out"]);
        assert_eq!((dry.code, dry.complaints.as_str()), (0, warning), "{verb}");
        assert!(!dry.text().contains("socket"), "{}", dry.text());
    }
    let outcome = place.run(&["copy", "source", "out"]);
    assert_eq!((outcome.code, outcome.complaints.as_str()), (0, warning));
    assert_eq!(content(place.path("out/a/file")), "content");
    // For an update it is not in the source.
    place.put("out/a/socket", "old");
    let words = ["sync", "-q", "--delete", "source", "out"];
    let dry = place.run(&[&words[..], &["--dry-run"]].concat());
    assert!(dry.text().contains("delete a/socket\n"), "{}", dry.text());
    let outcome = place.run(&words);
    assert_eq!((outcome.code, outcome.complaints.as_str()), (0, warning));
    assert!(!place.path("out/a/socket").exists());
    assert_eq!(content(place.path("out/a/file")), "content");
    // A socket in its place stays.
    let _other = UnixListener::bind(place.path("out/a/socket")).expect("a short path");
    let dry = place.run(&[&words[..], &["--dry-run"]].concat());
    assert_eq!((dry.code, dry.complaints.as_str()), (0, warning));
    assert!(!dry.text().contains("delete"), "{}", dry.text());
    let outcome = place.run(&words);
    assert_eq!((outcome.code, outcome.complaints.as_str()), (0, warning));
    assert!(place.path("out/a/socket").exists());
}

// Promises: cp-changing
#[test]
fn copy_reports_files_that_change_meanwhile() {
    let place = Place::new();
    // The kernel says that each has 4096 bytes.
    place.fails(
        &["copy", "/sys/kernel/cgroup", "out", "--include=features"],
        &["features", "changed meanwhile"],
    );
    fs::create_dir(place.path("source")).expect("a new directory");
    place.put("source/log", vec![1; 4 << 20]);
    let ended = AtomicBool::new(false);
    let is_reported = std::thread::scope(|threads| {
        threads.spawn(|| {
            let log = fs::File::options()
                .append(true)
                .open(place.path("source/log"));
            let log = log.expect("ours");
            while !ended.load(Ordering::Relaxed) {
                log.set_modified(SystemTime::now()).expect("ours");
            }
        });
        let copy = || place.run(&["copy", "source", "out"]);
        let is_reported = || copy().complaints.contains("log: the source was changed");
        let start = Instant::now();
        // The other thread may have no turn during a copy.
        let is_reported = loop {
            if is_reported() {
                break true;
            }
            if start.elapsed() > WAIT_TIMEOUT {
                break false;
            }
        };
        ended.store(true, Ordering::Relaxed);
        is_reported
    });
    assert!(is_reported);
}

// Promises: cp-inside
#[test]
fn copy_replaces_no_filled_directory_and_follows_no_link() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/link")).expect("a new directory");
    fs::create_dir_all(place.path("out/full")).expect("a new directory");
    place.put("source/link/file", "content");
    place.put("source/full", "a file");
    place.put("out/full/file", "stays");
    symlink(place.path("mnt"), place.path("out/link")).expect("ours");
    place.fails(&["copy", "source", "out"], &["full", "exists"]);
    assert_eq!(content(place.path("out/link/file")), "content");
    assert!(status(place.path("out/link")).is_dir());
    assert_eq!(content(place.path("out/full/file")), "stays");
    assert_eq!(fs::read_dir(place.path("mnt")).expect("ours").count(), 0);
}

// Promises: cp-inside
#[test]
fn directories_are_not_for_verbs_of_archives() {
    let place = Place::new();
    fs::create_dir(place.path("source")).expect("a new directory");
    for words in [
        &["materialize", "source", "-C", "out"][..],
        &["shard", "write", "source", "1/2", "-C", "out"],
        &["shard", "finish", "source", "-C", "out"],
        &["cat", "source", "file"],
        &["sync", "source", "out", "--max-unpacked-size=1G"],
        &["sync", "source", "out", "--layer=a.tar"],
    ] {
        let flag = words.last().and_then(|flag| flag.strip_prefix("--"));
        let flag = flag.and_then(|flag| flag.split('=').next());
        let code = if flag.is_some() { 64 } else { 2 };
        let told = place.run(words).failure_of(code, &["directory"]);
        assert!(told.contains(flag.unwrap_or_default()), "{told}");
    }
}

// Promises: cp-owners
#[test]
#[ignore = "needs root"]
fn copy_by_root_has_owners_devices_and_all_links() {
    let place = Place::new();
    make_tree(&place.path("source"), &mut Rng::new(7), &LENS);
    let source = place.path("source");
    for (name, kind) in [
        ("block", FileType::BlockDevice),
        ("character", FileType::CharacterDevice),
    ] {
        let device = makedev(259, 70_000);
        mknodat(CWD, source.join(name), kind, Mode::from(0o660), device).expect("root");
    }
    symlink("target", source.join("link")).expect("ours");
    fs::hard_link(source.join("link"), source.join("second")).expect("ours");
    fs::hard_link(source.join("character"), source.join("a second")).expect("ours");
    for (number, entry) in fs::read_dir(&source).expect("ours").enumerate() {
        let path = entry.expect("ours").path();
        let id = 100 + u32::try_from(number).expect("small");
        let mode = status(path.clone()).mode();
        std::os::unix::fs::lchown(&path, Some(id), Some(id + 50)).expect("root");
        if !path.is_symlink() {
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("root");
        }
    }
    let acl = ["u:1234:rwx", "d:g:77:r-x"];
    run(Command::new("setfacl")
        .arg("-m")
        .arg(acl.join(","))
        .arg(&source));
    run(Command::new("cp")
        .arg("-a")
        .args([&source, &place.path("expected")]));
    place.succeeds(&["copy", "source", "out"]);
    assert_same_trees(&place.path("expected"), &place.path("out"));
}
