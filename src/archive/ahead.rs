//! Where readers go, and how far to be ahead of them; pure.
//!
//! A mounted file is not opened, so a reader is known by where it reads. In an archive numbers of
//! entries, listings and plain offsets ascend together: who reads a file to its end, or a tree file
//! by file, asks for one plain offset after the other. That is a [run](Runs).
//!
//! What runs earn is bounded by what they have read, so that who reads here and there costs
//! nothing. Inside a file spans are made ahead as far as the run has come, and never past the
//! file's end. Past it, into the files that follow, goes only a run that has gone from file to file
//! before, and by a sixth of what it has read: were all of that for nothing, the bytes fetched
//! would still be less than 1.2 times those that were needed. Where nothing is fetched, because all
//! is on the disk already, it earns as much as it has read.

use std::collections::VecDeque;

use crate::base::extent::{Extent, Plain};

/// Readers that are followed at once; who was silent longest is forgotten for a new one.
const MAX_RUNS: usize = 8;

/// How far past its end a run is still continued: headers, a few files left out.
const GAP_BYTES: u64 = 64 << 10;

/// Gaps up to this length lie between files anyway: headers, empty files, links.
const HEADER_BYTES: u64 = 8 << 10;

/// How far before its end a run is still the same: the kernel sends neighbouring requests at once,
/// and they may arrive in any order.
const BACK_BYTES: u64 = 2 << 20;

/// Steps from file to file after which a run is taken for a reader of a tree.
const STEPS: u32 = 2;

/// What a run across files may have made ahead where that is fetched: its bytes divided by this.
const SHARE: u64 = 6;

/// The first window that is pushed, in plain bytes.
const FIRST_PUSH: u64 = 512 << 10;

/// How far ahead of a reader to be at the most, in plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Limits {
    /// Made and in memory.
    pub(super) made: u64,
    /// Pushed into the kernel's page cache; 0 for not at all.
    pub(super) pushed: u64,
}

/// A read, in plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Touch {
    /// What was asked for.
    pub(super) wanted: Extent<Plain>,
    /// The whole file.
    pub(super) file: Extent<Plain>,
}

/// What is to be done ahead of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Wanted {
    /// Whose reader this is for.
    pub(super) run: u64,
    /// Spans to make.
    pub(super) make: Option<Make>,
    /// Files to push.
    pub(super) push: Option<Push>,
}

/// Spans that end in a stretch of plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Make {
    /// The stretch. A span belongs to it that ends inside, or at its end.
    pub(super) extent: Extent<Plain>,
    /// Whether the span that holds its end belongs to it, too.
    pub(super) with_last: bool,
}

/// Files that start in a stretch of plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Push {
    /// The stretch.
    pub(super) extent: Extent<Plain>,
    /// The first file from here on is left out: when it is asked for, the reader has got there.
    pub(super) marker: Plain,
}

/// Readers, as far as they can be told apart.
#[derive(Debug)]
pub(super) struct Runs {
    limits: Limits,
    /// What a run across files may have made ahead: its bytes divided by this.
    share: u64,
    /// Who read last comes first.
    latest: VecDeque<Run>,
    started: u64,
}

#[derive(Debug)]
struct Run {
    number: u64,
    /// Where its last file ends.
    file_end: Plain,
    /// How often it went on to another file.
    steps: u32,
    /// It has read up to here.
    reached: Plain,
    /// Bytes it has read, those included that were pushed before it came.
    read: u64,
    /// Bytes it has left out, but for headers.
    skipped: u64,
    made: Plain,
    pushed: Plain,
    window: u64,
    /// From here on it earns the next window.
    trigger: Plain,
}

impl Run {
    fn new(number: u64, touch: &Touch) -> Self {
        let reached = touch.wanted.end();
        Self {
            number,
            file_end: touch.file.end(),
            steps: 0,
            reached,
            read: touch.wanted.len(),
            skipped: 0,
            made: reached,
            pushed: reached,
            window: FIRST_PUSH,
            trigger: reached,
        }
    }

    /// How far it or what was pushed for it has come.
    fn front(&self) -> Plain {
        self.reached.max(self.pushed)
    }

