//! Tests of the decoder of bzip2.

use super::super::test_support::{
    Outcome, assert_bit_flips_are_detected, assert_decodes, assert_truncation_is_detected, context,
    decode, decode_from, noise, text,
};
use super::*;
use proptest::prelude::*;
use std::io::Write;

fn stream(plain: &[u8], level: u32) -> Vec<u8> {
    let level = ::bzip2::Compression::new(level);
    let mut encoder = ::bzip2::write::BzEncoder::new(Vec::new(), level);
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn cause(outcome: Outcome) -> Cause {
    outcome.end.unwrap_err().cause
}

// Promises: seek-points
#[test]
fn blocks_become_jobs_and_seek_points() {
    let plain = [text(2_000_000), noise(1_500_000)].concat();
    for (level, count) in [(1, 4), (9, 2)] {
        let packed = stream(&plain, level);
        let seek_points = assert_decodes(Compression::Bzip2, &packed, &plain);
        assert!(seek_points.len() >= count, "{}", seek_points.len());
        assert!(decode(Compression::Bzip2, &packed, 1 << 20).jobs >= 4);
    }
}

/// Runs of 255 equal bytes (45.9 MB), which pack to more than an eighth of their block length.
fn runs(count: usize) -> Vec<u8> {
    let values = noise(count).into_iter();
    values.flat_map(|value| vec![value; 255]).collect()
}

#[test]
fn block_of_long_runs_is_decoded_piece_by_piece() {
    for plain in [vec![7; 100 << 20], runs(540_000)] {
        let packed = stream(&plain, 9);
        let outcome = decode(Compression::Bzip2, &packed, 1000);
        assert_eq!(outcome.end, Ok(()));
        assert!(outcome.jobs >= 3, "{}", outcome.jobs);
        assert!(outcome.plain == plain);
        assert!(outcome.seek_points.len() >= 2);
    }
}

// Promises: decode-memory
#[test]
fn job_of_long_runs_keeps_within_its_reserved_memory() {
    let packed = stream(&runs(540_000), 9);
    let pool = BufferPool::new(16 << 20);
    let context = Context {
        pool: pool.clone(),
        ..context()
    };
    let mut decoder = super::super::start(Compression::Bzip2, context);
    decoder.push(Bytes::from(packed));
    let job = loop {
        if let Pull::Job(job) = decoder.pull().expect("not damaged") {
            break job;
        }
    };
    let (before, mut plain_len) = (pool.used_bytes(), 0);
    let mut output = job.run().expect("not damaged");
    assert!(pool.used_bytes() <= before);
    while let Some(piece) = output.next_piece().expect("not damaged") {
        assert!(piece.len() <= 2 * 900_000, "{}", piece.len());
        assert!(pool.used_bytes() <= before);
        plain_len += piece.len();
    }
    assert!(plain_len > 40 << 20, "{plain_len}");
}

// Promises: unmount-quick
#[test]
fn closing_the_pool_ends_a_wait_for_memory_of_a_long_block() {
    let packed = stream(&runs(540_000), 9);
    let pool = BufferPool::new(8 << 20);
    let context = Context {
        pool: pool.clone(),
        ..context()
    };
    let mut decoder = super::super::start(Compression::Bzip2, context);
    decoder.push(Bytes::from(packed));
    std::thread::scope(|scope| {
        let held = loop {
            if let Pull::Job(job) = decoder.pull().expect("not damaged") {
                break job;
            }
        };
        // There is no room for a second one.
        let waiter = scope.spawn(move || {
            loop {
                if let Err(error) = decoder.pull() {
                    return error.cause;
                }
            }
        });
        pool.close();
        assert_eq!(waiter.join().expect("no panic"), Cause::Cancelled);
        drop(held);
    });
}

#[test]
fn block_longer_than_its_buffer_decodes() {
    let mut plain = Vec::new();
    for part in noise(1_000_000).chunks(2500) {
        plain.extend(part);
        plain.extend(vec![0; 20_000]);
    }
    let packed = stream(&plain, 9);
    assert_decodes(Compression::Bzip2, &packed, &plain);
    assert!(decode(Compression::Bzip2, &packed, packed.len()).jobs > 0);
}

#[test]
fn concatenated_streams_decode() {
    let parts = [text(1_000_000), Vec::new(), text(10), noise(700_000)];
    let packed = parts.iter().zip([1, 9, 5, 9]);
    let packed = packed.map(|(plain, level)| stream(plain, level));
    let packed = packed.collect::<Vec<_>>().concat();
    assert_decodes(Compression::Bzip2, &packed, &parts.concat());
}

#[test]
fn garbage_after_the_last_stream_is_a_warning() {
    let plain = text(10_000);
    for garbage in [&b"g"[..], b"garbage", &[0; 600]] {
        let packed = [&stream(&plain, 9), garbage].concat();
        let outcome = decode(Compression::Bzip2, &packed, 100);
        assert_eq!(outcome.end, Ok(()));
        assert!(outcome.plain == plain);
        assert_eq!(outcome.warnings.len(), 1);
    }
}

#[test]
fn truncation_anywhere_is_detected() {
    let plain = text(300);
    assert_truncation_is_detected(Compression::Bzip2, &stream(&plain, 9), &plain, &[]);
}

#[test]
fn damage_anywhere_is_detected() {
    let plain = [text(300), noise(30)].concat();
    assert_bit_flips_are_detected(Compression::Bzip2, &stream(&plain, 1), &plain);
}

// Promises: decode-verified
#[test]
fn wrong_stream_checksum_is_named_in_the_error() {
    let plain = text(1000);
    let one = stream(&plain, 9);
    let mut packed = [one.clone(), one.clone()].concat();
    // The checksum is within the last eleven bytes, at some bit.
    packed[one.len() - 3] ^= 0x10;
    let outcome = decode(Compression::Bzip2, &packed, 1000);
    assert!(outcome.plain == plain);
    assert!(matches!(
        cause(outcome),
        Cause::Checksum { what: "stream", .. }
    ));
}

#[test]
fn magic_inside_a_block_does_not_split_it() {
    let packed = stream(&noise(50_000), 9);
    let end = packed.len() * 8;
    let pieces = |bytes: &[u8]| {
        let mut input = InputQueue::default();
        input.push(Bytes::copy_from_slice(bytes));
        input
    };
    // A header follows a true magic, but not the same bits elsewhere.
    let input = pieces(&packed[4..]);
    let found = FoundMagic {
        bit: 0,
        is_stream_end: false,
    };
    assert_eq!(check_block_start(found, &input, 9), Some(true));
    let found = FoundMagic {
        bit: 80_000,
        is_stream_end: false,
    };
    assert_eq!(check_block_start(found, &input, 9), Some(false));
    assert!(end > 80_000 + BLOCK_HEADER_LEN * 8 / 2);
    let false_end = FoundMagic {
        bit: 80_000,
        is_stream_end: true,
    };
    assert_eq!(check_stream_end(false_end, &input, Some(1)), Some(false));
}

#[test]
fn foreign_seek_points_are_rejected_or_fail() {
    let packed = stream(&text(1000), 9);
    let point = decode(Compression::Bzip2, &packed, 1000)
        .seek_points
        .remove(0);
    for (state, bit) in [(0, 0), (10, 0), (9, 8), (265, 0)] {
        let foreign = SeekPoint {
            bit,
            state,
            ..point.clone()
        };
        assert!(Decoder::resume(context(), &foreign).is_err());
    }
    let moved = SeekPoint { bit: 3, ..point };
    assert!(
        decode_from(Compression::Bzip2, &packed, 9, &moved)
            .end
            .is_err()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_bytes_after_a_magic_do_not_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        push_len in 1..50_usize,
    ) {
        let start = [0x42, 0x5a, 0x68, 0x39, 0x31, 0x41, 0x59, 0x26, 0x53, 0x59];
        let packed = [&start[..], &bytes].concat();
        prop_assert!(decode(Compression::Bzip2, &packed, push_len).end.is_err());
    }

    #[test]
    fn push_size_does_not_change_the_output(
        lens in proptest::collection::vec(0..200_000_usize, 1..4),
        push_len in 1..30_000_usize,
    ) {
        let parts = lens.into_iter().map(text).collect::<Vec<_>>();
        let packed = parts.iter().map(|plain| stream(plain, 1));
        let packed = packed.collect::<Vec<_>>().concat();
        let outcome = decode(Compression::Bzip2, &packed, push_len);
        prop_assert_eq!(outcome.end, Ok(()));
        prop_assert!(outcome.plain == parts.concat());
    }
}
