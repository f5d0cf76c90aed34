//! Mounts of directories of archives: local ones, and prefixes of a bucket.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};
use serde_json::Value;

use crate::support::fixture::TestMount;
use crate::support::http::{Request, Resource, Response, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, random_bytes};
use crate::support::wait::{self, process_exits};

const MIB: usize = 1 << 20;

/// An archive with the files `name` and `dir/name`.
fn archive(name: &str) -> Vec<u8> {
    let content = name.repeat(300);
    let deep = format!("dir/{name}");
    Archive::new()
        .file(name, content.clone())
        .file(&deep, content)
        .end()
}

/// A directory `top` with archives, and a mountpoint.
fn place() -> TestMount {
    let place = TestMount::new(&["top", "top/sub"]);
    place.put("top/a.tar", archive("a"));
    place.put("top/sub/b.tar.gz", Packing::Gzip.pack(&archive("b").into()));
    place
}

fn mount(place: &TestMount<impl Sized>, flags: &[&str]) {
    place.succeeds(&[&["mount", "top", "mnt", "--log-file", "log"], flags].concat());
}

fn names(directory: impl AsRef<Path>) -> Vec<String> {
    let read = fs::read_dir(directory).expect("a directory");
    let names = read.map(|entry| entry.expect("listed").file_name().into_string());
    let mut names: Vec<_> = names.map(|name| name.expect("UTF-8")).collect();
    names.sort();
    names
}

/// Number of archives that were opened, that were closed, and that are open.
fn counts(place: &TestMount<impl Sized>) -> (u64, u64, u64) {
    let status = place.status();
    let number = |pointer: &str| {
        status
            .pointer(pointer)
            .and_then(Value::as_u64)
            .expect(pointer)
    };
    (
        number("/counters/opened_archives"),
        number("/counters/closed_archives"),
        number("/directory/open"),
    )
}

#[track_caller]
fn assert_archive(place: &TestMount<impl Sized>, path: &str, name: &str) {
    let root = place.mounted(path);
    let mut expected = [name, "dir"];
    expected.sort_unstable();
    assert_eq!(names(&root), expected, "{path}");
    for file in [root.join(name), root.join("dir").join(name)] {
        assert_eq!(
            fs::read_to_string(&file).expect("readable"),
            name.repeat(300),
            "{path}"
        );
    }
}

// Promises: archives-names, archives-open
#[test]
fn archives_of_a_directory_are_opened_when_entered() {
    let place = place();
    place.put("top/notes.txt", "no archive");
    mount(&place, &[]);
    assert_eq!(names(place.path("mnt")), ["a.tar", "sub"]);
    assert_eq!(names(place.mounted("sub")), ["b.tar.gz"]);
    let mut list = Command::new("ls");
    let listed = list
        .args(["-lZ"])
        .arg(place.path("mnt"))
        .arg(place.mounted("sub"));
    assert!(listed.output().expect("started").status.success());
    let (found, file) = (place.mounted("a.tar"), place.path("top/a.tar"));
    let (found, file) = (
        fs::metadata(found).expect("there"),
        fs::metadata(file).expect("there"),
    );
    assert!(found.is_dir());
    assert_eq!(
        (found.mode() & 0o7777, found.mtime()),
        (0o555, file.mtime())
    );
    assert_eq!(counts(&place), (0, 0, 0));

    assert_archive(&place, "a.tar", "a");
    assert_eq!(counts(&place), (1, 0, 1));
    assert_archive(&place, "sub/b.tar.gz", "b");
    assert_eq!(counts(&place), (2, 0, 2));
    let text = place.succeeds(&["status", "mnt"]);
    assert!(
        text.contains("archives             2, 2 of them open"),
        "{text}"
    );
    let missing = fs::metadata(place.mounted("a.tar/absent")).map_err(|error| error.kind());
    assert_eq!(missing.err(), Some(ErrorKind::NotFound));
}

