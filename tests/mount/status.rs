//! The values of `tarfs status` and `--metrics` for a real mount, exact to the byte.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::Value;

use crate::support::fixture::{PROGRAM, TestDir, TestMount};
use crate::support::http::{Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::tree::Tree;
use crate::support::wait;

/// Path of the archive on the server.
const ARCHIVE: &str = "/archive";

/// A server with an archive.
struct ArchiveServer {
    server: Server,
    packed: Bytes,
}

type Place = TestMount<ArchiveServer>;

impl ArchiveServer {
    fn serve_version(&self, etag: &str) {
        let resource = Resource::new(self.packed.clone()).etag(etag);
        self.server.serve(ARCHIVE, resource);
    }
}

fn place() -> Place {
    let state = ArchiveServer {
        server: Server::start(),
        packed: Packing::Gzip.pack(&Tree::mixed().tar),
    };
    state.serve_version("\"1\"");
    TestMount::with(&[], state)
}

fn mount(place: &Place, more: &[&str]) {
    let url = place.server.url(ARCHIVE);
    place.succeeds(&[&["mount", &url, "mnt", "--wait-index"], more].concat());
}

// Promises: status-json
#[test]
fn mountpoint_that_is_not_utf8_is_named_by_its_bytes() {
    let place = place();
    let name = OsStr::from_bytes(b"m\xff nt");
    fs::create_dir(place.path(name)).expect("new");
    let url = place.server.url(ARCHIVE);
    let run = |words: &[&str], last: &OsStr| {
        let mut command = place.command_of(PROGRAM);
        command.args(words).arg(last).output().expect("started")
    };
    let mounted = run(&["mount", &url], name);
    let [json, text] = [&["status", "--json"][..], &["status"]].map(|words| run(words, name));
    let unmounted = run(&["umount"], name);
    assert!(mounted.status.success(), "{}", stderr_text(&mounted));
    assert!(unmounted.status.success(), "{}", stderr_text(&unmounted));
    let status: Value = serde_json::from_slice(&json.stdout).expect("one mount");
    let path = fs::canonicalize(place.path(name)).expect("it is there");
    let bytes = status.get("mountpoint_bytes").and_then(Value::as_array);
    let bytes = bytes.expect("they are not UTF-8").iter().map(Value::as_u64);
    let expected = path.as_os_str().as_bytes().iter();
    assert!(
        bytes.eq(expected.map(|&byte| Some(byte.into()))),
        "{status}"
    );
    let text = String::from_utf8(text.stdout).expect("UTF-8");
    let first = text.lines().next().expect("a line");
    assert!(first.ends_with("m\\377\\ nt"), "{first}");
    mount(&place, &[]);
    assert_eq!(place.status().get("mountpoint_bytes"), None);
}

#[track_caller]
fn number(status: &Value, pointer: &str) -> u64 {
    let value = status.pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("{pointer} of {status}"))
}

/// Host and port of the metrics in `status`.
fn metrics_address(status: &Value) -> String {
    let url = status.get("metrics").and_then(Value::as_str);
    let rest = url.and_then(|url| url.strip_prefix("http://"));
    let address = rest.and_then(|rest| rest.strip_suffix("/metrics"));
    address.expect("a URL").to_owned()
}

/// The metrics served at `address` by name. Each must have a mountpoint.
fn metrics(address: &str, mountpoint: &str) -> BTreeMap<String, u64> {
    let mut stream = TcpStream::connect(address).expect("listening");
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n").expect("taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
        "{head}"
    );
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (name, rest) = line.split_once("{mountpoint=\"")?;
        let (label, value) = rest.split_once("\"} ")?;
        assert_eq!(label, mountpoint);
        Some((name.to_owned(), value.parse().ok()?))
    };
    samples
        .map(|line| parse(line).unwrap_or_else(|| panic!("not a sample: {line}")))
        .collect()
}

