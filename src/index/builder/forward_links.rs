//! Hard links that precede their targets.

use std::mem;

/// Maximum number of passes over forward hard links, first and last link in turn; usually one resolves all.
/// Each pass resolves at least one of those that wait for each other.
pub(crate) const MAX_FORWARD_LINK_PASSES: usize = 40;

/// Hard links that precede their targets.
#[derive(Debug, Default)]
pub(super) struct ForwardLinks {
    /// Not looked up in this pass yet, the next one last.
    pub(super) links: Vec<u32>,
    /// Those of this pass whose targets are missing.
    pub(super) waiting: Vec<u32>,
    /// Number of links of the last pass.
    pub(super) pass_len: Option<usize>,
    pub(super) passes: usize,
    /// Whether the remaining links have no targets.
    pub(super) is_last_pass: bool,
}

impl ForwardLinks {
    /// Begins a pass over the links that wait. Returns false if there are none.
    pub(super) fn begin_pass(&mut self) -> bool {
        self.links = mem::take(&mut self.waiting);
        self.passes += 1;
        let len = self.links.len();
        let is_stuck = self.pass_len.replace(len) == Some(len);
        if is_stuck || self.passes == MAX_FORWARD_LINK_PASSES {
            self.is_last_pass = true;
            // The first one first.
            self.links.reverse();
        }
        len > 0
    }
}
