//! Tests of the decoder of lz4.

use super::super::test_support::{
    Outcome, assert_bit_flips_are_detected, assert_decodes, assert_truncation_is_detected, context,
    decode, decode_from, drive, noise, text,
};
use super::*;
use crate::base::buffer_pool::BufferPool;
use crate::codec::{self, READ_POOL_BYTES, read_pool_bytes};
use lz4_flex::block::{compress, compress_with_dict};
use proptest::prelude::*;
use xxhash_rust::xxh32::xxh32;

#[expect(
    clippy::struct_excessive_bools,
    reason = "they are the flags of the format"
)]
#[derive(Clone, Copy, Debug)]
struct Maker {
    linked: bool,
    block_checksums: bool,
    content_checksum: bool,
    content_len: bool,
    code: u8,
    block_len: usize,
}

const INDEPENDENT: Maker = Maker {
    linked: false,
    block_checksums: false,
    content_checksum: true,
    content_len: false,
    code: 4,
    block_len: 64 << 10,
};
const LINKED: Maker = Maker {
    linked: true,
    ..INDEPENDENT
};

impl Maker {
    fn header(self, content_len: usize) -> Vec<u8> {
        let bit = |set: bool, bit: u8| u8::from(set) << bit;
        let flags = 0x40
            | bit(!self.linked, 5)
            | bit(self.block_checksums, 4)
            | bit(self.content_len, 3)
            | bit(self.content_checksum, 2);
        let mut descriptor = vec![flags, self.code << 4];
        if self.content_len {
            descriptor.extend_from_slice(&(content_len as u64).to_le_bytes());
        }
        let hash = xxh32(&descriptor, 0).to_le_bytes()[1];
        let mut header = MAGIC.to_le_bytes().to_vec();
        header.extend(descriptor);
        header.push(hash);
        header
    }

    fn frame(self, plain: &[u8]) -> Vec<u8> {
        let mut frame = self.header(plain.len());
        for (number, block) in plain.chunks(self.block_len).enumerate() {
            let at = number * self.block_len;
            let packed = if self.linked {
                compress_with_dict(block, &plain[at.saturating_sub(HISTORY_LEN)..at])
            } else {
                compress(block)
            };
            let (word, body) = if packed.len() < block.len() {
                (u32::try_from(packed.len()).unwrap(), packed)
            } else {
                (
                    u32::try_from(block.len()).unwrap() | STORED_FLAG,
                    block.to_vec(),
                )
            };
            frame.extend(word.to_le_bytes());
            frame.extend(&body);
            if self.block_checksums {
                frame.extend(xxh32(&body, 0).to_le_bytes());
            }
        }
        frame.extend([0; 4]);
        if self.content_checksum {
            frame.extend(xxh32(plain, 0).to_le_bytes());
        }
        frame
    }
}

fn legacy(plain: &[u8]) -> Vec<u8> {
    let mut frame = LEGACY_MAGIC.to_le_bytes().to_vec();
    for block in plain.chunks(8 << 20) {
        let packed = compress(block);
        frame.extend(u32::try_from(packed.len()).unwrap().to_le_bytes());
        frame.extend(packed);
    }
    frame
}

#[test]
fn job_of_empty_blocks_is_limited_to_a_number_of_blocks() {
    let mut packed = Maker {
        content_checksum: false,
        ..INDEPENDENT
    }
    .header(0);
    for _ in 0..3 * MAX_PARTS_PER_JOB {
        packed.extend(STORED_FLAG.to_le_bytes());
    }
    packed.extend([0; 4]);
    let outcome = decode(Compression::Lz4, &packed, packed.len());
    assert_eq!(outcome.end, Ok(()));
    assert_eq!((outcome.plain.len(), outcome.jobs), (0, 3));
}

#[test]
fn read_pool_suffices_for_mixed_legacy_blocks() {
    let mut packed = legacy(&text(3256));
    packed.extend(legacy(&vec![0; 8 << 20]).split_off(MAGIC_LEN));
    let pool = BufferPool::new(READ_POOL_BYTES);
    let context = Context {
        pool: pool.clone(),
        ..context()
    };
    let found = drive(codec::start(Compression::Lz4, context), &packed, 1000, 0);
    assert_eq!(found.plain.len(), 3256 + (8 << 20));
    let peak = pool.peak_bytes();
    assert!(peak <= read_pool_bytes(Compression::Lz4), "{peak} bytes");
}

