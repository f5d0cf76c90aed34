//! `tarfs sync`: the tree that it leaves, and what it writes and fetches for it.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::diff::{change_each, pack, pair, set_times};
use crate::resume::tree_facts;
use crate::support::cli::{Outcome, Place};
use crate::support::http::{Resource, Server};
use crate::support::image::{Image, oci};
use crate::support::packing::Packing;
use crate::support::raw::{Archive, Header, random_bytes};
use crate::support::rng::Rng;
use crate::support::sha256::sha256;
use crate::tree_origin::forge;

/// Replaces `out` by what GNU tar extracts from `archive`.
fn extract(place: &Place, archive: &str, out: &str) {
    if place.path(out).exists() {
        let status = Command::new("chmod")
            .args(["-R", "u+rwx"])
            .arg(place.path(out))
            .status();
        assert!(status.expect("chmod").success());
        fs::remove_dir_all(place.path(out)).expect("ours");
    }
    fs::create_dir(place.path(out)).expect("made");
    let status = Command::new("tar")
        .args(["--extract", "--preserve-permissions", "--file"])
        .arg(place.path(archive))
        .arg("--directory")
        .arg(place.path(out))
        .status();
    assert!(status.expect("GNU tar").success());
}

fn update(place: &Place, archive: &str, flags: &[&str]) -> Outcome {
    let words = ["sync", "-p", "--stats", archive, "out"];
    place.run(&[&words, flags].concat())
}

/// The counter `name` in the output of --stats.
fn counter(outcome: &Outcome, name: &str) -> u64 {
    let mut lines = outcome.complaints.lines();
    let line = lines.find(|line| line.contains(name));
    let number = line.and_then(|line| line.rsplit(' ').next());
    number.map_or(0, |number| {
        number.replace(',', "").parse().expect("a number")
    })
}

#[track_caller]
fn assert_updated(place: &Place, archive: &str, flags: &[&str], what: &str) {
    let outcome = update(place, archive, flags);
    assert_eq!(outcome.code, 0, "{what}: {}", outcome.complaints);
    extract(place, archive, "expected");
    let (found, expected) = (
        tree_facts(&place.path("out")),
        tree_facts(&place.path("expected")),
    );
    for (path, fact) in &expected {
        assert_eq!(found.get(path), Some(fact), "{what}: {}", path.display());
    }
    assert_eq!(found.len(), expected.len(), "{what}");
    let again = update(place, archive, flags);
    assert_eq!(again.code, 0, "{what}: {}", again.complaints);
    assert_eq!(counter(&again, "written_entries"), 0, "{what}");
    assert_eq!(tree_facts(&place.path("out")), found, "{what}");
}

// Promises: sync-operands
#[test]
fn delete_needs_its_destination_and_refuses_a_source_in_it() {
    let place = pair(|_| ());
    fs::create_dir_all(place.path("work/parts")).expect("made");
    for name in [
        "work/s.tar",
        "work/my data.tar",
        "work/parts/one",
        "work/parts/two",
    ] {
        fs::copy(place.path("one.tar"), place.path(name)).expect("space");
    }
    place.put("work/other", "precious");
    place.put("work/s.tarfs", "an index");
    place.succeeds(&["index", "one.tar"]);
    let before = tree_facts(&place.path("work"));
    let work = place.path("work");
    let url = |host: &str, name: &str| format!("file://{host}{}/{name}", work.display());
    let outcome = place.run(&["sync", "work/s.tar"]);
    assert_eq!(outcome.code, 64);
    assert!(
        outcome.complaints.contains("<DIR>"),
        "{}",
        outcome.complaints
    );
    for sources in [
        &["work/s.tar"][..],
        &["work/parts/../s.tar"],
        &["one.tar", "--layer", "work/s.tar"],
        &["join:work/parts/*"],
        &["tar:work/s.tar!/a"],
        &["slice:0:work/s.tar"],
        &["one.tar", "--index", "work/s.tarfs"],
        &[&url("", "s.tar")],
        &[&url("", "my%20data.tar")],
        &[&url("localhost", "s.tar")],
        &["one.tar", "--index", &url("", "s.tarfs")],
        &["one.tar", "--index", &url("localhost", "s%2Etarfs")],
    ] {
        let (source, more) = sources.split_first().expect("a source");
        for flags in [&["--delete"][..], &[]] {
            let words = [&["sync", source, "work"], more, flags].concat();
            place.fails(&words, &["is in work,"]);
        }
        assert_eq!(tree_facts(&place.path("work")), before);
    }
}

// Promises: sync-replaces, sync-killed, sync-file-over-directory
#[test]
fn update_replaces_files_only_when_their_content_is_complete() {
    let place = Place::new();
    let (old, new) = (Rng::new(1).bytes(3_000_000), Rng::new(2).bytes(3_000_000));
    let archive = Archive::new()
        .file("changed", &new)
        .hard_link("second", "changed")
        .file("in place of a directory", &new)
        .file("new", &new)
        .end();
    place.put("sound.tar", &archive);
    let mut gzip = place.command("gzip");
    assert!(
        gzip.args(["-1", "-k", "sound.tar"])
            .status()
            .expect("gzip")
            .success()
    );
    let packed = fs::read(place.path("sound.tar.gz")).expect("there");
    let mut damaged = packed.clone();
    // In the content of each file.
    for at in [1_000_000, 4_000_000, 7_000_000] {
        damaged[at..at + 64].fill(0);
    }
    let server = Server::start();
    let serve = |bytes: &[u8]| {
        server.serve("/a.tar.gz", Resource::new(bytes.to_vec()).etag("\"1\""));
    };
    serve(&packed);
    let url = server.url("/a.tar.gz");
    place.succeeds(&["index", "-q", &url]);
    serve(&damaged);
    for name in ["changed", "second", "in place of a directory/old"] {
        let path = place.path("out").join(name);
        fs::create_dir_all(path.parent().expect("out")).expect("made");
        fs::write(path, &old).expect("space");
    }
    place.put("out/extra", "extra");
    let before = tree_facts(&place.path("out"));
    let outcome = update(&place, &url, &["--delete"]);
    assert_eq!(outcome.code, 2, "{}", outcome.complaints);
    assert_eq!(
        tree_facts(&place.path("out")),
        before,
        "{}",
        outcome.complaints
    );
    // The next run removes the files of a killed one, also without --delete.
    place.put("out/.tarfs-update-0123456789abcdef", "half");
    place.put("out/.tarfs-update-of mine", "mine");
    serve(&packed);
    let dry = update(&place, &url, &["--dry-run"]);
    assert!(
        dry.lines()
            .contains(&"delete .tarfs-update-0123456789abcdef")
    );
    let outcome = update(&place, &url, &[]);
    assert_eq!(outcome.code, 2, "{}", outcome.complaints);
    assert!(!place.path("out/.tarfs-update-0123456789abcdef").exists());
    assert!(place.path("out/in place of a directory/old").exists());
    let outcome = update(&place, &url, &["--delete"]);
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
    extract(&place, "sound.tar", "expected");
    assert_eq!(
        tree_facts(&place.path("out")),
        tree_facts(&place.path("expected"))
    );
}

