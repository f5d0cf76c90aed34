//! An extent of the plain stream without the runs of zeros in it, which the disk cache does not store.
//! The index proves these zeros by their checksums, so no state of the file can make them wrong.

use std::ops::Range;

use crate::base::extent::{Extent, Plain};

/// An extent of the plain stream, and the runs of zeros in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SparseExtent {
    extent: Extent<Plain>,
    /// Disjoint, in order, within the extent.
    zero_runs: Vec<Extent<Plain>>,
    cost: u32,
}

impl SparseExtent {
    /// The extent with those of `zero_runs` that are in it. They are disjoint and in order.
    pub fn new(extent: Extent<Plain>, zero_runs: impl IntoIterator<Item = Extent<Plain>>) -> Self {
        let zero_runs = zero_runs.into_iter();
        Self {
            extent,
            zero_runs: zero_runs
                .filter_map(|run| run.intersection(&extent))
                .collect(),
            cost: 1,
        }
    }

    /// The same bytes, which cost the decoding of `cost` spans if they are lost; one if not set.
    #[must_use]
    pub fn with_cost(self, cost: u32) -> Self {
        Self { cost, ..self }
    }

    pub(super) fn cost(&self) -> u32 {
        self.cost
    }

    /// The extent, with its zeros.
    pub fn extent(&self) -> Extent<Plain> {
        self.extent
    }

    /// The parts that are stored, in order.
    pub fn stored(&self) -> impl Iterator<Item = Extent<Plain>> {
        let starts =
            std::iter::once(self.extent.start()).chain(self.zero_runs.iter().map(Extent::end));
        let ends = self
            .zero_runs
            .iter()
            .map(Extent::start)
            .chain([self.extent.end()]);
        let parts = starts
            .zip(ends)
            .filter_map(|(start, end)| Extent::new(start, end));
        parts.filter(|part| !part.is_empty())
    }

    /// Number of stored bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.stored().map(|part| part.len()).sum()
    }

    /// The range of `part` in the memory for the extent.
    pub(super) fn range(&self, part: Extent<Plain>) -> Range<usize> {
        let offset = |at: Plain| usize::try_from(at.0.saturating_sub(self.extent.start().0));
        let range = offset(part.start()).ok().zip(offset(part.end()).ok());
        range.map_or(0..0, |(start, end)| start..end)
    }

    /// Fills the zeros of `bytes`, the memory for the extent.
    pub(super) fn fill_zeros(&self, bytes: &mut [u8]) {
        for run in &self.zero_runs {
            bytes.get_mut(self.range(*run)).unwrap_or_default().fill(0);
        }
    }
}

impl From<Extent<Plain>> for SparseExtent {
    fn from(extent: Extent<Plain>) -> Self {
        Self::new(extent, [])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, end: u64) -> Extent<Plain> {
        Extent::new(Plain(start), Plain(end)).expect("in order")
    }

    #[test]
    fn parts_between_zero_runs_are_stored() {
        let stored = |runs: &[Extent<Plain>]| {
            let sparse = SparseExtent::new(extent(10, 20), runs.iter().copied());
            assert_eq!(
                sparse.stored_bytes(),
                sparse.stored().map(|part| part.len()).sum::<u64>()
            );
            sparse.stored().collect::<Vec<_>>()
        };
        assert_eq!(stored(&[]), [extent(10, 20)]);
        assert_eq!(stored(&[extent(0, 30)]), []);
        assert_eq!(stored(&[extent(5, 12)]), [extent(12, 20)]);
        assert_eq!(
            stored(&[extent(0, 5), extent(12, 14), extent(14, 15), extent(19, 40)]),
            [extent(10, 12), extent(15, 19)]
        );
    }
}
