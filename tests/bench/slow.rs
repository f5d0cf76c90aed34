//! A FUSE file system that shows a directory and adds a delay to each call, as a file system of a network does.
//!
//! Attributes and names are valid for a second. It runs until it is unmounted.
//!
//! ```text
//! slow DIR MOUNTPOINT MICROSECONDS
//! ```

use std::collections::HashMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::linux::fs::MetadataExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use fuser::{
    BsdFileFlags, Config, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    Session, SessionACL, TimeOrNow, WriteFlags,
};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};

const TTL: Duration = Duration::from_secs(1);

/// Calls that wait at the same time.
const THREADS: usize = 128;

fn main() -> anyhow::Result<()> {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    let [directory, mountpoint, delay] = words.as_slice() else {
        anyhow::bail!("usage: slow DIR MOUNTPOINT MICROSECONDS");
    };
    let delay = delay.to_str().and_then(|micros| micros.parse().ok());
    let file_system = SlowFs {
        delay: Duration::from_micros(delay.context("no number of microseconds")?),
        root: fs::canonicalize(directory)?,
        paths: Mutex::default(),
        files: Mutex::default(),
        next_file: AtomicU64::new(1),
    };
    let mut config = Config::default();
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    config.acl = SessionACL::All;
    config.mount_options = vec![
        MountOption::DefaultPermissions,
        MountOption::FSName("slow".to_owned()),
    ];
    let session = Session::new(file_system, mountpoint, &config).context("cannot mount")?;
    Ok(session.run()?)
}

struct SlowFs {
    delay: Duration,
    root: PathBuf,
    /// Path of each inode that was looked up.
    paths: Mutex<HashMap<u64, PathBuf>>,
    files: Mutex<HashMap<u64, Open>>,
    next_file: AtomicU64,
}

#[derive(Clone)]
enum Open {
    File(Arc<File>),
    Directory(Arc<Vec<(u64, FileType, OsString)>>),
}

impl SlowFs {
    fn path(&self, inode: INodeNo) -> io::Result<PathBuf> {
        std::thread::sleep(self.delay);
        if inode == INodeNo::ROOT {
            return Ok(self.root.clone());
        }
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        let found = paths.get(&inode.0).cloned();
        found.ok_or_else(|| rustix::io::Errno::NOENT.into())
    }

    /// Attributes of the file at `path`, which is known by its number from now on.
    fn examine(&self, path: PathBuf) -> io::Result<FileAttr> {
        let found = attributes(&fs::symlink_metadata(&path)?);
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths.insert(found.ino.0, path);
        Ok(found)
    }

    fn keep(&self, open: Open) -> FileHandle {
        let number = self.next_file.fetch_add(1, Ordering::Relaxed);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.insert(number, open);
        FileHandle(number)
    }

    fn open_file(&self, number: FileHandle) -> io::Result<Open> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files
            .get(&number.0)
            .cloned()
            .ok_or_else(|| rustix::io::Errno::BADF.into())
    }

    fn close(&self, number: FileHandle) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.remove(&number.0);
    }

    /// Makes the file `name` in `parent`, and gives it to the caller.
    fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        make: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<FileAttr> {
        let path = self.path(parent)?.join(name);
        make(&path)?;
        lchown(&path, Some(request.uid()), Some(request.gid()))?;
        self.examine(path)
    }
}

/// Ends a call: `$ok` takes the value, or the caller gets the error.
macro_rules! answer {
    ($reply:ident, $result:expr, |$value:pat_param| $ok:expr) => {
        match $result {
            Ok($value) => $ok,
            Err(error) => $reply.error(io::Error::from(error).into()),
        }
    };
}

