//! Decodes the parts of a stream that others have not decoded already, for formats whose decoders are parallel without an
//! index.
//!
//! Between two parts that others have, a decoder goes on as usual, with jobs and checksums. Its input ends with its part, so
//! an error there does not count. The number of its bytes is compared with the index.

use std::collections::VecDeque;
use std::iter::Peekable;
use std::sync::Arc;

use bytes::Bytes;

use super::indexed::{index_mismatch, peek_lookahead};
use super::job::OutputCount;
use super::walker::input_queue::InputQueue;
use super::{
    Cause, Compression, Context, DecodedSpans, Decoder, Error, Job, LOOKAHEAD_LEN, Output, Pull,
    SeekRange, resume, start,
};
use crate::base::extent::{Packed, Plain};

type SeekRanges = Peekable<Box<dyn Iterator<Item = SeekRange> + Send>>;

/// As [`start`], for a stream that `ranges` cover in order. Skips those of which `decoded` has all spans.
pub(crate) fn start_around(
    compression: Compression,
    context: Context,
    ranges: impl Iterator<Item = SeekRange> + Send + 'static,
    decoded: Arc<dyn DecodedSpans>,
) -> Box<dyn Decoder> {
    let ranges: Box<dyn Iterator<Item = SeekRange> + Send> = Box::new(ranges);
    Box::new(AroundDecoder {
        compression,
        context,
        decoded,
        input: InputQueue::default(),
        ranges: ranges.peekable(),
        state: State::BetweenParts,
    })
}

struct AroundDecoder {
    compression: Compression,
    context: Context,
    decoded: Arc<dyn DecodedSpans>,
    input: InputQueue,
    ranges: SeekRanges,
    state: State,
}

enum State {
    BetweenParts,
    Decoding(Box<Part>),
    Found(FoundRange),
    Stopped(Result<(), Error>),
}

/// A range of which others have all spans.
struct FoundRange {
    packed: Packed,
    end: Packed,
    plain: Plain,
    pieces: VecDeque<Bytes>,
}

/// Ranges that others do not have, one after the other.
struct Part {
    decoder: Box<dyn Decoder>,
    /// Plain offset at which it starts.
    start: Plain,
    /// Packed offset at which its ranges end so far.
    end: Packed,
    count: Arc<OutputCount>,
    /// The range after it, once it is known.
    next: Option<FoundRange>,
    flush: Flush,
}

/// Input of the decoder of a part after the part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flush {
    Nothing,
    Lookahead,
    /// The end of the input.
    End,
}

impl AroundDecoder {
    /// Advances by one step; `None` when there is nothing to return yet.
    fn step(&mut self) -> Result<Option<Pull>, Error> {
        match &mut self.state {
            State::BetweenParts => {
                self.state = match self.ranges.next() {
                    None => State::Stopped(Ok(())),
                    Some(range) => match self.find(&range) {
                        Some(found) => State::Found(found),
                        None => State::Decoding(Box::new(self.start_part(&range)?)),
                    },
                };
                Ok(None)
            }
            State::Found(found) => {
                let (packed, end, bytes) = (found.packed, found.end, found.pieces.pop_front());
                match bytes {
                    Some(bytes) => self.copy_to_pool(&bytes, packed),
                    None => self.skip_to(end),
                }
            }
            State::Decoding(_) => self.decode(),
            State::Stopped(how) => how.clone().map(|()| Some(Pull::End)),
        }
    }

    fn find(&self, range: &SeekRange) -> Option<FoundRange> {
        // Until they are copied into the pool, the spans are beside it.
        if !range.fits_job(self.context.pool.budget()) || self.context.pool.is_closed() {
            return None;
        }
        let numbered = (range.first_span..).zip(&range.spans);
        let pieces = numbered.map(|(number, &expected)| self.decoded.find(number, expected));
        Some(FoundRange {
            packed: range.seek_point.packed,
            end: range.end,
            plain: range.seek_point.plain,
            pieces: pieces.collect::<Option<_>>()?,
        })
    }

