//! Requests to the processes of other mounts.

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::ioctl_fionbio;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::messages::{MAX_RESPONSE_BYTES, Request, Response};
use super::{IO_TIMEOUT, check_private_dir, send_line, socket_name};
use crate::base::wait::wait_for;
use crate::fuse::TopMount;
use crate::index::{Index, MemoryLimit, TooMuchMemory, format};
use crate::serve::failure::Failure;
use crate::serve::status::{Status, format_device};

/// Timeout for the statuses of all mounts together.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for a process to exit after its unmount.
const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for a monitor, after a forced unmount. It waits until no process uses the overlay.
const MONITOR_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Result of a request to unmount.
#[derive(Debug)]
pub enum UmountOutcome {
    /// The mount is gone and its process ended.
    ProcessEnded,
    /// The mount is gone, but its process has not ended.
    ProcessRemains {
        /// The process ID in its own PID namespace.
        pid: u32,
    },
    /// The mount is gone here, but a bind mount, an overlay or a newer mount namespace still uses it.
    InUseElsewhere {
        /// The process ID in its own PID namespace.
        pid: u32,
    },
    /// Nothing was unmounted, because another mount of the same tree is there, such as a bind mount.
    OtherMount {
        /// The process ID in its own PID namespace.
        pid: u32,
        /// Descriptors to wait for the end of its processes.
        processes: Vec<OwnedFd>,
    },
    /// It is still mounted.
    Failed {
        /// The reason.
        error: String,
        /// Advice.
        hint: Option<String>,
    },
}

/// Returns the status of each mount with a socket in `directory`, by mountpoint. Removes other sockets.
///
/// # Errors
/// If the directory cannot be read, or is not of this user alone.
pub fn list_statuses(directory: &Path) -> io::Result<Vec<Status>> {
    let answers = StatusRequests::send(directory)?;
    let mut statuses: Vec<_> = answers.map(|(_, status)| status).collect();
    statuses.sort_by(|one, other| one.mountpoint_bytes().cmp(other.mountpoint_bytes()));
    Ok(statuses)
}

/// Returns the status of the top mount on `mountpoint`, or of another mount of its file system, if it has a socket in
/// `directory`. Does not wait for others.
///
/// # Errors
/// As [`list_statuses`].
pub fn find_status(directory: &Path, mountpoint: &Path) -> io::Result<Option<Status>> {
    let top = crate::fuse::top_mount(mountpoint);
    let found = StatusRequests::send(directory)?.find_mount(mountpoint, &top);
    Ok(found.map(|(_, status)| status))
}

/// Requests for the statuses of all mounts, which are sent at once. Iterates over the answers as they arrive, each with
/// its socket.
pub(super) struct StatusRequests {
    pub(super) pending: Vec<(PathBuf, BufReader<UnixStream>)>,
    pub(super) deadline: Instant,
}

impl StatusRequests {
    /// Asks all processes with a socket in `directory`. Removes the sockets of processes that have ended.
    pub(super) fn send(directory: &Path) -> io::Result<Self> {
        let mut pending = Vec::new();
        for socket in list_sockets(directory)? {
            if let Some(stream) = ask(&socket) {
                pending.push((socket, stream));
            }
        }
        Ok(Self {
            pending,
            deadline: Instant::now() + STATUS_TIMEOUT,
        })
    }

    /// The status of the mount `top` on `mountpoint`, with its socket. Otherwise that of another mount of its file system.
    pub(super) fn find_mount(
        mut self,
        mountpoint: &Path,
        top: &io::Result<Option<TopMount>>,
    ) -> Option<(PathBuf, Status)> {
        let mut other: Option<(PathBuf, Status)> = None;
        // The mounts of a file system have one process.
        while other
            .as_ref()
            .is_none_or(|(socket, _)| self.pending.iter().any(|(asked, _)| asked == socket))
        {
            let Some(answer) = self.next() else {
                break;
            };
            if !answer.1.matches_top_mount(mountpoint, top) {
                continue;
            }
            if !answer.1.is_another_mount(top) {
                return Some(answer);
            }
            other.get_or_insert(answer);
        }
        other
    }

    /// Waits until one of the processes answers; `None` if the rest does not answer in time.
    fn wait(&self) -> Option<usize> {
        let is_buffered = |(_, stream): &(_, BufReader<_>)| !stream.buffer().is_empty();
        if let Some(buffered) = self.pending.iter().position(is_buffered) {
            return Some(buffered);
        }
        let streams = self.pending.iter().map(|(_, stream)| stream.get_ref());
        let mut polled: Vec<_> = streams.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        if polled.is_empty() {
            return None;
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if !wait_for(&mut polled, left).ok()? {
            for (socket, _) in &self.pending {
                tracing::warn!(
                    "{}: the process of this mount does not answer",
                    socket.display()
                );
            }
        }
        polled.iter().position(|fd| !fd.revents().is_empty())
    }
}

impl Iterator for StatusRequests {
    type Item = (PathBuf, Status);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(number) = self.wait() {
            let (socket, mut stream) = self.pending.swap_remove(number);
            match read_response(&mut stream) {
                Ok(Some(Response::Status(status))) => {
                    // It may serve more mounts.
                    self.pending.push((socket.clone(), stream));
                    return Some((socket, *status));
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, socket = %socket.display(), "no status"),
            }
        }
        None
    }
}

