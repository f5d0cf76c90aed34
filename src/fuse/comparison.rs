//! Parts of a tree that others may have made up, which are compared with the archive before they are used.

use std::sync::Arc;

use fuser::{Errno, INodeNo, ReplyData};

use super::pending_replies::{FailReply, WaitError, WaitReason};
use super::read::errno_of;
use super::state::FilesystemState;
use crate::archive::{ReadError, TreePart, Volume};
use crate::index::{EntryKind, Ino};

impl FilesystemState {
    /// Calls `answer` with `reply` once an entry, or a name in it, is the same in the archive.
    pub(super) fn when_same<R: FailReply>(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        (ino, name): (Ino, Option<Vec<u8>>),
        reply: R,
        answer: impl FnOnce(&Arc<Self>, &Arc<dyn Volume>, R) + Send + 'static,
    ) {
        let part = match &name {
            Some(name) => TreePart::Name(ino, name),
            None => TreePart::Entry(ino),
        };
        if !volume.must_compare(part) {
            return answer(self, volume, reply);
        }
        let pending = self
            .pending_replies
            .register(reply, caller, WaitReason::Bytes);
        let (state, weak_volume) = (Arc::clone(self), Arc::downgrade(volume));
        let wanted_name = name.clone();
        let done = move |compared: Result<(), ReadError>| {
            let volume = weak_volume.upgrade();
            match (pending.take(), compared, volume) {
                (Some(reply), Ok(()), Some(volume)) => answer(&state, &volume, reply),
                (Some(reply), Err(error), Some(volume)) => {
                    let path = volume.index().read(|index| index.path(ino));
                    let mut path = path.ok().flatten().unwrap_or_default();
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
        volume.compare(part, Box::new(done));
    }

    /// Answers with the target of the symbolic link `inode`, once its header in the archive has the same.
    pub(super) fn answer_link(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
        caller: u32,
        inode: INodeNo,
        reply: ReplyData,
    ) {
        let found = Self::read(volume, |index| Ok(self.entry(index, inode)?.ino()));
        let ino = match found {
            Ok(ino) => ino,
            Err(errno) => return reply.error(errno),
        };
        self.when_same(
            volume,
            caller,
            (ino, None),
            reply,
            move |state, volume, reply| {
                state.send_target(volume, inode, reply);
            },
        );
    }

    fn send_target(&self, volume: &Arc<dyn Volume>, inode: INodeNo, reply: ReplyData) {
        let target = Self::read(volume, |index| match self.entry(index, inode)?.kind() {
            EntryKind::Symlink(target) => Ok(target.to_vec()),
            _ => Err(Errno::EINVAL),
        });
        match target {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(errno),
        }
    }
}
