//! Decodes streams that only seek points with windows can cut, with a job for each range between two.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::walker::input_queue::InputQueue;
use super::{
    Cause, Compression, Context, Decoder, Error, Job, LOOKAHEAD_LEN, Output, Pull, SeekPoint,
    resume,
};
use crate::base::extent::Packed;
use crate::base::span_hash::{self, SpanHasher};

/// Minimum ratio of the buffer budget to the bytes of a job, so that several can be in flight.
const JOB_POOL_DIVISOR: u64 = 4;

/// Bytes from the pool beyond the plain bytes: the rest of the decoder's last buffer.
const BUFFER_ROUNDING_BYTES: u64 = 1 << 20;

/// From one seek point to the next.
#[derive(Clone, Debug)]
pub struct SeekRange {
    /// Its first seek point.
    pub seek_point: SeekPoint,
    /// Packed offset of the next seek point, or of the end of the stream.
    pub end: Packed,
    /// Number of its first span.
    pub first_span: u32,
    /// The spans that it decodes to, never none.
    pub spans: VecDeque<ExpectedSpan>,
    /// Length of the blocks for the hashes of spans.
    pub block_len: u64,
}

/// Expected length and hash of a span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpectedSpan {
    /// Plain bytes.
    pub len: u64,
    /// Their hash, as [`SpanHasher`] takes it.
    pub hash: u64,
}

/// Decoded spans that others have.
pub trait DecodedSpans: fmt::Debug + Send + Sync {
    /// The bytes of span `number`, proven by `expected`. A call may wait for another's decoder, with a timeout.
    fn find(&self, number: u32, expected: ExpectedSpan) -> Option<Bytes>;
}

impl ExpectedSpan {
    /// Whether it is a span of `bytes`, in an index with blocks of `block_len`.
    pub(crate) fn is_of(&self, bytes: &[u8], block_len: u64) -> bool {
        bytes.len() as u64 == self.len && span_hash::of_bytes(bytes, block_len) == self.hash
    }
}

impl SeekRange {
    fn plain_len(&self) -> u64 {
        let lens = self.spans.iter().map(|span| span.len);
        lens.fold(0, u64::saturating_add)
    }

    fn packed_len(&self) -> u64 {
        self.end.0.saturating_sub(self.seek_point.packed.0)
    }

    /// Whether a pool of `pool_bytes` permits a job for it. A longer one is decoded by the caller of the decoder.
    pub(crate) fn fits_job(&self, pool_bytes: u64) -> bool {
        self.packed_len().max(self.plain_len()) <= pool_bytes / JOB_POOL_DIVISOR
    }
}

/// As [`start`](super::start), along `ranges` that cover the stream in order. Only span hashes verify bytes.
/// A job decodes nothing if `decoded` has all spans of its range.
pub fn start_indexed(
    compression: Compression,
    context: Context,
    ranges: impl Iterator<Item = SeekRange> + Send + 'static,
    decoded: Option<Arc<dyn DecodedSpans>>,
) -> Box<dyn Decoder> {
    Box::new(IndexedDecoder {
        compression,
        context,
        decoded,
        input: InputQueue::default(),
        ranges: Box::new(ranges),
        state: State::BetweenRanges,
    })
}

struct IndexedDecoder {
    compression: Compression,
    context: Context,
    decoded: Option<Arc<dyn DecodedSpans>>,
    input: InputQueue,
    ranges: Box<dyn Iterator<Item = SeekRange> + Send>,
    state: State,
}

enum State {
    BetweenRanges,
    Buffering(SeekRange),
    Serial(Box<Serial>),
    Stopped(Result<(), Error>),
}

struct Serial {
    decoder: Box<dyn Decoder>,
    verifier: SpanVerifier,
    end: Packed,
    input_state: InputState,
    output: Option<Output>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum InputState {
    Partial,
    /// All of it, with the lookahead.
    Complete,
    /// All of it, and it knows that there is no more.
    Finished,
}

impl IndexedDecoder {
    /// Advances by one step; `None` when there is nothing to return yet.
    fn step(&mut self) -> Result<Option<Pull>, Error> {
        match &mut self.state {
            State::BetweenRanges => {
                self.state = match self.ranges.next() {
                    Some(range) => State::Buffering(range),
                    None => State::Stopped(Ok(())),
                };
                Ok(None)
            }
            State::Buffering(_) => self.buffer_range(),
            State::Serial(serial) => {
                let pulled = serial.pull(&mut self.input)?;
                if serial.verifier.is_done() {
                    self.state = State::BetweenRanges;
                }
                Ok(pulled)
            }
            State::Stopped(how) => how.clone().map(|()| Some(Pull::End)),
        }
    }

