//! No compression: packed bytes are plain bytes.

use bytes::Bytes;

use super::seek_point::MIN_SPAN_LEN;
use super::{Cause, Compression, Context, Error, Pull, SeekPoint};
use crate::base::extent::{Packed, Plain};

/// Passes bytes through, with a seek point before each multiple of [`MIN_SPAN_LEN`].
pub(super) struct Decoder {
    wants_seek_points: bool,
    input: Bytes,
    is_finished: bool,
    /// Offset of `input` in both coordinate systems.
    offset: u64,
    last: Option<u64>,
}

impl Decoder {
    pub(super) fn start(context: &Context) -> Self {
        Self {
            wants_seek_points: context.wants_seek_points,
            input: Bytes::new(),
            is_finished: false,
            offset: 0,
            last: None,
        }
    }

    pub(super) fn resume(context: &Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let offset = seek_point.packed.0;
        if (offset, 0, 0) != (seek_point.plain.0, seek_point.bit, seek_point.state)
            || !seek_point.window.is_empty()
        {
            let cause = Cause::malformed("not a seek point of a plain stream");
            return Err(cause.at(Compression::None, seek_point.packed));
        }
        Ok(Self {
            offset,
            last: Some(offset),
            ..Self::start(context)
        })
    }
}

impl super::Decoder for Decoder {
    fn push(&mut self, packed: Bytes) {
        debug_assert!(self.input.is_empty(), "pushed before input was needed");
        self.input = packed;
    }

    fn finish(&mut self) {
        self.is_finished = true;
    }

    fn pull(&mut self) -> Result<Pull, Error> {
        match (self.input.is_empty(), self.is_finished) {
            (false, _) => {}
            (true, true) => return Ok(Pull::End),
            (true, false) => return Ok(Pull::NeedInput),
        }
        if !self.wants_seek_points {
            self.offset = self.offset.saturating_add(self.input.len() as u64);
            return Ok(Pull::Plain(std::mem::take(&mut self.input)));
        }
        if self.offset.is_multiple_of(MIN_SPAN_LEN) && self.last != Some(self.offset) {
            self.last = Some(self.offset);
            let (packed, plain) = (Packed(self.offset), Plain(self.offset));
            return Ok(Pull::SeekPoint(SeekPoint::without_window(packed, plain, 0)));
        }
        let until_next = MIN_SPAN_LEN - self.offset % MIN_SPAN_LEN;
        let len =
            usize::try_from(until_next).map_or(self.input.len(), |len| len.min(self.input.len()));
        self.offset = self.offset.saturating_add(len as u64);
        Ok(Pull::Plain(self.input.split_to(len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer_pool::BufferPool;
    use crate::base::memory_reclaim::MemoryBroker;
    use crate::codec::Decoder as _;

    const MIB: usize = 1 << 20;

    fn context(seek_points: bool) -> Context {
        Context {
            pool: BufferPool::new(0),
            wants_seek_points: seek_points,
            broker: MemoryBroker::with_limit(0),
            workers: 0,
        }
    }

    /// Lengths of the pieces, and offsets of the seek points between them.
    fn run(mut decoder: Decoder, pushes: &[usize]) -> (Vec<usize>, Vec<u64>) {
        let mut pushes = pushes.iter();
        let (mut pieces, mut seek_points) = (Vec::new(), Vec::new());
        loop {
            match decoder.pull().expect("never fails") {
                Pull::NeedInput => match pushes.next() {
                    Some(&len) => decoder.push(Bytes::from(vec![0; len])),
                    None => decoder.finish(),
                },
                Pull::Plain(bytes) => pieces.push(bytes.len()),
                Pull::SeekPoint(seek_point) => {
                    assert_eq!(seek_point.packed.0, seek_point.plain.0);
                    seek_points.push(seek_point.plain.0);
                }
                Pull::End => return (pieces, seek_points),
                other => panic!("{other:?}"),
            }
        }
    }

    // Promises: seek-points
    #[test]
    fn seek_point_precedes_the_bytes_that_start_at_it() {
        let decoder = Decoder::start(&context(true));
        let (pieces, seek_points) = run(decoder, &[100, 2 * MIB, 1]);
        assert_eq!(pieces, [100, MIB - 100, MIB, 100, 1]);
        assert_eq!(seek_points, [0, 1 << 20, 2 << 20]);
    }

    #[test]
    fn pushes_pass_unchanged_without_seek_points() {
        let decoder = Decoder::start(&context(false));
        assert_eq!(run(decoder, &[5 * MIB, 7]), (vec![5 * MIB, 7], vec![]));
    }

    #[test]
    fn decoding_resumes_at_a_seek_point() {
        let seek_point = SeekPoint {
            packed: Packed(1 << 20),
            bit: 0,
            plain: Plain(1 << 20),
            state: 0,
            window: Bytes::new(),
        };
        let decoder = Decoder::resume(&context(true), &seek_point).expect("its own");
        assert_eq!(run(decoder, &[MIB + 1]), (vec![MIB, 1], vec![2 << 20]));
        let foreign = SeekPoint {
            plain: Plain(0),
            ..seek_point
        };
        assert!(Decoder::resume(&context(true), &foreign).is_err());
    }
}
