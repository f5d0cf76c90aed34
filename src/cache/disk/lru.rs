//! LRU order of the extents of a disk cache, as far as this process knows it; pure.
//! Spans and windows overlap, but tracked extents are disjoint: a use trims or splits the older ones.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::extent::{Extent, Plain};

/// Maximum number of tracked extents (8 MiB, for 16 GiB of windows). Forgotten ones are evicted first.
const MAX_EXTENTS: usize = 1 << 17;

#[derive(Debug, Default)]
pub(super) struct Lru {
    uses: u64,
    by_start: BTreeMap<Plain, TrackedExtent>,
    /// Last use and start of each extent. Parts of a split extent share their last use.
    by_use: BTreeSet<(u64, Plain)>,
}

#[derive(Clone, Copy, Debug)]
struct TrackedExtent {
    end: Plain,
    last_use: u64,
}

impl Lru {
    pub(super) fn mark_used(&mut self, extent: Extent<Plain>) {
        if extent.is_empty() {
            return;
        }
        self.remove(extent);
        self.uses += 1;
        self.insert(extent, self.uses);
        while self.by_use.len() > MAX_EXTENTS {
            self.pop_oldest();
        }
    }

    pub(super) fn pop_oldest(&mut self) -> Option<Extent<Plain>> {
        let (_, start) = self.by_use.pop_first()?;
        let known = self.by_start.remove(&start)?;
        Extent::new(start, known.end)
    }

    pub(super) fn first_untracked(&self, extent: Extent<Plain>) -> Option<Extent<Plain>> {
        let mut at = extent.start();
        let before = self.by_start.range(..=at).next_back();
        if let Some((_, known)) = before {
            at = at.max(known.end);
        }
        for (&start, known) in self.by_start.range(at..) {
            if start > at {
                return Extent::new(at, start)?.intersection(&extent);
            }
            at = known.end;
            if at >= extent.end() {
                return None;
            }
        }
        Extent::new(at, extent.end()).filter(|unknown| !unknown.is_empty())
    }

    pub(super) fn clear(&mut self) {
        self.by_start.clear();
        self.by_use.clear();
    }

    /// Removes the bytes of `extent` from the tracked extents, three per call on average.
    fn remove(&mut self, extent: Extent<Plain>) {
        while let Some((&start, &known)) = self.by_start.range(..extent.end()).next_back()
            && known.end > extent.start()
        {
            self.by_start.remove(&start);
            self.by_use.remove(&(known.last_use, start));
            let before = Extent::new(start, extent.start());
            let after = Extent::new(extent.end(), known.end);
            for part in [before, after].into_iter().flatten() {
                self.insert(part, known.last_use);
            }
        }
    }

