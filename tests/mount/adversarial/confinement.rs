//! Devices as members, and files that archives must not open.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::process::Command;

use crate::support::adversarial::{MEMORY, Place, tree};
use crate::support::fixture::PROGRAM;
use crate::support::measured_runner::MeasuredRunner;
use crate::support::program;
use crate::support::raw::{Archive, Header};

// Promises: hostile-paths
#[test]
fn existing_files_are_never_opened_or_written() {
    let mut archive = Archive::new();
    for name in ["fifo", "file-link", "dangling", "shared", "device"] {
        archive = archive.file(name, "new");
    }
    let place = Place::with_archive(&archive.directory("dir-link/").file("fifo-dir/x", "1").end());
    let root = place.root_of("own");
    for fifo in ["fifo", "fifo-dir"] {
        let made = Command::new("mkfifo").arg(root.join(fifo)).status();
        assert!(made.expect("a program").success());
    }
    symlink("../decoy/secret", root.join("file-link")).expect("fresh");
    symlink("../decoy/nothing", root.join("dangling")).expect("fresh");
    symlink("../decoy", root.join("dir-link")).expect("fresh");
    fs::hard_link(place.path("own/decoy/secret"), root.join("shared")).expect("one disk");
    let made = Command::new("mknod")
        .arg(root.join("device"))
        .args(["c", "1", "3"])
        .status();
    assert!(made.expect("a program").success());
    let secret = fs::metadata(place.path("own/decoy/secret")).expect("there");

    let mut runner = MeasuredRunner::start(place.root());
    let run = runner.run(&root, &[PROGRAM, "materialize", MEMORY, "../../a"]);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.said.contains("fifo-dir/x: refused"), "{run:?}");
    for name in ["fifo", "file-link", "dangling", "shared", "device"] {
        let status = fs::symlink_metadata(root.join(name)).expect("written");
        assert!(status.is_file() && status.nlink() == 1, "{name}");
        assert_eq!(fs::read(root.join(name)).expect("a file"), b"new");
    }
    assert!(
        fs::symlink_metadata(root.join("dir-link"))
            .expect("there")
            .is_dir()
    );
    let fifo = fs::symlink_metadata(root.join("fifo-dir")).expect("there");
    assert!(fifo.file_type().is_fifo());
    let decoy = tree(&place.path("own/decoy"));
    assert_eq!(decoy.len(), 1, "{decoy:?}");
    let after = fs::metadata(place.path("own/decoy/secret")).expect("there");
    assert_eq!((after.len(), after.mtime_nsec()), (6, secret.mtime_nsec()));
}

// Promises: hostile-devices
#[test]
fn devices_and_set_id_bits_are_created_by_root_only() {
    const NOBODY: u32 = 65534;
    let null = Header::new("null", b'3').device(1, 3).mode(0o666);
    let archive = Archive::new()
        .add(null, "")
        .add(Header::new("loop", b'4').device(7, 200), "")
        .fifo("fifo")
        .add(Header::new("setuid", b'0').mode(0o6755), "evil")
        .add(Header::new("d/", b'5').mode(0o3777), "")
        .add(Header::new("d/owned", b'0').owner(7, 8).mode(0o4755), "1")
        .end();
    let place = Place::with_archive(&archive);
    fs::set_permissions(place.root(), PermissionsExt::from_mode(0o755)).expect("ours");
    for program in ["gnu", "own"] {
        chown(place.root_of(program), Some(NOBODY), Some(NOBODY)).expect("root");
    }
    let mut runner = MeasuredRunner::start(place.root());
    let tar = ["tar", "-xf", "../../a"];
    let gnu = runner.run_as(Some(NOBODY), &place.root_of("gnu"), &tar);
    // Other users cannot access the directory of the original program.
    program::copy_to(&place.root().join("tarfs"));
    let words = ["../../tarfs", "materialize", "../../a"];
    let own = runner.run_as(Some(NOBODY), &place.root_of("own"), &words);
    assert_eq!((gnu.code, own.code), (2, 2), "{gnu:?} {own:?}");
    for device in ["null", "loop"] {
        let error = format!("{device}: cannot create the device");
        assert!(own.said.contains(&error), "{own:?}");
    }
    let written = tree(&place.root_of("own"));
    assert_eq!(written, tree(&place.root_of("gnu")));
    assert_eq!(written.len(), 4, "{written:?}");
    assert!(
        fs::metadata(place.root_of("own").join("setuid"))
            .expect("written")
            .mode()
            & 0o6000
            == 0
    );
}
