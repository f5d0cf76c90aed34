//! Mounts by an index that is published beside the archive.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Response, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};
use crate::support::rng::Rng;
use crate::support::sha256::sha256;
use crate::support::wait;

const ARCHIVE: &str = "/archive";
const INDEX: &str = "/archive.tarfs";

const ETAG: &str = "\"1\"";

/// Enough files that their index is longer than what is loaded when it is opened.
const FILES: usize = 6000;

type Place = TestMount<Server>;

fn content(number: usize) -> Vec<u8> {
    Rng::new(number as u64 + 1).bytes(700)
}

/// Names do not compress, so the index is long.
fn name(number: usize) -> String {
    let digits = Rng::new(number as u64).bytes(32);
    let digits = digits.iter().map(|byte| format!("{byte:02x}"));
    format!("d{}/{}", number % 10, digits.collect::<String>())
}

fn archive() -> Archive {
    let archive = (0..FILES).fold(Archive::new(), |archive, number| {
        archive.file(&name(number), content(number))
    });
    archive
        .pax(&[
            ("GNU.sparse.size", "8192"),
            ("GNU.sparse.numblocks", "2"),
            ("GNU.sparse.map", "0,512,4096,512"),
        ])
        .file("sparse", [3; 1024])
        .symlink("link", &name(0))
        .hard_link("hard", &name(1))
        .directory("empty")
}

/// A place whose server has `archive` in `packing` with its published index.
fn published(archive: Archive, packing: Packing) -> Place {
    let place = TestMount::with(&["cache", "other"], Server::start());
    let packed = packing.pack(&archive.end().into());
    place.serve(ARCHIVE, Resource::new(packed).etag(ETAG));
    publish(&place);
    place
}

/// Makes the index of the archive as it is now, with a cache of its own, and publishes it.
fn publish(place: &Place) {
    let url = place.url(ARCHIVE);
    place.succeeds(&["index", "--cache-dir", "other", "--output", "index", &url]);
    let index = fs::read(place.path("index")).expect("written");
    place.serve(INDEX, Resource::new(index).etag("\"index\""));
}

fn mount(place: &Place, flags: &[&str]) {
    let url = place.url(ARCHIVE);
    let words = [
        &["mount", "--log-file", "log", "--prefetch", "none"],
        flags,
        &[&url, "mnt"],
    ];
    place.succeeds(&words.concat());
}

#[track_caller]
fn assert_complete(place: &Place) {
    for number in 0..FILES {
        let read = fs::read(place.mounted(name(number))).expect("readable");
        assert!(read == content(number), "{number}");
    }
    let link = fs::read_link(place.mounted("link")).expect("a link");
    assert_eq!(link.to_string_lossy(), name(0));
    let sparse = fs::read(place.mounted("sparse")).expect("readable");
    let parts = [[3; 512].as_slice(), &[0; 3584], &[3; 512], &[0; 3584]];
    assert!(sparse == parts.concat());
    assert!(fs::read(place.mounted("hard")).expect("readable") == content(1));
    let names = fs::read_dir(place.mounted("d3")).expect("a directory");
    assert_eq!(names.count(), FILES / 10);
    let missing = fs::metadata(place.mounted("d3/none")).expect_err("no such name");
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

fn archive_requests(place: &Place) -> usize {
    place.requests(ARCHIVE).len()
}

// Promises: publish-verb, published-used
#[test]
fn published_index_replaces_the_scan_in_every_format() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::Lz4, Packing::Zstd] {
        let place = published(archive(), packing);
        let requests = archive_requests(&place);
        mount(&place, &[]);
        let listed = fs::read_dir(place.mounted("d1")).expect("a directory");
        assert_eq!(listed.count(), FILES / 10);
        assert_eq!(
            archive_requests(&place),
            requests + 1,
            "only its first bytes"
        );
        assert_complete(&place);
        assert_eq!(place.counter("scans"), 0);
        assert_eq!(place.counter("published_indexes"), 1);
        assert_eq!(place.counter("index_mismatches"), 0);
        place.umount();
    }
}

