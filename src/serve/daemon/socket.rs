//! Socket of the daemon, by which monitors reach it.
//!
//! A daemon opens paths, sends requests and answers callers for its clients. So it serves only clients for which all that
//! decides the meaning of a path, a right or an address is the same. The name of its socket is a digest of that.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, socket_with,
};
use rustix::process::{getegid, geteuid, getgroups};

use crate::base::environment::variable;
use crate::base::lock::{LockKind, lock};
use crate::base::publish::publish;
use crate::serve::control_socket::create_private_dir;
use crate::serve::link::{Link, Packet};

/// Timeout for another process that starts or ends a daemon.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of clients that wait to be accepted; the system may permit fewer.
const BACKLOG: i32 = 4096;

/// Extension of the name of a socket.
const EXTENSION: &str = "daemon";

/// Namespaces that decide what a path, a right or an address means.
const NAMESPACES: [&str; 4] = ["user", "mnt", "net", "pid"];

/// Those that a container has of its own.
const ISOLATING: [&str; 2] = ["mnt", "user"];

/// Place of the socket of a daemon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DaemonSocket(PathBuf);

impl DaemonSocket {
    /// The socket in `directory` of the daemon that can serve for this process. Creates the directory if needed.
    ///
    /// # Errors
    /// If the directory is not of this user alone, or there is no /proc.
    pub fn in_directory(directory: &Path) -> io::Result<Self> {
        create_private_dir(directory)?;
        let name = format!("{}-{}.{EXTENSION}", identity()?, program()?);
        Ok(Self(directory.join(name)))
    }

    /// The socket at `path`.
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The other sockets in its directory of daemons that serve for the same processes, by other program files.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn of_other_programs(&self) -> io::Result<Vec<Self>> {
        let directory = self.0.parent().unwrap_or(Path::new("/"));
        let found = fs::read_dir(directory)?.map(|entry| Ok(Self(entry?.path())));
        let found = found.collect::<io::Result<Vec<_>>>()?.into_iter();
        Ok(found.filter(|other| self.has_same_clients(other)).collect())
    }

    /// Whether `other` is of another program file, and else of the same.
    pub(super) fn has_same_clients(&self, other: &Self) -> bool {
        let split = |socket: &'_ Self| {
            let name = socket.0.file_name()?.to_str()?;
            let (identity, program) = name.strip_suffix(EXTENSION)?.split_once('-')?;
            Some((identity.to_owned(), program.to_owned()))
        };
        let (Some((own, program)), Some((its, other_program))) = (split(self), split(other)) else {
            return false;
        };
        self.0.parent() == other.0.parent() && own == its && program != other_program
    }

    /// Connects to the daemon. If there is none, `start` starts one, with the socket that it listens on.
    ///
    /// # Errors
    /// If the daemon is of another user, or too many clients wait, or as of `start`.
    pub fn connect_or_start(
        &self,
        start: impl FnOnce(OwnedFd) -> io::Result<()>,
    ) -> io::Result<Link> {
        let link = self.connect();
        if !is_missing(&link) {
            return link;
        }
        // Only its holder makes or removes the socket.
        let _lock = self.lock(LOCK_TIMEOUT)?;
        let link = self.connect();
        if !is_missing(&link) {
            return link;
        }
        start(self.listen()?)?;
        self.connect()
    }

    /// Connects to the daemon.
    ///
    /// # Errors
    /// As of [`Self::connect_or_start`], and if there is none.
    pub fn connect(&self) -> io::Result<Link> {
        let socket = new_socket(SocketFlags::NONBLOCK)?;
        connect(&socket, &SocketAddrUnix::new(&self.0)?)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        check_peer(&socket)?;
        let link = Link::from(socket);
        let namespaces = ISOLATING.map(|name| File::open(namespace_path(name)));
        let [mounts, users] = namespaces;
        let (mounts, users) = (mounts?, users?);
        let descriptors = [mounts.as_fd(), users.as_fd()];
        link.send(&Packet::Client, &descriptors, SendFlags::empty())?;
        Ok(link)
    }

    fn lock(&self, timeout: Duration) -> io::Result<File> {
        let directory = File::open(self.0.parent().unwrap_or(Path::new("/")))?;
        lock(&directory, LockKind::Exclusive, timeout)?;
        Ok(directory)
    }

    /// Makes the socket of a daemon that clients have not started.
    ///
    /// # Errors
    /// If there is a daemon already, or the socket cannot be made.
    pub fn listen_alone(&self) -> io::Result<OwnedFd> {
        let _lock = self.lock(LOCK_TIMEOUT)?;
        let link = self.connect();
        if is_missing(&link) {
            return self.listen();
        }
        link?;
        let kind = ErrorKind::AddrInUse;
        Err(io::Error::new(
            kind,
            "a process serves this user's mounts already",
        ))
    }

    /// Makes the socket, in the place of that of a dead daemon. The caller has the lock.
    fn listen(&self) -> io::Result<OwnedFd> {
        for other in self.of_other_programs()? {
            if matches!(other.connect(), Err(error) if error.kind() == ErrorKind::ConnectionRefused)
            {
                // Its daemon was killed.
                drop(fs::remove_file(&other.0));
            }
        }
        // It gets its name when it listens, so that a client never finds it too early.
        publish(&self.0, |temporary| {
            let socket = new_socket(SocketFlags::empty())?;
            bind(&socket, &SocketAddrUnix::new(temporary)?)?;
            fs::set_permissions(temporary, Permissions::from_mode(0o600))?;
            listen(&socket, BACKLOG)?;
            Ok(socket)
        })
    }

    /// Removes the socket on which `listener` listens. False if a client waits there, or another process starts a daemon.
    pub fn remove(&self, listener: BorrowedFd<'_>) -> bool {
        let Ok(_lock) = self.lock(Duration::ZERO) else {
            return false;
        };
        let is_awaited = wait_for_client(listener, Duration::ZERO).unwrap_or(true);
        !is_awaited && fs::remove_file(&self.0).is_ok()
    }

    /// Device and inode of its file, if there is one.
    pub fn file_id(&self) -> Option<(u64, u64)> {
        file_id(&fs::symlink_metadata(&self.0).ok()?).ok()
    }
}

