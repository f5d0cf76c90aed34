//! Peers of a command: the processes that serve this user's mounts.

use std::io::{self, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::client::{connect_at_once, list_sockets, read_response, request};
use super::messages::{Request, Response};
use crate::archive::{PeerSpan, Peers};
use crate::index::{Index, MemoryLimit, format};
use crate::serve::runtime_dir::runtime_dirs;

/// Interval of questions whether a scan has ended.
const SCAN_INTERVAL: Duration = Duration::from_millis(50);

/// Timeout for a scan to make progress.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// The processes of this user's mounts.
#[derive(Clone, Debug)]
pub struct SocketPeers {
    directories: Vec<PathBuf>,
}

impl SocketPeers {
    /// Those of this user's mounts.
    pub fn of_user() -> Self {
        Self {
            directories: runtime_dirs(),
        }
    }

    fn sockets(&self) -> impl Iterator<Item = PathBuf> {
        let lists = self
            .directories
            .iter()
            .map(|directory| list_sockets(directory));
        lists.flat_map(Result::unwrap_or_default)
    }
}

impl Peers for SocketPeers {
    fn index(&self, name: &str, limit: &MemoryLimit) -> Option<Index> {
        let wanted = Request::Archive {
            name: name.to_owned(),
        };
        self.sockets().find_map(|socket| {
            let found = request_index(&socket, &wanted, limit);
            found
                .inspect_err(|error| tracing::debug!(%error, "no index of another process"))
                .ok()?
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
            let found = found.inspect_err(|error| {
                tracing::debug!(%error, "no block of another process");
            });
            match found {
                Ok(bytes @ PeerSpan::Bytes(_)) => return bytes,
                Ok(PeerSpan::Absent) => best = PeerSpan::Absent,
                Ok(PeerSpan::Unknown) | Err(_) => {}
            }
        }
        best
    }
}

fn ask(socket: &Path, wanted: &Request) -> io::Result<(Option<Response>, BufReader<UnixStream>)> {
    let mut stream = request(connect_at_once(socket)?, wanted)?;
    Ok((read_response(&mut stream)?, stream))
}

/// The index that the process behind `socket` has, or will have after its scan.
fn request_index(
    socket: &Path,
    wanted: &Request,
    limit: &MemoryLimit,
) -> io::Result<Option<Index>> {
    let (mut seen, mut changed) = (0, Instant::now());
    loop {
        let (response, stream) = ask(socket, wanted)?;
        match response {
            Some(Response::IndexFollows { index_bytes }) if index_bytes <= limit.bytes() => {
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
            let mut bytes = Vec::new();
            stream.take(span_bytes).read_to_end(&mut bytes)?;
            Ok(PeerSpan::Bytes(bytes))
        }
        Some(Response::SpanFollows { .. } | Response::SpanMissing { .. }) => Ok(PeerSpan::Absent),
        _ => Ok(PeerSpan::Unknown),
    }
}
