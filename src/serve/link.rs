//! Link between the process that serves a mount and the process that keeps it: packets of JSON, some with descriptors.
//!
//! The monitor holds the description of its mount, the connection, and what a successor must know. It sends requests in
//! the order open, serve, cover. A successor gets a takeover instead of the first two. The server answers each of them,
//! or reports a failure, and then serves until the mount has ended.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Weak;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use super::failure::Failure;
use super::mount_spec::MountSpec;
use super::status::{IndexState, OverlayStatus};
use crate::base::bounded_read::read_at_most;
use crate::base::sha256::Sha256;
use crate::base::wait::wait_for;
use crate::fuse::{MountTarget, supports_takeover};

/// Maximum length of a packet, in bytes. The longest has two targets with two paths of 4096 bytes as numbers each, and a
/// version of as many bytes, each of which JSON may expand to six: 90 KiB.
const MAX_PACKET_BYTES: usize = 128 << 10;

/// Maximum number of descriptors of a packet.
const MAX_DESCRIPTORS: usize = 5;

/// Maximum length of a version that is sent unchanged, in bytes.
const MAX_VERSION_BYTES: usize = 4096;

/// Maximum length of a description, in bytes. Most of it is the user's environment.
const MAX_SPEC_BYTES: u64 = 16 << 20;

/// A message on a link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packet {
    /// Client of a daemon: it is in the namespaces of the descriptors, and has the last one's root directory.
    Client,
    /// Client of a daemon: hand all mounts over to the daemon of this socket, and end. The descriptor is its program.
    Retire(OsString),
    /// Monitor: log to the descriptor, or to the system's log without one.
    Log,
    /// Monitor: the process with this number keeps the mount from now on.
    Kept {
        /// The number.
        monitor: u32,
        /// Whether the server leaves the terminal.
        is_in_background: bool,
    },
    /// Monitor: open the tree of the description in the descriptor, with reports of progress if they are shown.
    Open {
        /// Whether they are.
        shows_progress: bool,
    },
    /// Monitor: it makes this directory for the mount, and removes it after the mount.
    Scratch(OsString),
    /// Monitor: it makes this mount, a copy of the one that came with the answer. If it dies before the next request, the server
    /// detaches the mount.
    Attach(MountTarget),
    /// Monitor: serve the tree on this mount. The descriptors are the connection, the mount's root, and a detached copy of it,
    /// if there are these. Without them, the mount is a copy of the one that came with the answer before.
    Serve(MountTarget),
    /// Monitor: an overlay covers the mount.
    Cover(MountTarget, OverlayStatus),
    /// Monitor: serve the mount of a dead process. The descriptors are the description, the connection, and the job list of its
    /// file system if there is one.
    TakeOver(Box<Taken>),
    /// Monitor: unmount, without force the first time.
    Stop,
    /// Server: it is the process with this number.
    Server(u32),
    /// Server: an event for the user, with its level.
    Event(String, String),
    /// Server: the tree is open. With a descriptor, this detached mount shows it, and others of it can be made.
    Opened(OpenedTree),
    /// Server: the progress of opening: packed bytes in all, those that were read, and entries. `None` at its end.
    Progress(Option<(Option<u64>, u64, u64)>),
    /// Server: it failed, and serves nothing.
    Failed(Failure),
    /// Server: the mount answers. The descriptors are the connection if the monitor has not made it, and a watch for the end.
    Ready(SessionState, IndexState),
    /// Server: the mount is covered, or kept by the named process. The descriptor is then the job list of its file system.
    Done,
    /// Server that is not ready: the source was unreachable for this many ms.
    Unreachable(u64),
    /// Server: progress of the index, when it has changed.
    Index(IndexState),
    /// Daemon: the one at this socket continues with the mount when this process has ended. The descriptor is its program.
    Successor(OsString),
    /// Server: the mount has ended.
    Ended,
    /// Server: the connection has ended for all mounts that share it, as of `umount -f` for one of them.
    Aborted,
}

/// Tree that a server has opened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OpenedTree {
    /// SOURCE, absolute and without secrets.
    pub name: String,
    /// Version of the tree, or the digest of a long one.
    pub version: String,
    /// Whether it differs for any two contents.
    pub is_strong: bool,
}

/// State that must not change from a server to its successor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SessionState {
    /// Capabilities that the kernel offered, as bits.
    pub capabilities: u64,
    /// Version of the tree, or the digest of a long one.
    pub version: String,
    /// Whether it differs for any two contents.
    pub is_strong: bool,
}

impl SessionState {
    /// Whether another process can continue with the mount. If another version looks the same, readers would see its bytes
    /// among old ones in the page cache.
    pub fn can_be_continued(&self) -> bool {
        self.is_strong && supports_takeover(self.capabilities)
    }
}

/// Mount that a successor takes over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Taken {
    /// Its place.
    pub target: MountTarget,
    /// Its state.
    pub state: SessionState,
    /// The overlay over it, if there is one.
    pub overlay: Option<OverlayStatus>,
    /// The directory that its monitor has made for it, if there is one.
    pub scratch: Option<OsString>,
}

/// Returns a version that fits into a packet; that of a thousand layers is long.
pub(super) fn version_for_packet(version: &str) -> String {
    if version.len() <= MAX_VERSION_BYTES {
        return version.to_owned();
    }
    format!("sha256:{}", Sha256::of(version.as_bytes()))
}

