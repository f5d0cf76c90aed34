//! The command line: error messages, and what the verbs do.
//!
//! `tests/mount` has the tests that need a mount or root.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use tarfs::internal::thread::Thread;
use xxhash_rust::xxh32::xxh32;

use crate::support::cli::{Outcome, Place, sample};
use crate::support::fixture::PROGRAM;
use crate::support::http::{Resource, Response, Server};
use crate::support::raw::{Archive, Header, random_bytes};

/// The packing programs, and their names in messages.
const PACKERS: [&[&str]; 6] = [
    &["cat"],
    &["gzip", "-c"],
    &["lz4", "-c", "-q", "-BX"],
    &["zstd", "-c", "-q"],
    &["xz", "-c"],
    &["bzip2", "-c"],
];

fn pack(packer: &[&str], plain: &[u8]) -> Vec<u8> {
    let (program, arguments) = packer.split_first().expect("a program");
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let mut stdin = child.stdin.take().expect("piped");
    let plain = plain.to_vec();
    let writing = Thread::spawn("packing", move || {
        stdin.write_all(&plain).expect("all is read");
    })
    .expect("a thread");
    let output = child.wait_with_output().expect("output");
    writing.join();
    assert!(output.status.success(), "{program}");
    output.stdout
}

#[test]
fn missing_source_error_names_location_and_remedy() {
    let place = Place::new();
    place.fails(
        &["ls", "missing.tar"],
        &["missing.tar", "not found", "spelled"],
    );
    place.fails(&["index", "out"], &["cannot read out", "a directory"]);
    place.fails(&["ls", ""], &["SOURCE is empty"]);
    place.fails(&["ls", "-"], &["standard input can only be materialized"]);
    place.fails(
        &["ls", "gopher://host/a.tar"],
        &["gopher://host/a.tar", "not a known scheme", "http://"],
    );
    place.fails(&["ls", "http://"], &["read http://:", "empty host"]);
}

