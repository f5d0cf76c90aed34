//! Replies to readdir and readdirplus.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use fuser::{Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use super::attr;
use super::state::{FilesystemState, TTL_IMMUTABLE, ttl};
use crate::archive::{TreePart, Volume};
use crate::index::Index;

/// Replies to readdir.
pub(super) fn list(
    state: &FilesystemState,
    volume: &Arc<dyn Volume>,
    (inode, offset): (INodeNo, u64),
    mut reply: ReplyDirectory,
) {
    let listed = FilesystemState::read(volume, |index| {
        state.list(index, inode, offset, |entry, next, name| {
            let inode = state.subtree.inode(entry.ino());
            let file_type = attr::file_type(entry.kind());
            reply.add(inode, next, file_type, OsStr::from_bytes(name))
        })
    });
    match listed {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

/// Replies to readdirplus with the names of directory `inode` from `offset` on, and their attributes.
pub(super) fn list_with_attributes(
    state: &FilesystemState,
    volume: &Arc<dyn Volume>,
    (inode, offset): (INodeNo, u64),
    mut reply: ReplyDirectoryPlus,
) {
    let listed = FilesystemState::read(volume, |index| {
        let parent = state.entry(index, inode)?.ino();
        state.list(index, inode, offset, |entry, next, name| {
            let attr = state.attributes(entry);
            // The kernel then looks a name up when it is used.
            let ttl = if volume.must_compare(TreePart::Name(parent, name)) {
                Duration::ZERO
            } else {
                TTL_IMMUTABLE
            };
            let name = OsStr::from_bytes(name);
            let is_full = reply.add(attr.ino, next, name, &ttl, &attr, Generation(0));
            if !is_full && !ttl.is_zero() {
                state.kernel_cache.mark_dentry_known(entry.ino());
            }
            is_full
        })
    });
    match listed {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

/// Replies to readdirplus of a priming directory.
pub(super) fn list_priming_dir(
    state: &FilesystemState,
    volume: &Arc<dyn Volume>,
    (priming_dir, offset): (INodeNo, u64),
    mut reply: ReplyDirectoryPlus,
) {
    if offset == 0 {
        let index = volume.index();
        let ttl = ttl(index.is_complete());
        let kernel_cache = &state.kernel_cache;
        let attributes = |index: &Index, ino| Some(state.attributes(index.entry(ino)?));
        kernel_cache.priming_dir.list(priming_dir, |ino, next| {
            let Ok(Some(attr)) = index.read(|index| attributes(index, ino)) else {
                return false;
            };
            let name = ino.0.to_string();
            let is_full = reply.add(attr.ino, next, &name, &ttl, &attr, Generation(0));
            if !is_full {
                kernel_cache.mark_inode_known(ino);
            }
            is_full
        });
    }
    reply.ok();
}
