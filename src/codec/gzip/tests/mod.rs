//! Tests of the decoder of gzip.

mod bgzf;

use std::collections::HashSet;
use std::io::Write;

use flate2::{Compress, Compression as Level, FlushCompress, GzBuilder};
use proptest::prelude::*;

use super::*;
use crate::base::memory_reclaim::MemoryBroker;
use crate::codec::job::MAX_PARTS_PER_JOB;
use crate::codec::test_support::noise;
use crate::codec::{self, Decoder as _};

fn context(seek_points: bool) -> Context {
    Context {
        pool: BufferPool::new(64 << 20),
        wants_seek_points: seek_points,
        broker: MemoryBroker::with_limit(0),
        workers: 0,
    }
}

pub(super) fn member(plain: &[u8], level: u32) -> Vec<u8> {
    let mut writer = GzBuilder::new().write(Vec::new(), Level::new(level));
    writer.write_all(plain).expect("a vector takes all");
    writer.finish().expect("a vector takes all")
}

/// A member with such a flush after every `every` bytes.
pub(super) fn flushed_by(flush: FlushCompress, plain: &[u8], every: usize) -> Vec<u8> {
    let mut packed = member(b"", 6)[..10].to_vec();
    let mut compress = Compress::new(Level::new(6), false);
    let mut put = |part: &[u8], flush| {
        packed.reserve(part.len() + 10_000);
        let put = compress.compress_vec(part, &mut packed, flush);
        put.expect("there is room");
    };
    plain.chunks(every).for_each(|part| put(part, flush));
    put(b"", FlushCompress::Finish);
    packed.extend(&member(plain, 0)[member(plain, 0).len() - 8..]);
    packed
}

/// Words in no order: packs to about a third, in many blocks.
pub(super) fn text(len: usize, mut seed: u64) -> Vec<u8> {
    let mut text = Vec::with_capacity(len + 16);
    while text.len() < len {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        text.extend_from_slice(format!("{:x} file ", seed >> 44).as_bytes());
    }
    text.truncate(len);
    text
}

#[derive(Default, Debug)]
struct Run {
    plain: Vec<u8>,
    seek_points: Vec<SeekPoint>,
    warnings: Vec<String>,
    end: Option<Error>,
}

fn run(mut decoder: Decoder, packed: &[u8], step: usize) -> Run {
    let packed = Bytes::copy_from_slice(packed);
    let mut pushed = 0;
    let mut run = Run::default();
    let start = decoder.plain.0;
    loop {
        match decoder.pull() {
            Ok(Pull::NeedInput) if pushed == packed.len() => decoder.finish(),
            Ok(Pull::NeedInput) => {
                let end = packed.len().min(pushed.saturating_add(step));
                decoder.push(packed.slice(pushed..end));
                pushed = end;
            }
            Ok(Pull::SeekPoint(seek_point)) => {
                assert_eq!(seek_point.plain.0, start + run.plain.len() as u64);
                run.seek_points.push(seek_point);
            }
            Ok(Pull::Plain(bytes)) => {
                assert!(!bytes.is_empty());
                run.plain.extend_from_slice(&bytes);
            }
            Ok(Pull::Speculative(ahead)) => ahead.run(),
            Ok(Pull::WaitFor(ahead)) => ahead.wait(),
            Ok(Pull::Job(job) | Pull::OrderedJob(job)) => {
                match job.run().and_then(codec::Output::concat) {
                    Ok(bytes) => run.plain.extend_from_slice(&bytes),
                    Err(error) => {
                        run.end = Some(error);
                        return run;
                    }
                }
            }
            Ok(Pull::Warning(text)) => run.warnings.push(text),
            Ok(Pull::ChecksumStart(_) | Pull::ChecksumEnd { .. }) => {
                panic!("gzip checks itself")
            }
            Ok(Pull::End) => return run,
            Err(error) => {
                let again = decoder.pull().err();
                assert_eq!(again.as_ref(), Some(&error), "errors are fused");
                run.end = Some(error);
                return run;
            }
        }
    }
}

fn whole(packed: &[u8], step: usize) -> Run {
    run(Decoder::start(context(true)), packed, step)
}

/// Resumes at every seek point of `first` and compares the rest.
fn resumes_everywhere(packed: &[u8], first: &Run, step: usize) {
    for seek_point in &first.seek_points {
        let decoder = Decoder::resume(context(true), seek_point).expect("its own");
        let offset = usize::try_from(seek_point.packed.0).expect("small");
        let rest = run(decoder, &packed[offset..], step);
        assert_eq!(rest.end, None, "{seek_point:?}");
        let offset = usize::try_from(seek_point.plain.0).expect("small");
        assert!(
            rest.plain == first.plain[offset..],
            "{:?}",
            seek_point.plain
        );
    }
}

