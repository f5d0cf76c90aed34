//! The FUSE filesystem: decodes requests, calls the archive, and replies.

use std::ffi::{OsStr, c_long};
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fuser::{
    AccessFlags, Errno, FileAttr, FileHandle, Filesystem, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyXattr, Request,
};
use rustix::ioctl::opcode;
use tracing::trace_span;

use crate::archive::{
    Archive, Callback, IndexGuard, IsWanted, PageCache, ReadError, WaitFor, Watcher,
};
use crate::base::passwd::Accounts;
use crate::base::stats::Stats;
use crate::base::xattr_filter::XattrFilter;
use crate::index::{Entry, Index, Ino, Kind};
use crate::layers::LayeredArchive;

use super::attr::{self, Ownership};
use super::mount::MountOptions;
use super::passthrough::{BackingFileIo, BackingFiles};
use super::pending_replies::{self, FailReply, PendingReplies, WaitError, WaitReason, Watchdog};
use super::push::{KernelCache, PrimingDir};
use super::recent_errors::RecentErrors;
use super::seek::{self, Whence};
use super::subtree::Subtree;
use super::timed_out_reads::{RequestedRange, TimedOutReads};
use super::{caller, errno, xattr};

/// TTL of entries and attributes once the index is complete.
const TTL_IMMUTABLE: Duration = Duration::from_hours(365 * 24);

/// TTL of entries and attributes during the scan.
///
/// The daemon never invalidates entries when a later member replaces one. `FUSE_NOTIFY_INVAL_ENTRY`
/// takes the lock of the parent directory, which a blocked lookup or readdir holds until the scan
/// answers it.
const TTL_SCANNING: Duration = Duration::from_secs(1);

/// Maximum bytes of a request from the kernel. The kernel's read-ahead sends reads of at most 1 MiB
/// (see [`session`]). Larger requests were not faster.
const MAX_REQUEST_BYTES: u32 = 1 << 20;

/// Maximum number of file systems below a mount with passthrough.
///
/// One is the backing files' own, which must not be stacked itself. With a depth of 2 the kernel
/// would allow no overlay on top.
const MAX_STACK_DEPTH: u32 = 1;

/// Longest name that the kernel accepts in a listing (`FUSE_NAME_MAX`). A longer one makes it reject
/// the whole listing. A lookup of such a name fails, too.
const FUSE_NAME_MAX_BYTES: usize = 1024;

/// Longest name that statfs(2) reports.
const NAME_MAX_BYTES: usize = 255;

/// Request of ioctl(2) that reads the flags of chattr(1) (`linux/fs.h`).
const FS_IOC_GETFLAGS: u32 = opcode::read::<c_long>(b'f', 1);

/// Request of ioctl(2) that reads these flags and more as a `struct fsxattr`.
const FS_IOC_FSGETXATTR: u32 = opcode::read::<[u8; FSXATTR_BYTES]>(b'X', 31);

/// Bytes of a `struct fsxattr`.
const FSXATTR_BYTES: usize = 28;

/// Callback that receives the result of a read.
pub type ReadReply = Box<dyn FnOnce(Result<Bytes, ReadError>) + Send>;

/// The tree and the bytes behind a mount.
pub trait Content: Send + Sync + fmt::Debug + 'static {
    /// As [`Archive::index`].
    fn index(&self) -> IndexGuard<'_>;

    /// As [`Archive::is_scanned`].
    fn is_scanned(&self) -> bool;

    /// As [`Archive::on_available`].
    fn on_available(&self, awaited: WaitFor, then: Callback);

    /// As [`Archive::watch`].
    fn watch(&self, _watcher: Watcher) {}

    /// As [`Archive::try_read`].
    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>>;

    /// As [`Archive::read`].
    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply);

    /// As [`Archive::note_read`].
    fn note_read(&self, _ino: Ino, _offset: u64, _len: u32) {}

    /// As [`Archive::note_lookup`].
    fn note_lookup(&self, _ino: Ino) {}

    /// As [`Archive::set_page_cache`].
    fn set_page_cache(&self, _page_cache: Arc<dyn PageCache>) {}

    /// As [`Archive::close`].
    fn close(&self) {}
}

