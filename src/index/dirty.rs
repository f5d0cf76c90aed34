//! Entries of a tree under construction whose attributes changed.

use super::Ino;

/// Maximum number of pending dirty inodes; more are lost.
const MAX_DIRTY_INODES: usize = 4096;

/// Entries whose attributes later members changed, since the last [`take`](Self::take).
///
/// The link count is one of the attributes.
#[derive(Debug)]
pub(super) struct DirtyInodes {
    /// `None` when there is no reader before the tree is complete.
    inodes: Option<Vec<Ino>>,
}

impl DirtyInodes {
    /// An empty set; it records changes only if `is_tracked`.
    pub(super) fn new(is_tracked: bool) -> Self {
        Self {
            inodes: is_tracked.then(Vec::new),
        }
    }

    /// Records that the attributes of `ino` changed.
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

    /// Returns and clears the set.
    pub(super) fn take(&mut self) -> Vec<Ino> {
        self.inodes.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
