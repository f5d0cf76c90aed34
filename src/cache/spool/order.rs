//! Which spans of a spool were used when, as far as this process knows; pure.

use std::collections::BTreeMap;

use crate::base::extent::{Extent, Plain};

/// Spans in the order of their last use.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Counts uses.
    uses: u64,
    by_place: BTreeMap<Plain, Known>,
    by_use: BTreeMap<u64, Extent<Plain>>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    extent: Extent<Plain>,
    last_use: u64,
}

impl Order {
    /// `extent` was written or read just now.
    pub(super) fn used(&mut self, extent: Extent<Plain>) {
        self.forget(extent.start());
        self.uses += 1;
        let last_use = self.uses;
        self.by_use.insert(last_use, extent);
        self.by_place
            .insert(extent.start(), Known { extent, last_use });
    }

    /// Takes out the span that was used longest ago.
    pub(super) fn take_oldest(&mut self) -> Option<Extent<Plain>> {
        let (_, extent) = self.by_use.pop_first()?;
        self.by_place.remove(&extent.start());
        Some(extent)
    }

    /// Of `extent` the first part that lies in no span that is known.
    pub(super) fn first_unknown(&self, extent: Extent<Plain>) -> Option<Extent<Plain>> {
        let mut at = extent.start();
        // The last one that begins before may reach into it.
        let before = self.by_place.range(..=at).next_back();
        if let Some((_, known)) = before {
            at = at.max(known.extent.end());
        }
        for known in self.by_place.range(at..).map(|(_, known)| known.extent) {
            if known.start() > at {
                let unknown = Extent::new(at, known.start())?;
                return unknown.intersection(&extent);
            }
            at = at.max(known.end());
            if at >= extent.end() {
                return None;
            }
        }
        Extent::new(at, extent.end()).filter(|unknown| !unknown.is_empty())
    }

    /// Forgets everything, because the file is another one now.
    pub(super) fn clear(&mut self) {
        self.by_place.clear();
        self.by_use.clear();
    }

    fn forget(&mut self, start: Plain) {
        if let Some(known) = self.by_place.remove(&start) {
            self.by_use.remove(&known.last_use);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, end: u64) -> Extent<Plain> {
        Extent::new(Plain(start), Plain(end)).expect("in order")
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let mut order = Order::default();
        for start in [0, 10, 20] {
            order.used(extent(start, start + 10));
        }
        order.used(extent(0, 10));
        assert_eq!(order.take_oldest(), Some(extent(10, 20)));
        assert_eq!(order.take_oldest(), Some(extent(20, 30)));
        assert_eq!(order.take_oldest(), Some(extent(0, 10)));
        assert_eq!(order.take_oldest(), None);
    }

    #[test]
    fn what_lies_between_known_spans_is_unknown() {
        let mut order = Order::default();
        assert_eq!(order.first_unknown(extent(3, 9)), Some(extent(3, 9)));
        order.used(extent(10, 20));
        order.used(extent(20, 30));
        order.used(extent(40, 50));
        assert_eq!(order.first_unknown(extent(3, 100)), Some(extent(3, 10)));
        assert_eq!(order.first_unknown(extent(3, 7)), Some(extent(3, 7)));
        assert_eq!(order.first_unknown(extent(10, 100)), Some(extent(30, 40)));
        assert_eq!(order.first_unknown(extent(15, 35)), Some(extent(30, 35)));
        assert_eq!(order.first_unknown(extent(12, 28)), None);
        assert_eq!(order.first_unknown(extent(10, 30)), None);
        assert_eq!(order.first_unknown(extent(45, 60)), Some(extent(50, 60)));
        order.clear();
        assert_eq!(order.first_unknown(extent(12, 28)), Some(extent(12, 28)));
        assert_eq!(order.take_oldest(), None);
    }
}
