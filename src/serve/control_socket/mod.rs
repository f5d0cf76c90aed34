//! The control socket: other processes of the same user send requests to one that serves mounts.
//!
//! One directory holds a socket for each such process, named by process ID and PID namespace
//! (`4711-4026531836.sock`), because containers may share the directory. A connection carries one request and
//! its response, each a line of JSON. The response to `{"verb":"status"}` is a [`Status`] of each mount, one a line. That
//! to `{"verb":"umount","force":false,"device":"0:45","mount_id":52}` is `{"unmounted":"/mnt"}` or `{"error":…,"hint":…}`;
//! the number of the mount may be missing if no other has the device. That to
//! `{"verb":"index"}` is `{"index_bytes":4096}` and an index file of so many bytes, or `{"error":…}`.

mod client;
mod messages;
mod peers;
mod server;

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::geteuid;
use serde::Serialize;

use crate::base::directory::create_missing_dir;
use crate::base::process::is_alive;
pub(super) use client::connect_at_once;
pub use client::{
    UmountOutcome, find_status, list_statuses, request_index, request_umount, wait_for_exit,
};
pub use messages::{Request, Response};
pub use peers::SocketPeers;
pub use server::ControlSocket;

const IO_TIMEOUT: Duration = Duration::from_secs(10);

