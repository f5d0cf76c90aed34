//! Peers of a command: the processes that serve this user's mounts.

use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::SocketType;

use super::client::{connect_at_once, list_sockets, read_response, request};
use super::messages::{Request, Response};
use crate::archive::{PeerSpan, Peers};
use crate::base::sync::Mutex;
use crate::index::{Index, MemoryLimit, format};
use crate::serve::runtime_dir::runtime_dirs;

/// Interval of questions whether a scan has ended.
const SCAN_INTERVAL: Duration = Duration::from_millis(50);

/// Timeout for a scan to make progress.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for an answer. A process that is stopped is asked once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes of an index that must come each second.
const MIN_INDEX_SPEED: u64 = 10 << 20;

/// The processes of this user's mounts.
#[derive(Debug)]
pub struct SocketPeers {
    directories: Vec<PathBuf>,
    /// Sockets of processes that have not answered.
    silent: Mutex<Vec<PathBuf>>,
}

impl SocketPeers {
    /// Those of this user's mounts.
    pub fn of_user() -> Self {
        Self {
            directories: runtime_dirs(),
            silent: Mutex::default(),
        }
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let silent = self.silent.lock().clone();
        let lists = self
            .directories
            .iter()
            .map(|directory| list_sockets(directory));
        let all = lists.flat_map(Result::unwrap_or_default);
        all.filter(|socket| !silent.contains(socket)).collect()
    }

    /// The result of a question to the process behind `socket`; `None` if it does not answer.
    fn answer<T>(&self, socket: &Path, result: io::Result<T>) -> Option<T> {
        if let Err(error) = &result {
            tracing::debug!(%error, socket = %socket.display(), "another process does not answer");
            if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
                self.silent.lock().push(socket.to_owned());
            }
        }
        result.ok()
    }
}

impl Peers for SocketPeers {
    fn index(&self, name: &str, limit: &MemoryLimit) -> Option<Index> {
        let wanted = Request::Archive {
            name: name.to_owned(),
        };
        let mut sockets = self.sockets().into_iter();
        sockets.find_map(|socket| {
            let found = request_index(&socket, &wanted, limit);
            self.answer(&socket, found)?
        })
    }

    fn span(&self, name: &str, number: u32, max_bytes: u64) -> PeerSpan {
        let wanted = Request::Span {
            name: name.to_owned(),
            number,
        };
        let mut best = PeerSpan::Unknown;
        for socket in self.sockets() {
            let found = request_span(&socket, &wanted, max_bytes);
            match self.answer(&socket, found) {
                Some(bytes @ PeerSpan::Bytes(_)) => return bytes,
                Some(PeerSpan::Absent) => best = PeerSpan::Absent,
                Some(PeerSpan::Unknown) | None => {}
            }
        }
        best
    }
}

/// An answer that must have come by a deadline, however slow it trickles.
struct TimedAnswer {
    stream: UnixStream,
    deadline: Instant,
}

impl Read for TimedAnswer {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

fn ask(socket: &Path, wanted: &Request) -> io::Result<(Option<Response>, BufReader<TimedAnswer>)> {
    let stream = connect_at_once(socket, SocketType::STREAM)?;
    let mut answer = BufReader::new(TimedAnswer {
        // Nothing is read before.
        stream: request(stream.into(), wanted)?.into_inner(),
        deadline: Instant::now() + ANSWER_TIMEOUT,
    });
    Ok((read_response(&mut answer)?, answer))
}

/// The index that the process behind `socket` has, or will have after its scan.
fn request_index(
    socket: &Path,
    wanted: &Request,
    limit: &MemoryLimit,
) -> io::Result<Option<Index>> {
    let (mut seen, mut changed) = (0, Instant::now());
    loop {
        let (response, mut stream) = ask(socket, wanted)?;
        match response {
            Some(Response::IndexFollows { index_bytes }) if index_bytes <= limit.bytes() => {
                stream.get_mut().deadline += Duration::from_secs(index_bytes / MIN_INDEX_SPEED);
                return format::read(stream, index_bytes)
                    .map(Some)
                    .map_err(io::Error::other);
            }
            Some(Response::Scanning { scanned_bytes }) => {
                if scanned_bytes != seen {
                    (seen, changed) = (scanned_bytes, Instant::now());
                }
                if changed.elapsed() > SCAN_TIMEOUT {
                    return Ok(None);
                }
                std::thread::sleep(SCAN_INTERVAL);
            }
            _ => return Ok(None),
        }
    }
}

/// The block that the process behind `socket` has.
fn request_span(socket: &Path, wanted: &Request, max_bytes: u64) -> io::Result<PeerSpan> {
    let (response, stream) = ask(socket, wanted)?;
    match response {
        Some(Response::SpanFollows { span_bytes }) if span_bytes <= max_bytes => {
            let mut bytes = Vec::with_capacity(usize::try_from(span_bytes).unwrap_or_default());
            stream.take(span_bytes).read_to_end(&mut bytes)?;
            Ok(PeerSpan::Bytes(bytes))
        }
        Some(Response::SpanFollows { .. } | Response::SpanMissing { .. }) => Ok(PeerSpan::Absent),
        _ => Ok(PeerSpan::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::base::thread::Thread;

    // Promises: shared-commands
    #[test]
    fn answer_that_trickles_ends_at_the_deadline() {
        let (stream, other) = UnixStream::pair().expect("a pair");
        let _trickle = Thread::spawn("trickle", move || {
            while (&other).write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let deadline = Instant::now() + Duration::from_millis(50);
        let read = TimedAnswer { stream, deadline }.read_to_end(&mut Vec::new());
        let kind = read.expect_err("no end").kind();
        assert!(
            matches!(kind, ErrorKind::TimedOut | ErrorKind::WouldBlock),
            "{kind}"
        );
    }

    #[test]
    fn process_that_does_not_answer_is_asked_once() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).expect("ours");
        let listener = UnixListener::bind(directory.path().join("1.sock")).expect("a socket");
        let peers = SocketPeers {
            directories: vec![directory.path().to_owned()],
            silent: Mutex::default(),
        };
        for number in 0..3 {
            assert_eq!(peers.span("a", number, 10), PeerSpan::Unknown);
        }
        assert!(peers.index("a", &MemoryLimit::default()).is_none());
        listener.set_nonblocking(true).expect("open");
        let asked = std::iter::from_fn(|| listener.accept().ok()).count();
        assert_eq!(asked, 1);
    }
}
