//! Cuts an archive into shards of nearly equal packed bytes; pure.
//!
//! A shard is a range of entries in archive order, by the position of their first stored piece. An entry
//! without content is placed evenly between its neighbours with content. All names of an entry are in its shard,
//! so that hard links never lead out of it. The cuts follow from the index alone.
//!
//! A shard costs the packed bytes from the seek point before its first piece to the end of its last piece. The
//! highest cost is at most an equal share and one seek distance, or else as low as possible. Within this limit,
//! each shard takes an equal share of the packed bytes that are left, and begins at a seek point if one is near.

use serde::Serialize;

use super::{Entry, EntryKind, Index, Ino};
use crate::base::extent::Plain;

/// Maximum number of shards.
pub const MAX_SHARDS: u32 = 1 << 16;

/// A cut moves to a seek point within this part of a shard.
const SEEK_TOLERANCE_DIVISOR: u64 = 8;

/// Assignment of every entry to one shard.
#[derive(Debug)]
pub struct ShardPlan {
    /// In archive order.
    order: Vec<Ino>,
    /// Start of each shard in `order`, and the end.
    cuts: Vec<usize>,
    /// Number of the shard of each entry, by its number; 0 for none.
    of_entry: Vec<u32>,
    shards: Vec<Shard>,
}

/// One shard of a [`ShardPlan`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Shard {
    /// Its number, from 1.
    #[serde(rename = "shard")]
    pub number: u32,
    /// Number of its entries. Hard links count once.
    pub entries: u64,
    /// Stored bytes of its files.
    pub bytes: u64,
    /// Packed offset where its decoding starts.
    pub packed_start: u64,
    /// Packed offset where its decoding ends, estimated between seek points.
    pub packed_end: u64,
}

/// An entry and the packed bytes that it is decoded from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Row {
    ino: Ino,
    /// Estimated packed offset.
    start: u64,
    /// Seek point before it; for an entry without content, that of the next one with content.
    seek: u64,
    /// Highest packed end so far.
    end: u64,
}

impl ShardPlan {
    /// Cuts a complete `index` into `count` shards, at least one. Some are empty if there are too few entries.
    pub fn new(index: &Index, count: u32) -> Self {
        let count = count.clamp(1, MAX_SHARDS);
        let seek_points = SeekPoints::new(index);
        let rows = rows(index, &seek_points);
        let cuts = cut(&rows, &seek_points, count);
        let mut plan = Self {
            order: rows.iter().map(|row| row.ino).collect(),
            of_entry: vec![0; index.last_ino().0 as usize + 1],
            shards: Vec::with_capacity(count as usize),
            cuts,
        };
        for number in 1..=count {
            let entries = plan.range(number);
            let rows = rows.get(entries).unwrap_or_default();
            plan.add_shard(index, number, rows);
        }
        plan
    }

    fn add_shard(&mut self, index: &Index, number: u32, rows: &[Row]) {
        let mut shard = Shard {
            number,
            entries: rows.len() as u64,
            ..Shard::default()
        };
        for row in rows {
            if let Some(place) = self.of_entry.get_mut(row.ino.0 as usize) {
                *place = number;
            }
            let stored = index.entry(row.ino).map_or(0, |entry| entry.stored_bytes());
            if stored > 0 && shard.bytes == 0 {
                shard.packed_start = row.seek;
            }
            if stored > 0 {
                shard.packed_end = row.end;
            }
            shard.bytes = shard.bytes.saturating_add(stored);
        }
        self.shards.push(shard);
    }

    /// All shards, in archive order.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The entries of shard `number`, in archive order. The root is among them.
    pub fn entries(&self, number: u32) -> &[Ino] {
        self.order.get(self.range(number)).unwrap_or_default()
    }

    /// Number of the shard of entry `ino`; `None` if there is no such entry.
    pub fn shard_of(&self, ino: Ino) -> Option<u32> {
        let number = self.of_entry.get(ino.0 as usize).copied();
        number.filter(|&number| number > 0)
    }

    fn range(&self, number: u32) -> std::ops::Range<usize> {
        let cut = |number: usize| self.cuts.get(number).copied().unwrap_or(self.order.len());
        let number = number as usize;
        cut(number.saturating_sub(1))..cut(number)
    }
}

/// Seek points of an index, and the ends of its streams: plain and packed offsets, both ascending.
struct SeekPoints(Vec<(u64, u64)>);

