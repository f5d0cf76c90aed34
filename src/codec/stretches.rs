//! Decoding along seek points that are known already: whatever lies between two is a job.
//!
//! Only streams that cannot be cut otherwise are worth it: those whose seek points carry windows.

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;

use super::input::{Input, Pieces};
use super::{
    Cause, Compression, Context, Decoder, Error, Job, Output, Pull, SLACK, SeekPoint, resume,
};
use crate::base::extent::Packed;
use crate::base::span_hash::SpanHasher;

/// A stretch is a job when its packed and its plain bytes are each at most one part in so many of
/// the buffer budget, so that several are alive at once.
const JOB_SHARE: u64 = 4;

/// What a decoder takes from its pool beyond the plain bytes: the rest of its last buffer.
const ROUNDING: u64 = 1 << 20;

/// From one seek point to the next.
#[derive(Clone, Debug)]
pub struct Stretch {
    /// Where it begins.
    pub seek_point: SeekPoint,
    /// Where the next one begins, or the packed stream ends.
    pub end: Packed,
    /// The spans that it decodes to, never none.
    pub spans: VecDeque<Sum>,
    /// The length of the blocks that the hashes of spans consist of.
    pub block_len: u64,
}

/// How long a span is and what it must hash to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sum {
    /// Plain bytes.
    pub len: u64,
    /// Their hash, as [`SpanHasher`] takes it.
    pub hash: u64,
}

impl Stretch {
    fn plain_len(&self) -> u64 {
        let lens = self.spans.iter().map(|span| span.len);
        lens.fold(0, u64::saturating_add)
    }

    fn packed_len(&self) -> u64 {
        self.end.0.saturating_sub(self.seek_point.packed.0)
    }
}

/// Stretches in stream order, which together are the whole stream.
pub(super) type Iter = Box<dyn Iterator<Item = Stretch> + Send>;

/// Decodes stretch by stretch.
pub(super) struct Along {
    compression: Compression,
    context: Context,
    input: Input,
    stretches: Iter,
    state: State,
}

enum State {
    /// Before the next stretch.
    Between,
    /// Before the packed bytes of a stretch are at hand.
    Gathering(Stretch),
    /// In a stretch that is decoded in order.
    Serial(Box<Serial>),
    Stopped(Result<(), Error>),
}

/// Decodes a stretch that is too long for a job.
struct Serial {
    decoder: Box<dyn Decoder>,
    check: Check,
    end: Packed,
    fed: Fed,
    /// What a job of the decoder makes.
    output: Option<Output>,
}

/// How much of a stretch its decoder has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fed {
    Some,
    /// All, and what it may want to see behind.
    All,
    /// And it knows that there is no more.
    Finished,
}

impl Along {
    pub(super) fn new(compression: Compression, context: Context, stretches: Iter) -> Self {
        Self {
            compression,
            context,
            input: Input::default(),
            stretches,
            state: State::Between,
        }
    }

    /// Moves on; `None` when there is nothing to answer yet.
    fn step(&mut self) -> Result<Option<Pull>, Error> {
        match &mut self.state {
            State::Between => {
                self.state = match self.stretches.next() {
                    Some(stretch) => State::Gathering(stretch),
                    None => State::Stopped(Ok(())),
                };
                Ok(None)
            }
            State::Gathering(_) => self.gather(),
            State::Serial(serial) => {
                let pulled = serial.pull(&mut self.input)?;
                if serial.check.is_done() {
                    self.state = State::Between;
                }
                Ok(pulled)
            }
            State::Stopped(how) => how.clone().map(|()| Some(Pull::End)),
        }
    }

