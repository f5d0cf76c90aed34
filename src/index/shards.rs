//! Cuts an archive into shards of nearly equal length; pure.
//!
//! A shard is a range of [`Index::entries`]. All names of an entry are in its shard, so that hard links never lead out of
//! it. The cuts follow from the order of the entries and from the stored bytes of each, which are the same in every form
//! of an index, and not from seek points, which depend on how the index was made.
//!
//! The longest shard is about as short as possible. Within this limit, each takes an equal share of what is left.

use std::ops::Range;

use serde::Serialize;

use super::{Entry, EntryKind, Index, Ino};
use crate::base::extent::Plain;
use crate::tar::RECORD;

/// Maximum number of shards.
pub const MAX_SHARDS: u32 = 1 << 16;

/// The longest shard may be longer than necessary by this part.
const LIMIT_SLACK_DIVISOR: u64 = 16;

/// Assignment of every entry to one shard.
#[derive(Debug)]
pub struct ShardPlan {
    /// All entries, ascending.
    order: Vec<Ino>,
    /// Start of each shard in `order`, and the end.
    cuts: Vec<usize>,
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

impl ShardPlan {
    /// Cuts a complete `index` into `count` shards, at least one. Some are empty if there are too few entries.
    pub fn new(index: &Index, count: u32) -> Self {
        let count = count.clamp(1, MAX_SHARDS);
        let mut end = 0_u64;
        let ends = index.entries().map(|entry| {
            end = end.saturating_add(tar_bytes(&entry));
            end
        });
        let cuts = cut(&Lengths(ends.collect()), count);
        let mut plan = Self {
            order: index.entries().map(|entry| entry.ino()).collect(),
            cuts,
            shards: Vec::with_capacity(count as usize),
        };
        let seek_points = SeekPoints::new(index);
        for number in 1..=count {
            let shard = plan.measure(index, &seek_points, number);
            plan.shards.push(shard);
        }
        plan
    }

    fn measure(&self, index: &Index, seek_points: &SeekPoints, number: u32) -> Shard {
        let inos = self.entries(number);
        let mut shard = Shard {
            number,
            entries: inos.len() as u64,
            ..Shard::default()
        };
        let entries = inos.iter().filter_map(|ino| index.entry(*ino));
        for (entry, (start, end)) in entries.filter_map(|entry| Some((entry, content(entry)?))) {
            if shard.bytes == 0 {
                shard.packed_start = seek_points.around(start).0.1;
            }
            shard.packed_end = shard.packed_end.max(seek_points.packed_at(end));
            shard.bytes = shard.bytes.saturating_add(entry.stored_bytes());
        }
        shard
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
        let position = self.order.binary_search(&ino).ok()?;
        let number = self.cuts.partition_point(|&cut| cut <= position);
        u32::try_from(number).ok()
    }

