//! Replay of the spans that an earlier reader needed, in its order; pure.

use std::collections::HashMap;

/// A list of spans to fill, up to a limit ahead of the reader.
#[derive(Debug, Default)]
pub(super) struct Replay {
    spans: Vec<u32>,
    /// Total bytes of the spans before each position, and of all spans.
    start_bytes: Vec<u64>,
    positions: HashMap<u32, usize>,
    next: usize,
    reached: usize,
    /// Maximum number of bytes that are returned but not read; `None` if spans are cached on disk.
    pub(super) max_ahead_bytes: Option<u64>,
}

impl Replay {
    /// Creates a replay of spans and their lengths. A repeated span counts once, at its first position.
    pub(super) fn new(
        spans: impl Iterator<Item = (u32, u64)>,
        max_ahead_bytes: Option<u64>,
    ) -> Self {
        let mut replay = Self {
            start_bytes: vec![0],
            max_ahead_bytes,
            ..Self::default()
        };
        let mut sum = 0_u64;
        for (span, len) in spans {
            if replay.positions.contains_key(&span) {
                continue;
            }
            replay.positions.insert(span, replay.spans.len());
            replay.spans.push(span);
            sum = sum.saturating_add(len);
            replay.start_bytes.push(sum);
        }
        replay
    }

    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.start_bytes_at(self.spans.len())
    }

    pub(super) fn mark_read(&mut self, span: u32) {
        if let Some(&position) = self.positions.get(&span) {
            self.reached = self.reached.max(position);
        }
    }

    /// Returns the next spans to fill, at most `count`, ascending so that neighbours are together.
    pub(super) fn next(&mut self, count: usize) -> Vec<u32> {
        let reached = self.start_bytes_at(self.reached);
        self.next = self.next.max(self.reached);
        let from = self.next;
        while self.next < self.spans.len() && self.next - from < count {
            let ahead = self.start_bytes_at(self.next + 1) - reached;
            if self
                .max_ahead_bytes
                .is_some_and(|max_ahead_bytes| ahead > max_ahead_bytes)
            {
                break;
            }
            self.next += 1;
        }
        let mut next = self.spans.get(from..self.next).unwrap_or_default().to_vec();
        next.sort_unstable();
        next
    }

    fn start_bytes_at(&self, position: usize) -> u64 {
        self.start_bytes.get(position).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(spans: &[u32], max_ahead_bytes: Option<u64>) -> Replay {
        Replay::new(spans.iter().map(|&span| (span, 10)), max_ahead_bytes)
    }

    #[test]
    fn batch_is_sorted_and_has_no_repetitions() {
        let mut replay = replay(&[9, 3, 9, 4, 3, 1, 8], None);
        assert_eq!(replay.len(), 5);
        assert_eq!(replay.next(4), [1, 3, 4, 9]);
        assert_eq!(replay.next(4), [8]);
        assert_eq!(replay.next(4), [] as [u32; 0]);
    }

    // Promises: profile-replay
    #[test]
    fn replay_stays_within_the_limit_ahead_of_its_reader() {
        let mut replay = replay(&[0, 1, 2, 3, 4, 5, 6, 7], Some(35));
        assert_eq!(replay.next(9), [0, 1, 2]);
        assert_eq!(replay.next(9), [] as [u32; 0]);
        replay.mark_read(77);
        assert_eq!(replay.next(9), [] as [u32; 0]);
        replay.mark_read(2);
        assert_eq!(replay.next(9), [3, 4]);
        replay.mark_read(1);
        assert_eq!(replay.next(9), [] as [u32; 0], "it never goes back");
    }

    #[test]
    fn replay_skips_spans_that_its_reader_has_passed() {
        let mut replay = replay(&[0, 1, 2, 3, 4, 5], Some(20));
        replay.mark_read(4);
        assert_eq!(replay.next(9), [4, 5]);
    }
}
