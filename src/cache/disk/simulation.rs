//! Simulation of the order in which spans are written and evicted, against LRU and FIFO: a model of the disk cache, whose
//! write queue has room for all spans.
//! The traces are what programs read in a root file system of Debian, a tar archive of 1,012 MiB, as recorded by
//! `tarfs mount --record`, in spans of 1 MiB.

#![expect(clippy::print_stdout, reason = "docs/performance.md has these figures")]

use std::collections::BTreeSet;

use bytes::Bytes;

use super::cache_dir::eviction_rank;
use super::sparse_extent::SparseExtent;
use super::valued_extents::ValuedExtents;
use super::write_queue::{PendingWrite, State};
use crate::base::extent::{Extent, Plain};

const SPANS: u32 = 1012;

/// `python3 -c "import json, asyncio, email, http.client, sqlite3"`.
const PYTHON: &[(u32, u32)] = &[
    (717, 717),
    (551, 551),
    (0, 0),
    (603, 605),
    (734, 741),
    (610, 611),
    (642, 642),
    (594, 594),
    (523, 524),
    (650, 650),
    (139, 139),
    (699, 699),
    (692, 692),
    (669, 670),
    (684, 684),
    (695, 695),
    (693, 693),
    (697, 697),
    (690, 691),
    (694, 694),
    (671, 671),
    (673, 673),
    (681, 681),
    (696, 696),
    (689, 689),
    (602, 602),
    (632, 634),
    (636, 636),
    (635, 635),
    (1, 1),
    (680, 680),
    (688, 688),
    (687, 687),
    (679, 679),
    (686, 686),
    (595, 597),
];

/// `perl -MPOSIX -e 1; ls -l /etc; dpkg --list`.
const PERL: &[(u32, u32)] = &[
    (717, 717),
    (551, 551),
    (0, 0),
    (603, 605),
    (708, 712),
    (610, 611),
    (594, 595),
    (523, 523),
    (650, 650),
    (524, 524),
    (732, 732),
    (577, 577),
    (538, 539),
    (1, 1),
    (139, 139),
    (700, 700),
    (667, 667),
    (720, 720),
    (953, 953),
];

/// `find / -name '*.py' -exec cat {} +`.
const FIND: &[(u32, u32)] = &[
    (717, 717),
    (551, 551),
    (0, 0),
    (603, 605),
    (776, 777),
    (577, 577),
    (610, 611),
    (538, 539),
    (524, 524),
    (650, 650),
    (523, 523),
    (732, 732),
    (1, 1),
    (78, 78),
    (141, 141),
    (416, 422),
    (424, 429),
    (431, 434),
    (438, 442),
    (445, 447),
    (449, 453),
    (455, 455),
    (463, 463),
    (471, 476),
    (478, 518),
    (520, 522),
    (669, 673),
    (677, 687),
    (690, 690),
    (696, 700),
];

/// `tar --create`.
const WHOLE: &[(u32, u32)] = &[(0, SPANS - 1)];

fn spans(trace: &'static [(u32, u32)]) -> impl Iterator<Item = u32> + Clone {
    trace.iter().flat_map(|&(first, last)| first..=last)
}

