//! Inode priming: a hidden directory makes inodes known to the kernel before a caller asks for them.
//!
//! The kernel accepts pushed bytes only for inodes that it knows. A lookup of each file takes longer than
//! pushing its bytes, and real directories are listed only after the scan. So a hidden directory in the root
//! lists any files by inode number, and two requests make hundreds of inodes known.
//!
//! Opening a file in it bypasses the permission checks of the real directories. So the directory has mode 0,
//! and only root can enter it, who passes every check anyway. Its name is random, and valid for one pass.

use std::fmt::Write;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::base::sync::Mutex;
use crate::fuse::attr;
use crate::index::Ino;

/// Buffer size of a pass: the names of some 700 files.
const READDIR_BUFFER_BYTES: usize = 128 << 10;

/// Lowest inode number of a priming directory, above those of any index.
const FIRST_PRIMING_INODE: u64 = 1 << 62;

/// Number of random bytes in the name. No archive has that name, and no user can guess it.
const SECRET_BYTES: usize = 16;

#[derive(Debug, Default)]
pub(in crate::fuse) struct PrimingDir {
    pass: Mutex<PrimingPass>,
}

#[derive(Debug, Default)]
struct PrimingPass {
    generation: u64,
    /// Empty if there is no pass.
    name: String,
    files: Vec<Ino>,
    /// Number of files that the kernel has listed.
    known_count: usize,
}

impl PrimingDir {
    /// Makes the inodes `files` known to the kernel. `open_root` opens the mount. The caller must hold no lock that a reply
    /// needs, and only one thread may call at a time. After an error the kernel looks up each file.
    pub(in crate::fuse) fn prime(
        &self,
        open_root: impl FnOnce() -> io::Result<OwnedFd>,
        mut files: Vec<Ino>,
    ) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let root = open_root()?;
        let mut buffer = vec![MaybeUninit::uninit(); READDIR_BUFFER_BYTES];
        while !files.is_empty() {
            let name = self.begin_pass(files)?;
            let _hide = HideOnDrop(self);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let directory =
                openat(&root, &name, flags, Mode::empty()).map_err(|error| match error {
                    // Later attempts would fail, too. EPERM makes the caller disable priming.
                    Errno::ACCESS => Errno::PERM,
                    other => other,
                })?;
            // One request is enough: the next ones would ask for names without attributes.
            RawDir::new(&directory, &mut buffer).next().transpose()?;
            files = self.take_unknown()?;
        }
        Ok(())
    }

    /// Shows `files` in a directory with a new random name, which it returns.
    fn begin_pass(&self, files: Vec<Ino>) -> io::Result<String> {
        let mut secret = [0; SECRET_BYTES];
        if getrandom(&mut secret, GetRandomFlags::empty())? < SECRET_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut name = String::from(".");
        for byte in secret {
            write!(name, "{byte:02x}").map_err(io::Error::other)?;
        }
        let mut pass = self.pass.lock();
        *pass = PrimingPass {
            generation: pass.generation + 1,
            name: name.clone(),
            files,
            known_count: 0,
        };
        Ok(name)
    }

    /// The files that the kernel has not listed yet. An error if it listed none.
    fn take_unknown(&self) -> io::Result<Vec<Ino>> {
        let mut pass = self.pass.lock();
        let known_count = pass.known_count.min(pass.files.len());
        if known_count == 0 {
            return Err(Errno::NODATA.into());
        }
        Ok(pass.files.split_off(known_count))
    }

    pub(in crate::fuse) fn lookup(&self, name: &[u8]) -> Option<FileAttr> {
        let pass = self.pass.lock();
        let is_current = !pass.name.is_empty() && name == pass.name.as_bytes();
        is_current.then(|| directory_attr(inode(pass.generation)))
    }

    pub(in crate::fuse) fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        if !Self::is_priming_inode(inode) {
            return None;
        }
        let pass = self.pass.lock();
        let is_current = !pass.name.is_empty() && inode == self::inode(pass.generation);
        is_current.then(|| directory_attr(inode))
    }

    /// Whether `inode` belongs to a current or former priming directory.
    pub(in crate::fuse) fn is_priming_inode(inode: INodeNo) -> bool {
        inode.0 >= FIRST_PRIMING_INODE
    }

    /// Calls `add` for each file and the next one's offset, until `add` is full.
    pub(in crate::fuse) fn list(&self, inode: INodeNo, mut add: impl FnMut(Ino, u64) -> bool) {
        let mut pass = self.pass.lock();
        if inode != self::inode(pass.generation) {
            return;
        }
        let full = (1..)
            .zip(&pass.files)
            .position(|(next, file)| add(*file, next));
        pass.known_count = full.unwrap_or(pass.files.len());
    }
}

struct HideOnDrop<'a>(&'a PrimingDir);

impl Drop for HideOnDrop<'_> {
    fn drop(&mut self) {
        let mut pass = self.0.pass.lock();
        pass.name.clear();
        pass.files.clear();
    }
}

fn inode(generation: u64) -> INodeNo {
    INodeNo(FIRST_PRIMING_INODE.saturating_add(generation))
}

fn directory_attr(inode: INodeNo) -> FileAttr {
    FileAttr {
        ino: inode,
        kind: FileType::Directory,
        nlink: 2,
        blksize: attr::BLKSIZE,
        ..attr::negative_entry()
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

    // Promises: scan-pages
    #[test]
    fn priming_dir_is_found_only_by_its_current_random_name() {
        let priming_dir = PrimingDir::default();
        assert!(priming_dir.lookup(b"").is_none());
        let name = priming_dir.begin_pass(vec![Ino(7)]).expect("random bytes");
        let found = priming_dir.lookup(name.as_bytes()).expect("it is shown");
        assert_eq!((found.perm, found.kind), (0, FileType::Directory));
        assert!(PrimingDir::is_priming_inode(found.ino));
        assert!(priming_dir.lookup(b"").is_none());
        let other = priming_dir.begin_pass(vec![Ino(8)]).expect("random bytes");
        assert_ne!(other, name);
        assert!(priming_dir.lookup(name.as_bytes()).is_none());
        drop(HideOnDrop(&priming_dir));
        assert!(priming_dir.lookup(other.as_bytes()).is_none());
        assert!(priming_dir.lookup(b"").is_none());
    }

    #[test]
    fn files_beyond_the_buffer_stay_for_next_pass() {
        let priming_dir = PrimingDir::default();
        let files: Vec<_> = (1..=5).map(Ino).collect();
        priming_dir.begin_pass(files.clone()).expect("random bytes");
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
