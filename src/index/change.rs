//! What members change of what those before them have made.

use super::Ino;

/// Changes that are kept until someone takes them; more are lost.
const MOST: usize = 4096;

/// Something about a tree under construction that is not as it was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// What a directory has under a name.
    Name(Ino, Vec<u8>),
    /// Attributes of an entry; its link count is one.
    Attributes(Ino),
}

/// Changes that nobody has taken yet.
#[derive(Debug)]
pub(super) struct Changes {
    /// `None` when nobody looks at the tree before it is whole.
    noted: Option<Vec<Change>>,
}

impl Changes {
    /// Of a tree that is looked at meanwhile, or not.
    pub(super) fn new(is_looked_at: bool) -> Self {
        Self {
            noted: is_looked_at.then(Vec::new),
        }
    }

    /// `name` is given to something else.
    pub(super) fn name(&mut self, directory: u32, name: &[u8]) {
        self.note(|| Change::Name(Ino(directory), name.to_vec()));
    }

    /// Attributes of `ino` are other ones.
    pub(super) fn attributes(&mut self, ino: u32) {
        self.note(|| Change::Attributes(Ino(ino)));
    }

    fn note(&mut self, change: impl FnOnce() -> Change) {
        let Some(noted) = self.noted.as_mut().filter(|noted| noted.len() < MOST) else {
            return;
        };
        let change = change();
        if noted.last() != Some(&change) {
            noted.push(change);
        }
    }

    /// What was noted since the last time.
    pub(super) fn take(&mut self) -> Vec<Change> {
        self.noted.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
