//! Tests that speculative decoding gives the same result as serial decoding.

use std::io::Write;

use bytes::Bytes;
use flate2::{Compression as Level, FlushCompress, GzBuilder};
use proptest::prelude::*;

use super::Decoder;
use super::speculation_queue::SpeculationLimits;
use super::tests::{flushed_by, member, text};
use crate::base::buffer_pool::BufferPool;
use crate::base::memory_reclaim::MemoryBroker;
use crate::base::thread::Thread;
use crate::codec::test_support::noise;
use crate::codec::{Cause, Context, Decoder as _, Error, Job, Output, Pull, SeekPoint};

/// Partitions so short that little data has many joins.
const SMALL: SpeculationLimits = SpeculationLimits {
    partitions: 3,
    partition_len: 20_000,
    overlap: 40_000,
    buffers: 6,
    buffer_len: 64 << 10,
};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Workers {
    Immediate,
    None,
    /// In two of three cases.
    Some,
    Threads,
}

#[derive(Default, Debug)]
struct Run {
    plain: Vec<u8>,
    seek_points: Vec<SeekPoint>,
    warnings: Vec<String>,
    end: Option<Error>,
    partitions: usize,
    max_partitions_in_a_row: usize,
    /// Pieces of speculative outputs that were accepted.
    jobs: usize,
    /// Still to be run.
    late: Vec<Job>,
}

impl Run {
    /// Runs the late jobs, the last first; whether all went well.
    fn catch_up(&mut self) -> bool {
        let late = std::mem::take(&mut self.late).into_iter().rev();
        let mut pieces: Vec<_> = late.map(|job| job.run().and_then(Output::concat)).collect();
        while let Some(piece) = pieces.pop() {
            match piece {
                Ok(bytes) => self.plain.extend_from_slice(&bytes),
                Err(error) => {
                    self.end = Some(error);
                    return false;
                }
            }
        }
        true
    }
}

fn context(pool: &BufferPool) -> Context {
    Context {
        pool: pool.clone(),
        wants_seek_points: true,
        broker: MemoryBroker::with_limit(0),
        workers: 0,
    }
}

fn run(mut decoder: Decoder, packed: &[u8], step: usize, workers: Workers) -> Run {
    let mut pushes = packed.chunks(step);
    let mut run = Run::default();
    let mut threads = Vec::new();
    let start = decoder.plain.0;
    let mut partitions_in_a_row = 0;
    loop {
        let pull = decoder.pull();
        // As where other threads run them, jobs run later, and not in order.
        let waits = match &pull {
            Ok(Pull::Job(_)) => run.late.len() < 3,
            Ok(Pull::Speculative(_) | Pull::WaitFor(_)) => true,
            _ => false,
        };
        if !waits && !run.catch_up() {
            return run;
        }
        let is_ahead = matches!(pull, Ok(Pull::Speculative(_)));
        partitions_in_a_row = if is_ahead { partitions_in_a_row + 1 } else { 0 };
        run.max_partitions_in_a_row = run.max_partitions_in_a_row.max(partitions_in_a_row);
        match pull {
            Ok(Pull::NeedInput) => match pushes.next() {
                Some(bytes) => decoder.push(Bytes::copy_from_slice(bytes)),
                None => decoder.finish(),
            },
            Ok(Pull::SeekPoint(seek_point)) => {
                assert_eq!(seek_point.plain.0, start + run.plain.len() as u64);
                run.seek_points.push(seek_point);
            }
            Ok(Pull::Plain(bytes)) => {
                assert!(!bytes.is_empty());
                run.plain.extend_from_slice(&bytes);
            }
            Ok(Pull::Speculative(ahead)) => {
                run.partitions += 1;
                match workers {
                    Workers::Immediate => ahead.run(),
                    Workers::Some if run.partitions % 3 > 0 => ahead.run(),
                    Workers::Threads => {
                        threads.push(Thread::spawn("test", move || ahead.run()).expect("a thread"));
                    }
                    _ => {}
                }
            }
            Ok(Pull::WaitFor(ahead)) => ahead.wait(),
            Ok(Pull::Job(job)) => {
                run.jobs += 1;
                run.late.push(job);
            }
            Ok(Pull::OrderedJob(job)) => {
                run.late.push(job);
                if !run.catch_up() {
                    return run;
                }
            }
            Ok(Pull::Warning(text)) => run.warnings.push(text),
            Ok(Pull::ChecksumStart(_) | Pull::ChecksumEnd { .. }) => panic!("gzip checks itself"),
            Ok(Pull::End) => return run,
            Err(error) => {
                assert_eq!(
                    decoder.pull().err().as_ref(),
                    Some(&error),
                    "errors are fused"
                );
                run.end = Some(error);
                return run;
            }
        }
    }
}