// Promises: cp-next-name, sync-next-name
#[test]
fn further_names_are_written_if_the_first_is_blocked() {
    let place = Place::new();
    fs::create_dir_all(place.path("source/d")).expect("made");
    place.put("source/a", "new");
    for name in ["source/d/x", "source/d/y"] {
        fs::hard_link(place.path("source/a"), place.path(name)).expect("ours");
    }
    let packed = place
        .command("tar")
        .args(["-C", "source", "-cf", "a.tar", "a", "d"])
        .status();
    assert!(packed.expect("GNU tar").success());
    for words in [
        &["copy", "source", "out"],
        &["sync", "source", "out"],
        &["sync", "a.tar", "out"],
    ] {
        fs::remove_dir_all(place.path("out")).expect("ours");
        fs::create_dir_all(place.path("out/a")).expect("made");
        place.put("out/a/k", "in the way");
        let outcome = place.run(words);
        assert_eq!(outcome.code, 2, "{words:?}");
        assert_eq!(
            outcome.complaints.matches("File exists").count(),
            1,
            "{}",
            outcome.complaints
        );
        assert_eq!(
            fs::read(place.path("out/a/k")).expect("there"),
            b"in the way"
        );
        let [x, y] = ["out/d/x", "out/d/y"].map(|name| place.path(name));
        assert_eq!(fs::read(&x).expect("there"), b"new", "{words:?}");
        assert_eq!(
            fs::metadata(x).expect("there").ino(),
            fs::metadata(y).expect("there").ino()
        );
    }
    // An old file that is kept gets no further name.
    fs::remove_dir_all(place.path("out")).expect("ours");
    fs::create_dir(place.path("out")).expect("made");
    place.put("out/a", "old");
    place.succeeds(&["copy", "source", "out", "--skip-old-files"]);
    assert_eq!(fs::read(place.path("out/a")).expect("there"), b"old");
    assert_eq!(fs::read(place.path("out/d/x")).expect("there"), b"new");
}

// Promises: hardlink-kept
#[test]
fn hard_link_to_a_kept_file_is_a_link_to_it() {
    let place = Place::new();
    let archive = Archive::new().file("a", "new").hard_link("b", "a").end();
    place.put("a.tar", archive);
    for program in [env!("CARGO_BIN_EXE_tarfs"), "tar"] {
        fs::remove_dir_all(place.path("out")).expect("ours");
        fs::create_dir(place.path("out")).expect("made");
        place.put("out/a", "old");
        let verb: &[&str] = match program {
            "tar" => &["-xf", "a.tar", "-C", "out", "--skip-old-files"],
            _ => &["materialize", "a.tar", "-C", "out", "--skip-old-files"],
        };
        assert!(
            place
                .command(program)
                .args(verb)
                .status()
                .expect("started")
                .success()
        );
        assert_eq!(
            fs::read(place.path("out/b")).expect("there"),
            b"old",
            "{program}"
        );
    }
}

// Promises: sync-implied
#[test]
fn implied_directories_get_owner_and_mode_of_a_fresh_run_and_keep_their_time() {
    let place = Place::new();
    let explicit = Archive::new().add(Header::new("d/", b'5').mode(0o700).mtime(9), "");
    place.put("one.tar", explicit.file("d/x", "1").end());
    place.put("two.tar", Archive::new().file("d/x", "1").end());
    fs::create_dir(place.path("fresh")).expect("made");
    place.succeeds(&["materialize", "one.tar", "-C", "out"]);
    place.succeeds(&["materialize", "two.tar", "-C", "fresh"]);
    let dry = update(&place, "two.tar", &["--dry-run"]);
    assert_eq!(dry.text(), "change d\n");
    assert_eq!(update(&place, "two.tar", &[]).code, 0);
    let attributes = |tree: &str| fs::metadata(place.path(tree).join("d")).expect("there");
    let (kept, fresh) = (attributes("out"), attributes("fresh"));
    assert_eq!((kept.mode(), kept.uid()), (fresh.mode(), fresh.uid()));
    assert_eq!(kept.mtime(), 9);
    assert_eq!(update(&place, "two.tar", &["--dry-run"]).text(), "");
}

// Promises: sync-implied
#[test]
fn directory_whose_entries_an_upper_layer_removes_is_made() {
    let place = Place::new();
    let lower = Archive::new().file("d/e/x", "1").file("gone/x", "1");
    let upper = Archive::new().file("d/y", "2").file("gone/.wh.x", "");
    let image = Image::new("i:1", vec![lower.end(), upper.directory("f").end()]);
    oci(&[image]).write(&place.path("layout"));
    fs::create_dir(place.path("synced")).expect("made");
    let outcome = place.run(&["sync", "-q", "oci:layout", "synced"]);
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
    assert!(place.path("synced/gone").is_dir());
    let dry = place.run(&["sync", "--dry-run", "oci:layout", "synced"]);
    assert_eq!((dry.code, dry.text()), (0, ""), "{}", dry.complaints);
}

// Promises: layer-implied, sync-implied
#[test]
fn implied_directories_of_layers_have_their_mode_under_any_umask() {
    let place = Place::new();
    let lower = Archive::new().file("d/e/x", "1").file("gone/x", "1");
    let upper = Archive::new().file("d/y", "2").file("gone/.wh.x", "");
    let image = Image::new("i:1", vec![lower.end(), upper.end()]);
    oci(&[image]).write(&place.path("layout"));
    for mode in [0o755, 0o2755] {
        let out = place.path("synced");
        drop(fs::remove_dir_all(&out));
        fs::create_dir(&out).expect("made");
        fs::set_permissions(&out, Permissions::from_mode(mode)).expect("its owner");
        chown(&out, None, Some(5)).expect("root");
        let sync = |flags: &[&str]| {
            let mut shell = Command::new("sh");
            let program = env!("CARGO_BIN_EXE_tarfs");
            shell.args(["-c", "umask 077; exec \"$0\" \"$@\"", program, "sync"]);
            shell.args(flags).args(["oci:layout", "synced"]);
            let output = shell.current_dir(place.path(".")).output();
            let output = output.expect("started");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).expect("UTF-8")
        };
        sync(&["-q"]);
        let is_right = |name: &str| {
            let found = fs::metadata(out.join(name)).expect("made");
            let now = SystemTime::now();
            assert_eq!(found.mode() & 0o777, 0o755, "{name}");
            assert_eq!((found.uid(), found.gid()), (0, 0), "{name}");
            let age = now.duration_since(found.modified().expect("a time"));
            assert!(age.unwrap_or_default() < Duration::from_hours(1), "{name}");
        };
        for name in ["d", "d/e", "gone"] {
            is_right(name);
            fs::set_permissions(out.join(name), Permissions::from_mode(0o700)).expect("root");
        }
        sync(&["-q"]);
        ["d", "d/e", "gone"].into_iter().for_each(is_right);
        assert_eq!(sync(&["--dry-run"]), "", "{mode:o}");
    }
}

// Promises: sync-mounts
#[test]
fn nothing_is_changed_behind_a_link_that_cannot_be_removed() {
    let place = Place::new();
    let archive = Archive::new().file("p/q/z", "new");
    place.put("a.tar", archive.clone().end());
    oci(&[Image::new("i:1", vec![archive.end()])]).write(&place.path("layout"));
    fs::create_dir_all(place.path("sd/priv/q")).expect("made");
    symlink("priv", place.path("sd/p")).expect("made");
    place.give_to_user();
    let closed = Permissions::from_mode(0o700);
    fs::set_permissions(place.path("sd/priv/q"), closed).expect("root");
    // In a sticky directory of another user, only the owner of a link removes it.
    lchown(place.path("sd/p"), Some(5), Some(5)).expect("root");
    chown(place.path("sd"), Some(6), Some(6)).expect("root");
    fs::set_permissions(place.path("sd"), Permissions::from_mode(0o1777)).expect("root");
    for source in ["a.tar", "oci:layout"] {
        let mut sync = place.command_of_user("./tarfs");
        let output = sync.args(["sync", "-q", source, "sd"]).output();
        let output = output.expect("started");
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(!place.path("sd/priv/q/z").exists(), "{source}");
        let found = fs::metadata(place.path("sd/priv/q")).expect("there");
        assert_eq!(found.mode() & 0o7777, 0o700, "{source}");
        assert!(place.path("sd/p").is_symlink());
    }
}