impl Content for Archive {
    fn index(&self) -> IndexGuard<'_> {
        Self::index(self)
    }

    fn is_scanned(&self) -> bool {
        Self::is_scanned(self)
    }

    fn on_available(&self, awaited: WaitFor, then: Callback) {
        Self::on_available(self, awaited, then);
    }

    fn watch(&self, watcher: Watcher) {
        Self::watch(self, watcher);
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        Self::try_read(self, ino, offset, len)
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply) {
        Self::read(self, ino, offset, len, wanted, done);
    }

    fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        Self::note_read(self, ino, offset, len);
    }

    fn note_lookup(&self, ino: Ino) {
        Self::note_lookup(self, ino);
    }

    fn set_page_cache(&self, page_cache: Arc<dyn PageCache>) {
        Self::set_page_cache(self, page_cache);
    }

    fn close(&self) {
        Self::close(self);
    }
}

impl Content for LayeredArchive {
    fn index(&self) -> IndexGuard<'_> {
        IndexGuard::Complete(Self::index(self))
    }

    fn is_scanned(&self) -> bool {
        true
    }

    fn on_available(&self, _awaited: WaitFor, then: Callback) {
        then.run();
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        Self::try_read(self, ino, offset, len)
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, wanted: IsWanted, done: ReadReply) {
        Self::read(self, ino, offset, len, wanted, done);
    }

    fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        Self::note_read(self, ino, offset, len);
    }

    fn note_lookup(&self, ino: Ino) {
        Self::note_lookup(self, ino);
    }

    fn set_page_cache(&self, page_cache: Arc<dyn PageCache>) {
        Self::set_page_cache(self, &page_cache);
    }

    fn close(&self) {
        Self::close(self);
    }
}

/// The pending replies of a filesystem that shows `content`.
fn new_pending_replies(
    content: &Arc<dyn Content>,
    timeout: Duration,
    stats: &Arc<Stats>,
) -> Arc<PendingReplies> {
    let content = Arc::downgrade(content);
    let scan_position = move || {
        let content = content.upgrade().filter(|content| !content.is_scanned())?;
        Some(content.index().origin().plain_bytes)
    };
    Arc::new(PendingReplies::new(
        timeout,
        Arc::clone(stats),
        Box::new(scan_position),
    ))
}

/// A FUSE filesystem that shows a directory of an archive.
#[derive(Debug)]
pub struct TarFilesystem {
    pub(super) content: Arc<dyn Content>,
    subtree: Subtree,
    ownership: Ownership,
    checks_permissions: bool,
    accounts: Arc<Accounts>,
    /// Whether any entry has a security label. Set once the index is complete.
    has_labels: OnceLock<bool>,
    /// Selects the attributes that are shown.
    xattr_filter: Arc<XattrFilter>,
    /// Whether a complete index has an attribute that is shown.
    has_shown_xattrs: OnceLock<bool>,
    /// Whether listxattr(2) shows the names of `trusted.*` to every caller.
    lists_trusted: bool,
    stats: Arc<Stats>,
    pub(super) recent_errors: Arc<RecentErrors>,
    pub(super) kernel_cache: Arc<KernelCache>,
    /// Replies to requests that wait for the scan or for bytes.
    pending_replies: Arc<PendingReplies>,
    /// Reads that timed out a moment ago.
    timed_out_reads: Arc<TimedOutReads>,
    /// The capability bits that the kernel offers. Set when the kernel connects.
    pub(super) capabilities: Arc<OnceLock<u64>>,
    /// Opens and reads backing files. With it, files are opened with handles.
    pub(super) backing_io: Option<BackingFileIo>,
    /// Fails pending replies that time out. Runs once the filesystem is mounted.
    watchdog: Option<Watchdog>,
}

