//! Archives whose names or links lead outside the destination.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{Tree, case, check};
use crate::support::adversarial::{MEMORY, Place, walk};
use crate::support::fixture::PROGRAM;
use crate::support::measured_runner::MeasuredRunner;
use crate::support::raw::{Archive, GNU, Header};

/// A directory that names and links of archives lead to. It must not change.
struct Outside(tempfile::TempDir);

impl Outside {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("secret"), "secret").expect("space");
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn name(&self) -> &str {
        self.path().to_str().expect("UTF-8")
    }
}

// Promises: hostile-paths, gnu-link-later
#[test]
fn names_and_links_do_not_escape_the_root() {
    // GNU tar makes such links last, and then finds its own placeholder at their path.
    const OVER: &str = "a later member replaces a link that leads outside like any other";
    let outside = Outside::new();
    let out = outside.name();
    let file = |archive: Archive, name: &str| archive.file(name, "evil").end();
    let link = |target: &str| Archive::new().symlink("l", target);
    let cases = vec![
        case("an absolute name", file(Archive::new(), "/absolute/x")),
        case("an absolute name in pax", {
            let path = format!("{out}/x");
            file(Archive::new().pax(&[("path", path)]), "x")
        }),
        case("an absolute long name", {
            file(Archive::new().long(b'L', format!("{out}/x")), "x")
        }),
        case("many slashes", file(Archive::new(), "////x")),
        case("a name that climbs", file(Archive::new(), "../decoy/x")),
        case("a name that climbs in the middle", {
            file(Archive::new().directory("d/"), "d/../../decoy/x")
        }),
        case("a name that ends in dots", file(Archive::new(), "d/..")),
        case("a long name that climbs", {
            file(Archive::new().long(b'L', "../decoy/x"), "x")
        }),
        case("a pax path that climbs", {
            file(Archive::new().pax(&[("path", "../decoy/x")]), "x")
        }),
        case("a global path that climbs", {
            file(Archive::new().global(&[("path", "../decoy/x")]), "x")
        }),
        case(
            "a directory that climbs",
            Archive::new().directory("../decoy/d/").end(),
        ),
        case("a link that climbs by its name", {
            Archive::new().symlink("../decoy/l", "x").end()
        }),
        case("three dots are a name", file(Archive::new(), ".../x")),
        case(
            "through a link to a neighbour",
            file(link("../decoy"), "l/x"),
        )
        .refused("outside"),
        case("through an absolute link", file(link(out), "l/x")).refused("outside"),
        case("through a chain of links", {
            file(link("m").symlink("m", "../decoy"), "l/x")
        })
        .refused("outside"),
        case(
            "through a link to dot and dots",
            file(link("./../decoy"), "l/x"),
        )
        .refused("outside"),
        case(
            "a directory through a link",
            link("../decoy").directory("l/d/").end(),
        )
        .refused("outside"),
        case("a directory over a link to a neighbour", {
            link("../decoy")
                .add(Header::new("l/", b'5').mode(0o777), "")
                .end()
        })
        .different_tree(Tree::Either, OVER),
        case("a file below a directory over a link", {
            let archive = link("../decoy").add(Header::new("l/", b'5').mode(0o777), "");
            file(archive, "l/x")
        })
        .different_tree(Tree::Either, OVER),
        case(
            "a file over a link to a file",
            file(link("../decoy/secret"), "l"),
        )
        .different_tree(Tree::Either, OVER),
        case("a file over an absolute link to a file", {
            file(link(&format!("{out}/secret")), "l")
        })
        .different_tree(Tree::Either, OVER),
        case(
            "a FIFO over a link",
            link("../decoy/secret").fifo("l").end(),
        )
        .different_tree(Tree::Either, OVER),
        case("a directory that becomes a link", {
            let archive = Archive::new().directory("l/").symlink("l", "../decoy");
            file(archive, "l/x")
        })
        .refused("outside"),
        case("a link that becomes a directory and a link again", {
            let archive = link("../decoy").directory("l/").symlink("l", "../decoy");
            file(archive, "l/x")
        })
        .refused("outside"),
        case("a hard link to a neighbour", {
            Archive::new().hard_link("h", "../decoy/secret").end()
        }),
        case("a hard link to an absolute name", {
            Archive::new()
                .hard_link("h", &format!("{out}/secret"))
                .end()
        }),
        case("a hard link through a link", {
            link("../decoy").hard_link("h", "l/secret").end()
        })
        .refused("outside"),
        case("a file over a hard link through a link", {
            file(link("../decoy").hard_link("h", "l/secret"), "h")
        })
        .refused("outside"),
        case("a file over a hard link to a link", {
            file(link("../decoy/secret").hard_link("h", "l"), "h")
        })
        .different_tree(Tree::Either, OVER),
        case("a file through a hard link to a link", {
            file(link("../decoy").hard_link("h", "l"), "h/x")
        })
        .refused("outside"),
        case("a mode through a link", {
            let archive = link("../decoy/secret");
            archive
                .add(Header::new("l", b'1').link("l").mode(0o777), "")
                .end()
        }),
        case("attributes through a link", {
            let keys = [("SCHILY.xattr.user.evil", "1")];
            Archive::new()
                .pax(&keys)
                .symlink("l", "../decoy/secret")
                .end()
        }),
        case("a path of two hundred directories behind a link", {
            let path = format!("l/{}x", "d/".repeat(200));
            file(link(".").pax(&[("path", path)]), "x")
        }),
        case("a link to itself", file(link("l"), "l/x")).refused("symbolic links"),
        case("a loop of links", file(link("m").symlink("m", "l"), "l/x")).refused("symbolic links"),
        case("forty-one links", {
            let archive = (0..41).fold(Archive::new().directory("l41/"), |archive, number| {
                archive.symlink(&format!("l{number}"), &format!("l{}", number + 1))
            });
            file(archive, "l0/x")
        })
        .refused("symbolic links"),
        case("two links for each one, forty times over", {
            let archive = (0..40).fold(Archive::new().directory("l40/"), |archive, number| {
                let next = format!("l{}/../l{0}", number + 1);
                archive.symlink(&format!("l{number}"), &next)
            });
            file(archive, "l0/x")
        })
        .refused("symbolic links"),
        case("below a file", file(Archive::new().file("f", "1"), "f/x")),
        case("below a FIFO", file(Archive::new().fifo("f"), "f/x")).refused("not a directory"),
        case("below a device", {
            let null = Header::new("f", b'3').device(1, 3);
            file(Archive::new().add(null, ""), "f/x")
        }),
        case("a file over a FIFO", file(Archive::new().fifo("f"), "f")),
        case("a file over a device", {
            let null = Header::new("f", b'3').device(1, 3);
            file(Archive::new().add(null, ""), "f")
        }),
        case("a hard link to a device and a file over it", {
            let null = Header::new("f", b'3').device(1, 3);
            file(Archive::new().add(null, "").hard_link("h", "f"), "h")
        }),
        case(
            "a FIFO over a file",
            Archive::new().file("f", "1").fifo("f").end(),
        ),
        case(
            "the root as a link",
            file(Archive::new().symlink("./", "../decoy"), "x"),
        ),
        case("a file called dots", file(Archive::new(), "..")),
        case("a sparse file through a link", {
            let keys = [("GNU.sparse.name", "l/x"), ("GNU.sparse.size", "4")];
            file(link("../decoy").pax(&keys), "x")
        })
        .refused("outside"),
        case("GNU's long link to a neighbour", {
            let archive = Archive::new().long(b'K', "../decoy");
            file(archive.add(Header::new("l", b'2').magic(GNU), ""), "l/x")
        })
        .refused("outside"),
    ];
    check(outside.path(), cases);
}

