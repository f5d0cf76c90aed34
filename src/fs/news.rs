//! Tells the kernel whose attributes have changed while an archive is being scanned, on a thread of its
//! own: nothing makes the scan wait.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Weak};

use super::pages::Pages;
use super::{Content, MountError};
use crate::base::thread::Thread;
use crate::index::Ino;

/// Changes that may wait to be told. What finds no room is believed until the kernel asks again.
const INBOX: usize = 1024;

/// Begins to tell the kernel behind `pages` what `content` finds to have changed; `None` when nothing
/// will change any more. Ends when `pages` are detached.
///
/// # Errors
/// When the system has no thread left to give.
pub(super) fn start(
    content: &Arc<dyn Content>,
    pages: &Arc<Pages>,
) -> Result<Option<Thread<()>>, MountError> {
    if content.index().is_complete() {
        return Ok(None);
    }
    let (sender, inbox) = sync_channel(INBOX);
    let known = Arc::downgrade(pages);
    let thread = Thread::spawn("tarfs-news", move || run(&inbox, &known));
    let thread = thread.map_err(MountError::System)?;
    pages.send_news(sender);
    let watched = Arc::downgrade(pages);
    content.watch(Box::new(move |changed| {
        if let Some(pages) = watched.upgrade() {
            for ino in changed {
                pages.changed(ino);
            }
        }
    }));
    Ok(Some(thread))
}

fn run(inbox: &Receiver<Ino>, pages: &Weak<Pages>) {
    while let Ok(ino) = inbox.recv() {
        if let Some(pages) = pages.upgrade() {
            pages.tell(ino);
        }
    }
}
