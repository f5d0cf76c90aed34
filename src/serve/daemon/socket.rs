//! Socket of the daemon, by which monitors reach it.
//!
//! A daemon opens paths, sends requests and answers callers for its clients. So it serves only clients for which all that
//! decides the meaning of a path, a right or an address is the same. The name of its socket is a digest of that.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    socket_with,
};
use rustix::process::geteuid;
use rustix::thread::CapabilitySet;

use crate::base::environment::variable;
use crate::base::lock::{LockKind, lock};
use crate::base::process::status_field;
use crate::base::publish::publish_from;
use crate::base::wait::is_readable;
use crate::serve::control_socket::{connect_at_once, create_private_dir, remove_unfinished};
use crate::serve::link::{Link, Packet};

/// Timeout for another process that starts or ends a daemon.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of clients that wait to be accepted; the system may permit fewer.
const BACKLOG: i32 = 4096;

/// Extension of the name of a socket.
const EXTENSION: &str = "daemon";

/// Extension of a socket until it has a listener. Only the holder of the lock makes one.
const NEW_EXTENSION: &str = "new-daemon";

/// Places below `/proc/PID` that decide what a path, a right or an address means. A process can open only its own, or those
/// that it could enter.
const PLACES: [&str; 5] = ["ns/user", "ns/mnt", "ns/net", "ns/pid", "root"];

/// Fields of `/proc/PID/status` that decide what a process may do, and that a monitor does not change.
const RIGHTS: [&str; 5] = ["Uid:", "Gid:", "Groups:", "Seccomp:", "Seccomp_filters:"];

/// Version of what a daemon and the monitors of another program file must agree on: packets, descriptions of mounts, numbers
/// of inodes, and what is negotiated with the kernel. To be raised with each change that they could not continue with.
const FORMAT: u32 = 2;

/// Program that unmounts for an ordinary user.
const UNMOUNTER: &str = "fusermount3";

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

    /// The socket of the daemon that serves only the file system with the number `device`, which may be what kills this one's.
    #[must_use]
    pub fn of_device(&self, (major, minor): (u32, u32)) -> Self {
        let suffix = format!("{major}.{minor}.{EXTENSION}");
        Self(self.0.with_extension(suffix))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The other sockets in its directory: those of other program files, or for other processes.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn others(&self) -> io::Result<Vec<Self>> {
        let directory = self.0.parent().unwrap_or(Path::new("/"));
        let found = fs::read_dir(directory)?.map(|entry| Ok(Self(entry?.path())));
        let found = found.collect::<io::Result<Vec<_>>>()?.into_iter();
        let is_daemon = |path: &Path| path.extension().is_some_and(|name| name == EXTENSION);
        Ok(found
            .filter(|other| other != self && is_daemon(&other.0))
            .collect())
    }

    /// Whether `other` serves for the same processes, perhaps by another program file.
    pub fn has_same_clients(&self, other: &Self) -> bool {
        let identity = |socket: &Self| Some(socket.parts()?.0.to_owned());
        self.0.parent() == other.0.parent() && identity(self) == identity(other)
    }

    /// Whether `other` is of the same program file.
    pub fn has_same_program(&self, other: &Self) -> bool {
        let program = |socket: &Self| Some(socket.parts()?.1.to_owned());
        program(self) == program(other)
    }

    /// The digests of its clients and of its program.
    fn parts(&self) -> Option<(&str, &str)> {
        let (identity, rest) = self.0.file_name()?.to_str()?.split_once('-')?;
        // A device number may follow.
        Some((identity, rest.split_once('.')?.0))
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
        let socket = connect_at_once(&self.0, SocketType::SEQPACKET)?;
        check_peer(&socket)?;
        let link = Link::from(socket);
        let places = PLACES.map(|place| File::open(Path::new("/proc/self").join(place)));
        let places = places.into_iter().collect::<io::Result<Vec<_>>>()?;
        let descriptors: Vec<_> = places.iter().map(AsFd::as_fd).collect();
        link.send(&Packet::Client, &descriptors, SendFlags::empty())?;
        Ok(link)
    }

    fn lock(&self, timeout: Duration) -> io::Result<File> {
        let directory = File::open(self.0.parent().unwrap_or(Path::new("/")))?;
        lock(&directory, LockKind::Exclusive, timeout)?;
        Ok(directory)
    }

    /// Makes the socket in the place of that of any daemon, and returns a link to that, too, if it lives.
    ///
    /// # Errors
    /// If the socket cannot be made, or another process starts a daemon and does not end.
    pub fn replace(&self) -> io::Result<(OwnedFd, Option<Link>)> {
        let _lock = self.lock(LOCK_TIMEOUT)?;
        let link = self.connect();
        let listener = self.listen()?;
        if is_missing(&link) {
            return Ok((listener, None));
        }
        link.map(|link| (listener, Some(link)))
    }

    /// Makes the socket, in the place of that of a dead daemon. The caller has the lock.
    fn listen(&self) -> io::Result<OwnedFd> {
        self.remove_dead()?;
        // It gets its name when it listens, so that a client never finds it too early.
        publish_from(
            &self.0.with_extension(NEW_EXTENSION),
            &self.0,
            |temporary| {
                let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
                let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
                bind(&socket, &SocketAddrUnix::new(temporary)?)?;
                fs::set_permissions(temporary, Permissions::from_mode(0o600))?;
                listen(&socket, BACKLOG)?;
                Ok(socket)
            },
        )
    }

    /// Removes the other sockets whose processes were killed, perhaps before they listened. The caller has the lock.
    fn remove_dead(&self) -> io::Result<()> {
        let directory = self.0.parent().unwrap_or(Path::new("/"));
        remove_unfinished(directory)?;
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension() == Some(NEW_EXTENSION.as_ref()) {
                drop(fs::remove_file(path));
            }
        }
        for other in self.others()? {
            if matches!(other.connect(), Err(error) if error.kind() == ErrorKind::ConnectionRefused)
            {
                drop(fs::remove_file(&other.0));
            }
        }
        Ok(())
    }

    /// Removes the socket on which `listener` listens. False if a client waits there, or another process starts a daemon.
    pub fn remove(&self, listener: BorrowedFd<'_>) -> bool {
        let Ok(_lock) = self.lock(Duration::ZERO) else {
            return false;
        };
        drop(self.remove_dead());
        let is_awaited = is_readable(listener, Duration::ZERO);
        !is_awaited && fs::remove_file(&self.0).is_ok()
    }

    /// Device and inode of its file, if there is one.
    pub fn file_id(&self) -> Option<(u64, u64)> {
        fs::symlink_metadata(&self.0).as_ref().map(file_id).ok()
    }
}

