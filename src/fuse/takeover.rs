//! Going on with a mount whose process has died, in a new one: same tree, same numbers, and files
//! that were open stay open.
//!
//! A mount lives as long as somebody holds its connection, the device's descriptor; requests wait
//! meanwhile. Two things are in the way of a new process that is given the descriptor. The library
//! begins by shaking hands, which the kernel does once in the life of a connection. So it shakes hands
//! with us, over a socket, and then its descriptor is made to name the device. And requests that the dead
//! process had taken are on nobody's list. `FUSE_NOTIFY_RESEND` (Linux 6.9) puts them back; this tree
//! only ever answers questions, so none of them does harm twice.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use fuser::{Config, InitFlags, Session, SessionACL};
use rustix::io::DupFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::mountinfo::Attachment;
use super::namespace::Namespace;
use super::overlay::OverlayKind;
use super::pinned::PinnedMount;
use super::syscalls::UnmountError;
use super::{TarFilesystem, mountinfo, syscalls};

/// The request with which a connection begins, and its protocol (`FUSE_INIT`, include/uapi/linux/fuse.h).
const FUSE_INIT: u32 = 26;
/// See [`FUSE_INIT`].
const FUSE_PROTOCOL_VERSION: (u32, u32) = (7, 31);
/// Bytes of the header of a request, and of what follows in this one.
const IN_HEADER_BYTES: u32 = 40;
/// See [`IN_HEADER_BYTES`].
const INIT_IN_BYTES: u32 = 64;

/// The word that has requests sent again (`FUSE_NOTIFY_RESEND`).
const FUSE_NOTIFY_RESEND: i32 = 7;

/// Where a mount is, as the kernel's table of mounts tells it from others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountTarget {
    /// Absolute, without symbolic links.
    pub mountpoint: PathBuf,
    /// Major and minor number of what is seen there.
    pub device: (u32, u32),
    /// What lies over the mount and makes it writable, and the mount's own numbers then.
    pub overlay: Option<(OverlayKind, (u32, u32))>,
    /// The mount namespace that it is in, unless that is this process's own.
    pub namespace: Option<Namespace>,
}

impl MountTarget {
    /// Whether it is in the tree, on top or below another mount. Asks nothing of the mount itself; where
    /// the kernel's table cannot be read it is not known, and nothing is done about it.
    pub(super) fn is_mounted(&self) -> bool {
        self.find().is_ok_and(|found| found.is_some())
    }

    /// Where it is now: a directory above it may have another name since. Its number tells it, which is
    /// no other's as long as somebody holds its connection.
    ///
    /// # Errors
    /// When the kernel's table cannot be read.
    pub(super) fn find(&self) -> io::Result<Option<Attachment>> {
        let (device, kind, mountpoint) = (self.device, self.fs_type(), &self.mountpoint);
        match &self.namespace {
            Some(namespace) => {
                let table = namespace.table()?;
                Ok(mountinfo::find_in(&table, device, kind, mountpoint))
            }
            None => mountinfo::find(device, kind, mountpoint),
        }
    }

    /// Unmounts what is seen there; `force` does so although it is in use, and ends its connection. With
    /// `connection`, only the mount with that connection: the kernel gives its device number to another
    /// mount once it is gone.
    ///
    /// # Errors
    /// As [`Mount::unmount`](super::Mount::unmount).
    pub(super) fn unmount(
        &self,
        force: bool,
        connection: Option<BorrowedFd<'_>>,
    ) -> Result<(), UnmountError> {
        if let Some(namespace) = &self.namespace {
            return namespace.unmount(&self.mountpoint, self.device, force, connection);
        }
        syscalls::unmount_if(
            self.fs_type(),
            &self.current_mountpoint(),
            Some(self.device),
            force,
            is_target(connection),
        )
    }

    /// Whether there are other mounts of its file system in this process's namespace, such as bind mounts.
    pub(super) fn has_bind_mounts(&self) -> bool {
        self.namespace.is_none()
            && mountinfo::count_mounts(self.device).is_ok_and(|count| count > 1)
    }

    /// As [`unmount`](Self::unmount), although it is in use, and leaves the connection to other mounts.
    ///
    /// # Errors
    /// As [`Mount::unmount`](super::Mount::unmount).
    pub(super) fn detach(&self, connection: BorrowedFd<'_>) -> Result<(), UnmountError> {
        let is_target = is_target(Some(connection));
        syscalls::detach_if(
            self.fs_type(),
            &self.current_mountpoint(),
            self.device,
            is_target,
        )
    }

