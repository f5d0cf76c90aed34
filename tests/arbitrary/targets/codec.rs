//! Decoders of arbitrary bytes.
//!
//! Decoding ends, stays within its memory, and gives the same result for every split of the input.

use std::io::Read;

use bytes::Bytes;
use tarfs::codec::{
    self, Cause, Compression, Context, Decoder, Error, ExpectedSpan, Output, Pull, READ_POOL_BYTES,
    SeekPoint, SeekRange, UNKNOWN_PLAIN,
};
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::internal::memory_reclaim::MemoryBroker;
use tarfs::{Packed, Plain};

use super::knobs::Knobs;

/// Number of plain bytes after which a target stops decoding.
const MAX_PLAIN_BYTES: usize = 3 << 20;

/// Maximum number of consecutive pulls that give no bytes and need none.
const MAX_IDLE_PULLS: usize = 10_000;

/// Bytes of decoder state that may be borrowed.
const STATE_BYTES: u64 = 16 << 20;

/// How a stream ended.
#[derive(Clone, PartialEq, Eq, Debug)]
enum End {
    Complete,
    Failed(Error),
    /// The target stopped decoding before the end.
    Cut,
}

/// Result of decoding a stream.
#[derive(Debug)]
struct Outcome {
    plain: Vec<u8>,
    seek_points: Vec<SeekPoint>,
    end: End,
    peak_bytes: u64,
}

/// Decodes `bytes` at once and in pieces, from its start and from seek points, and compares.
pub(super) fn run(compression: Compression, bytes: &[u8]) {
    let (packed, knobs) = Knobs::split(bytes);
    let whole = decode(compression, packed, packed.len().max(1), 0);
    assert!(
        whole.peak_bytes <= codec::read_pool_bytes(compression),
        "{} bytes of buffers",
        whole.peak_bytes
    );
    let workers = if knobs.flag(0) { 4 } else { 0 };
    let pieces = decode(compression, packed, knobs.push_len(), workers);
    assert_same_outcome(&whole, &pieces);
    if whole.end == End::Complete {
        assert_equals_reference(compression, packed, &whole.plain);
    }
    if whole.end != End::Cut {
        for seek_point in whole.seek_points.iter().take(3) {
            assert_resumes(compression, packed, knobs, &whole, seek_point);
        }
    }
}

fn context(workers: usize) -> Context {
    Context {
        pool: BufferPool::new(READ_POOL_BYTES),
        wants_seek_points: true,
        broker: MemoryBroker::with_limit(STATE_BYTES),
        workers,
    }
}

fn decode(compression: Compression, packed: &[u8], push_len: usize, workers: usize) -> Outcome {
    let context = context(workers);
    let (pool, broker) = (context.pool.clone(), context.broker.clone());
    let mut outcome = drive(codec::start(compression, context), packed, push_len, 0);
    outcome.peak_bytes = pool.peak_bytes();
    assert_eq!((pool.used_bytes(), broker.granted_bytes()), (0, 0));
    outcome
}