// Promises: published-saved
#[test]
fn published_index_is_saved_for_mounts_without_the_network() {
    let place = published(archive(), Packing::Gzip);
    mount(&place, &[]);
    let index_files = || fs::read_dir(place.path("cache/index")).map_or(0, Iterator::count);
    wait::wait_until("the index is saved", || index_files() == 1);
    assert_complete(&place);
    place.umount();
    let requests = || archive_requests(&place) + place.requests(INDEX).len();
    let before = requests();
    mount(&place, &["--offline"]);
    assert_complete(&place);
    assert_eq!(place.counter("scans"), 0);
    assert_eq!(place.counter("published_indexes"), 0);
    place.umount();
    assert_eq!(requests(), before);
    let refused = place.tarfs(&[
        "ls",
        "--no-published-index",
        "--offline",
        &place.url(ARCHIVE),
    ]);
    assert!(
        !refused.status.success(),
        "it was not made from the archive"
    );
}

// Promises: published-saved
#[test]
fn saved_copy_of_a_forged_index_is_not_read() {
    let name = "0000000000000000";
    let place = published(Archive::new().file(name, [7; 512]), Packing::Plain);
    let index = fs::read(place.path("index")).expect("written");
    let forged = forged(&index, name.as_bytes(), b"1111111111111111");
    place.serve(INDEX, Resource::new(forged).etag("\"forged\""));
    for (is_saved, is_read) in [(false, false), (true, true), (false, false)] {
        mount(&place, &[]);
        let published = place.counter("published_indexes");
        assert_eq!(published, u64::from(!is_saved), "the server's is used");
        let index_files = || fs::read_dir(place.path("cache/index")).map_or(0, Iterator::count);
        wait::wait_until("the index is saved", || index_files() == 1);
        if is_read {
            fs::read(place.mounted("1111111111111111")).expect_err("forged");
            assert!(place.counter("index_mismatches") > 0);
        }
        place.umount();
    }
}

// Promises: published-used
#[test]
fn published_index_of_another_version_is_not_used() {
    let place = published(Archive::new().file("old", [1; 512]), Packing::Plain);
    let new = archive().end();
    place.serve(ARCHIVE, Resource::new(new).etag("\"2\""));
    let done = place.tarfs(&["mount", "--prefetch", "none", &place.url(ARCHIVE), "mnt"]);
    let warning = stderr_text(&done);
    assert!(
        done.status.success() && warning.contains("not using the published index"),
        "{warning}"
    );
    assert_complete(&place);
    assert_eq!(place.counter("scans"), 1);
    assert_eq!(place.counter("published_indexes"), 0);
    place.umount();
}

// Promises: published-used
#[test]
fn index_of_an_equal_archive_elsewhere_is_used_after_samples() {
    let place = published(archive(), Packing::Gzip);
    let packed = Packing::Gzip.pack(&archive().end().into());
    place.serve(ARCHIVE, Resource::new(packed).etag("\"copy\""));
    mount(&place, &[]);
    assert_complete(&place);
    assert_eq!(place.counter("published_indexes"), 1);
    place.umount();
}

/// The published index `index` with `from` replaced by `to` in the index file, which keeps its length.
fn forged(index: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut file = zstd::decode_all(index).expect("frames");
    let places = file.windows(from.len()).enumerate();
    let places = places.filter_map(|(place, bytes)| (bytes == from).then_some(place));
    let places: Vec<usize> = places.collect();
    assert!(!places.is_empty(), "a place to forge");
    for place in places {
        let bytes = file.get_mut(place..place + to.len()).expect("inside");
        bytes.copy_from_slice(to);
    }
    packed(index, &file)
}

/// The index file `file` in one frame, with the front of the published index `index`.
fn packed(index: &[u8], file: &[u8]) -> Vec<u8> {
    let frame = zstd::bulk::compress(file, 3).expect("packed");
    assert!(file.len() <= 128 << 10, "one frame");
    let mut packed = index.get(..32).expect("a front").to_vec();
    packed.extend(u32::try_from(frame.len()).expect("short").to_le_bytes());
    packed.extend(xxh3_64(&frame).to_le_bytes().iter().take(4));
    packed.extend(frame);
    packed
}