    fn buffer_range(&mut self) -> Result<Option<Pull>, Error> {
        let State::Buffering(range) = &self.state else {
            return Ok(None);
        };
        let packed = range.seek_point.packed;
        let Some(gap) = packed.0.checked_sub(self.input.offset().0) else {
            return Err(index_mismatch(self.compression, packed));
        };
        if self.input.skip(gap) < gap {
            return self.need_input();
        }
        let (packed_len, plain_len) = (range.packed_len(), range.plain_len());
        if !range.fits_job(self.context.pool.budget()) {
            let serial = Serial::new(self.compression, self.context.clone(), range)?;
            self.state = State::Serial(Box::new(serial));
            return Ok(None);
        }
        let len = usize::try_from(packed_len).unwrap_or(usize::MAX);
        if self.input.len() < len.saturating_add(LOOKAHEAD_LEN) && !self.input.is_finished() {
            return Ok(Some(Pull::NeedInput));
        }
        let Some(segments) = self.input.take(len) else {
            return self.need_input();
        };
        let mut input = InputQueue::new(packed);
        for slice in segments.slices {
            input.push(slice);
        }
        input.push(peek_lookahead(&self.input));
        input.finish();
        let State::Buffering(range) = std::mem::replace(&mut self.state, State::BetweenRanges)
        else {
            return Ok(None);
        };
        let (compression, mut context) = (self.compression, self.context.clone());
        // In stream order and all at once, so that a job never waits.
        let preallocated = context
            .pool
            .preallocate(plain_len.saturating_add(BUFFER_ROUNDING_BYTES));
        context.pool =
            preallocated.map_err(|closed| Cause::from(closed).at(compression, packed))?;
        let decoded = self.decoded.clone();
        Ok(Some(Pull::Job(Job::new(move || {
            let found = decoded.map_or_else(Vec::new, |decoded| {
                find_decoded(&*decoded, &context, &range)
            });
            decode(compression, context, &range, found, input)
        }))))
    }

    fn need_input(&self) -> Result<Option<Pull>, Error> {
        if self.input.is_finished() {
            return Err(Cause::Truncated.at(self.compression, self.input.end()));
        }
        Ok(Some(Pull::NeedInput))
    }
}

impl Decoder for IndexedDecoder {
    fn push(&mut self, packed: Bytes) {
        self.input.push(packed);
    }

    fn finish(&mut self) {
        self.input.finish();
    }

    fn pull(&mut self) -> Result<Pull, Error> {
        loop {
            match self.step() {
                Ok(Some(pull)) => return Ok(pull),
                Ok(None) => {}
                Err(error) => self.state = State::Stopped(Err(error)),
            }
            if let State::Stopped(Err(error)) = &self.state {
                return Err(error.clone());
            }
        }
    }
}

impl Serial {
    fn new(compression: Compression, context: Context, range: &SeekRange) -> Result<Self, Error> {
        Ok(Self {
            decoder: resume(compression, context, &range.seek_point)?,
            verifier: SpanVerifier::new(compression, range),
            end: range.end,
            input_state: InputState::Partial,
            output: None,
        })
    }

    /// The next plain bytes of the range, or [`Pull::NeedInput`]; `None` when it only advanced.
    fn pull(&mut self, input: &mut InputQueue) -> Result<Option<Pull>, Error> {
        if let Some(output) = &mut self.output {
            if let Some(bytes) = output.next_piece()? {
                return Ok(self.verifier.verify(&bytes)?.map(Pull::Plain));
            }
            self.output = None;
        }
        match self.decoder.pull()? {
            Pull::NeedInput => match self.input_state {
                InputState::Partial => Ok(self.feed(input)),
                InputState::Complete => {
                    self.decoder.finish();
                    self.input_state = InputState::Finished;
                    Ok(None)
                }
                InputState::Finished => Err(self.verifier.index_mismatch()),
            },
            Pull::Plain(bytes) => Ok(self.verifier.verify(&bytes)?.map(Pull::Plain)),
            Pull::Job(job) | Pull::OrderedJob(job) => {
                self.output = Some(job.run()?);
                Ok(None)
            }
            // From a seek point, decoders do not speculate.
            Pull::SeekPoint(_)
            | Pull::Speculative(_)
            | Pull::WaitFor(_)
            | Pull::ChecksumStart(_)
            | Pull::ChecksumEnd { .. }
            | Pull::Warning(_) => Ok(None),
            Pull::End => Err(self.verifier.index_mismatch()),
        }
    }

