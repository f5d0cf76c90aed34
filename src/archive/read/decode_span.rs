//! Decodes spans from the nearest seek point, and verifies them.

use std::fmt;
use std::time::Instant;

use bytes::Bytes;

use super::Reader;
use super::assemble::span_len;
use super::packed::{FetchMode, PackedBytes, Request};
use crate::archive::error::{Error, ReadError};
use crate::archive::scan::disk_cache_policy::DecodingClock;
use crate::base::buffer_pool::{Buffer, BufferPool, Closed};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::{self, FreeList};
use crate::base::sha256::Sha256;
use crate::codec::{self, Compression, Context, Decoder, Output, Pull, SeekPoint};
use crate::index::{Index, Span};

impl Reader {
    /// Decodes `span`, and caches those from the nearest seek point on, which a sequential reader needs.
    pub(super) fn decode_span(&self, span: &Span, mode: FetchMode) -> Result<Bytes, ReadError> {
        let first = self.seekable_before(span)?;
        let seek_point = first.seek_point.as_ref().ok_or(ReadError::Index)?;
        let extent = Extent::new(seek_point.packed, self.packed_end(span.number)?);
        let extent = extent.ok_or(ReadError::Index)?;
        let request = Request::find(&self.live_index, extent)?;
        let read_error = |error: Error| ReadError::at(&self.stats, span.plain, error);
        // Reserves everything at once, so that a running decoder never waits for another one.
        let needed_bytes = request.buffer_bytes()
            + codec::read_pool_bytes(self.compression())
            + span_len(span)? as u64;
        let reserved = self.budget.reserve(needed_bytes);
        let _reserved = reserved.map_err(|Closed| read_error(Error::Interrupted))?;
        let mut decoder = self.resume_decoder(seek_point).map_err(read_error)?;
        let mut packed = self.packed.open(request, mode).map_err(read_error)?;
        for number in first.number..span.number {
            let between = self.live_index.span(number)?;
            let bytes = self.decode_next(&between, &mut decoder, &mut packed)?;
            // In between may be all of a long stream, which the scan put on disk.
            if !self.spans.is_on_disk(&self.live_index, between.plain) {
                self.cache_span_on_disk(&between, &bytes, false);
            }
            self.spans.insert(number, bytes);
        }
        let bytes = self.decode_next(span, &mut decoder, &mut packed)?;
        self.cache_span_on_disk(span, &bytes, true);
        Ok(bytes)
    }

    pub(super) fn resume_decoder(&self, seek_point: &SeekPoint) -> Result<SpanDecoder, Error> {
        let context = Context {
            pool: BufferPool::with_free_list(codec::READ_POOL_BYTES, self.free_list.clone()),
            wants_seek_points: false,
            broker: self.broker.clone(),
            workers: 0,
        };
        Ok(SpanDecoder {
            decoder: codec::resume(self.compression(), context, seek_point)?,
            output: None,
            rest: Bytes::new(),
            clock: DecodingClock::new(&**self.packed.source(), &self.stats),
        })
    }

    /// Decodes and checks the plain bytes of `span`, which are next in `decoder`.
    pub(super) fn decode_next(
        &self,
        span: &Span,
        decoder: &mut SpanDecoder,
        packed: &mut PackedBytes,
    ) -> Result<Bytes, ReadError> {
        let len = span_len(span)?;
        if self.read_priority.is_closed() {
            return Err(ReadError::at(&self.stats, span.plain, Error::Interrupted));
        }
        let start = Instant::now();
        let bytes = decoder.take_bytes(&self.free_list, span.plain.start(), len, packed);
        self.stats.fill_nanoseconds.add_time_since(start);
        let bytes = bytes.map_err(|error| ReadError::at(&self.stats, span.plain, error))?;
        self.stats.decoded_spans.increment();
        for counter in [&self.stats.decoded_bytes, &self.stats.filled_bytes] {
            counter.add(bytes.len() as u64);
        }
        decoder.clock.count(bytes.len());
        let digest = self
            .packed
            .digests()
            .and_then(|digests| digests.plain(span.number));
        let has_digest = || digest.is_none_or(|digest| Sha256::of(&bytes) == digest);
        let has_hash = || span.hash.is_none_or(|hash| self.hash(&bytes) == hash);
        if bytes.len() != len || !has_digest() || !(self.is_digested(span) || has_hash()) {
            self.stats.damaged_spans.increment();
            return Err(ReadError::Damaged {
                extent: span.plain,
                cause: None,
            });
        }
        Ok(bytes)
    }

