//! The FUSE filesystem: decodes requests, calls the archive, and replies.

use std::ffi::{OsStr, c_long};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fuser::{
    AccessFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyXattr, Request,
};
use rustix::ioctl::opcode;
use tracing::trace_span;

use super::archives::Archives;
use super::mount::MountOptions;
use super::passthrough::{BackingFileIo, BackingFiles};
use super::pending_replies::{self, FailReply, PendingReplies, Watchdog};
use super::push::{KernelCache, PrimingDir};
use super::read::ReadRequest;
use super::state::{FilesystemState, TTL_SCANNING, ttl};
use super::subtree::Subtree;
use super::timed_out_reads::RequestedRange;
use super::{attr, caller, listing, seek, xattr};
use crate::archive::Volume;
use crate::archive::directory::ArchiveDirectory;
use crate::base::NAME_MAX;
use crate::base::passwd::Accounts;
use crate::base::stats::Stats;
use crate::base::xattr::filter::XattrFilter;
use crate::index::Ino;

/// Maximum bytes of a request from the kernel. Its read-ahead sends at most 1 MiB.
const MAX_REQUEST_BYTES: u32 = 1 << 20;

const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

/// Maximum number of file systems below a mount with passthrough. With 2, no overlay could be on top.
const MAX_STACK_DEPTH: u32 = 1;

/// Request of ioctl(2) that reads the flags of chattr(1) (`linux/fs.h`).
const FS_IOC_GETFLAGS: u32 = opcode::read::<c_long>(b'f', 1);

/// Request of ioctl(2) that reads these flags and more as a `struct fsxattr`.
const FS_IOC_FSGETXATTR: u32 = opcode::read::<[u8; FSXATTR_BYTES]>(b'X', 31);

const FSXATTR_BYTES: usize = 28;

fn new_pending_replies(
    volume: &Arc<dyn Volume>,
    timeout: Duration,
    stats: &Arc<Stats>,
) -> Arc<PendingReplies> {
    let counters = counters(volume, stats);
    let volume = Arc::downgrade(volume);
    let scan_position = move || {
        let volume = volume.upgrade().filter(|volume| !volume.is_scan_over())?;
        Some(volume.index().origin().plain_bytes)
    };
    Arc::new(PendingReplies::new(
        timeout,
        counters,
        Box::new(scan_position),
    ))
}

/// The counters of a mount, and those of the work of its volume.
fn counters(volume: &Arc<dyn Volume>, stats: &Arc<Stats>) -> (Arc<Stats>, Arc<Stats>) {
    let archives = volume.archives();
    let work = archives.first().map_or(stats, |archive| archive.stats());
    (Arc::clone(stats), Arc::clone(work))
}

/// A FUSE filesystem that shows a directory of an archive.
#[derive(Debug)]
pub struct TarFilesystem {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) state: Arc<FilesystemState>,
    checks_permissions: bool,
    /// Whether listxattr(2) shows the names of `trusted.*` to every caller.
    lists_trusted: bool,
    /// The capability bits that the kernel offers. Set when the kernel connects.
    pub(super) capabilities: Arc<OnceLock<u64>>,
    /// Opens and reads backing files. Files are then opened with handles.
    pub(super) backing_io: Option<Arc<BackingFileIo>>,
    watchdog: Option<Watchdog>,
    /// The archives that are shown in the directories of `volume`, if it is a listing of them.
    pub(super) archives: Option<Arc<Archives<Self>>>,
}

impl TarFilesystem {
    /// A filesystem that shows `volume` as `subtree` and `options` say. `stats` counts what is served, apart from other
    /// filesystems of the same volume if they have other counters.
    pub fn new(
        volume: Arc<dyn Volume>,
        subtree: Subtree,
        options: &MountOptions,
        stats: Arc<Stats>,
    ) -> Self {
        let index = volume.index();
        let accounts = if index.has_xattrs() || !index.is_complete() {
            Accounts::load_system()
        } else {
            Accounts::default()
        };
        drop(index);
        let timeout = pending_replies::DEFAULT_TIMEOUT;
        let state = FilesystemState {
            subtree,
            archive_path: None,
            ownership: options.ownership,
            accounts: Arc::new(accounts),
            xattr_filter: XattrFilter::default(),
            may_be_truncated: false,
            may_be_foreign: volume.is_compared(),
            has_labels: OnceLock::new(),
            has_shown_xattrs: OnceLock::new(),
            kernel_cache: Arc::new(KernelCache::new(subtree, Arc::clone(&stats))),
            pending_replies: new_pending_replies(&volume, timeout, &stats),
            stats,
            recent_errors: Arc::default(),
            timed_out_reads: Arc::default(),
        };
        Self {
            checks_permissions: options.checks_permissions(),
            ..Self::with_state(volume, Arc::new(state))
        }
    }