    fn start_part(&self, range: &SeekRange) -> Result<Part, Error> {
        let (compression, context) = (self.compression, self.context.clone());
        let seek_point = &range.seek_point;
        let decoder = if self.input.offset() == Packed(0) && seek_point.plain == Plain(0) {
            start(compression, context)
        } else if self.input.offset() == seek_point.packed {
            resume(compression, context, seek_point)?
        } else {
            return Err(index_mismatch(compression, seek_point.packed));
        };
        Ok(Part {
            decoder,
            start: seek_point.plain,
            end: range.end,
            count: Arc::default(),
            next: None,
            flush: Flush::Nothing,
        })
    }

    fn copy_to_pool(&self, bytes: &[u8], packed: Packed) -> Result<Option<Pull>, Error> {
        let buffer = self.context.pool.acquire(bytes.len());
        let mut buffer =
            buffer.map_err(|closed| Cause::from(closed).at(self.compression, packed))?;
        buffer.copy_from_slice(bytes);
        Ok(Some(Pull::Plain(buffer.freeze())))
    }

    /// Skips packed bytes up to `end`, where the next range begins.
    fn skip_to(&mut self, end: Packed) -> Result<Option<Pull>, Error> {
        let Some(left) = end.0.checked_sub(self.input.offset().0) else {
            return Err(index_mismatch(self.compression, end));
        };
        if self.input.skip(left) < left {
            return self.need_input();
        }
        self.state = State::BetweenParts;
        Ok(None)
    }

    fn need_input(&self) -> Result<Option<Pull>, Error> {
        if self.input.is_finished() {
            return Err(Cause::Truncated.at(self.compression, self.input.end()));
        }
        Ok(Some(Pull::NeedInput))
    }

    fn decode(&mut self) -> Result<Option<Pull>, Error> {
        let State::Decoding(part) = &mut self.state else {
            return Ok(None);
        };
        let has_next = part.next.is_some();
        let pulled = match part.decoder.pull() {
            // The input beyond the part is incomplete.
            Ok(Pull::End) | Err(_) if has_next => return Ok(self.end_part()),
            pulled => pulled?,
        };
        Ok(match pulled {
            Pull::NeedInput => return self.feed(),
            Pull::Plain(bytes) => {
                let job = part.count.count(Job::new(move || Ok(bytes)));
                Some(Pull::OrderedJob(job))
            }
            Pull::Job(job) => Some(Pull::Job(part.count.count(job))),
            Pull::OrderedJob(job) => Some(Pull::OrderedJob(part.count.count(job))),
            Pull::SeekPoint(_) => None,
            Pull::ChecksumStart(_) | Pull::Warning(_) if has_next => None,
            Pull::End if self.ranges.peek().is_some() => {
                return Err(index_mismatch(self.compression, part.end));
            }
            Pull::End => {
                self.state = State::Stopped(Ok(()));
                None
            }
            pull @ (Pull::Speculative(_)
            | Pull::WaitFor(_)
            | Pull::ChecksumStart(_)
            | Pull::ChecksumEnd { .. }
            | Pull::Warning(_)) => Some(pull),
        })
    }

    /// Gives the decoder of the part its next bytes.
    fn feed(&mut self) -> Result<Option<Pull>, Error> {
        let State::Decoding(part) = &mut self.state else {
            return Ok(None);
        };
        let left = part.end.0.saturating_sub(self.input.offset().0);
        if left == 0 {
            return if part.next.is_some() {
                self.flush()
            } else {
                self.extend_part()
            };
        }
        let len = self.input.front().len();
        let len = usize::try_from(left).map_or(len, |left| left.min(len));
        match self
            .input
            .take(len)
            .and_then(|mut taken| taken.slices.pop())
        {
            Some(slice) => part.decoder.push(slice),
            None if self.input.is_finished() => part.decoder.finish(),
            None => return Ok(Some(Pull::NeedInput)),
        }
        Ok(None)
    }