    fn is_continued_by(&self, touch: &Touch) -> bool {
        let start = touch.wanted.start().0;
        start.saturating_add(BACK_BYTES) >= self.reached.0
            && start <= self.front().0.saturating_add(GAP_BYTES)
    }

    /// Takes in a read that continues it; false when too much was left out for a run.
    fn extend(&mut self, touch: &Touch) -> bool {
        let (start, end) = (touch.wanted.start(), touch.wanted.end());
        let gap = start.0.saturating_sub(self.front().0);
        if gap > HEADER_BYTES {
            self.skipped += gap;
        }
        self.read += (end.0 - self.reached.0).saturating_sub(gap);
        if start >= self.file_end {
            self.steps += 1;
            self.file_end = touch.file.end();
        }
        self.reached = end;
        self.skipped <= self.read
    }

    fn make(&mut self, file: &Extent<Plain>, limits: Limits, share: u64) -> Option<Make> {
        let within = self.read.min(limits.made);
        let within = Plain(self.reached.0.saturating_add(within)).min(file.end());
        let across = match self.steps {
            STEPS.. => (self.read / share).min(limits.made),
            _ => 0,
        };
        let target = within.max(Plain(self.reached.0.saturating_add(across)));
        let from = self.made.max(self.reached);
        if target <= from {
            return None;
        }
        self.made = target;
        Some(Make {
            extent: Extent::new(from, target)?,
            with_last: target == file.end(),
        })
    }

    fn push(&mut self, start: Plain, limits: Limits) -> Option<Push> {
        let is_due = start >= self.trigger || self.reached >= self.pushed;
        if limits.pushed == 0 || self.steps < STEPS || !is_due {
            return None;
        }
        let from = self.front();
        let window = self.window.min(limits.pushed);
        self.window = window.saturating_mul(2);
        self.trigger = Plain(from.0.saturating_add(window / 2));
        self.pushed = Plain(from.0.saturating_add(window));
        Some(Push {
            extent: Extent::new(from, self.pushed)?,
            marker: self.trigger,
        })
    }
}