// Promises: seek-points
#[test]
fn long_members_get_checkpoints_that_can_be_resumed() {
    let plain = text(26 << 20, 1);
    let packed = member(&plain, 6);
    let first = whole(&packed, 1 << 20);
    assert!(first.plain == plain);
    resumes_everywhere(&packed, &first, 777_777);

    let seek_points = &first.seek_points;
    assert!(seek_points.len() >= 6, "{}", seek_points.len());
    let windows = seek_points.iter().map(|seek_point| seek_point.window.len());
    assert!(windows.sum::<usize>() * 100 <= packed.len());
    let bits: HashSet<u8> = seek_points
        .iter()
        .map(|seek_point| seek_point.bit)
        .collect();
    assert!(bits.len() >= 3, "{bits:?}");
}

#[test]
fn every_compression_level_decodes() {
    for level in [1, 9] {
        let plain = text(5 << 20, level.into());
        let packed = member(&plain, level);
        let first = whole(&packed, 1 << 20);
        assert!(first.plain == plain);
        resumes_everywhere(&packed, &first, 777_777);
    }
}

// Promises: seek-points
#[test]
fn full_flushes_become_seek_points_without_windows() {
    let plain = text(12 << 20, 1);
    let packed = flushed_by(FlushCompress::Full, &plain, 128 << 10);
    // In pieces, some flushes arrive without the bytes that show that they are full.
    for step in [usize::MAX, 100_000] {
        let first = whole(&packed, step);
        assert!(first.plain == plain);
        let seek_points = &first.seek_points;
        assert!(seek_points.len() >= 9, "{}", seek_points.len());
        assert!(seek_points.iter().all(|point| point.window.is_empty()));
        resumes_everywhere(&packed, &first, 777_777);
    }
}

/// More than a mebibyte with a flush at its end, and 30,000 bytes with a reference `distance` bytes back behind them.
fn referring(distance: u32) -> (Vec<u8>, Vec<u8>) {
    let mut plain = text(1_200_000, 1);
    let mut packed = flushed_by(FlushCompress::Sync, &plain, plain.len());
    // Without the empty last block and the trailer.
    packed.truncate(packed.len() - 2 - 8);
    let literals = noise(30_000).into_iter().map(|byte| byte % 144);
    let literals: Vec<u8> = literals.collect();
    let mut bits = vec![1, 1, 0];
    let mut put = |value: u32, len: u32| bits.extend((0..len).rev().map(|bit| value >> bit & 1));
    for &byte in &literals {
        put(0x30 + u32::from(byte), 8);
    }
    // Three bytes, the last code of a distance with its 13 bits, and the end.
    put(1, 7);
    put(29, 5);
    (0..13).for_each(|bit| put((distance - 24_577) >> bit & 1, 1));
    put(0, 7);
    for byte in bits.chunks(8) {
        let byte = byte.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
        packed.push(u8::try_from(byte).expect("eight bits"));
    }
    plain.extend(literals);
    let from = plain.len() - distance as usize;
    plain.extend_from_within(from..from + 3);
    packed.extend(&member(&plain, 0)[member(&plain, 0).len() - 8..]);
    (packed, plain)
}

// Promises: seek-points
#[test]
fn flush_that_is_referred_across_is_no_seek_point() {
    for (distance, count) in [(30_000, 2), (30_001, 1), (32_768, 1)] {
        let (packed, plain) = referring(distance);
        let first = whole(&packed, usize::MAX);
        assert_eq!((&first.end, first.plain == plain), (&None, true));
        assert_eq!(first.seek_points.len(), count, "{distance}");
        resumes_everywhere(&packed, &first, 777_777);
    }
    // Each flush but the first is referred across.
    let plain = text(12 << 20, 1);
    let packed = flushed_by(FlushCompress::Sync, &plain, 128 << 10);
    let first = whole(&packed, 1 << 20);
    let (_, others) = first.seek_points.split_first().expect("the member");
    assert!(!others.is_empty());
    assert!(others.iter().all(|point| !point.window.is_empty()));
}

#[test]
fn stored_blocks_get_byte_aligned_checkpoints() {
    let plain = text(9 << 20, 1);
    let packed = member(&plain, 0);
    let first = whole(&packed, 100_000);
    assert!(first.plain == plain);
    assert_eq!(first.seek_points.len(), 3);
    resumes_everywhere(&packed, &first, usize::MAX);
}

