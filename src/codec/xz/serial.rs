//! Decodes a block that is too long for a job, in order.

use liblzma::stream::Stream;

use super::header::{CHUNK_HEADER_LEN, Check, Chunk, padding_len};
use super::lzma::{decoder, index_and_footer, run};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Plain;
use crate::base::memory_reclaim::MemoryGrant;
use crate::codec::Cause;
use crate::codec::walker::input_queue::InputQueue;
use crate::codec::walker::output_buffer::OutputBuffer;
use crate::codec::walker::{PullQueue, Step};

pub(super) struct Serial {
    decoder: Stream,
    _grant: MemoryGrant,
    check: Check,
    pub(super) piece: OutputBuffer,
    part: BlockPart,
    left: u64,
    header_len: usize,
    /// Of LZMA2 data.
    packed_len: u64,
    pub(super) plain_len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BlockPart {
    /// The block header, or an LZMA2 chunk.
    Chunk,
    /// The end of LZMA2 data, padding and check.
    Trailer,
}

impl Serial {
    pub(super) fn new(check: Check, header_len: usize, grant: MemoryGrant) -> Result<Self, Cause> {
        let mut decoder = decoder()?;
        run(&mut decoder, &check.stream_header(), &mut [])?;
        Ok(Self {
            decoder,
            _grant: grant,
            check,
            piece: OutputBuffer::default(),
            part: BlockPart::Chunk,
            left: header_len as u64,
            header_len,
            packed_len: 0,
            plain_len: 0,
        })
    }

    pub(super) fn unpadded_len(&self) -> u64 {
        self.packed_len + (self.header_len + self.check.len()) as u64
    }

    /// Decodes one part, or a piece of one. [`Step::End`] is the end of the block.
    pub(super) fn step(
        &mut self,
        input: &mut InputQueue,
        pool: &BufferPool,
        plain: &mut Plain,
        pulls: &mut PullQueue,
    ) -> Result<Step, Cause> {
        if self.left == 0 {
            return match self.part {
                BlockPart::Chunk => self.next_part(input),
                BlockPart::Trailer => self.end(),
            };
        }
        let front = input.front();
        if front.is_empty() {
            return Ok(Step::NeedInput);
        }
        let len = usize::try_from(self.left).map_or(front.len(), |left| left.min(front.len()));
        let source = front.get(..len).unwrap_or_default();
        let progress = run(&mut self.decoder, source, self.piece.spare_capacity(pool)?)?;
        if progress.is_ended || (progress.consumed == 0 && progress.produced == 0) {
            return Err(Cause::malformed("a block ends before its end"));
        }
        input.skip(progress.consumed as u64);
        self.left -= progress.consumed as u64;
        plain.0 = plain.0.saturating_add(progress.produced as u64);
        pulls.extend(self.piece.advance(progress.produced));
        Ok(Step::Progressed)
    }

    fn next_part(&mut self, input: &InputQueue) -> Result<Step, Cause> {
        let mut header = [0; CHUNK_HEADER_LEN];
        let len = input.len().min(CHUNK_HEADER_LEN);
        let header = header.get_mut(..len).unwrap_or_default();
        input.peek_into(0, header);
        match Chunk::parse(header) {
            None => return Ok(Step::NeedInput),
            Some(Err(cause)) => return Err(cause),
            Some(Ok(Chunk::End)) => {
                self.packed_len += 1;
                self.part = BlockPart::Trailer;
                self.left = 1 + padding_len(self.packed_len) + self.check.len() as u64;
            }
            Some(Ok(Chunk::Data {
                packed_len,
                plain_len,
            })) => {
                self.packed_len += packed_len;
                self.plain_len += plain_len;
                self.left = packed_len;
            }
        }
        Ok(Step::Progressed)
    }

    /// Makes liblzma confirm that the block is complete.
    pub(super) fn end(&mut self) -> Result<Step, Cause> {
        let rest = index_and_footer(self.check, self.unpadded_len(), self.plain_len);
        if run(&mut self.decoder, &rest, &mut [])?.is_ended {
            return Ok(Step::End);
        }
        Err(Cause::malformed("a block does not end at its end"))
    }
}
