//! Queue of plain bytes that collects many small pieces in one buffer.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::base::buffer_pool::{Buffer, BufferPool, Closed};
use crate::codec::{Pull, SeekPoint};

/// Collects plain bytes in pooled buffers, with seek points between them, as pulls. A buffer is returned when
/// it is full or the caller waits. Pieces around a seek point share one.
pub(super) struct OutputQueue {
    pool: BufferPool,
    buffer: Option<Buffer>,
    filled: usize,
    /// Seek points in the current buffer, each before the byte at its position.
    marks: Vec<(usize, SeekPoint)>,
    ready: VecDeque<Pull>,
}

impl OutputQueue {
    pub(super) fn new(pool: BufferPool) -> Self {
        Self {
            pool,
            buffer: None,
            filled: 0,
            marks: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Space for the next plain bytes, never empty; a new buffer has `len` bytes, at least one. May wait for
    /// buffers to be returned, so the caller must have pulled all ready output.
    pub(super) fn spare_capacity(&mut self, len: usize) -> Result<&mut [u8], Closed> {
        let buffer = match self.buffer.take() {
            Some(buffer) => buffer,
            None => self.pool.acquire(len.max(1))?,
        };
        let buffer = self.buffer.insert(buffer);
        Ok(buffer.get_mut(self.filled..).unwrap_or_default())
    }

    /// Whether no buffer is held, neither to be filled nor to be pulled.
    pub(super) fn is_drained(&self) -> bool {
        self.buffer.is_none() && self.ready.is_empty()
    }

    /// Counts the first `len` bytes of the last [`OutputQueue::spare_capacity`] as filled.
    pub(super) fn advance(&mut self, len: usize) {
        self.filled = self.filled.saturating_add(len);
        let buffer = self.buffer.as_ref();
        if buffer.is_some_and(|buffer| self.filled >= buffer.len()) {
            self.flush();
        }
    }

    pub(super) fn push_seek_point(&mut self, seek_point: SeekPoint) {
        if self.filled == 0 {
            self.ready.push_back(Pull::SeekPoint(seek_point));
        } else {
            self.marks.push((self.filled, seek_point));
        }
    }

    pub(super) fn push(&mut self, pull: Pull) {
        self.flush();
        self.ready.push_back(pull);
    }

    /// Puts something first, because its place does not matter.
    pub(super) fn push_unordered(&mut self, pull: Pull) {
        self.ready.push_back(pull);
    }

    pub(super) fn flush(&mut self) {
        let Some(mut buffer) = self.buffer.take().filter(|_| self.filled > 0) else {
            return;
        };
        buffer.truncate(self.filled);
        self.filled = 0;
        let marks = std::mem::take(&mut self.marks);
        self.push_with_seek_points(buffer.freeze(), marks);
    }

    /// Appends `rest`, with `marks` before the bytes at their positions. All earlier output must be ready.
    pub(super) fn push_with_seek_points(
        &mut self,
        mut rest: Bytes,
        marks: Vec<(usize, SeekPoint)>,
    ) {
        let mut start = 0;
        for (position, seek_point) in marks {
            push_plain(&mut self.ready, rest.split_to(position - start));
            self.ready.push_back(Pull::SeekPoint(seek_point));
            start = position;
        }
        push_plain(&mut self.ready, rest);
    }

    pub(super) fn pull(&mut self) -> Option<Pull> {
        self.ready.pop_front()
    }
}

fn push_plain(ready: &mut VecDeque<Pull>, bytes: Bytes) {
    if !bytes.is_empty() {
        ready.push_back(Pull::Plain(bytes));
    }
}