    fn with_state(volume: Arc<dyn Volume>, state: Arc<FilesystemState>) -> Self {
        Self {
            volume,
            state,
            checks_permissions: false,
            lists_trusted: false,
            capabilities: Arc::default(),
            backing_io: None,
            watchdog: None,
            archives: None,
        }
    }

    /// Shows the archives of `directory` in the tree, which lists them. Archives are closed after `idle_timeout`
    /// without a request.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn with_archives(
        mut self,
        directory: Arc<dyn ArchiveDirectory>,
        idle_timeout: Duration,
    ) -> io::Result<Self> {
        let state = Arc::make_mut(&mut self.state);
        state.archive_path = Some(String::new());
        state.may_be_foreign = directory.may_be_foreign();
        state.accounts = Arc::new(Accounts::load_system());
        // A scan of any archive counts as progress, because archives wait for each other.
        let timeout = state.pending_replies.timeout;
        let counters = counters(&self.volume, &state.stats);
        let replies = PendingReplies::new(timeout, counters, Box::new(|| Some(0)));
        state.pending_replies = Arc::new(replies);
        let listing = (Arc::clone(&self.volume), Arc::clone(&self.state));
        let archives = Archives::start(listing, Self::with_state, directory, idle_timeout)?;
        self.archives = Some(archives);
        Ok(self)
    }

    /// Calls `answer` with the filesystem that has `inode`, which may be that of an archive, once it is open. The
    /// directory of an archive is in the archive if its entries are wanted (`is_entered`), and else in the listing.
    fn route<R: FailReply>(
        &self,
        req: &Request,
        (inode, is_entered): (INodeNo, bool),
        reply: R,
        answer: impl FnOnce(&Self, R) + Send + 'static,
    ) {
        let archives = self.archives.as_ref();
        match archives.and_then(|archives| Some((archives, archives.id(inode, is_entered)?))) {
            Some((archives, id)) => archives.with_archive((req.pid(), inode), id, reply, answer),
            None => answer(self, reply),
        }
    }

    /// Answers a listing of the directory `place.0` from the offset `place.1` on.
    fn list<R: FailReply>(
        &self,
        req: &Request,
        place: (INodeNo, u64),
        reply: R,
        answer: impl FnOnce(&FilesystemState, &Arc<dyn Volume>, (INodeNo, u64), R) + Send + 'static,
    ) {
        let caller = req.pid();
        self.route(req, (place.0, true), reply, move |this, reply| {
            let answer = move |state: &Arc<_>, volume: &Arc<_>, reply| {
                answer(state, volume, place, reply);
            };
            (this.state).with_listing(&this.volume, caller, place, reply, answer);
        });
    }

    /// Fails a request with ETIMEDOUT when nothing was fetched or decoded for it for `timeout`.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        let state = Arc::make_mut(&mut self.state);
        state.pending_replies = new_pending_replies(&self.volume, timeout, &state.stats);
        self
    }

    /// Shows only the extended attributes that `xattrs` selects.
    #[must_use]
    pub fn with_xattrs(mut self, xattrs: XattrFilter) -> Self {
        Arc::make_mut(&mut self.state).xattr_filter = xattrs;
        self
    }

    /// Gives every byte before the end of a truncated archive. Reads of a cut file bypass the page cache, whose
    /// pages are whole or fail.
    #[must_use]
    pub fn for_truncated(mut self) -> Self {
        Arc::make_mut(&mut self.state).may_be_truncated = true;
        self
    }

    /// Prepares the filesystem for use as the lower layer of an overlay. Overlayfs lists names on behalf of
    /// its callers and hides those of `trusted.*` itself.
    #[must_use]
    pub fn for_overlay(mut self) -> Self {
        self.lists_trusted = true;
        self
    }

    pub(super) fn with_watchdog(mut self) -> io::Result<Self> {
        self.watchdog = Some(Watchdog::start(&self.state.pending_replies)?);
        Ok(self)
    }

    /// Reads files from `backing_files` where there are any.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn with_backing_files(mut self, backing_files: Arc<dyn BackingFiles>) -> io::Result<Self> {
        let stats = Arc::clone(&self.state.stats);
        self.backing_io = Some(Arc::new(BackingFileIo::new(backing_files, stats)?));
        Ok(self)
    }

    fn answer_open(&self, caller: u32, inode: INodeNo, reply: ReplyOpen) {
        let found = FilesystemState::read(&self.volume, |index| {
            let entry = self.state.entry(index, inode)?;
            Ok(entry.ino())
        });
        let ino = match found {
            Ok(ino) => ino,
            Err(errno) => return reply.error(errno),
        };
        let backing_io = self.backing_io.clone();
        self.state.when_same(
            &self.volume,
            caller,
            (ino, None),
            reply,
            move |state, volume, reply| {
                let may_be_cut =
                    state.may_be_truncated && !matches!(volume.cut_offset(ino), Ok(None));
                let caching = if may_be_cut {
                    FopenFlags::FOPEN_DIRECT_IO
                } else {
                    // Files never change, so the cached pages stay valid.
                    FopenFlags::FOPEN_KEEP_CACHE
                };
                match backing_io {
                    Some(backing_io) => backing_io.open(ino, caching, reply),
                    None => reply.opened(FileHandle(0), caching | FopenFlags::FOPEN_NOFLUSH),
                }
            },
        );
    }

    fn answer_read(
        &self,
        caller: u32,
        ino: INodeNo,
        (offset, size, is_direct): (u64, u32, bool),
        reply: ReplyData,
    ) {
        let _span = trace_span!("read", inode = ino.0, offset, size).entered();
        let found = FilesystemState::read(&self.volume, |index| {
            let entry = self.state.entry(index, ino)?;
            Ok((entry.ino(), entry.size()))
        });
        let (entry, file_size) = match found {
            Ok(found) => found,
            Err(errno) => return reply.error(errno),
        };
        if offset >= file_size {
            return reply.data(&[]);
        }
        let len = size.min(MAX_REQUEST_BYTES);
        let left = file_size - offset;
        let len = len.min(u32::try_from(left).unwrap_or(u32::MAX));
        self.state.stats.served_reads.increment();
        if offset == 0 {
            self.state.kernel_cache.record_first_read(entry);
        }
        self.volume.report_read(entry, offset, len);
        let request = ReadRequest {
            reply,
            range: RequestedRange {
                caller,
                ino: entry,
                offset,
                len,
            },
            is_direct,
            volume: Arc::downgrade(&self.volume),
            state: Arc::clone(&self.state),
        };
        let Some(backing_io) = &self.backing_io else {
            return request.read();
        };
        let on_copy_read = |request: ReadRequest| {
            move |bytes| match bytes {
                Some(bytes) => request.finish(Ok(bytes)),
                None => request.read(),
            }
        };
        if let Some(fallback) = backing_io.read(entry, offset, len, on_copy_read(request)) {
            fallback(None);
        }
    }

    fn seek(&self, inode: INodeNo, offset: i64, whence: i32) -> Result<i64, Errno> {
        FilesystemState::read(&self.volume, |index| {
            let entry = self.state.entry(index, inode)?;
            let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
            let pieces = entry.pieces(offset, entry.size().saturating_sub(offset));
            let found = match whence {
                SEEK_DATA => seek::next_data(pieces, entry.size(), offset),
                SEEK_HOLE => seek::next_hole(pieces, entry.size(), offset),
                // The kernel handles the others itself.
                _ => return Err(Errno::EINVAL),
            };
            let found = found.ok_or(Errno::ENXIO)?;
            i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
        })
    }
}