impl SeekPoints {
    fn new(index: &Index) -> Self {
        let origin = index.origin();
        let mut points = vec![(0, 0)];
        let seek_points = (0..index.span_count()).filter_map(|number| {
            let plain = index.span_extent(number)?.start().0;
            Some((plain, index.seek_offset(number)?.0))
        });
        for (plain, packed) in seek_points.chain([(origin.plain_bytes, origin.packed_bytes)]) {
            let last = points.last().copied().unwrap_or_default();
            // An index file can claim any order.
            if plain > last.0 && packed >= last.1 {
                points.push((plain, packed.min(origin.packed_bytes)));
            }
        }
        Self(points)
    }

    /// The last point at or before `plain`, and the next one.
    fn around(&self, plain: Plain) -> ((u64, u64), (u64, u64)) {
        let after = self.0.partition_point(|point| point.0 <= plain.0);
        let before = self.0.get(after.wrapping_sub(1)).copied();
        let before = before.unwrap_or_default();
        (before, self.0.get(after).copied().unwrap_or(before))
    }

    /// Packed offset of `plain`, estimated between seek points.
    fn packed_at(&self, plain: Plain) -> u64 {
        let (before, after) = self.around(plain);
        before.1 + scale(plain.0 - before.0, after.1 - before.1, after.0 - before.0)
    }

    /// The seek point nearest to `packed`.
    fn nearest(&self, packed: u64) -> u64 {
        let after = self.0.partition_point(|point| point.1 < packed);
        let near = [after.wrapping_sub(1), after];
        let near = near.iter().filter_map(|&number| self.0.get(number));
        let nearest = near.map(|point| point.1);
        let nearest = nearest.min_by_key(|point| point.abs_diff(packed));
        nearest.unwrap_or_default()
    }

    /// Largest packed distance of neighbours.
    fn distance(&self) -> u64 {
        let next = self.0.iter().skip(1);
        let distances = self.0.iter().zip(next).map(|(one, next)| next.1 - one.1);
        distances.max().unwrap_or_default()
    }

    fn packed_bytes(&self) -> u64 {
        self.0.last().map_or(0, |point| point.1)
    }
}

/// `value * factor / divisor`, at most `factor`.
fn scale(value: u64, factor: u64, divisor: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(factor) / u128::from(divisor.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX).min(factor)
}

/// All entries in archive order.
fn rows(index: &Index, seek_points: &SeekPoints) -> Vec<Row> {
    let mut rows = Vec::new();
    // Start and packed end of the last content, and the rows after it that wait for the next one.
    let (mut before, mut waiting) = (0, 0);
    for number in Ino::ROOT.0..=index.last_ino().0 {
        let Some(entry) = index.entry(Ino(number)) else {
            continue;
        };
        let mut row = Row {
            ino: Ino(number),
            start: 0,
            seek: u64::MAX,
            end: 0,
        };
        waiting += 1;
        if let Some((start, end)) = content(entry) {
            row.start = seek_points.packed_at(start);
            row.seek = seek_points.around(start).0.1;
            row.end = seek_points.packed_at(end);
            rows.push(row);
            spread(&mut rows, waiting, before, row.start);
            (before, waiting) = (row.end, 0);
        } else {
            rows.push(row);
        }
    }
    spread(&mut rows, waiting, before, seek_points.packed_bytes());
    rows.sort_unstable_by_key(|row| (row.start, row.ino));
    let mut next = u64::MAX;
    for row in rows.iter_mut().rev() {
        next = row.seek.min(next);
        row.seek = next;
    }
    let mut last = 0;
    for row in &mut rows {
        last = row.end.max(last);
        row.end = last;
    }
    rows
}

/// First and end of the plain bytes of a file.
fn content(entry: Entry<'_>) -> Option<(Plain, Plain)> {
    if entry.kind() != EntryKind::File {
        return None;
    }
    let mut pieces = entry.pieces(0, u64::MAX).map(|piece| piece.plain);
    let first = pieces.next()?;
    Some((first.start(), pieces.last().unwrap_or(first).end()))
}

/// Places the last `count` rows evenly between `before` and `after`. A row with content keeps its place.
fn spread(rows: &mut [Row], count: usize, before: u64, after: u64) {
    let first = rows.len().saturating_sub(count);
    let gap = after.saturating_sub(before);
    for (number, row) in rows.iter_mut().skip(first).enumerate() {
        if row.seek == u64::MAX {
            row.start = before.min(after) + scale(number as u64, gap, count as u64);
        }
    }
}