fn serial(packed: &[u8], step: usize) -> Run {
    let decoder = Decoder::start(context(&BufferPool::new(64 << 20)));
    run(decoder, packed, step, Workers::None)
}

fn ahead_in(
    pool: &BufferPool,
    limits: SpeculationLimits,
    packed: &[u8],
    step: usize,
    workers: Workers,
) -> Run {
    let mut decoder = Decoder::start(context(pool));
    assert!(decoder.limits.is_none(), "there are no workers");
    decoder.limits = Some(limits);
    run(decoder, packed, step, workers)
}

fn ahead(limits: SpeculationLimits, packed: &[u8], step: usize, workers: Workers) -> Run {
    ahead_in(&BufferPool::new(64 << 20), limits, packed, step, workers)
}

/// Expects equal results, except the place of damage: zlib notices it depending on how its input is cut.
fn assert_same(ahead: &Run, serial: &Run) {
    assert!(ahead.plain == serial.plain);
    assert_eq!(ahead.warnings, serial.warnings);
    let cause = |run: &Run| run.end.as_ref().map(|error| error.cause.clone());
    assert_eq!(cause(ahead), cause(serial));
    if let (Some(ahead), Some(serial)) = (&ahead.end, &serial.end) {
        let distance = ahead.packed.0.abs_diff(serial.packed.0);
        let may_differ = ahead.cause != Cause::Truncated;
        assert!(
            distance <= if may_differ { 8 } else { 0 },
            "{ahead:?} {serial:?}"
        );
    }
}

fn resumes_everywhere(packed: &[u8], first: &Run) {
    for seek_point in &first.seek_points {
        let context = context(&BufferPool::new(64 << 20));
        let mut decoder = Decoder::resume(context, seek_point).expect("its own");
        decoder.limits = Some(SMALL);
        let offset = usize::try_from(seek_point.packed.0).expect("small");
        let rest = run(decoder, &packed[offset..], 77_777, Workers::Immediate);
        assert_eq!(rest.end, first.end);
        let offset = usize::try_from(seek_point.plain.0).expect("small");
        assert!(rest.plain == first.plain[offset..], "{offset}");
    }
}

/// A member as pigz makes them: its blocks end on a byte now and then.
fn flushed(plain: &[u8], every: usize) -> Vec<u8> {
    let mut writer = GzBuilder::new().write(Vec::new(), Level::new(6));
    for part in plain.chunks(every) {
        writer.write_all(part).expect("a vector takes all");
        writer.flush().expect("a vector takes all");
    }
    writer.finish().expect("a vector takes all")
}

/// A member of blocks that hold `every` literals each in the fixed code.
fn fixed(plain: &[u8], every: usize) -> Vec<u8> {
    let (mut bits, mut packed) = (Vec::new(), member(b"", 6)[..10].to_vec());
    let mut put = |value: u32, len: u32| bits.extend((0..len).rev().map(|bit| value >> bit & 1));
    let mut parts = plain.chunks(every).peekable();
    while let Some(part) = parts.next() {
        put(u32::from(parts.peek().is_none()), 1);
        put(0b10, 2);
        for &byte in part {
            match u32::from(byte) {
                byte @ 0..144 => put(0x30 + byte, 8),
                byte => put(0x190 + byte - 144, 9),
            }
        }
        put(0, 7);
    }
    for byte in bits.chunks(8) {
        let byte = byte.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
        packed.push(u8::try_from(byte).expect("eight bits"));
    }
    let whole = member(plain, 0);
    packed.extend_from_slice(&whole[whole.len() - 8..]);
    packed
}

