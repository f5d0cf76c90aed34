//! Parts of a tree that others may have made up, which are compared with the archive before they are used.

use std::sync::Arc;

use fuser::{Errno, INodeNo, ReplyData};

use super::pending_replies::{FailReply, WaitError, WaitReason};
use super::read::errno_of;
use super::state::FilesystemState;
use crate::archive::{ReadError, TreePart, Volume};
use crate::index::{EntryKind, Index, Ino};

impl FilesystemState {
    /// Calls `answer` with `reply` once an entry, or a name in it, is the same in the archive.
    pub(super) fn when_same<R: FailReply>(
        self: &Arc<Self>,
        content: &Arc<dyn Volume>,
        caller: u32,
        (ino, name): (Ino, Option<Vec<u8>>),
        reply: R,
        answer: impl FnOnce(&Arc<Self>, &Arc<dyn Volume>, R) + Send + 'static,
    ) {
        let part = match &name {
            Some(name) => TreePart::Name(ino, name),
            None => TreePart::Entry(ino),
        };
        if !content.must_compare(part) {
            return answer(self, content, reply);
        }
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Bytes);
        let (state, weak_content) = (Arc::clone(self), Arc::downgrade(content));
        let wanted_name = name.clone();
        let done = move |compared: Result<(), ReadError>| {
            let content = weak_content.upgrade();
            match (pending.take(), compared, content) {
                (Some(reply), Ok(()), Some(content)) => answer(&state, &content, reply),
                (Some(reply), Err(error), Some(content)) => {
                    let mut path = content.index().path(ino).unwrap_or_default();
                    if let Some(name) = &wanted_name {
                        path.push(name);
                    }
                    let archive = state.archive_path.as_deref().unwrap_or_default();
                    state
                        .recent_errors
                        .record(&format!("{archive}{path}"), &error);
                    reply.fail_with(errno_of(&error));
                }
                (Some(reply), _, None) => reply.fail(WaitError::Closed),
                // The reply failed already.
                (None, ..) => {}
            }
        };
        content.compare(part, Box::new(done));
    }

    /// Answers with the target of the symbolic link `inode`, once its header in the archive has the same.
    pub(super) fn answer_link(
        self: &Arc<Self>,
        content: &Arc<dyn Volume>,
        caller: u32,
        inode: INodeNo,
        reply: ReplyData,
    ) {
        let index = content.index();
        let ino = match self.entry(&index, inode).map(|entry| entry.ino()) {
            Ok(ino) => ino,
            Err(errno) => return reply.error(errno),
        };
        drop(index);
        self.when_same(
            content,
            caller,
            (ino, None),
            reply,
            move |state, content, reply| {
                state.send_target(&content.index(), inode, reply);
            },
        );
    }

    fn send_target(&self, index: &Index, inode: INodeNo, reply: ReplyData) {
        match self.entry(index, inode).map(|entry| entry.kind()) {
            Ok(EntryKind::Symlink(target)) => reply.data(target),
            Ok(_) => reply.error(Errno::EINVAL),
            Err(errno) => reply.error(errno),
        }
    }
}
