//! Cuts the plain stream into spans as it goes by; pure.

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3Default;

use super::scan::Sink;
use crate::base::extent::{Extent, Plain};
use crate::codec::seek_point::{MAX_SPAN, MIN_SPAN};
use crate::codec::{SeekPoint, UNCOUNTED};
use crate::index::Span;

/// A span without a seek point at its end is cut here, so that none grows without bound: twice
/// [`MAX_SPAN`], because a checkpoint that is due at `MAX_SPAN` may have to wait for the end of a
/// compressed block.
pub(super) const LONGEST_SPAN: u64 = 2 * MAX_SPAN;

/// The span that is going by.
pub(super) struct Spans {
    number: u32,
    start: Plain,
    len: u64,
    seek_point: Option<SeekPoint>,
    /// Where the last seek point that was kept stands.
    last_seek: Option<Plain>,
    hasher: Xxh3Default,
}

impl Spans {
    /// The first span, at plain offset 0.
    pub(super) fn new() -> Self {
        Self {
            number: 0,
            start: Plain(0),
            len: 0,
            seek_point: None,
            last_seek: None,
            hasher: Xxh3Default::new(),
        }
    }

    /// The bytes from here on can be decoded on their own. Decoders whose jobs run out of order
    /// do not know where in the plain stream that is, and so offer a point too many: one that is
    /// closer than [`MIN_SPAN`] to the last and costs nothing to do without is left out.
    pub(super) fn seek_point<S: Sink>(&mut self, seek_point: SeekPoint, sink: &mut S) {
        let here = Plain(self.start.0 + self.len);
        debug_assert!([here, UNCOUNTED].contains(&seek_point.plain));
        let is_close = self
            .last_seek
            .is_some_and(|last| here.0 - last.0 < MIN_SPAN);
        if is_close && seek_point.window.is_empty() {
            return;
        }
        self.end(sink);
        self.last_seek = Some(here);
        self.seek_point = Some(SeekPoint {
            plain: here,
            ..seek_point
        });
    }

    /// The next bytes of the stream.
    pub(super) fn plain<S: Sink>(&mut self, bytes: &Bytes, sink: &mut S) {
        let mut rest = bytes.clone();
        while !rest.is_empty() {
            let room = LONGEST_SPAN - self.len;
            let piece = rest.split_to(rest.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
            self.hasher.update(&piece);
            self.len += piece.len() as u64;
            sink.span_piece(&piece);
            if self.len == LONGEST_SPAN {
                self.end(sink);
            }
        }
    }

    /// Ends the span that is going by, at the end of the stream too.
    pub(super) fn end<S: Sink>(&mut self, sink: &mut S) {
        if self.len == 0 {
            return;
        }
        sink.span_end(Span {
            number: self.number,
            plain: Extent::with_len(self.start, self.len),
            hash: self.hasher.digest(),
            seek_point: self.seek_point.take(),
        });
        self.number += 1;
        self.start = Plain(self.start.0 + self.len);
        self.len = 0;
        self.hasher.reset();
    }
}
