//! Secrets do not leak, and processes drop the privileges that they do not need.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use serde_json::Value;

use crate::support::fixture::TestMount;
use crate::support::http::{Request, Resource, Response, Server};
use crate::support::mounts::mount_lines;
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, random_bytes};
use crate::support::tree::Tree;
use crate::support::wait;

/// Part of every secret, and of nothing else.
const SECRET: &str = "hunter2";
/// The server accepts a client that sends all of these.
const AUTHORIZATION: &str = "Basic bWU6aHVudGVyMi1wYXNz";
const KEY: &str = "hunter2-key";
const TICKET: &str = "hunter2-ticket";

/// A server that requires secrets, and a directory for everything that is written.
struct SecretServer {
    server: Server,
}

type Place = TestMount<SecretServer>;

impl Place {
    /// Serves the mixed tree at `/real` to clients with all secrets, and redirects there from
    /// `/start`.
    fn start() -> Self {
        let server = Server::start();
        let packed = Packing::Gzip.pack(&Tree::mixed().tar);
        let resource = Resource::new(packed).etag("\"1\"");
        server.route("/real", move |request| {
            if has_all_secrets(request)
                && request.query.contains("X-Amz-Signature=hunter2-redirect")
            {
                resource.answer(request)
            } else {
                Response::new(403)
            }
        });
        server.route("/start", |request| {
            if !has_all_secrets(request) || !request.query.contains("token=hunter2-token") {
                return Response::new(403);
            }
            Response::new(302).with("Location", "/real?X-Amz-Signature=hunter2-redirect")
        });
        server.route("/lost", |_| {
            Response::new(302).with("Location", "http://127.0.0.1:1/x?sig=hunter2-lost")
        });
        let place = TestMount::with(&["out"], SecretServer { server });
        place.put("headers", format!("# who asks\n\nX-Key: {KEY}\n"));
        place
    }

    /// The URL of `path` with a password and a query with secrets.
    fn secret_url(&self, path: &str) -> String {
        let query = "token=hunter2-token&X-Amz-Signature=hunter2-sig&mykey=hunter2-own";
        let url = self.server.url(&format!("{path}?{query}"));
        url.replacen("http://", "http://me:hunter2-pass@", 1)
    }

    /// Runs the program with full logging and with headers from the environment and from a file.
    fn tarfs(&self, words: &[&str]) -> Output {
        self.command(words)
            .env("TARFS_LOG", "trace")
            .env("TARFS_HEADERS", format!("\nX-Ticket: {TICKET}\n@headers"))
            .output()
            .expect("started")
    }

    #[track_caller]
    fn succeeds(&self, words: &[&str]) -> String {
        let output = self.tarfs(words);
        assert!(
            output.status.success(),
            "{words:?}: {}",
            stderr_text(&output)
        );
        text_without_secrets(words.first().copied().unwrap_or_default(), &output)
    }
}

fn has_all_secrets(request: &Request) -> bool {
    request.header("authorization") == Some(AUTHORIZATION)
        && request.header("x-key") == Some(KEY)
        && request.header("x-ticket") == Some(TICKET)
}

/// The output, which must not contain a secret.
#[track_caller]
fn text_without_secrets(what: &str, output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for text in [&said, &stderr_text(output)] {
        assert!(!text.contains(SECRET), "{what} says {text}");
    }
    said
}

/// Searches the names and contents of everything below `directory`.
fn search_for_secrets(directory: &Path, seen: &mut usize) {
    for entry in fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        assert!(
            !path.to_string_lossy().contains(SECRET),
            "{}",
            path.display()
        );
        let kind = fs::symlink_metadata(&path).expect("there").file_type();
        if kind.is_dir() {
            search_for_secrets(&path, seen);
        } else if kind.is_file() && path.file_name().is_some_and(|name| name != "headers") {
            let content = fs::read(&path).expect("readable");
            let found = content
                .windows(SECRET.len())
                .any(|window| window == SECRET.as_bytes());
            assert!(!found, "{}", path.display());
            *seen += 1;
        }
    }
}