/// Drives a decoder as the driver thread does, but on this thread.
fn drive(mut decoder: Box<dyn Decoder>, packed: &[u8], push_len: usize, offset: usize) -> Outcome {
    let mut pushes = packed.chunks(push_len);
    let mut outcome = Outcome {
        plain: Vec::new(),
        seek_points: Vec::new(),
        end: End::Complete,
        peak_bytes: 0,
    };
    let mut hash = None;
    let mut finished = false;
    let mut idle_pulls = 0;
    while outcome.plain.len() < MAX_PLAIN_BYTES {
        idle_pulls += 1;
        assert!(idle_pulls < MAX_IDLE_PULLS, "it goes round in circles");
        let made = match decoder.pull() {
            Ok(Pull::NeedInput) => {
                assert!(!finished, "there is no more");
                idle_pulls = 0;
                if let Some(bytes) = pushes.next() {
                    decoder.push(Bytes::copy_from_slice(bytes));
                } else {
                    decoder.finish();
                    finished = true;
                }
                continue;
            }
            Ok(Pull::SeekPoint(seek_point)) => {
                let plain = Plain((offset + outcome.plain.len()) as u64);
                assert!(seek_point.plain == UNKNOWN_PLAIN || seek_point.plain == plain);
                let seek_point = SeekPoint {
                    plain,
                    ..seek_point
                };
                outcome.seek_points.push(seek_point);
                continue;
            }
            Ok(Pull::Plain(bytes)) => {
                assert!(!bytes.is_empty(), "an empty piece");
                Ok(vec![bytes])
            }
            Ok(Pull::Job(job) | Pull::OrderedJob(job)) => {
                let made = job.run().and_then(Output::concat);
                made.map(|bytes| vec![Bytes::from(bytes)])
            }
            Ok(Pull::Speculative(ahead)) => {
                ahead.run();
                continue;
            }
            Ok(Pull::WaitFor(ahead)) => {
                ahead.wait();
                continue;
            }
            Ok(Pull::ChecksumStart(new)) => {
                hash = Some((outcome.plain.len(), new));
                continue;
            }
            Ok(Pull::ChecksumEnd { expected, packed }) => {
                let (start, mut hash) = hash.take().expect("begun");
                hash.update(outcome.plain.get(start..).expect("decoded"));
                if hash.digest() == expected {
                    continue;
                }
                let cause = Cause::Checksum {
                    what: "content",
                    expected: expected.into(),
                    computed: hash.digest().into(),
                };
                Err(Error {
                    compression: hash.compression(),
                    packed,
                    cause,
                })
            }
            Ok(Pull::Warning(_)) => continue,
            Ok(Pull::End) => {
                assert!(matches!(decoder.pull(), Ok(Pull::End)), "ends are fused");
                return outcome;
            }
            Err(error) => {
                let again = decoder.pull().expect_err("errors are fused");
                assert_eq!(again, error, "errors are fused");
                Err(error)
            }
        };
        match made {
            Ok(pieces) => {
                for piece in pieces {
                    idle_pulls = 0;
                    outcome.plain.extend_from_slice(&piece);
                }
            }
            Err(error) => {
                outcome.end = End::Failed(error);
                return outcome;
            }
        }
    }
    outcome.end = End::Cut;
    outcome
}

/// Asserts that two outcomes agree as far as both go. The number of bytes decoded before damage is
/// noticed depends on how the input is split.
fn assert_same_outcome(a: &Outcome, b: &Outcome) {
    let both = a.plain.len().min(b.plain.len());
    assert!(a.plain.get(..both) == b.plain.get(..both), "other bytes");
    match (&a.end, &b.end) {
        (End::Complete, End::Complete) => assert_eq!(a.plain.len(), b.plain.len()),
        (End::Failed(_), End::Failed(_)) | (End::Cut, _) | (_, End::Cut) => {}
        (a, b) => panic!("{a:?} at once, {b:?} in pieces"),
    }
}

/// Asserts that a complete stream decodes to the same bytes in the format's own library.
fn assert_equals_reference(compression: Compression, packed: &[u8], plain: &[u8]) {
    match compression {
        Compression::Gzip => compare(flate2::read::MultiGzDecoder::new(packed), plain),
        Compression::Zstd => {
            let decoder = zstd::stream::read::Decoder::new(packed);
            compare(decoder.expect("memory"), plain);
        }
        Compression::Xz => {
            let decoder = liblzma::read::XzDecoder::new_multi_decoder(packed);
            compare(decoder, plain);
        }
        Compression::Bzip2 => compare(bzip2::read::MultiBzDecoder::new(packed), plain),
        // There is no reference decoder for lz4 frames.
        Compression::Lz4 | Compression::None => {}
    }
}

fn compare(reader: impl Read, plain: &[u8]) {
    let mut reference = Vec::new();
    let read = reader
        .take(plain.len() as u64 + 1)
        .read_to_end(&mut reference);
    if read.is_ok() {
        assert!(reference == plain, "the reference makes other bytes of it");
    }
}