    fn gather(&mut self) -> Result<Option<Pull>, Error> {
        let State::Gathering(stretch) = &self.state else {
            return Ok(None);
        };
        let packed = stretch.seek_point.packed;
        let Some(lead) = packed.0.checked_sub(self.input.offset().0) else {
            return Err(foreign(self.compression, packed));
        };
        if self.input.skip(lead) < lead {
            return self.starve();
        }
        let most = self.context.pool.budget() / JOB_SHARE;
        let (packed_len, plain_len) = (stretch.packed_len(), stretch.plain_len());
        if packed_len.max(plain_len) > most {
            let decoder = resume(self.compression, self.context.clone(), &stretch.seek_point)?;
            self.state = State::Serial(Box::new(Serial {
                decoder,
                check: Check::new(self.compression, stretch),
                end: stretch.end,
                fed: Fed::Some,
                output: None,
            }));
            return Ok(None);
        }
        let len = usize::try_from(packed_len).unwrap_or(usize::MAX);
        if self.input.len() < len.saturating_add(SLACK) && !self.input.is_ended() {
            return Ok(Some(Pull::NeedInput));
        }
        let Some(pieces) = self.input.take(len) else {
            return self.starve();
        };
        let slack = slack(&self.input);
        let State::Gathering(stretch) = std::mem::replace(&mut self.state, State::Between) else {
            return Ok(None);
        };
        let (compression, mut context) = (self.compression, self.context.clone());
        // In stream order, and all at once: a job never waits.
        let ration = context.pool.preallocate(plain_len.saturating_add(ROUNDING));
        context.pool = ration.map_err(|closed| Error {
            compression,
            packed,
            cause: closed.into(),
        })?;
        Ok(Some(Pull::Job(Job::of_pieces(move || {
            decode(compression, context, &stretch, &pieces, slack)
        }))))
    }

    fn starve(&self) -> Result<Option<Pull>, Error> {
        if self.input.is_ended() {
            return Err(Error {
                compression: self.compression,
                packed: self.input.end(),
                cause: Cause::Truncated,
            });
        }
        Ok(Some(Pull::NeedInput))
    }
}

impl Decoder for Along {
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

impl fmt::Debug for Along {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Along")
            .field("compression", &self.compression)
            .field("input", &self.input)
            .finish_non_exhaustive()
    }
}

impl Serial {
    /// The next plain bytes of the stretch, or [`Pull::NeedInput`]; `None` when it only moved on.
    fn pull(&mut self, input: &mut Input) -> Result<Option<Pull>, Error> {
        if let Some(output) = &mut self.output {
            if let Some(bytes) = output.next_piece()? {
                return Ok(self.check.pass(&bytes)?.map(Pull::Plain));
            }
            self.output = None;
        }
        match self.decoder.pull()? {
            Pull::NeedInput => match self.fed {
                Fed::Some => Ok(self.feed(input)),
                Fed::All => {
                    self.decoder.finish();
                    self.fed = Fed::Finished;
                    Ok(None)
                }
                Fed::Finished => Err(self.check.foreign()),
            },
            Pull::Plain(bytes) => Ok(self.check.pass(&bytes)?.map(Pull::Plain)),
            Pull::Job(job) | Pull::Check(job) => {
                self.output = Some(job.run()?);
                Ok(None)
            }
            // From a seek point, nothing is decoded ahead.
            Pull::SeekPoint(_)
            | Pull::Ahead(_)
            | Pull::Await(_)
            | Pull::HashStart(_)
            | Pull::HashEnd { .. }
            | Pull::Warning(_) => Ok(None),
            Pull::End => Err(self.check.foreign()),
        }
    }

    fn feed(&mut self, input: &mut Input) -> Option<Pull> {
        let left = self.end.0.saturating_sub(input.offset().0);
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        if left == 0 {
            if input.len() < SLACK && !input.is_ended() {
                return Some(Pull::NeedInput);
            }
            self.decoder.push(slack(input));
            self.fed = Fed::All;
            return None;
        }
        let front = input.front().len().min(left);
        if front == 0 && !input.is_ended() {
            return Some(Pull::NeedInput);
        }
        if let Some([slice]) = input.take(front).as_ref().map(Pieces::slices) {
            self.decoder.push(slice.clone());
        } else {
            self.fed = Fed::All;
        }
        None
    }
}