    /// Chooses whether the next range is part of the part, which is fed.
    fn extend_part(&mut self) -> Result<Option<Pull>, Error> {
        let range = self.ranges.next();
        let found = range.as_ref().and_then(|range| self.find(range));
        let State::Decoding(part) = &mut self.state else {
            return Ok(None);
        };
        let Some(range) = range else {
            // Up to the end of the stream.
            part.end = Packed(u64::MAX);
            return Ok(None);
        };
        match found {
            Some(found) => {
                let len = found.plain.0.checked_sub(part.start.0);
                let len = len.ok_or_else(|| index_mismatch(self.compression, found.packed))?;
                part.count.expect(len);
                part.next = Some(found);
            }
            None => part.end = range.end.max(part.end),
        }
        Ok(None)
    }

    /// Has the decoder of the part make the rest of it.
    fn flush(&mut self) -> Result<Option<Pull>, Error> {
        let State::Decoding(part) = &mut self.state else {
            return Ok(None);
        };
        match part.flush {
            // It finds the end of a block by the next one.
            Flush::Nothing if self.compression == Compression::Bzip2 => {
                if self.input.len() < LOOKAHEAD_LEN && !self.input.is_finished() {
                    return Ok(Some(Pull::NeedInput));
                }
                part.decoder.push(peek_lookahead(&self.input));
                part.flush = Flush::Lookahead;
                Ok(None)
            }
            Flush::Nothing | Flush::Lookahead => {
                part.decoder.finish();
                part.flush = Flush::End;
                Ok(None)
            }
            Flush::End => Err(index_mismatch(self.compression, part.end)),
        }
    }

    /// Goes on to the range after the part, once all bytes of the part are made.
    fn end_part(&mut self) -> Option<Pull> {
        let State::Decoding(part) = std::mem::replace(&mut self.state, State::BetweenParts) else {
            return None;
        };
        self.state = State::Found(part.next?);
        let error = index_mismatch(self.compression, part.end);
        let count = part.count;
        Some(Pull::OrderedJob(Job::new(move || {
            count.is_as_expected().then(Output::default).ok_or(error)
        })))
    }
}

