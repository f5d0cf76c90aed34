//! Splits the plain stream into spans; pure.

use bytes::Bytes;

use crate::archive::sink::Sink;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::span_hash::SpanHasher;
use crate::codec::seek_point::{MAX_SPAN_LEN, MIN_SPAN_LEN};
use crate::codec::{SeekPoint, UNKNOWN_PLAIN};
use crate::index::Span;

/// Maximum number of bytes hashed at once. They fit into the processor's cache, for the copy that follows.
const MAX_PIECE_BYTES: usize = 128 << 10;

pub(super) struct SpanSplitter {
    number: u32,
    start: Plain,
    len: u64,
    seek_point: Option<SeekPoint>,
    /// Offset of the last seek point that was not dropped.
    last_seek_point: Option<Plain>,
    hasher: SpanHasher,
}

impl SpanSplitter {
    /// Starts the first span, at plain offset 0. Each block of `block_len` bytes gets a checksum.
    pub(super) fn new(block_len: u64) -> Self {
        Self {
            number: 0,
            start: Plain(0),
            len: 0,
            seek_point: None,
            last_seek_point: None,
            hasher: SpanHasher::new(block_len),
        }
    }

    /// Starts a span at a seek point, unless it has no window and is closer than [`MIN_SPAN_LEN`] to the last
    /// one, which can replace it. Decoders with jobs out of order do not know the offset, and offer too many.
    pub(super) fn add_seek_point<S: Sink>(&mut self, seek_point: SeekPoint, sink: &mut S) {
        let here = Plain(self.start.0 + self.len);
        debug_assert!([here, UNKNOWN_PLAIN].contains(&seek_point.plain));
        let is_close = self
            .last_seek_point
            .is_some_and(|last| here.0 - last.0 < MIN_SPAN_LEN);
        if is_close && seek_point.window.is_empty() {
            return;
        }
        self.end_span(sink);
        self.last_seek_point = Some(here);
        self.seek_point = Some(SeekPoint {
            plain: here,
            ..seek_point
        });
    }

    pub(super) fn push<S: Sink>(&mut self, bytes: &Bytes, sink: &mut S) {
        let mut rest = bytes.clone();
        while !rest.is_empty() {
            let room = usize::try_from(MAX_SPAN_LEN - self.len).unwrap_or(usize::MAX);
            let piece = rest.split_to(rest.len().min(room).min(MAX_PIECE_BYTES));
            self.hasher.update(&piece);
            self.len += piece.len() as u64;
            sink.span_piece(&piece);
            if self.len == MAX_SPAN_LEN {
                self.end_span(sink);
            }
        }
    }

    /// Skips `len` bytes as spans without hashes. Fails without memory, because headers may claim any length.
    pub(super) fn skip<S: Sink>(&mut self, len: u64, sink: &mut S) -> Result<(), S::Error> {
        self.end_span(sink);
        let end = self.start.0 + len;
        while self.start.0 < end {
            let until = (self.start.0 / MIN_SPAN_LEN + 1) * MIN_SPAN_LEN;
            let plain = Extent::with_len(self.start, until.min(end) - self.start.0);
            let span = Span {
                number: self.number,
                plain,
                hash: None,
                seek_point: Some(plain_seek_point(self.start)),
            };
            sink.span_end(span, &[]);
            self.number += 1;
            self.start = plain.end();
            sink.check_memory()?;
        }
        self.seek_point = Some(plain_seek_point(self.start));
        self.last_seek_point = Some(self.start);
        Ok(())
    }

    pub(super) fn end_span<S: Sink>(&mut self, sink: &mut S) {
        if self.len == 0 {
            return;
        }
        let (hash, checksums) = self.hasher.finish();
        let span = Span {
            number: self.number,
            plain: Extent::with_len(self.start, self.len),
            hash: Some(hash),
            seek_point: self.seek_point.take(),
        };
        sink.span_end(span, &checksums);
        self.number += 1;
        self.start = Plain(self.start.0 + self.len);
        self.len = 0;
    }
}

