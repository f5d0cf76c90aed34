//! Daemon: a server for the monitors that connect to its socket. It ends some time after its last mount.

mod socket;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Signal, getpid, kill_process};

use super::failure::Failure;
use super::link::Link;
use super::server::{FirstRequest, ServedMount, Server};
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::base::wait::wait_for;

pub use socket::DaemonSocket;

/// Interval of checks whether it is idle.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of checks whether a request still holds a mount that has ended.
const HOLDER_INTERVAL: Duration = Duration::from_millis(5);

/// Pause after a client that cannot be accepted.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A server for the monitors that connect to a socket.
#[derive(Debug)]
pub struct Daemon {
    server: Arc<Server>,
    socket: DaemonSocket,
    listener: OwnedFd,
    /// Device and inode of the socket's file.
    file_id: Option<(u64, u64)>,
    /// The conversations with clients.
    clients: Mutex<Vec<Thread<()>>>,
}

impl Daemon {
    /// A daemon that accepts clients from `listener`, the socket at `socket`.
    pub fn new(server: Arc<Server>, socket: DaemonSocket, listener: OwnedFd) -> Self {
        Self {
            file_id: socket.file_id(),
            server,
            socket,
            listener,
            clients: Mutex::default(),
        }
    }

    /// Serves clients until there was none for `idle_time`; for ever without one. Then no client reaches it any more.
    ///
    /// # Errors
    /// If the system cannot wait.
    pub fn run(&self, idle_time: Option<Duration>) -> io::Result<()> {
        let mut last_used = Instant::now();
        // Reports changes of the mounts of this namespace; see proc_pid_mountinfo(5).
        let table = File::open("/proc/self/mountinfo").ok();
        loop {
            let has_client = self.wait_for_client(table.as_ref())?;
            self.server.end_detached();
            self.server.end_abandoned();
            if has_client {
                if let Err(error) = self.accept() {
                    tracing::warn!(%error, "cannot serve a client");
                    std::thread::sleep(RETRY_DELAY);
                }
                last_used = Instant::now();
            }
            let is_used = self.has_clients();
            if is_used {
                last_used = Instant::now();
            }
            let is_idle = idle_time.is_some_and(|time| last_used.elapsed() >= time);
            // Without its socket, no client can come.
            let is_reachable = self.socket.file_id() == self.file_id;
            let ends = if is_reachable {
                is_idle && !is_used && self.socket.remove(self.listener.as_fd())
            } else {
                !is_used
            };
            if ends {
                return Ok(());
            }
        }
    }

    /// Waits for a client, for the end of a mount, or for [`POLL_INTERVAL`]. Whether there is a client.
    fn wait_for_client(&self, table: Option<&File>) -> io::Result<bool> {
        let ends = self.server.ends();
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        polled.extend(table.map(|table| PollFd::new(table, PollFlags::PRI)));
        polled.extend(ends.iter().map(|end| PollFd::new(end, PollFlags::IN)));
        wait_for(&mut polled, POLL_INTERVAL)?;
        Ok(polled.first().is_some_and(|fd| !fd.revents().is_empty()))
    }

    fn has_clients(&self) -> bool {
        let mut clients = self.clients.lock();
        clients.retain(|client| !client.is_finished());
        !clients.is_empty()
    }

    fn accept(&self) -> io::Result<()> {
        let link = socket::accept(self.listener.as_fd())?;
        let (server, socket) = (Arc::clone(&self.server), self.socket.clone());
        let client = Thread::spawn("tarfs-client", move || serve(&server, &socket, link))?;
        self.clients.lock().push(client);
        Ok(())
    }
}

/// Serves the mount that the monitor behind `link` asks for, until it has ended.
fn serve(server: &Arc<Server>, socket: &DaemonSocket, link: Link) {
    match socket::receive_client(&link) {
        Ok(Some(())) => {}
        Ok(None) => return,
        Err(error) => return tracing::warn!(%error, "a client was refused"),
    }
    match FirstRequest::receive(&link) {
        Ok(Some(FirstRequest::Retire(path, program))) => {
            retire(server, socket, &link, (&path, program.as_fd()));
        }
        Ok(Some(FirstRequest::Mount(request, _))) => {
            if request.spec.needs_own_process() {
                report(&link, Failure::new("this mount needs a process of its own"));
            } else {
                let link = Arc::new(link);
                if let Some(mount) = server.serve(&link, *request) {
                    mount.close();
                    drop_last(mount);
                }
                // With its monitor, all that the mount used is free.
                shutdown(&*link, Shutdown::Both).ok();
            }
        }
        Ok(None) => {}
        Err(failure) => report(&link, failure),
    }
}

/// Hands all mounts over to the daemon at `path`, of the file `program`, and ends this process as a kill does: nothing is
/// unmounted, and the kernel asks the next process again what this one has not answered.
fn retire(
    server: &Server,
    socket: &DaemonSocket,
    link: &Link,
    (path, program): (&Path, BorrowedFd<'_>),
) {
    let successor = DaemonSocket::at(path);
    if !socket.has_same_clients(&successor) {
        let text = "the other process serves for other users or namespaces";
        return report(link, Failure::new(text));
    }
    if let Err(failure) = server.name_successor(path, program) {
        return report(link, failure);
    }
    if successor != *socket {
        drop(fs::remove_file(socket.path()));
    }
    // The caller learns it from the end of this process.
    kill_process(getpid(), Signal::KILL).ok();
}

/// Drops `mount` after its other holders, which answer requests. That may take long, because it ends a scan.
fn drop_last(mut mount: Arc<ServedMount>) {
    while let Err(held) = Arc::try_unwrap(mount) {
        mount = held;
        std::thread::sleep(HOLDER_INTERVAL);
    }
}

fn report(link: &Link, failure: Failure) {
    tracing::debug!(%failure, "a request was refused");
    link.report_failure(failure);
}
