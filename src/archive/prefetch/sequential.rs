//! Detection of sequential readers, and planning of read-ahead; pure.
//! The kernel does not report opens of mounted files, so the tracker knows a reader by the offsets that it
//! reads. Inode numbers, directory listings and plain offsets have the same order. So a reader of a file, or
//! of a tree file by file, reads ascending plain offsets. That is a [stream](ReadStreams).
//!
//! Read-ahead is limited by the bytes that the stream has read, so random reads cost nothing.
//! * Within a file, it is as many bytes as the stream has read, at most up to the file's end.
//! * Beyond the file, only a stream that read several files in order gets read-ahead, a sixth of the bytes
//!   read. Even if all of it is useless, the fetched bytes are less than 1.2 times those needed.
//! * If all spans are on disk, nothing is fetched. Then read-ahead across files equals the bytes read.

use std::collections::VecDeque;

use crate::base::extent::{Extent, Plain};
use crate::index::{Entry, EntryKind};

/// Maximum number of streams. A new one replaces the one that was idle longest.
const MAX_STREAMS: usize = 8;

/// Maximum gap after which a read still continues a stream: headers, and a few skipped files.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// Maximum gap that does not count as skipped: headers, empty files, links.
const MAX_HEADER_GAP_BYTES: u64 = 8 << 10;

/// Maximum distance of a read behind its stream. Adjacent requests of the kernel may arrive in any order.
const MAX_REORDER_BYTES: u64 = 2 << 20;

/// Number of steps to a next file after which a stream counts as a tree reader.
const MIN_FILES_IN_ORDER: u32 = 2;

/// Divisor of the bytes read that gives the read-ahead across files, if spans are fetched.
const FETCH_AHEAD_DIVISOR: u64 = 6;

/// Length of the first pushed window, in plain bytes.
const FIRST_PUSH_BYTES: u64 = 512 << 10;

/// Maximum read-ahead, in plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Limits {
    pub(super) fill_bytes: u64,
    /// Limit for files pushed into the kernel's page cache; 0 disables pushes.
    pub(super) push_bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FileRead {
    pub(super) wanted: Extent<Plain>,
    pub(super) file: Extent<Plain>,
}

impl FileRead {
    /// Converts a read of `len` bytes at `offset` to plain bytes; `None` if it needs none.
    pub(super) fn new(entry: Entry<'_>, offset: u64, len: u64) -> Option<Self> {
        if !matches!(entry.kind(), EntryKind::File) {
            return None;
        }
        let first = entry.pieces(0, entry.size()).next()?;
        let file = Extent::with_len(first.plain.start(), entry.stored_bytes());
        let piece = entry.pieces(offset, len).next()?;
        let inside = offset.saturating_sub(piece.offset);
        let start = Plain(piece.plain.start().0.checked_add(inside)?);
        let end = Plain(start.0.saturating_add(len)).min(file.end());
        let wanted = Extent::new(start, end)?;
        Some(Self { wanted, file })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReadAhead {
    pub(super) stream: u64,
    pub(super) fill: Option<FillRange>,
    pub(super) push: Option<PushRange>,
}

/// Spans that end in a range of plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FillRange {
    /// Includes spans that end inside, or at its end.
    pub(super) extent: Extent<Plain>,
    /// Whether the span that contains the end of the range is included.
    pub(super) includes_last: bool,
}

/// Files that start in a range of plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PushRange {
    pub(super) extent: Extent<Plain>,
    /// Offset of the marker: the first file from here on, not pushed, whose read shows the reader's progress.
    pub(super) marker: Plain,
}

#[derive(Debug)]
pub(super) struct ReadStreams {
    pub(super) limits: Limits,
    ahead_divisor: u64,
    /// Streams, most recently read first.
    latest: VecDeque<ReadStream>,
    started: u64,
}

#[derive(Debug)]
struct ReadStream {
    number: u64,
    file_end: Plain,
    /// Number of times that it continued in another file.
    steps: u32,
    reached: Plain,
    /// Bytes that it has read, including those that were pushed before it read them.
    read: u64,
    /// Bytes that it skipped, without headers.
    skipped: u64,
    filled_to: Plain,
    pushed_to: Plain,
    window: u64,
    /// Offset from which on a read causes the next push window.
    trigger: Plain,
}

impl ReadStream {
    fn new(number: u64, file_read: &FileRead) -> Self {
        let reached = file_read.wanted.end();
        Self {
            number,
            file_end: file_read.file.end(),
            steps: 0,
            reached,
            read: file_read.wanted.len(),
            skipped: 0,
            filled_to: reached,
            pushed_to: reached,
            window: FIRST_PUSH_BYTES,
            trigger: reached,
        }
    }