pub(super) fn plain_seek_point(plain: Plain) -> SeekPoint {
    SeekPoint {
        packed: Packed(plain.0),
        bit: 0,
        plain,
        state: 0,
        window: Bytes::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::span_hash;
    use crate::tar::Member;
    use proptest::prelude::*;

    const BLOCK_LEN: u64 = 1000;

    /// Records spans, and the bytes between their ends.
    #[derive(Default)]
    struct RecordingSink {
        spans: Vec<Span>,
        bytes: Vec<Vec<u8>>,
        current: Vec<u8>,
    }

    impl Sink for RecordingSink {
        type Error = std::convert::Infallible;

        fn member(&mut self, _member: Member) -> Result<(), Self::Error> {
            Ok(())
        }

        fn warning(&mut self, _text: &str) {}

        fn damage(&mut self, _offset: Plain, _text: &str) {}

        fn span_piece(&mut self, bytes: &Bytes) {
            self.current.extend_from_slice(bytes);
        }

        fn span_end(&mut self, span: Span, _checksums: &[u64]) {
            self.spans.push(span);
            self.bytes.push(std::mem::take(&mut self.current));
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Next {
        Bytes(u64),
        Seek,
        Checkpoint,
    }

    fn seek_point(window: &'static [u8]) -> SeekPoint {
        SeekPoint {
            packed: Packed(0),
            bit: 0,
            plain: UNKNOWN_PLAIN,
            state: 0,
            window: Bytes::from_static(window),
        }
    }

    fn split(stream: &[Next]) -> RecordingSink {
        let (mut splitter, mut seen) = (SpanSplitter::new(BLOCK_LEN), RecordingSink::default());
        let mut number = 0_u8;
        for next in stream {
            match *next {
                Next::Bytes(len) => {
                    number = number.wrapping_add(1);
                    let len = usize::try_from(len).expect("small");
                    splitter.push(&Bytes::from(vec![number; len]), &mut seen);
                }
                Next::Seek => splitter.add_seek_point(seek_point(b""), &mut seen),
                Next::Checkpoint => splitter.add_seek_point(seek_point(b"window"), &mut seen),
            }
        }
        splitter.end_span(&mut seen);
        seen
    }

    /// Starts of spans, and whether decoding can start there.
    fn span_starts(stream: &[Next]) -> Vec<(u64, bool)> {
        let spans = split(stream).spans;
        let starts = spans
            .iter()
            .map(|span| (span.plain.start().0, span.seek_point.is_some()));
        starts.collect()
    }

    #[test]
    fn span_ends_where_the_next_seek_point_is() {
        let far = 2 * MIN_SPAN_LEN;
        let stream = [Next::Seek, Next::Bytes(far), Next::Seek, Next::Bytes(1)];
        assert_eq!(span_starts(&stream), [(0, true), (far, true)]);
    }

    #[test]
    fn seek_point_too_close_without_window_is_dropped() {
        let close = [Next::Bytes(MIN_SPAN_LEN - 1), Next::Seek, Next::Bytes(1)];
        let stream = [&[Next::Seek][..], &close, &[Next::Seek, Next::Bytes(1)]].concat();
        assert_eq!(span_starts(&stream), [(0, true), (MIN_SPAN_LEN, true)]);
        let stream = [
            Next::Seek,
            Next::Bytes(10),
            Next::Checkpoint,
            Next::Bytes(1),
        ];
        assert_eq!(span_starts(&stream), [(0, true), (10, true)]);
    }

    #[test]
    fn without_seek_points_spans_end_at_the_longest_length() {
        let stream = [Next::Seek, Next::Bytes(2 * MAX_SPAN_LEN + 5)];
        assert_eq!(
            span_starts(&stream),
            [(0, true), (MAX_SPAN_LEN, false), (2 * MAX_SPAN_LEN, false)]
        );
    }

    #[test]
    fn empty_stream_has_no_spans() {
        assert!(span_starts(&[]).is_empty());
        assert!(span_starts(&[Next::Seek, Next::Seek]).is_empty());
        let stream = [Next::Seek, Next::Seek, Next::Bytes(3)];
        assert_eq!(span_starts(&stream), [(0, true)]);
    }

    fn next() -> impl Strategy<Value = Next> {
        prop_oneof![
            (1..3 * MIN_SPAN_LEN).prop_map(Next::Bytes),
            Just(Next::Seek),
            Just(Next::Checkpoint),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn spans_cover_the_stream_and_hash_its_bytes(
            stream in prop::collection::vec(next(), 0..20)
        ) {
            let seen = split(&stream);
            let mut end = 0;
            for (number, (span, bytes)) in seen.spans.iter().zip(&seen.bytes).enumerate() {
                prop_assert_eq!(span.number as usize, number);
                prop_assert_eq!(span.plain.start().0, end);
                prop_assert!((1..=MAX_SPAN_LEN).contains(&span.plain.len()));
                prop_assert_eq!(span.plain.len(), bytes.len() as u64);
                prop_assert_eq!(span.hash, Some(span_hash::of_bytes(bytes, BLOCK_LEN)));
                let place = span.seek_point.as_ref().map(|seek_point| seek_point.plain);
                prop_assert!(place.is_none_or(|place| place == span.plain.start()));
                end = span.plain.end().0;
            }
            let total: u64 = stream
                .iter()
                .map(|next| if let Next::Bytes(len) = next { *len } else { 0 })
                .sum();
            prop_assert_eq!(end, total);
        }
    }
}
