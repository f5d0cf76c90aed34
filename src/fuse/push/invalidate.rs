//! Invalidates attributes in the kernel that change while an archive is being scanned.
//!
//! A separate thread sends the notifications, so that the scan never waits for the kernel.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Weak};

use super::kernel_cache::KernelCache;
use crate::base::thread::Thread;
use crate::fuse::filesystem::Content;
use crate::fuse::mount::MountError;
use crate::index::Ino;

/// Maximum number of queued invalidations. If the queue is full, the kernel keeps the old attributes
/// until their TTL ends.
const MAX_PENDING_INVALIDATIONS: usize = 1024;

/// Starts the thread that invalidates attributes of `content` in the kernel behind `kernel_cache`.
///
/// Returns `None` if the index is complete, because nothing will change. The thread ends when
/// `kernel_cache` is detached.
///
/// # Errors
/// When the system cannot start a thread.
pub(in crate::fuse) fn start(
    content: &Arc<dyn Content>,
    kernel_cache: &Arc<KernelCache>,
) -> Result<Option<Thread<()>>, MountError> {
    if content.index().is_complete() {
        return Ok(None);
    }
    let (sender, changed_inodes) = sync_channel(MAX_PENDING_INVALIDATIONS);
    let thread_cache = Arc::downgrade(kernel_cache);
    let thread = Thread::spawn("fuse-inval", move || run(&changed_inodes, &thread_cache));
    let thread = thread.map_err(MountError::System)?;
    kernel_cache.set_invalidator(sender);
    let watcher_cache = Arc::downgrade(kernel_cache);
    content.watch(Box::new(move |changed| {
        if let Some(kernel_cache) = watcher_cache.upgrade() {
            for ino in changed {
                kernel_cache.queue_invalidation(ino);
            }
        }
    }));
    Ok(Some(thread))
}

fn run(changed_inodes: &Receiver<Ino>, kernel_cache: &Weak<KernelCache>) {
    while let Ok(ino) = changed_inodes.recv() {
        if let Some(kernel_cache) = kernel_cache.upgrade() {
            kernel_cache.invalidate_attributes(ino);
        }
    }
}