/// Exchanges `name` in `directory` with `other` until stopped, and counts the exchanges.
///
/// The directory itself may be moved meanwhile.
fn swap(directory: &fs::File, name: &str, other: &Path, stop: &AtomicBool, swaps: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        // The name may be missing for a moment, because the extraction replaces links.
        if renameat_with(directory, name, CWD, other, RenameFlags::EXCHANGE).is_ok() {
            swaps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// Promises: hostile-paths
#[test]
fn directory_swapped_for_link_by_racer_does_not_escape() {
    const FILES: usize = 40;
    let outside = Outside::new();
    // Entries that a stray write, chmod, utimens or setxattr would change.
    fs::create_dir(outside.path().join("e")).expect("fresh");
    for number in 0..FILES {
        fs::write(outside.path().join(format!("f{number}")), "kept").expect("space");
        fs::write(outside.path().join(format!("e/f{number}")), "kept").expect("space");
    }
    let mut archive = Archive::new();
    for _ in 0..30 {
        archive = archive.add(Header::new("d/", b'5').mode(0o755), "");
        archive = archive.add(Header::new("d/e/", b'5').mode(0o700), "");
        for number in 0..FILES {
            let keys = [("SCHILY.xattr.user.evil", "1")];
            archive = archive
                .file(&format!("d/f{number}"), "evil")
                .pax(&keys)
                .add(
                    Header::new(format!("d/e/f{number}"), b'0').mode(0o4777),
                    "evil",
                )
                .symlink(&format!("d/s{number}"), "evil")
                .hard_link(&format!("d/h{number}"), &format!("d/e/f{number}"))
                .fifo(&format!("d/e/p{number}"));
        }
    }
    let place = Place::with_archive(&archive.end());
    let root = place.root_of("own");
    let before = around(outside.path());
    let (stop, swaps) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        fs::create_dir_all(root.join("d/e")).expect("fresh");
        let parents = [root.clone(), root.join("d")].map(fs::File::open);
        let parents = parents.map(|parent| parent.expect("a directory"));
        let targets = [outside.path().to_owned(), outside.path().join("e")];
        for ((parent, name), target) in parents.into_iter().zip(["d", "e"]).zip(targets) {
            // The link is beside the destination when it is not in it.
            let link = place.path("own").join(name);
            symlink(target, &link).expect("fresh");
            let (stop, swaps) = (&stop, &swaps);
            scope.spawn(move || swap(&parent, name, &link, stop, swaps));
        }
        let mut runner = MeasuredRunner::start(place.root());
        let words = [PROGRAM, "materialize", "-q", MEMORY, "../../a"];
        let codes: Vec<i64> = (0..6).map(|_| runner.run(&root, &words).code).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(codes.iter().all(|code| matches!(code, 0 | 2)), "{codes:?}");
    });
    assert!(swaps.into_inner() > 1000, "nothing was swapped");
    assert_eq!(around(outside.path()), before);
}

/// All entries below a directory, with their change times.
fn around(root: &Path) -> Vec<(String, (i64, i64))> {
    walk(root)
        .into_iter()
        .map(|(path, line)| {
            let status = fs::symlink_metadata(root.join(path)).expect("there");
            (line, (status.ctime(), status.ctime_nsec()))
        })
        .collect()
}
