//! The control socket: other processes of the same user send requests to a mount.
//!
//! One directory holds a socket for each mount, named by process ID and PID namespace
//! (`4711-4026531836.sock`), because containers may share the directory. A connection carries one request and
//! one response, each a line of JSON. The response to `{"verb":"status"}` is a [`Status`]. That to
//! `{"verb":"umount","force":false}` is `{"unmounted":"/mnt"}` or `{"error":…,"hint":…}`. That to
//! `{"verb":"index"}` is `{"index_bytes":4096}` and an index file of so many bytes, or `{"error":…}`.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use serde::{Deserialize, Serialize};

use tarfs::archive::{DiskCacheUsage, MemoryUse};
use tarfs::fuse::{DirectoryStatus, TopMount};
use tarfs::index::{Index, LazyIndex, MemoryLimit, TooMuchMemory, format};
use tarfs::internal::publish::publish;
use tarfs::internal::thread::Thread;

/// Maximum length of a request, far above the longest that exists.
const MAX_REQUEST_BYTES: u64 = 4096;
/// Maximum length of a response. A status with all its errors takes a tenth of it.
const MAX_RESPONSE_BYTES: u64 = 16 << 20;

/// Maximum length of a text in a status, in bytes. All texts together stay below [`MAX_RESPONSE_BYTES`].
const MAX_TEXT_BYTES: usize = 2048;
const IO_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the statuses of all mounts together.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Timeout for a process to exit after its unmount.
const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "lowercase")]
pub(crate) enum Request {
    Status,
    Umount {
        /// Even if the mount is in use.
        #[serde(default)]
        force: bool,
    },
    Index,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Response {
    Status(Box<Status>),
    /// An index file follows, of this length.
    IndexFollows {
        index_bytes: u64,
    },
    /// To send as the two parts of [`Self::IndexFollows`].
    #[serde(skip)]
    Index(LazyIndex),
    /// The mount is gone, and its process ends.
    Unmounted {
        unmounted: String,
        /// A bind mount, an overlay or another mount namespace still uses it, so its process continues.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        elsewhere: bool,
    },
    Error {
        error: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

#[derive(Debug)]
pub(crate) enum UmountOutcome {
    /// The mount is gone and its process ended.
    ProcessEnded,
    /// The mount is gone, but its process has not ended.
    ProcessRemains {
        /// The process ID in its own PID namespace.
        pid: u32,
    },
    /// The mount is gone here, but a bind mount, an overlay or a newer mount namespace still uses it.
    InUseElsewhere {
        pid: u32,
    },
    /// Nothing was unmounted, because another mount of the same tree is there, such as a bind mount.
    OtherMount {
        pid: u32,
        /// A descriptor to wait for the end of the process, if available.
        process: Option<OwnedFd>,
    },
    Failed {
        error: String,
        hint: Option<String>,
    },
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// The archive's location, without secrets.
    pub source: String,
    /// The layers, from the bottom, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
    /// The mountpoint, with U+FFFD in the place of bytes that are not UTF-8.
    pub mountpoint: String,
    /// Its bytes, only if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mountpoint_bytes: Option<Vec<u8>>,
    /// Device number as in `/proc/self/mountinfo` (`0:45`), because two mounts may have the same path, in two
    /// namespaces or after a rename.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// ID in `/proc/self/mountinfo` of the mount that a request to unmount removes. A bind mount of it has
    /// the same device and another ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_id: Option<u32>,
    /// Whether nothing is mounted there any more, although the mount is still in use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detached: bool,
    pub pid: u32,
    pub since_unix_seconds: u64,
    pub version: String,
    pub entries: u64,
    pub index: IndexState,
    pub resident_bytes: u64,
    pub memory: MemoryUse,
    /// Use of disk by decoded data; `None` without a disk cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_cache: Option<DiskCacheUsage>,
    #[serde(default)]
    pub prefetch: PrefetchStatus,
    /// Numbers of archives, if SOURCE is a directory of them. The index is then that of an empty tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyProgress>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable: Option<OverlayStatus>,
    /// URL of these figures for Prometheus, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<String>,
    /// Counters of the work done so far. Each name contains its unit.
    pub counters: BTreeMap<String, u64>,
    /// Number of members that are damaged or missing from the tree.
    #[serde(default)]
    pub damaged_members: u64,
    /// The first of these members, one per line.
    #[serde(default)]
    pub damaged: Vec<String>,
    /// Notes about degraded operation, as text.
    pub notes: Vec<String>,
    /// The last failed reads, oldest first.
    pub errors: Vec<FailedRead>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct IndexState {
    pub phase: Phase,
    /// Compressed bytes that were scanned; 0 for a saved index.
    pub scanned_bytes: u64,
    /// Compressed bytes of the archive, if the source knows its length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_bytes: Option<u64>,
    /// Reason why the index stays incomplete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    Scanning,
    Complete,
    Failed,
}

#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub(crate) struct PrefetchStatus {
    /// `none`, `ahead` or `all`, as in `--prefetch`.
    pub what: String,
    /// State of `all`: `off` (not requested), `running`, `complete` (all is cached), `full` (no space for
    /// more) or `incomplete` (some parts could not be decoded).
    pub state: String,
    /// Spans that `all` has decoded or found in the cache.
    pub done_spans: u64,
    pub total_spans: u64,
    /// Spans of the profile that were decoded or found in the cache.
    pub replayed_spans: u64,
    pub replay_spans: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct CopyProgress {
    pub directory: String,
    /// `waiting` for the index, `writing`, `retrying`, `complete`, `incomplete` or `stopped`.
    pub state: String,
    /// Complete regular files.
    pub files: u64,
    pub total_files: u64,
    /// Stored bytes of complete files.
    pub bytes: u64,
    pub total_bytes: u64,
    /// Entries that could not be written, or that another process has changed.
    pub failures: u64,
}

/// Location of the files that are written to a mount.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct OverlayStatus {
    /// Directory with new and changed files.
    pub upper: String,
    /// Whether it is removed with the mount.
    pub is_temporary: bool,
    /// `overlayfs` or `fuse-overlayfs`.
    pub by: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct FailedRead {
    /// Time of the last failure, in seconds since 1970.
    pub last_unix_seconds: u64,
    /// Number of failures in a row.
    pub count: u64,
    pub path: String,
    pub reason: String,
}

/// Control socket of this process's mount; removed when dropped.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    path: PathBuf,
    listener: Arc<UnixListener>,
    is_stopping: Arc<AtomicBool>,
    thread: Option<Thread<()>>,
}

impl ControlSocket {
    /// Listens in `directory`, which it creates if needed, and answers one connection at a time on a thread.
    pub(crate) fn serve(
        directory: &Path,
        handle_request: impl FnMut(Request) -> Response + Send + 'static,
    ) -> io::Result<Self> {
        create_private_dir(directory)?;
        let path = directory.join(socket_name());
        // A client removes a socket without a listener as stale. So it gets its name only once it listens.
        let listener = publish(&path, |temporary| {
            let listener = UnixListener::bind(temporary)?;
            fs::set_permissions(temporary, Permissions::from_mode(0o600))?;
            Ok(Arc::new(listener))
        })?;
        let is_stopping = Arc::new(AtomicBool::new(false));
        let thread = Thread::spawn("tarfs-control", {
            let (listener, is_stopping) = (Arc::clone(&listener), Arc::clone(&is_stopping));
            move || accept_loop(&listener, &is_stopping, handle_request)
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
    mut handle_request: impl FnMut(Request) -> Response,
) {
    for stream in listener.incoming() {
        if is_stopping.load(Ordering::SeqCst) {
            return;
        }
        let answered = match stream {
            Ok(stream) => handle_connection(&stream, &mut handle_request),
            Err(error) => {
                // Without file descriptors, the client remains in the queue, so a retry at once would spin.
                std::thread::sleep(ACCEPT_RETRY_DELAY);
                Err(error)
            }
        };
        if let Err(error) = answered {
            tracing::debug!(%error, "a request failed");
        }
    }
}

fn handle_connection(
    stream: &UnixStream,
    handle_request: &mut impl FnMut(Request) -> Response,
) -> io::Result<()> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REQUEST_BYTES)).read_line(&mut line)?;
    let mut response = match serde_json::from_str(&line) {
        Ok(request) => handle_request(request),
        Err(error) => Response::Error {
            error: format!("not a request: {error}"),
            hint: None,
        },
    };
    if let Response::Status(status) = &mut response {
        status.truncate_texts();
    }
    match response {
        Response::Index(index) => send_index(stream, &index),
        response => send_line(stream, &response),
    }
}

fn send_index(stream: &UnixStream, index: &LazyIndex) -> io::Result<()> {
    let locator = &index.origin().locator;
    let written = index.read(|index| {
        let index_bytes = format::len(index, locator);
        send_line(stream, &Response::IndexFollows { index_bytes })?;
        format::write(index, locator, stream)
    });
    written.map_err(io::Error::other)?
}

fn send_line(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

pub(crate) fn create_private_dir(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => check_private_dir(directory),
    }
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

/// Returns the status of each mount with a socket in `directory`, by mountpoint. Removes other sockets.
pub(crate) fn list_statuses(directory: &Path) -> io::Result<Vec<Status>> {
    let answers = StatusRequests::send(directory)?;
    let mut statuses: Vec<_> = answers.map(|(_, status)| status).collect();
    statuses.sort_by(|one, other| one.mountpoint_bytes().cmp(other.mountpoint_bytes()));
    Ok(statuses)
}

/// Returns the first status that is `wanted` of the mounts with a socket in `directory`. Does not wait for the others.
pub(crate) fn find_status(
    directory: &Path,
    wanted: impl Fn(&Status) -> bool,
) -> io::Result<Option<Status>> {
    let mut answers = StatusRequests::send(directory)?;
    let found = answers.find(|(_, status)| wanted(status));
    Ok(found.map(|(_, status)| status))
}

/// Requests for the statuses of all mounts, which are sent at once. Iterates over the answers as they arrive, each with
/// its socket.
struct StatusRequests {
    pending: Vec<(PathBuf, BufReader<UnixStream>)>,
    deadline: Instant,
}

impl StatusRequests {
    /// Asks all processes with a socket in `directory`. Removes the sockets of processes that have ended.
    fn send(directory: &Path) -> io::Result<Self> {
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

    /// Waits until one of the processes answers; `None` if the rest does not answer in time.
    fn wait(&self) -> Option<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok()?;
        let streams = self.pending.iter().map(|(_, stream)| stream.get_ref());
        let mut polled: Vec<_> = streams.map(|it| PollFd::new(it, PollFlags::IN)).collect();
        if polled.is_empty() {
            return None;
        }
        let count = retry_on_intr(|| poll(&mut polled, Some(&left))).ok()?;
        if count == 0 {
            for (socket, _) in &self.pending {
                tracing::warn!(
                    "{}: the process of this mount does not answer",
                    socket.display()
                );
            }
        }
        polled.iter().position(|it| !it.revents().is_empty())
    }
}

impl Iterator for StatusRequests {
    type Item = (PathBuf, Status);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(number) = self.wait() {
            let (socket, mut stream) = self.pending.swap_remove(number);
            match read_response(&mut stream) {
                Ok(Response::Status(status)) => return Some((socket, *status)),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, socket = %socket.display(), "no status"),
            }
        }
        None
    }
}

impl Status {
    /// Truncates texts that an archive or a server can make long.
    fn truncate_texts(&mut self) {
        truncate_text(&mut self.source);
        truncate_text(&mut self.version);
        self.index.failure.iter_mut().for_each(truncate_text);
        self.layers.iter_mut().for_each(truncate_text);
        self.damaged.iter_mut().for_each(truncate_text);
        self.notes.iter_mut().for_each(truncate_text);
        for error in &mut self.errors {
            truncate_text(&mut error.path);
            truncate_text(&mut error.reason);
        }
    }

    /// The path of the mountpoint.
    pub(crate) fn mountpoint_bytes(&self) -> &[u8] {
        let bytes = self.mountpoint_bytes.as_deref();
        bytes.unwrap_or(self.mountpoint.as_bytes())
    }

    /// Whether this mount is on `mountpoint` for this process. Without a mount table, compares the paths.
    pub(crate) fn is_mounted_on(&self, mountpoint: &Path) -> bool {
        self.matches_top_mount(mountpoint, &tarfs::fuse::top_mount(mountpoint))
    }

    fn matches_top_mount(&self, mountpoint: &Path, top: &io::Result<Option<TopMount>>) -> bool {
        match (&self.device, top) {
            (Some(device), Ok(top)) => top
                .as_ref()
                .is_some_and(|top| *device == format_device(top.device)),
            _ => self.mountpoint_bytes() == mountpoint.as_os_str().as_bytes(),
        }
    }

    /// Whether `top` is another mount of the same tree, such as a bind mount.
    fn is_another_mount(&self, top: &io::Result<Option<TopMount>>) -> bool {
        match top {
            Ok(Some(top)) => self.device.is_some() && self.mount_id != Some(top.id),
            _ => false,
        }
    }
}

fn truncate_text(text: &mut String) {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
}

/// Formats a device number as the kernel's mount table does.
pub(crate) fn format_device((major, minor): (u32, u32)) -> String {
    format!("{major}:{minor}")
}

/// Asks the process of the top mount on `mountpoint` to unmount, and waits. `None` without a socket.
pub(crate) fn request_umount(
    directory: &Path,
    mountpoint: &Path,
    force: bool,
) -> io::Result<Option<UmountOutcome>> {
    let top = tarfs::fuse::top_mount(mountpoint);
    let mut answers = StatusRequests::send(directory)?;
    let target = answers.find(|(_, status)| status.matches_top_mount(mountpoint, &top));
    let Some((socket, status)) = target else {
        return Ok(None);
    };
    let (pid, process) = (status.pid, open_pidfd(&socket, status.pid));
    if status.is_another_mount(&top) {
        return Ok(Some(UmountOutcome::OtherMount { pid, process }));
    }
    Ok(match send_request(&socket, Request::Umount { force })? {
        Response::Unmounted {
            elsewhere: true, ..
        } => Some(UmountOutcome::InUseElsewhere { pid }),
        Response::Unmounted { .. } => {
            let has_ended = process.map_or(Ok(true), |process| {
                wait_for_exit(&process, PROCESS_EXIT_TIMEOUT)
            })?;
            Some(if has_ended {
                UmountOutcome::ProcessEnded
            } else {
                UmountOutcome::ProcessRemains { pid }
            })
        }
        Response::Error { error, hint } => Some(UmountOutcome::Failed { error, hint }),
        Response::Status(_) | Response::Index(_) | Response::IndexFollows { .. } => None,
    })
}

/// Asks the process that serves the file system `device` for its index. `None` without a socket, or if the mount
/// shows something else than the entries of a complete index.
pub(crate) fn request_index(
    directory: &Path,
    device: (u32, u32),
    limit: &MemoryLimit,
) -> anyhow::Result<Option<Index>> {
    let device = format_device(device);
    let mut answers = StatusRequests::send(directory)?;
    let Some((socket, _)) = answers.find(|(_, status)| status.device.as_ref() == Some(&device))
    else {
        return Ok(None);
    };
    let mut stream = request(UnixStream::connect(socket)?, Request::Index)?;
    let Response::IndexFollows { index_bytes } = read_response(&mut stream)? else {
        return Ok(None);
    };
    ensure!(
        index_bytes <= limit.bytes(),
        TooMuchMemory {
            limit: limit.bytes()
        }
    );
    Ok(Some(format::read(stream, index_bytes)?))
}

fn list_sockets(directory: &Path) -> io::Result<Vec<PathBuf>> {
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
fn ask(socket: &Path) -> Option<BufReader<UnixStream>> {
    let asked = connect_at_once(socket).and_then(|stream| request(stream, Request::Status));
    let asked = asked.inspect_err(|error| {
        if error.kind() == ErrorKind::ConnectionRefused {
            // The process died without removing its socket.
            drop(fs::remove_file(socket));
        }
        tracing::debug!(%error, socket = %socket.display(), "no status");
    });
    asked.ok()
}

fn send_request(socket: &Path, message: Request) -> io::Result<Response> {
    read_response(&mut request(UnixStream::connect(socket)?, message)?)
}

fn request(stream: UnixStream, message: Request) -> io::Result<BufReader<UnixStream>> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    send_line(&stream, &message)?;
    Ok(BufReader::new(stream))
}

/// Connects without waiting for a process that accepts no connections.
fn connect_at_once(socket: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn read_response(stream: &mut BufReader<UnixStream>) -> io::Result<Response> {
    let mut line = String::new();
    stream.take(MAX_RESPONSE_BYTES).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

fn socket_name() -> String {
    let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    format!("{}-{namespace}.sock", std::process::id())
}

/// Opens the process behind a socket, to wait for its end. `None` if it is gone or of another PID namespace.
fn open_pidfd(socket: &Path, pid: u32) -> Option<OwnedFd> {
    let namespace = |name: &str| Some(name.split_once('-')?.1.to_owned());
    let name = socket.file_name()?.to_str()?;
    if namespace(name) != namespace(&socket_name()) {
        return None;
    }
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Waits until a process has ended; false after the timeout `time`.
pub(crate) fn wait_for_exit(process: &OwnedFd, time: Duration) -> io::Result<bool> {
    let deadline = Timespec::try_from(time).map_err(io::Error::other)?;
    let mut ends = [PollFd::new(process, PollFlags::IN)];
    Ok(poll(&mut ends, Some(&deadline))? > 0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    impl Status {
        pub(crate) fn example() -> Self {
            let stats = tarfs::Stats::default();
            stats.scans.increment();
            let counters = stats.snapshot().into_iter();
            Self {
                source: "http://host/a.tar".into(),
                layers: Vec::new(),
                mountpoint: "/mnt".into(),
                mountpoint_bytes: None,
                device: None,
                mount_id: None,
                detached: false,
                pid: std::process::id(),
                since_unix_seconds: 1000,
                version: "3 bytes".into(),
                entries: 2,
                index: IndexState {
                    phase: Phase::Complete,
                    scanned_bytes: 7,
                    of_bytes: Some(7),
                    failure: None,
                },
                resident_bytes: 20 << 20,
                memory: MemoryUse {
                    budget_bytes: 128 << 20,
                    spans_bytes: 40 << 20,
                    reads_bytes: 5,
                    decoders_bytes: 6,
                    index_bytes: 12_345,
                },
                disk_cache: Some(DiskCacheUsage {
                    held_bytes: 30 << 20,
                    all_bytes: 50 << 20,
                    limit_bytes: 70 << 20,
                }),
                prefetch: PrefetchStatus {
                    what: "all".into(),
                    state: "running".into(),
                    done_spans: 3,
                    total_spans: 7,
                    replayed_spans: 1,
                    replay_spans: 2,
                },
                directory: None,
                copy: None,
                writable: None,
                metrics: Some("http://127.0.0.1:9469/metrics".into()),
                counters: counters
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect(),
                damaged_members: 2,
                damaged: vec!["a/c: cut".into()],
                notes: vec!["stored".into()],
                errors: vec![FailedRead {
                    last_unix_seconds: 1000,
                    count: 3,
                    path: "a/b".into(),
                    reason: "cut".into(),
                }],
            }
        }
    }

    fn private_directory() -> tempfile::TempDir {
        tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .expect("a directory")
    }

    #[test]
    fn status_request_returns_the_status() {
        let directory = private_directory();
        let control = ControlSocket::serve(directory.path(), |_| {
            Response::Status(Box::new(Status::example()))
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
            Response::Status(Box::new(status))
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
            Response::Status(Box::new(Status::example()))
        });
        let mut answers = StatusRequests::send(directory.path()).expect("readable");
        let (_, status) = answers.next().expect("an answer");
        assert_eq!(status, Status::example());
        assert_eq!(answers.pending.len(), 1, "the silent one");
        answers.deadline = Instant::now();
        assert!(answers.next().is_none());
    }

    #[test]
    fn umount_request_reaches_only_the_named_mount() {
        let directory = private_directory();
        let _control = ControlSocket::serve(directory.path(), |request| match request {
            Request::Status => Response::Status(Box::new(Status::example())),
            Request::Umount { .. } | Request::Index => Response::Error {
                error: "in use".into(),
                hint: None,
            },
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
        let answer = |_| Response::Status(Box::new(Status::example()));
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
            Response::Status(Box::new(Status::example()))
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
            Response::Status(Box::new(Status::example()))
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

    // Promises: status-private
    #[test]
    fn directory_accessible_to_others_is_rejected() {
        let directory = private_directory();
        let open = directory.path().join("open");
        fs::create_dir(&open).expect("made");
        fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("set");
        assert!(
            ControlSocket::serve(&open, |_| Response::Status(Box::new(Status::example()))).is_err()
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
            r#""since_unix_seconds":1000,"version":"3 bytes","entries":2,"#,
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
        assert_eq!(request, Request::Umount { force: false });
        let text = serde_json::to_string(&Request::Status).expect("plain");
        assert_eq!(text, r#"{"verb":"status"}"#);
    }
}