impl TarFilesystem {
    /// A filesystem that shows `content` as `subtree` and `options` say.
    ///
    /// `stats` counts the bytes that readers get.
    pub fn new(
        content: Arc<dyn Content>,
        subtree: Subtree,
        options: &MountOptions,
        stats: Arc<Stats>,
    ) -> Self {
        let index = content.index();
        let accounts = if index.has_xattrs() || !index.is_complete() {
            Accounts::load_system()
        } else {
            Accounts::default()
        };
        drop(index);
        let kernel_cache = Arc::new(KernelCache::new(subtree, Arc::clone(&stats)));
        let pending_replies =
            new_pending_replies(&content, pending_replies::DEFAULT_TIMEOUT, &stats);
        Self {
            subtree,
            kernel_cache,
            pending_replies,
            timed_out_reads: Arc::default(),
            capabilities: Arc::default(),
            ownership: options.ownership,
            checks_permissions: options.checks_permissions(),
            accounts: Arc::new(accounts),
            has_labels: OnceLock::new(),
            xattr_filter: Arc::default(),
            has_shown_xattrs: OnceLock::new(),
            lists_trusted: false,
            content,
            stats,
            recent_errors: Arc::default(),
            backing_io: None,
            watchdog: None,
        }
    }

    /// Sets the timeout of pending replies.
    ///
    /// A request fails with ETIMEDOUT when nothing was fetched or decoded for it for `timeout`.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.pending_replies = new_pending_replies(&self.content, timeout, &self.stats);
        self
    }

    /// Shows only the extended attributes that `xattrs` selects.
    #[must_use]
    pub fn with_xattrs(mut self, xattrs: XattrFilter) -> Self {
        self.xattr_filter = Arc::new(xattrs);
        self
    }

    /// Prepares the filesystem for use as the lower layer of an overlay.
    ///
    /// Overlayfs lists names on behalf of its callers and hides those of `trusted.*` itself.
    #[must_use]
    pub fn for_overlay(mut self) -> Self {
        self.lists_trusted = true;
        self
    }

    /// Starts the thread that fails pending replies on timeout.
    pub(super) fn with_watchdog(mut self) -> io::Result<Self> {
        self.watchdog = Some(Watchdog::start(&self.pending_replies)?);
        Ok(self)
    }

    /// Reads files from `backing_files` where there are any.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn with_backing_files(mut self, backing_files: Arc<dyn BackingFiles>) -> io::Result<Self> {
        self.backing_io = Some(BackingFileIo::new(backing_files, Arc::clone(&self.stats))?);
        Ok(self)
    }

    fn entry<'a>(&self, index: &'a Index, inode: INodeNo) -> Result<Entry<'a>, Errno> {
        self.subtree.entry(index, inode).ok_or({
            // The kernel asks only for inodes that it got from us. A missing one means that the live
            // index was replaced by an empty one, because the archive's digest did not match.
            if index.is_complete() {
                Errno::ENOENT
            } else {
                Errno::EIO
            }
        })
    }

    /// Whether there may be security labels.
    ///
    /// If there are none, the reply to getxattr(2) says "not supported", and ls(1) asks once instead
    /// of for every entry. ACLs cannot be answered in this way, because the kernel would then deny
    /// every access.
    fn has_labels(&self, index: &Index) -> bool {
        let has_labels = || {
            self.xattr_filter.selects(xattr::SELINUX_LABEL) && index.has_xattr(xattr::SELINUX_LABEL)
        };
        !index.is_complete() || *self.has_labels.get_or_init(has_labels)
    }

    /// Whether any entry may have an extended attribute that is shown.
    fn may_have_xattrs(&self, index: &Index) -> bool {
        let is_shown = |name: &[u8]| self.xattr_filter.selects(name);
        let has_shown = || index.xattr_names().any(is_shown);
        !index.is_complete() || *self.has_shown_xattrs.get_or_init(has_shown)
    }

    /// The extended attributes of `entry` that are shown.
    fn shown_xattrs<'a>(&self, entry: &Entry<'a>) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let (xattrs, kind) = (entry.xattrs(), entry.kind());
        xattrs.filter(move |(name, _)| {
            xattr::is_supported(name, kind) && self.xattr_filter.selects(name)
        })
    }

    fn attributes(&self, entry: Entry<'_>) -> FileAttr {
        let mode = xattr::mode(entry.mode(), self.shown_xattrs(&entry), &self.accounts);
        attr::attributes(
            entry,
            mode,
            self.subtree.inode(entry.ino()),
            &self.ownership,
        )
    }

    /// Replies to the lookup of `name` in `parent` by the thread `caller`.
    ///
    /// Replies at once if the index has the name or is complete. Otherwise the reply waits until the
    /// scan finds the name or ends.
    fn answer_lookup(&self, caller: u32, parent: INodeNo, name: Vec<u8>, reply: ReplyEntry) {
        // Read this first: a name that is missing after the end of the scan will not appear later.
        let is_scanned = self.content.is_scanned();
        let index = self.content.index();
        let directory = match self.entry(&index, parent) {
            Ok(directory) => directory.ino(),
            Err(errno) => return reply.error(errno),
        };
        if let Some(entry) = index.lookup(directory, &name) {
            self.stats.served_lookups.increment();
            if index.is_complete() {
                self.kernel_cache.mark_dentry_known(entry.ino());
                self.content.note_lookup(entry.ino());
            } else {
                // The kernel asks for the name again soon, because its TTL is short.
                self.kernel_cache.mark_inode_known(entry.ino());
            }
            return reply.entry(&ttl(&index), &self.attributes(entry), Generation(0));
        }
        if index.is_complete() {
            return reply.entry(&TTL_IMMUTABLE, &attr::negative_entry(), Generation(0));
        }
        drop(index);
        if is_scanned {
            return reply.error(Errno::EIO);
        }
        let upgrade = self.weak_clone();
        let awaited = WaitFor::Name(directory, name.clone());
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Scan);
        let wanted = pending.pending_check();
        let then = move || match (pending.take(), upgrade()) {
            (Some(reply), Some(filesystem)) => {
                filesystem.answer_lookup(caller, parent, name, reply);
            }
            (Some(reply), None) => reply.fail(WaitError::Closed),
            // The reply failed already.
            (None, _) => {}
        };
        self.content
            .on_available(awaited, Callback::while_wanted(wanted, then));
    }

    /// Calls `answer` with `reply` once the index is complete.
    fn with_complete_index<R: FailReply>(
        &self,
        caller: u32,
        reply: R,
        answer: impl FnOnce(&Self, &Index, R) + Send + 'static,
    ) {
        let index = self.content.index();
        if index.is_complete() {
            return answer(self, &index, reply);
        }
        drop(index);
        let upgrade = self.weak_clone();
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Scan);
        let wanted = pending.pending_check();
        let then = move || match (pending.take(), upgrade()) {
            (Some(reply), Some(filesystem)) => {
                answer(&filesystem, &filesystem.content.index(), reply);
            }
            (Some(reply), None) => reply.fail(WaitError::Closed),
            // The reply failed already.
            (None, _) => {}
        };
        let then = Callback::while_wanted(wanted, then);
        self.content.on_available(WaitFor::End, then);
    }

    /// This filesystem for a later reply, if its archive is still open then.
    ///
    /// A pending reply must not keep the archive open, because closing the archive ends the scan.
    fn weak_clone(&self) -> impl FnOnce() -> Option<Self> + Send + use<> {
        let content = Arc::downgrade(&self.content);
        let (accounts, stats) = (Arc::clone(&self.accounts), Arc::clone(&self.stats));
        let (recent_errors, kernel_cache) = (
            Arc::clone(&self.recent_errors),
            Arc::clone(&self.kernel_cache),
        );
        let pending_replies = Arc::clone(&self.pending_replies);
        let xattr_filter = Arc::clone(&self.xattr_filter);
        let (subtree, ownership) = (self.subtree, self.ownership);
        let (checks_permissions, lists_trusted) = (self.checks_permissions, self.lists_trusted);
        move || {
            Some(Self {
                content: content.upgrade()?,
                subtree,
                ownership,
                checks_permissions,
                accounts,
                has_labels: OnceLock::new(),
                xattr_filter,
                has_shown_xattrs: OnceLock::new(),
                lists_trusted,
                stats,
                recent_errors,
                kernel_cache,
                pending_replies,
                capabilities: Arc::default(),
                // Only opens and reads use these, and they do not wait in this way.
                timed_out_reads: Arc::default(),
                backing_io: None,
                watchdog: None,
            })
        }
    }

    /// Calls `add` for each entry of a listing until `add` is full.
    ///
    /// Lists `directory` from `offset` on. `add` gets the offset of the next entry, too. `.` has
    /// offset 0, `..` has 1, and the names follow.
    fn list<'a>(
        &self,
        index: &'a Index,
        directory: Entry<'a>,
        offset: u64,
        mut add: impl FnMut(Entry<'a>, u64, &[u8]) -> bool,
    ) {
        if offset == 0 && add(directory, 1, b".") {
            return;
        }
        let parent = self.subtree.parent(directory);
        let parent = self.entry(index, parent).unwrap_or(directory);
        if offset <= 1 && add(parent, 2, b"..") {
            return;
        }
        let Ok(from) = u32::try_from(offset.saturating_sub(2)) else {
            return;
        };
        for child in index.children(directory.ino(), from) {
            if !is_listable_name(child.name) {
                continue;
            }
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            if add(entry, next_offset(child.number), child.name) {
                return;
            }
        }
    }

    /// Lists the files of the priming directory in one reply.
    fn list_priming_dir(&self, priming_dir: INodeNo, offset: u64, mut reply: ReplyDirectoryPlus) {
        if offset == 0 {
            let index = self.content.index();
            let ttl = ttl(&index);
            self.kernel_cache
                .priming_dir
                .list(priming_dir, |ino, next| {
                    let Some(entry) = index.entry(ino) else {
                        return false;
                    };
                    let attr = self.attributes(entry);
                    let name = ino.0.to_string();
                    let is_full = reply.add(attr.ino, next, &name, &ttl, &attr, Generation(0));
                    if !is_full {
                        self.kernel_cache.mark_inode_known(ino);
                    }
                    is_full
                });
        }
        reply.ok();
    }

    /// The entry of `inode`, if it is a directory whose listing is complete.
    fn listable_directory<'a>(&self, index: &'a Index, inode: INodeNo) -> Result<Entry<'a>, Errno> {
        let entry = self.entry(index, inode)?;
        // The scan failed, so a listing would lack names.
        if !index.is_complete() {
            return Err(Errno::EIO);
        }
        match entry.kind() {
            Kind::Directory => Ok(entry),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn seek(&self, inode: INodeNo, offset: i64, whence: i32) -> Result<i64, Errno> {
        let index = self.content.index();
        let entry = self.entry(&index, inode)?;
        let whence = Whence::from_raw(whence).ok_or(Errno::EINVAL)?;
        let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        let pieces = entry.pieces(offset, entry.size().saturating_sub(offset));
        let found = seek::seek(pieces, entry.size(), offset, whence).ok_or(Errno::ENXIO)?;
        i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }
}