// Promises: header-file, secret-hidden
#[test]
fn mount_leaks_no_secrets() {
    let place = Place::start();
    let url = place.secret_url("/start");
    let words = [
        "mount",
        "--wait-index",
        "--log-file",
        "log",
        "--record",
        "profile",
        // A fixed size, because the free space of the disk varies.
        "--cache-size",
        "16MiB",
        "--metrics",
        "127.0.0.1:0",
        "--replay",
        &place.secret_url("/lost"),
        &url,
        "mnt",
    ];
    let output = place.tarfs(&words);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(
        stderr_text(&output).contains("DEBUG"),
        "it tells all there is"
    );
    text_without_secrets("mount", &output);
    for (name, content) in &Tree::mixed().files {
        let read = fs::read(place.path("mnt").join(name)).expect("readable");
        assert!(read == *content, "{name}");
    }
    place.succeeds(&["status", "mnt"]);
    let status = place.succeeds(&["status", "mnt", "--json"]);
    let status: Value = serde_json::from_str(&status).expect("one mount");
    let text = |name: &str| status.get(name).and_then(Value::as_str).expect("there");
    assert!(text("source").ends_with("/start?…"), "{status}");
    let notes = status.get("notes").map(ToString::to_string);
    assert!(notes.is_some_and(|notes| notes.contains("nothing is replayed")));
    let metrics = text("metrics").strip_prefix("http://").expect("a URL");
    let (address, path) = metrics.split_once('/').expect("a path");
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "GET /{path} HTTP/1.1\r\n\r\n").expect("sent");
    let mut figures = String::new();
    stream.read_to_string(&mut figures).expect("answered");
    assert!(
        figures.contains("tarfs_") && !figures.contains(SECRET),
        "{figures}"
    );
    let mount = mount_lines(&place.path("mnt")).concat();
    assert!(
        mount.contains("/start") && !mount.contains(SECRET),
        "{mount}"
    );
    // The URL was on the command line, the headers were not.
    let pid = status.get("pid").and_then(Value::as_u64).expect("there");
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).expect("readable");
    let arguments = String::from_utf8_lossy(&arguments).into_owned();
    assert!(!arguments.contains(KEY) && !arguments.contains(TICKET));
    place.succeeds(&["umount", "mnt"]);
    place.succeeds(&["cache", "list"]);
    place.succeeds(&["cache", "list", "--json"]);

    let log = fs::read_to_string(place.path("log")).expect("written");
    assert!(log.contains(" unmounted"), "{log}");
    let mut seen = 0;
    search_for_secrets(place.root(), &mut seen);
    assert!(seen >= 4, "log, profile, index and disk cache: {seen}");
}

#[test]
fn mount_with_netrc_mirror_and_proxy_leaks_no_secrets() {
    let place = Place::start();
    let private = tempfile::tempdir().expect("a directory");
    let netrc = private.path().join("netrc");
    fs::write(&netrc, "machine 127.0.0.1 login me password hunter2-pass").expect("written");
    let packed = Packing::Gzip.pack(&Tree::mixed().tar);
    let resource = Resource::new(packed).etag("\"1\"");
    place.server.route("/netrc", move |request| {
        if request.header("authorization") == Some(AUTHORIZATION) {
            resource.answer(request)
        } else {
            Response::new(401)
        }
    });
    let url = place.server.url("/netrc");
    let mirror = place.server.url("/netrc?token=hunter2-mirror");
    let lost = place.server.url("/netrc/lost?token=hunter2-lost");
    let words = [
        "mount",
        "--wait-index",
        "--log-file",
        "log",
        "--via",
        "http://me:hunter2-via@127.0.0.1:1/",
        "--mirror-url",
        &mirror,
        "--mirror-url",
        &lost,
        &url,
        "mnt",
    ];
    let mut command = place.command(&words);
    let output = command.env("TARFS_LOG", "trace").env("NETRC", &netrc);
    let output = output.output().expect("started");
    assert!(output.status.success(), "{}", stderr_text(&output));
    text_without_secrets("mount", &output);
    for (name, content) in &Tree::mixed().files {
        let read = fs::read(place.path("mnt").join(name)).expect("readable");
        assert!(read == *content, "{name}");
    }
    place.succeeds(&["status", "mnt", "--json"]);
    place.succeeds(&["umount", "mnt"]);
    let log = fs::read_to_string(place.path("log")).expect("written");
    assert!(log.contains(" unmounted"), "{log}");
    search_for_secrets(place.root(), &mut 0);
}