impl Decoder for AroundDecoder {
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
                Err(error) => {
                    self.state = State::Stopped(Err(error.clone()));
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::base::span_hash;
    use crate::codec::ExpectedSpan;
    use crate::codec::test_support::{context, decode, drive, text};

    const BLOCK_LEN: u64 = 1000;

    fn bzip2(plain: &[u8]) -> Vec<u8> {
        let level = ::bzip2::Compression::fast();
        let mut encoder = ::bzip2::write::BzEncoder::new(Vec::new(), level);
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn xz(plain: &[u8]) -> Vec<u8> {
        let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 0);
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(plain: &[u8]) -> Vec<u8> {
        let mut encoder = ::zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    /// Streams with many seek points, within a stream of the format and between them.
    fn streams() -> Vec<(Compression, Vec<u8>, Vec<u8>)> {
        let mut plain = text(14 << 20);
        // Blocks of bzip2 that are far longer than others.
        plain.extend(vec![0; 6 << 20]);
        plain.extend(text(5 << 20));
        let parts = |pack: fn(&[u8]) -> Vec<u8>| plain.chunks(3_000_000).flat_map(pack).collect();
        vec![
            (Compression::Bzip2, bzip2(&plain), plain.clone()),
            (Compression::Bzip2, parts(bzip2), plain.clone()),
            (Compression::Xz, parts(xz), plain.clone()),
            (Compression::Zstd, parts(zstd), plain.clone()),
        ]
    }

    /// Ranges of an index of the stream, and the plain bytes of each, which is one span.
    fn ranges(compression: Compression, packed: &[u8]) -> (Vec<SeekRange>, Vec<Bytes>) {
        let outcome = decode(compression, packed, 100_000);
        assert_eq!(outcome.end, Ok(()));
        let points = &outcome.seek_points;
        assert!(points.len() > 5, "{compression}: or nothing is tested");
        let ends = points
            .iter()
            .skip(1)
            .map(|point| (point.packed, point.plain));
        let last = (
            Packed(packed.len() as u64),
            Plain(outcome.plain.len() as u64),
        );
        let ends = ends.chain([last]);
        let numbered = (0..).zip(points).zip(ends);
        let made = numbered.map(|((number, point), (end, plain_end))| {
            let start = usize::try_from(point.plain.0).unwrap();
            let plain = &outcome.plain[start..usize::try_from(plain_end.0).unwrap()];
            let span = ExpectedSpan {
                len: plain.len() as u64,
                hash: span_hash::of_bytes(plain, BLOCK_LEN),
            };
            let range = SeekRange {
                seek_point: point.clone(),
                end,
                first_span: number,
                spans: [span].into(),
                block_len: BLOCK_LEN,
            };
            (range, Bytes::copy_from_slice(plain))
        });
        made.unzip()
    }

    /// Some spans of a stream.
    #[derive(Debug)]
    struct Some32 {
        spans: Vec<Bytes>,
        mask: u32,
    }

    impl DecodedSpans for Some32 {
        fn find(&self, number: u32, expected: ExpectedSpan) -> Option<Bytes> {
            let bytes = self.spans[number as usize].clone();
            assert!(expected.is_of(&bytes, BLOCK_LEN));
            (self.mask >> (number % 32) & 1 == 1).then_some(bytes)
        }
    }

    fn run(
        compression: Compression,
        packed: &[u8],
        push_len: usize,
        (ranges, spans): (Vec<SeekRange>, Vec<Bytes>),
        mask: u32,
    ) -> crate::codec::test_support::Outcome {
        let context = Context {
            wants_seek_points: false,
            ..context()
        };
        let known = Arc::new(Some32 { spans, mask });
        drive(
            start_around(compression, context, ranges.into_iter(), known),
            packed,
            push_len,
            0,
        )
    }

    // Promises: shared-commands
    #[test]
    fn streams_are_whole_whatever_parts_others_have() {
        for (compression, packed, plain) in streams() {
            let made = ranges(compression, &packed);
            for mask in [
                0,
                u32::MAX,
                1,
                !1,
                0x5555_5555,
                0xAAAA_AAAA,
                0b1100_1110,
                0x8421_3007,
            ] {
                for push_len in [100_003, packed.len()] {
                    let outcome = run(compression, &packed, push_len, made.clone(), mask);
                    assert_eq!(outcome.end, Ok(()), "{compression} {mask:x}");
                    assert!(outcome.plain == plain, "{compression} {mask:x}");
                }
            }
        }
    }

    #[test]
    fn found_parts_are_not_decoded_and_others_are_checked() {
        for (compression, packed, plain) in streams() {
            let made = ranges(compression, &packed);
            let range = &made.0[2];
            let at =
                usize::try_from(u64::midpoint(range.seek_point.packed.0, range.end.0)).unwrap();
            let mut damaged = packed.clone();
            damaged[at] ^= 0x10;
            let outcome = run(compression, &damaged, 100_003, made.clone(), 0b100);
            assert_eq!(outcome.end, Ok(()), "{compression}");
            assert!(outcome.plain == plain, "{compression}");
            let outcome = run(compression, &damaged, 100_003, made, 0b1011);
            assert!(outcome.end.is_err(), "{compression}");
        }
    }

    #[test]
    fn index_of_other_lengths_is_refused() {
        for (compression, packed, _) in streams() {
            for shift in [1, u64::MAX] {
                let mut made = ranges(compression, &packed);
                let plain = &mut made.0[3].seek_point.plain.0;
                *plain = plain.wrapping_add(shift);
                let outcome = run(compression, &packed, 100_003, made, 0b1000);
                assert!(outcome.end.is_err(), "{compression} {shift}");
            }
        }
    }

    #[test]
    fn cut_stream_is_truncated() {
        for (compression, packed, plain) in streams() {
            for mask in [0, 0b1010] {
                let made = ranges(compression, &packed);
                let cut = &packed[..packed.len() / 2];
                let outcome = run(compression, cut, 100_003, made, mask);
                assert!(outcome.end.is_err(), "{compression} {mask}");
                assert!(plain.starts_with(&outcome.plain), "{compression} {mask}");
            }
        }
    }
}