// Promises: format-error
#[test]
fn source_that_is_no_archive_has_its_own_error() {
    let place = Place::new();
    place.put("text", "hello\n");
    place.put("empty", "");
    place.fails(
        &["ls", "text"],
        &["text:", "neither a tar archive nor gzip", "check"],
    );
    let errors = [
        "ls text",
        "find text",
        "du text",
        "diff text out",
        "cat text f",
        "materialize text -C out",
    ]
    .map(|line| {
        let words: Vec<_> = line.split(' ').collect();
        place.fails(&words, &["; ls(1) and cat(1) show other files)"])
    });
    assert!(errors.iter().all(|error| error == &errors[0]), "{errors:?}");
    place.fails(&["ls", "empty"], &["empty:", "it is empty"]);
    let mut lzma = vec![0x5d, 0, 0, 0x80, 0];
    lzma.extend([0xff; 8]);
    let magics: [(&[u8], &str); 10] = [
        (b"LZIP\x01", "lzip"),
        (&lzma, "lzma"),
        (b"\x1f\x9d\x90", "compress (.Z)"),
        (b"\x89LZO\0\r\n\x1a\n", "lzop"),
        (b"PK\x03\x04", "zip"),
        (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
        (b"070701", "cpio"),
        (b"\xed\xab\xee\xdb", "RPM"),
        (b"!<arch>\ndebian-binary", "a Debian package"),
        (b"hsqs", "squashfs"),
    ];
    for (magic, name) in magics {
        place.put("packed", [magic, &[7; 600]].concat());
        let text = place.fails(&["ls", "packed"], &["packed: ", "is not supported"]);
        assert!(text.contains(&format!(" {name} is")), "{text}");
        assert!(text.contains("repack it as"), "{text}");
    }
    place.put("pointer", "version https://git-lfs.github.com/spec/v1\n");
    place.fails(&["ls", "pointer"], &["Git LFS", "git lfs pull"]);
}

#[test]
fn error_names_lz4_dictionary() {
    let place = Place::new();
    // Version 1, independent blocks, a dictionary id, and blocks of 64 KiB.
    let descriptor = [0x61, 0x40, 0x2a, 0, 0, 0];
    let check = xxh32(&descriptor, 0).to_le_bytes()[1];
    let frame = [b"\x04\x22\x4d\x18", &descriptor[..], &[check], &[0; 8]].concat();
    place.put("a.tar.lz4", frame);
    place.fails(
        &["ls", "a.tar.lz4"],
        &["a.tar.lz4", "packed byte 0", "dictionary", "repack"],
    );
}

// Promises: truncated-error, truncated-allowed
#[test]
fn truncated_archive_error_names_position_and_flag() {
    for packer in PACKERS {
        let place = Place::new();
        let packed = pack(packer, &sample());
        place.put("cut", packed.get(..200_000).expect("longer"));
        for verb in [&["ls", "cut"][..], &["materialize", "cut", "-C", "out"]] {
            let text = place.fails(verb, &[" byte 200000: ", "take its readable part"]);
            assert!(text.starts_with("tarfs: cut: "), "{text}");
        }
        // From a scan, and from the index that it has saved.
        for verb in ["ls", "find", "ls", "index"] {
            let listed = place.run(&[verb, "--allow-truncated", "cut"]);
            let told = "tarfs: warning: the archive is truncated; this is its readable part\n";
            let told = listed.complaints.matches(told).count();
            assert_eq!(
                (told, listed.code),
                (1, 0),
                "{packer:?}: {}",
                listed.complaints
            );
        }
    }
}

#[test]
fn truncated_plain_archive_error_names_member_and_record() {
    let place = Place::new();
    place.put("cut.tar", sample().get(..200_000).expect("longer"));
    place.fails(
        &["materialize", "cut.tar", "-C", "out"],
        &[
            "in member 'top/sub/noise'",
            "plain byte 200000",
            "is truncated",
        ],
    );
    // The earlier members are there, and the part of the file before the end.
    assert_eq!(
        fs::read(place.path("out/top/a")).expect("written"),
        b"hello\n"
    );
    let part = fs::metadata(place.path("out/top/sub/noise")).expect("written");
    assert!(part.len() > 0);
    let taken = place.run(&[
        "materialize",
        "cut.tar",
        "-C",
        "out",
        "--allow-truncated",
        "--quiet",
    ]);
    assert_eq!(taken.code, 2, "one file is incomplete");
    assert!(
        taken.complaints.contains("top/sub/noise: "),
        "{}",
        taken.complaints
    );
}

#[test]
fn damage_error_names_its_position() {
    let changes: [(&[&str], &str); 5] = [
        (PACKERS[1], "gzip"),
        (PACKERS[2], "lz4"),
        (PACKERS[3], "zstd"),
        (PACKERS[4], "xz"),
        (PACKERS[5], "bzip2"),
    ];
    for (packer, name) in changes {
        let place = Place::new();
        let mut packed = pack(packer, &sample());
        for byte in packed.iter_mut().skip(150_000).take(4) {
            *byte ^= 0x55;
        }
        place.put("bad", packed);
        for verb in [&["ls", "bad"][..], &["materialize", "bad", "-C", "out"]] {
            let stream = format!("{name} stream at packed byte ");
            place.fails(
                verb,
                &["tarfs: bad: ", &stream, "damaged: get another copy"],
            );
        }
    }
}

#[test]
fn damaged_header_loses_its_member_and_fails_run() {
    let place = Place::new();
    let archive = Archive::new()
        .file("a", "1")
        .add(Header::new("b", b'0').damaged(), "2")
        .file("c", "3")
        .end();
    place.put("bad.tar", archive);
    for (verb, lines) in [
        (&["ls", "bad.tar"][..], 2),
        (&["materialize", "bad.tar", "-C", "out"], 1),
    ] {
        let outcome = place.run(verb);
        assert_eq!(outcome.code, 2, "{verb:?}: {}", outcome.complaints);
        assert_eq!(outcome.complaints.lines().count(), lines, "{verb:?}");
    }
    assert!(place.path("out/c").exists() && !place.path("out/b").exists());
}

/// The address of a server without TLS, which answers its first client at once.
fn plain_server() -> (SocketAddr, Thread<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let thread = Thread::spawn("plain", move || {
        let (mut stream, _) = listener.accept().expect("a client");
        drop(stream.read(&mut [0; 4096]));
        drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
    });
    (address, thread.expect("a thread"))
}

#[test]
fn network_errors_are_described_in_words() {
    let place = Place::new();
    let server = Server::start();
    server.route("/401", |_| Response::new(401));
    server.route("/403", |_| Response::new(403));
    server.route("/416", |_| {
        Response::new(416).with("Content-Range", "bytes */1000")
    });
    server.route("/elsewhere", |_| {
        Response::new(206)
            .with("Content-Range", "bytes 700-1211/4096")
            .with_body(vec![0; 512])
    });
    server.route("/packed", |_| {
        Response::new(200)
            .with("Content-Encoding", "br")
            .with_body(vec![0; 512])
    });
    let url = |path: &str| server.url(path);
    place.fails(
        &["ls", &url("/none?X-Amz-Signature=geheim")],
        &["/none?…", "not found"],
    );
    place.fails(
        &["ls", &url("/401")],
        &["/401", "status 401", "--header 'Authorization"],
    );
    place.fails(
        &["ls", &url("/403")],
        &["/403", "status 403", "credentials"],
    );
    place.fails(&["ls", &url("/416")], &["status 416", "check the URL"]);
    place.fails(&["ls", &url("/elsewhere")], &["bytes 700..1212 instead of"]);
    place.fails(
        &["ls", &url("/packed")],
        &["Content-Encoding: br", "download"],
    );
    let (plain, _server) = plain_server();
    place.fails(
        &[
            "ls",
            "--no-published-index",
            &format!("https://{plain}/a.tar"),
        ],
        &["no secure connection", "speaks TLS"],
    );
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port");
    place.fails(
        &["ls", &format!("http://{port}/a.tar")],
        &[
            &port.to_string(),
            "the host refuses the connection",
            "whether",
        ],
    );
    place.fails(
        &["ls", "http://no-such-host.invalid/a.tar"],
        &["no-such-host.invalid", "cannot be resolved", "name server"],
    );
}

// Promises: select-missing, exit-status
#[test]
fn path_missing_in_archive_is_reported() {
    let place = Place::new();
    place.put("a.tar", sample());
    place.fails(
        &["ls", "a.tar", "top/none"],
        &["top/none: not in the archive"],
    );
    for more in [&["-C", "out"][..], &["-O"], &["--dry-run"]] {
        let arguments = [&["materialize", "a.tar", "top/none"], more].concat();
        place.fails(&arguments, &["top/none: not in the archive"]);
    }
}

// Promises: write-threads, atomic-conflicts, resume-conflicts, exit-status, error-line
#[test]
fn usage_errors_exit_with_code_64() {
    let place = Place::new();
    place.put("a.tar", sample());
    for arguments in [
        &["frobnicate"][..],
        &[],
        &["ls", "--frobnicate", "a.tar"],
        &["ls", "a.tar", "--memory", "many"],
        &["ls", "a.tar", "--chunk-size", "-1"],
        &["ls", "a.tar", "--connections", "0"],
        &["ls", "a.tar", "--header", "no colon"],
        &["ls", "a.tar", "--compression", "rar"],
        &["mount", "a.tar", "mnt", "-o", "frobnicate"],
        &["mount", "a.tar", "mnt", "-o", "uid=root"],
        &["materialize", "a.tar", "--to-stdout", "--dry-run"],
        &["materialize", "a.tar", "--strip-components", "x"],
        &["materialize", "a.tar", "--sync", "--dry-run"],
        &["materialize", "a.tar", "--resume", "-k"],
        &["materialize", "a.tar", "--resume", "--skip-old-files"],
        &["materialize", "a.tar", "--resume", "--allow-truncated"],
        &["materialize", "a.tar", "--resume", "--atomic", "-C", "new"],
        &[
            "materialize",
            "a.tar",
            "--resume",
            "--expect-sha256",
            "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a",
        ],
        &["ls", "a.tar", "--expect-sha256", "5a"],
        &["materialize", "a.tar", "--atomic"],
        &["materialize", "a.tar", "--atomic", "-C", "new", "-k"],
        &[
            "materialize",
            "a.tar",
            "--atomic",
            "-C",
            "new",
            "--skip-old-files",
        ],
        &[
            "materialize",
            "a.tar",
            "--atomic",
            "-C",
            "new",
            "--allow-truncated",
        ],
        &[
            "materialize",
            "a.tar",
            "--atomic",
            "-C",
            "new",
            "--to-stdout",
        ],
        &["materialize", "a.tar", "--atomic", "-C", "new", "--dry-run"],
        &["materialize", "a.tar", "--writers", "0"],
        &["materialize", "a.tar", "--writers", "65"],
    ] {
        let outcome = place.run(arguments);
        assert_eq!(outcome.code, 64, "{arguments:?}: {}", outcome.complaints);
        assert!(outcome.output.is_empty(), "{arguments:?}");
        // Without a verb, the help is shown.
        let is_prefixed = outcome.complaints.starts_with("tarfs: ") || arguments.is_empty();
        assert!(is_prefixed, "{arguments:?}: {}", outcome.complaints);
    }
    for arguments in [
        &["--help"][..],
        &["--version"],
        &["help"],
        &["mount", "--help"],
    ] {
        let outcome = place.succeeds(arguments);
        assert!(outcome.text().contains("tarfs"), "{arguments:?}");
    }
}

#[test]
fn every_packing_is_materialized_from_standard_input() {
    for packer in PACKERS {
        let place = Place::new();
        place.put("packed", pack(packer, &sample()));
        let input = fs::File::open(place.path("packed")).expect("written");
        let outcome = Outcome::of(
            place
                .tarfs()
                .args(["extract", "-", "-C", "out"])
                .stdin(input),
        );
        assert_eq!((outcome.code, outcome.complaints.as_str()), (0, ""));
        assert_eq!(
            fs::read(place.path("out/top/sub/noise")).expect("written"),
            random_bytes(300_000)
        );
    }
    // The source need not be a file.
    let place = Place::new();
    place.put("a.tar", sample());
    let script = "cat a.tar | \"$0\" materialize - -O top/sub/last";
    let outcome = Outcome::of(
        place
            .command("sh")
            .args(["-c", script])
            .arg(env!("CARGO_BIN_EXE_tarfs")),
    );
    assert_eq!((outcome.code, outcome.text()), (0, "end\n"));
}

#[test]
fn to_stdout_and_dry_run_write_nothing() {
    let place = Place::new();
    place.put("a.tar", sample());
    let told = place.succeeds(&["materialize", "a.tar", "-C", "out", "-O", "top/a", "top/b"]);
    assert_eq!(told.text(), "hello\nbee");
    let told = place.run(&["materialize", "a.tar", "-v", "-O", "top/a", "top/b"]);
    assert_eq!((told.code, told.text()), (0, "hello\nbee"));
    assert_eq!(told.complaints, "top/a\ntop/b\n");
    let told = place.succeeds(&["materialize", "a.tar", "-C", "out", "--dry-run", "top/sub"]);
    assert_eq!(told.lines(), ["top/sub", "top/sub/noise", "top/sub/last"]);
    let mut left = fs::read_dir(place.path("out")).expect("a directory");
    assert!(left.next().is_none());
}

/// Every path below `directory`, sorted.
fn paths(directory: &Path) -> Vec<String> {
    let output = Command::new("find")
        .args([".", "-mindepth", "1", "-printf", "%P\n"])
        .current_dir(directory)
        .output()
        .expect("find");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let mut paths: Vec<String> = text.lines().map(str::to_owned).collect();
    paths.sort();
    paths
}

#[test]
fn members_are_selected_and_renamed() {
    let chosen = |more: &[&str]| {
        let place = Place::new();
        place.put("a.tar", sample());
        place.succeeds(&[&["materialize", "a.tar", "-C", "out"], more].concat());
        paths(&place.path("out"))
    };
    assert_eq!(chosen(&["top/a"]), ["top", "top/a"]);
    assert_eq!(
        chosen(&["./top/sub/"]),
        ["top", "top/sub", "top/sub/last", "top/sub/noise"]
    );
    assert_eq!(
        chosen(&["--strip-components", "1", "--exclude", "noise"]),
        ["a", "b", "hard", "link", "sub", "sub/last"]
    );
    assert_eq!(
        chosen(&["--include", "*/l*", "--strip-components=2"]),
        ["last"]
    );
}

#[test]
fn existing_files_are_replaced_kept_or_skipped_by_flag() {
    let run = |more: &[&str]| {
        let place = Place::new();
        place.put("a.tar", sample());
        fs::create_dir(place.path("out/top")).expect("fresh");
        place.put("out/top/a", "old");
        let outcome = place.run(&[&["materialize", "a.tar", "-C", "out"], more].concat());
        let content = fs::read_to_string(place.path("out/top/a")).expect("a file");
        (outcome, content)
    };
    let (outcome, content) = run(&[]);
    assert_eq!(
        (outcome.code, outcome.complaints, content),
        (0, String::new(), "hello\n".to_owned())
    );
    let (outcome, content) = run(&["--skip-old-files"]);
    assert_eq!(
        (outcome.code, outcome.complaints, content),
        (0, String::new(), "old".to_owned())
    );
    let (outcome, content) = run(&["-k"]);
    assert_eq!(content, "old");
    outcome.failure(&["top/a: ", "File exists"]);
}

#[test]
fn entries_are_listed_on_request() {
    let place = Place::new();
    place.put("a.tar", sample());
    let verbose = place.succeeds(&["materialize", "-v", "a.tar", "-C", "out"]);
    assert_eq!(verbose.lines().len(), 8);
    let quiet = place.succeeds(&["materialize", "-q", "a.tar", "-C", "out"]);
    assert!(quiet.output.is_empty());
}

// Promises: ls-gnu, json-inodes
#[test]
fn listings_are_plain_long_recursive_or_json() {
    let place = Place::new();
    place.put("a.tar", sample());
    assert_eq!(place.succeeds(&["ls", "a.tar"]).lines(), ["top"]);
    let below = place.succeeds(&["ls", "a.tar", "top"]);
    let mut names = below.lines();
    names.sort_unstable();
    assert_eq!(names, ["a", "b", "hard", "link", "sub"]);
    assert_eq!(place.succeeds(&["ls", "-R", "a.tar"]).lines().len(), 8);
    let long = place.succeeds(&["ls", "-ln", "a.tar", "top/b"]);
    let [line] = long.lines()[..] else {
        panic!("one line: {}", long.text())
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[..5], ["-rwsr-xr-x", "1", "7", "8", "3"], "{line}");
    assert!(line.ends_with(" top/b"), "{line}");
    let json = place.succeeds(&["ls", "-R", "--json", "a.tar"]);
    let mut inodes = Vec::new();
    for line in json.lines() {
        let entry: serde_json::Value = serde_json::from_str(line).expect("JSON");
        for field in ["uid", "gid", "size", "nlink", "fileid", "dirid"] {
            assert!(entry[field].is_u64(), "{field}: {line}");
        }
        for field in ["path", "type", "mode", "atime", "mtime", "ctime"] {
            assert!(!entry[field].is_null(), "{field}: {line}");
        }
        match entry["path"].as_str().expect("a string") {
            "top/link" => assert_eq!(entry["target"], "a"),
            "top/a" | "top/hard" => {
                assert_eq!(entry["nlink"], 2);
                inodes.push(entry["fileid"].clone());
            }
            _ => {}
        }
    }
    assert!(matches!(&inodes[..], [a, b] if a == b), "{inodes:?}");
}

#[test]
fn index_file_serves_listings_of_its_archive_only() {
    let place = Place::new();
    place.put("a.tar", sample());
    place.put("b.tar", Archive::new().file("b", "").end());
    place.succeeds(&["index", "a.tar", "--output", "index"]);
    let told = place.succeeds(&["ls", "--index", "index", "a.tar", "top/sub"]);
    assert_eq!(told.lines().len(), 2);
    place.fails(
        &["ls", "--index", "index", "b.tar"],
        &["does not belong to b.tar", "`tarfs index --output`"],
    );
    place.fails(
        &["ls", "--index", "a.tar", "b.tar"],
        &["a.tar", "not a tarfs index"],
    );
    place.fails(
        &["ls", "--index", "none", "b.tar"],
        &["none", "No such file"],
    );
}

// Promises: publish-verb
#[test]
fn written_index_has_the_mode_that_the_umask_permits() {
    let place = Place::new();
    place.put("a.tar", sample());
    for (umask, expected) in [("022", 0o644), ("077", 0o600)] {
        let mut shell = place.command("sh");
        shell.args(["-c", &format!("umask {umask}; exec \"$0\" \"$@\"")]);
        shell.args([PROGRAM, "index", "-q", "a.tar", "--output", "index"]);
        assert!(shell.output().expect("started").status.success());
        let mode = fs::metadata(place.path("index")).expect("written").mode();
        assert_eq!(mode & 0o777, expected, "{umask}");
    }
    for saved in fs::read_dir(place.path("cache/index")).expect("a cache") {
        let mode = saved.expect("a file").metadata().expect("a file").mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

// Promises: cache-list, publish-verb
#[test]
fn path_of_a_local_archive_is_in_its_saved_index_only() {
    let place = Place::new();
    place.put("a\n.tar", sample());
    place.succeeds(&["index", "-q", "a\n.tar"]);
    let directory = place.path("").display().to_string();
    let listed = place.succeeds(&["cache", "list"]);
    let shown = format!("  {directory}a\\n.tar (");
    assert!(listed.text().contains(&shown), "{}", listed.text());
    let listed = place.succeeds(&["cache", "list", "--json"]);
    let shown = format!("\"source\":\"{directory}a\\n.tar\"");
    assert!(listed.text().contains(&shown), "{}", listed.text());
    // From the saved index.
    place.succeeds(&["index", "-q", "a\n.tar", "--output", "index"]);
    let packed = fs::read(place.path("index")).expect("written");
    let index = zstd::decode_all(&*packed).expect("an index");
    let has = |text: &str| {
        index
            .windows(text.len())
            .any(|bytes| bytes == text.as_bytes())
    };
    assert!(has("top/sub") || has("sub"), "names are in it");
    assert!(!has(&directory) && !has("a\n.tar"));
}

#[test]
fn headers_are_sent_to_their_host_only() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/target", Resource::new(sample()).etag("\"1\""));
    let target = server.other_url("/target");
    server.route("/start", move |_| Response::redirect(target.clone()));
    let header = ["--header", "X-Key: geheim"];
    let arguments = |url: &str| [&["ls", url][..], &header].concat().join("\n");
    for (url, path, expected) in [
        (server.url("/target"), "/target", Some("geheim")),
        (server.url("/start"), "/start", Some("geheim")),
        (server.url("/start"), "/target", None),
    ] {
        let arguments = arguments(&url);
        let before = server.requests(path).len();
        place.succeeds(&arguments.lines().collect::<Vec<_>>());
        let seen = server.requests(path);
        let new = seen.get(before..).expect("it grows");
        assert!(!new.is_empty());
        for seen in new {
            assert_eq!(seen.request.header("x-key"), expected, "{url} {path}");
        }
    }
}