    /// End of the bytes that it read, or that were pushed for it.
    fn frontier(&self) -> Plain {
        self.reached.max(self.pushed_to)
    }

    fn is_continued_by(&self, file_read: &FileRead) -> bool {
        let start = file_read.wanted.start().0;
        start.saturating_add(MAX_REORDER_BYTES) >= self.reached.0
            && start <= self.frontier().0.saturating_add(MAX_GAP_BYTES)
    }

    /// Adds a read that continues it. Returns false if it has skipped too much for a stream.
    fn extend(&mut self, file_read: &FileRead) -> bool {
        let (start, end) = (file_read.wanted.start(), file_read.wanted.end());
        let gap = start.0.saturating_sub(self.frontier().0);
        if gap > MAX_HEADER_GAP_BYTES {
            self.skipped += gap;
        }
        self.read += (end.0 - self.reached.0).saturating_sub(gap);
        if start >= self.file_end {
            self.steps += 1;
            self.file_end = file_read.file.end();
        }
        self.reached = end;
        self.skipped <= self.read
    }

    fn next_fill(
        &mut self,
        file: &Extent<Plain>,
        limits: Limits,
        ahead_divisor: u64,
    ) -> Option<FillRange> {
        let within = self.read.min(limits.fill_bytes);
        let within = Plain(self.reached.0.saturating_add(within)).min(file.end());
        let across = match self.steps {
            MIN_FILES_IN_ORDER.. => (self.read / ahead_divisor).min(limits.fill_bytes),
            _ => 0,
        };
        let target = within.max(Plain(self.reached.0.saturating_add(across)));
        let from = self.filled_to.max(self.reached);
        if target <= from {
            return None;
        }
        self.filled_to = target;
        Some(FillRange {
            extent: Extent::new(from, target)?,
            includes_last: target == file.end(),
        })
    }

    fn next_push(&mut self, start: Plain, limits: Limits) -> Option<PushRange> {
        let is_due = start >= self.trigger || self.reached >= self.pushed_to;
        if limits.push_bytes == 0 || self.steps < MIN_FILES_IN_ORDER || !is_due {
            return None;
        }
        let from = self.frontier();
        let window = self.window.min(limits.push_bytes);
        self.window = window.saturating_mul(2);
        self.trigger = Plain(from.0.saturating_add(window / 2));
        self.pushed_to = Plain(from.0.saturating_add(window));
        Some(PushRange {
            extent: Extent::new(from, self.pushed_to)?,
            marker: self.trigger,
        })
    }
}