// Promises: sync-mounts
#[test]
fn implied_directories_take_the_place_of_other_entries() {
    type Change = fn(&Path);
    let place = Place::new();
    let archive = Archive::new().directory("o").file("d/e/x", "1");
    place.put("two.tar", archive.file("d/y", "2").end());
    fs::create_dir(place.path("fresh")).expect("made");
    place.succeeds(&["materialize", "two.tar", "-C", "fresh"]);
    let facts = |tree: &str| ["d", "o"].map(|path| tree_facts(&place.path(tree).join(path)));
    let cases: [(&str, Change); 5] = [
        ("d", |path| fs::write(path, "old").expect("written")),
        ("d", |path| symlink(".", path).expect("made")),
        ("d", |path| symlink("o", path).expect("made")),
        ("d/e", |path| symlink("../o", path).expect("made")),
        ("d/e", |path| fs::write(path, "old").expect("written")),
    ];
    for (name, change) in cases {
        let path = place.path("out").join(name);
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(path.parent().expect("in out")).expect("made");
        change(&path);
        let outcome = update(&place, "two.tar", &[]);
        assert_eq!(outcome.code, 0, "{name}: {}", outcome.complaints);
        assert_eq!(facts("out"), facts("fresh"), "{name}");
        assert_eq!(update(&place, "two.tar", &["--dry-run"]).text(), "");
    }
}

// Promises: sync-implied
#[test]
fn implied_directories_lose_the_extended_attributes_of_an_earlier_tree() {
    const ACL: &[u8] = b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x07\0\x01\0\0\0\
        \x04\0\x05\0\xff\xff\xff\xff\x10\0\x07\0\xff\xff\xff\xff\x20\0\x05\0\xff\xff\xff\xff";
    let place = Place::new();
    place.put(
        "two.tar",
        Archive::new().file("d/x", "1").file("e/x", "2").end(),
    );
    let set = |tree: &str, name: &str, value: &[u8]| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(place.path(tree), name, value, flags).expect("they are supported");
    };
    let attributes = |tree: &str| {
        let mut names = vec![0; 4096];
        let len = rustix::fs::listxattr(place.path(tree), &mut names).expect("there");
        let mode = fs::metadata(place.path(tree)).expect("there").mode();
        (
            String::from_utf8_lossy(&names[..len]).into_owned(),
            mode & 0o7777,
        )
    };
    place.succeeds(&["materialize", "-q", "two.tar", "-C", "out"]);
    let fresh = attributes("out/d");
    set("out/d", "user.old", b"1");
    set("out/d", "system.posix_acl_access", ACL);
    set("out/d", "system.posix_acl_default", ACL);
    let dry = update(&place, "two.tar", &["--dry-run"]);
    assert_eq!(dry.text(), "change d\n");
    let kept = update(
        &place,
        "two.tar",
        &["--dry-run", "--no-xattrs", "--no-acls"],
    );
    assert_eq!(kept.text(), "change d\n", "its mode shows the mask");
    assert_eq!(update(&place, "two.tar", &[]).code, 0);
    assert_eq!(attributes("out/d"), fresh);
    assert_eq!(update(&place, "two.tar", &["--dry-run"]).text(), "");
    set("out/d", "user.old", b"1");
    let kept = update(
        &place,
        "two.tar",
        &["--dry-run", "--xattrs-exclude", "user.old"],
    );
    assert_eq!(kept.text(), "");
}

// Promises: sync-differs, sync-attributes, acl-mode
#[test]
fn second_update_keeps_the_modes_that_acls_determine() {
    let place = Place::new();
    let with_acl = |archive: Archive, acl: &str| archive.pax(&[("SCHILY.acl.access", acl)]);
    let named = "user::rw-,user:4343:rw-,group::r--,mask::rw-,other::---";
    let archive = with_acl(Archive::new(), named).add(Header::new("f", b'0').mode(0o666), "1");
    // GNU tar writes one that repeats the mode beside a default ACL.
    let archive = with_acl(archive, "user::rwx,group::rwx,other::r-x")
        .add(Header::new("d", b'5').mode(0o775), "");
    place.put("a.tar", archive.end());
    let mode = |name: &str| fs::metadata(place.path(name)).expect("written").mode() & 0o7777;
    for flags in [&["-p"][..], &["--no-same-permissions"]] {
        drop(fs::remove_dir_all(place.path("out")));
        fs::create_dir(place.path("out")).expect("ours");
        let words = [&["sync", "-q", "a.tar", "out"][..], flags].concat();
        place.succeeds(&words);
        assert_eq!((mode("out/f"), mode("out/d")), (0o660, 0o775), "{flags:?}");
        let dry = place.succeeds(&[&words[..], &["--dry-run"]].concat());
        assert_eq!(dry.text(), "", "{flags:?}");
        place.succeeds(&words);
        assert_eq!((mode("out/f"), mode("out/d")), (0o660, 0o775), "{flags:?}");
    }
    // Without ACLs the mode of the header counts.
    let words = ["sync", "-q", "-p", "--no-acls", "a.tar", "out"];
    place.succeeds(&words);
    assert_eq!(mode("out/f"), 0o666);
    let dry = place.succeeds(&[&words[..], &["--dry-run"]].concat());
    assert_eq!(dry.text(), "");
}

// Promises: sync-attributes, acl-mode
#[test]
fn update_gives_no_rights_of_an_acl_that_a_file_lacks() {
    let place = Place::new();
    let archive = |acl: &str, mode: u64| {
        let archive = Archive::new().pax(&[("SCHILY.acl.access", acl)]);
        archive.add(Header::new("f", b'0').mode(mode), "1").end()
    };
    let wide = "user::rw-,user:4343:rwx,group::---,mask::rwx,other::---";
    place.put("a.tar", archive(wide, 0o600));
    // As GNU tar writes it with --acls.
    let named = "user::rw-,user:1000:rw-,group::---,mask::rw-,other::---";
    place.put("b.tar", archive(named, 0o660));
    let mode = |name: &str| fs::metadata(place.path(name)).expect("written").mode() & 0o7777;
    let words = ["sync", "-q", "-p", "a.tar", "out"];
    place.succeeds(&[&words[..], &["--no-acls"]].concat());
    let dry = place.succeeds(&[&words[..], &["--dry-run"]].concat());
    assert_eq!((dry.text(), mode("out/f")), ("", 0o600));
    place.succeeds(&words);
    assert_eq!(mode("out/f"), 0o600);
    fs::remove_dir_all(place.path("out")).expect("ours");
    place.succeeds(&words);
    assert_eq!(mode("out/f"), 0o670);
    place.succeeds(&words);
    assert_eq!(mode("out/f"), 0o670);
    let file = place.path("out/f");
    rustix::fs::removexattr(&file, "system.posix_acl_access").expect("it has one");
    fs::set_permissions(&file, Permissions::from_mode(0o670)).expect("ours");
    place.succeeds(&words);
    assert_eq!(mode("out/f"), 0o600);
    place.give_to_user();
    let mut shell = place.command_of_user("sh");
    let script = "umask 077; ./tarfs sync -q --no-acls b.tar new && ./tarfs sync -q b.tar new";
    let outcome = Outcome::of(shell.args(["-c", script]));
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
    assert_eq!(mode("new/f"), 0o600);
}

