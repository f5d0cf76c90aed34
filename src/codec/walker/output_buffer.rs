//! Buffers for plain bytes, for decoders that decode in order.

use crate::base::buffer_pool::{Buffer, BufferPool, Closed};
use crate::codec::Pull;

/// Length of a piece in bytes, unless it is flushed early.
const BUFFER_LEN: usize = 1 << 20;

/// A buffer that fills up. It is taken from the pool for its first byte.
#[derive(Debug, Default)]
pub(crate) struct OutputBuffer {
    buffer: Option<Buffer>,
    filled: usize,
}

impl OutputBuffer {
    /// Space for the next plain bytes, never empty.
    pub(crate) fn spare_capacity(&mut self, pool: &BufferPool) -> Result<&mut [u8], Closed> {
        let buffer = match self.buffer.take() {
            Some(buffer) => buffer,
            None => pool.acquire(BUFFER_LEN)?,
        };
        let buffer = self.buffer.insert(buffer);
        Ok(buffer.get_mut(self.filled..).unwrap_or_default())
    }

    /// Counts `len` bytes written to the space. Returns a full buffer as a pull.
    pub(crate) fn advance(&mut self, len: usize) -> Option<Pull> {
        self.filled += len;
        let full = self.buffer.as_ref().map_or(0, |buffer| buffer.len()) == self.filled;
        full.then(|| self.flush()).flatten()
    }

    pub(crate) fn flush(&mut self) -> Option<Pull> {
        let filled = std::mem::take(&mut self.filled);
        let buffer = self.buffer.take()?;
        (filled > 0).then(|| Pull::Plain(buffer.freeze().slice(..filled)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_buffer_is_flushed_and_empty_buffer_is_not() {
        let pool = BufferPool::new(4 << 20);
        let mut piece = OutputBuffer::default();
        assert!(piece.flush().is_none());
        let len = piece.spare_capacity(&pool).expect("open").len();
        assert!(piece.flush().is_none());
        assert_eq!(pool.used_bytes(), 0);
        piece.spare_capacity(&pool).expect("open");
        assert!(piece.advance(len - 1).is_none());
        assert_eq!(piece.spare_capacity(&pool).expect("open").len(), 1);
        let Some(Pull::Plain(bytes)) = piece.advance(1) else {
            panic!("nothing was given out");
        };
        assert_eq!(bytes.len(), len);
    }
}