// Promises: error-eacces, error-etimedout
#[test]
fn read_with_expired_credentials_is_refused_or_times_out() {
    let server = Server::start();
    let content = random_bytes(9 << 20);
    let tar = Archive::new()
        .file("first", &content)
        .file("second", &content)
        .end();
    let resource = Resource::new(tar).etag("\"1\"");
    let is_refusing = Arc::new(AtomicBool::new(false));
    let refuses = Arc::clone(&is_refusing);
    server.route("/bucket/a.tar", move |request| {
        if refuses.load(Ordering::SeqCst) {
            return Response::new(403).with_body("<Error><Code>ExpiredToken</Code></Error>");
        }
        resource.answer(request)
    });
    let place = TestMount::new(&["cache", ".aws"]);
    let key = r#"{"Version":1,"AccessKeyId":"K","SecretAccessKey":"S","SessionToken":"T""#;
    place.put("key", format!("{key}}}"));
    let config = format!(
        "[default]\ncredential_process = cat {}\n",
        place.path("key").display()
    );
    place.put(".aws/config", config);
    let run = |words: &[&str]| {
        let mut command = place.command(words);
        command
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_ENDPOINT_URL_S3", server.url(""))
            .env("HOME", place.root());
        let output = command.output().expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
    };
    let object = "s3://bucket/a.tar";
    // With its index a mount reads only the first bytes.
    run(&["ls", object]);
    let words = "mount --wait-index --prefetch none --no-disk-cache --timeout 4";
    let words: Vec<_> = words.split(' ').chain([object, "mnt"]).collect();
    run(&words);
    is_refusing.store(true, Ordering::SeqCst);
    let read = |name| {
        fs::read(place.mounted(name))
            .expect_err("expired")
            .raw_os_error()
    };
    assert_eq!(read("first"), Some(Errno::ACCESS.raw_os_error()));
    let expired = format!("{key},\"Expiration\":\"2020-01-01T00:00:00Z\"}}");
    place.put("key", expired);
    assert_eq!(read("second"), Some(Errno::TIMEDOUT.raw_os_error()));
}

// Promises: secret-hidden
#[test]
fn mount_of_s3_object_leaks_no_keys() {
    let server = Server::start();
    let tar = Archive::new().file("large", random_bytes(20 << 20)).end();
    let resource = Resource::new(tar).etag("\"1\"");
    let is_refusing = Arc::new(AtomicBool::new(false));
    let refuses = Arc::clone(&is_refusing);
    server.route("/bucket/a.tar", move |request| {
        let is_signed = request.header("authorization").is_some();
        let has_token = request.header("x-amz-security-token") == Some("hunter2-token");
        if refuses.load(Ordering::SeqCst) || !is_signed || !has_token {
            return Response::new(403).with_body("<Error><Code>ExpiredToken</Code></Error>");
        }
        resource.answer(request)
    });
    let place = TestMount::new(&["cache"]);
    place.put(
        "headers",
        "[default]\naws_access_key_id = AKIAhunter2\naws_secret_access_key = hunter2-secret\n\
         aws_session_token = hunter2-token\n",
    );
    let run = |words: &[&str]| {
        let mut command = place.command(words);
        command
            .env("TARFS_LOG", "trace")
            .env("AWS_SHARED_CREDENTIALS_FILE", "headers")
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_ENDPOINT_URL_S3", server.url(""))
            .env("HOME", place.root());
        let output = command.output().expect("started");
        text_without_secrets(words.first().copied().unwrap_or_default(), &output);
        output
    };
    let object = "s3://bucket/a.tar";
    // With its index a mount reads only the first bytes.
    assert!(run(&["ls", object]).status.success());
    let words = [
        "mount",
        "--wait-index",
        "--prefetch",
        "none",
        "--log-file",
        "log",
    ];
    let mounted = run(&[&words[..], &["--no-disk-cache", object, "mnt"]].concat());
    assert!(mounted.status.success(), "{}", stderr_text(&mounted));
    is_refusing.store(true, Ordering::SeqCst);
    let refused = fs::read(place.mounted("large")).expect_err("refused");
    assert_eq!(refused.raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
    let status = run(&["status", "mnt", "--json"]);
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("ExpiredToken"), "{status}");
    assert!(run(&["umount", "mnt"]).status.success());
    assert_eq!(
        run(&["ls", "--cache-dir", "other", object]).status.code(),
        Some(2)
    );
    let mut seen = 0;
    search_for_secrets(place.root(), &mut seen);
    assert!(seen >= 2, "log and index: {seen}");
}