/// Waits up to `timeout` for a client that connects to `listener`.
pub(super) fn wait_for_client(listener: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    let mut polled = [PollFd::new(&listener, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut polled, Some(&timeout)) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        count => Ok(count? > 0),
    }
}

/// Accepts the client that waits.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<Link> {
    let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
    check_peer(&socket)?;
    Ok(Link::from(socket))
}

/// Waits for the introduction of a client, and checks that it is in the namespaces of this process. The directory of the
/// socket may be visible in a container, which must not reach files and programs outside. It cannot open the namespaces of
/// others. `None` if it is gone.
pub(super) fn receive_client(link: &Link) -> io::Result<Option<()>> {
    let Some((packet, descriptors)) = link.receive()? else {
        return Ok(None);
    };
    let found = descriptors.iter().map(|namespace| {
        let found = rustix::fs::fstat(namespace)?;
        Ok((found.st_dev, found.st_ino))
    });
    let found = found.collect::<io::Result<Vec<_>>>()?;
    let own = ISOLATING.map(|name| file_id(&fs::metadata(namespace_path(name))?));
    let own = own.into_iter().collect::<io::Result<Vec<_>>>()?;
    if packet == Packet::Client && found == own {
        return Ok(Some(()));
    }
    let kind = ErrorKind::PermissionDenied;
    Err(io::Error::new(kind, "the client is in other namespaces"))
}

fn namespace_path(name: &str) -> PathBuf {
    Path::new("/proc/self/ns").join(name)
}

#[expect(clippy::unnecessary_wraps, reason = "the caller has results")]
fn file_id(found: &Metadata) -> io::Result<(u64, u64)> {
    Ok((found.dev(), found.ino()))
}

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    Ok(socket?)
}

fn is_missing<T>(connected: &io::Result<T>) -> bool {
    let error = connected.as_ref().err().map(io::Error::kind);
    matches!(
        error,
        Some(ErrorKind::NotFound | ErrorKind::ConnectionRefused)
    )
}

/// Root reaches the sockets of all users.
fn check_peer(socket: impl AsFd) -> io::Result<()> {
    if socket_peercred(socket)?.uid == geteuid() {
        return Ok(());
    }
    let kind = ErrorKind::PermissionDenied;
    Err(io::Error::new(kind, "the other process is of another user"))
}

