//! Sources that never end, for all verbs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use tarfs::internal::thread::Thread;

use crate::support::adversarial::MEMORY;
use crate::support::endless::{assert_rejected, place, run_script};

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

// Promises: decode-zeros
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

// Promises: decode-zeros
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
