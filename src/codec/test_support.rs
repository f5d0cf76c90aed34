//! Test helpers for decoders of all codecs.

use bytes::Bytes;

use super::{
    Cause, Compression, Context, Decoder, Error, Output, Pull, SeekPoint, UNKNOWN_PLAIN, resume,
    start,
};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Packed, Plain};
use crate::base::memory_reclaim::MemoryBroker;

#[derive(Debug)]
pub(crate) struct Outcome {
    /// The plain bytes before the end or the error.
    pub(crate) plain: Vec<u8>,
    /// Seek points with plain offsets, counted as drivers do.
    pub(crate) seek_points: Vec<SeekPoint>,
    pub(crate) warnings: Vec<String>,
    pub(crate) jobs: usize,
    pub(crate) end: Result<(), Error>,
}

pub(crate) fn context() -> Context {
    Context {
        pool: BufferPool::new(256 << 20),
        wants_seek_points: true,
        broker: MemoryBroker::with_limit(256 << 20),
        workers: 0,
    }
}

pub(crate) fn decode(compression: Compression, packed: &[u8], push_len: usize) -> Outcome {
    drive(start(compression, context()), packed, push_len, 0)
}

pub(crate) fn decode_from(
    compression: Compression,
    packed: &[u8],
    push_len: usize,
    seek_point: &SeekPoint,
) -> Outcome {
    let decoder = resume(compression, context(), seek_point).unwrap();
    let rest = &packed[usize::try_from(seek_point.packed.0).unwrap()..];
    drive(decoder, rest, push_len, seek_point.plain.0)
}

/// Drives a decoder like its driver, but on one thread.
pub(crate) fn drive(
    mut decoder: Box<dyn Decoder>,
    packed: &[u8],
    push_len: usize,
    mut offset: u64,
) -> Outcome {
    let mut pushes = packed.chunks(push_len);
    let mut outcome = Outcome {
        plain: Vec::new(),
        seek_points: Vec::new(),
        warnings: Vec::new(),
        jobs: 0,
        end: Ok(()),
    };
    let mut hash_start = None;
    loop {
        let bytes = match decoder.pull() {
            Ok(Pull::NeedInput) => {
                match pushes.next() {
                    Some(bytes) => decoder.push(Bytes::copy_from_slice(bytes)),
                    None => decoder.finish(),
                }
                continue;
            }
            Ok(Pull::SeekPoint(seek_point)) => {
                if seek_point.plain != UNKNOWN_PLAIN {
                    assert_eq!(seek_point.plain, Plain(offset));
                }
                let plain = Plain(offset);
                outcome.seek_points.push(SeekPoint {
                    plain,
                    ..seek_point
                });
                continue;
            }
            Ok(Pull::Plain(bytes)) => {
                assert!(!bytes.is_empty());
                Ok(bytes)
            }
            Ok(Pull::Job(job)) => {
                outcome.jobs += 1;
                job.run().and_then(Output::concat).map(Bytes::from)
            }
            Ok(Pull::OrderedJob(job)) => job.run().and_then(Output::concat).map(Bytes::from),
            Ok(Pull::Speculative(_) | Pull::WaitFor(_)) => {
                panic!("only gzip's")
            }
            Ok(Pull::ChecksumStart(hash)) => {
                hash_start = Some((outcome.plain.len(), hash));
                continue;
            }
            Ok(Pull::ChecksumEnd { expected, packed }) => {
                let (start, mut hash) = hash_start.take().unwrap();
                hash.update(&outcome.plain[start..]);
                let computed = hash.digest();
                if computed == expected {
                    continue;
                }
                Err(Error {
                    compression: hash.compression(),
                    packed,
                    cause: Cause::Checksum {
                        what: "content",
                        expected: expected.into(),
                        computed: computed.into(),
                    },
                })
            }
            Ok(Pull::Warning(text)) => {
                outcome.warnings.push(text);
                continue;
            }
            Ok(Pull::End) => return outcome,
            Err(error) => {
                assert_eq!(decoder.pull().unwrap_err(), error, "errors are fused");
                Err(error)
            }
        };
        match bytes {
            Ok(bytes) => {
                offset += bytes.len() as u64;
                outcome.plain.extend_from_slice(&bytes);
            }
            Err(error) => {
                outcome.end = Err(error);
                return outcome;
            }
        }
    }
}

/// Decodes `packed` to `plain` in several push sizes and from every seek point, which it returns.
pub(crate) fn assert_decodes(
    compression: Compression,
    packed: &[u8],
    plain: &[u8],
) -> Vec<SeekPoint> {
    let mut seek_points = Vec::new();
    for push_len in [packed.len().max(1), 70_001, 1_000_003] {
        let outcome = decode(compression, packed, push_len);
        assert_eq!(outcome.end, Ok(()), "pushed {push_len}");
        assert!(outcome.plain == plain, "pushed {push_len}");
        seek_points = outcome.seek_points;
    }
    for seek_point in &seek_points {
        let outcome = decode_from(compression, packed, 100_003, seek_point);
        assert_eq!(outcome.end, Ok(()), "{seek_point:?}");
        let rest = &plain[usize::try_from(seek_point.plain.0).unwrap()..];
        assert!(outcome.plain == rest, "{seek_point:?}");
    }
    seek_points
}

/// Cuts the small stream `packed` at every byte.
///
/// Expects a prefix of `plain`, and an error for the end of input unless the cut is at one of `ends`.
pub(crate) fn assert_truncation_is_detected(
    compression: Compression,
    packed: &[u8],
    plain: &[u8],
    ends: &[usize],
) {
    for len in 0..packed.len() {
        let outcome = decode(compression, &packed[..len], 7);
        assert!(plain.starts_with(&outcome.plain), "cut at {len}");
        if ends.contains(&len) {
            assert_eq!(outcome.end, Ok(()), "cut at {len}");
        } else {
            let error = outcome.end.unwrap_err();
            assert_eq!(error.cause, Cause::Truncated, "cut at {len}");
            assert_eq!(error.packed, Packed(len as u64));
        }
    }
}

/// Flips bits of every byte of `packed`. Expects an error, or `plain` in spite of the flip.
pub(crate) fn assert_bit_flips_are_detected(compression: Compression, packed: &[u8], plain: &[u8]) {
    for at in 0..packed.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = packed.to_vec();
            damaged[at] ^= flip;
            let outcome = decode(compression, &damaged, 1000);
            assert!(
                outcome.end.is_err() || outcome.plain == plain,
                "flipped {flip:#x} at {at}"
            );
        }
    }
}

/// `len` bytes that compress to about a half.
pub(crate) fn text(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut bytes = Vec::with_capacity(len + 16);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = state % 4096;
        bytes.extend_from_slice(format!("{word:x} {:o},", word * word).as_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
    .take(len)
    .collect()
}
