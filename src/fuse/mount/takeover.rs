//! Takeover of a mount whose process has died, by a new process.
//!
//! The tree and the inode numbers stay the same, and open files stay open.
//!
//! A mount lives while a process holds its connection, the descriptor of the FUSE device. Requests
//! wait meanwhile. A new process with that descriptor has two problems.
//!
//! First, the FUSE library begins with a handshake, which the kernel does once for each connection.
//! So the library does the handshake with this process over a socket, and then its descriptor is
//! replaced by the device.
//!
//! Second, the dead process may have read requests that it did not answer. `FUSE_NOTIFY_RESEND`
//! (Linux 6.9) makes the kernel queue them again. All requests only read, so it is harmless to serve
//! one twice.

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
use super::{mountinfo, syscalls};
use crate::fuse::filesystem::TarFilesystem;

/// The first request of a connection, and its protocol version (`FUSE_INIT`,
/// include/uapi/linux/fuse.h).
const FUSE_INIT: u32 = 26;
/// See [`FUSE_INIT`].
const FUSE_PROTOCOL_VERSION: (u32, u32) = (7, 31);
/// Bytes of a request's header, and of the rest of this request.
const IN_HEADER_BYTES: u32 = 40;
/// See [`IN_HEADER_BYTES`].
const INIT_IN_BYTES: u32 = 64;

/// Notification that makes the kernel resend requests (`FUSE_NOTIFY_RESEND`).
const FUSE_NOTIFY_RESEND: i32 = 7;

/// The place and the identity of a mount in the kernel's table of mounts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountTarget {
    /// Absolute, without symbolic links.
    pub mountpoint: PathBuf,
    /// Major and minor number of the top file system: the overlay or the mount itself.
    pub device: (u32, u32),
    /// The overlay over the mount, with the mount's own device number.
    pub overlay: Option<(OverlayKind, (u32, u32))>,
    /// The mount's namespace, unless it is this process's own.
    pub namespace: Option<Namespace>,
}

impl MountTarget {
    /// Whether it is attached, on top or below another mount.
    ///
    /// Sends no request to the mount itself. False if the kernel's table cannot be read, so that the
    /// caller leaves the mount alone.
    pub(super) fn is_mounted(&self) -> bool {
        self.find().is_ok_and(|found| found.is_some())
    }

    /// Finds the mount's place now, because a directory above it may have been renamed.
    ///
    /// Its device number identifies it while a process holds its connection.
    ///
    /// # Errors
    /// When the kernel's table of mounts cannot be read.
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

    /// Unmounts the top file system. `force` does so while it is in use, and ends its connection.
    ///
    /// With `connection`, unmounts only the mount with that connection. After a mount ends, the
    /// kernel gives its device number to another one.
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

    /// Whether this process's namespace has other mounts of the file system, such as bind mounts.
    pub(super) fn has_bind_mounts(&self) -> bool {
        self.namespace.is_none()
            && mountinfo::count_mounts(self.device).is_ok_and(|count| count > 1)
    }

    /// Detaches the mount while it is in use, and leaves the connection to other mounts.
    ///
    /// Otherwise as [`unmount`](Self::unmount).
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

    /// Its mountpoint now, or the last known one if it is detached.
    pub(super) fn current_mountpoint(&self) -> PathBuf {
        let found = self.find().ok().flatten();
        found.map_or_else(|| self.mountpoint.clone(), |found| found.path)
    }

    /// The type of the top file system.
    pub(super) fn fs_type(&self) -> &'static str {
        let overlay = self.overlay.map(|(overlay, _)| overlay.fs_type());
        overlay.unwrap_or(syscalls::TARFS_FS_TYPE)
    }

    /// Major and minor number of the mount itself, without any overlay.
    pub(super) fn lower_device(&self) -> (u32, u32) {
        self.overlay.map_or(self.device, |(_, device)| device)
    }
}

/// Accepts only a mount with `connection`, if that is given.
fn is_target(connection: Option<BorrowedFd<'_>>) -> impl FnOnce(&PinnedMount) -> bool {
    move |mount| {
        connection.is_none_or(|connection| syscalls::is_mount_of_connection(connection, mount))
    }
}

/// A mount whose process has died, with its connection.
#[derive(Debug)]
pub struct InheritedSession {
    /// The mount's place.
    pub target: MountTarget,
    /// The FUSE device of the connection.
    pub descriptor: OwnedFd,
    /// The capability bits that the kernel offered at the start of the connection.
    pub capabilities: u64,
}

/// Whether a connection with these `capabilities` can be taken over.
pub fn supports_takeover(capabilities: u64) -> bool {
    InitFlags::from_bits_retain(capabilities).contains(InitFlags::FUSE_HAS_RESEND)
}

/// Creates a session that serves `filesystem` on the connection of a dead process.
///
/// # Errors
/// When the system cannot create sockets, or the kernel does not resend requests.
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
    // The capabilities were negotiated with the kernel long ago, so the library's reply is ignored.
    let session = Session::from_fd(filesystem, theirs, acl, config)?;
    replace_descriptor(&session, &inherited.descriptor)?;
    resend_requests(&inherited.descriptor)?;
    Ok(session)
}

/// The kernel's first request, as the dead process got it.
fn fuse_init_request(capabilities: u64) -> Vec<u8> {
    let capabilities = capabilities | InitFlags::FUSE_INIT_EXT.bits();
    let low = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    let words = [
        IN_HEADER_BYTES + INIT_IN_BYTES,
        FUSE_INIT,
        // The request's number (any), 8 bytes; the inode, 8 bytes; user, group and process; and
        // padding.
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
        // Read-ahead. The kernel's value is set already.
        0,
        low(capabilities),
        low(capabilities >> 32),
    ];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize((IN_HEADER_BYTES + INIT_IN_BYTES) as usize, 0);
    bytes
}

/// Replaces the descriptor of `session`, which is not running yet, by one of `device`.
#[expect(
    unsafe_code,
    reason = "no safe call replaces what a borrowed descriptor names"
)]
fn replace_descriptor(session: &Session<TarFilesystem>, device: impl AsFd) -> io::Result<()> {
    let raw = session.as_fd().as_raw_fd();
    // SAFETY: `raw` is open, because `session` owns it and is borrowed while this function runs. The
    // second owner is never dropped, so the session alone closes the number. dup3(2) replaces the
    // descriptor in one step. No thread uses it meanwhile, because the session's threads start in
    // `run`.
    let mut descriptor = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(raw) });
    rustix::io::dup3(device, &mut descriptor, DupFlags::CLOEXEC)?;
    Ok(())
}

/// Makes the kernel queue the requests again that were read and not answered.
fn resend_requests(device: impl AsFd) -> io::Result<()> {
    let mut word = Vec::with_capacity(16);
    word.extend(16_u32.to_ne_bytes());
    word.extend(FUSE_NOTIFY_RESEND.to_ne_bytes());
    word.extend(0_u64.to_ne_bytes());
    rustix::io::write(device, &word)?;
    Ok(())
}