// Promises: published-checked
#[test]
fn forged_names_sizes_and_modes_are_not_read() {
    let header = Header::new("true", b'0').mode(0o644);
    let place = published(Archive::new().add(header, [7; 777]), Packing::Plain);
    let index = fs::read(place.path("index")).expect("written");
    let forgeries: [(&[u8], &[u8]); 3] = [
        (b"true", b"fake"),
        (&777_u64.to_le_bytes(), &700_u64.to_le_bytes()),
        (&0o100_644_u16.to_le_bytes(), &0o104_755_u16.to_le_bytes()),
    ];
    for (from, to) in forgeries {
        let forged = forged(&index, from, to);
        place.serve(INDEX, Resource::new(forged).etag("\"index\""));
        mount(&place, &[]);
        assert_eq!(place.counter("published_indexes"), 1);
        let listed = fs::read_dir(place.mounted("")).expect("a directory").next();
        let path = listed.expect("one file").expect("listed").path();
        let error = fs::read(path).expect_err("forged");
        assert_eq!(
            error.raw_os_error(),
            Some(rustix::io::Errno::IO.raw_os_error())
        );
        assert!(place.counter("index_mismatches") > 0);
        place.umount();
    }
}

#[track_caller]
fn assert_forged<T>(result: io::Result<T>, what: &str) {
    let error = result.err().unwrap_or_else(|| panic!("{what} is forged"));
    let errno = rustix::io::Errno::IO.raw_os_error();
    assert_eq!(error.raw_os_error(), Some(errno), "{what}");
}

/// Something that a user does with the tree of a mount.
type Use = fn(&Place) -> io::Result<()>;

// Promises: published-checked, published-unchecked
#[test]
fn forged_owners_modes_and_times_are_not_read() {
    let header = |name: &str, kind: u8| Header::new(name, kind).mode(0o700).owner(0x12_3456, 7);
    let archive = Archive::new()
        .add(header("d/", b'5').mtime(0x1234_5678), [])
        .pax(&[("SCHILY.xattr.user.kind", "honest")])
        .add(
            Header::new("d/f", b'0').owner(0x1a_bcde, 0x1b_cdef),
            [7; 512],
        )
        .add(Header::new("d/empty", b'0').owner(0x1c_def0, 0), [])
        .add(Header::new("p", b'6').mode(0o640), []);
    let place = published(archive, Packing::Zstd);
    let index = fs::read(place.path("index")).expect("written");
    let file = |place: &Place| fs::read(place.mounted("d/f")).map(|_| ());
    let pipe = |place: &Place| fs::symlink_metadata(place.mounted("p")).map(|_| ());
    let empty = |place: &Place| fs::File::open(place.mounted("d/empty")).map(drop);
    let forgeries: [(&str, &[u8], &[u8], Use); 8] = [
        (
            "a directory's mode",
            &0o040_700_u16.to_le_bytes(),
            &0o040_755_u16.to_le_bytes(),
            file,
        ),
        (
            "a directory's owner",
            &0x12_3456_u32.to_le_bytes(),
            &[0; 4],
            file,
        ),
        (
            "a directory's time",
            &0x1234_5678_u64.to_le_bytes(),
            &[0; 8],
            file,
        ),
        (
            "a file's owner",
            &0x1a_bcde_u32.to_le_bytes(),
            &[0; 4],
            file,
        ),
        (
            "a file's group",
            &0x1b_cdef_u32.to_le_bytes(),
            &[0; 4],
            file,
        ),
        ("an attribute", b"honest", b"forged", file),
        (
            "an empty file's owner",
            &0x1c_def0_u32.to_le_bytes(),
            &[0; 4],
            empty,
        ),
        (
            "a pipe's mode",
            &0o010_640_u16.to_le_bytes(),
            &0o010_666_u16.to_le_bytes(),
            pipe,
        ),
    ];
    for (what, from, to, used) in forgeries {
        let forged = forged(&index, from, to);
        for (index, is_forged) in [(&index, false), (&forged, true)] {
            place.succeeds(&["cache", "clear"]);
            place.serve(INDEX, Resource::new(index.clone()).etag("\"index\""));
            mount(&place, &[]);
            assert_eq!(place.counter("published_indexes"), 1);
            let names = fs::read_dir(place.mounted("d")).expect("a directory");
            let sizes = names.map(|name| name.expect("listed").metadata().expect("listed").len());
            assert_eq!(sizes.sum::<u64>(), 512, "{what}");
            assert_eq!(place.counter("index_mismatches"), 0, "{what}");
            if is_forged {
                assert_forged(used(&place), what);
                assert!(place.counter("index_mismatches") > 0, "{what}");
            } else {
                used(&place).expect(what);
                assert_eq!(place.counter("index_mismatches"), 0, "{what}");
            }
            place.umount();
        }
    }
}