/// A digest of the program file of this process, because any version may have another protocol.
fn program() -> io::Result<String> {
    let program = fs::metadata("/proc/self/exe")?;
    let times = (program.ctime(), program.ctime_nsec());
    let described = (
        env!("CARGO_PKG_VERSION"),
        program.dev(),
        program.ino(),
        times,
    );
    digest(&described, 12)
}

/// The first `len` digits of the digest of `described`.
fn digest(described: &impl serde::Serialize, len: usize) -> io::Result<String> {
    let hash = blake3::hash(&serde_json::to_vec(described)?);
    Ok(hash.to_hex().chars().take(len).collect())
}

/// A digest of all else that must be the same for a process that serves for another one.
fn identity() -> io::Result<String> {
    let groups: BTreeSet<_> = getgroups()?.iter().map(|group| group.as_raw()).collect();
    let capabilities = rustix::thread::capabilities(None)?;
    let places = NAMESPACES.map(|name| file_id(&fs::metadata(namespace_path(name))?));
    let places = places.into_iter().collect::<io::Result<Vec<_>>>()?;
    let root = fs::metadata("/")?;
    // Whether set-user-ID programs have an effect, and which system calls are permitted.
    let status = fs::read_to_string("/proc/self/status")?;
    let restrictions = status.lines().filter(|line| {
        let names = ["NoNewPrivs:", "Seccomp:", "Seccomp_filters:"];
        names.iter().any(|name| line.starts_with(name))
    });
    // Of a security module, if there is one.
    let label = fs::read("/proc/self/attr/current").unwrap_or_default();
    let described = (
        (geteuid().as_raw(), getegid().as_raw(), groups),
        capabilities.effective.bits(),
        places,
        (root.dev(), root.ino()),
        (restrictions.collect::<Vec<_>>(), label),
        // There is the program that unmounts for an ordinary user.
        variable("PATH"),
    );
    digest(&described, 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, DaemonSocket) {
        let directory = tempfile::tempdir().expect("a directory");
        let private = directory.path().join("run");
        let socket = DaemonSocket::in_directory(&private).expect("a place");
        (directory, socket)
    }

    #[test]
    fn first_client_starts_the_daemon_and_others_reach_it() {
        let (_directory, socket) = place();
        let mut listener = None;
        let start = |made| {
            listener = Some(made);
            Ok(())
        };
        let first = socket.connect_or_start(start).expect("connected");
        let listener = listener.expect("started");
        let none = |_| Err(io::Error::other("started twice"));
        let second = socket.connect_or_start(none).expect("connected");
        for _ in 0..2 {
            let link = accept(listener.as_fd()).expect("a client");
            assert!(receive_client(&link).expect("of this namespace").is_some());
        }
        drop((first, second));
    }

    #[test]
    fn socket_of_a_dead_daemon_is_replaced() {
        let (_directory, socket) = place();
        for _ in 0..2 {
            let mut started = false;
            let start = |_listener| {
                started = true;
                Ok(())
            };
            // The listener is closed at once.
            socket.connect_or_start(start).expect_err("no daemon");
            assert!(started && socket.file_id().is_some());
        }
    }

    // Promises: shared-trust
    #[test]
    fn client_of_other_namespaces_is_refused() {
        let (here, there) = Link::pair().expect("sockets");
        let open = |name| File::open(namespace_path(name)).expect("there");
        let (mounts, users, other) = (open("mnt"), open("user"), open("net"));
        for (packet, descriptors) in [
            (Packet::Client, vec![mounts.as_fd(), other.as_fd()]),
            (Packet::Client, vec![mounts.as_fd()]),
            (Packet::Client, Vec::new()),
            (Packet::Stop, vec![mounts.as_fd(), users.as_fd()]),
        ] {
            here.send(&packet, &descriptors, SendFlags::empty())
                .expect("sent");
            let error = receive_client(&there).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        }
        drop(here);
        assert!(receive_client(&there).expect("closed").is_none());
    }

    #[test]
    fn socket_stays_while_a_client_waits() {
        let (_directory, socket) = place();
        let listener = socket.listen().expect("a socket");
        let client = socket.connect().expect("connected");
        assert!(!socket.remove(listener.as_fd()) && socket.file_id().is_some());
        drop(accept(listener.as_fd()).expect("a client"));
        drop(client);
        assert!(socket.remove(listener.as_fd()) && socket.file_id().is_none());
    }
}