fn mixture(len: usize) -> Vec<u8> {
    let mut plain = Vec::new();
    for turn in 0.. {
        match turn % 4 {
            0 => plain.extend(text(150_000, turn)),
            1 => plain.extend(noise(70_000)),
            2 => plain.extend(vec![7; 50_000]),
            // A stream within the stream, whose blocks are none of it.
            _ => plain.extend(member(&text(200_000, turn), 6)),
        }
        if plain.len() >= len {
            break;
        }
    }
    plain.truncate(len);
    plain
}

/// Repeats old data between new data, so that windows always matter.
fn echo(len: usize) -> Vec<u8> {
    let mut fresh = noise(2 * len);
    let said = fresh.split_off(fresh.len() - 16_000);
    let parts = fresh.chunks(10_000);
    let mut plain = parts
        .flat_map(|part| [&said, part].concat())
        .collect::<Vec<_>>();
    plain.truncate(len);
    plain
}

/// Streams of all kinds; and whether something decoded ahead must have been of use.
fn streams() -> Vec<(&'static str, bool, Vec<u8>)> {
    let plain = text(2_000_000, 1);
    vec![
        // This zlib's level 1 makes fixed blocks.
        ("level 1", false, member(&plain, 1)),
        ("level 2", true, member(&plain, 2)),
        ("level 6", true, member(&plain, 6)),
        ("level 9", true, member(&plain, 9)),
        ("mixture", true, member(&mixture(2_000_000), 6)),
        ("noise", true, member(&noise(500_000), 6)),
        ("echo", true, member(&echo(3_000_000), 6)),
        ("stored", true, member(&plain[..500_000], 0)),
        ("stored mixture", true, member(&mixture(700_000), 0)),
        ("flushed", true, flushed(&plain, 30_000)),
        ("flushed often", true, flushed(&plain[..500_000], 500)),
        ("fixed", false, fixed(&mixture(500_000), 3000)),
        ("zeros", false, member(&vec![0; 20_000_000], 6)),
        (
            "members",
            true,
            plain
                .chunks(700_000)
                .flat_map(|part| member(part, 6))
                .collect(),
        ),
        (
            "fixed and others",
            true,
            [
                fixed(&plain[..300_000], 3000),
                member(&plain, 6),
                vec![0; 99],
            ]
            .concat(),
        ),
        (
            "garbage behind",
            true,
            [member(&plain, 6), noise(100_000)].concat(),
        ),
    ]
}

#[test]
fn speculation_does_not_change_the_output_of_any_stream() {
    for (name, useful, packed) in streams() {
        let expected = serial(&packed, usize::MAX);
        assert_eq!(expected.end, None, "{name}");
        for step in [usize::MAX, 300_000, 4001] {
            for workers in [Workers::Immediate, Workers::Some, Workers::Threads] {
                let run = ahead(SMALL, &packed, step, workers);
                assert_same(&run, &expected);
                if workers == Workers::Immediate {
                    assert!(!useful || run.jobs > 3, "{name}: {}", run.jobs);
                }
            }
        }
        let run = ahead(SMALL, &packed, 50_000, Workers::None);
        assert_same(&run, &expected);
        assert_eq!(run.jobs, 0);
    }
}

#[test]
fn nearly_all_of_a_long_member_is_decoded_speculatively() {
    let limits = SpeculationLimits {
        partition_len: 150_000,
        buffers: 20,
        ..SMALL
    };
    let packed = member(&text(9_000_000, 1), 6);
    let run = ahead(limits, &packed, usize::MAX, Workers::Immediate);
    let partitions = packed.len() / limits.partition_len;
    assert!(
        run.partitions + 3 >= partitions && run.partitions <= partitions,
        "{} {partitions}",
        run.partitions
    );
    assert_eq!(run.max_partitions_in_a_row, limits.partitions);
    let ahead_len = run.jobs * limits.buffer_len;
    assert!(ahead_len > run.plain.len() * 8 / 10, "{ahead_len}");
}

/// With parts long enough for seek points in them.
const LONG_PARTS: SpeculationLimits = SpeculationLimits {
    partition_len: 1 << 20,
    overlap: 256 << 10,
    buffers: 10,
    buffer_len: 1 << 20,
    ..SMALL
};