/// The longest shard from row `from` on that costs at most `limit`; its end.
fn longest(rows: &[Row], from: usize, limit: u64) -> usize {
    let Some(first) = rows.get(from) else {
        return rows.len();
    };
    rows.partition_point(|row| row.end.saturating_sub(first.seek) <= limit)
        .max(from)
}

/// Whether `count` shards that cost at most `limit` are enough.
fn is_enough(rows: &[Row], count: u32, limit: u64) -> bool {
    let mut from = 0;
    for _ in 0..count {
        from = longest(rows, from, limit);
        if from == rows.len() {
            return true;
        }
    }
    false
}

/// Starts of all shards, and the end.
fn cut(rows: &[Row], seek_points: &SeekPoints, count: u32) -> Vec<usize> {
    let total = seek_points.packed_bytes();
    let whole = rows.first().zip(rows.last());
    let whole = whole.map_or(0, |(first, last)| last.end.saturating_sub(first.seek));
    let (mut low, mut limit) = (0, whole.max(total));
    while low < limit {
        let middle = low + (limit - low) / 2;
        if is_enough(rows, count, middle) {
            limit = middle;
        } else {
            low = middle + 1;
        }
    }
    // A seek distance more leaves room for cuts at seek points.
    limit = limit.max(total / u64::from(count) + seek_points.distance());
    // The lowest starts of the last shards, from the back.
    let mut starts = vec![rows.len()];
    for _ in 1..count {
        let to = starts.last().copied().unwrap_or_default();
        let end = to.checked_sub(1).and_then(|last| rows.get(last));
        let lowest_seek = end.map_or(0, |row| row.end.saturating_sub(limit));
        starts.push(rows.partition_point(|row| row.seek < lowest_seek).min(to));
    }
    let mut cuts = vec![0];
    for left in (1..=count).rev() {
        let from = cuts.last().copied().unwrap_or_default();
        let lowest = starts.get(left as usize - 1).copied().unwrap_or_default();
        let lowest = lowest.max(from);
        let highest = longest(rows, from, limit).max(lowest);
        cuts.push(fair_end(rows, seek_points, from, left).clamp(lowest, highest));
    }
    cuts
}

