//! Tests of the decoder of xz.

use super::super::test_support::{
    Outcome, assert_bit_flips_are_detected, assert_decodes, assert_truncation_is_detected, context,
    decode, decode_from, drive, noise, text,
};
use liblzma::stream::{Action, Status, Stream};

use super::header::{put_integer, take_integer};
use super::index::mismatch;
use super::*;
use crate::base::buffer_pool::BufferPool;
use crate::base::memory_reclaim::MemoryBroker;
use liblzma::stream::{Check as Kind, Filters, LzmaOptions};
use proptest::prelude::*;

fn encode(mut encoder: Stream, plain: &[u8]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(plain.len() + (1 << 16));
    loop {
        let read = usize::try_from(encoder.total_in()).unwrap();
        let status = encoder.process_vec(&plain[read..], &mut packed, Action::Finish);
        if status.unwrap() == Status::StreamEnd {
            return packed;
        }
        packed.reserve(1 << 16);
    }
}

/// One block without sizes in its header.
fn one_block(plain: &[u8], kind: Kind) -> Vec<u8> {
    encode(Stream::new_easy_encoder(0, kind).unwrap(), plain)
}

fn index_at(packed: &[u8]) -> usize {
    let words = packed[packed.len() - 8..].first_chunk().copied();
    let words = u32::from_le_bytes(words.unwrap()) as usize;
    packed.len() - STREAM_HEADER_LEN - 4 * (words + 1)
}

/// Blocks with sizes in their headers, made from streams of one block without.
fn blocks(plain: &[u8], block_len: usize, kind: Kind) -> Vec<u8> {
    let check = Check::new(u8::try_from(kind as u32).unwrap()).unwrap();
    let mut packed = check.stream_header();
    let mut index = vec![0];
    put_integer(&mut index, plain.len().div_ceil(block_len) as u64);
    for plain in plain.chunks(block_len) {
        let stream = one_block(plain, kind);
        let (block, mut record) = stream.split_at(index_at(&stream));
        let block = &block[STREAM_HEADER_LEN..];
        let header_len = block_header_len(block[0]);
        record = &record[2..];
        let unpadded_len = take_integer(&mut record).unwrap();
        let data_len = unpadded_len - (header_len + check.len()) as u64;
        let mut header = vec![0, 0xc0];
        put_integer(&mut header, data_len);
        put_integer(&mut header, plain.len() as u64);
        header.extend(&block[2..5]);
        header.resize(header.len().next_multiple_of(4), 0);
        header[0] = u8::try_from(header.len() / 4).unwrap();
        header.extend(header::crc32(&header).to_le_bytes());
        put_integer(&mut index, data_len + (header.len() + check.len()) as u64);
        put_integer(&mut index, plain.len() as u64);
        packed.extend(header);
        packed.extend(&block[header_len..]);
    }
    index.resize(index.len().next_multiple_of(4), 0);
    index.extend(header::crc32(&index).to_le_bytes());
    let index_len = index.len() as u64;
    [packed, index, check.stream_footer(index_len)].concat()
}

fn cause(outcome: Outcome) -> Cause {
    outcome.end.unwrap_err().cause
}

// Promises: seek-points
#[test]
fn blocks_with_sizes_become_jobs() {
    let plain = text(5_000_000);
    for kind in [Kind::None, Kind::Crc32, Kind::Crc64, Kind::Sha256] {
        let packed = blocks(&plain, 1 << 20, kind);
        let seek_points = assert_decodes(Compression::Xz, &packed, &plain);
        assert_eq!(seek_points.len(), 5);
        assert_eq!(decode(Compression::Xz, &packed, 1 << 20).jobs, 5);
    }
}

#[test]
fn blocks_too_long_for_the_pool_decode_serially() {
    let plain = text(5_000_000);
    let packed = blocks(&plain, 2 << 20, Kind::Crc64);
    let context = || Context {
        pool: BufferPool::new(4 << 20),
        ..context()
    };
    let outcome = drive(Box::new(Decoder::start(context())), &packed, 100_000, 0);
    assert_eq!((outcome.jobs, outcome.end), (0, Ok(())));
    assert!(outcome.plain == plain);
    assert_eq!(outcome.seek_points.len(), 3);
    for point in outcome.seek_points {
        let at = usize::try_from(point.packed.0).unwrap();
        let decoder = Box::new(Decoder::resume(context(), &point).unwrap());
        let rest = drive(decoder, &packed[at..], 100_000, point.plain.0);
        assert_eq!(rest.end, Ok(()));
        assert!(rest.plain == plain[usize::try_from(point.plain.0).unwrap()..]);
    }
}

// Promises: seek-points
#[test]
fn one_block_has_one_seek_point() {
    let plain = [text(3 << 20), noise(1 << 20), vec![0; 9 << 20]].concat();
    for kind in [Kind::None, Kind::Crc32, Kind::Crc64, Kind::Sha256] {
        let packed = one_block(&plain, kind);
        assert_eq!(assert_decodes(Compression::Xz, &packed, &plain).len(), 1);
    }
}