/// Accepts the client that waits.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<Link> {
    let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
    check_peer(&socket)?;
    Ok(Link::from(socket))
}

/// Waits for the introduction of a client, and checks that it has the rights of this process. The name of the socket is no
/// proof, because the directory may be visible in a container, and to a restricted process. `None` if it is gone.
pub(super) fn receive_client(link: &Link) -> io::Result<Option<()>> {
    let Some((packet, descriptors)) = link.receive()? else {
        return Ok(None);
    };
    let found = descriptors.iter().map(|place| {
        let found = rustix::fs::fstat(place)?;
        Ok((found.st_dev, found.st_ino))
    });
    let found = found.collect::<io::Result<Vec<_>>>()?;
    let client = socket_peercred(link)?.pid.as_raw_pid().to_string();
    let (client, own) = (Rights::of(&client)?, Rights::of("self")?);
    // Without it, this process does not mount either.
    let can_mount = client.can_mount || !own.can_mount;
    if packet == Packet::Client && found == places()? && client.shared == own.shared && can_mount {
        return Ok(Some(()));
    }
    let kind = ErrorKind::PermissionDenied;
    Err(io::Error::new(
        kind,
        "the client has other rights or namespaces",
    ))
}

/// Rights of a process.
struct Rights {
    /// Fields of its status, and its label of a security module, if there is one.
    shared: (Vec<String>, Vec<u8>),
    can_mount: bool,
}

impl Rights {
    fn of(process: &str) -> io::Result<Self> {
        let directory = Path::new("/proc").join(process);
        let status = fs::read_to_string(directory.join("status"))?;
        let lines = status
            .lines()
            .filter(|line| RIGHTS.iter().any(|name| line.starts_with(name)));
        let lines = lines.map(str::to_owned).collect();
        let label = fs::read(directory.join("attr/current")).unwrap_or_default();
        let bits = u64::from_str_radix(status_field(&status, "CapEff"), 16);
        let effective = CapabilitySet::from_bits_retain(bits.unwrap_or(0));
        Ok(Self {
            shared: (lines, label),
            can_mount: effective.contains(CapabilitySet::SYS_ADMIN),
        })
    }
}