    /// Whether each block that only `span` is decoded from has a digest. Decoding is deterministic, so blocks
    /// with these digests, and a window from the index, prove the plain bytes.
    fn is_digested(&self, span: &Span) -> bool {
        let seek_point = span.seek_point.as_ref();
        let extent = seek_point
            .and_then(|point| Extent::new(point.packed, self.packed_end(span.number).ok()?));
        let request = extent.and_then(|extent| Request::find(&self.live_index, extent).ok());
        request.is_some_and(|request| request.blocks.are_all_digested())
    }

    /// The last span at or before `span` at which decoding can start.
    fn seekable_before(&self, span: &Span) -> Result<Span, ReadError> {
        let find = |index: &Index| index.seekable_before(span.number);
        let number = self.live_index.read(find)?;
        self.live_index.span(number.ok_or(ReadError::Index)?)
    }

    /// End of the packed bytes that span `number` is decoded from: the next seek point, or the source's end.
    pub(super) fn packed_end(&self, number: u32) -> Result<Packed, ReadError> {
        let next = self.live_index.read(|index| {
            (number + 1..index.span_count()).find_map(|number| index.seek_offset(number))
        })?;
        let index = self.live_index.lock();
        let origin = index.origin();
        let slack = match origin.compression {
            Compression::None => 0,
            _ => codec::LOOKAHEAD_LEN as u64,
        };
        let len = origin.packed_bytes;
        let end = next.map_or(len, |next| next.0.saturating_add(slack).min(len));
        Ok(Packed(end))
    }
}

/// Decodes an extent of the plain stream once, in order. It caches nothing.
pub struct PlainStream<'a> {
    reader: &'a Reader,
    decoder: SpanDecoder,
    packed: PackedBytes,
    /// The next span to decode.
    span: u32,
    /// The bytes that the caller has not taken yet.
    extent: Extent<Plain>,
    /// Whether digests verify all packed bytes, so that the last span need not be decoded to its end.
    is_digested: bool,
    /// Memory that is reserved while a span is decoded, and not while the caller has the bytes, because it may wait for
    /// memory, too.
    needed_bytes: u64,
}

impl fmt::Debug for PlainStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainStream")
            .field("extent", &self.extent)
            .finish_non_exhaustive()
    }
}

impl Reader {
    /// Starts to decode `extent`, which is not empty, from the seek point before it.
    pub(crate) fn stream(&self, extent: Extent<Plain>) -> Result<PlainStream<'_>, ReadError> {
        let last = Plain(extent.end().0.saturating_sub(1));
        let spans = |index: &Index| index.span_at(extent.start()).zip(index.span_at(last));
        let (first, last) = self.live_index.read(spans)?.ok_or(ReadError::Index)?;
        let first = self.seekable_before(&self.live_index.span(first)?)?;
        let seek_point = first.seek_point.as_ref().ok_or(ReadError::Index)?;
        let packed = Extent::new(seek_point.packed, self.packed_end(last)?);
        let request = Request::find(&self.live_index, packed.ok_or(ReadError::Index)?)?;
        let read_error = |error: Error| ReadError::at(&self.stats, extent, error);
        let needed_bytes = request.buffer_bytes()
            + codec::read_pool_bytes(self.compression())
            + codec::seek_point::MAX_SPAN_LEN;
        Ok(PlainStream {
            needed_bytes,
            is_digested: request.blocks.are_all_digested(),
            decoder: self.resume_decoder(seek_point).map_err(read_error)?,
            packed: self
                .packed
                .open(request, FetchMode::Normal)
                .map_err(read_error)?,
            span: first.number,
            reader: self,
            extent,
        })
    }
}

