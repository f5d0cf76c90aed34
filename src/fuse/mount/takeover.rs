//! Takeover of a mount whose process has died, by a new process.
//!
//! The tree, the inode numbers and open files stay the same.
//!
//! A mount lives while a process holds its connection, the descriptor of the FUSE device. Requests wait
//! meanwhile. The library begins with a handshake, which the kernel does once for each connection. So the
//! library does it with this process over a socket, whose descriptor is then replaced by the device.
//!
//! The dead process may have left requests unanswered. `FUSE_NOTIFY_RESEND` (Linux 6.9) makes the kernel
//! queue them again. All requests only read, so one may be served twice.

use std::fs;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use fuser::{Config, InitFlags, Session, SessionACL};
use rustix::io::DupFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::target::MountTarget;
use crate::fuse::filesystem::TarFilesystem;

/// The first request of a connection (`FUSE_INIT`, include/uapi/linux/fuse.h).
const FUSE_INIT: u32 = 26;
const FUSE_PROTOCOL_VERSION: (u32, u32) = (7, 31);
const IN_HEADER_BYTES: u32 = 40;
const INIT_IN_BYTES: u32 = 64;

const FUSE_NOTIFY_RESEND: i32 = 7;

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

/// Whether this kernel offers that: Linux 6.9 and later.
pub fn kernel_supports_takeover() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    is_release_since(&release, (6, 9))
}

/// Whether `release`, such as `6.12.5-amd64`, is of `version` or later.
fn is_release_since(release: &str, version: (u32, u32)) -> bool {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    let found: Option<(u32, u32)> = (|| Some((number()?, number()?)))();
    found.is_some_and(|found| found >= version)
}

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
    // The capabilities were negotiated long ago, so the library's reply is ignored.
    let session = Session::from_fd(filesystem, theirs, acl, config)?;
    replace_descriptor(&session, &inherited.descriptor)?;
    resend_requests(&inherited.descriptor)?;
    Ok(session)
}

/// The kernel's first request, as the dead process got it.
fn fuse_init_request(capabilities: u64) -> Vec<u8> {
    let capabilities = capabilities | InitFlags::FUSE_INIT_EXT.bits();
    let low = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    let len = IN_HEADER_BYTES + INIT_IN_BYTES;
    // The request's number (any), 8 bytes; the inode, 8 bytes; user, group and process; padding.
    let header = [len, FUSE_INIT, 2, 0, 0, 0, 0, 0, 0, 0];
    let (major, minor) = FUSE_PROTOCOL_VERSION;
    // The zero is the read-ahead, which the kernel has set already.
    let init = [major, minor, 0, low(capabilities), low(capabilities >> 32)];
    let words = header.iter().chain(&init);
    let mut bytes: Vec<u8> = words.flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(len as usize, 0);
    bytes
}

/// Replaces the descriptor of `session`, which is not running yet, by one of `device`.
#[expect(
    unsafe_code,
    reason = "no safe call replaces what a borrowed descriptor names"
)]
fn replace_descriptor(session: &Session<TarFilesystem>, device: impl AsFd) -> io::Result<()> {
    let raw = session.as_fd().as_raw_fd();
    // SAFETY: `raw` is open, because `session` owns it and is borrowed while this function runs. The second
    // owner is never dropped, so the session alone closes the number. dup3(2) replaces the descriptor in one
    // step. No thread uses it meanwhile, because the session's threads start in `run`.
    let mut descriptor = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(raw) });
    rustix::io::dup3(device, &mut descriptor, DupFlags::CLOEXEC)?;
    Ok(())
}

fn resend_requests(device: impl AsFd) -> io::Result<()> {
    let header = [
        16_u32.to_ne_bytes(),
        FUSE_NOTIFY_RESEND.to_ne_bytes(),
        [0; 4],
        [0; 4],
    ];
    rustix::io::write(device, header.as_flattened())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: shared-isolated
    #[test]
    fn takeover_needs_linux_6_9() {
        for release in ["6.9.0", "6.12.5-amd64", "7.0-rc1", "6.10"] {
            assert!(is_release_since(release, (6, 9)), "{release}");
        }
        for release in ["6.8.12-generic", "5.14.0-427.el9", "6", "", "new"] {
            assert!(!is_release_since(release, (6, 9)), "{release}");
        }
    }
}
