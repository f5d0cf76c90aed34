//! Which entries of a tree under construction are not as they were.

use super::Ino;

/// DirtyInodes that are kept until someone takes them; more are lost.
const MAX_DIRTY_INODES: usize = 4096;

/// Entries whose attributes, the link count among them, were changed by later members; nobody has
/// taken these yet.
#[derive(Debug)]
pub(super) struct DirtyInodes {
    /// `None` when nobody looks at the tree before it is whole.
    inodes: Option<Vec<Ino>>,
}

impl DirtyInodes {
    /// Of a tree that is looked at meanwhile, or not.
    pub(super) fn new(is_tracked: bool) -> Self {
        Self {
            inodes: is_tracked.then(Vec::new),
        }
    }

    /// Attributes of `ino` are other ones.
    pub(super) fn mark(&mut self, ino: u32) {
        if let Some(inodes) = self
            .inodes
            .as_mut()
            .filter(|inodes| inodes.len() < MAX_DIRTY_INODES)
            && inodes.last() != Some(&Ino(ino))
        {
            inodes.push(Ino(ino));
        }
    }

    /// What was noted since the last time.
    pub(super) fn take(&mut self) -> Vec<Ino> {
        self.inodes.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