    /// Where it is, or was.
    pub(super) fn current_mountpoint(&self) -> PathBuf {
        let found = self.find().ok().flatten();
        found.map_or_else(|| self.mountpoint.clone(), |found| found.path)
    }

    /// The type of what is seen there.
    pub(super) fn fs_type(&self) -> &'static str {
        let overlay = self.overlay.map(|(overlay, _)| overlay.fs_type());
        overlay.unwrap_or(syscalls::TARFS_FS_TYPE)
    }

    /// Major and minor number of the mount itself, whatever lies over it.
    pub(super) fn lower_device(&self) -> (u32, u32) {
        self.overlay.map_or(self.device, |(_, device)| device)
    }
}

/// Accepts a mount with `connection`, or any without one.
fn is_target(connection: Option<BorrowedFd<'_>>) -> impl FnOnce(&PinnedMount) -> bool {
    move |mount| {
        connection.is_none_or(|connection| syscalls::is_mount_of_connection(connection, mount))
    }
}

/// A mount that nobody serves at the moment.
#[derive(Debug)]
pub struct InheritedSession {
    /// Where it is.
    pub target: MountTarget,
    /// Where the kernel asks.
    pub descriptor: OwnedFd,
    /// What the kernel offered when the connection began, a bit each.
    pub capabilities: u64,
}

/// Whether a connection on which the kernel offered `capabilities` can be gone on with.
pub fn supports_takeover(capabilities: u64) -> bool {
    InitFlags::from_bits_retain(capabilities).contains(InitFlags::FUSE_HAS_RESEND)
}

/// A session that serves `filesystem` where the process before has stopped.
///
/// # Errors
/// When the system has no sockets left to give, or the kernel does not send requests again.
pub(super) fn take_over_session(
    filesystem: TarFilesystem,
    inherited: &InheritedSession,
    acl: SessionACL,
    config: Config,
) -> io::Result<Session<TarFilesystem>> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::write(&ours, &fuse_init_request(inherited.capabilities))?;
    // What it wants was settled long ago: the answer is of no interest.
    let session = Session::from_fd(filesystem, theirs, acl, config)?;
    replace_descriptor(&session, &inherited.descriptor)?;
    resend_requests(&inherited.descriptor)?;
    Ok(session)
}

/// The kernel's first request, as it was.
fn fuse_init_request(capabilities: u64) -> Vec<u8> {
    let capabilities = capabilities | InitFlags::FUSE_INIT_EXT.bits();
    let low = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    let words = [
        IN_HEADER_BYTES + INIT_IN_BYTES,
        FUSE_INIT,
        // The number of the request, any; of the root; of who asks; and padding.
        2,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        FUSE_PROTOCOL_VERSION.0,
        FUSE_PROTOCOL_VERSION.1,
        // Read-ahead; the kernel's is set already.
        0,
        low(capabilities),
        low(capabilities >> 32),
    ];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize((IN_HEADER_BYTES + INIT_IN_BYTES) as usize, 0);
    bytes
}

/// Makes the descriptor of `session`, which is not running yet, one of `device`.
#[expect(
    unsafe_code,
    reason = "no safe call replaces what a borrowed descriptor names"
)]
fn replace_descriptor(session: &Session<TarFilesystem>, device: impl AsFd) -> io::Result<()> {
    let raw = session.as_fd().as_raw_fd();
    // SAFETY: `raw` is open, as `session` owns it and is borrowed for as long as this function runs.
    // The second owner is never dropped, so the number is closed once, by the session. Between the two
    // owners nothing is in dispute: dup3(2) replaces what the number names in one step, and nobody
    // uses the session's descriptor meanwhile, because its threads do not run before `run`.
    let mut descriptor = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(raw) });
    rustix::io::dup3(device, &mut descriptor, DupFlags::CLOEXEC)?;
    Ok(())
}

/// Puts the requests that were taken and not answered back on the list.
fn resend_requests(device: impl AsFd) -> io::Result<()> {
    let mut word = Vec::with_capacity(16);
    word.extend(16_u32.to_ne_bytes());
    word.extend(FUSE_NOTIFY_RESEND.to_ne_bytes());
    word.extend(0_u64.to_ne_bytes());
    rustix::io::write(device, &word)?;
    Ok(())
}