fn skippable(len: u32) -> Vec<u8> {
    let mut frame = 0x184d_2a53_u32.to_le_bytes().to_vec();
    frame.extend(len.to_le_bytes());
    frame.extend(noise(len as usize));
    frame
}

fn mixed(len: usize) -> Vec<u8> {
    let mut plain = text(len);
    plain.extend(noise(len / 2));
    plain.extend(vec![0; len / 3]);
    plain
}

fn cause(outcome: Outcome) -> Cause {
    outcome.end.unwrap_err().cause
}

#[test]
fn independent_blocks_become_jobs_of_about_one_mebibyte() {
    let plain = text(8 << 20);
    let packed = INDEPENDENT.frame(&plain);
    let outcome = decode(Compression::Lz4, &packed, packed.len());
    assert!(outcome.plain == plain);
    assert_eq!(outcome.jobs, 8);
}

// Promises: seek-points
#[test]
fn independent_frames_resume_at_every_mebibyte() {
    let plain = mixed(5 << 20);
    let seek_points = assert_decodes(Compression::Lz4, &INDEPENDENT.frame(&plain), &plain);
    assert_eq!(seek_points.len(), plain.len().div_ceil(1 << 20));
    assert!(seek_points.iter().all(|point| point.window.is_empty()));
}

// Promises: seek-points
#[test]
fn linked_frames_resume_at_checkpoints() {
    let plain = [text(9 << 20), noise(9 << 20), text(9 << 20)].concat();
    for block_checksums in [false, true] {
        let maker = Maker {
            block_checksums,
            ..LINKED
        };
        let seek_points = assert_decodes(Compression::Lz4, &maker.frame(&plain), &plain);
        let windows = seek_points.iter().filter(|point| !point.window.is_empty());
        assert!(windows.count() >= 3, "{}", seek_points.len());
    }
}

#[test]
fn short_blocks_of_a_large_size_class_use_small_buffers() {
    let maker = Maker {
        code: 7,
        block_len: 1000,
        ..INDEPENDENT
    };
    let plain = text(3 << 20);
    let seek_points = assert_decodes(Compression::Lz4, &maker.frame(&plain), &plain);
    assert_eq!(seek_points.len(), 3);
    let jobs = decode(Compression::Lz4, &maker.frame(&plain), 64 << 20).jobs;
    assert_eq!(jobs, 3);
}

#[test]
fn concatenated_frames_of_every_kind_decode() {
    let parts = [
        text(100_000),
        text(9 << 20),
        noise(3 << 20),
        text(70_000),
        Vec::new(),
    ];
    let linked = Maker {
        content_len: true,
        ..LINKED
    };
    let packed = [
        skippable(9),
        INDEPENDENT.frame(&parts[0]),
        legacy(&parts[1]),
        skippable(0),
        legacy(&parts[2]),
        linked.frame(&parts[3]),
        INDEPENDENT.frame(&parts[4]),
        skippable(100_000),
    ];
    assert_decodes(Compression::Lz4, &packed.concat(), &parts.concat());
}

#[test]
fn truncation_anywhere_is_detected() {
    let plain = mixed(3000);
    for linked in [false, true] {
        let maker = Maker {
            linked,
            block_checksums: true,
            block_len: 900,
            ..INDEPENDENT
        };
        assert_truncation_is_detected(Compression::Lz4, &maker.frame(&plain), &plain, &[]);
    }
    let packed = legacy(&plain);
    assert_truncation_is_detected(Compression::Lz4, &packed, &plain, &[4]);
}

#[test]
fn damage_anywhere_is_detected() {
    let plain = mixed(2000);
    for linked in [false, true] {
        for content_len in [false, true] {
            let maker = Maker {
                linked,
                content_len,
                block_len: 700,
                ..INDEPENDENT
            };
            assert_bit_flips_are_detected(Compression::Lz4, &maker.frame(&plain), &plain);
        }
    }
}