/// A read request, with its reply and the records of its result.
struct ReadRequest {
    reply: ReplyData,
    caller: u32,
    ino: Ino,
    offset: u64,
    len: u32,
    content: Weak<dyn Content>,
    stats: Arc<Stats>,
    recent_errors: Arc<RecentErrors>,
    pending_replies: Arc<PendingReplies>,
    timed_out_reads: Arc<TimedOutReads>,
}

impl ReadRequest {
    fn requested_range(&self) -> RequestedRange {
        RequestedRange {
            caller: self.caller,
            ino: self.ino,
            offset: self.offset,
            len: self.len,
        }
    }

    /// Reads from the archive: at once from memory, or on the archive's own threads.
    fn read(self) {
        let (ino, offset, len) = (self.ino, self.offset, self.len);
        let Some(content) = self.content.upgrade() else {
            return self.fail(WaitError::Closed);
        };
        if let Some(result) = content.try_read(ino, offset, len) {
            return self.finish(result);
        }
        if self
            .timed_out_reads
            .is_kernel_retry(self.requested_range(), Instant::now())
        {
            // The first failure was recorded already.
            self.stats.failed_reads.increment();
            return self.reply.error(Errno::ETIMEDOUT);
        }
        let (pending_replies, caller) = (Arc::clone(&self.pending_replies), self.caller);
        let reason = if content.is_scanned() {
            WaitReason::Bytes
        } else {
            WaitReason::Scan
        };
        let pending = pending_replies.register(self, caller, reason);
        let wanted = pending.pending_check();
        let done = move |result| {
            // The reply may have failed already.
            if let Some(request) = pending.take() {
                request.finish(result);
            }
        };
        content.read(ino, offset, len, wanted, Box::new(done));
    }