impl ReadStreams {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            ahead_divisor: FETCH_AHEAD_DIVISOR,
            latest: VecDeque::new(),
            started: 0,
        }
    }

    pub(super) fn set_all_on_disk(&mut self, is_here: bool) {
        self.ahead_divisor = if is_here { 1 } else { FETCH_AHEAD_DIVISOR };
    }

    pub(super) fn record_read(&mut self, file_read: &FileRead) -> Option<ReadAhead> {
        let known = self
            .latest
            .iter()
            .position(|stream| stream.is_continued_by(file_read));
        let known = known.and_then(|at| self.latest.remove(at));
        let Some(mut stream) = known else {
            self.start(file_read);
            return None;
        };
        if file_read.wanted.end() <= stream.reached {
            self.latest.push_front(stream);
            return None;
        }
        if !stream.extend(file_read) {
            self.start(file_read);
            return None;
        }
        let wanted = ReadAhead {
            stream: stream.number,
            fill: stream.next_fill(&file_read.file, self.limits, self.ahead_divisor),
            push: stream.next_push(file_read.wanted.start(), self.limits),
        };
        self.latest.push_front(stream);
        (wanted.fill.is_some() || wanted.push.is_some()).then_some(wanted)
    }

    /// End of the bytes that stream `number` has read; `None` if it was evicted.
    pub(super) fn reached(&self, number: u64) -> Option<Plain> {
        let stream = self.latest.iter().find(|stream| stream.number == number)?;
        Some(stream.reached)
    }

    fn start(&mut self, file_read: &FileRead) {
        self.started += 1;
        self.latest
            .push_front(ReadStream::new(self.started, file_read));
        self.latest.truncate(MAX_STREAMS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    const LIMITS: Limits = Limits {
        fill_bytes: 8 * MIB,
        push_bytes: 2 * MIB,
    };

    /// The read of `len` bytes at `offset` of the file with `size` bytes from `start` on.
    fn part(start: u64, size: u64, offset: u64, len: u64) -> FileRead {
        FileRead {
            wanted: Extent::with_len(Plain(start + offset), len),
            file: Extent::with_len(Plain(start), size),
        }
    }

    fn whole(start: u64, size: u64) -> FileRead {
        part(start, size, 0, size)
    }

    /// Reads the file in pieces, and returns the fills that each read causes.
    fn fills(
        streams: &mut ReadStreams,
        start: u64,
        size: u64,
        piece: u64,
    ) -> Vec<Option<FillRange>> {
        let pieces = (0..size).step_by(usize::try_from(piece).expect("small"));
        let reads = pieces.map(|offset| part(start, size, offset, piece.min(size - offset)));
        reads
            .map(|file_read| {
                streams
                    .record_read(&file_read)
                    .and_then(|wanted| wanted.fill)
            })
            .collect()
    }

    fn fill(start: u64, end: u64, includes_last: bool) -> FillRange {
        FillRange {
            extent: Extent::new(Plain(start), Plain(end)).expect("in order"),
            includes_last,
        }
    }

    // Promises: ahead-default
    #[test]
    fn fill_doubles_within_one_file_until_its_end() {
        let mut streams = ReadStreams::new(LIMITS);
        let fills = fills(&mut streams, 100, 9 * MIB, MIB);
        let at = |mib: u64| 100 + mib * MIB;
        assert_eq!(fills.first(), Some(&None), "one read says nothing");
        assert_eq!(fills.get(1), Some(&Some(fill(at(2), at(4), false))));
        assert_eq!(fills.get(2), Some(&Some(fill(at(4), at(6), false))));
        assert_eq!(fills.get(3), Some(&Some(fill(at(6), at(8), false))));
        assert_eq!(fills.get(4), Some(&Some(fill(at(8), at(9), true))));
        assert!(fills.iter().skip(5).all(Option::is_none));
    }

    #[test]
    fn fill_ahead_stays_within_the_limit() {
        let mut streams = ReadStreams::new(LIMITS);
        for (number, fill) in fills(&mut streams, 0, 100 * MIB, MIB).iter().enumerate() {
            let reached = (number as u64 + 1) * MIB;
            let end = fill.map_or(reached, |fill| fill.extent.end().0);
            assert!(end <= reached + LIMITS.fill_bytes, "{fill:?} at {reached}");
        }
    }

    // Promises: ahead-default
    #[test]
    fn fill_across_small_files_is_a_sixth_of_bytes_read() {
        let mut streams = ReadStreams::new(LIMITS);
        let mut furthest = 0;
        for number in 0..1000 {
            let start = number * 101 * KIB;
            let wanted = streams.record_read(&whole(start, 100 * KIB));
            let fill = wanted.and_then(|wanted| wanted.fill);
            furthest = fill.map_or(furthest, |fill| fill.extent.end().0);
            let read = (number + 1) * 101 * KIB;
            assert!(
                furthest <= read + read / FETCH_AHEAD_DIVISOR,
                "file {number}"
            );
            assert!(number < 3 || furthest > read, "file {number}");
        }
    }

    // Promises: ahead-cost
    #[test]
    fn fill_across_files_on_disk_equals_bytes_read() {
        let mut streams = ReadStreams::new(LIMITS);
        streams.set_all_on_disk(true);
        let mut furthest = 0;
        for number in 0..100 {
            let wanted = streams.record_read(&whole(number * 101 * KIB, 100 * KIB));
            let fill = wanted.and_then(|wanted| wanted.fill);
            furthest = fill.map_or(furthest, |fill| fill.extent.end().0);
            let read = (number + 1) * 101 * KIB;
            let ahead = read.min(LIMITS.fill_bytes);
            assert!(furthest <= read + ahead, "file {number}");
            assert!(number < 3 || furthest > read + ahead - 8 * KIB * (number + 1));
        }
    }

    // Promises: ahead-default
    #[test]
    fn random_reads_cause_no_read_ahead() {
        let mut streams = ReadStreams::new(LIMITS);
        for number in 0..200_u64 {
            let start = number * 7_919 % 200 * 10 * MIB;
            assert_eq!(
                streams.record_read(&whole(start, 50 * KIB)),
                None,
                "file {number}"
            );
        }
    }

    #[test]
    fn reader_that_skips_more_than_it_reads_is_no_stream() {
        let mut streams = ReadStreams::new(LIMITS);
        for number in 0..200_u64 {
            let start = number * 50 * KIB;
            let wanted = streams.record_read(&whole(start, 2 * KIB));
            assert_eq!(wanted.and_then(|wanted| wanted.push), None);
        }
    }

    #[test]
    fn headers_between_tiny_files_do_not_count_as_skipped() {
        let mut streams = ReadStreams::new(LIMITS);
        let wanted: Vec<_> = (0..100)
            .filter_map(|number| streams.record_read(&whole(number * 2 * KIB, 10)))
            .collect();
        assert!(wanted.iter().any(|wanted| wanted.push.is_some()));
    }

    #[test]
    fn push_window_doubles_when_its_marker_is_read() {
        let mut streams = ReadStreams::new(LIMITS);
        let file = |number: u64| whole(number * 101 * KIB, 100 * KIB);
        assert_eq!(streams.record_read(&file(0)), None);
        assert_eq!(streams.record_read(&file(1)), None);
        let push = |wanted: Option<ReadAhead>| wanted.and_then(|wanted| wanted.push);
        let first = push(streams.record_read(&file(2))).expect("the third file in a row");
        assert_eq!(first.extent.start(), file(2).wanted.end());
        assert_eq!(first.extent.len(), FIRST_PUSH_BYTES);
        let marker = first.extent.start().0 + FIRST_PUSH_BYTES / 2;
        assert_eq!(first.marker, Plain(marker));
        assert_eq!(
            push(streams.record_read(&file(3))),
            None,
            "one that was missed"
        );
        let marked = marker.div_ceil(101 * KIB);
        let second = push(streams.record_read(&file(marked))).expect("a window");
        assert_eq!(second.extent.start(), first.extent.end(), "no gap");
        assert_eq!(second.extent.len(), 2 * FIRST_PUSH_BYTES);
        let mut longest = 0;
        for number in marked + 1..500 {
            let window = push(streams.record_read(&file(number)));
            longest = window.map_or(longest, |push| push.extent.len());
        }
        assert_eq!(longest, LIMITS.push_bytes);
    }

    #[test]
    fn push_limit_of_zero_pushes_nothing() {
        let mut streams = ReadStreams::new(Limits {
            push_bytes: 0,
            ..LIMITS
        });
        for number in 0..100 {
            let wanted = streams.record_read(&whole(number * 101 * KIB, 100 * KIB));
            assert_eq!(wanted.and_then(|wanted| wanted.push), None);
        }
    }

    #[test]
    fn interleaved_readers_are_separate_streams() {
        let mut streams = ReadStreams::new(LIMITS);
        let mut numbers = Vec::new();
        for number in 0..50 {
            for reader in 0..4 {
                let start = reader * 1000 * MIB + number * 101 * KIB;
                let wanted = streams.record_read(&whole(start, 100 * KIB));
                numbers.extend(wanted.map(|wanted| (reader, wanted.stream)));
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        let readers: Vec<_> = numbers.iter().map(|(reader, _)| *reader).collect();
        assert_eq!(readers, [0, 1, 2, 3], "each is one run: {numbers:?}");
        assert!(
            numbers
                .iter()
                .all(|(_, stream)| streams.reached(*stream).is_some())
        );
    }

    #[test]
    fn oldest_stream_is_evicted() {
        let mut streams = ReadStreams::new(LIMITS);
        for reader in 0..1000 {
            assert_eq!(streams.record_read(&whole(reader * 1000 * MIB, KIB)), None);
        }
        assert_eq!(streams.latest.len(), MAX_STREAMS);
        assert_eq!(streams.reached(1), None);
    }

    proptest! {
        /// Read-ahead never exceeds the bytes read, and never goes backwards.
        // Promises: ahead-default, ahead-cost
        #[test]
        fn read_ahead_never_exceeds_bytes_read(
            reads in prop::collection::vec((0..64_u64, 1..8_u64), 1..200)
        ) {
            let mut streams = ReadStreams::new(LIMITS);
            let mut read = 0;
            let mut extra = 0;
            for (place, len) in reads {
                let file_read = whole(place * MIB, len * 128 * KIB);
                read += file_read.wanted.len();
                let Some(wanted) = streams.record_read(&file_read) else { continue };
                if let Some(fill) = wanted.fill {
                    prop_assert!(fill.extent.start() >= file_read.wanted.end());
                    extra += fill.extent.len();
                }
                if let Some(push) = wanted.push {
                    prop_assert!(push.extent.len() <= LIMITS.push_bytes);
                    prop_assert!(push.extent.contains(push.marker));
                }
            }
            prop_assert!(extra <= read, "{extra} ahead of {read}");
        }
    }
}