/// The bytes behind a stretch that its decoder may want to see.
fn slack(input: &Input) -> Bytes {
    let mut slack = vec![0; input.len().min(SLACK)];
    input.peek_into(0, &mut slack);
    slack.into()
}

fn decode(
    compression: Compression,
    context: Context,
    stretch: &Stretch,
    pieces: &Pieces,
    slack: Bytes,
) -> Result<Vec<Bytes>, Error> {
    let mut decoder = resume(compression, context, &stretch.seek_point)?;
    let mut check = Check::new(compression, stretch);
    let slices = pieces.slices().iter().cloned().chain([slack]);
    let mut slices = slices.filter(|slice| !slice.is_empty());
    let mut plain = Vec::new();
    while !check.is_done() {
        match decoder.pull()? {
            Pull::NeedInput => match slices.next() {
                Some(slice) => decoder.push(slice),
                None => decoder.finish(),
            },
            Pull::Plain(bytes) => plain.extend(check.pass(&bytes)?),
            Pull::Job(job) | Pull::Check(job) => {
                let mut output = job.run()?;
                while let Some(bytes) = output.next_piece()? {
                    plain.extend(check.pass(&bytes)?);
                }
            }
            // From a seek point, nothing is decoded ahead.
            Pull::SeekPoint(_)
            | Pull::Ahead(_)
            | Pull::Await(_)
            | Pull::HashStart(_)
            | Pull::HashEnd { .. }
            | Pull::Warning(_) => {}
            Pull::End => return Err(check.foreign()),
        }
    }
    Ok(plain)
}

/// Compares what is decoded with what was indexed.
struct Check {
    compression: Compression,
    /// Where the stretch begins.
    packed: Packed,
    /// The first is shortened as its bytes go by.
    spans: VecDeque<Sum>,
    hasher: SpanHasher,
}

impl Check {
    fn new(compression: Compression, stretch: &Stretch) -> Self {
        Self {
            compression,
            packed: stretch.seek_point.packed,
            spans: stretch.spans.clone(),
            hasher: SpanHasher::new(stretch.block_len),
        }
    }

    fn is_done(&self) -> bool {
        self.spans.is_empty()
    }

    /// What of `bytes` belongs to the stretch; nothing when that is none.
    fn pass(&mut self, bytes: &Bytes) -> Result<Option<Bytes>, Error> {
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
            if expected != computed {
                return Err(self.error(Cause::Checksum {
                    what: "the hash in the saved index",
                    expected,
                    computed,
                }));
            }
            self.spans.pop_front();
        }
        Ok(Some(bytes.slice(..passed)).filter(|bytes| !bytes.is_empty()))
    }

    fn foreign(&self) -> Error {
        foreign(self.compression, self.packed)
    }

    fn error(&self, cause: Cause) -> Error {
        Error {
            compression: self.compression,
            packed: self.packed,
            cause,
        }
    }
}

