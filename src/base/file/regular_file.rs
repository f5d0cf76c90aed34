//! Safe opening of regular files in untrusted trees.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2};

/// Opens the regular file at `path`; `None` for others, which it never opens, because that has side effects.
///
/// # Errors
/// If nothing is there, or it cannot be opened.
pub fn open(
    directory: impl AsFd,
    path: impl AsRef<Path>,
    resolve: ResolveFlags,
) -> io::Result<Option<File>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = openat2(directory, path.as_ref(), flags, Mode::empty(), resolve)?;
    if FileType::from_raw_mode(fstat(&found)?.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let found = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(Some(openat(CWD, found, flags, Mode::empty())?.into()))
}

/// The user who can change a file in the state `stat`, if it is none of `owners`; `None` if there is no such user.
///
/// Its owner can, and others can if its mode lets the group or all users write. An access control list shows in the bits
/// of the group. Root can change every file, and counts as foreign only as its owner.
///
/// For files that this user makes, such as caches and journals, `owners` is this user. For a published index it has root
/// and the owner of the archive, too, because they can change the archive.
pub(crate) fn foreign_writer(stat: &Stat, owners: &[u32]) -> Option<ForeignWriter> {
    let others = Mode::WGRP | Mode::WOTH;
    if owners.contains(&stat.st_uid) {
        let is_open = Mode::from_raw_mode(stat.st_mode).intersects(others);
        is_open.then_some(ForeignWriter::OtherUsers)
    } else {
        Some(ForeignWriter::Owner(stat.st_uid))
    }
}

/// The [foreign writer](foreign_writer) of the regular `file`, or of the link at `path` that leads to it.
///
/// # Errors
/// If nothing is at `path`, or it cannot be opened.
pub(crate) fn foreign_writer_at(
    directory: impl AsFd,
    path: impl AsRef<Path>,
    file: &File,
    owners: &[u32],
) -> io::Result<Option<ForeignWriter>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // The entry may be a symbolic link, whose owner chooses the file.
    let entry = fstat(openat(directory, path.as_ref(), flags, Mode::empty())?)?;
    let found = fstat(file)?;
    Ok(if owners.contains(&entry.st_uid) {
        foreign_writer(&found, owners)
    } else {
        Some(ForeignWriter::Owner(entry.st_uid))
    })
}

/// A user beside the trusted ones who can change a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ForeignWriter {
    /// The user with this number, who owns it, or a symbolic link to it.
    #[error("it belongs to user {0}")]
    Owner(u32),
    /// Users to whom its mode gives the right.
    #[error("others than its owner can write it")]
    OtherUsers,
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::base::thread::Thread;

    /// Opening a named pipe for reading would wake its writer.
    #[test]
    fn non_regular_file_is_not_opened() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("fifo");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).expect("made");
        std::fs::write(place.path().join("file"), "text").expect("written");
        symlink("file", place.path().join("link")).expect("made");
        let directory = File::open(place.path()).expect("there");
        let opened = |name| open(&directory, name, ResolveFlags::IN_ROOT).expect("there");
        let write = OFlags::WRONLY | OFlags::NONBLOCK;
        let writer = Thread::spawn("writer", {
            let path = path.clone();
            move || (0..2_000).any(|_| openat(CWD, &path, write, Mode::empty()).is_ok())
        });
        let writer = writer.expect("a thread");
        while !writer.is_finished() {
            assert!(opened("fifo").is_none() && opened(".").is_none());
        }
        assert!(!writer.join(), "a reader opened it");
        for name in ["file", "link"] {
            let mut text = String::new();
            let mut file = opened(name).expect("a file");
            file.read_to_string(&mut text).expect("readable");
            assert_eq!(text, "text");
        }
    }
}