/// Replies to getxattr or listxattr: with the length if `size` is 0, else with the bytes if they fit.
fn reply_xattr(reply: ReplyXattr, size: u32, bytes: &[u8]) {
    match u32::try_from(bytes.len()) {
        Ok(len) if size == 0 => reply.size(len),
        Ok(len) if len <= size => reply.data(bytes),
        _ => reply.error(Errno::ERANGE),
    }
}

impl Filesystem for TarFilesystem {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let offers = config.capabilities().bits();
        self.capabilities.get_or_init(|| offers);
        let mut wanted = InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA;
        if self.checks_permissions {
            // Without default_permissions the kernel rejects a mount with this flag.
            wanted |= InitFlags::FUSE_ALLOW_IDMAP;
            if self.state.may_have_xattrs(&self.volume.index()) {
                wanted |= InitFlags::FUSE_POSIX_ACL;
            }
        }
        wanted |= match &self.backing_io {
            None => InitFlags::FUSE_NO_OPEN_SUPPORT,
            // Passthrough needs handles.
            Some(_) => InitFlags::FUSE_PASSTHROUGH,
        };
        // An older kernel lacks some of these flags. Then the mount is slower or has no ACLs.
        let offered = wanted & config.capabilities();
        if config.add_capabilities(offered).is_err()
            || config.set_max_write(MAX_REQUEST_BYTES).is_err()
        {
            tracing::warn!("the kernel refused a capability that it had offered");
        }
        if let Some(backing_io) = &self.backing_io {
            let is_offered = offered.contains(InitFlags::FUSE_PASSTHROUGH)
                && config.set_max_stack_depth(MAX_STACK_DEPTH).is_ok();
            backing_io.open_files.set_passthrough_offered(is_offered);
        }
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let caller = req.pid();
        if parent == INodeNo::ROOT
            && let Some(attr) = self.state.kernel_cache.priming_dir.lookup(name.as_bytes())
        {
            return reply.entry(&TTL_SCANNING, &attr, Generation(0));
        }
        if name.len() > NAME_MAX {
            return reply.error(Errno::ENAMETOOLONG);
        }
        let _span = trace_span!("lookup", inode = parent.0, ?name).entered();
        let wanted = (parent, name.as_bytes().to_vec());
        self.route(req, (parent, true), reply, move |this, reply| {
            (this.state).answer_lookup(&this.volume, caller, wanted, reply);
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, _nlookup: u64) {
        if let Ok(ino) = u32::try_from(ino.0) {
            self.state.kernel_cache.forget_inode(Ino(ino));
        }
    }

    fn getattr(&self, req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let _span = trace_span!("getattr", inode = ino.0).entered();
        if let Some(attr) = self.state.kernel_cache.priming_dir.attributes(ino) {
            return reply.attr(&TTL_SCANNING, &attr);
        }
        self.route(req, (ino, false), reply, move |this, reply| {
            let found = FilesystemState::read(&this.volume, |index| {
                let attributes = this.state.attributes(this.state.entry(index, ino)?);
                Ok((ttl(index.is_complete()), attributes))
            });
            match found {
                Ok((ttl, attributes)) => reply.attr(&ttl, &attributes),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        let _span = trace_span!("readlink", inode = ino.0).entered();
        let caller = req.pid();
        self.route(req, (ino, false), reply, move |this, reply| {
            this.state.answer_link(&this.volume, caller, ino, reply);
        });
    }

    /// Without backing files, cut files and foreign indexes, ENOSYS tells the kernel to open files without asking again.
    fn open(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _span = trace_span!("open", inode = ino.0).entered();
        let is_plain = !self.state.may_be_truncated && !self.state.may_be_foreign;
        if is_plain && self.backing_io.is_none() {
            return reply.error(Errno::ENOSYS);
        }
        let caller = req.pid();
        self.route(req, (ino, false), reply, move |this, reply| {
            this.answer_open(caller, ino, reply);
        });
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let caller = req.pid();
        // The kernel names no owner when it reads for the page cache.
        let is_direct = lock_owner.is_some();
        self.route(req, (ino, false), reply, move |this, reply| {
            this.answer_read(caller, ino, (offset, size, is_direct), reply);
        });
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        // The index may have lost the entry, but the inode number is still the same.
        if let (Some(backing_io), Ok(number)) = (&self.backing_io, u32::try_from(ino.0)) {
            backing_io.open_files.release(Ino(number));
        }
        reply.ok();
    }

    /// ENOSYS tells the kernel not to send flushes, because nothing is written.
    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    /// ENOSYS tells the kernel to open directories without asking again, so later ones do not arrive here.
    /// The kernel then caches listings, as with `FOPEN_CACHE_DIR`. A first listing sends READDIRPLUS or
    /// READDIR requests from offset 0. A repeated one sends none while it is cached.
    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let _span = trace_span!("readdir", inode = ino.0, offset).entered();
        if PrimingDir::is_priming_inode(ino) {
            // Names without attributes make no inode known to the kernel.
            return reply.ok();
        }
        self.list(req, (ino, offset), reply, listing::list);
    }

    fn readdirplus(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let _span = trace_span!("readdirplus", inode = ino.0, offset).entered();
        if PrimingDir::is_priming_inode(ino) {
            return listing::list_priming_dir(&self.state, &self.volume, (ino, offset), reply);
        }
        self.list(req, (ino, offset), reply, listing::list_with_attributes);
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let index = self.volume.index();
        let blocks = index.stored_bytes().div_ceil(u64::from(attr::BLKSIZE));
        let files = index.entry_count();
        // No free space, as on any read-only filesystem. Linux programs expect names of at most 255.
        reply.statfs(blocks, 0, 0, files, 0, attr::BLKSIZE, 255, attr::BLKSIZE);
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _span = trace_span!("getxattr", inode = ino.0, ?name).entered();
        let name = name.to_owned();
        self.route(req, (ino, false), reply, move |this, reply| {
            if !this.state.may_have_xattrs(&this.volume.index()) {
                return reply.error(Errno::ENOSYS);
            }
            let value = FilesystemState::read(&this.volume, |index| {
                let entry = this.state.entry(index, ino)?;
                let (xattrs, name) = (this.state.shown_xattrs(&entry), name.as_bytes());
                match xattr::value(xattrs, name, &this.state.accounts) {
                    Some(value) => Ok(value.into_owned()),
                    None if name == xattr::SELINUX_LABEL && !this.state.has_labels(index) => {
                        Err(Errno::EOPNOTSUPP)
                    }
                    None if !xattr::is_known_namespace(name) => Err(Errno::EOPNOTSUPP),
                    None => Err(Errno::ENODATA),
                }
            });
            match value {
                Ok(value) => reply_xattr(reply, size, &value),
                Err(errno) => reply.error(errno),
            }
        });
    }

    /// An empty list if none is shown, because at ENOSYS tar(1) and getfattr(1) print an error a file.
    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _span = trace_span!("listxattr", inode = ino.0).entered();
        let caller = req.pid();
        self.route(req, (ino, false), reply, move |this, reply| {
            let names = FilesystemState::read(&this.volume, |index| {
                let entry = this.state.entry(index, ino)?;
                let lists_trusted = || this.lists_trusted || caller::has_sys_admin(caller);
                let xattrs = this.state.shown_xattrs(&entry);
                Ok(xattr::list_names(
                    xattrs,
                    &this.state.accounts,
                    lists_trusted,
                ))
            });
            match names {
                Ok(names) => reply_xattr(reply, size, &names),
                Err(errno) => reply.error(errno),
            }
        });
    }

    /// Reports no flags, because lsattr(1) and chattr(1) would fail otherwise, also on an overlay.
    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        _in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        if ![FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR].contains(&cmd) {
            return reply.error(Errno::ENOTTY);
        }
        let zeros = [0; FSXATTR_BYTES];
        let len = usize::try_from(out_size).unwrap_or(usize::MAX);
        reply.ioctl(0, zeros.get(..len).unwrap_or(&zeros));
    }

    /// ENOSYS allows every access. The kernel asks only without `default_permissions`.
    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn lseek(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let _span = trace_span!("lseek", inode = ino.0, offset, whence).entered();
        self.route(req, (ino, false), reply, move |this, reply| {
            match this.seek(ino, offset, whence) {
                Ok(found) => reply.offset(found),
                Err(errno) => reply.error(errno),
            }
        });
    }
}