    fn finish(self, result: Result<Bytes, ReadError>) {
        match result {
            Ok(bytes) => {
                self.stats.served_bytes.add(bytes.len() as u64);
                self.reply.data(&bytes);
            }
            Err(error) => self.fail_with(&error, errno::from_read_error(&error)),
        }
    }

    fn fail_with(self, error: &(dyn std::error::Error + 'static), errno: Errno) {
        // Record before the reply, so that a caller that sees the error finds it in the status.
        self.stats.failed_reads.increment();
        let content = self.content.upgrade();
        let path = content.and_then(|content| content.index().path(self.ino));
        let path = path.unwrap_or_default();
        self.recent_errors.record(&path.to_string(), error);
        if errno == Errno::ETIMEDOUT {
            self.timed_out_reads
                .record(self.requested_range(), Instant::now());
        }
        self.reply.error(errno);
    }
}

impl FailReply for ReadRequest {
    fn fail(self, why: WaitError) {
        match why {
            WaitError::CallerKilled | WaitError::Closed => self.reply.error(why.errno()),
            WaitError::TimedOut => self.fail_with(&why, why.errno()),
        }
    }
}

/// Whether the kernel accepts `name` in a listing.
pub(super) fn is_listable_name(name: &[u8]) -> bool {
    name.len() <= FUSE_NAME_MAX_BYTES && !name.contains(&0)
}

/// The offset of the entry after child `number` in a listing.
pub(super) fn next_offset(number: u32) -> u64 {
    u64::from(number) + 3
}

/// The TTL of entries and attributes from `index`.
fn ttl(index: &Index) -> Duration {
    if index.is_complete() {
        TTL_IMMUTABLE
    } else {
        TTL_SCANNING
    }
}

/// Replies to getxattr or listxattr: with the length if `size` is 0, otherwise with the bytes if they
/// fit.
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
            if self.may_have_xattrs(&self.content.index()) {
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
        if parent == INodeNo::ROOT
            && let Some(attr) = self.kernel_cache.priming_dir.lookup(name.as_bytes())
        {
            return reply.entry(&TTL_SCANNING, &attr, Generation(0));
        }
        if name.len() > NAME_MAX_BYTES {
            return reply.error(Errno::ENAMETOOLONG);
        }
        let _span = trace_span!("lookup", inode = parent.0, ?name).entered();
        self.answer_lookup(req.pid(), parent, name.as_bytes().to_vec(), reply);
    }

