//! The senders of the last bytes, so that wrong ones are blamed on the mirror that sent them.

use std::collections::VecDeque;
use std::ops::Range;

/// Maximum number of ranges whose sender is known.
const MAX_RANGES: usize = 256;

/// The last ranges that were received, and the number of the mirror that sent each.
#[derive(Debug, Default)]
pub(super) struct Senders(VecDeque<(Range<u64>, usize)>);

impl Senders {
    pub(super) fn add(&mut self, range: Range<u64>, number: usize) {
        if self.0.len() == MAX_RANGES {
            self.0.pop_front();
        }
        self.0.push_back((range, number));
    }

    /// The mirrors that sent a part of `range`.
    pub(super) fn of(&self, range: &Range<u64>) -> Vec<usize> {
        let overlaps = |sent: &Range<u64>| sent.start < range.end && range.start < sent.end;
        let senders = self.0.iter().filter(|(sent, _)| overlaps(sent));
        senders.map(|&(_, number)| number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: mirror-same
    #[test]
    fn senders_of_the_last_ranges_are_known() {
        let mut senders = Senders::default();
        senders.add(0..10, 1);
        senders.add(10..20, 2);
        assert_eq!(senders.of(&(5..11)), [1, 2]);
        assert_eq!(senders.of(&(10..11)), [2]);
        assert!(senders.of(&(20..30)).is_empty());
        (0..MAX_RANGES as u64).for_each(|_| senders.add(30..31, 3));
        assert!(senders.of(&(0..20)).is_empty(), "they are forgotten");
    }
}