/// The rows of section `number` of an index file.
fn section(file: &[u8], number: usize) -> std::ops::Range<usize> {
    let at = |place: usize| {
        let bytes = file.get(place..place + 8).expect("a table");
        usize::try_from(u64::from_le_bytes(bytes.try_into().expect("eight"))).expect("small")
    };
    let entry = 72 + 16 * (number - 1);
    at(entry)..at(entry) + at(entry + 8)
}

/// The published index `index`, in which the dirent called `name` leads to entry `ino`.
fn renamed(index: &[u8], name: &[u8], ino: u32) -> Vec<u8> {
    let mut file = zstd::decode_all(index).expect("frames");
    let arena = section(&file, 6).start;
    let rows = section(&file, 4).step_by(16);
    let name_of = |row: usize| {
        let word = file.get(row..row + 8).expect("a row");
        let word = u64::from_le_bytes(word.try_into().expect("eight"));
        let offset = arena + usize::try_from(word >> 16 & ((1 << 44) - 1)).expect("small");
        let len = usize::try_from(word & 0xffff).expect("small");
        file.get(offset..offset + len).expect("a name")
    };
    let row = rows.into_iter().find(|&row| name_of(row) == name);
    let row = row.expect("a dirent");
    let old = file.get(row..row + 16).expect("a row").to_vec();
    let mut new = old.clone();
    new.splice(8..12, ino.to_le_bytes());
    let place = file.windows(16).position(|bytes| bytes == old);
    let place = place.expect("the row");
    file.splice(place..place + 16, new);
    packed(index, &file)
}

// Promises: published-checked
#[test]
fn forged_hard_link_leads_nowhere() {
    let archive = Archive::new()
        .file("one", [1; 512])
        .file("two", [2; 512])
        .hard_link("further", "one")
        .hard_link("chain", "further")
        .symlink("l", "d")
        .file("d/three", [3; 512])
        .hard_link("through", "l/three");
    let place = published(archive, Packing::Gzip);
    let index = fs::read(place.path("index")).expect("written");
    let is_first = |name: &str, byte: u8| {
        let read = fs::read(place.mounted(name));
        read.map(|bytes| assert!(bytes == [byte; 512], "{name}"))
    };
    mount(&place, &[]);
    for (name, byte) in [
        ("one", 1),
        ("further", 1),
        ("chain", 1),
        ("through", 3),
        ("two", 2),
    ] {
        is_first(name, byte).expect(name);
    }
    assert_eq!(place.counter("published_indexes"), 1);
    assert_eq!(place.counter("index_mismatches"), 0);
    place.umount();
    for name in ["further", "chain", "through"] {
        place.succeeds(&["cache", "clear"]);
        let forged = renamed(&index, name.as_bytes(), 3);
        place.serve(INDEX, Resource::new(forged).etag("\"forged\""));
        mount(&place, &[]);
        let listed = fs::read_dir(place.mounted("")).expect("a directory");
        assert_eq!(listed.count(), 7);
        assert_forged(is_first(name, 2), name);
        is_first("two", 2).expect("the file itself");
        let status = place.status();
        assert_eq!(status["errors"][0]["path"], name);
        place.umount();
    }
}

// Promises: published-unchecked
#[test]
fn headers_behind_long_extensions_are_compared() {
    let long = "c".repeat(2 << 20);
    let attribute = "a".repeat(9 << 10);
    let archive = Archive::new()
        .file("before", [1; 512])
        .pax(&[("comment", &*long), ("path", "d/long")])
        .file("long", [2; 512])
        .pax(&[("SCHILY.xattr.user.long", &*attribute)])
        .symlink("link", "d/long");
    let place = published(archive, Packing::Zstd);
    mount(&place, &[]);
    assert_eq!(
        fs::read(place.mounted("d/long")).expect("readable"),
        [2; 512]
    );
    let link = fs::read_link(place.mounted("link")).expect("a link");
    assert_eq!(link.to_string_lossy(), "d/long");
    assert_eq!(place.counter("published_indexes"), 1);
    assert_eq!(place.counter("index_mismatches"), 0);
    place.umount();
    let index = fs::read(place.path("index")).expect("written");
    let forged = forged(&index, b"d/long", b"d/fake");
    place.serve(INDEX, Resource::new(forged).etag("\"index\""));
    place.succeeds(&["cache", "clear"]);
    mount(&place, &[]);
    assert_forged(fs::read_link(place.mounted("link")), "a target");
    place.umount();
}