fn send_line(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Creates `directory` for this user alone, if it is missing.
///
/// # Errors
/// If that fails, or others may enter it.
pub(super) fn create_private_dir(directory: &Path) -> io::Result<()> {
    create_missing_dir(directory, 0o700)?;
    check_private_dir(directory)
}

/// Checks that another user has not created the directory, or a link in its place.
fn check_private_dir(directory: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(directory)?;
    let closed_to_others = found.mode().trailing_zeros() >= 6;
    if found.is_dir() && found.uid() == geteuid().as_raw() && closed_to_others {
        return Ok(());
    }
    Err(io::Error::new(
        ErrorKind::PermissionDenied,
        format!(
            "{} is not a directory of this user alone",
            directory.display()
        ),
    ))
}

fn socket_name() -> String {
    format!("{}-{}.sock", std::process::id(), pid_namespace())
}

/// Number of the PID namespace of this process.
fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Extension of a socket until it has a listener.
const NEW_EXTENSION: &str = "new";

/// Removes the sockets in `directory` whose processes were killed before they listened.
pub(in crate::serve) fn remove_unfinished(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        let Some((pid, namespace)) = stem.split_once('-') else {
            continue;
        };
        let is_new = path.extension() == Some(NEW_EXTENSION.as_ref());
        let is_ours = namespace.parse() == Ok(pid_namespace());
        if is_new && is_ours && pid.parse().is_ok_and(|pid| !is_alive(pid)) {
            drop(fs::remove_file(path));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use std::collections::BTreeMap;
    use std::fs::Permissions;
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use crate::base::thread::Thread;

    use super::client::*;
    use super::messages::*;
    use super::*;
    use crate::serve::status::{FailedRead, MAX_TEXT_BYTES, Status};

    fn private_directory() -> tempfile::TempDir {
        tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .expect("a directory")
    }

    #[test]
    fn sockets_that_killed_processes_did_not_finish_are_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut child = std::process::Command::new("true")
            .spawn()
            .expect("installed");
        child.wait().expect("a child");
        let namespace = pid_namespace();
        let dead = format!("{}-{namespace}.new", child.id());
        let others = [
            format!("{}-{namespace}.new", std::process::id()),
            format!("{}-{namespace}.sock", child.id()),
            format!("{}-{}.new", child.id(), namespace + 1),
        ];
        for name in others.iter().chain([&dead]) {
            fs::write(directory.path().join(name), "").expect("written");
        }
        remove_unfinished(directory.path()).expect("readable");
        assert!(!directory.path().join(dead).exists());
        assert!(
            others
                .iter()
                .all(|name| directory.path().join(name).exists())
        );
    }

    #[test]
    fn status_request_returns_the_status() {
        let directory = private_directory();
        let control = ControlSocket::serve(directory.path(), |_| {
            vec![Response::Status(Box::new(Status::example()))]
        });
        let control = control.expect("a socket");
        assert_eq!(
            list_statuses(directory.path()).expect("readable"),
            [Status::example()]
        );
        let mode = fs::metadata(&control.path).expect("there").mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(control);
        assert_eq!(list_statuses(directory.path()).expect("readable"), []);
    }

    // Promises: status-json
    #[test]
    fn status_with_long_texts_is_sent_truncated() {
        let directory = private_directory();
        let _control = ControlSocket::serve(directory.path(), |_| {
            let mut status = Status::example();
            let error = FailedRead {
                path: "é".repeat(64 << 10),
                reason: "\u{1}".repeat(64 << 10),
                ..status.errors[0].clone()
            };
            status.errors = vec![error; 16];
            status.notes = vec!["n".repeat(100_000); 101];
            status.layers = vec!["l".repeat(100_000); 1000];
            vec![Response::Status(Box::new(status))]
        });
        let found = list_statuses(directory.path()).expect("readable");
        let [status] = found.as_slice() else {
            panic!("{} mounts", found.len());
        };
        assert_eq!((status.errors.len(), status.layers.len()), (16, 1000));
        let path = &status.errors[0].path;
        assert!(path.len() <= MAX_TEXT_BYTES + 3 && path.starts_with('é') && path.ends_with('…'));
    }

    // Promises: status-private
    #[test]
    fn silent_process_delays_no_answer_of_another() {
        let directory = private_directory();
        let silent = UnixListener::bind(directory.path().join("1-2.sock"));
        let _silent = silent.expect("a socket");
        let _control = ControlSocket::serve(directory.path(), |_| {
            vec![Response::Status(Box::new(Status::example()))]
        });
        let mut answers = StatusRequests::send(directory.path()).expect("readable");
        let (_, status) = answers.next().expect("an answer");
        assert_eq!(status, Status::example());
        // The one that has answered may serve more mounts.
        assert_eq!(answers.pending.len(), 2);
        answers.deadline = Instant::now();
        assert!(answers.next().is_none());
    }

    #[test]
    fn umount_request_reaches_only_the_named_mount() {
        let directory = private_directory();
        let _control = ControlSocket::serve(directory.path(), |request| match request {
            Request::Status => vec![Response::Status(Box::new(Status::example()))],
            _ => vec![Response::error("in use")],
        })
        .expect("a socket");
        let umount = |path: &str| request_umount(directory.path(), Path::new(path), false);
        assert!(umount("/elsewhere").expect("readable").is_none());
        assert!(matches!(
            umount("/mnt").expect("answered"),
            Some(UmountOutcome::Failed { error, .. }) if error == "in use"
        ));
    }

    #[test]
    fn socket_of_dead_process_is_removed() {
        let directory = private_directory();
        let socket = directory.path().join("1-2.sock");
        drop(UnixListener::bind(&socket).expect("a socket"));
        assert!(socket.exists());
        assert_eq!(list_statuses(directory.path()).expect("readable"), []);
        assert!(!socket.exists());
    }

    // Promises: trust-socket
    #[test]
    fn pidfd_is_opened_only_in_the_same_pid_namespace() {
        let own = PathBuf::from(socket_name());
        assert!(open_pidfd(&own, std::process::id()).is_some());
        let name = own.to_string_lossy();
        let (pid, _) = name.split_once('-').expect("a namespace");
        assert_eq!(pid, std::process::id().to_string());
        let other = PathBuf::from(format!("{pid}-1.sock"));
        assert!(open_pidfd(&other, std::process::id()).is_none());
    }

    /// Between bind(2) and listen(2), a socket looks stale.
    // Promises: trust-socket
    #[test]
    fn socket_being_created_is_not_removed_as_stale() {
        let directory = private_directory();
        let place = |round: u64| directory.path().join(round.to_string());
        let name = socket_name();
        let sockets: Vec<_> = (0..2_000).map(|round| place(round).join(&name)).collect();
        let reached = Arc::<AtomicUsize>::default();
        let followed = Arc::clone(&reached);
        let prober = Thread::spawn("prober", move || {
            while let Some(socket) = sockets.get(followed.load(Ordering::SeqCst)) {
                ask(socket);
            }
        });
        let prober = prober.expect("a thread");
        let answer = |_| vec![Response::Status(Box::new(Status::example()))];
        let remains = (0..2_000).all(|round| {
            let made = ControlSocket::serve(&place(round), answer);
            let remains = made.is_ok_and(|made| made.path.exists());
            reached.fetch_add(1, Ordering::SeqCst);
            remains
        });
        reached.store(usize::MAX, Ordering::SeqCst);
        prober.join();
        assert!(remains, "removed by who looked at it");
    }

    /// The directory disappears when the user who mounted it logs out.
    // Promises: trust-socket
    #[test]
    fn control_socket_stops_when_its_file_is_gone() {
        let directory = private_directory();
        let control = ControlSocket::serve(directory.path(), |_| {
            vec![Response::Status(Box::new(Status::example()))]
        });
        let control = control.expect("a socket");
        fs::remove_file(&control.path).expect("there");
        let (ended, end) = std::sync::mpsc::channel();
        let ending = Thread::spawn("ending", move || {
            drop(control);
            ended.send(()).expect("awaited");
        });
        let has_ended = end.recv_timeout(Duration::from_secs(20)).is_ok();
        if !has_ended {
            std::mem::forget(ending);
        }
        assert!(has_ended, "it waits for ever");
    }

    #[test]
    fn malformed_request_gets_an_error_and_serving_continues() {
        let directory = private_directory();
        let control = ControlSocket::serve(directory.path(), |_| {
            vec![Response::Status(Box::new(Status::example()))]
        });
        let control = control.expect("a socket");
        let stream = UnixStream::connect(&control.path).expect("listening");
        (&stream)
            .write_all(b"{\"verb\":\"dance\"}\n")
            .expect("read");
        let mut answer = String::new();
        (&stream).read_to_string(&mut answer).expect("answered");
        assert!(answer.starts_with("{\"error\":\"not a request"), "{answer}");
        assert_eq!(list_statuses(directory.path()).expect("readable").len(), 1);
    }

    #[test]
    fn process_that_accepts_no_connection_is_not_waited_for_ever() {
        let directory = private_directory();
        let path = directory.path().join("1.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        rustix::net::listen(&listener, 0).expect("a shorter queue");
        let connect = || connect_within(&path, Duration::from_millis(20));
        let waiting = std::iter::repeat_with(connect).take(3);
        let waiting: Vec<_> = waiting.collect();
        let refused = waiting.last().and_then(|last| last.as_ref().err());
        let refused = refused.map(io::Error::kind);
        assert_eq!(refused, Some(io::ErrorKind::WouldBlock), "{waiting:?}");
        drop(listener.accept().expect("one waits"));
        connect().expect("there is room");
    }

    // Promises: status-private
    #[test]
    fn directory_accessible_to_others_is_rejected() {
        let directory = private_directory();
        let open = directory.path().join("open");
        fs::create_dir(&open).expect("made");
        fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("set");
        assert!(
            ControlSocket::serve(&open, |_| vec![Response::Status(Box::new(
                Status::example()
            ))])
            .is_err()
        );
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).expect("made");
        assert!(list_statuses(&link).is_err());
        let missing = directory.path().join("missing");
        assert_eq!(list_statuses(&missing).expect("no mounts"), []);
    }

    /// Programs read these names. New ones may be added, but none may change or disappear.
    // Promises: status-json
    #[test]
    fn status_json_field_names_are_stable() {
        let status = Status {
            pid: 7,
            counters: BTreeMap::from([("scans".into(), 1)]),
            ..Status::example()
        };
        let text = serde_json::to_string(&status).expect("plain");
        let expected = concat!(
            r#"{"source":"http://host/a.tar","mountpoint":"/mnt","pid":7,"#,
            r#""since_unix_seconds":1000,"version":"3 bytes","tree":1,"entries":2,"#,
            r#""index":{"phase":"complete","scanned_bytes":7,"of_bytes":7},"#,
            r#""resident_bytes":20971520,"memory":{"budget_bytes":134217728,"#,
            r#""spans_bytes":41943040,"reads_bytes":5,"decoders_bytes":6,"#,
            r#""index_bytes":12345},"disk_cache":{"held_bytes":31457280,"#,
            r#""all_bytes":52428800,"limit_bytes":73400320},"#,
            r#""prefetch":{"what":"all","state":"running","#,
            r#""done_spans":3,"total_spans":7,"replayed_spans":1,"replay_spans":2},"#,
            r#""metrics":"http://127.0.0.1:9469/metrics","#,
            r#""counters":{"scans":1},"damaged_members":2,"damaged":["a/c: cut"],"notes":["stored"],"errors":["#,
            r#"{"last_unix_seconds":1000,"count":3,"path":"a/b","reason":"cut"}]}"#,
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn request_json_is_as_documented() {
        let request: Request = serde_json::from_str(r#"{"verb":"umount"}"#).expect("known");
        let umount = Request::Umount {
            force: false,
            device: None,
            mount_id: None,
        };
        assert_eq!(request, umount);
        let text = serde_json::to_string(&Request::Status).expect("plain");
        assert_eq!(text, r#"{"verb":"status"}"#);
    }
}
