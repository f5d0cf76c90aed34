//! Changes the mode of a file without following a link.

#![expect(unsafe_code, reason = "fchmodat2(2) has no safe interface")]

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, chmodat, openat};
use rustix::io::Errno;

/// Permissions of the owner.
pub(crate) const OWNER_RWX: u32 = 0o700;

/// Sets the mode of the file `name` in `directory`, or with an empty name of the open file `directory` itself. Symbolic
/// links have none, so they are an error.
///
/// # Errors
/// As chmod(2).
pub(crate) fn chmod_at(directory: impl AsFd, name: &[u8], mode: u32) -> Result<(), Errno> {
    let directory = directory.as_fd();
    match fchmodat2(directory, name, mode) {
        // Linux before 6.6, or a filter of system calls that is older.
        Err(Errno::NOSYS | Errno::PERM) => chmod_by_proc(directory, name, mode),
        done => done,
    }
}

fn fchmodat2(directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<(), Errno> {
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    let flags = (AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH).bits();
    // SAFETY: the name ends with a zero byte and outlives the call, and the descriptor is open meanwhile.
    let done = unsafe {
        let directory = directory.as_raw_fd();
        libc::syscall(libc::SYS_fchmodat2, directory, name.as_ptr(), mode, flags)
    };
    if done == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// By a path through a descriptor, because fchmodat(2) follows links and fchmod(2) takes no descriptors with `O_PATH`.
fn chmod_by_proc(directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match name {
        b"" => None,
        name => Some(openat(directory, name, flags, Mode::empty())?),
    };
    let number = opened.as_ref().map_or(directory, AsFd::as_fd).as_raw_fd();
    let path = format!("/proc/self/fd/{number}");
    chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn mode_of_a_name_or_an_open_file_is_set_and_no_link_followed() {
        type Chmod = fn(BorrowedFd<'_>, &[u8], u32) -> Result<(), Errno>;
        let ways: [Chmod; 3] = [
            |at, name, mode| chmod_at(at, name, mode),
            fchmodat2,
            chmod_by_proc,
        ];
        for chmod in ways {
            let place = tempfile::tempdir().expect("a directory");
            fs::write(place.path().join("f"), "").expect("space");
            symlink("f", place.path().join("l")).expect("new");
            let at = File::open(place.path()).expect("a directory");
            let file = rustix::fs::openat(&at, "f", OFlags::PATH, Mode::empty()).expect("there");
            let mode = || {
                fs::metadata(place.path().join("f"))
                    .expect("there")
                    .permissions()
                    .mode()
            };
            assert_eq!(chmod(at.as_fd(), b"f", 0o604), Ok(()));
            assert_eq!(mode() & 0o7777, 0o604);
            assert_eq!(chmod(file.as_fd(), b"", 0o4010), Ok(()));
            assert_eq!(mode() & 0o7777, 0o4010);
            assert_eq!(chmod(at.as_fd(), b"l", 0o777), Err(Errno::OPNOTSUPP));
            assert_eq!(chmod(at.as_fd(), b"none", 0o777), Err(Errno::NOENT));
            assert_eq!(mode() & 0o7777, 0o4010);
        }
    }
}