// Promises: sync-attributes, acl-mode
#[test]
fn update_gives_a_file_without_acl_the_rights_of_the_group_entry() {
    let place = Place::new();
    let archive = |acl: &str, mode: u64| {
        let archive = Archive::new().pax(&[("SCHILY.acl.access", acl)]);
        archive.add(Header::new("f", b'0').mode(mode), "1").end()
    };
    place.put(
        "minimal.tar",
        archive("user::rw-,group::---,other::---", 0o644),
    );
    // As GNU tar writes it with --acls.
    let named = "user::rw-,user:1000:rw-,group::---,mask::rw-,other::---";
    place.put("named.tar", archive(named, 0o660));
    place.put("empty.tar", Archive::new().end());
    fs::create_dir(place.path("source")).expect("ours");
    place.put("source/f", "1");
    let acl = ["-m", "u:1000:rw", "source/f"];
    fs::set_permissions(place.path("source/f"), Permissions::from_mode(0o600)).expect("ours");
    let set = place.command("setfacl").args(acl).status();
    assert!(set.expect("acl is installed").success());
    let file = place.path("out/f");
    let mode = || fs::metadata(&file).expect("written").mode() & 0o7777;
    for (source, flags, fresh) in [
        ("minimal.tar", &["-p"][..], 0o600),
        ("named.tar", &["-p"], 0o660),
        ("source", &[], 0o660),
    ] {
        let words = [&["sync", "-q", source, "out"][..], flags].concat();
        drop(fs::remove_dir_all(place.path("out")));
        fs::create_dir(place.path("out")).expect("ours");
        place.succeeds(&words);
        assert_eq!(mode(), fresh, "{source}");
        // A minimal ACL is only a mode.
        rustix::fs::removexattr(&file, "system.posix_acl_access").ok();
        for old in [0o600, 0o640, 0o660] {
            fs::set_permissions(&file, Permissions::from_mode(old)).expect("ours");
            place.succeeds(&words);
            assert_eq!(mode(), 0o600, "{source} over {old:o}");
        }
        let foreign = ["-m", "u:1001:rw,m::r", "out/f"];
        let set = place.command("setfacl").args(foreign).status();
        assert!(set.expect("acl is installed").success());
        place.succeeds(&words);
        assert_eq!(mode(), 0o600, "{source} over an ACL for another user");
        let dry = place.succeeds(&[&words[..], &["--dry-run"]].concat());
        assert_eq!(dry.text(), "", "{source}");
        place.succeeds(&["sync", "-q", "--delete", "empty.tar", "out"]);
        place.succeeds(&words);
        fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("ours");
        place.succeeds(&words);
        assert_eq!(mode(), fresh, "{source} over its own ACL");
    }
}

// Promises: acl-mode, xattr-default
#[test]
fn listings_show_modes_and_attributes_as_a_mount_does() {
    let place = Place::new();
    let acl = "user::rw-,user:4343:rw-,group::r--,mask::rw-,other::---";
    let xattrs = [
        ("SCHILY.acl.access", acl),
        ("SCHILY.xattr.security.selinux", "label"),
        ("SCHILY.xattr.trusted.note", "secret"),
        ("SCHILY.xattr.user.x", "y"),
    ];
    let archive = Archive::new()
        .pax(&xattrs)
        .add(Header::new("f", b'0').mode(0o666), "1")
        .pax(&[("SCHILY.acl.access", "user::rw-,group::r--,other::r--")])
        .file("repeated", "2");
    place.put("a.tar", archive.end());
    place.succeeds(&["materialize", "-q", "-p", "a.tar", "-C", "out"]);
    let diff = place.run(&["diff", "a.tar", "out"]);
    assert_eq!((diff.code, diff.text()), (0, ""), "{}", diff.complaints);
    let long = place.succeeds(&["ls", "-l", "a.tar"]);
    let modes: Vec<_> = long.text().lines().map(|line| &line[..11]).collect();
    assert_eq!(modes, ["-rw-rw----+", "-rw-r--r-- "]);
    let found = place.succeeds(&["find", "a.tar", "-perm", "660"]);
    assert_eq!(found.text().lines().count(), 1, "{}", found.text());
    let dump = place.succeeds(&["ls", "--format", "composefs", "a.tar"]);
    let lines = dump.lines();
    let line = lines.iter().find(|line| line.starts_with("/f "));
    let line = line.expect("a line for the file");
    assert!(line.contains(" 100660 "), "{line}");
    assert!(line.contains(" user.x=y"), "{line}");
    assert!(line.contains(" system.posix_acl_access="), "{line}");
    assert!(
        !line.contains("selinux") && !line.contains("trusted"),
        "{line}"
    );
    assert!(
        lines
            .iter()
            .all(|line| !line.starts_with("/repeated ") || !line.contains("acl"))
    );
}

// Promises: acl-mode, acl-impossible, ls-composefs
#[test]
fn composefs_dump_has_the_mode_of_an_acl_only_with_the_acl() {
    let place = Place::new();
    let acl = "user::rw-,user:daemon:rwx,group::---,mask::rwx,other::---";
    let archive = Archive::new().pax(&[("SCHILY.acl.access", acl)]);
    let header = Header::new("f", b'0').mode(0o600);
    place.put("a.tar", archive.add(header, "1").end());
    let dump = place.succeeds(&["ls", "--format", "composefs", "a.tar"]);
    let lines = dump.lines();
    let line = lines.iter().find(|line| line.starts_with("/f "));
    let line = line.expect("a line for the file");
    assert!(line.contains(" 100600 "), "{line}");
    assert!(!line.contains("acl"), "{line}");
}

// Promises: sync-locked
#[test]
fn destination_that_another_process_has_locked_is_neither_updated_nor_resumed() {
    let place = Place::new();
    let server = Server::start();
    let archive = Archive::new().file("a", "1").end();
    server.serve("/one.tar", Resource::new(archive).etag("\"1\""));
    let url = server.url("/one.tar");
    place.put("one.tar", Archive::new().file("a", "1").end());
    fs::create_dir(place.path("tree")).expect("made");
    let running = place.path("out/.tarfs-update-0123456789abcdef");
    fs::write(&running, "of the first update").expect("written");
    let locked = File::open(place.path("out")).expect("there");
    // Any user who may read the directory can have a shared lock.
    locked.lock_shared().expect("nobody else has it");
    let user = fs::metadata("/proc/self").expect("there").uid();
    let holder = format!(
        "out: process {} of user {user} has locked it",
        std::process::id()
    );
    for words in [
        &["sync", "one.tar", "out"][..],
        &["sync", "tree", "out"],
        &["materialize", "--resume", &url, "-C", "out"],
    ] {
        place.fails(words, &[&holder, "wait until that one ends"]);
        assert!(
            running.exists() && !place.path("out/a").exists(),
            "{words:?}"
        );
    }
    let dry = update(&place, "one.tar", &["--dry-run"]);
    assert_eq!(dry.code, 0, "{}", dry.complaints);
    drop(locked);
    assert_eq!(update(&place, "one.tar", &[]).code, 0);
    assert!(!running.exists());
}