// Promises: archives-names
#[test]
fn archive_of_a_directory_has_any_name() {
    let place = place();
    let all = ["é.tar", "a'b.tar", r"\xc3\xa9.tar", "a b?c.tar"];
    for name in all {
        let stem = name.trim_end_matches(".tar");
        place.put(format!("top/sub/{name}"), archive(stem));
    }
    mount(&place, &[]);
    for name in all {
        let stem = name.trim_end_matches(".tar");
        assert_archive(&place, &format!("sub/{name}"), stem);
    }
    place.umount();
}

// Promises: archives-names, archives-fail
#[test]
fn broken_archive_of_a_directory_fails_alone() {
    let place = place();
    place.put("top/broken.tar", vec![7; 100_000]);
    symlink("/etc/passwd", place.path("top/link.tar")).expect("linked");
    mount(&place, &[]);
    assert_eq!(names(place.path("mnt")), ["a.tar", "broken.tar", "sub"]);
    let failed =
        fs::read_dir(place.mounted("broken.tar")).and_then(|mut read| read.next().transpose());
    let failed = failed.expect_err("it is broken");
    assert_eq!(failed.raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert_archive(&place, "a.tar", "a");
    assert_eq!(counts(&place), (1, 0, 1));
    let text = place.succeeds(&["status", "mnt"]);
    assert!(text.contains("broken.tar cannot be opened"), "{text}");
    assert!(
        fs::read_to_string(place.path("log"))
            .expect("a log")
            .contains("broken.tar")
    );
}

/// More broken archives than are scanned at once.
// Promises: archives-fail
#[test]
fn broken_archives_do_not_block_other_archives() {
    let place = place();
    let broken: Vec<_> = (0..5).map(|number| format!("broken{number}.tar")).collect();
    for name in &broken {
        place.put(format!("top/{name}"), vec![7; 100_000]);
    }
    mount(&place, &[]);
    let paths: Vec<_> = broken.iter().map(|name| place.mounted(name)).collect();
    let path = place.mounted("a.tar/a");
    let (failed, read) = wait::finish_in_time(move || {
        let list = |path: &PathBuf| fs::read_dir(path).and_then(|mut list| list.next().transpose());
        let failed = paths.iter().filter(|path| list(path).is_err()).count();
        (failed, fs::read_to_string(path))
    });
    assert_eq!(failed, broken.len());
    assert_eq!(read.expect("readable"), "a".repeat(300));
    assert_eq!(place.counter("scans"), 6);
}

// Promises: archives-open
#[test]
fn idle_archive_is_closed_and_opened_again_for_open_files() {
    let place = place();
    let long = vec![b'x'; 9 * MIB];
    place.put(
        "top/a.tar",
        Archive::new()
            .file("a", long.clone())
            .file("dir/a", long)
            .end(),
    );
    mount(&place, &["--idle-timeout", "1", "--prefetch", "none"]);
    let mut open = File::open(place.mounted("a.tar/a")).expect("there");
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let directory = openat(CWD, place.mounted("a.tar/dir"), flags, Mode::empty());
    let directory = directory.expect("there");
    assert_archive(&place, "sub/b.tar.gz", "b");
    wait::wait_until("both are closed", || counts(&place) == (2, 2, 0));
    let mut last = [0];
    open.seek(SeekFrom::End(-1)).expect("a file");
    open.read_exact(&mut last).expect("readable");
    assert_eq!(last, *b"x");
    wait::wait_until("it is closed", || counts(&place) == (3, 3, 0));
    let file = openat(&directory, "a", OFlags::RDONLY, Mode::empty()).expect("it is opened again");
    let (mut file, mut content) = (File::from(file), Vec::new());
    file.read_to_end(&mut content).expect("readable");
    assert_eq!(content.len(), 9 * MIB);
    drop((open, file));
}

// Promises: archives-open, published-note
#[test]
fn archive_of_a_directory_is_opened_by_its_published_index() {
    let place = place();
    for path in ["top/a.tar", "top/sub/b.tar.gz"] {
        let index = format!("{path}.tarfs");
        place.succeeds(&["index", "--cache-dir", "other", "--output", &index, path]);
    }
    mount(&place, &["--idle-timeout", "1"]);
    assert_eq!(names(place.path("mnt")), ["a.tar", "sub"]);
    assert_archive(&place, "a.tar", "a");
    let status = place.status().to_string();
    assert!(status.contains("a.tar: the tree comes from the published index"));
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let directory = openat(CWD, place.mounted("a.tar/dir"), flags, Mode::empty());
    let directory = directory.expect("there");
    assert_archive(&place, "sub/b.tar.gz", "b");
    wait::wait_until("both are closed", || counts(&place) == (2, 2, 0));
    // Nothing asks for its attributes first.
    let absent = openat(&directory, "absent", OFlags::RDONLY, Mode::empty());
    assert_eq!(absent.err(), Some(Errno::NOENT));
    assert_eq!(counts(&place), (3, 2, 1));
    assert!(place.counter("published_indexes") >= 2);
    assert_eq!(place.counter("scans"), 0);
}

// Promises: archives-open
#[test]
fn published_index_of_an_archive_is_not_searched_on_demand() {
    let place = place();
    let index = "top/a.tar.tarfs";
    place.succeeds(&[
        "index",
        "--cache-dir",
        "other",
        "--output",
        index,
        "top/a.tar",
    ]);
    mount(&place, &["--no-published-index"]);
    assert_archive(&place, "a.tar", "a");
    let indexes = place.counter("published_indexes");
    assert_eq!((indexes, place.counter("scans")), (0, 1));
}

// Promises: archives-listed, archives-fail
#[test]
fn replaced_archive_of_a_directory_fails_until_the_next_mount() {
    let place = place();
    mount(&place, &["--idle-timeout", "1"]);
    assert_archive(&place, "a.tar", "a");
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let old = openat(CWD, place.mounted("a.tar/dir"), flags, Mode::empty()).expect("there");
    wait::wait_until("it is closed", || counts(&place) == (1, 1, 0));
    place.put("top/new", archive("other"));
    fs::rename(place.path("top/new"), place.path("top/a.tar")).expect("renamed");
    let changed = openat(&old, "absent", OFlags::RDONLY, Mode::empty());
    assert_eq!(changed.err(), Some(Errno::IO));
    let text = place.succeeds(&["status", "mnt"]);
    assert!(
        text.contains("it has changed since it was opened"),
        "{text}"
    );
    drop(old);
    // A child of another test may have its descriptor for a moment.
    place.succeeds(&["umount", "--lazy", "mnt"]);
    place.put("top/late.tar", archive("late"));
    mount(&place, &[]);
    assert_archive(&place, "a.tar", "other");
    assert_archive(&place, "late.tar", "late");
}

// Promises: archives-fail
#[test]
fn failed_scan_of_an_archive_is_tried_again() {
    let server = Server::start();
    let tar = Archive::new().file("f", random_bytes(2 * MIB));
    let good = Packing::Gzip.pack(&tar.file("g", "content").end().into());
    let good = good.to_vec();
    let mut damaged = good.clone();
    // A byte of the checksum.
    *damaged.iter_mut().nth_back(5).expect("long") ^= 1;
    let listing = bucket_listing(&[("data/a.tar.gz", good.len())], None);
    server.route("/bucket", move |_| {
        Response::new(200).with_body(listing.clone())
    });
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let resources = [damaged, good].map(|bytes| Resource::new(bytes).etag("\"1\""));
    server.route("/bucket/data/a.tar.gz", move |request| {
        let [damaged, good] = &resources;
        let is_mended = mended.load(Ordering::SeqCst);
        if is_mended { good } else { damaged }.answer(request)
    });
    let place = TestMount::with(&[], server);
    mount_bucket(&place, &[]);
    let read = || fs::read(place.mounted("a.tar.gz/g"));
    let list = fs::read_dir(place.mounted("a.tar.gz"));
    let failed = list.and_then(|mut list| list.next().transpose());
    let failed = failed.expect_err("it is damaged");
    assert_eq!(failed.raw_os_error(), Some(Errno::IO.raw_os_error()));
    wait::wait_until("it is reported", || {
        let text = place.succeeds(&["status", "mnt"]);
        text.contains("a.tar.gz cannot be opened: ")
    });
    let log = fs::read_to_string(place.path("log")).expect("a log");
    assert!(log.contains("cannot open the archive"), "{log}");
    is_mended.store(true, Ordering::SeqCst);
    wait::wait_until("it is scanned again", || {
        read().is_ok_and(|content| content == b"content")
    });
    assert_eq!(counts(&place), (2, 1, 1));
}

/// With the default memory, two scans have a regular turn and one a spare turn.
// Promises: archives-memory
#[test]
fn stalled_scans_do_not_block_other_archives() {
    let server = Server::start();
    let stalled = ["data/0.tar.gz", "data/1.tar.gz"];
    let listing = [stalled[0], stalled[1], "data/a.tar", "data/b.tar"].map(|key| (key, 9));
    let listing = bucket_listing(&listing, None);
    server.route("/bucket", move |_| {
        Response::new(200).with_body(listing.clone())
    });
    for name in ["a", "b"] {
        let archive = Resource::new(archive(name)).etag("\"1\"");
        server.serve(&format!("/bucket/data/{name}.tar"), archive);
    }
    let half = Archive::new()
        .file("f", "first")
        .file("g", random_bytes(24 * MIB));
    // A scan does not skip parts of it.
    let half = Packing::Gzip.pack(&half.end().into());
    let half = Resource::new(half).etag("\"1\"");
    for key in stalled {
        let half = half.clone();
        server.route(&format!("/bucket/{key}"), move |request| {
            let range = request.range();
            if range.is_some_and(|(start, _)| start >= 8 * MIB as u64) {
                return Response::silence();
            }
            half.answer(request)
        });
    }
    let place = TestMount::with(&[], server);
    mount_bucket(&place, &["--timeout", "3600"]);
    for number in 0..2 {
        let first = fs::read(place.mounted(format!("{number}.tar.gz/f")));
        assert_eq!(first.expect("it is scanned already"), b"first");
    }
    for name in ["a", "b"] {
        let path = place.mounted(format!("{name}.tar/{name}"));
        let read = wait::finish_in_time(move || fs::read_to_string(path));
        assert_eq!(read.expect("readable"), name.repeat(300));
    }
    assert_eq!(counts(&place), (4, 0, 4));
    assert_eq!(place.counter("scans"), 4);
    let process = place.server_pid().expect("mounted");
    let process = pidfd_open(process, PidfdFlags::empty()).expect("running");
    place.umount();
    assert!(process_exits(&process), "it waits for the server");
}

/// The server leaves the first archive's prefetch without an answer.
// Promises: archives-open
#[test]
fn closing_a_stalled_archive_does_not_delay_another_one() {
    const ARCHIVES: usize = 33;
    let server = Server::start();
    let keys: Vec<_> = (0..ARCHIVES).map(|n| format!("data/{n:02}.tar")).collect();
    let mut objects: Vec<_> = keys.iter().map(|key| (&**key, 9)).collect();
    objects.push(("data/00.tar.tarfs", 9));
    let listing = bucket_listing(&objects, None);
    server.route("/bucket", move |_| {
        Response::new(200).with_body(listing.clone())
    });
    let small = Resource::new(archive("a")).etag("\"1\"");
    for key in &keys {
        server.serve(&format!("/bucket/{key}"), small.clone());
    }
    let place = TestMount::with(&[], server);
    place.put(
        "00.tar",
        Archive::new().file("f", random_bytes(48 * MIB)).end(),
    );
    let index = [
        "index",
        "--cache-dir",
        "other",
        "--output",
        "00.tar.tarfs",
        "00.tar",
    ];
    place.succeeds(&index);
    let [tar, index] = ["00.tar", "00.tar.tarfs"].map(|name| {
        let bytes = fs::read(place.path(name)).expect("made");
        Resource::new(bytes).etag("\"1\"")
    });
    place.serve("/bucket/data/00.tar.tarfs", index);
    let is_stalled = Arc::new(AtomicBool::new(false));
    let stalled = Arc::clone(&is_stalled);
    place.route("/bucket/data/00.tar", move |request| {
        if stalled.load(Ordering::SeqCst) {
            return Response::silence();
        }
        // The prefetch takes longer than the opening.
        tar.answer(request)
            .paced(64 << 10, Duration::from_millis(20))
    });
    mount_bucket(&place, &["--prefetch", "all", "--timeout", "3600"]);
    assert_eq!(names(place.mounted("00.tar")), ["f"]);
    is_stalled.store(true, Ordering::SeqCst);
    wait::wait_until("its prefetch is stalled", || {
        let requests = place.requests("/bucket/data/00.tar");
        requests.iter().any(|seen| seen.status == 0)
    });
    let others: Vec<_> = (1..ARCHIVES)
        .map(|n| place.mounted(format!("{n:02}.tar/a")))
        .collect();
    let read = wait::finish_in_time(move || {
        let read = others.iter().map(fs::read_to_string);
        read.collect::<io::Result<Vec<_>>>()
    });
    assert_eq!(read.expect("readable"), vec!["a".repeat(300); ARCHIVES - 1]);
    wait::wait_until("the first one is closed", || {
        let opened = ARCHIVES as u64;
        counts(&place) == (opened, 1, opened - 1)
    });
}

/// More archives than may be open at once, and more bytes than the memory.
// Promises: archives-memory
#[test]
fn many_archives_of_a_directory_are_read_at_random() {
    const ARCHIVES: usize = 48;
    let place = TestMount::new(&["top"]);
    let contents: Vec<_> = (0..ARCHIVES).map(|_| random_bytes(MIB)).collect();
    for (number, content) in contents.iter().enumerate() {
        // Each reader has its own file, because the kernel caches those of the others.
        let tar = (0..6).fold(Archive::new(), |tar, reader| {
            tar.file(&format!("f{reader}"), content)
        });
        let packed = Packing::Gzip.pack(&tar.end().into());
        place.put(format!("top/{number}.tar.gz"), packed);
    }
    mount(&place, &["--memory", "64MiB", "--no-disk-cache"]);
    std::thread::scope(|scope| {
        for reader in 0..6 {
            let (place, contents) = (&place, &contents);
            scope.spawn(move || {
                // Each step is prime to the number of archives.
                let step = [5, 7, 11, 13, 17, 19][reader];
                for round in 0..ARCHIVES {
                    let number = (reader + round * step) % ARCHIVES;
                    let read = fs::read(place.mounted(format!("{number}.tar.gz/f{reader}")));
                    let read = read.unwrap_or_else(|error| panic!("{number}: {error}"));
                    assert!(read == contents[number], "{number}");
                }
            });
        }
    });
    wait::wait_until("others are closed", || {
        let (opened, closed, open) = counts(&place);
        opened > ARCHIVES as u64 && opened - closed == open && open <= 32
    });
    let status = place.status();
    let memory = |name: &str| {
        let bytes = status.pointer(&format!("/memory/{name}"));
        bytes.and_then(Value::as_u64).expect(name)
    };
    let used = ["spans_bytes", "reads_bytes", "decoders_bytes"].map(memory);
    assert!(
        used.iter().sum::<u64>() <= memory("budget_bytes"),
        "{used:?}"
    );
}

// Promises: archives-open
#[test]
fn number_of_open_archives_is_bounded() {
    let place = TestMount::new(&["top"]);
    let name = |number: usize| format!("f{number}");
    for number in 0..40 {
        place.put(format!("top/{number}.tar"), archive(&name(number)));
    }
    mount(&place, &[]);
    for number in (0..40).chain([0]) {
        let content =
            fs::read_to_string(place.mounted(format!("{number}.tar/dir/{}", name(number))));
        assert_eq!(content.expect("readable"), name(number).repeat(300));
    }
    let names = names(place.mounted("0.tar"));
    assert_eq!(names, ["dir", "f0"]);
    wait::wait_until("others are closed", || {
        let (opened, closed, open) = counts(&place);
        // The first one was opened again.
        opened == 41 && opened - closed == open && open <= 32
    });
}

// Promises: archives-fail
#[test]
fn caller_that_waits_for_an_archive_can_be_killed() {
    let server = Server::start();
    let listing = bucket_listing(&[("data/a.tar", 9), ("data/stalled.tar", 9)], None);
    server.route("/bucket", move |_| {
        Response::new(200).with_body(listing.clone())
    });
    server.serve(
        "/bucket/data/a.tar",
        Resource::new(archive("a")).etag("\"1\""),
    );
    server.route("/bucket/data/stalled.tar", |_| Response::silence());
    let place = TestMount::with(&[], server);
    mount_bucket(&place, &[]);
    let mut waiting = Command::new("ls");
    let waiting = waiting
        .arg(place.mounted("stalled.tar"))
        .stdout(Stdio::null())
        .spawn();
    let mut waiting = waiting.expect("started");
    wait::wait_until("it is requested", || {
        !place.requests("/bucket/data/stalled.tar").is_empty()
    });
    assert_archive(&place, "a.tar", "a");
    waiting.kill().expect("running");
    wait::finish_in_time(move || waiting.wait().expect("it ends"));
    assert_eq!(place.counter("interrupted_requests"), 1);
}

/// A page of a listing.
fn bucket_listing(objects: &[(&str, usize)], next: Option<&str>) -> String {
    let objects = objects.iter().map(|(key, size)| {
        format!(
            "<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>\
             <ETag>&quot;1&quot;</ETag><Size>{size}</Size></Contents>"
        )
    });
    let next = next.map(|next| format!("<NextContinuationToken>{next}</NextContinuationToken>"));
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult>{}{}</ListBucketResult>",
        objects.collect::<String>(),
        next.unwrap_or_default()
    )
}