    fn feed(&mut self, input: &mut InputQueue) -> Option<Pull> {
        let left = self.end.0.saturating_sub(input.offset().0);
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        if left == 0 {
            if input.len() < LOOKAHEAD_LEN && !input.is_finished() {
                return Some(Pull::NeedInput);
            }
            self.decoder.push(peek_lookahead(input));
            self.input_state = InputState::Complete;
            return None;
        }
        let front = input.front().len().min(left);
        if front == 0 && !input.is_finished() {
            return Some(Pull::NeedInput);
        }
        match input.take(front).and_then(|mut taken| taken.slices.pop()) {
            Some(slice) => self.decoder.push(slice),
            None => self.input_state = InputState::Complete,
        }
        None
    }
}

/// The bytes after a range that its decoder may need.
pub(super) fn peek_lookahead(input: &InputQueue) -> Bytes {
    let mut lookahead = vec![0; input.len().min(LOOKAHEAD_LEN)];
    input.peek_into(0, &mut lookahead);
    lookahead.into()
}

/// The first spans of `range`, up to one that is not there, in memory of the pool.
fn find_decoded(decoded: &dyn DecodedSpans, context: &Context, range: &SeekRange) -> Vec<Bytes> {
    let numbered = (range.first_span..).zip(&range.spans);
    let found = numbered.map_while(|(number, &expected)| {
        // The run is over then.
        if context.pool.is_closed() {
            return None;
        }
        let bytes = decoded.find(number, expected)?;
        let mut buffer = context.pool.acquire(bytes.len()).ok()?;
        buffer.copy_from_slice(&bytes);
        Some(buffer.freeze())
    });
    found.collect()
}

/// The plain bytes of `range`, which begins with `plain`.
fn decode(
    compression: Compression,
    context: Context,
    range: &SeekRange,
    mut plain: Vec<Bytes>,
    mut input: InputQueue,
) -> Result<Vec<Bytes>, Error> {
    if plain.len() == range.spans.len() {
        return Ok(plain);
    }
    let mut known: usize = plain.iter().map(Bytes::len).sum();
    let mut serial = Serial::new(compression, context, range)?;
    while !serial.verifier.is_done() {
        match serial.pull(&mut input)? {
            Some(Pull::Plain(mut bytes)) => {
                let dropped = known.min(bytes.len());
                known -= dropped;
                let rest = bytes.split_off(dropped);
                plain.extend((!rest.is_empty()).then_some(rest));
            }
            Some(_) => return Err(serial.verifier.index_mismatch()),
            None => {}
        }
    }
    Ok(plain)
}

struct SpanVerifier {
    compression: Compression,
    packed: Packed,
    /// The decoder shortens the first one as its bytes pass.
    spans: VecDeque<ExpectedSpan>,
    hasher: SpanHasher,
}

impl SpanVerifier {
    fn new(compression: Compression, range: &SeekRange) -> Self {
        Self {
            compression,
            packed: range.seek_point.packed,
            spans: range.spans.clone(),
            hasher: SpanHasher::new(range.block_len),
        }
    }

    fn is_done(&self) -> bool {
        self.spans.is_empty()
    }

    /// The part of `bytes` inside the range; `None` when there is none.
    fn verify(&mut self, bytes: &Bytes) -> Result<Option<Bytes>, Error> {
        let mut passed = 0;
        while let Some(span) = self.spans.front_mut() {
            let rest = bytes.get(passed..).unwrap_or_default();
            let len = usize::try_from(span.len).map_or(rest.len(), |len| len.min(rest.len()));
            self.hasher.update(rest.get(..len).unwrap_or_default());
            passed += len;
            span.len -= len as u64;
            if span.len > 0 {
                break;
            }
            let (expected, (computed, _)) = (span.hash, self.hasher.finish());
            Cause::compare_checksums("the hash in the saved index", expected, computed)
                .map_err(|cause| cause.at(self.compression, self.packed))?;
            self.spans.pop_front();
        }
        Ok(Some(bytes.slice(..passed)).filter(|bytes| !bytes.is_empty()))
    }

