//! Extents of a disk cache, ordered by what it costs to lose them; pure.
//! The value of an extent is the cost to decode it again, times its reads, above the value of what was evicted before its
//! last use, so that old uses count less and less: GreedyDual-Size with frequency (Cherkasova, "Improving WWW
//! Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", 1998). Of equal values, the one that was used last is
//! worth most.
//! Spans and windows overlap, but tracked extents are disjoint: a use trims or splits the older ones.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::extent::{Extent, Plain};

/// Maximum number of tracked extents (about 16 MiB, for 16 GiB of windows). The least valuable are forgotten.
const MAX_EXTENTS: usize = 1 << 17;

/// Maximum number of reads of an extent that count.
const MAX_READS: u32 = 1 << 10;

/// Value of each read, relative to an extent without reads.
const READ_WEIGHT: u64 = 32;

/// Value of an extent that costs the decoding of `cost` spans and was read so often.
pub(super) fn value(cost: u32, reads: u32) -> u64 {
    u64::from(cost).saturating_mul(1 + READ_WEIGHT * u64::from(reads))
}

/// Extents with their costs and reads.
#[derive(Debug, Default)]
pub(super) struct ValuedExtents {
    uses: u64,
    /// The highest value that was evicted.
    evicted: u64,
    by_start: BTreeMap<Plain, TrackedExtent>,
    /// Value, last use and start of each extent. Parts of a split extent share value and last use.
    by_value: BTreeSet<(u64, u64, Plain)>,
}

#[derive(Clone, Copy, Debug)]
struct TrackedExtent {
    end: Plain,
    value: u64,
    last_use: u64,
    reads: u32,
}

impl ValuedExtents {
    /// Adds `reads` reads of `extent`, which costs the decoding of `cost` spans. There are none for an extent that is only
    /// to be tracked.
    pub(super) fn add(&mut self, extent: Extent<Plain>, cost: u32, reads: u32) {
        if extent.is_empty() {
            return;
        }
        let reads = self.remove(extent).saturating_add(reads).min(MAX_READS);
        self.uses += 1;
        let known = TrackedExtent {
            end: extent.end(),
            value: self.evicted.saturating_add(value(cost, reads)),
            last_use: self.uses,
            reads,
        };
        self.insert(extent.start(), known);
        while self.by_value.len() > MAX_EXTENTS {
            self.pop_least_valuable();
        }
    }

    /// Removes and returns the extent whose loss costs least.
    pub(super) fn pop_least_valuable(&mut self) -> Option<Extent<Plain>> {
        let (value, _, start) = self.by_value.pop_first()?;
        self.evicted = self.evicted.max(value);
        let known = self.by_start.remove(&start)?;
        Extent::new(start, known.end)
    }

    /// Whether exactly this extent is tracked.
    pub(super) fn tracks(&self, extent: Extent<Plain>) -> bool {
        let known = self.by_start.get(&extent.start());
        known.is_some_and(|known| known.end == extent.end())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_start.is_empty()
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
        self.by_value.clear();
    }

    /// Removes the bytes of `extent` from the tracked extents, three per call on average. Returns their most reads.
    pub(super) fn remove(&mut self, extent: Extent<Plain>) -> u32 {
        let mut reads = 0;
        while let Some((&start, &known)) = self.by_start.range(..extent.end()).next_back()
            && known.end > extent.start()
        {
            reads = reads.max(known.reads);
            self.by_start.remove(&start);
            self.by_value.remove(&(known.value, known.last_use, start));
            let before = Extent::new(start, extent.start());
            let after = Extent::new(extent.end(), known.end);
            for part in [before, after].into_iter().flatten() {
                let end = part.end();
                self.insert(part.start(), TrackedExtent { end, ..known });
            }
        }
        reads
    }