/// A tar in a tar that ends with the extension of a member which is cut off.
// Promises: published-unchecked
#[test]
fn content_that_ends_as_an_extension_is_no_extension() {
    let cut = Archive::new().pax(&[("comment", "cut")]).unfinished();
    let archive = Archive::new()
        .file("cut.tar", cut)
        .file("next", [2; 512])
        .file(
            "d/cut.tar",
            Archive::new().pax(&[("comment", "again")]).unfinished(),
        )
        .symlink("link", "next");
    let place = published(archive, Packing::Plain);
    mount(&place, &[]);
    assert_eq!(fs::read(place.mounted("next")).expect("readable"), [2; 512]);
    let link = fs::read_link(place.mounted("link")).expect("a link");
    assert_eq!(link.to_string_lossy(), "next");
    assert_eq!(place.counter("published_indexes"), 1);
    assert_eq!(place.counter("index_mismatches"), 0);
    place.umount();
}

// Promises: published-used
#[test]
fn samples_are_compared_only_within_the_memory() {
    let files = (0..8).fold(Archive::new(), |archive, number| {
        archive.file(&format!("f{number}"), Rng::new(number).bytes(1 << 20))
    });
    let place = published(files.clone(), Packing::Plain);
    let written = fs::read(place.path("index")).expect("written");
    let mut file = zstd::decode_all(written.as_slice()).expect("frames");
    // The memory of the decoder in KiB.
    file.splice(436..440, u32::MAX.to_le_bytes());
    place.serve(INDEX, Resource::new(packed(&written, &file)).etag("\"i\""));
    // Its version is not proven, so samples would be compared.
    place.serve(ARCHIVE, Resource::new(files.end()).etag("\"copy\""));
    let requests = archive_requests(&place);
    let (url, index) = (place.url(ARCHIVE), place.url(INDEX));
    let error = place.error_of(&["mount", "--index", &index, &url, "mnt"]);
    assert!(error.contains("memory"), "{error}");
    assert_eq!(archive_requests(&place), requests + 1, "its first bytes");
}

// Promises: published-impossible
#[test]
fn index_that_headers_cannot_prove_is_not_used() {
    for (records, indexes) in [(("comment", "git"), 1), (("uid", "5"), 0)] {
        let archive = Archive::new().global(&[records]).file("a", [1; 512]);
        let place = published(archive, Packing::Plain);
        let mounted = |flags: &[&str], indexes: u64| {
            place.succeeds(&["cache", "clear"]);
            mount(&place, flags);
            assert_eq!(fs::read(place.mounted("a")).expect("readable"), [1; 512]);
            assert_eq!(place.counter("published_indexes"), indexes, "{records:?}");
            place.umount();
        };
        mounted(&[], indexes);
        mounted(&["--index", &place.url(INDEX)], 1);
    }
}

// Promises: published-note
#[test]
fn listing_of_a_mount_has_a_note_about_a_published_index() {
    let place = published(Archive::new().file("a", [1; 512]), Packing::Plain);
    let note = || {
        let done = place.tarfs(&["ls", "mnt"]);
        assert!(done.status.success());
        stderr_text(&done).contains("note: the tree of the mount comes from")
    };
    mount(&place, &[]);
    assert!(note());
    place.umount();
    mount(&place, &["--no-published-index"]);
    assert!(!note());
    place.umount();
}

/// A directory in which all users can write, with root's archive and an index beside it whose link is forged.
fn shared_directory() -> TestMount {
    let place = TestMount::new(&["cache", "other", "in", "out"]);
    let with = |target: &str| {
        Archive::new()
            .file("good", [7; 512])
            .symlink("link", target)
    };
    place.put("in/a.tar", with("./good").end());
    place.succeeds(&[
        "index",
        "--cache-dir",
        "other",
        "--output",
        "index",
        "in/a.tar",
    ]);
    let index = fs::read(place.path("index")).expect("written");
    place.put("in/a.tar.tarfs", forged(&index, b"./good", b"./evil"));
    let mode = fs::Permissions::from_mode(0o1777);
    fs::set_permissions(place.path("in"), mode).expect("ours");
    place
}

