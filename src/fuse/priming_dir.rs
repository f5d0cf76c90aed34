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
use super::dentries::clone_mount;
use crate::index::Ino;

/// What the kernel asks for at once: the names of some 700 files. Before Linux 6.15 it was a page, some
/// 20 names.
const READDIR_BUFFER_BYTES: usize = 128 << 10;

/// Rosters have numbers from here on as inodes, where no index has any.
const FIRST_PRIMING_INODE: u64 = 1 << 62;

/// Bytes of a name that no archive has, and nobody guesses.
const SECRET_BYTES: usize = 16;

/// Files that the kernel is to hear of.
#[derive(Debug, Default)]
pub(super) struct PrimingDir {
    listing: Mutex<Listing>,
}

/// What the kernel is shown now.
#[derive(Debug, Default)]
struct Listing {
    /// How many there have been.
    generation: u64,
    /// Empty while nothing is shown.
    name: String,
    files: Vec<Ino>,
    /// How many of them it has heard of.
    known_count: usize,
}

impl PrimingDir {
    /// Makes the kernel hear of `files` on the mount at `mountpoint` with the device number `device`.
    /// Whoever calls holds nothing that an answer needs. From one thread at a time.
    ///
    /// # Errors
    /// When it cannot be done; then readers ask by themselves. Others than root may make no copy of a
    /// mount.
    pub(super) fn prime(
        &self,
        (mountpoint, device): (&Path, u64),
        mut files: Vec<Ino>,
    ) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let root = clone_mount(mountpoint, device)?;
        let mut buffer = vec![MaybeUninit::uninit(); READDIR_BUFFER_BYTES];
        while !files.is_empty() {
            let name = self.set_listing(files)?;
            let _hide = HideOnDrop(self);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let directory =
                openat(&root, &name, flags, Mode::empty()).map_err(|error| match error {
                    // It will be refused the next time, too.
                    Errno::ACCESS => Errno::PERM,
                    other => other,
                })?;
            // One request: those for what follows would be for names alone.
            RawDir::new(&directory, &mut buffer).next().transpose()?;
            files = self.take_unknown()?;
        }
        Ok(())
    }

    /// Shows `files` under a name of their own.
    fn set_listing(&self, files: Vec<Ino>) -> io::Result<String> {
        let mut secret = [0; SECRET_BYTES];
        if getrandom(&mut secret, GetRandomFlags::empty())? < SECRET_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut name = String::from(".");
        for byte in secret {
            write!(name, "{byte:02x}").map_err(io::Error::other)?;
        }
        let mut listing = self.lock_listing();
        *listing = Listing {
            generation: listing.generation + 1,
            name: name.clone(),
            files,
            known_count: 0,
        };
        Ok(name)
    }

    /// What of it the kernel has not heard of.
    ///
    /// # Errors
    /// When it heard of nothing.
    fn take_unknown(&self) -> io::Result<Vec<Ino>> {
        let mut listing = self.lock_listing();
        let known_count = listing.known_count.min(listing.files.len());
        if known_count == 0 {
            return Err(Errno::NODATA.into());
        }
        Ok(listing.files.split_off(known_count))
    }

    /// What `name` in the root stands for, if it is the roster's.
    pub(super) fn lookup(&self, name: &[u8]) -> Option<FileAttr> {
        let listing = self.lock_listing();
        let is_current = !listing.name.is_empty() && name == listing.name.as_bytes();
        is_current.then(|| directory_attr(inode(listing.generation)))
    }

    /// The roster's own attributes, if `inode` is the one that is shown now.
    pub(super) fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        if !Self::is_priming_inode(inode) {
            return None;
        }
        let listing = self.lock_listing();
        let is_current = !listing.name.is_empty() && inode == self::inode(listing.generation);
        is_current.then(|| directory_attr(inode))
    }

    /// Whether `inode` is that of a roster, of now or before.
    pub(super) fn is_priming_inode(inode: INodeNo) -> bool {
        inode.0 >= FIRST_PRIMING_INODE
    }

    /// Calls `add` for the files on the roster `inode`, each with the offset of what follows, until
    /// `add` is full.
    pub(super) fn list(&self, inode: INodeNo, mut add: impl FnMut(Ino, u64) -> bool) {
        let mut listing = self.lock_listing();
        if inode != self::inode(listing.generation) {
            return;
        }
        let full = (1..)
            .zip(&listing.files)
            .position(|(next, file)| add(*file, next));
        listing.known_count = full.unwrap_or(listing.files.len());
    }

    fn lock_listing(&self) -> MutexGuard<'_, Listing> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shows nothing any more when dropped.
struct HideOnDrop<'a>(&'a PrimingDir);

impl Drop for HideOnDrop<'_> {
    fn drop(&mut self) {
        let mut listing = self.0.lock_listing();
        listing.name.clear();
        listing.files.clear();
    }
}

fn inode(generation: u64) -> INodeNo {
    INodeNo(FIRST_PRIMING_INODE.saturating_add(generation))
}

/// A directory that is nobody's to enter.
fn directory_attr(inode: INodeNo) -> FileAttr {
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

    fn listed(priming_dir: &PrimingDir, inode: INodeNo, room: usize) -> Vec<Ino> {
        let mut listed = Vec::new();
        priming_dir.list(inode, |ino, next| {
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
    fn priming_dir_is_found_only_by_its_current_random_name() {
        let priming_dir = PrimingDir::default();
        assert!(priming_dir.lookup(b"").is_none());
        let name = priming_dir.set_listing(vec![Ino(7)]).expect("random bytes");
        let found = priming_dir.lookup(name.as_bytes()).expect("it is shown");
        assert_eq!((found.perm, found.kind), (0, FileType::Directory));
        assert!(PrimingDir::is_priming_inode(found.ino));
        assert!(priming_dir.lookup(b"").is_none());
        let other = priming_dir.set_listing(vec![Ino(8)]).expect("random bytes");
        assert_ne!(other, name);
        assert!(priming_dir.lookup(name.as_bytes()).is_none());
        drop(HideOnDrop(&priming_dir));
        assert!(priming_dir.lookup(other.as_bytes()).is_none());
        assert!(priming_dir.lookup(b"").is_none());
    }

    #[test]
    fn files_beyond_the_buffer_stay_for_next_listing() {
        let priming_dir = PrimingDir::default();
        let files: Vec<_> = (1..=5).map(Ino).collect();
        priming_dir
            .set_listing(files.clone())
            .expect("random bytes");
        assert!(
            listed(&priming_dir, inode(2), 9).is_empty(),
            "another one's"
        );
        assert!(priming_dir.take_unknown().is_err(), "nothing was heard of");
        assert_eq!(listed(&priming_dir, inode(1), 3), files[..3]);
        assert_eq!(
            priming_dir.take_unknown().ok().as_deref(),
            Some(&files[3..])
        );
    }
}
