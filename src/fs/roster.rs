//! Has the kernel hear of files before anyone asks for them by name.
//!
//! It takes bytes only for files that it knows. To look them up by their paths costs a request for
//! each and two threads that wake each other, which takes longer than the bytes do; to list their
//! directories has to wait for the end of a scan. So there is a directory beside the tree that lists
//! whatever files are on the roster, by their numbers: hundreds become known by two requests.
//!
//! What lies in it can be opened past the directories that check who may pass. So nobody has
//! permissions on it, which leaves root, who may pass everywhere; and its name is made up anew each time
//! and gone after the listing.
//!
//! Nobody stands in the mount for that, which would be in the way of who unmounts it: it happens in
//! a copy of it that is attached nowhere, and goes with the descriptor.

use std::fmt::Write;
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::attr;
use super::names::copy_of;
use crate::index::Ino;

/// What the kernel asks for at once: the names of some 700 files. Before Linux 6.15 it was a page, some
/// 20 names.
const LISTING_BYTES: usize = 128 << 10;

/// Rosters have numbers from here on as inodes, where no index has any.
const FIRST_INODE: u64 = 1 << 62;

/// Bytes of a name that no archive has, and nobody guesses.
const SECRET_BYTES: usize = 16;

/// Files that the kernel is to hear of.
#[derive(Debug, Default)]
pub(super) struct Roster {
    shown: Mutex<Shown>,
}

/// What the kernel is shown now.
#[derive(Debug, Default)]
struct Shown {
    /// How many there have been.
    number: u64,
    /// Empty while nothing is shown.
    name: String,
    files: Vec<Ino>,
    /// How many of them it has heard of.
    heard: usize,
}

impl Roster {
    /// Makes the kernel hear of `files` on the mount at `mountpoint` with the device number `device`.
    /// Whoever calls holds nothing that an answer needs. From one thread at a time.
    ///
    /// # Errors
    /// When it cannot be done; then readers ask by themselves. Others than root may make no copy of a
    /// mount.
    pub(super) fn show(
        &self,
        (mountpoint, device): (&Path, u64),
        mut files: Vec<Ino>,
    ) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let root = copy_of(mountpoint, device)?;
        let mut buffer = vec![MaybeUninit::uninit(); LISTING_BYTES];
        while !files.is_empty() {
            let name = self.put_up(files)?;
            let _taken_down = Down(self);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let directory =
                openat(&root, &name, flags, Mode::empty()).map_err(|error| match error {
                    // It will be refused the next time, too.
                    Errno::ACCESS => Errno::PERM,
                    other => other,
                })?;
            // One request: those for what follows would be for names alone.
            RawDir::new(&directory, &mut buffer).next().transpose()?;
            files = self.unheard()?;
        }
        Ok(())
    }

    /// Shows `files` under a name of their own.
    fn put_up(&self, files: Vec<Ino>) -> io::Result<String> {
        let mut secret = [0; SECRET_BYTES];
        if getrandom(&mut secret, GetRandomFlags::empty())? < SECRET_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut name = String::from(".");
        for byte in secret {
            write!(name, "{byte:02x}").map_err(io::Error::other)?;
        }
        let mut shown = self.shown();
        *shown = Shown {
            number: shown.number + 1,
            name: name.clone(),
            files,
            heard: 0,
        };
        Ok(name)
    }

    /// What of it the kernel has not heard of.
    ///
    /// # Errors
    /// When it heard of nothing.
    fn unheard(&self) -> io::Result<Vec<Ino>> {
        let mut shown = self.shown();
        let heard = shown.heard.min(shown.files.len());
        if heard == 0 {
            return Err(Errno::NODATA.into());
        }
        Ok(shown.files.split_off(heard))
    }

    /// What `name` in the root stands for, if it is the roster's.
    pub(super) fn look_up(&self, name: &[u8]) -> Option<FileAttr> {
        let shown = self.shown();
        let is_it = !shown.name.is_empty() && name == shown.name.as_bytes();
        is_it.then(|| directory(inode(shown.number)))
    }

    /// The roster's own attributes, if `inode` is the one that is shown now.
    pub(super) fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        if !Self::is(inode) {
            return None;
        }
        let shown = self.shown();
        let is_it = !shown.name.is_empty() && inode == self::inode(shown.number);
        is_it.then(|| directory(inode))
    }

    /// Whether `inode` is that of a roster, of now or before.
    pub(super) fn is(inode: INodeNo) -> bool {
        inode.0 >= FIRST_INODE
    }

    /// Calls `add` for the files on the roster `inode`, each with the offset of what follows, until
    /// `add` is full.
    pub(super) fn list(&self, inode: INodeNo, mut add: impl FnMut(Ino, u64) -> bool) {
        let mut shown = self.shown();
        if inode != self::inode(shown.number) {
            return;
        }
        let full = (1..)
            .zip(&shown.files)
            .position(|(next, file)| add(*file, next));
        shown.heard = full.unwrap_or(shown.files.len());
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shows nothing any more when dropped.
struct Down<'a>(&'a Roster);

impl Drop for Down<'_> {
    fn drop(&mut self) {
        let mut shown = self.0.shown();
        shown.name.clear();
        shown.files.clear();
    }
}

fn inode(number: u64) -> INodeNo {
    INodeNo(FIRST_INODE.saturating_add(number))
}

/// A directory that is nobody's to enter.
fn directory(inode: INodeNo) -> FileAttr {
    let never = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: inode,
        size: 0,
        blocks: 0,
        atime: never,
        mtime: never,
        ctime: never,
        crtime: never,
        kind: FileType::Directory,
        perm: 0,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: attr::BLKSIZE,
        flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(roster: &Roster, inode: INodeNo, room: usize) -> Vec<Ino> {
        let mut listed = Vec::new();
        roster.list(inode, |ino, next| {
            let is_full = listed.len() == room;
            if !is_full {
                listed.push(ino);
                assert_eq!(next, listed.len() as u64);
            }
            is_full
        });
        listed
    }

    #[test]
    fn a_roster_is_found_by_its_name_alone_which_is_new_each_time() {
        let roster = Roster::default();
        assert!(roster.look_up(b"").is_none());
        let name = roster.put_up(vec![Ino(7)]).expect("random bytes");
        let found = roster.look_up(name.as_bytes()).expect("it is shown");
        assert_eq!((found.perm, found.kind), (0, FileType::Directory));
        assert!(Roster::is(found.ino));
        assert!(roster.look_up(b"").is_none());
        let other = roster.put_up(vec![Ino(8)]).expect("random bytes");
        assert_ne!(other, name);
        assert!(roster.look_up(name.as_bytes()).is_none());
        drop(Down(&roster));
        assert!(roster.look_up(other.as_bytes()).is_none());
        assert!(roster.look_up(b"").is_none());
    }

    #[test]
    fn what_finds_no_room_is_left_for_the_next_one() {
        let roster = Roster::default();
        let files: Vec<_> = (1..=5).map(Ino).collect();
        roster.put_up(files.clone()).expect("random bytes");
        assert!(listed(&roster, inode(2), 9).is_empty(), "another one's");
        assert!(roster.unheard().is_err(), "nothing was heard of");
        assert_eq!(listed(&roster, inode(1), 3), files[..3]);
        assert_eq!(roster.unheard().ok().as_deref(), Some(&files[3..]));
    }
}