impl Filesystem for SlowFs {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let flags = InitFlags::FUSE_PARALLEL_DIROPS;
        let added = config.add_capabilities(flags);
        added.map_err(|_| io::Error::other("the kernel is too old"))
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self
            .path(parent)
            .and_then(|path| self.examine(path.join(name)));
        answer!(reply, found, |found| reply.entry(
            &TTL,
            &found,
            Generation(0)
        ));
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.path(inode).and_then(fs::symlink_metadata);
        answer!(reply, found, |found| reply
            .attr(&TTL, &numbered(&found, inode)));
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.path(inode).and_then(|path| {
            if uid.is_some() || gid.is_some() {
                lchown(&path, uid, gid)?;
            }
            if let Some(mode) = mode {
                fs::set_permissions(&path, Permissions::from_mode(mode & 0o7777))?;
            }
            if let Some(size) = size {
                OpenOptions::new().write(true).open(&path)?.set_len(size)?;
            }
            if atime.is_some() || mtime.is_some() {
                let times = Timestamps {
                    last_access: timespec(atime),
                    last_modification: timespec(mtime),
                };
                utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            fs::symlink_metadata(path)
        });
        answer!(reply, changed, |found| reply
            .attr(&TTL, &numbered(&found, inode)));
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        let target = self.path(inode).and_then(fs::read_link);
        answer!(reply, target, |target| reply
            .data(target.as_os_str().as_bytes()));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let made = self.make(request, parent, name, |path| {
            fs::create_dir(path)?;
            fs::set_permissions(path, Permissions::from_mode(mode & !umask & 0o7777))
        });
        answer!(reply, made, |made| reply.entry(&TTL, &made, Generation(0)));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self
            .path(parent)
            .and_then(|path| fs::remove_file(path.join(name)));
        answer!(reply, removed, |()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self
            .path(parent)
            .and_then(|path| fs::remove_dir(path.join(name)));
        answer!(reply, removed, |()| reply.ok());
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let made = self.make(request, parent, name, |path| symlink(target, path));
        answer!(reply, made, |made| reply.entry(&TTL, &made, Generation(0)));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let renamed = self.path(parent).and_then(|path| {
            let (old, new) = (path.join(name), self.path(new_parent)?.join(new_name));
            rustix::fs::renameat_with(CWD, &old, CWD, &new, flags)?;
            self.examine(new)
        });
        answer!(reply, renamed, |_| reply.ok());
    }

    fn link(&self, _: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let made = self.path(inode).and_then(|path| {
            let new = self.path(parent)?.join(name);
            fs::hard_link(path, &new)?;
            self.examine(new)
        });
        answer!(reply, made, |made| reply.entry(&TTL, &made, Generation(0)));
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let is_written = flags.0 & 0b11 != 0;
        let opened = self.path(inode).and_then(|path| {
            let mut options = OpenOptions::new();
            options.read(true).write(is_written).open(path)
        });
        answer!(reply, opened, |file| {
            let handle = self.keep(Open::File(Arc::new(file)));
            reply.opened(handle, FopenFlags::empty());
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let mut created = None;
        let made = self.make(request, parent, name, |path| {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false);
            let file = file.open(path)?;
            file.set_permissions(Permissions::from_mode(mode & !umask & 0o7777))?;
            created = Some(file);
            Ok(())
        });
        let made = made.and_then(|made| Ok((made, created.ok_or(rustix::io::Errno::IO)?)));
        answer!(reply, made, |(made, file)| {
            let handle = self.keep(Open::File(Arc::new(file)));
            reply.created(&TTL, &made, Generation(0), handle, FopenFlags::empty());
        });
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self
            .path(inode)
            .and_then(|_| match self.open_file(handle)? {
                Open::File(file) => {
                    let mut bytes = vec![0; size as usize];
                    let len = file.read_at(&mut bytes, offset)?;
                    bytes.truncate(len);
                    Ok(bytes)
                }
                Open::Directory(_) => Err(rustix::io::Errno::ISDIR.into()),
            });
        answer!(reply, read, |bytes| reply.data(&bytes));
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .path(inode)
            .and_then(|_| match self.open_file(handle)? {
                Open::File(file) => file.write_all_at(bytes, offset),
                Open::Directory(_) => Err(rustix::io::Errno::ISDIR.into()),
            });
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        answer!(reply, written, |()| reply.written(len));
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.close(handle);
        reply.ok();
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let names = self.path(inode).and_then(|path| {
            let names = fs::read_dir(path)?.map(|entry| {
                let entry = entry?;
                let kind = FileType::from_std(entry.file_type()?);
                let number = std::os::unix::fs::DirEntryExt::ino(&entry);
                Ok((
                    number,
                    kind.unwrap_or(FileType::RegularFile),
                    entry.file_name(),
                ))
            });
            names.collect::<io::Result<Vec<_>>>()
        });
        answer!(reply, names, |names| {
            let handle = self.keep(Open::Directory(Arc::new(names)));
            reply.opened(handle, FopenFlags::empty());
        });
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let names = self
            .path(inode)
            .and_then(|_| match self.open_file(handle)? {
                Open::Directory(names) => Ok(names),
                Open::File(_) => Err(rustix::io::Errno::NOTDIR.into()),
            });
        answer!(reply, names, |names| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            for (number, (inode, kind, name)) in names.iter().enumerate().skip(start) {
                if reply.add(INodeNo(*inode), number as u64 + 1, *kind, name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.close(handle);
        reply.ok();
    }
}

/// Attributes with the number under which the kernel knows the file.
fn numbered(found: &Metadata, inode: INodeNo) -> FileAttr {
    FileAttr {
        ino: inode,
        ..attributes(found)
    }
}

fn timespec(time: Option<TimeOrNow>) -> Timespec {
    let special = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    match time {
        None => special(UTIME_OMIT),
        Some(TimeOrNow::Now) => special(UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            Timespec::try_from(since).unwrap_or(special(UTIME_OMIT))
        }
    }
}

fn time(seconds: i64, nanoseconds: i64) -> SystemTime {
    let seconds = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    UNIX_EPOCH + seconds + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(0))
}

fn attributes(found: &Metadata) -> FileAttr {
    let kind = found.file_type();
    FileAttr {
        ino: INodeNo(found.st_ino()),
        size: found.st_size(),
        blocks: found.st_blocks(),
        atime: time(found.st_atime(), found.st_atime_nsec()),
        mtime: time(found.st_mtime(), found.st_mtime_nsec()),
        ctime: time(found.st_ctime(), found.st_ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: FileType::from_std(kind).unwrap_or(FileType::RegularFile),
        perm: u16::try_from(found.st_mode() & 0o7777).unwrap_or(0),
        nlink: u32::try_from(found.st_nlink()).unwrap_or(u32::MAX),
        uid: found.st_uid(),
        gid: found.st_gid(),
        rdev: u32::try_from(found.st_rdev()).unwrap_or(0),
        blksize: 4096,
        flags: 0,
    }
}