fn extent(span: u32) -> Extent<Plain> {
    Extent::with_len(Plain(u64::from(span) << 20), 1 << 20)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Policy {
    Fifo,
    Lru,
    /// The policy of the disk cache.
    Value,
}

/// An archive with seek points: one for so many spans, each of which takes so many milliseconds.
#[derive(Clone, Copy, Debug)]
struct Packed {
    spans_of_seek_point: u32,
    milliseconds: u64,
}

const LZ4: Packed = Packed {
    spans_of_seek_point: 1,
    milliseconds: 6,
};
const GZIP: Packed = Packed {
    spans_of_seek_point: 1,
    milliseconds: 8,
};
/// Blocks of 24 MiB, as `xz -T0` makes them.
const XZ: Packed = Packed {
    spans_of_seek_point: 24,
    milliseconds: 28,
};
const BZIP2: Packed = Packed {
    spans_of_seek_point: 1,
    milliseconds: 43,
};

impl Packed {
    fn spans_to_decode(self, span: u32) -> u32 {
        span % self.spans_of_seek_point + 1
    }

    fn work(self, span: u32) -> u64 {
        u64::from(self.spans_to_decode(span)) * self.milliseconds
    }

    fn mean_cost(self) -> u64 {
        u64::from(self.spans_of_seek_point / 2 + 1) * self.milliseconds
    }
}

#[derive(Debug)]
struct CachedArchive {
    packed: Packed,
    valued: ValuedExtents,
    held: BTreeSet<u32>,
    used: u128,
}

/// A disk that archives share. The last two that were read are in use.
#[derive(Debug)]
struct SimulatedDisk {
    policy: Policy,
    max_spans: usize,
    archives: Vec<CachedArchive>,
    in_use: [usize; 2],
    now: u128,
    work: u64,
}

impl SimulatedDisk {
    fn read(&mut self, number: usize, span: u32) {
        self.now += 1;
        if self.in_use[0] != number {
            self.in_use = [number, self.in_use[0]];
        }
        let packed = self.archives[number].packed;
        let is_held = self.archives[number].held.contains(&span);
        if !is_held {
            self.work += packed.work(span);
            while self
                .archives
                .iter()
                .map(|archive| archive.held.len())
                .sum::<usize>()
                >= self.max_spans
            {
                self.evict(number);
            }
        }
        let archive = &mut self.archives[number];
        archive.used = self.now;
        archive.held.insert(span);
        match self.policy {
            Policy::Fifo if is_held => {}
            // Without costs the last use decides.
            Policy::Fifo | Policy::Lru => archive.valued.add(extent(span), 0, 1),
            Policy::Value => archive
                .valued
                .add(extent(span), packed.spans_to_decode(span), 1),
        }
    }

    fn evict(&mut self, reading: usize) {
        let cost = |archive: &CachedArchive| {
            if self.policy == Policy::Value {
                archive.packed.mean_cost()
            } else {
                1
            }
        };
        let filled = |&number: &usize| !self.archives[number].held.is_empty();
        let unused = (0..self.archives.len())
            .filter(filled)
            .filter(|number| !self.in_use.contains(number));
        let oldest = unused.max_by_key(|&number| {
            let archive = &self.archives[number];
            eviction_rank(self.now - archive.used, cost(archive))
        });
        let own = self.archives[reading].held.len();
        let others = self.in_use.iter().copied().filter(|&number| {
            number != reading && own < self.max_spans / 2 && self.archives[number].held.len() > own
        });
        if let Some(other) = oldest.or_else(|| others.into_iter().next()) {
            let archive = &mut self.archives[other];
            let first = archive.held.pop_first().expect("filled");
            archive.valued.remove(extent(first));
            return;
        }
        let archive = &mut self.archives[reading];
        let cheapest = archive.valued.pop_least_valuable().expect("full");
        archive
            .held
            .remove(&u32::try_from(cheapest.start().0 >> 20).expect("small"));
    }
}

/// Milliseconds of decoding what the disk has lost, for reads of these archives, on a disk for so much of a hundred of what is read.
fn work_of_reads(policy: Policy, reads: &[(usize, &'static [(u32, u32)])], percent: usize) -> u64 {
    let all: BTreeSet<_> = reads
        .iter()
        .flat_map(|&(archive, trace)| spans(trace).map(move |span| (archive, span)))
        .collect();
    let archive = |packed| CachedArchive {
        packed,
        valued: ValuedExtents::default(),
        held: BTreeSet::new(),
        used: 0,
    };
    let mut disk = SimulatedDisk {
        policy,
        max_spans: all.len() * percent / 100,
        archives: [LZ4, GZIP, XZ, BZIP2].map(archive).into(),
        in_use: [0, 1],
        now: 0,
        work: 0,
    };
    for &(number, trace) in reads {
        for span in spans(trace) {
            disk.read(number, span);
        }
    }
    let first: u64 = all
        .iter()
        .map(|&(number, span)| disk.archives[number].packed.work(span))
        .sum();
    disk.work - first
}

/// Numbers that look random, always the same.
fn numbers(count: usize) -> impl Iterator<Item = usize> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).expect("small")
    })
    .take(count)
}