fn mount_bucket(place: &TestMount<Server>, flags: &[&str]) {
    let url = place.url("");
    let words = [
        "mount",
        "--endpoint-url",
        &url,
        "--log-file",
        "log",
        "s3://bucket/data/",
        "mnt",
    ];
    let mut command = place.command(&[&words, flags].concat());
    command
        .env("AWS_ACCESS_KEY_ID", "AKID")
        .env("AWS_SECRET_ACCESS_KEY", "hunter2")
        .env("AWS_EC2_METADATA_DISABLED", "true");
    let done = command.output().expect("started");
    assert!(done.status.success(), "{}", stderr_text(&done));
}

// Promises: archives-names
#[test]
fn archives_below_a_prefix_are_mounted_page_by_page() {
    let server = Server::start();
    let (one, two) = (archive("a"), Packing::Zstd.pack(&archive("b").into()));
    let first = [
        ("data/a.tar", one.len()),
        ("data/../up.tar", 9),
        ("data/notes", 9),
    ];
    let first = bucket_listing(&first, Some("page/2+"));
    let second = bucket_listing(&[("data/x y/b.tar.zst", two.len())], None);
    server.route("/bucket", move |request: &Request| {
        let page = match &*request.query {
            "list-type=2&prefix=data%2F" => &first,
            "list-type=2&prefix=data%2F&continuation-token=page%2F2%2B" => &second,
            _ => return Response::new(400),
        };
        Response::new(200).with_body(page.clone())
    });
    server.serve("/bucket/data/a.tar", Resource::new(one).etag("\"1\""));
    server.serve(
        "/bucket/data/x%20y/b.tar.zst",
        Resource::new(two).etag("\"1\""),
    );
    let place = TestMount::with(&[], server);
    mount_bucket(&place, &["--header", "x-amz-request-payer: requester"]);
    assert_eq!(names(place.path("mnt")), ["a.tar", "x y"]);
    assert_eq!(counts(&place), (0, 0, 0));
    assert_archive(&place, "a.tar", "a");
    assert_archive(&place, "x y/b.tar.zst", "b");
    assert_eq!(counts(&place), (2, 0, 2));
    let text = place.succeeds(&["status", "mnt"]);
    assert!(
        text.contains("s3://bucket/data/") && text.contains("1 names are skipped"),
        "{text}"
    );
    for path in ["/bucket", "/bucket/data/a.tar"] {
        for seen in place.requests(path) {
            let header = |name| seen.request.header(name).unwrap_or_default().to_owned();
            assert!(
                header("authorization").contains("x-amz-request-payer"),
                "{path}"
            );
            assert_eq!(header("x-amz-request-payer"), "requester", "{path}");
        }
    }
}