// Promises: status-counters, metrics-format, metrics-address
#[test]
fn status_and_metrics_report_mount_activity() {
    let (place, tree) = (place(), Tree::mixed());
    let sizes = ["--memory", "64MiB", "--cache-size", "1GiB"];
    mount(
        &place,
        &[&sizes[..], &["--metrics", "127.0.0.1:0"]].concat(),
    );
    let (name, content) = &tree.files[40];
    assert!(!content.is_empty());
    // The kernel's page cache serves the second read, which is not counted.
    for _ in 0..2 {
        let read = fs::read(place.path("mnt").join(name)).expect("readable");
        assert!(read == *content);
    }

    // Its thread may be behind.
    let is_on_disk = |status: &Value| {
        number(status, "/counters/disk_cache_written_bytes") == tree.tar.len() as u64
    };
    wait::wait_until("all is on disk", || is_on_disk(&place.status()));
    let status = place.status();
    let seen = place.server.requests(ARCHIVE);
    for (name, expected) in [
        ("scanned_packed_bytes", place.packed.len() as u64),
        ("decoded_bytes", tree.tar.len() as u64),
        ("scans", 1),
        ("served_bytes", content.len() as u64),
        ("failed_reads", 0),
        ("memory_miss_spans", 0),
        ("decoded_spans", 0),
        ("panics", 0),
    ] {
        assert_eq!(
            number(&status, &format!("/counters/{name}")),
            expected,
            "{name}"
        );
    }
    // A busy machine may look like a slow server, and then a request is sent twice and answered once.
    let again = [
        "source_hedges",
        "source_straggler_retries",
        "source_retries",
    ]
    .map(|name| number(&status, &format!("/counters/{name}")));
    for (name, at_server) in [
        ("source_requests", seen.len() as u64),
        ("source_read_bytes", place.server.sent_bytes(ARCHIVE)),
    ] {
        let told = number(&status, &format!("/counters/{name}"));
        let is_right = told == at_server || again.iter().any(|&count| count > 0);
        assert!(is_right, "{name}: {told} and {at_server}");
    }
    assert!(number(&status, "/counters/memory_hit_spans") >= 1);
    assert_eq!(number(&status, "/memory/budget_bytes"), 64 << 20);
    let spans = number(&status, "/memory/spans_bytes");
    assert!(spans >= tree.tar.len() as u64, "all of it is kept: {spans}");
    assert!(spans <= 24 << 20);
    assert_eq!(number(&status, "/memory/reads_bytes"), 0);
    assert_eq!(number(&status, "/memory/decoders_bytes"), 0);
    assert!(number(&status, "/memory/index_bytes") >= 100 * tree.files.len() as u64);
    assert!(number(&status, "/resident_bytes") > spans);
    let held = number(&status, "/disk_cache/held_bytes");
    assert!(held >= tree.tar.len() as u64, "all of it is kept: {held}");
    assert_eq!(number(&status, "/disk_cache/all_bytes"), held);
    assert!(number(&status, "/disk_cache/limit_bytes") > held);

    let mountpoint = status.get("mountpoint").and_then(Value::as_str);
    let mountpoint = mountpoint.expect("a path");
    let address = metrics_address(&status);
    let metrics = metrics(&address, mountpoint);
    let counters = status.get("counters").and_then(Value::as_object);
    for (name, value) in counters.expect("counters") {
        let suffix = if name.contains("_peak_") {
            ""
        } else {
            "_total"
        };
        let served = metrics.get(&format!("tarfs_{name}{suffix}"));
        assert_eq!(served.copied(), value.as_u64(), "{name}");
    }
    for (name, pointer) in [
        ("tarfs_entries", "/entries"),
        ("tarfs_mount_timestamp_seconds", "/since_unix_seconds"),
        ("tarfs_memory_budget_bytes", "/memory/budget_bytes"),
        ("tarfs_memory_spans_bytes", "/memory/spans_bytes"),
        ("tarfs_memory_index_bytes", "/memory/index_bytes"),
        ("tarfs_disk_cache_held_bytes", "/disk_cache/held_bytes"),
        ("tarfs_disk_cache_all_bytes", "/disk_cache/all_bytes"),
    ] {
        assert_eq!(
            metrics.get(name).copied(),
            Some(number(&status, pointer)),
            "{name}"
        );
    }

    let text = place.succeeds(&["status", "--verbose", "mnt"]);
    for line in [
        format!("\n  metrics              http://{address}/metrics\n"),
        "\n  memory, budget       64 MiB\n".to_owned(),
        format!("\n  served_bytes         {}\n", content.len()),
    ] {
        assert!(text.contains(&line), "{line} in {text}");
    }

    place.succeeds(&["umount", "mnt"]);
    assert!(
        TcpStream::connect(&address).is_err(),
        "it ends with the mount"
    );
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.expect("after 1970").as_secs()
}