#[test]
fn link_as_source_or_destination_is_followed() {
    let place = Place::new();
    place.put("a.tar", sample());
    symlink("a.tar", place.path("link.tar")).expect("fresh");
    symlink("out", place.path("link")).expect("fresh");
    place.succeeds(&["materialize", "link.tar", "-C", "link"]);
    assert!(place.path("out/top/a").exists());
}

// Promises: profile-merge
#[test]
fn profiles_are_merged_and_cut() {
    let place = Place::new();
    place.put("one", "# tarfs profile 1\n0 10 a\n0 30 b\n");
    place.put(
        "other",
        "# tarfs profile 1\n# a remark\n0 20 c\\ d\n5 10 a\n",
    );
    let merged = "# tarfs profile 1\n0 10 a\n0 20 c\\ d\n0 30 b\n10 5 a\n";
    assert_eq!(
        place.succeeds(&["profile", "one", "other"]).output,
        merged.as_bytes()
    );
    let cut = ["profile", "one", "other", "--max-size", "32", "-o", "cut"];
    assert_eq!(place.succeeds(&cut).output, b"");
    let text = fs::read_to_string(place.path("cut")).expect("written");
    assert_eq!(text, "# tarfs profile 1\n0 10 a\n0 20 c\\ d\n0 2 b\n");
    let mode = fs::metadata(place.path("cut")).expect("written").mode();
    assert_eq!(mode & 0o777, 0o600);
}

