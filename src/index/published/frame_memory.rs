//! The bytes of an index file that is loaded frame by frame.

#![expect(
    unsafe_code,
    reason = "no safe type lets readers keep references to bytes while others are written"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::sync::Mutex;

/// A buffer whose frames are written once each, in any order, and read after that.
///
/// The kernel gives it memory only where it is written.
#[derive(Debug)]
pub(super) struct FrameMemory {
    start: NonNull<u8>,
    layout: Layout,
    frame_len: usize,
    /// For each frame, whether its bytes are final.
    written: Box<[AtomicBool]>,
    writer: Mutex<()>,
}

// SAFETY: the buffer belongs to this value alone. `write` writes a frame under the lock, before it is
// marked as written, and never after. `get` reads only frames that are marked.
unsafe impl Send for FrameMemory {}
// SAFETY: as above.
unsafe impl Sync for FrameMemory {}

impl FrameMemory {
    /// A buffer of `len` bytes in frames of `frame_len`; `None` if allocation fails or a length is 0.
    pub(super) fn new(len: usize, frame_len: usize) -> Option<Self> {
        let layout = Layout::array::<u8>(len).ok().filter(|_| len > 0)?;
        let frames = (frame_len > 0).then(|| len.div_ceil(frame_len))?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self {
            start,
            layout,
            frame_len,
            written: (0..frames).map(|_| AtomicBool::new(false)).collect(),
            writer: Mutex::default(),
        })
    }

    /// Length of all bytes.
    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }

    /// Number of frames.
    pub(super) fn frame_count(&self) -> usize {
        self.written.len()
    }

    /// Length of frame `number`; 0 past the last.
    pub(super) fn len_of(&self, number: usize) -> usize {
        let start = number.saturating_mul(self.frame_len);
        self.len().saturating_sub(start).min(self.frame_len)
    }

    pub(super) fn is_written(&self, number: usize) -> bool {
        let written = self.written.get(number);
        written.is_some_and(|written| written.load(Ordering::Acquire))
    }

    /// Writes frame `number`, unless it is written already. Returns false if it has another length.
    pub(super) fn write(&self, number: usize, bytes: &[u8]) -> bool {
        let Some(written) = self.written.get(number) else {
            return false;
        };
        if bytes.len() != self.len_of(number) {
            return false;
        }
        let _writer = self.writer.lock();
        if !written.load(Ordering::Acquire) {
            // SAFETY: the frame is in the buffer, has the length of `bytes`, and does not overlap them. Nothing
            // reads it before it is marked, and the lock excludes another writer.
            unsafe {
                let frame = self.start.add(number * self.frame_len);
                frame.copy_from_nonoverlapping(NonNull::from_ref(bytes).cast(), bytes.len());
            }
            written.store(true, Ordering::Release);
        }
        true
    }

    /// Numbers of the frames that hold `range`.
    pub(super) fn frames(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.frame_len..range.end.div_ceil(self.frame_len)
    }

    /// The bytes of `range`; `None` past the end, or if one of its frames is not written.
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        if range.is_empty() {
            return Some(&[]);
        }
        if !self.frames(&range).all(|frame| self.is_written(frame)) {
            return None;
        }
        // SAFETY: the range is in the buffer, initialised, and never written again, as its frames are marked.
        Some(unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len())
        })
    }
}

impl Drop for FrameMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no reference outlives the value.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable_once_all_their_frames_are_written() {
        let memory = FrameMemory::new(10, 4).unwrap();
        assert_eq!((memory.frame_count(), memory.len_of(2)), (3, 2));
        assert!(memory.write(1, b"4567"));
        assert_eq!(memory.get(4..8), Some(&b"4567"[..]));
        assert_eq!(memory.get(3..5), None);
        assert!(memory.write(0, b"0123") && memory.write(2, b"89"));
        assert_eq!(memory.get(0..10), Some(&b"0123456789"[..]));
        assert_eq!(memory.get(9..11), None);
        assert_eq!(memory.get(10..10), Some(&b""[..]));
    }

    #[test]
    fn frame_of_another_length_and_second_write_change_nothing() {
        let memory = FrameMemory::new(10, 4).unwrap();
        assert!(!memory.write(2, b"890") && !memory.write(3, b""));
        assert!(memory.write(2, b"89") && memory.write(2, b"xx"));
        assert_eq!(memory.get(8..10), Some(&b"89"[..]));
        assert!(FrameMemory::new(0, 4).is_none());
    }
}