fn foreign(compression: Compression, packed: Packed) -> Error {
    let text = "the stream does not decode as its saved index says".to_owned();
    Error {
        compression,
        packed,
        cause: Cause::Malformed(text),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use crate::base::span_hash;

    use super::super::walk::tests::{Outcome, context, decode, drive, text};
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

    /// What an index of the stream says, with `spans` spans between each two seek points.
    fn stretches(compression: Compression, packed: &[u8], spans: usize) -> Vec<Stretch> {
        let outcome = decode(compression, packed, 100_000);
        assert!(outcome.seek_points.len() > 3, "or nothing is tested");
        let mut stretches = Vec::new();
        for (number, seek_point) in outcome.seek_points.iter().enumerate() {
            let next = outcome.seek_points.get(number + 1);
            let start = usize::try_from(seek_point.plain.0).unwrap();
            let end = next.map_or(outcome.plain.len(), |next| {
                usize::try_from(next.plain.0).unwrap()
            });
            let plain = &outcome.plain[start..end];
            let sums = plain.chunks(plain.len().div_ceil(spans)).map(|span| Sum {
                len: span.len() as u64,
                hash: span_hash::of_bytes(span, BLOCK_LEN),
            });
            stretches.push(Stretch {
                seek_point: seek_point.clone(),
                end: next.map_or(Packed(packed.len() as u64), |next| next.packed),
                spans: sums.collect(),
                block_len: BLOCK_LEN,
            });
        }
        stretches
    }

    fn run(
        compression: Compression,
        packed: &[u8],
        push_len: usize,
        stretches: Vec<Stretch>,
        pool: u64,
    ) -> Outcome {
        let context = Context {
            pool: BufferPool::new(pool),
            seek_points: false,
            ..context()
        };
        let decoder = codec::along(compression, context, stretches.into_iter());
        drive(decoder, packed, push_len, 0)
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
    fn a_stream_is_decoded_by_a_job_for_each_stretch_as_from_its_front() {
        for (compression, packed, plain) in streams() {
            let stretches = stretches(compression, &packed, 3);
            for push_len in [10_007, packed.len()] {
                let count = stretches.len();
                let outcome = run(compression, &packed, push_len, stretches.clone(), 256 << 20);
                assert_eq!(outcome.end, Ok(()));
                assert!(outcome.plain == plain, "{compression}");
                assert_eq!(outcome.jobs, count);
            }
        }
    }

    #[test]
    fn stretches_too_long_for_a_job_are_decoded_in_order() {
        for (compression, packed, plain) in streams() {
            let stretches = stretches(compression, &packed, 2);
            for push_len in [10_007, packed.len()] {
                let outcome = run(compression, &packed, push_len, stretches.clone(), 4 << 20);
                assert_eq!(outcome.end, Ok(()), "{compression}");
                assert!(outcome.plain == plain, "{compression}");
            }
        }
    }

    #[test]
    fn bytes_that_are_not_the_indexed_ones_are_an_error_behind_all_before() {
        for (compression, packed, plain) in streams() {
            for pool in [4 << 20, 256 << 20] {
                let mut stretches = stretches(compression, &packed, 2);
                let before = usize::try_from(stretches[2].seek_point.plain.0).unwrap();
                stretches[2].spans[1].hash ^= 1;
                let outcome = run(compression, &packed, 50_000, stretches, pool);
                let cause = outcome.end.unwrap_err().cause;
                assert!(matches!(cause, Cause::Checksum { .. }), "{cause:?}");
                assert!(outcome.plain.len() >= before);
                assert!(outcome.plain == plain[..outcome.plain.len()]);
            }
        }
    }

    #[test]
    fn a_stream_that_ends_too_early_is_truncated() {
        for (compression, packed, plain) in streams() {
            let stretches = stretches(compression, &packed, 1);
            let before = usize::try_from(stretches[2].seek_point.plain.0).unwrap();
            let cut = usize::try_from(stretches[3].seek_point.packed.0).unwrap() - 100;
            for pool in [4 << 20, 256 << 20] {
                let outcome = run(compression, &packed[..cut], 50_000, stretches.clone(), pool);
                assert!(outcome.end.is_err());
                assert!(outcome.plain.len() >= before);
                assert!(outcome.plain == plain[..outcome.plain.len()]);
            }
        }
    }

    #[test]
    fn an_index_that_lies_about_places_is_survived() {
        for (compression, packed, _) in streams() {
            let lies: [fn(&mut Vec<Stretch>); 6] = [
                |stretches| stretches.swap(1, 2),
                |stretches| stretches[1].end = Packed(u64::MAX),
                |stretches| stretches[1].end = Packed(0),
                |stretches| stretches[1].seek_point.packed.0 += 1,
                |stretches| stretches[1].spans[0].len += 10 << 20,
                |stretches| stretches[1].seek_point.packed = Packed(u64::MAX),
            ];
            for lie in lies {
                for pool in [4 << 20, 256 << 20] {
                    let mut stretches = stretches(compression, &packed, 1);
                    lie(&mut stretches);
                    assert!(
                        run(compression, &packed, 50_000, stretches, pool)
                            .end
                            .is_err()
                    );
                }
            }
        }
    }
}