// Promises: profile-merge
#[test]
fn merged_profile_with_more_ranges_than_are_read_fails() {
    let place = Place::new();
    for name in ["one", "other"] {
        let ranges: Vec<_> = (0..600_000)
            .map(|number| format!("{} 1 {name}\n", 2 * number))
            .collect();
        place.put(name, format!("# tarfs profile 1\n{}", ranges.concat()));
    }
    place.fails(&["profile", "one", "other"], &["ranges", "--max-size"]);
    let cut = ["profile", "--max-size=1000", "one", "other"];
    assert_eq!(place.succeeds(&cut).lines().len(), 1 + 1000);
}

// Promises: profile-merge
#[test]
fn invalid_profile_is_not_merged() {
    let place = Place::new();
    place.put("one", "# tarfs profile 1\n0 10 a\n");
    place.put("bad", "# tarfs profile 1\n0 10 a\n0 x a\n");
    place.put("text", "hello\n");
    let huge = fs::File::create(place.path("huge")).expect("made");
    huge.set_len((64 << 20) + 1).expect("sparse");
    for (name, word) in [
        ("bad", "line 3 of the profile"),
        ("text", "not a profile"),
        ("missing", "No such file"),
        ("huge", "longer than 67108864 bytes"),
        ("out", "Is a directory"),
    ] {
        place.fails(
            &["profile", "one", name, "-o", "merged"],
            &[&format!("{name}: "), word],
        );
    }
    assert!(!place.path("merged").exists());
    assert_eq!(place.run(&["profile"]).code, 64);
}