    fn insert(&mut self, extent: Extent<Plain>, last_use: u64) {
        if extent.is_empty() {
            return;
        }
        let end = extent.end();
        self.by_start
            .insert(extent.start(), TrackedExtent { end, last_use });
        self.by_use.insert((last_use, extent.start()));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extent(start: u64, end: u64) -> Extent<Plain> {
        Extent::new(Plain(start), Plain(end)).expect("in order")
    }

    #[test]
    fn least_recently_used_extent_is_popped_first() {
        let mut lru = Lru::default();
        for start in [0, 10, 20] {
            lru.mark_used(extent(start, start + 10));
        }
        lru.mark_used(extent(0, 10));
        assert_eq!(lru.pop_oldest(), Some(extent(10, 20)));
        assert_eq!(lru.pop_oldest(), Some(extent(20, 30)));
        assert_eq!(lru.pop_oldest(), Some(extent(0, 10)));
        assert_eq!(lru.pop_oldest(), None);
    }

    fn pop_all(lru: &mut Lru) -> Vec<Extent<Plain>> {
        std::iter::from_fn(|| lru.pop_oldest()).collect()
    }

    #[test]
    fn a_use_replaces_older_uses_of_the_same_bytes() {
        let mut lru = Lru::default();
        lru.mark_used(extent(0, 10));
        lru.mark_used(extent(10, 20));
        lru.mark_used(extent(0, 20));
        assert_eq!(pop_all(&mut lru), [extent(0, 20)]);
    }

    #[test]
    fn a_use_within_an_older_extent_splits_it() {
        let mut lru = Lru::default();
        lru.mark_used(extent(0, 100));
        lru.mark_used(extent(200, 210));
        lru.mark_used(extent(40, 60));
        assert_eq!(lru.first_untracked(extent(0, 100)), None);
        assert_eq!(lru.first_untracked(extent(70, 80)), None);
        let expected = [
            extent(0, 40),
            extent(60, 100),
            extent(200, 210),
            extent(40, 60),
        ];
        assert_eq!(pop_all(&mut lru), expected);
    }

    #[test]
    fn a_use_trims_the_older_extents_beside_it() {
        let mut lru = Lru::default();
        lru.mark_used(extent(0, 10));
        lru.mark_used(extent(10, 20));
        lru.mark_used(extent(5, 15));
        let expected = [extent(0, 5), extent(15, 20), extent(5, 15)];
        assert_eq!(pop_all(&mut lru), expected);
    }

    #[test]
    fn a_use_of_no_bytes_changes_nothing() {
        let mut lru = Lru::default();
        lru.mark_used(extent(0, 10));
        lru.mark_used(extent(5, 5));
        lru.mark_used(extent(0, 0));
        assert_eq!(pop_all(&mut lru), [extent(0, 10)]);
    }

    #[test]
    fn the_oldest_extents_are_forgotten_beyond_the_limit() {
        let mut lru = Lru::default();
        let max = MAX_EXTENTS as u64;
        for number in 0..max + 2 {
            lru.mark_used(extent(10 * number, 10 * number + 10));
        }
        assert_eq!(lru.first_untracked(extent(0, 100)), Some(extent(0, 20)));
        assert_eq!(lru.pop_oldest(), Some(extent(20, 30)));
        assert_eq!(lru.by_use.len(), MAX_EXTENTS - 1);
        assert_eq!(lru.by_start.len(), MAX_EXTENTS - 1);
        // A split adds two extents, so the oldest is forgotten for the second.
        lru.mark_used(extent(10 * max + 3, 10 * max + 6));
        assert_eq!(lru.by_use.len(), MAX_EXTENTS);
        assert_eq!(lru.pop_oldest(), Some(extent(40, 50)));
    }

    const BYTES: u64 = 40;

    proptest! {
        /// Eviction returns each byte once, in the order of last use.
        #[test]
        fn bytes_are_taken_in_the_order_of_their_last_uses(
            uses in prop::collection::vec((0..BYTES, 0..BYTES), 0..60)
        ) {
            let mut lru = Lru::default();
            let mut last_uses = vec![0; usize::try_from(BYTES).expect("small")];
            for (number, (one, other)) in (1..).zip(uses) {
                let used = extent(one.min(other), one.max(other));
                lru.mark_used(used);
                for (at, last_use) in (0..).zip(&mut last_uses) {
                    if used.contains(Plain(at)) {
                        *last_use = number;
                    }
                }
            }
            let first_unused = (0..).zip(&last_uses).find(|(_, last_use)| **last_use == 0);
            let first_untracked = lru.first_untracked(extent(0, BYTES));
            prop_assert_eq!(first_untracked.map(|unknown| unknown.start().0), first_unused.map(|(at, _)| at));
            let mut taken = Vec::new();
            for extent in pop_all(&mut lru) {
                taken.extend(extent.start().0..extent.end().0);
            }
            let of_byte = |at: &u64| last_uses[usize::try_from(*at).expect("small")];
            prop_assert!(taken.iter().map(of_byte).is_sorted());
            taken.sort_unstable();
            let used: Vec<u64> = (0..BYTES).filter(|at| of_byte(at) > 0).collect();
            prop_assert_eq!(taken, used);
        }
    }

    #[test]
    fn gaps_between_tracked_extents_are_untracked() {
        let mut lru = Lru::default();
        assert_eq!(lru.first_untracked(extent(3, 9)), Some(extent(3, 9)));
        lru.mark_used(extent(10, 20));
        lru.mark_used(extent(20, 30));
        lru.mark_used(extent(40, 50));
        assert_eq!(lru.first_untracked(extent(3, 100)), Some(extent(3, 10)));
        assert_eq!(lru.first_untracked(extent(3, 7)), Some(extent(3, 7)));
        assert_eq!(lru.first_untracked(extent(10, 100)), Some(extent(30, 40)));
        assert_eq!(lru.first_untracked(extent(15, 35)), Some(extent(30, 35)));
        assert_eq!(lru.first_untracked(extent(12, 28)), None);
        assert_eq!(lru.first_untracked(extent(10, 30)), None);
        assert_eq!(lru.first_untracked(extent(45, 60)), Some(extent(50, 60)));
        lru.clear();
        assert_eq!(lru.first_untracked(extent(12, 28)), Some(extent(12, 28)));
        assert_eq!(lru.pop_oldest(), None);
    }
}