    fn forget(&self, _req: &Request, ino: INodeNo, _nlookup: u64) {
        if let Ok(ino) = u32::try_from(ino.0) {
            self.kernel_cache.forget_inode(Ino(ino));
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let _span = trace_span!("getattr", inode = ino.0).entered();
        if let Some(attr) = self.kernel_cache.priming_dir.attributes(ino) {
            return reply.attr(&TTL_SCANNING, &attr);
        }
        let index = self.content.index();
        match self.entry(&index, ino) {
            Ok(entry) => reply.attr(&ttl(&index), &self.attributes(entry)),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        let _span = trace_span!("readlink", inode = ino.0).entered();
        let index = self.content.index();
        match self.entry(&index, ino).map(|entry| entry.kind()) {
            Ok(Kind::Symlink(target)) => reply.data(target),
            Ok(_) => reply.error(Errno::EINVAL),
            Err(errno) => reply.error(errno),
        }
    }

    /// Without backing files, ENOSYS tells the kernel to open files without asking again.
    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _span = trace_span!("open", inode = ino.0).entered();
        let Some(backing_io) = &self.backing_io else {
            return reply.error(Errno::ENOSYS);
        };
        let found = {
            let index = self.content.index();
            self.entry(&index, ino).map(|entry| entry.ino())
        };
        match found {
            Ok(ino) => backing_io.open(ino, reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _span = trace_span!("read", inode = ino.0, offset, size).entered();
        let (entry, file_size) = match self.entry(&self.content.index(), ino) {
            Ok(entry) => (entry.ino(), entry.size()),
            Err(errno) => return reply.error(errno),
        };
        if offset >= file_size {
            return reply.data(&[]);
        }
        let len = size.min(MAX_REQUEST_BYTES);
        let left = file_size - offset;
        let len = len.min(u32::try_from(left).unwrap_or(u32::MAX));
        self.stats.served_reads.increment();
        if offset == 0 {
            self.kernel_cache.note_first_read(entry);
        }
        self.content.note_read(entry, offset, len);
        let request = ReadRequest {
            reply,
            caller: req.pid(),
            pending_replies: Arc::clone(&self.pending_replies),
            timed_out_reads: Arc::clone(&self.timed_out_reads),
            ino: entry,
            offset,
            len,
            content: Arc::downgrade(&self.content),
            stats: Arc::clone(&self.stats),
            recent_errors: Arc::clone(&self.recent_errors),
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

    /// ENOSYS tells the kernel to open directories without asking again.
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
        self.with_complete_index(req.pid(), reply, move |filesystem, index, mut reply| {
            match filesystem.listable_directory(index, ino) {
                Ok(directory) => {
                    filesystem.list(index, directory, offset, |entry, next, name| {
                        let inode = filesystem.subtree.inode(entry.ino());
                        let file_type = attr::file_type(entry.kind());
                        reply.add(inode, next, file_type, OsStr::from_bytes(name))
                    });
                    reply.ok();
                }
                Err(errno) => reply.error(errno),
            }
        });
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
            return self.list_priming_dir(ino, offset, reply);
        }
        self.with_complete_index(req.pid(), reply, move |filesystem, index, mut reply| {
            match filesystem.listable_directory(index, ino) {
                Ok(directory) => {
                    filesystem.list(index, directory, offset, |entry, next, name| {
                        let attr = filesystem.attributes(entry);
                        let name = OsStr::from_bytes(name);
                        let is_full =
                            reply.add(attr.ino, next, name, &TTL_IMMUTABLE, &attr, Generation(0));
                        if !is_full {
                            filesystem.kernel_cache.mark_dentry_known(entry.ino());
                        }
                        is_full
                    });
                    reply.ok();
                }
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let index = self.content.index();
        let blocks = index.stored_bytes().div_ceil(u64::from(attr::BLKSIZE));
        let files = index.entry_count();
        // No free space, as on any read-only filesystem. 255 is the longest name that Linux programs
        // expect.
        reply.statfs(blocks, 0, 0, files, 0, attr::BLKSIZE, 255, attr::BLKSIZE);
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _span = trace_span!("getxattr", inode = ino.0, ?name).entered();
        let index = self.content.index();
        if !self.may_have_xattrs(&index) {
            return reply.error(Errno::ENOSYS);
        }
        match self.entry(&index, ino) {
            Ok(entry) => {
                match xattr::value(self.shown_xattrs(&entry), name.as_bytes(), &self.accounts) {
                    Some(value) => reply_xattr(reply, size, &value),
                    None if name.as_bytes() == xattr::SELINUX_LABEL && !self.has_labels(&index) => {
                        reply.error(Errno::EOPNOTSUPP);
                    }
                    None if !xattr::is_known_namespace(name.as_bytes()) => {
                        reply.error(Errno::EOPNOTSUPP);
                    }
                    None => reply.error(Errno::ENODATA),
                }
            }
            Err(errno) => reply.error(errno),
        }
    }

    /// Returns an empty list if no attribute is shown.
    ///
    /// With ENOSYS the kernel would say that lists are not supported. Then tar(1) and getfattr(1)
    /// print an error for every file.
    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _span = trace_span!("listxattr", inode = ino.0).entered();
        let index = self.content.index();
        match self.entry(&index, ino) {
            Ok(entry) => {
                let lists_trusted = || self.lists_trusted || caller::has_sys_admin(req.pid());
                let xattrs = self.shown_xattrs(&entry);
                let names = xattr::list_names(xattrs, &self.accounts, lists_trusted);
                reply_xattr(reply, size, &names);
            }
            Err(errno) => reply.error(errno),
        }
    }

    /// Reports that files have no flags such as "immutable".
    ///
    /// Without this reply lsattr(1) and chattr(1) fail, also on an overlay.
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

    /// ENOSYS tells the kernel to allow every access without asking again.
    ///
    /// The kernel sends this request only without `default_permissions`. Then every user who may
    /// enter the mount may read all of it.
    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn lseek(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let _span = trace_span!("lseek", inode = ino.0, offset, whence).entered();
        match self.seek(ino, offset, whence) {
            Ok(found) => reply.offset(found),
            Err(errno) => reply.error(errno),
        }
    }
}