// Promises: archives-listed
#[test]
fn place_that_cannot_be_listed_is_not_mounted() {
    let server = Server::start();
    server.route("/bucket", |_| {
        Response::new(403).with_body("<Error><Code>AccessDenied</Code></Error>")
    });
    let place = TestMount::with(&[], server);
    let url = place.url("");
    let error = place.error_of(&["mount", "--endpoint-url", &url, "s3://bucket/", "mnt"]);
    assert!(
        error.contains("s3://bucket/") && error.contains("AccessDenied"),
        "{error}"
    );
    assert!(!place.is_mounted());
}

// Promises: archives-place
#[test]
fn flags_for_a_single_archive_are_refused_with_a_directory() {
    let place = place();
    let digest = "0".repeat(64);
    for flags in [
        &["--writable"][..],
        &["--restart"],
        &["--copy-to", "copy"],
        &["--expect-sha256", &digest],
        &["--index", "a.idx"],
        &["--index-sha256", &digest],
        &["--mirror-url", "https://example.com/a.tar"],
        &["--record", "profile"],
        &["--replay", "profile"],
        &["--prefetch-rate", "1MiB"],
        &["--layer", "b.tar"],
        &["--whiteouts", "keep"],
        &["--root", "dir"],
        &["--strip-components", "1"],
    ] {
        let output = place.tarfs(&[&["mount", "top", "mnt"], flags].concat());
        let text = stderr_text(&output);
        assert_eq!(output.status.code(), Some(64), "{flags:?}: {text}");
        assert!(text.contains(flags[0]), "{flags:?}: {text}");
        assert!(!place.is_mounted());
    }
}

/// All archives together have more bytes than the memory for spans.
// Promises: archives-memory
#[test]
fn archives_of_a_directory_share_one_memory_budget() -> io::Result<()> {
    let place = TestMount::new(&["top"]);
    let content = random_bytes(8 * MIB);
    for number in 0..4 {
        let tar = Archive::new().file("f", content.clone()).end();
        place.put(
            format!("top/{number}.tar.gz"),
            Packing::Gzip.pack(&tar.into()),
        );
    }
    mount(&place, &["--memory", "64MiB", "--no-disk-cache"]);
    for number in 0..4 {
        let read = fs::read(place.mounted(format!("{number}.tar.gz/f")))?;
        assert!(read == content, "{number}");
    }
    let status = place.status();
    let memory = |name: &str| {
        status
            .pointer(&format!("/memory/{name}"))
            .and_then(Value::as_u64)
    };
    assert_eq!(memory("budget_bytes"), Some(64 << 20));
    assert!(memory("spans_bytes").is_some_and(|bytes| bytes > 0 && bytes <= 24 << 20));
    assert!(memory("index_bytes").is_some_and(|bytes| bytes > 0));
    Ok(())
}