#[test]
fn eviction_by_value_never_costs_more_than_lru_and_fifo() {
    let starts = numbers(80).map(|n| (n % 4, if n / 4 % 2 == 0 { PYTHON } else { PERL }));
    let jobs = numbers(60).map(|n| (n % 4, [PYTHON, PERL, FIND][n / 4 % 3]));
    let mixed = numbers(60).enumerate().map(|(step, n)| match step % 8 {
        7 => (0, WHOLE),
        _ => (1 + n % 3, [PYTHON, PERL, FIND][n / 4 % 3]),
    });
    let traces: [(&str, Vec<_>); 3] = [
        ("starts of programs", starts.collect()),
        ("starts and searches", jobs.collect()),
        ("starts, searches and whole reads", mixed.collect()),
    ];
    for (name, reads) in traces {
        for percent in [25, 50, 75] {
            let [value, lru, fifo] = [Policy::Value, Policy::Lru, Policy::Fifo]
                .map(|policy| work_of_reads(policy, &reads, percent));
            println!("{name}, {percent} %: {value} ms, LRU {lru} ms, FIFO {fifo} ms");
            assert!(
                value <= lru.min(fifo),
                "{name}, {percent} %: {value}, {lru}, {fifo}"
            );
        }
    }
}

/// The span of those that wait that is written next. `read_last` are the spans that were read, the last one at the end.
fn next_to_write(policy: Policy, waiting: &mut State, read_last: &[u32]) -> u32 {
    let place = |span: &u32| {
        let mut waiting = waiting.waiting.iter();
        waiting.position(|item| item.sparse.extent() == extent(*span))
    };
    let place = match policy {
        Policy::Fifo => Some(0),
        Policy::Lru => Some(read_last.iter().rev().find_map(place).unwrap_or(0)),
        Policy::Value => None,
    };
    let item = match place {
        Some(place) => waiting.waiting.remove(place),
        None => waiting.take_most_valuable(),
    };
    let start = item.expect("not all is written").sparse.extent().start();
    u32::try_from(start.0 >> 20).expect("small")
}

/// Milliseconds of decoding for the next start of a program, if it is killed while a scan is being written: the mean of
/// all moments. A scan gives ten spans in the time that the disk writes one, and the program reads one.
fn work_after_kill(policy: Policy, packed: Packed, program: &'static [(u32, u32)]) -> u64 {
    let mut waiting = State::default();
    let mut read_last = Vec::new();
    let mut written = BTreeSet::new();
    let mut reads = spans(program).cycle();
    let (mut scanned, mut work, mut moments) = (0, 0, 0);
    while written.len() < SPANS as usize {
        for span in scanned..SPANS.min(scanned + 10) {
            let sparse = SparseExtent::from(extent(span));
            let sparse = sparse.with_cost(packed.spans_to_decode(span));
            waiting
                .waiting
                .push_back(PendingWrite::new(sparse, Bytes::new()));
        }
        scanned = SPANS.min(scanned + 10);
        let read = reads.next().expect("endless");
        waiting.count_read(extent(read));
        if read < scanned {
            read_last.retain(|&span| span != read);
            read_last.push(read);
        }
        written.insert(next_to_write(policy, &mut waiting, &read_last));
        let lost = spans(program).filter(|span| !written.contains(span));
        work += lost.map(|span| packed.work(span)).sum::<u64>();
        moments += 1;
    }
    work / moments
}

#[test]
fn writes_by_value_leave_less_to_decode_after_a_kill_than_fifo() {
    for (name, program) in [("python", PYTHON), ("perl", PERL), ("find", FIND)] {
        for packed in [GZIP, XZ] {
            let [value, lru, fifo] = [Policy::Value, Policy::Lru, Policy::Fifo]
                .map(|policy| work_after_kill(policy, packed, program));
            println!("{name}, {packed:?}: {value} ms, LRU {lru} ms, FIFO {fifo} ms");
            // The last read shows as well what is worth most.
            assert!(value * 20 <= lru * 21, "{name}, {packed:?}: {value}, {lru}");
            assert!(
                value * 10 <= fifo * 7,
                "{name}, {packed:?}: {value}, {fifo}"
            );
        }
    }
}