#[track_caller]
fn fails(place: &Place, words: &[&str]) {
    let output = place.tarfs(words);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    text_without_secrets(words.first().expect("a verb"), &output);
}

// Promises: secret-hidden
#[test]
fn commands_leak_no_secrets_on_success_or_failure() {
    let place = Place::start();
    place.succeeds(&["materialize", &place.secret_url("/start"), "-C", "out"]);
    place.succeeds(&["ls", &place.secret_url("/start")]);
    place.succeeds(&["index", &place.secret_url("/start"), "--output", "saved"]);
    let packed = fs::read(place.path("saved")).expect("written");
    place.put("unpacked", zstd::decode_all(&*packed).expect("frames"));
    let elsewhere = place.secret_url("/start").replacen("/start", "/missing", 1);
    let refused = place.secret_url("/real");
    let unreachable = "http://me:hunter2-pass@127.0.0.1:1/a?sig=hunter2";
    let malformed = "http://me:hunter2-pass@[/a?sig=hunter2";
    let scheme = "s3://me:hunter2-pass@bucket/a?sig=hunter2";
    let lake = "abfss://me:hunter2-pass@me.dfs.core.windows.net/a?sig=hunter2";
    let lost = place.secret_url("/lost");
    for url in [&elsewhere, &refused, malformed, scheme, lake] {
        fails(&place, &["ls", url]);
        fails(&place, &["materialize", url, "-C", "out"]);
        fails(&place, &["mount", url, "mnt"]);
    }
    // These are retried.
    fails(&place, &["mount", unreachable, "mnt"]);
    fails(&place, &["materialize", &lost, "-C", "out"]);
    let output = place.tarfs(&["ls", &refused, "--header", "hunter2"]);
    assert_eq!(output.status.code(), Some(64), "{}", stderr_text(&output));
    text_without_secrets("a malformed header", &output);
    let mut seen = 0;
    search_for_secrets(place.root(), &mut seen);
    assert!(seen >= 4, "the tree and three indexes: {seen}");
}

/// A mount of a local archive, or of one on a server.
struct Daemon {
    place: Place,
    pid: u64,
}

impl Daemon {
    fn start(more: &[&str]) -> Self {
        let place = Place::start();
        let url = place.secret_url("/start");
        place.succeeds(&[&["mount", "--wait-index", &url, "mnt"], more].concat());
        let pid = place.status().get("pid").and_then(Value::as_u64);
        Self {
            pid: pid.expect("there"),
            place,
        }
    }

    /// A line of the status of each thread.
    fn threads(&self, name: &str) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).expect("running");
        let threads = tasks.map(|task| {
            let status = task.expect("listed").path().join("status");
            let status = fs::read_to_string(status).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim().to_owned())
        });
        // A thread that has ended meanwhile has no status.
        threads.flatten().collect()
    }

    fn capabilities(&self) -> u64 {
        for set in ["CapInh:", "CapAmb:"] {
            for held in self.threads(set) {
                assert_eq!(u64::from_str_radix(&held, 16), Ok(0), "{set}");
            }
        }
        let mut effective = self.threads("CapEff:");
        assert!(effective.len() > 5, "{effective:?}");
        effective.dedup();
        assert_eq!(effective.len(), 1, "all threads alike: {effective:?}");
        // Threads start and end, but none has further permitted capabilities.
        let mut permitted = self.threads("CapPrm:");
        permitted.dedup();
        assert_eq!(effective, permitted);
        u64::from_str_radix(effective.first().expect("one"), 16).expect("a number")
    }
}

