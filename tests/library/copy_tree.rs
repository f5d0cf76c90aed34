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

#[test]
fn copy_of_directory_equals_that_of_cp() {
    for seed in 0..TREES {
        let place = place_with_copy(seed);
        // The second run replaces every file, and makes no link to itself.
        for _ in 0..2 {
            place.succeeds(&["materialize", "source", "-C", "copy"]);
            assert_same_trees(&place.path("expected"), &place.path("copy"));
        }
        assert_same_trees(&place.path("expected"), &place.path("source"));
        symlink("source", place.path("link")).expect("ours");
        place.succeeds(&[
            "materialize",
            "link",
            "-C",
            "new",
            "--atomic",
            "--writers=1",
        ]);
        assert_same_trees(&place.path("expected"), &place.path("new"));
    }
}

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
    place.succeeds(&["materialize", "source", "-C", "copy"]);
    assert_eq!(times("copy"), expected);
}

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
        let arguments = ["materialize", "source", "-C", "copy"];
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

#[test]
fn copy_of_paths_has_them_and_their_parents_alone() {
    let place = Place::new();
    for name in ["source/a/b/c", "source/a/d"] {
        fs::create_dir_all(place.path(name)).expect("a new directory");
    }
    place.put("source/a/b/c/file", "1");
    place.put("source/a/b/other", "2");
    place.put("source/a/d/file", "3");
    let copy = ["materialize", "source", "-C", "out"];
    place.succeeds(&[&copy[..], &["a/b/c", "a/d/file"]].concat());
    assert_eq!(content(place.path("out/a/b/c/file")), "1");
    assert_eq!(content(place.path("out/a/d/file")), "3");
    assert!(!place.path("out/a/b/other").exists());
    place.succeeds(&[&copy[..], &["a/b", "--strip-components=2"]].concat());
    assert_eq!(content(place.path("out/c/file")), "1");
    assert_eq!(content(place.path("out/other")), "2");
    place.fails(&[&copy[..], &["a/x"]].concat(), &["a/x", "not in"]);
}

#[test]
fn copy_of_paths_goes_through_links_of_the_directory_and_stays_in_it() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/a/b")).expect("a new directory");
    fs::create_dir(place.path("secret")).expect("a new directory");
    place.put("source/a/b/file", "1");
    place.put("source/a/file", "2");
    place.put("secret/file", "3");
    for (link, target) in [("x", "a/b"), ("y", "x/.."), ("out", "../secret")] {
        symlink(target, place.path("source").join(link)).expect("ours");
    }
    // The kernel finds `a` behind `x/..`.
    for (path, written, expected) in [("x/file", "a/b/file", "1"), ("y/file", "a/file", "2")] {
        place.succeeds(&["materialize", "source", "-C", "out", path]);
        assert_eq!(content(place.path("out").join(written)), expected);
        fs::remove_dir_all(place.path("out/a")).expect("written");
    }
    for (path, words) in [
        ("x/none", "x/none: not in"),
        (
            "out/file",
            "out/file: refused: a symbolic link on the way leads outside the root",
        ),
    ] {
        place.fails(&["materialize", "source", "-C", "out", path], &[words]);
    }
    assert_eq!(fs::read_dir(place.path("out")).expect("ours").count(), 0);
}

#[test]
fn dry_run_of_copy_lists_its_entries_and_writes_nothing() {
    let place = place_with_copy(3);
    let arguments = ["materialize", "source", "-C", "copy", "--dry-run"];
    let listed = place.succeeds(&arguments);
    let mut names: Vec<_> = listed.output.split(|&byte| byte == b'\n').collect();
    let found = Command::new("find")
        .args([".", "-mindepth", "1", "-printf", "%P\\n"])
        .current_dir(place.path("source"))
        .output();
    let found = found.expect("GNU find").stdout;
    let mut expected: Vec<_> = found.split(|&byte| byte == b'\n').collect();
    // The destination itself is an empty line.
    expected.push(b"");
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!(fs::read_dir(place.path("copy")).expect("ours").count(), 0);
}

#[test]
fn copy_into_itself_is_refused() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/below/deep")).expect("a new directory");
    for directory in ["source", "source/below", "source/below/deep"] {
        let arguments = ["materialize", "source", "-C", directory];
        place.fails(&arguments, &["contains the destination", "outside"]);
    }
    let arguments = ["materialize", "source", "-C", "source/new", "--atomic"];
    place.fails(&arguments, &["contains the destination"]);
    assert_eq!(fs::read_dir(place.path("source")).expect("ours").count(), 1);
}

#[test]
fn copy_warns_of_sockets() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/a")).expect("a new directory");
    let _socket = UnixListener::bind(place.path("source/a/socket")).expect("a short path");
    place.put("source/a/file", "content");
    let outcome = place.run(&["materialize", "source", "-C", "out"]);
    assert_eq!(outcome.code, 0);
    let warning = "tarfs: warning: a/socket: socket ignored\n";
    assert_eq!(outcome.complaints, warning);
    assert_eq!(content(place.path("out/a/file")), "content");
}

#[test]
fn copy_reports_files_that_change_meanwhile() {
    let place = Place::new();
    // The kernel says that each has 4096 bytes.
    place.fails(
        &["materialize", "/sys/kernel/cgroup", "-C", "out", "features"],
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
        let copy = || place.run(&["materialize", "source", "-C", "out"]);
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

#[test]
fn copy_replaces_no_filled_directory_and_follows_no_link() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/link")).expect("a new directory");
    fs::create_dir_all(place.path("out/full")).expect("a new directory");
    place.put("source/link/file", "content");
    place.put("source/full", "a file");
    place.put("out/full/file", "stays");
    symlink(place.path("mnt"), place.path("out/link")).expect("ours");
    place.fails(&["materialize", "source", "-C", "out"], &["full", "exists"]);
    assert_eq!(content(place.path("out/link/file")), "content");
    assert!(status(place.path("out/link")).is_dir());
    assert_eq!(content(place.path("out/full/file")), "stays");
    assert_eq!(fs::read_dir(place.path("mnt")).expect("ours").count(), 0);
}

#[test]
fn copy_refuses_flags_for_archives() {
    let place = Place::new();
    fs::create_dir(place.path("source")).expect("a new directory");
    for flag in [
        "--shard=1/2",
        "--finish",
        "--resume",
        "--to-stdout",
        "--max-unpacked-size=1G",
        "--layer=a.tar",
    ] {
        let name = flag.split('=').next().expect("a flag");
        let arguments = ["materialize", "source", "-C", "out", flag];
        place.fails(&arguments, &[name, "directory"]);
    }
}

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
    place.succeeds(&["materialize", "source", "-C", "out"]);
    assert_same_trees(&place.path("expected"), &place.path("out"));
}