    fn insert(&mut self, start: Plain, known: TrackedExtent) {
        if start < known.end {
            self.by_value.insert((known.value, known.last_use, start));
            self.by_start.insert(start, known);
        }
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
    fn least_recently_used_of_equal_extents_is_the_least_valuable() {
        let mut valued = ValuedExtents::default();
        for start in [0, 10, 20] {
            valued.add(extent(start, start + 10), 1, 1);
        }
        assert_eq!(
            pop_all(&mut valued),
            [extent(0, 10), extent(10, 20), extent(20, 30)]
        );
    }

    #[test]
    fn value_is_cost_times_reads() {
        let mut valued = ValuedExtents::default();
        for (start, cost) in [(0, 5), (10, 1), (20, 2), (10, 1), (10, 1)] {
            valued.add(extent(start, start + 10), cost, 1);
        }
        assert!(valued.tracks(extent(10, 20)) && !valued.tracks(extent(10, 15)));
        valued.add(extent(30, 40), 30, 0);
        assert_eq!(
            pop_all(&mut valued),
            [
                extent(30, 40),
                extent(20, 30),
                extent(10, 20),
                extent(0, 10)
            ],
            "30 without a read, 2, 3 and 5"
        );
    }

    /// Many reads long ago do not keep an extent for ever.
    #[test]
    fn values_of_old_uses_fall_behind() {
        let mut valued = ValuedExtents::default();
        for _ in 0..5 {
            valued.add(extent(0, 10), 1, 1);
        }
        let mut evicted = Vec::new();
        for start in (10..).step_by(10).take(8) {
            valued.add(extent(start, start + 10), 1, 1);
            valued.add(extent(start + 1000, start + 1010), 1, 1);
            evicted.extend(valued.pop_least_valuable());
            evicted.extend(valued.pop_least_valuable());
        }
        assert!(evicted.contains(&extent(0, 10)), "{evicted:?}");
        assert_ne!(evicted.first(), Some(&extent(0, 10)));
    }

    fn pop_all(valued: &mut ValuedExtents) -> Vec<Extent<Plain>> {
        std::iter::from_fn(|| valued.pop_least_valuable()).collect()
    }

    #[test]
    fn a_use_replaces_older_uses_of_the_same_bytes() {
        let mut valued = ValuedExtents::default();
        valued.add(extent(0, 10), 1, 1);
        valued.add(extent(10, 20), 1, 1);
        valued.add(extent(0, 20), 1, 1);
        assert_eq!(pop_all(&mut valued), [extent(0, 20)]);
    }

    #[test]
    fn a_use_within_an_older_extent_splits_it() {
        let mut valued = ValuedExtents::default();
        valued.add(extent(0, 100), 1, 1);
        valued.add(extent(200, 210), 1, 1);
        valued.add(extent(40, 60), 1, 1);
        assert_eq!(valued.first_untracked(extent(0, 100)), None);
        assert_eq!(valued.first_untracked(extent(70, 80)), None);
        let expected = [
            extent(0, 40),
            extent(60, 100),
            extent(200, 210),
            extent(40, 60),
        ];
        assert_eq!(pop_all(&mut valued), expected);
    }

    #[test]
    fn a_use_trims_the_older_extents_beside_it() {
        let mut valued = ValuedExtents::default();
        valued.add(extent(0, 10), 1, 1);
        valued.add(extent(10, 20), 1, 1);
        valued.add(extent(5, 15), 1, 1);
        let expected = [extent(0, 5), extent(15, 20), extent(5, 15)];
        assert_eq!(pop_all(&mut valued), expected);
    }

    #[test]
    fn a_use_of_no_bytes_changes_nothing() {
        let mut valued = ValuedExtents::default();
        valued.add(extent(0, 10), 1, 1);
        valued.add(extent(5, 5), 1, 1);
        valued.add(extent(0, 0), 1, 1);
        assert_eq!(pop_all(&mut valued), [extent(0, 10)]);
    }

    #[test]
    fn the_oldest_extents_are_forgotten_beyond_the_limit() {
        let mut valued = ValuedExtents::default();
        let max = MAX_EXTENTS as u64;
        for number in 0..max + 2 {
            valued.add(extent(10 * number, 10 * number + 10), 1, 1);
        }
        assert_eq!(valued.first_untracked(extent(0, 100)), Some(extent(0, 20)));
        assert_eq!(valued.pop_least_valuable(), Some(extent(20, 30)));
        assert_eq!(valued.by_value.len(), MAX_EXTENTS - 1);
        assert_eq!(valued.by_start.len(), MAX_EXTENTS - 1);
        // A split adds two extents, so the oldest is forgotten for the second.
        valued.add(extent(10 * max + 3, 10 * max + 6), 1, 1);
        assert_eq!(valued.by_value.len(), MAX_EXTENTS);
        assert_eq!(valued.pop_least_valuable(), Some(extent(40, 50)));
    }

    const BYTES: u64 = 40;

    proptest! {
        /// Eviction returns each byte once, in the order of value and last use.
        #[test]
        fn bytes_are_taken_in_the_order_of_their_values(
            uses in prop::collection::vec((0..BYTES, 0..BYTES, 1..4_u32), 0..60)
        ) {
            let mut valued = ValuedExtents::default();
            // Value, last use and number of uses of each byte.
            let mut bytes = vec![(0, 0, 0); index(BYTES)];
            for (number, (one, other, cost)) in (1..).zip(uses) {
                let used = extent(one.min(other), one.max(other));
                valued.add(used, cost, 1);
                let used = bytes.get_mut(index(used.start().0)..index(used.end().0)).expect("inside");
                let uses = 1 + used.iter().map(|byte| byte.2).max().unwrap_or(0);
                used.fill((super::value(cost, uses), number, uses));
            }
            let first_unused = (0..).zip(&bytes).find(|(_, byte)| byte.2 == 0);
            let first_untracked = valued.first_untracked(extent(0, BYTES));
            prop_assert_eq!(first_untracked.map(|unknown| unknown.start().0), first_unused.map(|(at, _)| at));
            let mut taken = Vec::new();
            for extent in pop_all(&mut valued) {
                taken.extend(extent.start().0..extent.end().0);
            }
            let of_byte = |at: &u64| bytes[index(*at)];
            prop_assert!(taken.iter().map(of_byte).is_sorted());
            taken.sort_unstable();
            let used: Vec<u64> = (0..BYTES).filter(|at| of_byte(at).2 > 0).collect();
            prop_assert_eq!(taken, used);
        }
    }

    fn index(at: u64) -> usize {
        usize::try_from(at).expect("small")
    }

    #[test]
    fn gaps_between_tracked_extents_are_untracked() {
        let mut valued = ValuedExtents::default();
        assert_eq!(valued.first_untracked(extent(3, 9)), Some(extent(3, 9)));
        valued.add(extent(10, 20), 1, 1);
        valued.add(extent(20, 30), 1, 1);
        valued.add(extent(40, 50), 1, 1);
        assert_eq!(valued.first_untracked(extent(3, 100)), Some(extent(3, 10)));
        assert_eq!(valued.first_untracked(extent(3, 7)), Some(extent(3, 7)));
        assert_eq!(
            valued.first_untracked(extent(10, 100)),
            Some(extent(30, 40))
        );
        assert_eq!(valued.first_untracked(extent(15, 35)), Some(extent(30, 35)));
        assert_eq!(valued.first_untracked(extent(12, 28)), None);
        assert_eq!(valued.first_untracked(extent(10, 30)), None);
        assert_eq!(valued.first_untracked(extent(45, 60)), Some(extent(50, 60)));
        valued.clear();
        assert_eq!(valued.first_untracked(extent(12, 28)), Some(extent(12, 28)));
        assert_eq!(valued.pop_least_valuable(), None);
    }
}