const DAC_OVERRIDE: u64 = 1 << 1;
const DAC_READ_SEARCH: u64 = 1 << 2;
const SYS_ADMIN: u64 = 1 << 21;

/// Whether any page is pushed while all files of a mount are read.
fn pushes_pages() -> bool {
    let daemon = Daemon::start(&[]);
    for (name, _) in &Tree::mixed().files {
        fs::read(daemon.place.path("mnt").join(name)).expect("readable");
    }
    let status = daemon.place.status();
    daemon.place.succeeds(&["umount", "mnt"]);
    let pushed = status.pointer("/counters/pushed_bytes");
    pushed.and_then(Value::as_u64) > Some(0)
}

// Promises: privilege-kept, privilege-same
#[test]
fn mount_keeps_only_needed_capabilities() {
    let daemon = Daemon::start(&[]);
    assert_eq!(daemon.capabilities(), SYS_ADMIN | DAC_READ_SEARCH);
    let mut new_privileges = daemon.threads("NoNewPrivs:");
    new_privileges.dedup();
    assert_eq!(new_privileges, ["1"]);
    daemon.place.succeeds(&["umount", "mnt"]);
    // Pushing needs copies of the mount. A reader of everything may be faster than the pusher, but not
    // always.
    assert!((0..20).any(|_| pushes_pages()), "nothing was pushed");

    let daemon = Daemon::start(&["--record", "profile"]);
    assert_eq!(
        daemon.capabilities(),
        SYS_ADMIN | DAC_READ_SEARCH | DAC_OVERRIDE
    );
    drop(daemon);
    let daemon = Daemon::start(&["--copy-to", "copy"]);
    let kept = daemon.capabilities();
    assert_eq!(kept & (SYS_ADMIN | DAC_OVERRIDE), SYS_ADMIN | DAC_OVERRIDE);
    assert_eq!(kept.count_ones(), 9, "{kept:x}");
}

// Promises: process-inherits
#[test]
fn background_process_closes_inherited_descriptors() {
    let place = Place::start();
    let program = env!("CARGO_BIN_EXE_tarfs");
    let url = place.secret_url("/start");
    File::create(place.path("lock")).expect("made");
    // The headers come through a descriptor that is inherited as well.
    let script = format!(
        "exec 7<>lock 8<headers; exec '{program}' mount --wait-index --header @/dev/fd/8 '{url}' mnt"
    );
    let output = Command::new("sh")
        .args(["-euc", &script])
        .current_dir(place.root())
        .env("XDG_RUNTIME_DIR", place.root())
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .env("TARFS_HEADERS", format!("X-Ticket: {TICKET}"))
        .env("no_proxy", "*")
        .output()
        .expect("started");
    assert!(output.status.success(), "{}", stderr_text(&output));
    let pid = place
        .status()
        .get("pid")
        .and_then(Value::as_u64)
        .expect("there");
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("running");
    let open: Vec<_> = open
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .collect();
    assert!(open.contains(&PathBuf::from("/dev/fuse")), "{open:?}");
    // Neither this process nor the one that keeps the mount.
    let inherited = ["lock", "headers"].map(|name| place.path(name));
    let is_open = || {
        let processes = fs::read_dir("/proc").expect("there").flatten();
        let open = processes.flat_map(|process| fs::read_dir(process.path().join("fd")));
        let files = open.flatten().flatten();
        files
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .any(|file| inherited.contains(&file))
    };
    wait::wait_until("no process has them open", || !is_open());
    let cwd = fs::read_link(format!("/proc/{pid}/cwd")).expect("running");
    assert_eq!(cwd, Path::new("/"));
    place.succeeds(&["umount", "mnt"]);
}