/// One end of a link. The other end is closed with its process.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl From<OwnedFd> for Link {
    fn from(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Link {
    /// Creates both ends; children do not inherit them.
    ///
    /// # Errors
    /// If the system has no more descriptors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (one, other) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok((Self(one), Self(other)))
    }

    /// The descriptor of the socket.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Sends `packet`.
    ///
    /// # Errors
    /// If the peer is gone, or with [`SendFlags::DONTWAIT`] if its queue is full.
    pub fn send(
        &self,
        packet: &Packet,
        descriptors: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        let bytes = serde_json::to_vec(packet)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let bytes = [IoSlice::new(&bytes)];
        sendmsg(&self.0, &bytes, &mut control, SendFlags::NOSIGNAL | flags)?;
        Ok(())
    }

    /// Whether the peer is gone.
    pub(super) fn is_closed(&self) -> bool {
        let mut polled = [PollFd::new(self, PollFlags::empty())];
        let is_ready = wait_for(&mut polled, Duration::ZERO) == Ok(true);
        is_ready && polled[0].revents().contains(PollFlags::HUP)
    }

    /// Tells the monitor that its mount is not served. One that is gone needs no answer.
    pub fn report_failure(&self, failure: Failure) {
        drop(self.send(&Packet::Failed(failure), &[], SendFlags::empty()));
    }

    /// Waits for the next packet, with its descriptors; `None` when the peer is gone.
    ///
    /// # Errors
    /// If the packet is invalid.
    pub fn receive(&self) -> io::Result<Option<(Packet, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MAX_PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.0, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                // The peer died with unread packets.
                Err(Errno::CONNRESET) => return Ok(None),
                received => break received?,
            }
        };
        let descriptors = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
            _ => Vec::new(),
        });
        let descriptors = descriptors.collect();
        if received.bytes == 0 {
            return Ok(None);
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(io::Error::other("a packet is too long"));
        }
        let packet = serde_json::from_slice(bytes.get(..received.bytes).unwrap_or_default())?;
        Ok(Some((packet, descriptors)))
    }
}

impl MountSpec {
    /// Writes it into memory that any process can read by a descriptor, and none can change.
    ///
    /// # Errors
    /// If the system has no more memory or descriptors.
    pub fn to_memory(&self) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("mount", flags)?);
        file.write_all(&serde_json::to_vec(self)?)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        Ok(file.into())
    }

    /// Reads the description in `memory`.
    ///
    /// # Errors
    /// If it has none.
    pub(super) fn from_memory(memory: OwnedFd) -> io::Result<Self> {
        let file = File::from(memory);
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
        Ok(serde_json::from_slice(&read_at_most(
            file,
            MAX_SPEC_BYTES,
        )?)?)
    }
}

thread_local! {
    /// Link of the mount for which this thread works.
    static WORKS_FOR: RefCell<Option<Weak<Link>>> = const { RefCell::new(None) };
}

/// Does `work` for the mount behind `link`.
pub(super) fn work_for<T>(link: &Weak<Link>, work: impl FnOnce() -> T) -> T {
    WORKS_FOR.set(Some(Weak::clone(link)));
    let result = work();
    WORKS_FOR.set(None);
    result
}

/// The link of the mount for which this thread works, if it is for one alone.
pub(super) fn works_for() -> Option<Weak<Link>> {
    WORKS_FOR.with_borrow(Option::clone)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use crate::fuse::{Namespace, OverlayKind};

    fn target() -> MountTarget {
        MountTarget {
            mountpoint: OsStr::from_bytes(b"/mnt/\xff").into(),
            device: (0, 45),
            overlay: Some((OverlayKind::Overlayfs, (0, 44))),
            namespace: Some(Namespace {
                path: "/proc/7/ns/mnt".into(),
                identity: (4, 4_026_531_841),
            }),
            mount_id: None,
        }
    }

    #[test]
    fn packets_arrive_in_order_with_their_descriptors() {
        let (here, there) = Link::pair().expect("sockets");
        let file = tempfile::tempfile().expect("a file");
        let both = [file.as_fd(), file.as_fd()];
        let serve = Packet::Serve(target());
        here.send(&serve, &both, SendFlags::empty()).expect("sent");
        let stop = [&Packet::Stop];
        for packet in stop {
            here.send(packet, &[], SendFlags::empty()).expect("sent");
        }
        assert!(!there.is_closed());
        drop(here);
        assert!(there.is_closed());
        let (packet, descriptors) = there.receive().expect("whole").expect("there");
        assert_eq!((packet, descriptors.len()), (serve, 2));
        let (packet, descriptors) = there.receive().expect("whole").expect("there");
        assert_eq!((packet, descriptors.len()), (Packet::Stop, 0));
        assert!(there.receive().expect("closed").is_none());
    }

    #[test]
    fn invalid_packet_is_an_error() {
        let (here, there) = Link::pair().expect("sockets");
        rustix::io::write(&here, b"nonsense").expect("sent");
        assert!(there.receive().is_err());
        rustix::io::write(&here, &vec![b' '; MAX_PACKET_BYTES + 1]).expect("sent");
        assert!(there.receive().is_err());
    }
}