impl Runs {
    /// No reader yet.
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            share: SHARE,
            latest: VecDeque::new(),
            started: 0,
        }
    }

    /// Whether nothing that is made from now on has to be fetched.
    pub(super) fn all_is_here(&mut self, is_here: bool) {
        self.share = if is_here { 1 } else { SHARE };
    }

    /// Pushes so far ahead from now on: what is not pushed is not taken for read when a run leaves
    /// it out.
    pub(super) fn push_at_most(&mut self, bytes: u64) {
        self.limits.pushed = bytes;
    }

    /// What to do now that someone reads.
    pub(super) fn read(&mut self, touch: &Touch) -> Option<Wanted> {
        let known = self
            .latest
            .iter()
            .position(|run| run.is_continued_by(touch));
        let known = known.and_then(|at| self.latest.remove(at));
        let Some(mut run) = known else {
            self.start(touch);
            return None;
        };
        if touch.wanted.end() <= run.reached {
            self.latest.push_front(run);
            return None;
        }
        if !run.extend(touch) {
            self.start(touch);
            return None;
        }
        let wanted = Wanted {
            run: run.number,
            make: run.make(&touch.file, self.limits, self.share),
            push: run.push(touch.wanted.start(), self.limits),
        };
        self.latest.push_front(run);
        (wanted.make.is_some() || wanted.push.is_some()).then_some(wanted)
    }

    /// Up to where run `number` has read; `None` when it is forgotten.
    pub(super) fn reached(&self, number: u64) -> Option<Plain> {
        let run = self.latest.iter().find(|run| run.number == number)?;
        Some(run.reached)
    }

    fn start(&mut self, touch: &Touch) {
        self.started += 1;
        self.latest.push_front(Run::new(self.started, touch));
        self.latest.truncate(MAX_RUNS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    const LIMITS: Limits = Limits {
        made: 8 * MIB,
        pushed: 2 * MIB,
    };

    /// The read of `len` bytes at `offset` of the file that is so many bytes from `start` on.
    fn part(start: u64, size: u64, offset: u64, len: u64) -> Touch {
        Touch {
            wanted: Extent::with_len(Plain(start + offset), len),
            file: Extent::with_len(Plain(start), size),
        }
    }

    /// The read of a whole file.
    fn whole(start: u64, size: u64) -> Touch {
        part(start, size, 0, size)
    }

    /// Reads the file in pieces, and tells what was made ahead after each.
    fn made(runs: &mut Runs, start: u64, size: u64, piece: u64) -> Vec<Option<Make>> {
        let pieces = (0..size).step_by(usize::try_from(piece).expect("small"));
        let reads = pieces.map(|offset| part(start, size, offset, piece.min(size - offset)));
        reads
            .map(|touch| runs.read(&touch).and_then(|wanted| wanted.make))
            .collect()
    }

    fn make(start: u64, end: u64, with_last: bool) -> Make {
        Make {
            extent: Extent::new(Plain(start), Plain(end)).expect("in order"),
            with_last,
        }
    }

    #[test]
    fn a_reader_of_one_file_earns_twice_as_much_until_its_end() {
        let mut runs = Runs::new(LIMITS);
        let made = made(&mut runs, 100, 9 * MIB, MIB);
        let at = |mib: u64| 100 + mib * MIB;
        assert_eq!(made.first(), Some(&None), "one read says nothing");
        assert_eq!(made.get(1), Some(&Some(make(at(2), at(4), false))));
        assert_eq!(made.get(2), Some(&Some(make(at(4), at(6), false))));
        assert_eq!(made.get(3), Some(&Some(make(at(6), at(8), false))));
        assert_eq!(made.get(4), Some(&Some(make(at(8), at(9), true))));
        assert!(made.iter().skip(5).all(Option::is_none));
    }

    #[test]
    fn what_is_made_ahead_stays_within_the_limit() {
        let mut runs = Runs::new(LIMITS);
        for (number, make) in made(&mut runs, 0, 100 * MIB, MIB).iter().enumerate() {
            let reached = (number as u64 + 1) * MIB;
            let end = make.map_or(reached, |make| make.extent.end().0);
            assert!(end <= reached + LIMITS.made, "{make:?} at {reached}");
        }
    }

    #[test]
    fn a_reader_of_small_files_earns_a_sixth_of_what_it_read() {
        let mut runs = Runs::new(LIMITS);
        let mut furthest = 0;
        for number in 0..1000 {
            let start = number * 101 * KIB;
            let wanted = runs.read(&whole(start, 100 * KIB));
            let make = wanted.and_then(|wanted| wanted.make);
            furthest = make.map_or(furthest, |make| make.extent.end().0);
            let read = (number + 1) * 101 * KIB;
            assert!(furthest <= read + read / SHARE, "file {number}");
            assert!(number < 3 || furthest > read, "file {number}");
        }
    }

    #[test]
    fn where_nothing_is_fetched_a_reader_of_small_files_earns_what_it_read() {
        let mut runs = Runs::new(LIMITS);
        runs.all_is_here(true);
        let mut furthest = 0;
        for number in 0..100 {
            let wanted = runs.read(&whole(number * 101 * KIB, 100 * KIB));
            let make = wanted.and_then(|wanted| wanted.make);
            furthest = make.map_or(furthest, |make| make.extent.end().0);
            let read = (number + 1) * 101 * KIB;
            let ahead = read.min(LIMITS.made);
            assert!(furthest <= read + ahead, "file {number}");
            assert!(number < 3 || furthest > read + ahead - 8 * KIB * (number + 1));
        }
    }

    #[test]
    fn who_reads_here_and_there_earns_nothing() {
        let mut runs = Runs::new(LIMITS);
        for number in 0..200_u64 {
            let start = number * 7_919 % 200 * 10 * MIB;
            assert_eq!(runs.read(&whole(start, 50 * KIB)), None, "file {number}");
        }
    }

    #[test]
    fn who_leaves_out_more_than_it_reads_is_no_run() {
        let mut runs = Runs::new(LIMITS);
        for number in 0..200_u64 {
            let start = number * 50 * KIB;
            let wanted = runs.read(&whole(start, 2 * KIB));
            assert_eq!(wanted.and_then(|wanted| wanted.push), None);
        }
    }

    #[test]
    fn headers_between_tiny_files_are_not_left_out() {
        let mut runs = Runs::new(LIMITS);
        let wanted: Vec<_> = (0..100)
            .filter_map(|number| runs.read(&whole(number * 2 * KIB, 10)))
            .collect();
        assert!(wanted.iter().any(|wanted| wanted.push.is_some()));
    }

    #[test]
    fn a_window_is_pushed_once_its_marker_is_read_and_doubles() {
        let mut runs = Runs::new(LIMITS);
        let file = |number: u64| whole(number * 101 * KIB, 100 * KIB);
        assert_eq!(runs.read(&file(0)), None);
        assert_eq!(runs.read(&file(1)), None);
        let push = |wanted: Option<Wanted>| wanted.and_then(|wanted| wanted.push);
        let first = push(runs.read(&file(2))).expect("the third file in a row");
        assert_eq!(first.extent.start(), file(2).wanted.end());
        assert_eq!(first.extent.len(), FIRST_PUSH);
        let marker = first.extent.start().0 + FIRST_PUSH / 2;
        assert_eq!(first.marker, Plain(marker));
        assert_eq!(push(runs.read(&file(3))), None, "one that was missed");
        let marked = marker.div_ceil(101 * KIB);
        let second = push(runs.read(&file(marked))).expect("a window");
        assert_eq!(second.extent.start(), first.extent.end(), "no gap");
        assert_eq!(second.extent.len(), 2 * FIRST_PUSH);
        let mut longest = 0;
        for number in marked + 1..500 {
            let window = push(runs.read(&file(number)));
            longest = window.map_or(longest, |push| push.extent.len());
        }
        assert_eq!(longest, LIMITS.pushed);
    }

    #[test]
    fn nothing_is_pushed_where_nothing_may_be() {
        let mut runs = Runs::new(Limits {
            pushed: 0,
            ..LIMITS
        });
        for number in 0..100 {
            let wanted = runs.read(&whole(number * 101 * KIB, 100 * KIB));
            assert_eq!(wanted.and_then(|wanted| wanted.push), None);
        }
    }

    #[test]
    fn readers_are_told_apart() {
        let mut runs = Runs::new(LIMITS);
        let mut numbers = Vec::new();
        for number in 0..50 {
            for reader in 0..4 {
                let start = reader * 1000 * MIB + number * 101 * KIB;
                let wanted = runs.read(&whole(start, 100 * KIB));
                numbers.extend(wanted.map(|wanted| (reader, wanted.run)));
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        let readers: Vec<_> = numbers.iter().map(|(reader, _)| *reader).collect();
        assert_eq!(readers, [0, 1, 2, 3], "each is one run: {numbers:?}");
        assert!(numbers.iter().all(|(_, run)| runs.reached(*run).is_some()));
    }

    #[test]
    fn the_oldest_reader_is_forgotten() {
        let mut runs = Runs::new(LIMITS);
        for reader in 0..1000 {
            assert_eq!(runs.read(&whole(reader * 1000 * MIB, KIB)), None);
        }
        assert_eq!(runs.latest.len(), MAX_RUNS);
        assert_eq!(runs.reached(1), None);
    }

    proptest! {
        /// Whatever is read, no more is made ahead than its reader's share, and never backwards.
        #[test]
        fn nothing_is_wanted_that_was_not_earned(
            reads in prop::collection::vec((0..64_u64, 1..8_u64), 1..200)
        ) {
            let mut runs = Runs::new(LIMITS);
            let mut read = 0;
            let mut extra = 0;
            for (place, len) in reads {
                let touch = whole(place * MIB, len * 128 * KIB);
                read += touch.wanted.len();
                let Some(wanted) = runs.read(&touch) else { continue };
                if let Some(make) = wanted.make {
                    prop_assert!(make.extent.start() >= touch.wanted.end());
                    extra += make.extent.len();
                }
                if let Some(push) = wanted.push {
                    prop_assert!(push.extent.len() <= LIMITS.pushed);
                    prop_assert!(push.extent.contains(push.marker));
                }
            }
            prop_assert!(extra <= read, "{extra} ahead of {read}");
        }
    }
}
