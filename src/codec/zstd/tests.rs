//! Tests of the decoder of zstd.

use super::super::start;
use super::super::test_support::{
    Outcome, assert_bit_flips_are_detected, assert_decodes, assert_truncation_is_detected, context,
    decode, drive, noise, text,
};
use super::*;
use crate::base::memory_reclaim::MemoryBroker;
use ::zstd::stream::raw::CParameter;
use proptest::prelude::*;
use std::io::Write;

/// A frame with a checksum, and with its content size if wanted.
fn frame(plain: &[u8], content_len: bool) -> Vec<u8> {
    let mut encoder = ::zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    if content_len {
        let len = plain.len() as u64;
        encoder.set_pledged_src_size(Some(len)).unwrap();
    }
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn skippable(len: u32) -> Vec<u8> {
    let mut frame = 0x184d_2a5e_u32.to_le_bytes().to_vec();
    frame.extend(len.to_le_bytes());
    frame.extend(noise(len as usize));
    frame
}

#[test]
fn job_of_empty_frames_is_limited_to_a_number_of_frames() {
    let packed = frame(b"", true).repeat(3 * MAX_PARTS_PER_JOB);
    let outcome = decode(Compression::Zstd, &packed, packed.len());
    assert_eq!(outcome.end, Ok(()));
    assert_eq!((outcome.plain.len(), outcome.jobs), (0, 3));
}

fn cause(outcome: Outcome) -> Cause {
    outcome.end.unwrap_err().cause
}

/// A frame that refers back as far as its window of 2 MiB lets it, all the way through.
fn far_referring_frame() -> (Vec<u8>, Vec<u8>) {
    let plain = noise(3 << 19).repeat(10);
    let mut encoder = ::zstd::Encoder::new(Vec::new(), 3).unwrap();
    encoder.set_parameter(CParameter::WindowLog(21)).unwrap();
    encoder.long_distance_matching(true).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(&plain).unwrap();
    let packed = encoder.finish().unwrap();
    assert!(packed.len() < 3 << 20, "nothing refers back");
    (plain, packed)
}

#[test]
fn window_reaches_into_the_previous_region() {
    let (plain, packed) = far_referring_frame();
    for push_len in [100_000, packed.len()] {
        let outcome = decode(Compression::Zstd, &packed, push_len);
        outcome.end.unwrap();
        assert!(outcome.plain == plain, "pushed by {push_len}");
    }
}

#[test]
fn window_too_large_for_the_pool_uses_libzstd_streaming() {
    let (plain, packed) = far_referring_frame();
    let pool = BufferPool::new(4 << 20);
    let context = Context {
        pool: pool.clone(),
        ..context()
    };
    let outcome = drive(start(Compression::Zstd, context), &packed, packed.len(), 0);
    outcome.end.unwrap();
    assert!(outcome.plain == plain);
    assert!(pool.peak_bytes() <= 4 << 20);
}

#[test]
fn bytes_outlive_their_decoder() {
    let (plain, packed) = far_referring_frame();
    let mut decoder = start(Compression::Zstd, context());
    decoder.push(packed.into());
    decoder.finish();
    let mut pieces = Vec::new();
    loop {
        match decoder.pull().unwrap() {
            Pull::Plain(piece) => pieces.push(piece),
            Pull::End => break,
            _ => {}
        }
    }
    drop(decoder);
    assert!(pieces.concat() == plain);
}

// Promises: seek-points
#[test]
fn short_frames_are_joined_to_jobs() {
    let plain = text(6 << 20);
    for content_len in [false, true] {
        let frames = plain.chunks(100_000).map(|plain| frame(plain, content_len));
        let packed = frames.collect::<Vec<_>>().concat();
        let seek_points = assert_decodes(Compression::Zstd, &packed, &plain);
        // Without a content size, 100,000 bytes are taken for a full block of 128 KiB.
        let count = if content_len { 6 } else { 8 };
        assert_eq!(seek_points.len(), count);
        let jobs = decode(Compression::Zstd, &packed, packed.len()).jobs;
        assert_eq!(jobs, count);
    }
}

// Promises: seek-points
#[test]
fn long_frame_decodes_serially_with_one_seek_point() {
    let plain = text(20 << 20);
    for content_len in [false, true] {
        let packed = frame(&plain, content_len);
        assert_eq!(assert_decodes(Compression::Zstd, &packed, &plain).len(), 1);
        assert_eq!(decode(Compression::Zstd, &packed, 1 << 20).jobs, 0);
    }
}

#[test]
fn long_frame_checksum_is_computed_by_the_driver() {
    let plain = text(9 << 20);
    let mut packed = [frame(&plain, false), frame(&plain, true)].concat();
    let last = packed.len() - 1;
    packed[last] ^= 1;
    let outcome = decode(Compression::Zstd, &packed, 100_000);
    assert!(outcome.plain == plain.repeat(2));
    let error = outcome.end.unwrap_err();
    assert_eq!(error.packed, Packed(packed.len() as u64 - 4));
    assert!(matches!(error.cause, Cause::Checksum { .. }), "{error}");
}

#[test]
fn concatenated_frames_of_every_kind_decode() {
    let parts = [
        text(100),
        text(9 << 20),
        Vec::new(),
        noise(3 << 20),
        vec![0; 30 << 20],
    ];
    let packed = [
        skippable(4),
        frame(&parts[0], true),
        frame(&parts[1], false),
        frame(&parts[2], true),
        skippable(0),
        frame(&parts[3], false),
        frame(&parts[4], true),
        skippable(200_000),
    ];
    assert_decodes(Compression::Zstd, &packed.concat(), &parts.concat());
}

#[test]
fn truncation_anywhere_is_detected() {
    let plain = [text(3000), noise(1000)].concat();
    for content_len in [false, true] {
        let packed = frame(&plain, content_len);
        assert_truncation_is_detected(Compression::Zstd, &packed, &plain, &[]);
    }
}

#[test]
fn truncated_frame_gives_its_whole_blocks() {
    let plain = noise(1 << 20);
    let packed = frame(&plain, true);
    let outcome = decode(Compression::Zstd, &packed[..packed.len() / 2], 10_000);
    assert!(outcome.plain.len() > 300_000);
    assert!(plain.starts_with(&outcome.plain));
    assert_eq!(cause(outcome), Cause::Truncated);
}

#[test]
fn damage_anywhere_is_detected() {
    let plain = [text(1000), noise(300)].concat();
    assert_bit_flips_are_detected(Compression::Zstd, &frame(&plain, true), &plain);
    assert_bit_flips_are_detected(Compression::Zstd, &frame(&plain, false), &plain);
}

#[test]
fn window_over_the_memory_limit_fails_with_needed_bytes() {
    let plain = text(20 << 20);
    let mut encoder = ::zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.set_parameter(CParameter::WindowLog(24)).unwrap();
    encoder.write_all(&plain).unwrap();
    let packed = encoder.finish().unwrap();
    let with_limit = |limit_bytes| {
        let context = Context {
            // Too small for regions that hold the window.
            pool: BufferPool::new(32 << 20),
            broker: MemoryBroker::with_limit(limit_bytes),
            ..context()
        };
        drive(Box::new(Decoder::start(context)), &packed, 1 << 20, 0)
    };
    assert_eq!(
        cause(with_limit((16 << 20) - 1)),
        Cause::MemoryLimit {
            needed_bytes: 16 << 20,
            limit_bytes: (16 << 20) - 1,
            sufficient_memory: None
        }
    );
    assert!(with_limit(16 << 20).plain == plain);
}

#[test]
fn garbage_after_the_last_frame_fails_after_all_bytes() {
    let plain = text(10_000);
    let mut packed = frame(&plain, true);
    packed.extend([0; 512]);
    let outcome = decode(Compression::Zstd, &packed, 1000);
    assert!(outcome.plain == plain);
    assert!(matches!(cause(outcome), Cause::Malformed(_)));
}

#[test]
fn foreign_seek_points_are_rejected() {
    let packed = frame(&text(1000), true);
    let point = decode(Compression::Zstd, &packed, 1000)
        .seek_points
        .remove(0);
    for (state, bit) in [(1, 0), (0, 1)] {
        let foreign = SeekPoint {
            bit,
            state,
            ..point.clone()
        };
        assert!(Decoder::resume(context(), &foreign).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_after_a_magic_do_not_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        push_len in 1..50_usize,
    ) {
        let packed = [&MAGIC.to_le_bytes(), &bytes[..]].concat();
        let outcome = decode(Compression::Zstd, &packed, push_len);
        prop_assert!(outcome.end.is_err() || bytes.len() > 4);
    }

    #[test]
    fn push_size_does_not_change_the_output(
        content_len: bool,
        lens in proptest::collection::vec(0..5000_usize, 1..8),
        push_len in 1..3000_usize,
    ) {
        let parts = lens.into_iter().map(text).collect::<Vec<_>>();
        let packed = parts.iter().map(|plain| frame(plain, content_len));
        let packed = packed.collect::<Vec<_>>().concat();
        let outcome = decode(Compression::Zstd, &packed, push_len);
        prop_assert_eq!(outcome.end, Ok(()));
        prop_assert!(outcome.plain == parts.concat());
    }
}