// Promises: sync-dry-run
#[test]
fn dry_run_of_an_update_accepts_layers() {
    let place = Place::new();
    place.put("one.tar", Archive::new().file("a", "1").end());
    place.put(
        "two.tar",
        Archive::new().file("b", "2").file(".wh.a", "").end(),
    );
    let dry = update(&place, "one.tar", &["--layer", "two.tar", "--dry-run"]);
    assert_eq!(
        (dry.code, dry.text()),
        (0, "write b\n"),
        "{}",
        dry.complaints
    );
}

// Promises: sync-differs
#[test]
fn update_of_an_unchanged_tree_writes_nothing() {
    let place = pair(|_| ());
    extract(&place, "one.tar", "out");
    let before = tree_facts(&place.path("out"));
    for flags in [&[][..], &["--delete"], &["--checksum", "--delete"]] {
        let outcome = update(&place, "one.tar", flags);
        assert_eq!(
            (outcome.code, outcome.text()),
            (0, ""),
            "{}",
            outcome.complaints
        );
        assert_eq!(counter(&outcome, "written_entries"), 0);
        assert_eq!(tree_facts(&place.path("out")), before);
    }
}

// Promises: sync-result, sync-differs
#[test]
fn update_makes_each_kind_of_change() {
    let place = pair(change_each);
    for (from, to) in [("one.tar", "two.tar"), ("two.tar", "one.tar")] {
        for flags in [&["--delete"][..], &["--delete", "--checksum"]] {
            extract(&place, from, "out");
            assert_updated(&place, to, flags, to);
        }
    }
    fs::remove_dir_all(place.path("out")).expect("ours");
    fs::create_dir(place.path("out")).expect("made");
    assert_updated(&place, "one.tar", &[], "into an empty directory");
}

// Promises: sync-result
#[test]
fn update_deletes_only_on_request() {
    let place = pair(|_| ());
    extract(&place, "one.tar", "out");
    fs::create_dir(place.path("out/extra")).expect("made");
    fs::write(place.path("out/extra/file"), "x").expect("written");
    fs::remove_file(place.path("out/sub/c")).expect("there");
    fs::create_dir(place.path("out/sub/c")).expect("made");
    fs::write(place.path("out/sub/c/below"), "x").expect("written");
    let outcome = update(&place, "one.tar", &[]);
    assert_eq!(outcome.code, 2);
    assert!(
        outcome.complaints.contains("sub/c: "),
        "{}",
        outcome.complaints
    );
    assert!(place.path("out/sub/c/below").exists());
    assert!(place.path("out/extra/file").exists());
    assert_updated(&place, "one.tar", &["--delete"], "with --delete");
    fs::create_dir(place.path("out/extra")).expect("made");
    fs::write(place.path("out/extra/file"), "x").expect("written");
    let outcome = update(&place, "one.tar", &["--delete", "-v"]);
    assert_eq!(outcome.text(), "./\ndeleting extra\n");
}

// Promises: sync-result
#[test]
fn update_that_cannot_read_everything_deletes_nothing() {
    let place = pair(|root| fs::write(root.join("b"), "new").expect("written"));
    let archive = fs::read(place.path("two.tar")).expect("there");
    place.put("cut.tar", &archive[..archive.len() / 2 + 100]);
    let odd = Archive::new().file("b", "new").hard_link("a", "missing");
    place.put("odd.tar", odd.end());
    // The same archive for its saved index, but damaged.
    let mut damaged = archive.clone();
    let content = damaged.windows(3).rposition(|it| it == b"new").expect("b");
    damaged[content..content + 3].copy_from_slice(b"bad");
    let server = Server::start();
    let url = server.url("/two.tar");
    server.serve("/two.tar", Resource::new(archive).etag("\"two\""));
    assert_eq!(place.run(&["index", &url]).code, 0);
    fs::remove_dir_all(place.path("cache/spans")).ok();
    server.serve("/two.tar", Resource::new(damaged).etag("\"two\""));
    for (source, closed) in [
        ("cut.tar", ""),
        ("odd.tar", ""),
        (&*url, ""),
        ("two", "two/b"),
        ("two", "two/sub"),
        ("two.tar", "out/sub"),
    ] {
        extract(&place, "one.tar", "out");
        place.put("out/extra", "x");
        place.give_to_user();
        let is_closed = !closed.is_empty();
        let closed = place.path(closed);
        let mode = fs::metadata(&closed).expect("there").permissions();
        if is_closed {
            fs::set_permissions(&closed, Permissions::from_mode(0o0)).expect("ours");
        }
        let mut command = place.command_of_user("./tarfs");
        command.args(["sync", "--delete", source, "out"]);
        let outcome = Outcome::of(&mut command);
        fs::set_permissions(&closed, mode).expect("ours");
        let what = format!("{source}: {}", outcome.complaints);
        assert_eq!(outcome.code, 2, "{what}");
        assert!(place.path("out/extra").exists(), "{what}");
    }
}

#[test]
#[ignore = "needs root"]
fn update_by_root_sets_owners_and_keeps_set_id_bits() {
    let place = pair(|_| ());
    let mode = |mode| Permissions::from_mode(mode);
    fs::set_permissions(place.path("one/b"), mode(0o4755)).expect("ours");
    let mut tar = place.command("tar");
    tar.args(["--format=posix", "--owner=daemon:4242", "--group=bin:4243"]);
    let packed = tar.args(["-C", "one", "-cf", "a.tar", "."]).status();
    assert!(packed.expect("GNU tar").success());
    extract(&place, "a.tar", "out");
    chown(place.path("out/b"), Some(5), Some(6)).expect("root");
    fs::set_permissions(place.path("out/b"), mode(0o4755)).expect("root");
    let outcome = update(&place, "a.tar", &["--dry-run"]);
    // Another owner may have written into a file that gets a set-id bit.
    assert_eq!(outcome.text(), "write b\n");
    assert_updated(&place, "a.tar", &[], "owners");
}

// Promises: sync-attributes
#[test]
#[ignore = "needs root"]
fn update_by_root_gives_set_id_bits_to_no_content_of_others() {
    let place = pair(|_| ());
    fs::remove_dir(place.path("out")).expect("empty");
    let (source, target) = (place.path("one/b"), place.path("out/b"));
    fs::set_permissions(&source, Permissions::from_mode(0o6755)).expect("ours");
    let size = fs::read(&source).expect("there").len();
    for (flags, owner, mode) in [
        (&["--no-same-owner"][..], 65534, 0o755),
        (&[], 0, 0o6755),
        (&["--checksum"], 0, 0o6755),
    ] {
        fs::remove_dir_all(place.path("out")).ok();
        let copied = place.command("cp").args(["-a", "one", "out"]).status();
        assert!(copied.expect("GNU cp").success());
        let is_same = flags.contains(&"--checksum");
        if !is_same {
            fs::write(&target, "?".repeat(size)).expect("root");
        }
        fs::set_permissions(&target, Permissions::from_mode(0o755)).expect("root");
        chown(&target, Some(65534), Some(65534)).expect("root");
        set_times(&place.path("out"));
        let inode = fs::metadata(&target).expect("there").ino();
        let words = ["sync", "one", "out"];
        place.succeeds(&[&words, flags].concat());
        let found = fs::metadata(&target).expect("there");
        // The source's group is one of root's.
        let facts = (found.uid(), found.gid(), found.mode() & 0o7777);
        assert_eq!(facts, (owner, 0, mode), "{flags:?}");
        if owner == 0 {
            assert_ne!(found.ino(), inode, "{flags:?}");
            let [found, expected] = [&target, &source].map(|path| fs::read(path).expect("there"));
            assert_eq!(found, expected, "{flags:?}");
        }
        let dry = place.succeeds(&[&words, flags, &["--dry-run"]].concat());
        assert_eq!(dry.text(), "", "{flags:?}");
    }
}

