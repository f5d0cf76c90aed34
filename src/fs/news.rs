//! Tells the kernel what has changed of what it was told while an archive is being scanned.
//!
//! That happens on a thread of its own. The kernel changes a name under the lock of its directory,
//! which someone may hold who waits for another name there, and thereby for the scan.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Weak};

use super::pages::Pages;
use super::{Content, MountError};
use crate::base::task::Thread;
use crate::index::Change;

/// Changes that may wait to be told. What finds no room is believed until the kernel asks again.
const INBOX: usize = 1024;

/// Begins to tell the kernel behind `pages` what `content` finds to have changed; `None` when nothing
/// will change any more. Ends when `pages` are detached.
pub(super) fn start(
    content: &Arc<dyn Content>,
    pages: &Arc<Pages>,
) -> Result<Option<Thread<()>>, MountError> {
    if content.index().is_complete() {
        return Ok(None);
    }
    let (sender, inbox) = sync_channel(INBOX);
    pages.send_news(sender);
    let (told, known) = (Arc::downgrade(content), Arc::clone(pages));
    let thread = Thread::spawn("tarfs-news", move || run(&inbox, &told, &known));
    let watched = Arc::downgrade(pages);
    content.watch(Box::new(move |changes| {
        if let Some(pages) = watched.upgrade() {
            for change in changes {
                pages.changed(change);
            }
        }
    }));
    thread.map(Some).map_err(MountError::System)
}

fn run(inbox: &Receiver<Change>, content: &Weak<dyn Content>, pages: &Pages) {
    while let Ok(change) = inbox.recv() {
        // Whoever waits for a name keeps its directory locked; who comes later would wait behind us.
        // The kernel asks again soon enough.
        if let Change::Name(directory, _) = &change
            && content
                .upgrade()
                .is_some_and(|content| content.is_awaited(*directory))
        {
            continue;
        }
        pages.tell(&change);
    }
}