#[test]
fn concatenated_streams_with_padding_decode() {
    let parts = [text(100_000), Vec::new(), text(3 << 20), noise(500)];
    let packed = [
        one_block(&parts[0], Kind::Sha256),
        vec![0; 8],
        one_block(&parts[1], Kind::None),
        blocks(&parts[2], 1 << 18, Kind::Crc32),
        vec![0; 400_000],
        one_block(&parts[3], Kind::Crc64),
        vec![0; 4],
    ];
    assert_decodes(Compression::Xz, &packed.concat(), &parts.concat());
}

#[test]
fn other_filters_decode() {
    let plain = text(300_000);
    let options = LzmaOptions::new_preset(0).unwrap();
    let mut filters = Filters::new();
    filters.delta_properties(&[3]).unwrap();
    filters.x86().lzma2(&options);
    let encoder = Stream::new_stream_encoder(&filters, Kind::Crc32).unwrap();
    assert_decodes(Compression::Xz, &encode(encoder, &plain), &plain);
}

#[test]
fn truncation_anywhere_is_detected() {
    let plain = [text(3000), noise(1000)].concat();
    let packed = one_block(&plain, Kind::Crc64);
    assert_truncation_is_detected(Compression::Xz, &packed, &plain, &[]);
    let packed = blocks(&plain, 1500, Kind::Crc32);
    assert_truncation_is_detected(Compression::Xz, &packed, &plain, &[]);
}

#[test]
fn truncated_block_gives_its_whole_chunks() {
    let plain = noise(1 << 20);
    let packed = blocks(&plain, 1 << 20, Kind::Crc64);
    let outcome = decode(Compression::Xz, &packed[..packed.len() / 2], 10_000);
    assert!(outcome.plain.len() > 300_000);
    assert!(plain.starts_with(&outcome.plain));
    assert_eq!(cause(outcome), Cause::Truncated);
}

#[test]
fn damage_anywhere_is_detected() {
    let plain = [text(1000), noise(300)].concat();
    assert_bit_flips_are_detected(Compression::Xz, &one_block(&plain, Kind::Crc32), &plain);
    assert_bit_flips_are_detected(Compression::Xz, &blocks(&plain, 500, Kind::Sha256), &plain);
}

// Promises: decode-verified
#[test]
fn index_that_differs_from_the_blocks_is_detected() {
    let plain = text(3000);
    let packed = blocks(&plain, 1000, Kind::Crc32);
    let other = blocks(&text(2900), 1000, Kind::Crc32);
    let mixed = [&packed[..index_at(&packed)], &other[index_at(&other)..]];
    let outcome = decode(Compression::Xz, &mixed.concat(), 1000);
    assert!(outcome.plain == plain);
    assert_eq!(cause(outcome), mismatch());
}

// Promises: memory-needed
#[test]
fn dictionary_over_the_memory_limit_fails_with_needed_bytes() {
    let packed = one_block(&text(1000), Kind::None);
    let context = Context {
        broker: MemoryBroker::with_limit(100_000),
        ..context()
    };
    let outcome = drive(Box::new(Decoder::start(context)), &packed, 1000, 0);
    assert_eq!(
        cause(outcome),
        Cause::MemoryLimit {
            needed_bytes: 256 << 10,
            limit_bytes: 100_000,
            sufficient_memory: None
        }
    );
}

#[test]
fn data_after_the_last_stream_must_be_padding_of_whole_words() {
    let plain = text(1000);
    let packed = one_block(&plain, Kind::Crc32);
    for (rest, wanted) in [(&b"garbage"[..], false), (&[0; 6], false), (&[0; 8], true)] {
        let outcome = decode(Compression::Xz, &[&packed, rest].concat(), 100);
        assert!(outcome.plain == plain);
        assert_eq!(outcome.end.is_ok(), wanted);
    }
}

#[test]
fn foreign_seek_points_are_rejected_or_fail() {
    let packed = one_block(&text(1000), Kind::Crc32);
    let point = decode(Compression::Xz, &packed, 1000).seek_points.remove(0);
    for (state, bit) in [(2, 0), (1, 1), (257, 0)] {
        let foreign = SeekPoint {
            bit,
            state,
            ..point.clone()
        };
        assert!(Decoder::resume(context(), &foreign).is_err());
    }
    let other = SeekPoint { state: 4, ..point };
    assert!(
        decode_from(Compression::Xz, &packed, 9, &other)
            .end
            .is_err()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn push_size_does_not_change_the_output(
        lens in proptest::collection::vec(0..5000_usize, 1..5),
        push_len in 1..3000_usize,
    ) {
        let parts = lens.into_iter().map(text).collect::<Vec<_>>();
        let packed = parts.iter().enumerate().map(|(number, plain)| match number % 2 {
            0 => one_block(plain, Kind::Crc64),
            _ => blocks(plain, 1000, Kind::Crc32),
        });
        let packed = packed.collect::<Vec<_>>().concat();
        let outcome = decode(Compression::Xz, &packed, push_len);
        prop_assert_eq!(outcome.end, Ok(()));
        prop_assert!(outcome.plain == parts.concat());
    }
}