// Promises: sync-differs
#[test]
fn update_with_checksum_compares_contents_and_not_times() {
    let place = pair(|_| ());
    extract(&place, "one.tar", "out");
    fs::write(place.path("out/b"), "ten\n").expect("written");
    set_times(&place.path("out"));
    let untouched = File::open(place.path("out/sub/c")).expect("there");
    let later = UNIX_EPOCH + Duration::from_secs(2_000_000_000);
    untouched.set_modified(later).expect("ours");
    let outcome = update(&place, "one.tar", &["--checksum", "--dry-run"]);
    assert_eq!(outcome.text(), "write b\nchange sub/c\n");
    assert_updated(&place, "one.tar", &["--checksum"], "checksum");
}

// Promises: sync-dry-run
#[test]
fn dry_run_of_an_update_prints_the_steps_and_changes_nothing() {
    let place = pair(change_each);
    extract(&place, "two.tar", "out");
    let before = tree_facts(&place.path("out"));
    let outcome = update(&place, "one.tar", &["--dry-run", "--delete"]);
    let expected = [
        "write b",
        "write empty",
        "write fifo",
        "link hard",
        "write link",
        "delete new",
        "write sub/c",
        "write sub/deep",
        "write sub/deep/d",
        "write sub/deep/e",
    ];
    assert_eq!((outcome.code, outcome.lines()), (0, expected.to_vec()));
    let outcome = update(&place, "one.tar", &["--dry-run"]);
    assert!(!outcome.text().contains("delete"));
    assert_eq!(tree_facts(&place.path("out")), before);
}

// Promises: sync-dry-run, sync-file-over-directory, sync-end-marker
#[test]
fn dry_run_of_an_update_reports_directories_in_the_way() {
    let place = Place::new();
    let archive = Archive::new()
        .file("d", "new")
        .symlink("l", "d")
        .file("e", "new");
    place.put("a.tar", archive.clone().end());
    place.put("cut.tar", archive.unfinished());
    let fill = || {
        drop(fs::remove_dir_all(place.path("out")));
        for name in ["d", "l", "e"] {
            fs::create_dir_all(place.path("out").join(name)).expect("ours");
        }
        place.put("out/d/old", "old");
        place.put("out/l/old", "old");
    };
    for (archive, flags) in [("a.tar", &[][..]), ("cut.tar", &["--delete"][..])] {
        fill();
        let words = [&["sync", "-q", archive, "out"][..], flags].concat();
        let dry = place.run(&[&words[..], &["--dry-run"]].concat());
        assert_eq!(
            (dry.code, dry.text()),
            (2, "write e\n"),
            "{}",
            dry.complaints
        );
        let outcome = place.run(&words);
        assert_eq!(outcome.code, 2, "{}", outcome.complaints);
        let sorted = |text: &str| {
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort_unstable();
            lines
        };
        assert!(!dry.complaints.contains("os error"), "{}", dry.complaints);
        assert_eq!(sorted(&dry.complaints), sorted(&outcome.complaints));
        assert_eq!(fs::read(place.path("out/e")).expect("written"), b"new");
        assert!(place.path("out/d/old").exists(), "{archive}");
    }
    fill();
    let words = ["sync", "-q", "--delete", "a.tar", "out"];
    let dry = place.succeeds(&[&words[..], &["--dry-run"]].concat());
    assert_eq!(dry.lines(), ["write d", "write e", "write l"]);
    place.succeeds(&words);
    assert_eq!(fs::read(place.path("out/d")).expect("written"), b"new");
}

// Promises: sync-attributes
#[test]
fn update_of_attributes_alone_writes_no_content() {
    let place = pair(|root| {
        let mode = Permissions::from_mode(0o640);
        fs::set_permissions(root.join("sub/c"), mode.clone()).expect("ours");
        fs::set_permissions(root.join("a"), mode).expect("ours");
        fs::set_permissions(root.join("sub/deep"), Permissions::from_mode(0o700)).expect("ours");
        let time = UNIX_EPOCH + Duration::from_secs(1_000_000_001);
        let sub = File::open(root.join("sub")).expect("there");
        sub.set_modified(time).expect("ours");
    });
    extract(&place, "one.tar", "out");
    let outcome = update(&place, "two.tar", &["--dry-run"]);
    let expected = "change a,change hard,change sub,change sub/c,change sub/deep";
    let expected: Vec<_> = expected.split(',').collect();
    assert_eq!(outcome.lines(), expected);
    let outcome = update(&place, "two.tar", &[]);
    assert_eq!(
        counter(&outcome, "written_bytes"),
        0,
        "{}",
        outcome.complaints
    );
    assert_updated(&place, "two.tar", &[], "attributes");
}

#[test]
fn update_keeps_what_a_directory_inherits() {
    let place = pair(|_| ());
    fs::set_permissions(place.path("out"), Permissions::from_mode(0o2755)).expect("ours");
    let words = ["sync", "--stats", "one.tar", "out"];
    let words = [&words[..], &["--no-same-permissions"]].concat();
    assert_eq!(place.run(&words).code, 0);
    let mode = fs::metadata(place.path("out/sub")).expect("made");
    assert_eq!(mode.permissions().mode() & 0o2000, 0o2000);
    let again = place.run(&words);
    assert_eq!((again.code, counter(&again, "written_entries")), (0, 0));
}

#[test]
fn owner_that_no_file_can_have_is_no_difference() {
    let place = Place::new();
    place.put("file", "content");
    // chown(2) reads the highest number as "do not change".
    let packed = place
        .command("tar")
        .args(["--format=posix", "--numeric-owner", "-cf", "a.tar", "file"])
        .arg("--pax-option=uid:=4294967295,gid:=4294967295")
        .status();
    assert!(packed.expect("GNU tar").success());
    for expected in [1, 0] {
        let outcome = update(&place, "a.tar", &["--same-owner"]);
        assert_eq!(outcome.code, 0, "{}", outcome.complaints);
        assert_eq!(counter(&outcome, "written_entries"), expected);
    }
}

// Promises: sync-mounts
#[test]
fn update_changes_entries_of_read_only_directories() {
    let place = pair(|root| {
        fs::write(root.join("sub/deep/d"), "longer").expect("written");
        fs::write(root.join("sub/deep/new"), "new").expect("written");
        fs::remove_file(root.join("sub/deep/e")).expect("there");
        set_times(root);
    });
    for name in ["one", "two"] {
        let mode = Permissions::from_mode(0o555);
        fs::set_permissions(place.path(&format!("{name}/sub/deep")), mode).expect("ours");
        pack(&place, name);
    }
    extract(&place, "one.tar", "out");
    assert_updated(&place, "two.tar", &["--delete"], "read-only");
    for name in ["one", "two", "out", "expected"] {
        let mode = Permissions::from_mode(0o755);
        fs::set_permissions(place.path(&format!("{name}/sub/deep")), mode).expect("ours");
    }
}