/// The target of the link, as `mount`, `ls` and `materialize` show it, and whether `ls` has a note.
fn link_targets(place: &TestMount) -> ([String; 3], bool) {
    place.succeeds(&["cache", "clear"]);
    place.succeeds(&["mount", "--prefetch", "none", "in/a.tar", "mnt"]);
    let link = fs::read_link(place.mounted("link"));
    let link = link.unwrap_or_else(|error| error.kind().to_string().into());
    place.umount();
    let done = place.tarfs(&["ls", "-l", "in/a.tar", "link"]);
    let listed = String::from_utf8_lossy(&done.stdout).into_owned();
    let shown = listed.trim().rsplit(' ').next().unwrap_or_default();
    place.succeeds(&["sync", "-q", "in/a.tar", "out"]);
    let written = fs::read_link(place.path("out/link")).expect("a link");
    let texts = [link, shown.into(), written].map(|it| it.to_string_lossy().into_owned());
    (
        texts,
        stderr_text(&done).contains("note: the tree comes from"),
    )
}

// Promises: published-note, published-not-written, published-owner
#[test]
fn index_that_other_users_can_write_is_not_used() {
    let place = shared_directory();
    let index = place.path("in/a.tar.tarfs");
    let change = |owner: u32, mode: u32| {
        std::os::unix::fs::chown(&index, Some(owner), None).expect("root");
        fs::set_permissions(&index, fs::Permissions::from_mode(mode)).expect("root");
    };
    let true_links = (["./good"; 3].map(str::to_owned), false);
    for (owner, mode) in [(65534, 0o644), (0, 0o664), (0, 0o646)] {
        change(owner, mode);
        assert_eq!(link_targets(&place), true_links, "{owner} {mode:o}");
    }
    change(0, 0o644);
    let by_link = place.path("in/index");
    fs::rename(&index, &by_link).expect("root");
    std::os::unix::fs::symlink("index", &index).expect("root");
    std::os::unix::fs::lchown(&index, Some(65534), None).expect("root");
    assert_eq!(link_targets(&place), true_links, "a link of another user");
    std::os::unix::fs::lchown(&index, Some(0), None).expect("root");
    let [_, shown, written] = link_targets(&place).0;
    assert_eq!((&*shown, &*written), ("./evil", "./good"));
    assert!(link_targets(&place).1, "ls has a note");
    fs::remove_file(&index).expect("root");
    fs::rename(&by_link, &index).expect("root");
    std::os::unix::fs::chown(place.path("in/a.tar"), Some(65534), None).expect("root");
    change(65534, 0o644);
    assert_eq!(link_targets(&place).0[1], "./evil", "the archive's owner");
}

// Promises: published-checked
#[test]
fn forged_target_of_a_link_is_not_read() {
    let archive = Archive::new()
        .file("good", [7; 512])
        .pax(&[("comment", "before the header")])
        .symlink("link", "./good")
        .symlink("other", "good");
    let place = published(archive, Packing::Gzip);
    let index = fs::read(place.path("index")).expect("written");
    let forged = forged(&index, b"./good", b"./evil");
    place.serve(INDEX, Resource::new(forged).etag("\"forged\""));
    mount(&place, &[]);
    assert_eq!(place.counter("published_indexes"), 1);
    let other = fs::read_link(place.mounted("other")).expect("a link");
    assert_eq!(other.to_string_lossy(), "good");
    assert_eq!(place.counter("index_mismatches"), 0);
    let error = fs::read_link(place.mounted("link")).expect_err("forged");
    let errno = rustix::io::Errno::IO.raw_os_error();
    assert_eq!(error.raw_os_error(), Some(errno));
    assert_eq!(place.counter("index_mismatches"), 1);
    let status = place.status();
    assert_eq!(status["errors"][0]["path"], "link");
    place.umount();
}

/// Links, each called through the one before.
fn chain_of_links(len: usize) -> Archive {
    let first = format!("dir/q{len}");
    let archive = Archive::new().directory("dir").symlink(&first, ".");
    let archive = (0..len).rev().fold(archive, |archive, link| {
        archive.symlink(&format!("dir/q{}/q{link}", link + 1), ".")
    });
    archive.file("plain", [1; 512])
}

