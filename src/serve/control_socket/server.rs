//! The control socket of this process's mount.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};

use super::messages::{Request, Response};
use super::{IO_TIMEOUT, NEW_EXTENSION, create_private_dir, send_line, socket_name};
use crate::base::publish::publish_from;
use crate::base::thread::Thread;
use crate::index::{LazyIndex, format};

/// Maximum length of a request, far above the longest that exists.
const MAX_REQUEST_BYTES: u64 = 4096;
/// Maximum number of connections that are answered at the same time.
const MAX_CONNECTIONS: usize = 16;
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Control socket of this process's mount; removed when dropped.
#[derive(Debug)]
pub struct ControlSocket {
    pub(super) path: PathBuf,
    listener: Arc<UnixListener>,
    is_stopping: Arc<AtomicBool>,
    thread: Option<Thread<()>>,
}

impl ControlSocket {
    /// Listens in `directory`, which it creates if needed, and answers each connection on a thread of its own, up to a
    /// limit.
    ///
    /// # Errors
    /// If the directory is not of this user alone, or the socket cannot be made.
    pub fn serve(
        directory: &Path,
        handle_request: impl Fn(Request) -> Vec<Response> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        create_private_dir(directory)?;
        let path = directory.join(socket_name());
        // A client removes a socket without a listener as stale. So it gets its name only once it listens.
        let listener = publish_from(&path.with_extension(NEW_EXTENSION), &path, |temporary| {
            let listener = UnixListener::bind(temporary)?;
            fs::set_permissions(temporary, Permissions::from_mode(0o600))?;
            Ok(Arc::new(listener))
        })?;
        let is_stopping = Arc::new(AtomicBool::new(false));
        let thread = Thread::spawn("tarfs-control", {
            let (listener, is_stopping) = (Arc::clone(&listener), Arc::clone(&is_stopping));
            move || accept_loop(&listener, &is_stopping, &Arc::new(handle_request))
        })?;
        Ok(Self {
            path,
            listener,
            is_stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        // Wakes the thread even if the socket's file is gone, for example with the user's session.
        if let Err(error) = shutdown(&self.listener, Shutdown::Both) {
            tracing::warn!(%error, "the control socket stays open");
        }
        drop(self.thread.take());
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, "the control socket is gone already");
        }
    }
}

fn accept_loop(
    listener: &UnixListener,
    is_stopping: &AtomicBool,
    handle_request: &Arc<impl Fn(Request) -> Vec<Response> + Send + Sync + 'static>,
) {
    // Dropping them waits for their clients, which have a timeout.
    let mut threads: Vec<Thread<()>> = Vec::new();
    for stream in listener.incoming() {
        if is_stopping.load(Ordering::SeqCst) {
            return;
        }
        threads.retain(|thread| !thread.is_finished());
        let answered = match stream {
            Ok(stream) if threads.len() < MAX_CONNECTIONS => {
                let handle_request = Arc::clone(handle_request);
                let answer = move || log_failure(handle_connection(&stream, &*handle_request));
                Thread::spawn("tarfs-request", answer).map(|thread| threads.push(thread))
            }
            Ok(stream) => handle_connection(&stream, &**handle_request),
            Err(error) => {
                // Without file descriptors, the client remains in the queue, so a retry at once would spin.
                std::thread::sleep(ACCEPT_RETRY_DELAY);
                Err(error)
            }
        };
        log_failure(answered);
    }
}

fn log_failure(answered: io::Result<()>) {
    if let Err(error) = answered {
        tracing::debug!(%error, "a request failed");
    }
}

fn handle_connection(
    stream: &UnixStream,
    handle_request: &impl Fn(Request) -> Vec<Response>,
) -> io::Result<()> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REQUEST_BYTES)).read_line(&mut line)?;
    let responses = match serde_json::from_str(&line) {
        Ok(request) => handle_request(request),
        Err(error) => vec![Response::error(&format!("not a request: {error}"))],
    };
    for response in responses {
        match response {
            Response::Index(index) => send_index(stream, &index)?,
            Response::Span(bytes) => {
                let span_bytes = bytes.len() as u64;
                send_line(stream, &Response::SpanFollows { span_bytes })?;
                let mut stream = stream;
                stream.write_all(&bytes)?;
            }
            Response::Status(mut status) => {
                status.truncate_texts();
                send_line(stream, &Response::Status(status))?;
            }
            response => send_line(stream, &response)?,
        }
    }
    Ok(())
}

fn send_index(stream: &UnixStream, index: &LazyIndex) -> io::Result<()> {
    let locator = &index.origin().locator;
    let written = index.read(|index| {
        let index_bytes = format::len(index, locator, b"");
        send_line(stream, &Response::IndexFollows { index_bytes })?;
        format::write(index, locator, b"", stream)
    });
    written.map_err(io::Error::other)?
}