/// Asserts that decoding from a seek point gives the rest of `whole`.
fn assert_resumes(
    compression: Compression,
    packed: &[u8],
    knobs: Knobs,
    whole: &Outcome,
    seek_point: &SeekPoint,
) {
    let start = index(seek_point.packed.0);
    let rest = packed.get(start..).expect("a seek point inside");
    let offset = index(seek_point.plain.0);
    let expected = Outcome {
        plain: whole.plain.get(offset..).expect("decoded").to_vec(),
        seek_points: Vec::new(),
        end: whole.end.clone(),
        peak_bytes: 0,
    };
    let decoder = codec::resume(compression, context(0), seek_point).expect("its own");
    let resumed = drive(decoder, rest, knobs.push_len(), offset);
    let both = expected.plain.len().min(resumed.plain.len());
    assert!(expected.plain.get(..both) == resumed.plain.get(..both));
    // A resumed decoder cannot check checksums that cover earlier bytes.
    if expected.end == End::Complete {
        assert_eq!(resumed.end, End::Complete);
        assert_eq!(resumed.plain.len(), expected.plain.len());
    }
}

/// Resumes at a seek point that no decoder has made.
pub(super) fn resume_anywhere(bytes: &[u8]) {
    let (bytes, knobs) = Knobs::split(bytes);
    let Some((head, rest)) = bytes.split_first_chunk::<17>() else {
        return;
    };
    let [
        kind,
        bit,
        s0,
        s1,
        s2,
        s3,
        p0,
        p1,
        p2,
        p3,
        l0,
        l1,
        l2,
        l3,
        w0,
        w1,
        own,
    ] = *head;
    let compression = match kind % 6 {
        0 => Compression::None,
        1 => Compression::Gzip,
        2 => Compression::Lz4,
        3 => Compression::Zstd,
        4 => Compression::Xz,
        _ => Compression::Bzip2,
    };
    let window_len = usize::from(u16::from_le_bytes([w0, w1])).min(rest.len());
    let (window, packed) = rest.split_at(window_len);
    // A seek point packed by the program itself unpacks without an error.
    let window = match own % 2 {
        0 => Bytes::copy_from_slice(window),
        _ => zstd::bulk::compress(window, 1).expect("memory").into(),
    };
    let plain = u64::from(u32::from_le_bytes([p0, p1, p2, p3]));
    let seek_point = SeekPoint {
        packed: Packed(if knobs.flag(1) {
            u64::MAX - 5
        } else {
            plain / 2
        }),
        bit,
        plain: Plain(if knobs.flag(2) { u64::MAX - 9 } else { plain }),
        state: u32::from_le_bytes([s0, s1, s2, s3]),
        window,
    };
    let len = u64::from(u32::from_le_bytes([l0, l1, l2, l3]));
    if let Ok(decoder) = codec::resume(compression, context(0), &seek_point) {
        drain(decoder, packed, knobs.push_len());
    }
    let (start, spans) = (seek_point.packed.0, usize::from(knobs.number() % 4));
    let range = SeekRange {
        end: Packed(start.saturating_add(packed.len() as u64)),
        seek_point,
        first_span: 0,
        spans: std::iter::repeat_n(ExpectedSpan { len, hash: plain }, spans).collect(),
        block_len: 1 + plain % 100_000,
    };
    let decoder = codec::start_indexed(compression, context(4), [range].into_iter(), None);
    drain(decoder, packed, knobs.push_len());
}

/// Pulls until the end, an error or the limit, and drops the bytes.
fn drain(mut decoder: Box<dyn Decoder>, packed: &[u8], push_len: usize) {
    let mut pushes = packed.chunks(push_len);
    let mut plain_bytes = 0;
    for _ in 0..MAX_IDLE_PULLS + packed.len() {
        let pieces = match decoder.pull() {
            Ok(Pull::NeedInput) => {
                match pushes.next() {
                    Some(bytes) => decoder.push(Bytes::copy_from_slice(bytes)),
                    None => decoder.finish(),
                }
                continue;
            }
            Ok(Pull::Plain(bytes)) => vec![bytes],
            Ok(Pull::Job(job) | Pull::OrderedJob(job)) => {
                match job.run().and_then(Output::concat) {
                    Ok(bytes) => vec![Bytes::from(bytes)],
                    Err(_) => return,
                }
            }
            Ok(Pull::Speculative(ahead)) => {
                ahead.run();
                continue;
            }
            Ok(Pull::WaitFor(ahead)) => {
                ahead.wait();
                continue;
            }
            Ok(Pull::End) | Err(_) => return,
            Ok(_) => continue,
        };
        plain_bytes += pieces.iter().map(Bytes::len).sum::<usize>();
        if plain_bytes > MAX_PLAIN_BYTES {
            return;
        }
    }
    panic!("it goes round in circles");
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("inside the input")
}
