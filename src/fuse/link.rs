//! Targets of symbolic links, which are compared with the archive when their index was published.

use std::sync::Arc;

use fuser::{Errno, INodeNo, ReplyData};

use super::pending_replies::{FailReply, WaitError, WaitReason};
use super::read::errno_of;
use super::state::FilesystemState;
use crate::archive::{ReadError, Volume};
use crate::index::{EntryKind, Index};

impl FilesystemState {
    /// Answers with the target of the symbolic link `inode`, once its header in the archive has the same.
    pub(super) fn answer_link(
        self: &Arc<Self>,
        content: &Arc<dyn Volume>,
        caller: u32,
        inode: INodeNo,
        reply: ReplyData,
    ) {
        let index = content.index();
        let found = self.entry(&index, inode).map(|entry| entry.ino());
        let Some(ino) = found.ok().filter(|&ino| content.must_compare(ino)) else {
            return self.send_target(&index, inode, reply);
        };
        drop(index);
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Bytes);
        let (state, weak_content) = (Arc::clone(self), Arc::downgrade(content));
        let done = move |compared: Result<(), ReadError>| {
            let content = weak_content.upgrade();
            match (pending.take(), compared, content) {
                (Some(reply), Ok(()), Some(content)) => {
                    state.send_target(&content.index(), inode, reply);
                }
                (Some(reply), Err(error), Some(content)) => {
                    let path = content.index().path(ino).unwrap_or_default();
                    let archive = state.archive_path.as_deref().unwrap_or_default();
                    state
                        .recent_errors
                        .record(&format!("{archive}{path}"), &error);
                    reply.error(errno_of(&error));
                }
                (Some(reply), _, None) => reply.fail(WaitError::Closed),
                // The reply failed already.
                (None, ..) => {}
            }
        };
        content.compare(ino, Box::new(done));
    }

    fn send_target(&self, index: &Index, inode: INodeNo, reply: ReplyData) {
        match self.entry(index, inode).map(|entry| entry.kind()) {
            Ok(EntryKind::Symlink(target)) => reply.data(target),
            Ok(_) => reply.error(Errno::EINVAL),
            Err(errno) => reply.error(errno),
        }
    }
}