// Promises: seek-points
#[test]
fn small_members_share_buffers_and_seek_points() {
    let plain = text(3 << 20, 1);
    let packed: Vec<u8> = plain
        .chunks(50_000)
        .flat_map(|part| member(part, 6))
        .collect();
    let mut decoder = Decoder::start(context(true));
    decoder.push(Bytes::copy_from_slice(&packed));
    let (mut pieces, mut seek_points) = (0, Vec::new());
    loop {
        match decoder.pull().expect("a good stream") {
            Pull::Plain(_) => pieces += 1,
            Pull::SeekPoint(seek_point) => seek_points.push(seek_point),
            _ => break,
        }
    }
    assert!(pieces <= 6, "{pieces}");
    assert_eq!(seek_points.len(), 3);
    assert!(
        seek_points
            .iter()
            .all(|seek_point| seek_point.window.is_empty())
    );
    let first = whole(&packed, 4096);
    assert!(first.plain == plain);
    resumes_everywhere(&packed, &first, 4096);
}

#[test]
fn decoder_does_not_wait_for_a_buffer_while_it_holds_output() {
    let plain = text(3 << 20, 1);
    let packed = [member(&plain[..100_000], 6), bgzf(&plain[100_000..])].concat();
    let context = Context {
        pool: BufferPool::new(1 << 20),
        ..context(true)
    };
    assert!(run(Decoder::start(context), &packed, usize::MAX).plain == plain);
}

#[test]
fn empty_members_and_headers_with_all_fields_decode() {
    let mut packed = member(b"", 6);
    let builder = GzBuilder::new()
        .filename("name")
        .comment("comment")
        .extra("extra");
    let mut writer = builder.write(&mut packed, Level::new(9));
    writer.write_all(b"hello ").expect("a vector takes all");
    writer.finish().expect("a vector takes all");
    packed.extend(member(b"", 0));
    packed.extend(member(b"world", 0));
    for step in 1..packed.len() {
        let run = whole(&packed, step);
        assert_eq!((run.plain.as_slice(), run.end), (&b"hello world"[..], None));
    }
}

#[test]
fn no_seek_points_are_made_when_disabled() {
    let plain = text(9 << 20, 1);
    let run = run(Decoder::start(context(false)), &member(&plain, 6), 1 << 20);
    assert!(run.plain == plain);
    assert!(run.seek_points.is_empty());
}

#[test]
fn pushed_input_is_decoded_before_more_is_requested() {
    let packed = member(&text(100_000, 1), 6);
    let half = packed.len() / 2;
    let mut decoder = Decoder::start(context(true));
    decoder.push(Bytes::copy_from_slice(&packed[..half]));
    let mut plain = 0;
    loop {
        match decoder.pull().expect("a good stream") {
            Pull::Plain(bytes) => plain += bytes.len(),
            Pull::NeedInput => break,
            _ => {}
        }
    }
    assert!(plain > 40_000, "{plain}");
}

#[test]
fn stream_truncated_anywhere_gives_the_bytes_before() {
    let plain = text(3000, 1);
    let mut packed = member(&plain[..1000], 6);
    let first_len = packed.len();
    packed.extend(member(&plain[1000..], 9));
    for len in 0..packed.len() {
        let run = whole(&packed[..len], 100);
        assert!(plain.starts_with(&run.plain));
        match run.end {
            None => assert!(len == first_len || len == first_len + 1, "{len}"),
            Some(error) => {
                assert_eq!(
                    (error.cause, error.packed.0),
                    (Cause::Truncated, len as u64)
                );
            }
        }
    }
}

#[test]
fn bit_flip_is_an_error_and_no_panic() {
    let plain = text(600, 1);
    let packed = member(&plain, 6);
    for bit in 0..packed.len() * 8 {
        let mut packed = packed.clone();
        packed[bit / 8] ^= 1 << (bit % 8);
        let run = whole(&packed, 50);
        match run.end {
            // Time, extra flags, operating system, and the bits before the trailer mean nothing here.
            None => {
                assert!(bit / 8 < 10 || bit / 8 == packed.len() - 9, "bit {bit}");
                assert!(run.plain == plain);
            }
            Some(error) => assert!(error.packed.0 <= packed.len() as u64),
        }
    }
}

#[test]
fn trailing_zeros_are_ignored_and_trailing_garbage_warns() {
    let packed = member(b"hello", 6);
    for (tail, warnings) in [
        (&[0; 1000][..], 0),
        (b"\0\0x", 1),
        (b"x", 1),
        (b"\x1f", 1),
        (b"\x1fx", 1),
    ] {
        let packed = [&packed, tail].concat();
        for step in [1, 2, 5, 2000] {
            let run = whole(&packed, step);
            assert_eq!((run.plain.as_slice(), run.end), (&b"hello"[..], None));
            assert_eq!(run.warnings.len(), warnings, "{tail:?}");
        }
    }
}