#[test]
fn speculation_keeps_seek_point_spacing_and_validity() {
    for packed in [
        member(&text(40 << 20, 1), 6),
        flushed(&text(24 << 20, 2), 100_000),
    ] {
        let expected = serial(&packed, 1 << 20);
        let run = ahead(LONG_PARTS, &packed, 1 << 20, Workers::Immediate);
        assert_same(&run, &expected);
        assert!(run.jobs > 5, "{}", run.jobs);
        let (count, expected) = (run.seek_points.len(), expected.seek_points.len());
        assert!(
            count + 1 >= expected && count <= expected + 1,
            "{count} {expected}"
        );
        resumes_everywhere(&packed, &run);
    }
}

// Promises: seek-points
#[test]
fn speculation_finds_full_flushes() {
    let packed = flushed_by(FlushCompress::Full, &text(12 << 20, 3), 128 << 10);
    let run = ahead(LONG_PARTS, &packed, 1 << 20, Workers::Immediate);
    assert_same(&run, &serial(&packed, 1 << 20));
    assert!(run.jobs > 0);
    let seek_points = &run.seek_points;
    assert!(seek_points.len() >= 9, "{}", seek_points.len());
    assert!(seek_points.iter().all(|point| point.window.is_empty()));
    resumes_everywhere(&packed, &run);
}

#[test]
fn truncation_anywhere_gives_the_same_bytes_as_serial() {
    let packed = member(&mixture(900_000), 6);
    for len in (0..packed.len()).step_by(9_973) {
        let (cut, step) = (&packed[..len], 1 + len * 7 % 150_000);
        assert_same(
            &ahead(SMALL, cut, step, Workers::Immediate),
            &serial(cut, step),
        );
    }
}

#[test]
fn damage_anywhere_fails_at_the_same_place_as_serial() {
    let packed = [member(&text(1_000_000, 1), 6), member(&mixture(300_000), 6)].concat();
    for at in (0..packed.len()).step_by(8_111) {
        let mut packed = packed.clone();
        packed[at] ^= 1 << (at % 8);
        let expected = serial(&packed, usize::MAX);
        let run = ahead(SMALL, &packed, 90_000, Workers::Immediate);
        assert_same(&run, &expected);
    }
}

#[test]
fn wrong_trailer_is_reported_after_all_bytes() {
    let plain = text(1_000_000, 1);
    for back in [8, 1] {
        let mut packed = member(&plain, 6);
        let at = packed.len() - back;
        packed[at] ^= 1;
        let run = ahead(SMALL, &packed, 100_000, Workers::Immediate);
        assert!(run.jobs > 0 && run.plain == plain);
        assert_same(&run, &serial(&packed, usize::MAX));
        let cause = run.end.map(|error| error.cause);
        assert!(matches!(cause, Some(Cause::Checksum { .. })), "{cause:?}");
    }
}

#[test]
fn references_before_a_member_fail_with_speculation() {
    // A member's deflate stream with enough empty blocks for a partition instead of its first blocks.
    let whole = flushed(&text(1_000_000, 1), 400_000);
    let flush = whole
        .windows(4)
        .position(|bytes| bytes == [0, 0, 0xff, 0xff]);
    let rest = &whole[flush.expect("it was flushed") + 4..];
    let empty = [0, 0, 0, 0xff, 0xff].repeat(3 * SMALL.partition_len / 5);
    let packed = [&whole[..10], &empty, rest].concat();
    let expected = serial(&packed, usize::MAX);
    let cause = expected.end.as_ref().map(|error| &error.cause);
    assert!(matches!(cause, Some(Cause::Malformed(_))), "{cause:?}");
    let run = ahead(SMALL, &packed, 5000, Workers::Immediate);
    assert!(run.partitions > 0);
    assert_same(&run, &expected);
}

#[test]
fn speculation_stays_within_the_pool() {
    let bomb = member(&vec![0; 100_000_000], 6);
    let limits = SpeculationLimits {
        partition_len: 10_000,
        ..SMALL
    };
    for packed in [bomb, member(&text(3_000_000, 1), 6)] {
        // The rest is for those who wait; see `SpeculationLimits::new`.
        let pool =
            BufferPool::new(3 * (limits.partitions * limits.buffers * limits.buffer_len) as u64);
        let run = ahead_in(&pool, limits, &packed, 50_000, Workers::Threads);
        assert_eq!(run.end, None);
        assert!(run.partitions > 5, "{}", run.partitions);
        assert!(pool.peak_bytes() <= pool.budget());
        assert_eq!(pool.used_bytes(), 0);
    }
}

