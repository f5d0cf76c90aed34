//! Which entries of a tree under construction are not as they were.

use super::Ino;

/// Changes that are kept until someone takes them; more are lost.
const MOST: usize = 4096;

/// Entries whose attributes, the link count among them, were changed by later members; nobody has
/// taken these yet.
#[derive(Debug)]
pub(super) struct Changes {
    /// `None` when nobody looks at the tree before it is whole.
    noted: Option<Vec<Ino>>,
}

impl Changes {
    /// Of a tree that is looked at meanwhile, or not.
    pub(super) fn new(is_looked_at: bool) -> Self {
        Self {
            noted: is_looked_at.then(Vec::new),
        }
    }

    /// Attributes of `ino` are other ones.
    pub(super) fn note(&mut self, ino: u32) {
        if let Some(noted) = self.noted.as_mut().filter(|noted| noted.len() < MOST)
            && noted.last() != Some(&Ino(ino))
        {
            noted.push(Ino(ino));
        }
    }

    /// What was noted since the last time.
    pub(super) fn take(&mut self) -> Vec<Ino> {
        self.noted.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