// Promises: sync-mounts
#[test]
fn update_follows_no_links() {
    let place = pair(|_| ());
    extract(&place, "one.tar", "out");
    fs::create_dir(place.path("outside")).expect("made");
    fs::write(place.path("outside/kept"), "kept").expect("written");
    fs::remove_dir_all(place.path("out/sub")).expect("there");
    symlink("../outside", place.path("out/sub")).expect("made");
    symlink("../outside", place.path("out/extra")).expect("made");
    assert_updated(&place, "one.tar", &["--delete"], "links");
    fs::create_dir_all(place.path("out/other/deep")).expect("made");
    fs::remove_dir_all(place.path("out/sub")).expect("there");
    symlink("other", place.path("out/sub")).expect("made");
    let outcome = update(&place, "one.tar", &[]);
    assert!(
        !outcome.complaints.contains("sub"),
        "{}",
        outcome.complaints
    );
    assert_updated(&place, "one.tar", &["--delete"], "a link inside");
    let names: Vec<_> = fs::read_dir(place.path("outside"))
        .expect("there")
        .collect();
    assert_eq!(names.len(), 1);
    assert_eq!(
        fs::read(place.path("outside/kept")).expect("there"),
        b"kept"
    );
}

/// Fills `directory` with random files, some of which are links to earlier ones.
fn fill(directory: &Path, noise: &mut Rng, depth: u64, files: &mut Vec<std::path::PathBuf>) {
    for name in ["a", "b", "c", "d"] {
        let path = directory.join(name);
        match noise.below(9) {
            0 | 1 if depth < 3 => {
                fs::create_dir(&path).expect("made");
                fill(&path, noise, depth + 1, files);
            }
            2 => {
                let target = if noise.below(2) == 0 { "x" } else { "y" };
                symlink(target, &path).expect("made");
            }
            3 | 4 if !files.is_empty() => {
                let number = noise.below(files.len() as u64);
                let number = usize::try_from(number).expect("small");
                let first = files.get(number).expect("a file");
                fs::hard_link(first, &path).expect("made");
            }
            5..8 => {
                let content = usize::try_from(noise.below(5)).expect("small");
                fs::write(&path, format!("{:1$}", content, content / 2)).expect("written");
                files.push(path);
            }
            _ => {}
        }
    }
}

/// Makes the tree `name` of `seed`. Times of files follow from their contents.
fn make_random(place: &Place, name: &str, seed: u64) {
    let root = place.path(name);
    if root.exists() {
        fs::remove_dir_all(&root).expect("ours");
    }
    fs::create_dir(&root).expect("made");
    let (mut noise, mut files) = (Rng::new(seed), Vec::new());
    fill(&root, &mut noise, 0, &mut files);
    set_times(&root);
    for file in files {
        let content = fs::read(&file).expect("there");
        let seconds = 1_000_000_000 + u64::from(content.iter().max().copied().unwrap_or(0));
        let time = UNIX_EPOCH + Duration::from_secs(seconds);
        File::open(&file)
            .expect("there")
            .set_modified(time)
            .expect("ours");
        let mode = if noise.below(2) == 0 { 0o600 } else { 0o644 };
        fs::set_permissions(&file, Permissions::from_mode(mode)).expect("ours");
    }
    pack(place, name);
}

// Promises: sync-result, sync-differs
#[test]
fn update_from_any_tree_leaves_the_tree_of_the_archive() {
    let place = Place::new();
    for seed in 0..60 {
        make_random(&place, "one", 2 * seed);
        make_random(&place, "two", 2 * seed + 1);
        extract(&place, "one.tar", "out");
        let flags = ["--delete", "--checksum"];
        let count = 1 + usize::from(seed % 2 == 0);
        assert_updated(&place, "two.tar", &flags[..count], &format!("seed {seed}"));
    }
}

/// Two versions of a tree of `count` files of `len` bytes, of which the second differs in the first tenth.
fn versions(place: &Place, count: u64, len: usize) {
    let mut noise = Rng::new(11);
    for name in ["one", "two"] {
        for directory in 0..10 {
            fs::create_dir_all(place.path(&format!("{name}/{directory}"))).expect("made");
        }
    }
    for number in 0..count {
        let path = format!("{}/{number:04}", number * 10 / count);
        let content = noise.bytes(len);
        fs::write(place.path(&format!("one/{path}")), &content).expect("written");
        let is_changed = number < count / 10;
        let content = if is_changed {
            noise.bytes(len)
        } else {
            content
        };
        fs::write(place.path(&format!("two/{path}")), &content).expect("written");
    }
    set_times(&place.path("one"));
    set_times(&place.path("two"));
    for number in 0..count / 10 {
        let file = File::open(place.path(&format!("two/0/{number:04}"))).expect("there");
        let time = UNIX_EPOCH + Duration::from_secs(1_100_000_000);
        file.set_modified(time).expect("ours");
    }
    pack(place, "one");
    pack(place, "two");
}

// Promises: sync-killed
#[test]
fn killed_update_ends_in_the_right_tree_when_run_again() {
    let place = Place::new();
    versions(&place, 200, 9000);
    fs::write(place.path("one/extra"), "x").expect("written");
    pack(&place, "one");
    let index = place.run(&["index", "two.tar"]);
    assert_eq!(index.code, 0, "{}", index.complaints);
    extract(&place, "one.tar", "out");
    let started = Instant::now();
    assert_eq!(update(&place, "two.tar", &["--delete"]).code, 0);
    let whole = started.elapsed();
    let mut kills = 0;
    for round in 0..20 {
        extract(&place, "one.tar", "out");
        let mut child = place
            .tarfs()
            .args(["sync", "-p", "--delete", "two.tar", "out"])
            .stderr(Stdio::null())
            .spawn()
            .expect("the program");
        sleep(whole * round / 20);
        child.kill().expect("ours");
        let status = child.wait().expect("ended");
        kills += u32::from(!status.success());
        assert_updated(&place, "two.tar", &["--delete"], &format!("round {round}"));
    }
    assert!(kills > 0);
}

// Promises: sync-fetches
#[test]
fn update_fetches_only_what_has_changed() {
    let place = Place::new();
    versions(&place, 800, 20_000);
    let status = Command::new("gzip")
        .arg("-1")
        .arg(place.path("two.tar"))
        .status();
    assert!(status.expect("gzip").success());
    let archive = fs::read(place.path("two.tar.gz")).expect("there");
    let total = archive.len() as u64;
    let server = Server::start();
    server.serve("/two.tar.gz", Resource::new(archive).etag("\"two\""));
    let url = server.url("/two.tar.gz");
    assert_eq!(place.run(&["index", &url]).code, 0);
    fs::remove_dir_all(place.path("cache/spans")).ok();
    extract(&place, "one.tar", "out");
    let before = server.sent_bytes("/two.tar.gz");
    let outcome = update(&place, &url, &["--delete"]);
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
    assert_eq!(counter(&outcome, "written_bytes"), 80 * 20_000);
    let sent = server.sent_bytes("/two.tar.gz") - before;
    assert!(sent < total / 3, "{sent} of {total}");
    assert!(sent > total / 11, "{sent} of {total}");
    assert_eq!(
        tree_facts(&place.path("out")),
        tree_facts(&place.path("two"))
    );
}

// Promises: sync-operands
#[test]
fn sync_has_no_flags_of_other_verbs() {
    let place = pair(|_| ());
    for flags in [
        &["--atomic"][..],
        &["--resume"],
        &["--keep-old-files"],
        &["--skip-old-files"],
        &["--exclude", "x"],
        &["--include", "x"],
        &["--strip-components", "1"],
        &["--to-stdout"],
        &["--allow-truncated"],
        &["sub"],
    ] {
        let outcome = update(&place, "one.tar", flags);
        assert_eq!(outcome.code, 64, "{flags:?}: {}", outcome.complaints);
    }
    for flag in [
        "--delete",
        "--checksum",
        "--update",
        "--shard=1/2",
        "--finish",
    ] {
        let outcome = place.run(&["materialize", flag, "one.tar", "-C", "out"]);
        assert_eq!(outcome.code, 64, "{}", outcome.complaints);
    }
}