#[test]
fn speculation_is_off_without_spare_memory() {
    let packed = member(&text(1_000_000, 1), 6);
    let pool = BufferPool::new((SMALL.buffers * SMALL.buffer_len) as u64 - 1);
    let run = ahead_in(&pool, SMALL, &packed, 50_000, Workers::Immediate);
    assert_eq!(run.partitions, 0);
    assert_same(&run, &serial(&packed, usize::MAX));
}

#[test]
fn search_pauses_after_consecutive_misses() {
    let packed = fixed(&text(6_000_000, 1), 3000);
    let run = ahead(SMALL, &packed, usize::MAX, Workers::Immediate);
    assert_eq!((run.end, run.jobs), (None, 0));
    let partitions = packed.len() / SMALL.partition_len;
    assert!(
        run.partitions * 10 < partitions,
        "{} of {partitions}",
        run.partitions
    );
}

#[test]
fn small_members_after_a_long_one_are_not_speculated() {
    let long = member(&text(1_000_000, 1), 6);
    let small = flushed(&text(50_000, 1), 2000);
    assert!(small.len() < SMALL.partition_len, "{}", small.len());
    let small = small.repeat(60);
    let alone = ahead(SMALL, &long, 50_000, Workers::Immediate);
    let run = ahead(SMALL, &[long, small].concat(), 50_000, Workers::Immediate);
    assert_eq!(run.end, None);
    // Where the long one ends is not known before.
    assert!(
        run.partitions <= alone.partitions + SMALL.partitions,
        "{}",
        run.partitions
    );
}

#[test]
fn running_speculation_is_dropped_with_the_decoder() {
    let packed = member(&text(1_000_000, 1), 6);
    let pool = BufferPool::new(64 << 20);
    let mut decoder = Decoder::start(context(&pool));
    decoder.limits = Some(SMALL);
    let mut pushed = false;
    let ahead = loop {
        match decoder.pull().expect("a good stream") {
            Pull::NeedInput if !pushed => decoder.push(Bytes::copy_from_slice(&packed)),
            Pull::Speculative(ahead) => break ahead,
            _ => {}
        }
        pushed = true;
    };
    drop(decoder);
    assert_eq!(pool.used_bytes(), 0);
    ahead.run();
    ahead.wait();
}

#[test]
fn speculation_limits_depend_on_workers_and_memory() {
    let limits = |workers, memory: u64| {
        let pool = BufferPool::new(memory << 20);
        SpeculationLimits::new(&Context {
            workers,
            ..context(&pool)
        })
    };
    assert!(limits(3, 1024).is_none());
    assert!(limits(0, 1024).is_none());
    assert!(limits(4, 16).is_none());
    assert!(limits(64, 8).is_none());
    for (workers, memory, partitions) in [
        (4, 24, 3),
        (4, 64, 5),
        (8, 64, 8),
        (64, 64, 8),
        (16, 1024, 17),
    ] {
        let limits = limits(workers, memory).expect("enough of both");
        assert_eq!(limits.partitions, partitions);
        let bytes = limits.partitions * limits.buffers * limits.buffer_len;
        assert!(bytes as u64 <= (memory << 20) / 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn speculation_does_not_change_the_output_of_any_members(
        parts in prop::collection::vec((0_usize..600_000, 0_u32..10, 0..4_u64), 1..4),
        step in 1_usize..300_000,
        partition_len in 1_usize..60_000,
        overlap in 0_usize..60_000,
        buffers in 2_usize..7,
        flip in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let parts = parts.into_iter().map(|(len, level, kind)| match kind {
            0 => member(&mixture(len), level),
            1 => flushed(&text(len, 1), 20_000),
            _ => member(&text(len, 1), level),
        });
        let mut packed: Vec<u8> = parts.flatten().collect();
        if let Some(flip) = flip {
            let at = flip.index(packed.len() * 8);
            packed[at / 8] ^= 1 << (at % 8);
        }
        let limits = SpeculationLimits { partition_len, overlap, buffers, ..SMALL };
        assert_same(&ahead(limits, &packed, step, Workers::Some), &serial(&packed, step));
    }
}