// Promises: published-unchecked
#[test]
fn comparison_through_a_chain_of_links_ends() {
    for (len, is_proven) in [(30, true), (60, false)] {
        let place = published(chain_of_links(len), Packing::Plain);
        mount(&place, &[]);
        let read = fs::read_link(place.mounted("dir/q0"));
        if is_proven {
            assert_eq!(read.expect("proven").to_string_lossy(), ".");
        } else {
            assert_forged(read, "a name behind too many links");
        }
        assert_eq!(fs::read(place.mounted("plain")).expect("a file"), [1; 512]);
        assert_eq!(place.counter("published_indexes"), 1);
        place.umount();
    }
}

// Promises: published-copies
#[test]
fn links_of_a_root_are_compared() {
    let archive = Archive::new()
        .directory("good")
        .directory("evil")
        .symlink("link", "./good");
    let place = published(archive, Packing::Plain);
    let index = fs::read(place.path("index")).expect("written");
    mount(&place, &["--root", "link"]);
    assert_eq!(place.counter("published_indexes"), 1);
    place.umount();
    place.succeeds(&["cache", "clear"]);
    let forged = forged(&index, b"./good", b"./evil");
    place.serve(INDEX, Resource::new(forged).etag("\"forged\""));
    let url = place.url(ARCHIVE);
    let failed = place.tarfs(&["mount", "--root", "link", &url, "mnt"]);
    let error = stderr_text(&failed);
    assert!(!failed.status.success(), "{error}");
    assert!(error.contains("--root link"), "{error}");
}

// Promises: published-used
#[test]
fn published_index_over_a_limit_is_not_used() {
    let place = published(Archive::new().file("a", [1; 512]), Packing::Plain);
    let written = fs::read(place.path("index")).expect("written");
    let file = zstd::decode_all(written.as_slice()).expect("frames");
    // The number of members, and the memory of the decoder in KiB.
    for (offset, claim) in [
        (56, (1_u64 << 40).to_le_bytes().to_vec()),
        (436, u32::MAX.to_le_bytes().to_vec()),
    ] {
        let mut forged = file.clone();
        forged.splice(offset..offset + claim.len(), claim);
        let forged = packed(&written, &forged);
        place.serve(INDEX, Resource::new(forged).etag("\"forged\""));
        mount(&place, &[]);
        assert_eq!(fs::read(place.mounted("a")).expect("scanned"), [1; 512]);
        assert_eq!(place.counter("published_indexes"), 0);
        place.umount();
        place.succeeds(&["cache", "clear"]);
    }
}

// Promises: published-damaged
#[test]
fn unavailable_part_of_an_index_is_an_error_and_no_missing_name() {
    let place = TestMount::with(&["cache", "other"], Server::start());
    place.serve(ARCHIVE, Resource::new(archive().end()).etag(ETAG));
    publish(&place);
    let index = Resource::new(fs::read(place.path("index")).expect("written")).etag("\"index\"");
    let is_down = Arc::new(AtomicBool::new(true));
    let flag = Arc::clone(&is_down);
    place.route(INDEX, move |request| {
        let is_first = request.range().is_some_and(|(start, _)| start == 0);
        if flag.load(Ordering::SeqCst) && !is_first {
            return Response::new(503);
        }
        index.answer(request)
    });
    mount(&place, &["--timeout", "2"]);
    let missing = fs::metadata(place.mounted(name(FILES - 1))).expect_err("not loaded");
    assert_ne!(missing.kind(), io::ErrorKind::NotFound);
    assert!(
        fs::read_dir(place.mounted("d1"))
            .and_then(Iterator::collect::<io::Result<Vec<_>>>)
            .is_err()
    );
    is_down.store(false, Ordering::SeqCst);
    assert_complete(&place);
    place.umount();
}

// Promises: published-flags
#[test]
fn pinned_index_is_used_only_with_its_sha256() {
    let place = published(archive(), Packing::Gzip);
    let index = fs::read(place.path("index")).expect("written");
    let digest = sha256(&index);
    mount(&place, &["--index-sha256", &digest]);
    assert_complete(&place);
    assert_eq!(place.counter("published_indexes"), 1);
    place.umount();

    let url = place.url(ARCHIVE);
    let other = "0".repeat(64);
    let done = place.tarfs(&["mount", "--index-sha256", &other, &url, "mnt"]);
    let error = stderr_text(&done);
    assert!(!done.status.success() && error.contains(&digest), "{error}");
    mount(&place, &["--no-published-index"]);
    assert_eq!(place.counter("published_indexes"), 0);
    place.umount();
}

