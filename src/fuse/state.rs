//! State that the requests of a filesystem share, such as the tree as it is shown and pending replies.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fuser::{Errno, FileAttr, Generation, INodeNo, ReplyEntry};

use super::attr::{self, Ownership};
use super::pending_replies::{FailReply, PendingReplies, WaitError, WaitReason};
use super::push::KernelCache;
use super::recent_errors::RecentErrors;
use super::subtree::Subtree;
use super::timed_out_reads::TimedOutReads;
use super::xattr;
use crate::archive::{Callback, IndexGuard, TreePart, Volume, WaitFor};
use crate::base::passwd::Accounts;
use crate::base::stats::Stats;
use crate::base::xattr::filter::XattrFilter;
use crate::index::{Entry, EntryKind, Index};

/// TTL of entries and attributes once the index is complete.
pub(super) const TTL_IMMUTABLE: Duration = Duration::from_hours(365 * 24);

/// TTL during the scan. The daemon never invalidates entries, because `FUSE_NOTIFY_INVAL_ENTRY` takes the
/// lock of the parent directory, which a blocked lookup or readdir holds until the scan answers it.
pub(super) const TTL_SCANNING: Duration = Duration::from_secs(1);

/// Number of names whose rows are loaded before a listing is answered. A request returns about as many.
const MAX_PRELOADED_NAMES: usize = 2048;

pub(super) fn ttl(is_complete: bool) -> Duration {
    if is_complete {
        TTL_IMMUTABLE
    } else {
        TTL_SCANNING
    }
}

/// A filesystem's state without the archive. Pending replies hold it, and must not keep the archive open.
#[derive(Clone, Debug)]
pub(super) struct FilesystemState {
    pub(super) subtree: Subtree,
    /// Path of the archive with a slash at its end, if other archives share the connection. Then no answer for
    /// all of them must depend on this one.
    pub(super) archive_path: Option<String>,
    pub(super) ownership: Ownership,
    pub(super) accounts: Arc<Accounts>,
    pub(super) xattr_filter: XattrFilter,
    /// Whether archives may be truncated, so that opens must tell which files are cut.
    pub(super) may_be_truncated: bool,
    /// Whether archives may have indexes of others, so that files are compared when they are opened.
    pub(super) may_be_foreign: bool,
    /// Whether any entry has a security label. Set once the index is complete.
    pub(super) has_labels: OnceLock<bool>,
    /// Whether a complete index has an attribute that is shown.
    pub(super) has_shown_xattrs: OnceLock<bool>,
    pub(super) stats: Arc<Stats>,
    pub(super) recent_errors: Arc<RecentErrors>,
    pub(super) kernel_cache: Arc<KernelCache>,
    pub(super) pending_replies: Arc<PendingReplies>,
    pub(super) timed_out_reads: Arc<TimedOutReads>,
}

impl FilesystemState {
    /// The result of `access` to the index of `volume`, which fails if rows cannot be loaded. Usually the lookup has
    /// loaded them, but a restarted process did not answer that.
    pub(super) fn read<T>(
        volume: &Arc<dyn Volume>,
        access: impl FnOnce(&Index) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        volume.index().read(access).unwrap_or(Err(Errno::EIO))
    }