    fn index_mismatch(&self) -> Error {
        index_mismatch(self.compression, self.packed)
    }
}

pub(super) fn index_mismatch(compression: Compression, packed: Packed) -> Error {
    Cause::malformed("the stream does not decode as its saved index says").at(compression, packed)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use crate::base::span_hash;

    use super::super::test_support::{Outcome, context, decode, drive, text};
    use super::*;
    use crate::base::buffer_pool::BufferPool;
    use crate::codec;

    const MIB: usize = 1 << 20;

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let level = flate2::Compression::default();
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn bzip2(plain: &[u8]) -> Vec<u8> {
        let level = bzip2::Compression::fast();
        let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), level);
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    const BLOCK_LEN: u64 = 1000;

    /// The ranges of an index of the stream, with `spans` spans between two seek points.
    fn ranges(compression: Compression, packed: &[u8], spans: usize) -> Vec<SeekRange> {
        let outcome = decode(compression, packed, 100_000);
        assert!(outcome.seek_points.len() > 3, "or nothing is tested");
        let mut ranges = Vec::new();
        for (number, seek_point) in outcome.seek_points.iter().enumerate() {
            let next = outcome.seek_points.get(number + 1);
            let start = usize::try_from(seek_point.plain.0).unwrap();
            let end = next.map_or(outcome.plain.len(), |next| {
                usize::try_from(next.plain.0).unwrap()
            });
            let plain = &outcome.plain[start..end];
            let sums = plain
                .chunks(plain.len().div_ceil(spans))
                .map(|span| ExpectedSpan {
                    len: span.len() as u64,
                    hash: span_hash::of_bytes(span, BLOCK_LEN),
                });
            ranges.push(SeekRange {
                seek_point: seek_point.clone(),
                end: next.map_or(Packed(packed.len() as u64), |next| next.packed),
                first_span: u32::try_from(number * spans).unwrap(),
                spans: sums.collect(),
                block_len: BLOCK_LEN,
            });
        }
        ranges
    }

    fn run(
        compression: Compression,
        packed: &[u8],
        push_len: usize,
        ranges: Vec<SeekRange>,
        pool: u64,
    ) -> Outcome {
        let context = context_of(pool);
        let decoder = codec::start_indexed(compression, context, ranges.into_iter(), None);
        drive(decoder, packed, push_len, 0)
    }

    fn context_of(pool: u64) -> Context {
        Context {
            pool: BufferPool::new(pool),
            wants_seek_points: false,
            ..context()
        }
    }

    /// Formats whose decoding goes over bits, over bytes, and by jobs of its own.
    fn streams() -> Vec<(Compression, Vec<u8>, Vec<u8>)> {
        let plain = text(20 * MIB);
        vec![
            (Compression::Gzip, gzip(&plain), plain.clone()),
            (Compression::Bzip2, bzip2(&plain), plain),
        ]
    }

    #[test]
    fn indexed_stream_decodes_with_one_job_per_range() {
        for (compression, packed, plain) in streams() {
            let ranges = ranges(compression, &packed, 3);
            for push_len in [10_007, packed.len()] {
                let count = ranges.len();
                let outcome = run(compression, &packed, push_len, ranges.clone(), 256 << 20);
                assert_eq!(outcome.end, Ok(()));
                assert!(outcome.plain == plain, "{compression}");
                assert_eq!(outcome.jobs, count);
            }
        }
    }

    #[test]
    fn ranges_too_long_for_a_job_decode_serially() {
        for (compression, packed, plain) in streams() {
            let ranges = ranges(compression, &packed, 2);
            for push_len in [10_007, packed.len()] {
                let outcome = run(compression, &packed, push_len, ranges.clone(), 4 << 20);
                assert_eq!(outcome.end, Ok(()), "{compression}");
                assert!(outcome.plain == plain, "{compression}");
            }
        }
    }