impl PlainStream<'_> {
    /// Returns the next bytes, at most a span of them; `None` at the end of the extent.
    ///
    /// # Errors
    /// When the bytes are unavailable, or differ from the indexed ones.
    pub fn next_bytes(&mut self) -> Result<Option<Bytes>, ReadError> {
        let reserved = self.reader.budget.reserve(self.needed_bytes);
        let interrupted =
            |Closed| ReadError::at(&self.reader.stats, self.extent, Error::Interrupted);
        let _reserved = reserved.map_err(interrupted)?;
        while !self.extent.is_empty() {
            let mut span = self.reader.live_index.span(self.span)?;
            self.span = self.span.saturating_add(1);
            if self.is_digested && span.plain.end() > self.extent.end() {
                // A part has no hash, and digests of its packed bytes have proved it.
                span.plain =
                    Extent::new(span.plain.start(), self.extent.end()).ok_or(ReadError::Index)?;
                span.hash = None;
            }
            let bytes = self
                .reader
                .decode_next(&span, &mut self.decoder, &mut self.packed)?;
            let Some(wanted) = span.plain.intersection(&self.extent) else {
                continue;
            };
            let rest = Extent::new(wanted.end(), self.extent.end());
            self.extent = rest.ok_or(ReadError::Index)?;
            let offset = |plain: Plain| usize::try_from(plain.0 - span.plain.start().0);
            let (Ok(start), Ok(end)) = (offset(wanted.start()), offset(wanted.end())) else {
                return Err(ReadError::Index);
            };
            return Ok(Some(bytes.slice(start..end)));
        }
        Ok(None)
    }
}

/// A decoder with the output that no caller has taken yet.
pub(super) struct SpanDecoder {
    decoder: Box<dyn Decoder>,
    output: Option<Output>,
    rest: Bytes,
    clock: DecodingClock,
}

enum DecodedPiece {
    Buffer(Buffer),
    Shared(Bytes),
}

impl SpanDecoder {
    /// Takes the next `len` plain bytes; fewer at the end. Does not copy a piece that is exactly these bytes.
    fn take_bytes(
        &mut self,
        free_list: &FreeList,
        start: Plain,
        len: usize,
        packed: &mut PackedBytes,
    ) -> Result<Bytes, Error> {
        let mut taken: Option<free_list::RecycledBuffer> = None;
        let mut missing = len;
        while missing > 0 {
            if self.rest.is_empty() {
                // Even an empty rest would keep its buffer from the decoder.
                self.rest = Bytes::new();
                match self.next_piece(packed)? {
                    Some(DecodedPiece::Buffer(buffer)) if missing == len && buffer.len() == len => {
                        match buffer.detach(start.0) {
                            Ok(memory) => return Ok(memory.freeze()),
                            Err(buffer) => self.rest = buffer.freeze(),
                        }
                    }
                    Some(DecodedPiece::Buffer(buffer)) => self.rest = buffer.freeze(),
                    Some(DecodedPiece::Shared(bytes)) => self.rest = bytes,
                    None => break,
                }
            }
            let part = self.rest.split_to(self.rest.len().min(missing));
            missing -= part.len();
            let taken = taken.get_or_insert_with(|| free_list.allocate_empty(len, start.0));
            taken.append(&part);
        }
        Ok(taken.map_or_else(Bytes::new, free_list::RecycledBuffer::freeze))
    }

    fn next_piece(&mut self, packed: &mut PackedBytes) -> Result<Option<DecodedPiece>, Error> {
        loop {
            if let Some(output) = &mut self.output {
                if let Some(buffer) = output.take_buffer() {
                    return Ok(Some(DecodedPiece::Buffer(buffer)));
                }
                if let Some(piece) = self.clock.measure(|| output.next_piece())? {
                    return Ok(Some(DecodedPiece::Shared(piece)));
                }
                self.output = None;
            }
            match self.clock.measure(|| self.decoder.pull())? {
                Pull::NeedInput => match packed.next()? {
                    Some(bytes) => self.decoder.push(bytes),
                    None => self.decoder.finish(),
                },
                Pull::Plain(bytes) => return Ok(Some(DecodedPiece::Shared(bytes))),
                Pull::Job(job) | Pull::OrderedJob(job) => {
                    self.output = Some(self.clock.measure(|| job.run())?);
                }
                Pull::WaitFor(ahead) => ahead.wait(),
                // Spans have hashes of their own, and a single read has no other threads.
                Pull::SeekPoint(_)
                | Pull::Speculative(_)
                | Pull::ChecksumStart(_)
                | Pull::ChecksumEnd { .. }
                | Pull::Warning(_) => {}
                Pull::End => return Ok(None),
            }
        }
    }
}