// Promises: error-reported
#[test]
fn failed_read_is_reported_with_time_and_counted() {
    let place = place();
    mount(&place, &[]);
    place.succeeds(&["umount", "mnt"]);
    // With the saved index, so that nothing is in memory.
    mount(&place, &["--no-disk-cache", "--metrics", "127.0.0.1:0"]);
    place.serve_version("\"2\"");
    let before = now();
    assert!(fs::read(place.path("mnt/z")).is_err());
    let after = now();

    let status = place.status();
    assert_eq!(number(&status, "/counters/scans"), 0);
    let failed = number(&status, "/counters/failed_reads");
    assert!(failed >= 1);
    assert_eq!(number(&status, "/errors/0/count"), failed);
    let time = number(&status, "/errors/0/last_unix_seconds");
    assert!((before..=after).contains(&time), "{before} {time} {after}");
    assert_eq!(
        status.pointer("/errors/0/path").and_then(Value::as_str),
        Some("z")
    );
    assert_eq!(number(&status, "/counters/served_bytes"), 0);

    let mountpoint = place.path("mnt").to_string_lossy().into_owned();
    let metrics = metrics(&metrics_address(&status), &mountpoint);
    assert_eq!(metrics.get("tarfs_failed_reads_total"), Some(&failed));
}

// Promises: metrics-address
#[test]
fn mount_fails_if_metrics_cannot_be_served() {
    let place = place();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let url = place.server.url(ARCHIVE);
    for more in [&[][..], &["--foreground"]] {
        let words = [&["mount", &url, "mnt", "--metrics", &address], more].concat();
        let output = place.tarfs(&words);
        assert_eq!(output.status.code(), Some(2));
        let expected =
            format!("tarfs: cannot serve metrics at {address}: Address already in use\n");
        assert_eq!(stderr_text(&output), expected);
        assert!(!place.is_mounted());
    }
    assert_eq!(
        place.server.requests(ARCHIVE).len(),
        0,
        "it comes before all work"
    );
    let output = place.tarfs(&["mount", &url, "mnt", "--metrics", "9469"]);
    assert_eq!(output.status.code(), Some(64), "{}", stderr_text(&output));
}