    pub(super) fn entry<'a>(&self, index: &'a Index, inode: INodeNo) -> Result<Entry<'a>, Errno> {
        self.subtree.entry(index, inode).ok_or({
            // The kernel got the inode from us. It is missing if the archive's digest did not match, and an
            // empty index replaced the live one.
            if index.is_complete() {
                Errno::ENOENT
            } else {
                Errno::EIO
            }
        })
    }

    pub(super) fn list<'a>(
        &self,
        index: &'a Index,
        inode: INodeNo,
        offset: u64,
        add: impl FnMut(Entry<'a>, u64, &[u8]) -> bool,
    ) -> Result<(), Errno> {
        let entry = self.entry(index, inode)?;
        // The scan failed, so a listing would lack names.
        if !index.is_complete() {
            return Err(Errno::EIO);
        }
        if entry.kind() != EntryKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        self.subtree.list(index, entry, offset, add);
        Ok(())
    }

    /// Uses the rows of the first names that a listing from `offset` on returns.
    pub(super) fn load_names(&self, index: &Index, inode: INodeNo, offset: u64) {
        let Some(entry) = self.subtree.entry(index, inode) else {
            return;
        };
        let mut count = 0;
        self.subtree.list(index, entry, offset, |entry, _, _| {
            entry.load_rows();
            count += 1;
            count == MAX_PRELOADED_NAMES
        });
    }

    /// Whether there may be security labels. Without any, getxattr(2) fails with "not supported", and ls(1)
    /// asks only once. For ACLs the kernel would then deny every access.
    pub(super) fn has_labels(&self, index: &Index) -> bool {
        let has_labels = || {
            // The search would load all names of attributes.
            self.xattr_filter.selects(xattr::SELINUX_LABEL)
                && (index.is_on_demand() || index.has_xattr(xattr::SELINUX_LABEL))
        };
        !index.is_complete() || *self.has_labels.get_or_init(has_labels)
    }

    pub(super) fn may_have_xattrs(&self, index: &IndexGuard<'_>) -> bool {
        let is_shown = |name: &[u8]| self.xattr_filter.selects(name);
        let has_shown = || {
            let any = |index: &Index| index.xattr_names().any(is_shown);
            index.has_xattrs() && (index.is_on_demand() || index.read(any).unwrap_or(true))
        };
        self.archive_path.is_some()
            || !index.is_complete()
            || *self.has_shown_xattrs.get_or_init(has_shown)
    }

    pub(super) fn shown_xattrs<'a>(
        &self,
        entry: &Entry<'a>,
    ) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        entry.shown_xattrs(&self.xattr_filter)
    }

    pub(super) fn attributes(&self, entry: Entry<'_>) -> FileAttr {
        let mode = entry.shown_mode(&self.xattr_filter, || &self.accounts);
        let inode = self.subtree.inode(entry.ino());
        attr::attributes(entry, mode, inode, &self.ownership)
    }

    /// Replies to the lookup of `name` by thread `caller`. Waits until the scan finds the name or ends, or
    /// until the rows of the index are loaded.
    pub(super) fn answer_lookup(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        (parent, name): (INodeNo, Vec<u8>),
        reply: ReplyEntry,
    ) {
        if !volume.index().is_on_demand() {
            return self.answer_loaded_lookup(volume, caller, (parent, name), reply);
        }
        let wanted = name.clone();
        let touch = move |state: &Self, index: &Index| {
            let directory = state.subtree.entry(index, parent);
            let entry = directory.and_then(|directory| index.lookup(directory.ino(), &wanted));
            entry.inspect(Entry::load_rows);
        };
        self.when_loaded(volume, caller, reply, touch, move |state, volume, reply| {
            state.answer_loaded_lookup(volume, caller, (parent, name), reply);
        });
    }

    fn answer_loaded_lookup(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        (parent, name): (INodeNo, Vec<u8>),
        reply: ReplyEntry,
    ) {
        // Before the lookup: a name that is missing after the scan's end will not appear later.
        let is_scan_over = volume.is_scan_over();
        let found = Self::read(volume, |index| {
            let directory = self.entry(index, parent)?.ino();
            let entry = index.lookup(directory, &name);
            let entry = entry.map(|entry| (entry.ino(), self.attributes(entry)));
            Ok((directory, entry, index.is_complete()))
        });
        let (directory, entry, is_complete) = match found {
            Ok(found) => found,
            Err(errno) => return reply.error(errno),
        };
        if let Some((ino, attributes)) = entry {
            if volume.must_compare(TreePart::Name(directory, &name)) {
                let part = (directory, Some(name.clone()));
                return self.when_same(volume, caller, part, reply, move |state, volume, reply| {
                    state.answer_loaded_lookup(volume, caller, (parent, name), reply);
                });
            }
            self.stats.served_lookups.increment();
            if is_complete {
                self.kernel_cache.mark_dentry_known(ino);
                volume.report_lookup(ino);
            } else {
                // Its short TTL makes the kernel ask for the name again soon.
                self.kernel_cache.mark_inode_known(ino);
            }
            return reply.entry(&ttl(is_complete), &attributes, Generation(0));
        }
        if is_complete {
            return reply.entry(&TTL_IMMUTABLE, &attr::negative_entry(), Generation(0));
        }
        if is_scan_over {
            return reply.error(Errno::EIO);
        }
        let awaited = WaitFor::Name(directory, name.clone());
        self.wait_for_scan(
            volume,
            awaited,
            caller,
            reply,
            move |state, volume, reply| {
                state.answer_lookup(volume, caller, (parent, name), reply);
            },
        );
    }

    /// Calls `answer` with `reply` once the rows are loaded that `touch` uses, if they are loaded on demand.
    pub(super) fn when_loaded<R: FailReply>(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        reply: R,
        touch: impl Fn(&Self, &Index) + Send + 'static,
        answer: impl FnOnce(&Arc<Self>, &Arc<dyn Volume>, R) + Send + 'static,
    ) {
        let index = volume.index();
        let is_loaded = !index.is_on_demand() || index.try_read(|index| touch(self, index)).is_ok();
        drop(index);
        if is_loaded {
            return answer(self, volume, reply);
        }
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Bytes);
        let (state, weak_volume) = (Arc::clone(self), Arc::downgrade(volume));
        let touching = Arc::clone(self);
        let done = move |loaded| match (pending.take(), loaded, weak_volume.upgrade()) {
            (Some(reply), Ok(()), Some(volume)) => answer(&state, &volume, reply),
            (Some(reply), Err(_), _) => reply.fail(WaitError::IndexUnavailable),
            (Some(reply), Ok(()), None) => reply.fail(WaitError::Closed),
            // The reply failed already.
            (None, ..) => {}
        };
        volume.load_rows(
            Box::new(move |index| touch(&touching, index)),
            Box::new(done),
        );
    }

    /// Calls `answer` with `reply` once directory `inode` can be listed from `offset` on.
    pub(super) fn with_listing<R: FailReply>(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        (inode, offset): (INodeNo, u64),
        reply: R,
        answer: impl FnOnce(&Arc<Self>, &Arc<dyn Volume>, R) + Send + 'static,
    ) {
        if !volume.index().is_on_demand() {
            return self.with_complete_index(volume, caller, reply, answer);
        }
        let touch = move |state: &Self, index: &Index| state.load_names(index, inode, offset);
        self.when_loaded(volume, caller, reply, touch, answer);
    }

    fn with_complete_index<R: FailReply>(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        reply: R,
        answer: impl FnOnce(&Arc<Self>, &Arc<dyn Volume>, R) + Send + 'static,
    ) {
        if volume.index().is_complete() {
            return answer(self, volume, reply);
        }
        self.wait_for_scan(volume, WaitFor::End, caller, reply, answer);
    }

    /// Calls `answer` with `reply` once the scan has reached `awaited`, if the archive is still open.
    pub(super) fn wait_for_scan<R: FailReply>(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        awaited: WaitFor,
        caller: u32,
        reply: R,
        answer: impl FnOnce(&Arc<Self>, &Arc<dyn Volume>, R) + Send + 'static,
    ) {
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Scan);
        let wanted = pending.pending_check();
        let (state, weak_volume) = (Arc::clone(self), Arc::downgrade(volume));
        let then = move || match (pending.take(), weak_volume.upgrade()) {
            (Some(reply), Some(volume)) => answer(&state, &volume, reply),
            (Some(reply), None) => reply.fail(WaitError::Closed),
            // The reply failed already.
            (None, _) => {}
        };
        volume.on_available(awaited, Callback::while_wanted(wanted, then));
    }
}
