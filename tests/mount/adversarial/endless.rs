//! Sources that never end.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use tarfs::base::thread::Thread;

use crate::support::adversarial::{MEMORY, MOST_BYTES, Place};
use crate::support::fixture::PROGRAM;
use crate::support::measured_runner::{MeasuredRunner, Run};
use crate::support::raw::Archive;

/// Error of every verb for endless zeros.
const ZEROS_ERROR: &str = "more than 64 MiB of zeros";

/// Number of zeros after an archive that are accepted.
const PADDING: usize = 32 << 20;

/// Runs `script` with `tarfs` as `$0`.
fn run_script(place: &Place, runner: &mut MeasuredRunner, script: &str) -> Run {
    runner.run(place.root(), &["sh", "-c", script, PROGRAM])
}

/// Scripts of all verbs that read a whole `source`.
fn scripts(source: &str) -> [String; 6] {
    [
        format!("$0 ls {MEMORY} {source}"),
        format!("$0 ls {MEMORY} --ignore-zeros {source}"),
        format!("$0 verify {MEMORY} {source}"),
        format!("$0 index {MEMORY} {source}"),
        format!("$0 mount --wait-index {MEMORY} {source} mnt"),
        format!("$0 materialize {MEMORY} {source} -C own/root"),
    ]
}

#[track_caller]
fn assert_rejected(run: &Run, script: &str) {
    assert_eq!(run.code, 2, "{script}: {run:?}");
    assert!(run.said.contains(ZEROS_ERROR), "{script}: {run:?}");
    assert!(run.peak_bytes < MOST_BYTES, "{script}: {run:?}");
}

fn place() -> (Place, MeasuredRunner) {
    let place = Place::create();
    fs::create_dir(place.path("mnt")).expect("fresh");
    fs::write(place.path("a.tar"), Archive::new().file("a", "1").end()).expect("space");
    let runner = MeasuredRunner::start(place.root());
    (place, runner)
}

#[test]
fn endless_zeros_of_device_are_an_error_of_every_verb() {
    let (place, mut runner) = place();
    for script in scripts("/dev/zero") {
        assert_rejected(&run_script(&place, &mut runner, &script), &script);
    }
}

/// Answers every request with zeros until the client disconnects.
fn serve_zeros(mut client: TcpStream) {
    let mut request = [0; 4096];
    let Ok(len) = client.read(&mut request) else {
        return;
    };
    let is_head = request
        .get(..len)
        .is_some_and(|head| head.starts_with(b"HEAD"));
    let zeros = vec![0; 64 << 10];
    let mut sent = client.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
    while sent.is_ok() && !is_head {
        sent = client.write_all(&zeros);
    }
}

#[test]
fn endless_zeros_of_server_are_an_error_of_every_verb() {
    let (place, mut runner) = place();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let server = Thread::spawn("server", move || {
        let mut clients = Vec::new();
        for client in listener.incoming() {
            let mut client = client.expect("a connection");
            let mut first = [0];
            if client.peek(&mut first).is_ok_and(|len| len == 1) && first == *b"." {
                drop(client.read(&mut first));
                return;
            }
            clients.push(Thread::spawn("client", move || serve_zeros(client)));
        }
    });
    for script in scripts(&format!("http://{address}/a.tar")) {
        assert_rejected(&run_script(&place, &mut runner, &script), &script);
    }
    let mut last = TcpStream::connect(address).expect("it listens");
    last.write_all(b".").expect("it reads");
    server.expect("a thread").join();
}

#[test]
fn endless_zeros_after_archive_or_packed_are_an_error() {
    let (place, mut runner) = place();
    let behind = ["cat", "gzip", "bzip2", "xz"]
        .map(|pack| format!("{{ {pack} < a.tar; cat /dev/zero; }} | $0 ls {MEMORY} /dev/stdin"));
    let packed = format!("cat a.tar /dev/zero | gzip -1 | $0 verify {MEMORY} /dev/stdin");
    for script in behind.iter().chain([&packed]) {
        assert_rejected(&run_script(&place, &mut runner, script), script);
    }
}

#[test]
fn finite_zeros_after_archive_are_padding() {
    let (place, mut runner) = place();
    for script in [
        format!("{{ cat a.tar; head -c {PADDING} /dev/zero; }} | $0 verify {MEMORY} /dev/stdin"),
        format!("{{ gzip < a.tar; head -c {PADDING} /dev/zero; }} | $0 verify {MEMORY} /dev/stdin"),
        // A file has a known length.
        format!("truncate -s 300M a.tar && $0 verify {MEMORY} a.tar"),
        format!("$0 ls --ignore-zeros {MEMORY} a.tar"),
    ] {
        let run = run_script(&place, &mut runner, &script);
        assert_eq!(run.code, 0, "{script}: {run:?}");
    }
}

#[test]
fn file_may_hold_any_number_of_zeros() {
    let (place, _) = place();
    fs::File::create(place.path("zeros"))
        .and_then(|file| file.set_len(200 << 20))
        .expect("space");
    let mut tar = Command::new("tar")
        .args(["-c", "zeros", "a.tar"])
        .current_dir(place.root())
        .stdout(Stdio::piped())
        .spawn()
        .expect("tar is needed");
    let output = Command::new(PROGRAM)
        .args(["ls", MEMORY, "/dev/stdin"])
        .stdin(tar.stdout.take().expect("piped"))
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .output()
        .expect("started");
    assert!(tar.wait().expect("a child").success());
    assert!(output.status.success(), "{output:?}");
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(
        listed.contains("zeros") && listed.contains("a.tar"),
        "{listed}"
    );
}