// Promises: prefetch-all, profile-record, profile-mismatch
#[test]
fn recorded_mount_is_replayed_and_reported() {
    let (place, tree) = (place(), Tree::mixed());
    mount(&place, &["--record", "profile", "--prefetch", "none"]);
    let (name, content) = &tree.files[40];
    let read = fs::read(place.path("mnt").join(name)).expect("readable");
    assert!(read == *content);
    place.succeeds(&["umount", "mnt"]);
    let profile = fs::read_to_string(place.path("profile")).expect("written");
    let expected = format!("# tarfs profile 1\n0 {} {name}\n", content.len());
    assert_eq!(profile, expected);

    fs::write(place.path("profile"), profile + "0 5 not/there\n").expect("written");
    mount(&place, &["--replay", "profile", "--prefetch", "all"]);
    let status = wait::wait_for("the prefetch is complete", || {
        let status = place.status();
        let state = status.pointer("/prefetch/state").and_then(Value::as_str);
        (state == Some("complete")).then_some(status)
    });
    assert_eq!(number(&status, "/prefetch/replay_spans"), 1);
    assert_eq!(number(&status, "/prefetch/replayed_spans"), 1);
    let total = number(&status, "/prefetch/total_spans");
    assert_eq!(number(&status, "/prefetch/done_spans"), total);
    let text = place.succeeds(&["status", "--verbose", "mnt"]);
    for line in [
        format!("\n  prefetch             complete, {total} of {total} blocks\n"),
        "\n  prefetch, mode       all\n".to_owned(),
        "\n  prefetch, replay     1 of 1 blocks\n".to_owned(),
        format!(
            "1 ranges of {} are in files that the archive does not have\n",
            place.path("profile").display()
        ),
    ] {
        assert!(text.contains(&line), "{line} in {text}");
    }
    let before = place.server.sent_bytes(ARCHIVE);
    for (name, content) in tree.files.iter().filter(|(_, content)| !content.is_empty()) {
        let read = fs::read(place.path("mnt").join(name)).expect("readable");
        assert!(read == *content, "{name} is wrong");
    }
    assert_eq!(
        place.server.sent_bytes(ARCHIVE),
        before,
        "nothing is fetched any more"
    );
    place.succeeds(&["umount", "mnt"]);

    fs::write(place.path("profile"), "something else\n").expect("written");
    mount(&place, &["--replay", "profile"]);
    let text = place.succeeds(&["status", "mnt"]);
    let profile = place.path("profile");
    let note = format!("nothing is replayed: {}: not a profile", profile.display());
    assert!(text.contains(&note), "{text}");
}

// Promises: trust-socket
#[test]
fn runtime_directory_of_another_user_is_not_used() {
    let directory = TestDir::new(&["run", "run/tarfs", "mnt"]);
    for path in ["run", "run/tarfs"] {
        std::os::unix::fs::chown(directory.path(path), Some(65534), None).expect("root");
    }
    directory.put("a.tar", Archive::new().file("f", "content").end());
    let run = |words: &[&str]| {
        let mut command = directory.command(words);
        command.env("XDG_RUNTIME_DIR", directory.path("run"));
        let output = command.output().expect("started");
        let text = stderr_text(&output);
        assert!(output.status.success(), "{words:?}: {text}");
        output
    };
    run(&["mount", "a.tar", "mnt"]);
    let status = run(&["status", "mnt", "--json"]);
    let status: Value = serde_json::from_slice(&status.stdout).expect("one mount");
    assert_eq!(status.pointer("/entries"), Some(&Value::from(2)));
    run(&["umount", "mnt"]);
    let used = fs::read_dir(directory.path("run/tarfs"))
        .expect("there")
        .count();
    assert_eq!(used, 0, "another user's");
}

// Promises: status-shows
#[test]
fn watch_appends_to_a_pipe_until_the_mount_ends() {
    let place = place();
    mount(&place, &[]);
    let mut watch = place.command(&["status", "--watch", "-n", "0.1", "mnt"]);
    watch.stdout(Stdio::piped());
    let mut watch = watch.spawn().expect("started");
    let mut output = BufReader::new(watch.stdout.take().expect("a pipe")).lines();
    let mut headings = 0;
    while headings < 3 {
        let line = output.next().expect("more").expect("text");
        headings += usize::from(!line.starts_with(' '));
        assert!(!line.contains('\x1b'), "{line:?}");
    }
    place.succeeds(&["umount", "mnt"]);
    output.for_each(drop);
    assert!(watch.wait().expect("ended").success());
    let refused = place.tarfs(&["status", "--watch", "mnt"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr_text(&refused));
}