#[test]
fn flag_of_one_archive_is_refused_for_a_directory() {
    let place = Place::new();
    fs::create_dir(place.path("archives")).expect("new");
    let digest = "0".repeat(64);
    for (flag, value) in [
        ("--writable", None),
        ("--restart", None),
        ("--copy-to", Some("copy")),
        ("--expect-sha256", Some(&*digest)),
        ("--index", Some("a.idx")),
        ("--index-sha256", Some(&*digest)),
        ("--mirror-url", Some("http://127.0.0.1:1/a.tar")),
        ("--record", Some("profile")),
        ("--replay", Some("profile")),
        ("--prefetch-rate", Some("1M")),
        ("--layer", Some("b.tar")),
        ("--whiteouts", Some("oci")),
        ("--root", Some("a")),
        ("--strip-components", Some("1")),
    ] {
        let given = value.map_or(flag.to_owned(), |value| format!("{flag}={value}"));
        let refused = place.run(&["mount", "archives", "mnt", &given]);
        let complaint = format!("{flag} is for a single archive");
        assert_eq!(refused.code, 64, "{}", refused.complaints);
        assert!(
            refused.complaints.contains(&complaint),
            "{}",
            refused.complaints
        );
    }
    let unpacked = ("--max-unpacked-size", "1M");
    let flags = [
        ("--layer", "b.tar"),
        ("--whiteouts", "oci"),
        ("--index", "a.idx"),
        ("--index-sha256", &*digest),
        ("--expect-sha256", &*digest),
        ("--mirror-url", "http://127.0.0.1:1/a.tar"),
        ("--compression", "none"),
        ("--platform", "linux/arm64"),
        ("--max-entries", "1"),
        ("--allow-truncated", ""),
    ];
    for (verb, others) in [
        ("sync", &["copy"][..]),
        ("ls", &[]),
        ("find", &[]),
        ("du", &[]),
        ("diff", &["archives"]),
    ] {
        let unpacked = (verb == "sync").then_some(unpacked);
        for (flag, value) in flags.into_iter().chain(unpacked) {
            if (verb, flag) == ("sync", "--allow-truncated") {
                continue;
            }
            let given = format!("{flag}={value}");
            let given = given.trim_end_matches('=');
            let refused = place.run(&[&[verb, given, "archives"], others].concat());
            let complaint = format!("{flag} is for archives");
            assert_eq!(refused.code, 64, "{verb}: {}", refused.complaints);
            assert!(
                refused.complaints.contains(&complaint),
                "{verb}: {}",
                refused.complaints
            );
        }
    }
    // It is for B.
    place.put("a.tar", Archive::new().file("b", "").end());
    let compared = place.run(&["diff", "--compression=none", "archives", "a.tar"]);
    assert_eq!(compared.code, 1, "{}", compared.complaints);
    for words in [
        &["cat", "archives", "a"][..],
        &["materialize", "archives", "-C", "mnt"],
        &["shard", "write", "archives", "1/2", "-C", "mnt"],
    ] {
        place.fails(words, &["archives: is a directory, not an archive"]);
    }
    let refused = place.run(&["ls", "archives", "--shard=1/2"]);
    refused.failure_of(64, &["--shard is for archives"]);
}