/// Asks the process of the top mount on `mountpoint` to unmount, and waits. `None` without a socket.
///
/// # Errors
/// As [`list_statuses`], or if the process stops answering.
pub fn request_umount(
    directory: &Path,
    mountpoint: &Path,
    force: bool,
) -> io::Result<Option<UmountOutcome>> {
    let top = crate::fuse::top_mount(mountpoint);
    let target = StatusRequests::send(directory)?.find_mount(mountpoint, &top);
    let Some((socket, status)) = target else {
        return Ok(None);
    };
    // A daemon goes on, and is not the process that the mount leaves.
    let server = (!status.daemon).then_some(status.pid);
    let pid = server.or(status.monitor).unwrap_or(status.pid);
    let open = |pid: Option<u32>| open_pidfd(&socket, pid?);
    let (server, monitor) = (open(server), open(status.monitor));
    if status.is_another_mount(&top) {
        let processes = [server, monitor].into_iter().flatten().collect();
        return Ok(Some(UmountOutcome::OtherMount { pid, processes }));
    }
    let message = Request::Umount {
        force,
        device: status.device,
        mount_id: status.mount_id,
    };
    Ok(match send_request(&socket, &message)? {
        Some(Response::Unmounted {
            elsewhere: true, ..
        }) => Some(UmountOutcome::InUseElsewhere { pid }),
        Some(Response::Unmounted { .. }) => {
            let has_ended = wait_for_exit(server.as_slice(), PROCESS_EXIT_TIMEOUT)?;
            let monitor_timeout = if force {
                MONITOR_EXIT_TIMEOUT
            } else {
                PROCESS_EXIT_TIMEOUT
            };
            let is_kept = has_ended && !wait_for_exit(monitor.as_slice(), monitor_timeout)?;
            Some(if !has_ended || is_kept && !force {
                UmountOutcome::ProcessRemains { pid }
            } else {
                UmountOutcome::ProcessEnded
            })
        }
        Some(Response::Error { error, hint }) => Some(UmountOutcome::Failed { error, hint }),
        Some(_) | None => None,
    })
}

/// Asks the process that serves the file system `device` for its index. `None` without a socket, or if the mount
/// shows something else than the entries of a complete index.
///
/// # Errors
/// As [`list_statuses`], if the index is larger than `limit`, or invalid.
pub fn request_index(
    directory: &Path,
    device: (u32, u32),
    limit: &MemoryLimit,
) -> Result<Option<Index>, Failure> {
    let failed = |error: io::Error| Failure::of(&error);
    let device = format_device(device);
    let mut answers = StatusRequests::send(directory).map_err(failed)?;
    let Some((socket, _)) = answers.find(|(_, status)| status.device.as_ref() == Some(&device))
    else {
        return Ok(None);
    };
    let message = Request::Index {
        device: Some(device),
    };
    let stream = connect_within(&socket, IO_TIMEOUT).and_then(|stream| request(stream, &message));
    let mut stream = stream.map_err(failed)?;
    let response = read_response(&mut stream).map_err(failed)?;
    let Some(Response::IndexFollows { index_bytes }) = response else {
        return Ok(None);
    };
    let limit = limit.bytes();
    if index_bytes > limit {
        return Err(Failure::of(&TooMuchMemory { limit }));
    }
    let index = format::read(stream, index_bytes);
    Ok(Some(index.map_err(|error| Failure::of(&error))?))
}

pub(super) fn list_sockets(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match check_private_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        checked => checked?,
    }
    let mut sockets = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "sock")
        {
            sockets.push(path);
        }
    }
    Ok(sockets)
}

/// Asks for a status; `None` if no process listens.
pub(super) fn ask(socket: &Path) -> Option<BufReader<UnixStream>> {
    let asked = connect_at_once(socket, SocketType::STREAM);
    let asked = asked.and_then(|stream| request(stream.into(), &Request::Status));
    let asked = asked.inspect_err(|error| {
        if error.kind() == ErrorKind::ConnectionRefused {
            // The process died without removing its socket.
            drop(fs::remove_file(socket));
        }
        tracing::debug!(%error, socket = %socket.display(), "no status");
    });
    asked.ok()
}

pub(super) fn send_request(socket: &Path, message: &Request) -> io::Result<Option<Response>> {
    read_response(&mut request(connect_within(socket, IO_TIMEOUT)?, message)?)
}

pub(super) fn request(stream: UnixStream, message: &Request) -> io::Result<BufReader<UnixStream>> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    send_line(&stream, message)?;
    Ok(BufReader::new(stream))
}

/// Connects to `path` without waiting for a process that accepts no connections.
pub(in crate::serve) fn connect_at_once(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

/// Connects to `path`. Waits up to `timeout` for a process that has too many connections.
pub(super) fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Reads the next response; `None` after the last one.
pub(super) fn read_response(stream: &mut impl BufRead) -> io::Result<Option<Response>> {
    let mut line = String::new();
    if stream.take(MAX_RESPONSE_BYTES).read_line(&mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line)?))
}

/// Opens the process behind a socket, to wait for its end. `None` if it is gone or of another PID namespace.
pub(super) fn open_pidfd(socket: &Path, pid: u32) -> Option<OwnedFd> {
    let namespace = |name: &str| Some(name.split_once('-')?.1.to_owned());
    let name = socket.file_name()?.to_str()?;
    if namespace(name) != namespace(&socket_name()) {
        return None;
    }
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Waits until all `processes` have ended; false after the timeout `time`.
///
/// # Errors
/// If the system cannot wait.
pub fn wait_for_exit(processes: &[OwnedFd], time: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + time;
    for process in processes {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut ends = [PollFd::new(process, PollFlags::IN)];
        if !wait_for(&mut ends, left)? {
            return Ok(false);
        }
    }
    Ok(true)
}
