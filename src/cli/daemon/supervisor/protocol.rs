//! The protocol between worker and supervisor: JSON packets, some with a file descriptor.

use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use tarfs::fuse::MountTarget;

/// Maximum length of a packet, in bytes. The longest, for a successor, holds two paths of 4096 bytes as
/// numbers, and a version of as many bytes, each of which JSON may expand to six: 57 KiB.
const MAX_PACKET_BYTES: usize = 64 << 10;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Packet {
    /// Worker: it is mounted. The descriptor is its connection.
    Mounted(MountTarget),
    /// Worker: the mount is ready. The descriptor watches for its end.
    Ready(SessionState),
    /// Worker: a writable overlay covers the mount and determines its lifetime. If the written files are
    /// temporary, the descriptor watches the overlay's end.
    OverlayMounted(MountTarget),
    /// Worker: remove this directory with the mount.
    ScratchDir(OsString),
    /// Worker: forward this to the service manager that started the supervisor.
    Notify(String),
    /// Successor that is not ready: the source was unreachable for this many ms, at most its whole lifetime.
    Unreachable(u64),
    /// Supervisor to successor: continue with this mount, if its connection is attached, else mount again.
    /// The last field is the mount's scratch directory.
    TakeOver(MountTarget, SessionState, Option<OsString>),
}

/// State that must not change from a worker to its successor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct SessionState {
    /// Capabilities that the kernel offered, as bits.
    pub(super) capabilities: u64,
    pub(super) version: String,
    pub(super) is_strong: bool,
}

/// Creates a connected pair of sockets; children do not inherit them.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// Sends a packet. Fails if the peer is gone, or with [`SendFlags::DONTWAIT`] if its queue is full.
pub(super) fn send(
    socket: impl AsFd,
    packet: &Packet,
    descriptor: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(packet)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let bytes = [IoSlice::new(&bytes)];
    sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL | flags)?;
    Ok(())
}

/// Waits for the next packet; `None` when the peer is gone.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<(Packet, Option<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let into = &mut [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            // The peer died with unread packets.
            Err(Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("a packet is too long"));
    }
    let packet = serde_json::from_slice(bytes.get(..received.bytes).unwrap_or_default())?;
    Ok(Some((packet, descriptor)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use tarfs::fuse::{Namespace, OverlayKind};

    use super::*;

    fn target() -> MountTarget {
        MountTarget {
            mountpoint: OsStr::from_bytes(b"/mnt/\xff").into(),
            device: (0, 45),
            overlay: Some((OverlayKind::Overlayfs, (0, 44))),
            namespace: Some(Namespace {
                path: "/proc/7/ns/mnt".into(),
                identity: (4, 4_026_531_841),
            }),
        }
    }

    #[test]
    fn packets_arrive_in_order_with_their_descriptors() {
        let (here, there) = pair().expect("sockets");
        let state = SessionState {
            capabilities: u64::MAX,
            version: "etag".to_owned(),
            is_strong: true,
        };
        let file = tempfile::tempfile().expect("a file");
        send(
            &here,
            &Packet::Mounted(target()),
            Some(file.as_fd()),
            SendFlags::empty(),
        )
        .expect("sent");
        send(
            &here,
            &Packet::Ready(state.clone()),
            None,
            SendFlags::empty(),
        )
        .expect("sent");
        drop(here);
        let (packet, descriptor) = receive(&there).expect("whole").expect("there");
        assert_eq!(packet, Packet::Mounted(target()));
        assert!(descriptor.is_some());
        let (packet, descriptor) = receive(&there).expect("whole").expect("there");
        assert_eq!(packet, Packet::Ready(state));
        assert!(descriptor.is_none());
        assert!(receive(&there).expect("closed").is_none());
    }

    #[test]
    fn invalid_packet_is_an_error() {
        let (here, there) = pair().expect("sockets");
        rustix::io::write(&here, b"nonsense").expect("sent");
        assert!(receive(&there).is_err());
        rustix::io::write(&here, &vec![b' '; MAX_PACKET_BYTES + 1]).expect("sent");
        assert!(receive(&there).is_err());
    }
}
