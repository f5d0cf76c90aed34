//! The bytes of an index file that is loaded frame by frame.

#![expect(
    unsafe_code,
    reason = "no safe type lets readers keep references to bytes while others are written"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

/// State of a frame: nothing reads or writes it.
const EMPTY: u8 = 0;
/// One thread writes it, and nothing reads it.
const BUSY: u8 = 1;
/// Its bytes are final.
const WRITTEN: u8 = 2;

/// A buffer whose frames are written once each, in any order, and read after that.
///
/// The kernel gives it memory only where it is written.
#[derive(Debug)]
pub(crate) struct FrameMemory {
    start: NonNull<u8>,
    layout: Layout,
    /// The length of a frame is 2 to this power.
    frame_shift: u32,
    states: Box<[AtomicU8]>,
}

// SAFETY: the buffer belongs to this value alone. Only the thread that made a frame busy writes it, before it is
// marked as written, and never after. `get` reads only frames that are marked.
unsafe impl Send for FrameMemory {}
// SAFETY: as above.
unsafe impl Sync for FrameMemory {}

impl FrameMemory {
    /// A buffer of `len` bytes in frames of `frame_len`; `None` if allocation fails, the length is 0, or that of
    /// frames no power of two.
    pub(crate) fn new(len: usize, frame_len: usize) -> Option<Self> {
        let layout = Layout::array::<u8>(len).ok().filter(|_| len > 0)?;
        let frame_shift = frame_len.is_power_of_two().then(|| frame_len.ilog2())?;
        let frames = len.div_ceil(frame_len);
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self {
            start,
            layout,
            frame_shift,
            states: (0..frames).map(|_| AtomicU8::new(EMPTY)).collect(),
        })
    }

    /// Length of all bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    pub(crate) fn frame_count(&self) -> usize {
        self.states.len()
    }

    /// Length of frame `number`; 0 past the last.
    pub(crate) fn len_of(&self, number: usize) -> usize {
        let frame_len = 1 << self.frame_shift;
        let start = number.saturating_mul(frame_len);
        self.len().saturating_sub(start).min(frame_len)
    }

    pub(crate) fn is_written(&self, number: usize) -> bool {
        let state = self.states.get(number);
        state.is_some_and(|state| state.load(Ordering::Acquire) == WRITTEN)
    }

    /// Lets `write` write the bytes of frame `number`, which may fail. `None` if the frame does not exist, is written
    /// already, or another thread writes it.
    pub(crate) fn write<E>(
        &self,
        number: usize,
        write: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Option<Result<(), E>> {
        let state = self.states.get(number)?;
        let claimed = state.compare_exchange(EMPTY, BUSY, Ordering::Acquire, Ordering::Relaxed);
        claimed.ok()?;
        let claim = Claim(state);
        let len = self.len_of(number);
        // SAFETY: the frame is in the buffer, was initialised to zeros, and overlaps no other. This thread alone made
        // it busy, so nothing else reads or writes it.
        let bytes = unsafe {
            let start = self.start.add(number << self.frame_shift);
            std::slice::from_raw_parts_mut(start.as_ptr(), len)
        };
        let written = write(bytes);
        if written.is_ok() {
            claim.0.store(WRITTEN, Ordering::Release);
        }
        Some(written)
    }

    /// Numbers of the frames that hold `range`.
    pub(crate) fn frames(&self, range: &Range<usize>) -> Range<usize> {
        range.start >> self.frame_shift..range.end.div_ceil(1 << self.frame_shift)
    }

    /// The bytes of `range`; `None` past the end, or if one of its frames is not written.
    pub(crate) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
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

/// A frame that this thread made busy. It is empty again if the thread does not write it to its end.
struct Claim<'a>(&'a AtomicU8);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let (order, ignored) = (Ordering::Release, Ordering::Relaxed);
        self.0.compare_exchange(BUSY, EMPTY, order, ignored).ok();
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

    fn write(memory: &FrameMemory, number: usize, bytes: &[u8]) -> Option<Result<(), ()>> {
        memory.write(number, |frame| {
            let is_same_len = frame.len() == bytes.len();
            is_same_len.then(|| frame.copy_from_slice(bytes)).ok_or(())
        })
    }

    #[test]
    fn bytes_are_readable_once_all_their_frames_are_written() {
        let memory = FrameMemory::new(10, 4).unwrap();
        assert_eq!((memory.frame_count(), memory.len_of(2)), (3, 2));
        assert_eq!(write(&memory, 1, b"4567"), Some(Ok(())));
        assert_eq!(memory.get(4..8), Some(&b"4567"[..]));
        assert_eq!(memory.get(3..5), None);
        assert_eq!(write(&memory, 0, b"0123"), Some(Ok(())));
        assert_eq!(write(&memory, 2, b"89"), Some(Ok(())));
        assert_eq!(memory.get(0..10), Some(&b"0123456789"[..]));
        assert_eq!(memory.get(9..11), None);
        assert_eq!(memory.get(10..10), Some(&b""[..]));
    }

    #[test]
    fn a_failed_write_can_be_repeated_and_a_finished_one_cannot() {
        let memory = FrameMemory::new(10, 4).unwrap();
        assert_eq!(write(&memory, 2, b"890"), Some(Err(())));
        assert_eq!(memory.get(8..10), None);
        assert_eq!(write(&memory, 2, b"89"), Some(Ok(())));
        assert_eq!(write(&memory, 2, b"xx"), None);
        assert_eq!(write(&memory, 3, b""), None);
        assert_eq!(memory.get(8..10), Some(&b"89"[..]));
        let during = memory.write(0, |_| {
            let nested = write(&memory, 0, b"xxxx");
            nested.map_or(Ok(()), |_| Err("two threads write a frame"))
        });
        assert_eq!(during, Some(Ok(())));
        assert!(FrameMemory::new(0, 4).is_none() && FrameMemory::new(4, 3).is_none());
    }
}