/// End of a shard from row `from` on that has an equal share if `left` shards take the rest.
fn fair_end(rows: &[Row], seek_points: &SeekPoints, from: usize, left: u32) -> usize {
    let Some(first) = rows.get(from).filter(|_| left > 1) else {
        return rows.len();
    };
    let share = seek_points.packed_bytes().saturating_sub(first.start) / u64::from(left);
    let target = first.start.saturating_add(share);
    let near = seek_points.nearest(target);
    let is_near = near.abs_diff(target) <= share / SEEK_TOLERANCE_DIVISOR;
    let target = if is_near { near } else { target };
    rows.partition_point(|row| row.start < target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::extent::{Extent, Packed};
    use crate::codec::SeekPoint;
    use crate::index::test_support::{directory, file, hard_link, symlink};
    use crate::index::{Builder, Options, Origin};
    use crate::tar::Member;

    const SPAN: u64 = 1000;

    /// An index of `members` in spans of 1000 plain bytes, which pack to a half.
    fn index(members: &[Member], spans: u64) -> Index {
        let mut builder = Builder::new(Options::default());
        for member in members {
            builder.add_member(member).expect("placed");
        }
        for number in 0..spans {
            let point = SeekPoint {
                packed: Packed(number * SPAN / 2),
                bit: 0,
                plain: Plain(number * SPAN),
                state: 0,
                window: bytes::Bytes::new(),
            };
            let extent = Extent::with_len(Plain(number * SPAN), SPAN);
            builder.add_span(extent, Some(&[0]), Some(&point));
        }
        builder.finish(Origin {
            packed_bytes: spans * SPAN / 2,
            plain_bytes: spans * SPAN,
            ..Origin::default()
        })
    }

    /// Files of `len` bytes, one after the other.
    fn files(count: u64, len: u64) -> Vec<Member> {
        let name = |number| format!("f{number:05}");
        (0..count)
            .map(|number| file(&name(number), number * len..(number + 1) * len))
            .collect()
    }

    fn counts(plan: &ShardPlan) -> Vec<u64> {
        plan.shards().iter().map(|shard| shard.entries).collect()
    }

    #[test]
    fn every_entry_is_in_exactly_one_shard() {
        let mut members = files(300, 70);
        members.insert(3, directory("d", 0o755));
        members.insert(100, symlink("l", "f00001"));
        members.push(hard_link("h", "f00007"));
        let index = index(&members, 21);
        for count in [1, 2, 7, 64, 1000] {
            let plan = ShardPlan::new(&index, count);
            assert_eq!(plan.shards().len(), count as usize);
            let mut all = Vec::new();
            for number in 1..=count {
                let entries = plan.entries(number);
                let of = |ino: &Ino| plan.shard_of(*ino) == Some(number);
                assert!(entries.iter().all(of));
                all.extend_from_slice(entries);
            }
            // With the root, and without the second name of a file.
            assert_eq!(all, (1..=303).map(Ino).collect::<Vec<_>>());
            assert_eq!(counts(&plan).iter().sum::<u64>(), 303);
        }
    }

    #[test]
    fn cuts_are_at_seek_points_if_these_are_near() {
        let index = index(&files(520, 100), 52);
        let plan = ShardPlan::new(&index, 5);
        // The root is in the first shard.
        assert_eq!(counts(&plan), [101, 100, 110, 100, 110]);
        let starts = plan.shards().iter().map(|shard| shard.packed_start);
        assert_eq!(starts.collect::<Vec<_>>(), [0, 5000, 10000, 15500, 20500]);
    }

    #[test]
    fn shards_without_near_seek_points_have_equal_shares() {
        let plan = ShardPlan::new(&index(&files(50, 100), 5), 3);
        assert_eq!(counts(&plan), [18, 17, 16]);
    }

    #[test]
    fn cost_exceeds_the_share_by_at_most_one_seek_distance() {
        for (len, spans, count) in [(30, 10, 7), (30, 10, 64), (70, 21, 2), (11, 100, 64)] {
            let index = index(&files(spans * SPAN / len, len), spans);
            let plan = ShardPlan::new(&index, count);
            let packed = index.origin().packed_bytes;
            let most = packed / u64::from(count) + SPAN / 2;
            for shard in plan.shards() {
                let cost = shard.packed_end - shard.packed_start;
                assert!(cost <= most + 1, "{len} {spans} {count}: {shard:?}");
            }
        }
    }

    #[test]
    fn huge_file_leaves_equal_shards_to_the_others() {
        let mut members = vec![file("huge", 0..5000)];
        members.extend((0..50).map(|n| file(&format!("f{n}"), 5000 + n * 100..5100 + n * 100)));
        let plan = ShardPlan::new(&index(&members, 10), 6);
        assert_eq!(counts(&plan), [2, 10, 10, 10, 10, 10]);
    }

    #[test]
    fn file_longer_than_a_share_does_not_lengthen_the_shard_before() {
        let mut members = files(47, 100);
        members.push(file("huge", 4700..9700));
        members.extend((97..100).map(|n| file(&format!("f{n}"), n * 100..(n + 1) * 100)));
        // The half of the archive is in the huge file.
        let plan = ShardPlan::new(&index(&members, 10), 2);
        assert_eq!(counts(&plan), [48, 4]);
        let costs = plan.shards().iter();
        let costs = costs.map(|shard| (shard.packed_start, shard.packed_end));
        assert_eq!(costs.collect::<Vec<_>>(), [(0, 2350), (2000, 5000)]);
    }

    #[test]
    fn entries_without_content_are_spread_too() {
        let members: Vec<_> = (0..99).map(|n| symlink(&format!("l{n}"), "x")).collect();
        let plan = ShardPlan::new(&index(&members, 4), 4);
        assert_eq!(counts(&plan), [25, 25, 25, 25]);
    }

    #[test]
    fn contents_in_any_order_are_in_exactly_one_shard() {
        let mut members = files(100, 100);
        members.reverse();
        members.push(file("beyond", u64::MAX - 10..u64::MAX - 5));
        let index = index(&members, 10);
        let plan = ShardPlan::new(&index, 7);
        assert_eq!(counts(&plan).iter().sum::<u64>(), 102);
        let mut all: Vec<_> = (1..=7).flat_map(|n| plan.entries(n).to_vec()).collect();
        let entries = all.iter().filter_map(|ino| index.entry(*ino));
        let starts: Vec<_> = entries.filter_map(content).map(|it| it.0).collect();
        assert_eq!((starts.len(), starts.is_sorted()), (101, true));
        all.sort_unstable();
        assert_eq!(all, (1..=102).map(Ino).collect::<Vec<_>>());
    }

    #[test]
    fn empty_archive_has_only_its_root() {
        let plan = ShardPlan::new(&index(&[], 0), 3);
        assert_eq!(counts(&plan).iter().sum::<u64>(), 1);
        assert_eq!(plan.shard_of(Ino(7)), None);
    }
}