/// Devices and inodes of the [`PLACES`] of this process.
fn places() -> io::Result<Vec<(u64, u64)>> {
    let own = PLACES.map(|place| fs::metadata(Path::new("/proc/self").join(place)));
    own.into_iter().map(|found| Ok(file_id(&found?))).collect()
}

fn file_id(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
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
    let capabilities = rustix::thread::capabilities(None)?;
    // Whether set-user-ID programs have an effect.
    let status = fs::read_to_string("/proc/self/status")?;
    let no_new_privileges = status.lines().find(|line| line.starts_with("NoNewPrivs:"));
    let rights = Rights::of("self")?;
    let path = variable("PATH").unwrap_or_default();
    let mut directories = std::env::split_paths(&path);
    let mut find = || directories.find(|directory| directory.join(UNMOUNTER).is_file());
    // A process that can mount can unmount.
    let unmounter = if rights.can_mount { None } else { find() };
    let described = (
        FORMAT,
        rights.shared,
        capabilities.effective.bits(),
        places()?,
        no_new_privileges,
        unmounter,
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

    // Promises: shared-upgrade
    #[test]
    fn names_tell_clients_and_programs_apart() {
        let at = |name: &str| DaemonSocket::at(&Path::new("/run/tarfs").join(name));
        let own = at("1a-2b.daemon");
        let alone = own.of_device((0, 77));
        assert_eq!(alone, at("1a-2b.0.77.daemon"));
        assert!(own.has_same_program(&alone) && alone.has_same_program(&own));
        assert!(own.has_same_clients(&alone));
        let older = at("1a-3c.daemon");
        for older in [older.of_device((0, 77)), older] {
            assert!(!own.has_same_program(&older) && own.has_same_clients(&older));
        }
        let foreign = at("9f-2b.daemon");
        assert!(own.has_same_program(&foreign) && !own.has_same_clients(&foreign));
    }

    // Promises: shared-trust
    #[test]
    fn client_of_other_namespaces_or_root_is_refused() {
        let (here, there) = Link::pair().expect("sockets");
        let open = |place: &str| File::open(Path::new("/proc/self").join(place)).expect("there");
        let own = PLACES.map(open);
        let other = open("ns/uts");
        let with_other = |number: usize| -> Vec<_> {
            let own = own.iter().enumerate();
            own.map(|(at, place)| if at == number { &other } else { place })
                .collect()
        };
        let mut cases: Vec<_> = (0..PLACES.len()).map(with_other).collect();
        cases.push(own.iter().take(2).collect());
        cases.push(Vec::new());
        let send = |packet: &Packet, places: &[&File]| {
            let places: Vec<_> = places.iter().map(AsFd::as_fd).collect();
            here.send(packet, &places, SendFlags::empty())
                .expect("sent");
            receive_client(&there)
        };
        for places in cases {
            let error = send(&Packet::Client, &places).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        }
        let all: Vec<_> = own.iter().collect();
        send(&Packet::Stop, &all).expect_err("refused");
        assert!(send(&Packet::Client, &all).expect("the same").is_some());
        drop(here);
        assert!(receive_client(&there).expect("closed").is_none());
    }

    // Promises: shared-trust
    #[test]
    fn client_with_other_rights_is_refused() {
        let (_directory, socket) = place();
        let listener = socket.listen().expect("a socket");
        let path = socket.path().to_owned();
        let mut child = std::process::Command::new("python3")
            .args(["-c", CLIENT])
            .arg(&path)
            .spawn()
            .expect("installed");
        let link = accept(listener.as_fd()).expect("a client");
        let error = receive_client(&link).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        drop(link);
        child.wait().expect("a child");
    }

    /// Gives itself a filter of system calls, which permits all, introduces itself as a client, and waits for the end.
    const CLIENT: &str = "import array, ctypes, os, socket, struct, sys\n\
        rule = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))\n\
        rules = ctypes.create_string_buffer(struct.pack('@HP', 1, ctypes.addressof(rule)))\n\
        libc = ctypes.CDLL(None)\n\
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, rules, 0, 0) == 0\n\
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
        link.connect(sys.argv[1])\n\
        places = ['ns/user', 'ns/mnt', 'ns/net', 'ns/pid', 'root']\n\
        fds = array.array('i', [os.open('/proc/self/' + place, os.O_RDONLY) for place in places])\n\
        link.sendmsg([b'\"client\"'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])\n\
        link.recv(1)\n";

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