    fn range(&self, number: u32) -> Range<usize> {
        let cut = |number: usize| self.cuts.get(number).copied().unwrap_or(self.order.len());
        let number = number as usize;
        cut(number.saturating_sub(1))..cut(number)
    }
}

/// Bytes of an entry in a tar archive: a header, and whole records of content.
fn tar_bytes(entry: &Entry<'_>) -> u64 {
    let records = entry.stored_bytes().div_ceil(RECORD);
    records.saturating_add(1).saturating_mul(RECORD)
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
}

/// `value * factor / divisor`, at most `factor`.
fn scale(value: u64, factor: u64, divisor: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(factor) / u128::from(divisor.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX).min(factor)
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

/// Ends of all entries, one after the other.
struct Lengths(Vec<u64>);

impl Lengths {
    fn start(&self, entry: usize) -> u64 {
        let before = entry.checked_sub(1).and_then(|before| self.0.get(before));
        before.copied().unwrap_or_default()
    }

    fn count(&self) -> usize {
        self.0.len()
    }

    /// Number of the first entry that ends behind `limit`.
    fn first_behind(&self, limit: u64) -> usize {
        self.0.partition_point(|&end| end <= limit)
    }

    /// The longest run of entries from `from` on that has at most `limit` bytes; its end.
    fn longest(&self, from: usize, limit: u64) -> usize {
        let limit = self.start(from).saturating_add(limit);
        self.first_behind(limit).max(from)
    }

    /// Whether `count` runs of at most `limit` bytes are enough.
    fn is_enough(&self, count: u32, limit: u64) -> bool {
        let mut from = 0;
        for _ in 0..count {
            from = self.longest(from, limit);
            if from == self.count() {
                return true;
            }
        }
        false
    }

    /// End of a run from `from` on that has an equal share if `left` runs take the rest: the nearest one. An entry that is
    /// longer than the share belongs to the run in which it begins.
    fn fair_end(&self, from: usize, left: u32) -> usize {
        let start = self.start(from);
        let share = self.start(self.count()).saturating_sub(start) / u64::from(left.max(1));
        let target = start.saturating_add(share);
        let end = self.first_behind(target);
        let (before, beyond) = (self.start(end), self.start(end + 1));
        let is_nearer = beyond.saturating_sub(target) < target.saturating_sub(before);
        let is_long = beyond.saturating_sub(before) > share;
        end + usize::from(end < self.count() && (is_nearer || is_long))
    }
}

/// Starts of `count` runs of entries, and the end.
fn cut(lengths: &Lengths, count: u32) -> Vec<usize> {
    let all = lengths.count();
    let (mut low, mut limit) = (0, lengths.start(all));
    while low < limit {
        let middle = low + (limit - low) / 2;
        if lengths.is_enough(count, middle) {
            limit = middle;
        } else {
            low = middle + 1;
        }
    }
    // Otherwise small entries before a huge one would have a run of their own.
    limit = limit.saturating_add(limit / LIMIT_SLACK_DIVISOR);
    // The lowest starts of the last runs, from the back.
    let mut starts = vec![all];
    for _ in 1..count {
        let to = starts.last().copied().unwrap_or_default();
        let lowest = lengths.start(to).saturating_sub(limit);
        let before = lengths.0.partition_point(|&end| end < lowest);
        starts.push((before + usize::from(lowest > 0)).min(to));
    }
    let mut cuts = vec![0];
    for left in (1..=count).rev() {
        let from = cuts.last().copied().unwrap_or_default();
        let lowest = starts.get(left as usize - 1).copied().unwrap_or_default();
        let lowest = lowest.max(from);
        let highest = lengths.longest(from, limit).max(lowest);
        cuts.push(lengths.fair_end(from, left).clamp(lowest, highest));
    }
    cuts
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

    // Promises: shard-entries
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
    fn shards_have_equal_shares() {
        let plan = |files, count| ShardPlan::new(&files, count);
        // The root is in the first shard.
        let equal = plan(index(&files(50, 100), 5), 3);
        assert_eq!(counts(&equal), [17, 17, 17]);
        let starts = equal.shards().iter().map(|shard| shard.packed_start);
        assert_eq!(starts.collect::<Vec<_>>(), [0, 500, 1500]);
        let scattered = plan(index(&files(4, 100), 5), 8);
        assert_eq!(counts(&scattered).iter().max(), Some(&1));
    }

    // Promises: shard-cost, shard-plan
    #[test]
    fn cost_exceeds_the_share_by_at_most_a_file_and_a_seek_distance() {
        // As many plain bytes in spans as the files have in a tar archive.
        for (len, count) in [(300, 7), (300, 64), (7000, 2), (1100, 64)] {
            let whole = len + 512 + 511;
            let index = index(&files(400, len), 400 * whole / SPAN);
            let plan = ShardPlan::new(&index, count);
            let packed = index.origin().packed_bytes;
            let most = packed / u64::from(count) + whole / 2 + SPAN / 2;
            for shard in plan.shards() {
                let cost = shard.packed_end - shard.packed_start;
                assert!(cost <= most, "{len} {count}: {shard:?}");
            }
        }
    }

    // Promises: shard-cuts
    #[test]
    fn cuts_do_not_depend_on_the_form_of_the_index() {
        let mut members = files(300, 700);
        members.splice(3..3, [directory("d", 0o755), symlink("f00007", "x")]);
        members.extend([
            file("d", 300_000..300_100),
            file("f00001", 300_100..307_000),
        ]);
        members.push(hard_link("f00002", "f00003"));
        // A table of contents may give other places in another stream, without any seek point.
        let mut end = 0;
        let elsewhere = members.iter().map(|member| {
            let start = end;
            end += member.payload.len();
            Member {
                payload: Extent::with_len(Plain(start), member.payload.len()),
                ..member.clone()
            }
        });
        let elsewhere: Vec<_> = elsewhere.collect();
        let mut growing = Builder::new(Options {
            keeps_replaced: true,
            ..Options::default()
        });
        for member in &members {
            growing.add_member(member).expect("placed");
        }
        let growing = growing.finish(Origin::default());
        assert!(
            growing.entry(Ino(5)).is_some(),
            "it keeps what was replaced"
        );
        for count in [1, 2, 7, 64] {
            let cuts = |index: &Index| {
                let plan = ShardPlan::new(index, count);
                let entries = (1..=count).map(|number| plan.entries(number).to_vec());
                entries.collect::<Vec<_>>()
            };
            let expected = cuts(&index(&members, 310));
            assert_eq!(cuts(&growing), expected);
            assert_eq!(cuts(&index(&elsewhere, 0)), expected);
        }
    }

    // Promises: shard-cost
    #[test]
    fn huge_file_leaves_equal_shards_to_the_others() {
        let mut members = vec![file("huge", 0..100_000)];
        let small = |n: u64| file(&format!("f{n}"), 100_000 + n * 100..100_100 + n * 100);
        members.extend((0..50).map(small));
        let plan = ShardPlan::new(&index(&members, 105), 6);
        assert_eq!(counts(&plan), [2, 10, 10, 10, 10, 10]);
    }

    #[test]
    fn file_longer_than_a_share_does_not_lengthen_the_shard_before() {
        let mut members = files(47, 100);
        members.push(file("huge", 4700..104_700));
        members.extend((0..3).map(|n| file(&format!("g{n}"), 104_700 + n..104_701 + n)));
        let plan = ShardPlan::new(&index(&members, 105), 2);
        assert_eq!(counts(&plan), [48, 4]);
        let costs = plan.shards().iter();
        let costs = costs.map(|shard| (shard.packed_start, shard.packed_end));
        assert_eq!(costs.collect::<Vec<_>>(), [(0, 2350), (2000, 52351)]);
    }

    // Promises: shard-cost
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
        let all: Vec<_> = (1..=7).flat_map(|n| plan.entries(n).to_vec()).collect();
        assert_eq!(all, (1..=102).map(Ino).collect::<Vec<_>>());
    }

    #[test]
    fn empty_archive_has_only_its_root() {
        let plan = ShardPlan::new(&index(&[], 0), 3);
        assert_eq!(counts(&plan).iter().sum::<u64>(), 1);
        assert_eq!(plan.shard_of(Ino(7)), None);
    }
}