/// Below `--root`, whose paths in the copy are not those in the archive.
// Promises: published-copies
#[test]
fn copy_compares_each_name_with_the_archive() {
    let (link, pipe) = ("name-of-the-link", "name-of-the-pipe");
    let archive = Archive::new().directory("top/").file("top/file", "file");
    let archive = archive.hard_link(&format!("top/{link}"), "top/file");
    let place = published(archive.fifo(&format!("top/{pipe}")), Packing::Gzip);
    let index = fs::read(place.path("index")).expect("written");
    let digest = |index: &[u8]| {
        place.serve(INDEX, Resource::new(index.to_vec()).etag("\"i\""));
        sha256(index)
    };
    let copied = |digest: &str, copy: &str| {
        let flags = ["--root", "top", "--copy-to", copy, "--index-sha256", digest];
        let cache = format!("cache/{copy}");
        let places = ["--cache-dir", &cache];
        mount(&place, &[&flags[..], &places].concat());
        let state = wait::wait_for("the copy has ended", || {
            let status = place.status();
            let state = status.pointer("/copy/state")?.as_str()?;
            let has_ended = ["complete", "incomplete", "stopped"].contains(&state);
            has_ended.then(|| state.to_owned())
        });
        place.umount();
        let mut names: Vec<_> = fs::read_dir(place.path(copy))
            .expect("made")
            .map(|entry| entry.expect("ours").file_name().into_string())
            .collect();
        names.sort_unstable();
        let names: Vec<_> = names.into_iter().map(|name| name.expect("ASCII")).collect();
        (state, names.join(" "))
    };
    let complete = copied(&digest(&index), "whole");
    let all = format!("file {link} {pipe}");
    assert_eq!(complete, ("complete".to_owned(), all));
    let forgery = forged(&index, pipe.as_bytes(), b"name-of-the-pipo");
    let (state, names) = copied(&digest(&forgery), "pipe");
    assert_eq!(state, "incomplete");
    assert_eq!(names, format!("file {link}"));
    let forgery = forged(&index, link.as_bytes(), b"name-of-the-lino");
    let (state, names) = copied(&digest(&forgery), "link");
    assert_eq!(state, "incomplete");
    assert_eq!(names, pipe);
}

// Promises: published-flags
#[test]
fn named_index_is_used_or_reported() {
    let place = published(archive(), Packing::Zstd);
    let requests = place.requests(INDEX).len();
    let named = place.url("/elsewhere");
    let index = fs::read(place.path("index")).expect("written");
    place.serve("/elsewhere", Resource::new(index).etag("\"i\""));
    mount(&place, &["--index", &named]);
    assert_complete(&place);
    assert_eq!(place.counter("published_indexes"), 1);
    assert_eq!(place.requests(INDEX).len(), requests);
    place.umount();

    let missing = place.url("/missing");
    let error = place.error_of(&[
        "mount",
        "--cache-dir",
        "new",
        "--index",
        &missing,
        &place.url(ARCHIVE),
        "mnt",
    ]);
    assert!(
        error.contains("published index") && error.contains("not found"),
        "{error}"
    );
}

/// Another program may write the archive's own location and version into an index file.
// Promises: index-named
#[test]
fn named_index_file_is_compared_with_the_archive() {
    let place = published(archive(), Packing::Gzip);
    mount(&place, &["--index", "index"]);
    assert_complete(&place);
    let notes = place.status()["notes"].to_string();
    assert!(
        notes.contains("which --index or --index-sha256 names"),
        "{notes}"
    );
    place.umount();
    let other = Archive::new().file("other", [1; 512]);
    let mut other = Packing::Gzip.pack(&other.end().into()).to_vec();
    let len = Packing::Gzip.pack(&archive().end().into()).len();
    other.resize(len, 0);
    place.serve(ARCHIVE, Resource::new(other).etag(ETAG));
    let error = place.error_of(&["mount", "--index", "index", &place.url(ARCHIVE), "mnt"]);
    assert!(error.contains("index"), "{error}");
}