// Promises: check-first-scan, decode-verified
#[test]
fn wrong_crc_and_wrong_length_are_distinguished() {
    let packed = member(b"hello", 6);
    let what = |back: usize| {
        let mut packed = packed.clone();
        let offset = packed.len() - back;
        packed[offset] ^= 1;
        match whole(&packed, 7).end.map(|error| error.cause) {
            Some(Cause::Checksum { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(what(8), "CRC-32 of a gzip member");
    assert_eq!(what(1), "length of a gzip member");
}

// Promises: resume-checksums
#[test]
fn member_after_a_resumed_member_is_verified() {
    let mut packed = member(&text(9 << 20, 1), 6);
    let first_len = packed.len();
    packed.extend(member(b"hello", 6));
    let seek_point = whole(&packed, 1 << 20).seek_points.pop().expect("some");
    assert_eq!(seek_point.state, STATE_BLOCK);
    let offset = usize::try_from(seek_point.packed.0).expect("small");
    let resumed = |packed: &[u8]| {
        let decoder = Decoder::resume(context(true), &seek_point).expect("its own");
        run(decoder, &packed[offset..], 1 << 16).end
    };
    assert_eq!(resumed(&packed), None);
    packed[first_len - 8] ^= 1;
    assert_eq!(resumed(&packed), None, "its beginning was not seen");
    let len = packed.len();
    packed[len - 8] ^= 1;
    assert!(matches!(
        resumed(&packed),
        Some(Error {
            cause: Cause::Checksum { .. },
            ..
        })
    ));
}

#[test]
fn foreign_seek_points_are_rejected() {
    let seek_point = |state, bit, window: &'static [u8]| SeekPoint {
        packed: Packed(10),
        bit,
        plain: Plain(10),
        state,
        window: Bytes::from_static(window),
    };
    for seek_point in [
        seek_point(2, 0, b""),
        seek_point(STATE_MEMBER, 1, b""),
        seek_point(STATE_MEMBER, 0, b"window"),
        seek_point(STATE_BLOCK, 8, b""),
        seek_point(STATE_BLOCK, 0, b"no zstd frame"),
    ] {
        let error = Decoder::resume(context(true), &seek_point).err();
        assert!(matches!(
            error,
            Some(Error {
                cause: Cause::Malformed(_),
                ..
            })
        ));
    }
}

#[test]
fn decoder_that_needs_input_holds_no_buffer() {
    let pool = BufferPool::new(10);
    let mut header = pool.acquire(10).expect("open");
    header.copy_from_slice(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0]);
    let context = Context {
        pool: BufferPool::new(u64::MAX),
        wants_seek_points: false,
        broker: MemoryBroker::with_limit(0),
        workers: 0,
    };
    let mut decoder = Decoder::start(context);
    decoder.push(header.freeze());
    while !matches!(decoder.pull(), Ok(Pull::NeedInput)) {}
    assert_eq!(pool.used_bytes(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn members_decode_at_every_push_size(
        parts in prop::collection::vec((0_usize..200_000, 0_u32..10, any::<u64>()), 0..6),
        step in 1_usize..300_000,
    ) {
        let parts: Vec<_> = parts
            .into_iter()
            .map(|(len, level, seed)| (text(len, seed), level))
            .collect();
        let packed: Vec<u8> =
            parts.iter().flat_map(|(part, level)| member(part, *level)).collect();
        let plain: Vec<u8> = parts.iter().flat_map(|(part, _)| part.clone()).collect();
        let run = whole(&packed, step);
        prop_assert_eq!(run.end.is_some(), parts.is_empty());
        prop_assert!(run.plain == plain);
    }

    #[test]
    fn noise_after_a_header_is_an_error(noise in prop::collection::vec(any::<u8>(), 0..500)) {
        let packed = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0][..], &noise].concat();
        let run = whole(&packed, 64);
        prop_assert!(run.end.is_some(), "noise has the right checksum");
    }
}

/// As bgzip writes it, with members of 65,280 plain bytes and an empty one at the end.
fn bgzf(plain: &[u8]) -> Vec<u8> {
    let parts = plain.chunks(65_280).chain([&b""[..]]);
    parts.flat_map(bgzf_member).collect()
}

fn bgzf_member(plain: &[u8]) -> Vec<u8> {
    let builder = GzBuilder::new().extra(*b"BC\x02\0\0\0");
    let mut writer = builder.write(Vec::new(), Level::new(6));
    writer.write_all(plain).expect("a vector takes all");
    let mut packed = writer.finish().expect("a vector takes all");
    let len = u16::try_from(packed.len() - 1).expect("short");
    packed[16..18].copy_from_slice(&len.to_le_bytes());
    packed
}
