//! Changes the mode of a file without following a link.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, chmodat, fchmod, openat, statat};
use rustix::io::Errno;

use super::syscalls::fchmodat2;

/// Permissions of the owner.
pub(crate) const OWNER_RWX: u32 = 0o700;

/// Sets the mode of the file `name` in `directory`, or with an empty name of the open file `directory` itself. Symbolic
/// links have none, so they are an error.
pub(crate) fn chmod_at(directory: impl AsFd, name: &[u8], mode: u32) -> Result<(), Errno> {
    let directory = directory.as_fd();
    match fchmodat2(directory, name, mode) {
        // Linux before 6.6, or a filter of system calls that is older.
        Err(Errno::NOSYS | Errno::PERM) => chmod_by_descriptor(directory, name, mode),
        done => done,
    }
}

/// By descriptors, because fchmodat(2) follows links.
fn chmod_by_descriptor(directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(mode);
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match name {
        b"" => None,
        name => Some(openat(
            directory,
            name,
            flags | OFlags::PATH,
            Mode::empty(),
        )?),
    };
    let file = opened.as_ref().map_or(directory, AsFd::as_fd);
    // fchmod(2) does not take the descriptor of a path.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    match chmodat(CWD, path, mode, AtFlags::empty()) {
        Err(Errno::NOENT) => {}
        changed => return changed,
    }
    fchmod(open_for_attributes(directory, name)?, mode)
}

/// Opens the file `name` in `directory`, or with an empty name the directory itself, without `/proc`. `OPNOTSUPP` for other
/// types than regular files and directories, whose opening would have side effects.
pub(super) fn open_for_attributes(
    directory: BorrowedFd<'_>,
    name: &[u8],
) -> Result<OwnedFd, Errno> {
    let mut found = AtFlags::SYMLINK_NOFOLLOW;
    found.set(AtFlags::EMPTY_PATH, name.is_empty());
    let found = statat(directory, name, found)?;
    let name = if name.is_empty() { b"." } else { name };
    let flags = match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => OFlags::DIRECTORY,
        FileType::RegularFile => OFlags::NONBLOCK,
        _ => return Err(Errno::OPNOTSUPP),
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    // Promises: change-closed
    #[test]
    fn mode_of_a_name_or_an_open_file_is_set_and_no_link_followed() {
        type Chmod = fn(BorrowedFd<'_>, &[u8], u32) -> Result<(), Errno>;
        let ways: [Chmod; 3] = [
            |at, name, mode| chmod_at(at, name, mode),
            fchmodat2,
            chmod_by_descriptor,
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
