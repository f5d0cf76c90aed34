//! What a mount's process and its supervisor tell each other: packets of JSON, some with a descriptor.

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

/// The longest packet in bytes. The longest there is tells a successor of two paths of 4096 bytes, as
/// numbers, and of a version of as many, of which JSON may make six each: 57 KiB.
const MAX_PACKET_BYTES: usize = 64 << 10;

/// A packet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Packet {
    /// From a mount: it is in the tree, and this is its connection.
    Mounted(MountPlace),
    /// From a mount: it answers.
    Ready(SessionState),
    /// From a mount: a writable tree lies over it, and it lives and ends with that. With a watch for its
    /// end, if what is written goes with it.
    OverlayMounted(MountPlace),
    /// From a mount: this directory goes with it.
    ScratchDir(Vec<u8>),
    /// From a mount: for the service manager that started the supervisor.
    Notify(String),
    /// From who comes after, before it is ready: for so many milliseconds of its life the source could not
    /// be reached; at the most all of it.
    Unreachable(u64),
    /// To who comes after: go on with this, if its connection is here; else mount anew. With the
    /// directory that goes with it, if there is one.
    TakeOver(MountPlace, SessionState, Option<Vec<u8>>),
}

/// Where a mount is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct MountPlace {
    /// Paths need not be UTF-8.
    pub(super) mountpoint: Vec<u8>,
    pub(super) device: (u32, u32),
    /// What covers it, as the kernel calls it, and the numbers of the mount below.
    pub(super) cover: Option<(String, (u32, u32))>,
    /// The path and the identity of the mount namespace that it is in, if that is another one.
    pub(super) namespace: Option<(Vec<u8>, (u64, u64))>,
}

/// What must not change from one process to the next.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct SessionState {
    /// What the kernel offered, a bit each.
    pub(super) capabilities: u64,
    /// Which version of the archive is shown.
    pub(super) version: String,
    /// Whether that tells it from every other one.
    pub(super) is_strong: bool,
}

/// Two ends of a conversation; neither is inherited.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// Sends a packet.
///
/// # Errors
/// When nobody listens.
pub(super) fn send(
    socket: impl AsFd,
    packet: &Packet,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send_with(socket, packet, descriptor, SendFlags::NOSIGNAL)
}

/// Sends a packet that may be lost: waits for nobody.
///
/// # Errors
/// When nobody listens, or there is no room.
pub(super) fn send_without_blocking(socket: impl AsFd, packet: &Packet) -> io::Result<()> {
    send_with(
        socket,
        packet,
        None,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )
}

fn send_with(
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
    sendmsg(socket, &bytes, &mut control, flags)?;
    Ok(())
}

/// The next packet; `None` when the other end is gone. Waits for it.
///
/// # Errors
/// When what comes is none.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<(Packet, Option<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let into = &mut [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            // It died with packets unread.
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
    use super::*;

    fn place() -> MountPlace {
        MountPlace {
            mountpoint: b"/mnt/\xff".to_vec(),
            device: (0, 45),
            cover: Some(("overlay".to_owned(), (0, 44))),
            namespace: Some((b"/proc/7/ns/mnt".to_vec(), (4, 4_026_531_841))),
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
        send(&here, &Packet::Mounted(place()), Some(file.as_fd())).expect("sent");
        send(&here, &Packet::Ready(state.clone()), None).expect("sent");
        drop(here);
        let (packet, descriptor) = receive(&there).expect("whole").expect("there");
        assert_eq!(packet, Packet::Mounted(place()));
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