#[test]
fn wrong_content_size_is_detected_without_a_checksum() {
    let plain = mixed(100_000);
    for linked in [false, true] {
        for len in [plain.len() - 1, plain.len() + 1] {
            let maker = Maker {
                linked,
                content_len: true,
                content_checksum: false,
                ..INDEPENDENT
            };
            let right = maker.header(plain.len());
            let mut packed = maker.frame(&plain);
            packed.splice(..right.len(), maker.header(len));
            let found = cause(decode(Compression::Lz4, &packed, 1000));
            assert!(matches!(found, Cause::Malformed(_)), "{found:?}");
        }
    }
}

// Promises: decode-verified
#[test]
fn wrong_checksum_is_named_in_the_error() {
    let plain = text(10_000);
    let maker = Maker {
        block_checksums: true,
        ..INDEPENDENT
    };
    for (from_end, name) in [(1, "content"), (9, "block")] {
        let mut packed = maker.frame(&plain);
        let at = packed.len() - from_end;
        packed[at] ^= 1;
        let found = cause(decode(Compression::Lz4, &packed, 1000));
        assert!(
            matches!(found, Cause::Checksum { what, .. } if what == name),
            "{found:?}"
        );
    }
}

#[test]
fn garbage_after_the_last_frame_fails_after_all_bytes() {
    let plain = text(10_000);
    let mut packed = INDEPENDENT.frame(&plain);
    packed.extend([0; 512]);
    let outcome = decode(Compression::Lz4, &packed, 1000);
    assert!(outcome.plain == plain);
    assert!(matches!(cause(outcome), Cause::Malformed(_)));
}

#[test]
fn dictionary_is_reported_as_unsupported() {
    let mut descriptor = vec![0x61, 0x40];
    descriptor.extend(77_u32.to_le_bytes());
    descriptor.push(xxh32(&descriptor, 0).to_le_bytes()[1]);
    let packed = [MAGIC.to_le_bytes().to_vec(), descriptor].concat();
    let Cause::Unsupported(text) = cause(decode(Compression::Lz4, &packed, 1)) else {
        panic!("supported");
    };
    assert!(text.contains("77"), "{text}");
}

#[test]
fn foreign_seek_points_are_rejected_or_fail() {
    let plain = text(200_000);
    let packed = INDEPENDENT.frame(&plain);
    let point = decode(Compression::Lz4, &packed, 1 << 20)
        .seek_points
        .remove(0);
    let context = || super::super::test_support::context();
    for (state, bit) in [(1, 0), (STATE_BETWEEN_FRAMES, 1), (u32::MAX, 0)] {
        let foreign = SeekPoint {
            bit,
            state,
            ..point.clone()
        };
        assert!(Decoder::resume(context(), &foreign).is_err());
    }
    let window = bytes::Bytes::from_static(b"no window");
    let state = Frame::start(Header::LEGACY).header.state();
    let foreign = SeekPoint {
        state,
        window,
        ..point.clone()
    };
    assert!(Decoder::resume(context(), &foreign).is_err());
    let moved = SeekPoint {
        packed: Packed(point.packed.0 + 1),
        ..point
    };
    assert!(
        decode_from(Compression::Lz4, &packed, 1000, &moved)
            .end
            .is_err()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_after_a_header_do_not_panic(
        linked: bool,
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        push_len in 1..50_usize,
    ) {
        let maker = Maker { linked, content_checksum: false, ..INDEPENDENT };
        let mut packed = maker.header(0);
        packed.extend((u32::try_from(bytes.len()).unwrap()).to_le_bytes());
        packed.extend(&bytes);
        decode(Compression::Lz4, &packed, push_len);
    }

    #[test]
    fn push_size_does_not_change_the_output(
        linked: bool,
        block_len in 1..5000_usize,
        len in 0..20_000_usize,
        push_len in 1..3000_usize,
    ) {
        let maker = Maker { linked, block_len, block_checksums: true, ..INDEPENDENT };
        let plain = mixed(len);
        let outcome = decode(Compression::Lz4, &maker.frame(&plain), push_len);
        prop_assert_eq!(outcome.end, Ok(()));
        prop_assert!(outcome.plain == plain);
    }
}