    // Promises: index-materialize
    #[test]
    fn bytes_that_differ_from_the_index_fail_after_valid_bytes() {
        for (compression, packed, plain) in streams() {
            for pool in [4 << 20, 256 << 20] {
                let mut ranges = ranges(compression, &packed, 2);
                let before = usize::try_from(ranges[2].seek_point.plain.0).unwrap();
                ranges[2].spans[1].hash ^= 1;
                let outcome = run(compression, &packed, 50_000, ranges, pool);
                let cause = outcome.end.unwrap_err().cause;
                assert!(matches!(cause, Cause::Checksum { .. }), "{cause:?}");
                assert!(outcome.plain.len() >= before);
                assert!(outcome.plain == plain[..outcome.plain.len()]);
            }
        }
    }

    /// Spans of a stream, but for one that is missing and one that is wrong.
    #[derive(Debug)]
    struct Known {
        spans: Vec<Bytes>,
        missing: u32,
        wrong: u32,
    }

    impl DecodedSpans for Known {
        fn find(&self, number: u32, expected: ExpectedSpan) -> Option<Bytes> {
            let bytes = self.spans[number as usize].clone();
            let mut found = bytes.to_vec();
            found[0] ^= u8::from(number == self.wrong);
            let is_known = number != self.missing && expected.is_of(&found, BLOCK_LEN);
            is_known.then_some(bytes)
        }
    }

    // Promises: shared-commands
    #[test]
    fn ranges_whose_spans_are_decoded_already_are_not_decoded() {
        for (compression, packed, plain) in streams() {
            let ranges = ranges(compression, &packed, 2);
            let mut spans = Vec::new();
            let mut rest = Bytes::from(plain.clone());
            for span in ranges.iter().flat_map(|range| &range.spans) {
                spans.push(rest.split_to(usize::try_from(span.len).unwrap()));
            }
            let known = Known {
                spans,
                missing: 3,
                wrong: 4,
            };
            // All packed bytes but those of the second and the third range are lost.
            let mut lost = vec![0; packed.len()];
            let end = ranges[3].seek_point.packed.0 + LOOKAHEAD_LEN as u64;
            let kept = ranges[1].seek_point.packed.0..end;
            let kept = usize::try_from(kept.start).unwrap()..usize::try_from(kept.end).unwrap();
            lost[kept.clone()].copy_from_slice(&packed[kept]);
            let context = context_of(256 << 20);
            let decoded = Some(Arc::new(known) as _);
            let decoder = codec::start_indexed(compression, context, ranges.into_iter(), decoded);
            let outcome = drive(decoder, &lost, 50_000, 0);
            assert_eq!(outcome.end, Ok(()), "{compression}");
            assert!(outcome.plain == plain, "{compression}");
        }
    }

    #[test]
    fn stream_that_ends_too_early_is_truncated() {
        for (compression, packed, plain) in streams() {
            let ranges = ranges(compression, &packed, 1);
            let before = usize::try_from(ranges[2].seek_point.plain.0).unwrap();
            let cut = usize::try_from(ranges[3].seek_point.packed.0).unwrap() - 100;
            for pool in [4 << 20, 256 << 20] {
                let outcome = run(compression, &packed[..cut], 50_000, ranges.clone(), pool);
                assert!(outcome.end.is_err());
                assert!(outcome.plain.len() >= before);
                assert!(outcome.plain == plain[..outcome.plain.len()]);
            }
        }
    }

    #[test]
    fn index_with_wrong_offsets_fails_without_panic() {
        for (compression, packed, _) in streams() {
            let lies: [fn(&mut Vec<SeekRange>); 6] = [
                |ranges| ranges.swap(1, 2),
                |ranges| ranges[1].end = Packed(u64::MAX),
                |ranges| ranges[1].end = Packed(0),
                |ranges| ranges[1].seek_point.packed.0 += 1,
                |ranges| ranges[1].spans[0].len += 10 << 20,
                |ranges| ranges[1].seek_point.packed = Packed(u64::MAX),
            ];
            for lie in lies {
                for pool in [4 << 20, 256 << 20] {
                    let mut ranges = ranges(compression, &packed, 1);
                    lie(&mut ranges);
                    assert!(run(compression, &packed, 50_000, ranges, pool).end.is_err());
                }
            }
        }
    }
}