/// Its index lists fewer entries than the whole archive, which the destination may have.
// Promises: index-named
#[test]
fn index_of_a_truncated_archive_deletes_nothing() {
    let place = Place::new();
    let whole = Archive::new().file("a", [1; 3000]).file("b", "b").end();
    place.put("whole.tar", &whole);
    place.put("cut.tar", &whole[..2048]);
    let index = ["index", "--allow-truncated", "--output", "cut.tarfs"];
    let indexed = place.run(&[&index[..], &["cut.tar"]].concat());
    assert_eq!(indexed.code, 0, "{}", indexed.complaints);
    place.succeeds(&["materialize", "whole.tar", "-C", "out"]);
    let before = tree_facts(&place.path("out"));
    let flags = ["--delete", "--index", "cut.tarfs"];
    let outcome = update(&place, "cut.tar", &flags);
    assert_eq!(outcome.code, 2, "{}", outcome.complaints);
    assert!(
        outcome.complaints.contains("truncated"),
        "{}",
        outcome.complaints
    );
    assert_eq!(tree_facts(&place.path("out")), before);
}

// Promises: index-named
#[test]
fn index_of_a_truncated_archive_completes_no_run() {
    let place = Place::new();
    let whole = Archive::new().file("a", random_bytes(12 << 20)).end();
    let packed = Packing::Gzip.pack(&whole.into());
    place.put("cut.tar.gz", &packed[..packed.len() - 8]);
    let index = ["index", "--allow-truncated", "--output", "cut.tarfs"];
    let indexed = place.run(&[&index[..], &["cut.tar.gz"]].concat());
    assert_eq!(indexed.code, 0, "{}", indexed.complaints);
    for flags in [&["-C", "out"][..], &["--atomic", "-C", "atomic"]] {
        let run = ["materialize", "--index", "cut.tarfs", "cut.tar.gz"];
        let outcome = place.run(&[&run[..], flags].concat());
        assert_eq!(outcome.code, 2, "{flags:?}: {}", outcome.complaints);
        let complaints = outcome.complaints;
        assert!(complaints.contains("truncated"), "{complaints}");
    }
    assert!(!place.path("atomic").exists());
    let dump = ["ls", "--format", "composefs", "cut.tarfs"];
    let outcome = place.run(&dump);
    assert_eq!(outcome.code, 2, "{}", outcome.complaints);
    assert!(outcome.complaints.contains("--allow-truncated"));
    let outcome = place.run(&[&dump[..], &["--allow-truncated"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
}

/// A name that only the index has would be written without a look into the archive.
// Promises: published-copies
#[test]
fn update_compares_each_name_with_the_archive() {
    let place = Place::new();
    let (real, forged) = ("d/name-of-the-link", "d/name-of-not-link");
    let archive = Archive::new().directory("d/").file("d/file", [1; 5_000]);
    place.put("a.tar", archive.hard_link(real, "d/file").end());
    let indexed = place.run(&["index", "-q", "--output", "a.tar.tarfs", "a.tar"]);
    assert_eq!(indexed.code, 0, "{}", indexed.complaints);
    let index = place.path("a.tar.tarfs");
    for is_forged in [false, true] {
        if is_forged {
            forge(&index, b"name-of-the-link", b"name-of-not-link");
        }
        let digest = sha256(&fs::read(&index).expect("written"));
        for out in ["new", "existing"] {
            fs::remove_dir_all(place.path(out)).ok();
            if out == "new" {
                fs::create_dir(place.path(out)).expect("made");
            } else {
                extract(&place, "a.tar", out);
                fs::remove_file(place.path(out).join(real)).expect("written");
            }
            // An own index, saved before, would be preferred.
            fs::remove_dir_all(place.path("cache")).ok();
            let flags = ["sync", "--cache-dir", "cache", "--index-sha256", &digest];
            let outcome = place.run(&[&flags[..], &["a.tar", out]].concat());
            let what = format!("{out}, forged: {is_forged}: {}", outcome.complaints);
            assert_eq!(outcome.code, if is_forged { 2 } else { 0 }, "{what}");
            assert_eq!(place.path(out).join(real).exists(), !is_forged, "{what}");
            let names = fs::read_dir(place.path(out).join("d")).map(Iterator::count);
            assert!(names.unwrap_or_default() <= 2, "{what}");
            assert!(!place.path(out).join(forged).exists(), "{what}");
        }
    }
}

// Promises: sync-operands
#[test]
fn update_from_a_directory_copies_what_differs() {
    let place = Place::new();
    let words = ["sync", "--delete", "--stats", "two", "out"];
    for seed in 0..40 {
        for name in ["one", "two", "out"] {
            fs::remove_dir_all(place.path(name)).ok();
        }
        make_random(&place, "one", 2 * seed);
        make_random(&place, "two", 2 * seed + 1);
        fs::rename(place.path("one"), place.path("out")).expect("ours");
        let flags: &[&str] = if seed % 2 == 0 { &["--checksum"] } else { &[] };
        let words = [&words, flags].concat();
        let outcome = place.run(&words);
        assert_eq!(outcome.code, 0, "{seed}: {}", outcome.complaints);
        let found = tree_facts(&place.path("out"));
        for (path, fact) in &tree_facts(&place.path("two")) {
            assert_eq!(
                found.get(path),
                Some(fact),
                "seed {seed}: {}",
                path.display()
            );
        }
        assert_eq!(place.run(&["diff", "--checksum", "two", "out"]).text(), "");
        let again = place.run(&words);
        assert_eq!(again.code, 0, "{}", again.complaints);
        assert_eq!(counter(&again, "written_entries"), 0, "seed {seed}");
        assert_eq!(tree_facts(&place.path("out")), found);
    }
}

// Promises: sync-operands
#[test]
fn update_from_a_directory_changes_only_attributes_if_these_alone_differ() {
    let place = pair(|_| ());
    fs::remove_dir(place.path("out")).expect("empty");
    fs::rename(place.path("two"), place.path("out")).expect("ours");
    // No file is made of a socket.
    let socket = UnixListener::bind(place.path("one/sub/socket")).expect("a short path");
    set_times(&place.path("one"));
    let mode = Permissions::from_mode(0o4750);
    fs::set_permissions(place.path("one/sub/c"), mode).expect("ours");
    let words = ["sync", "one", "out"];
    let dry = place.run(&[&words[..], &["--dry-run"]].concat());
    assert_eq!((dry.code, dry.text()), (0, "change sub/c\n"));
    drop(socket);
    fs::remove_file(place.path("one/sub/socket")).expect("ours");
    set_times(&place.path("one"));
    let outcome = place.run(&[&words[..], &["--stats"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
    assert_eq!(counter(&outcome, "written_bytes"), 0);
    assert_eq!(
        tree_facts(&place.path("out")),
        tree_facts(&place.path("one"))
    );
}

// Promises: sync-operands
#[test]
fn update_refuses_a_source_in_the_directory_that_it_updates() {
    let place = pair(|_| ());
    for (source, directory) in [("one/sub", "one"), ("one", "one"), ("one", "one/sub")] {
        let outcome = place.run(&["sync", "--delete", source, directory]);
        assert_eq!(outcome.code, 2, "{source}: {}", outcome.complaints);
    }
    assert_eq!(place.run(&["diff", "one", "two"]).code, 0);
}