// Promises: limit-entries
#[test]
fn flag_without_effect_is_refused_for_an_index_file() {
    let place = Place::new();
    place.put("a.tar", Archive::new().file("b", "").file("c", "").end());
    place.succeeds(&["index", "-q", "--output", "a.idx", "a.tar"]);
    let digest = "0".repeat(64);
    for (flag, value) in [
        ("--layer", "a.tar"),
        ("--whiteouts", "oci"),
        ("--index", "a.idx"),
        ("--index-sha256", &*digest),
        ("--expect-sha256", &*digest),
        ("--mirror-url", "http://127.0.0.1:1/a.tar"),
        ("--compression", "none"),
        ("--platform", "linux/arm64"),
    ] {
        for verb in ["ls", "find", "du"] {
            let refused = place.run(&[verb, &format!("{flag}={value}"), "a.idx"]);
            let complaint = format!("a.idx: is an index file, and {flag} is for archives");
            refused.failure_of(64, &[&complaint]);
        }
    }
    place.succeeds(&["ls", "--max-entries=2", "a.idx"]);
    place.fails(&["ls", "--max-entries=1", "a.idx"], &["--max-entries"]);
}

// Promises: archives-place
#[test]
fn flag_of_one_archive_is_refused_in_a_list_of_archives() {
    let place = Place::new();
    let digest = format!("--index-sha256={}", "0".repeat(64));
    let expected = format!("--expect-sha256={}", "0".repeat(64));
    for flag in [
        "--index=a.idx",
        &digest,
        &expected,
        "--mirror-url=http://127.0.0.1:1/a.tar",
        "--long",
        "--tree",
        "--json",
        "--shard=1/2",
        "--layer=b.tar",
        "--by-size",
        "--inode",
    ] {
        let refused = place.run(&["ls", "s3://bucket/", flag]);
        let (name, _) = flag.split_once('=').unwrap_or((flag, ""));
        let complaint = format!("{name} is for a single archive");
        assert_eq!(refused.code, 64, "{}", refused.complaints);
        assert!(
            refused.complaints.contains(&complaint),
            "{}",
            refused.complaints
        );
    }
}

#[test]
fn flag_of_one_archive_is_refused_for_layers() {
    let place = Place::new();
    for words in [
        "a",
        "--strip-components=1",
        "--exclude=a",
        "--include=a",
        "--keep-old-files",
        "--skip-old-files",
        "--resume",
        "--to-stdout",
        "--dry-run",
    ] {
        let refused = place.run(&["materialize", "a.tar", "--layer=b.tar", words]);
        assert_eq!(refused.code, 64, "{words}: {}", refused.complaints);
        assert!(
            refused.complaints.contains("cannot be used with"),
            "{}",
            refused.complaints
        );
    }
}
