//! System calls that rustix lacks: those that name a file by its directory and take flags, and statmount(2).
//!
//! They need no `/proc`. Older kernels answer `NOSYS`, and some sandboxes `PERM`.

#![expect(unsafe_code, reason = "rustix has no such calls")]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::path::Arg;

/// `fchmodat2(2)` of Linux 6.6. The number is the same on each architecture that Rust has for Linux, and so are the
/// others.
const FCHMODAT2: libc::c_long = 452;
/// `setxattrat(2)` of Linux 6.13.
const SETXATTRAT: libc::c_long = 463;
/// `getxattrat(2)` of Linux 6.13.
const GETXATTRAT: libc::c_long = 464;
/// `listxattrat(2)` of Linux 6.13.
const LISTXATTRAT: libc::c_long = 465;
/// `removexattrat(2)` of Linux 6.13.
const REMOVEXATTRAT: libc::c_long = 466;

/// `statmount(2)` of Linux 6.8.
const STATMOUNT: libc::c_long = 457;

/// Follows no link, and an empty name is the directory itself.
const FLAGS: libc::c_int = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;

/// `struct xattr_args` of linux/xattr.h.
#[repr(C)]
struct XattrValue {
    value: u64,
    size: u32,
    flags: u32,
}

impl XattrValue {
    fn new(value: *const u8, len: usize) -> Result<Self, Errno> {
        Ok(Self {
            value: value as u64,
            size: u32::try_from(len).map_err(|_| Errno::TOOBIG)?,
            flags: 0,
        })
    }
}

/// `struct mnt_id_req` of linux/mount.h, in its first version.
#[repr(C)]
struct MountRequest {
    size: u32,
    spare: u32,
    mount_id: u64,
    mask: u64,
}

/// Writes what `mask` selects of the mount with the unique number `mount_id` into `buffer`: a `struct statmount` of
/// linux/mount.h.
pub(super) fn statmount(mount_id: u64, mask: u64, buffer: &mut [u8]) -> Result<(), Errno> {
    let request = MountRequest {
        size: 24,
        spare: 0,
        mount_id,
        mask,
    };
    // SAFETY: the call reads a request of the length that it says, and writes into `buffer` at most its length.
    let result = unsafe {
        let request = std::ptr::from_ref(&request);
        libc::syscall(STATMOUNT, request, buffer.as_mut_ptr(), buffer.len(), 0)
    };
    length(result).map(drop)
}

/// Sets the mode of `name`, which may not be a symbolic link.
pub(super) fn fchmodat2(directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<(), Errno> {
    name.into_with_c_str(|name| {
        // SAFETY: `name` is a string with its NUL, which the call only reads.
        let result =
            unsafe { libc::syscall(FCHMODAT2, directory.as_raw_fd(), name.as_ptr(), mode, FLAGS) };
        length(result).map(drop)
    })
}

pub(super) fn setxattrat(
    directory: BorrowedFd<'_>,
    name: &[u8],
    attribute: &[u8],
    value: &[u8],
) -> Result<(), Errno> {
    let value = XattrValue::new(value.as_ptr(), value.len())?;
    with_names(name, attribute, |name, attribute| {
        // SAFETY: both names end with NUL, and `value` has a pointer to bytes that live until the call ends.
        unsafe {
            let (fd, size) = (directory.as_raw_fd(), size_of::<XattrValue>());
            libc::syscall(
                SETXATTRAT,
                fd,
                name,
                FLAGS,
                attribute,
                &raw const value,
                size,
            )
        }
    })
    .map(drop)
}

/// Reads the value into the spare room of `value`, which is empty.
pub(super) fn getxattrat(
    directory: BorrowedFd<'_>,
    name: &[u8],
    attribute: &[u8],
    value: &mut Vec<u8>,
) -> Result<(), Errno> {
    let room = value.spare_capacity_mut();
    let args = XattrValue::new(room.as_mut_ptr().cast::<u8>(), room.len())?;
    let len = with_names(name, attribute, |name, attribute| {
        // SAFETY: both names end with NUL, and `args` has a pointer to as much writable room as it says.
        unsafe {
            let (fd, size) = (directory.as_raw_fd(), size_of::<XattrValue>());
            libc::syscall(
                GETXATTRAT,
                fd,
                name,
                FLAGS,
                attribute,
                &raw const args,
                size,
            )
        }
    })?;
    // SAFETY: the kernel has written `len` bytes, which are in the room that it was given.
    unsafe { value.set_len(len) };
    Ok(())
}

/// Reads the names, each with its NUL, into the spare room of `names`, which is empty.
pub(super) fn listxattrat(
    directory: BorrowedFd<'_>,
    name: &[u8],
    names: &mut Vec<u8>,
) -> Result<(), Errno> {
    let room = names.spare_capacity_mut();
    let len = name.into_with_c_str(|name| {
        // SAFETY: `name` ends with NUL, and the kernel writes at most as many bytes as `room` has.
        length(unsafe {
            let (fd, list) = (directory.as_raw_fd(), room.as_mut_ptr());
            libc::syscall(LISTXATTRAT, fd, name.as_ptr(), FLAGS, list, room.len())
        })
    })?;
    // SAFETY: the kernel has written `len` bytes, which are in the room that it was given.
    unsafe { names.set_len(len) };
    Ok(())
}

pub(super) fn removexattrat(
    directory: BorrowedFd<'_>,
    name: &[u8],
    attribute: &[u8],
) -> Result<(), Errno> {
    with_names(name, attribute, |name, attribute| {
        // SAFETY: both names end with NUL, and the call only reads them.
        unsafe { libc::syscall(REMOVEXATTRAT, directory.as_raw_fd(), name, FLAGS, attribute) }
    })
    .map(drop)
}

/// Calls `call` with the names as strings for the kernel.
fn with_names(
    name: &[u8],
    attribute: &[u8],
    call: impl FnOnce(*const libc::c_char, *const libc::c_char) -> libc::c_long,
) -> Result<usize, Errno> {
    name.into_with_c_str(|name| {
        attribute.into_with_c_str(|attribute| length(call(name.as_ptr(), attribute.as_ptr())))
    })
}

/// The length that a call has returned, or its error.
fn length(result: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}
