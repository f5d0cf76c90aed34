//! libzstd block by block, behind a safe interface, with our buffers as the window. libzstd's streaming
//! interface has a window of its own, from which it copies all bytes once more.

#![expect(
    unsafe_code,
    reason = "no safe interface decodes blocks that refer to earlier output where it lies"
)]

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::Arc;

use ::zstd::zstd_safe::zstd_sys::{
    ZSTD_DCtx, ZSTD_DCtx_setParameter, ZSTD_createDCtx, ZSTD_dParameter, ZSTD_decompressBegin,
    ZSTD_decompressContinue, ZSTD_freeDCtx, ZSTD_getErrorName, ZSTD_isError, ZSTD_nextInputType,
    ZSTD_nextInputType_e, ZSTD_nextSrcSizeToDecompress,
};
use bytes::Bytes;

use super::header::MAX_BLOCK_LEN;
use crate::base::buffer_pool::Buffer;

/// Unused bytes at the front of each region. libzstd compares pointers: it would take two adjacent regions
/// for one, and would refer to the first after it is freed.
const REGION_GAP: usize = 64;

pub(super) struct BlockDecoder {
    context: NonNull<ZSTD_DCtx>,
    current: Option<Arc<Region>>,
    /// Region of the previous blocks, to which libzstd may still refer.
    previous: Option<Arc<Region>>,
    /// Decoded bytes of the current region, and how many of them were taken.
    filled: usize,
    taken: usize,
}

// SAFETY: the context is owned by this value alone and has no ties to a thread; regions are
// `Send` and `Sync` (see there).
unsafe impl Send for BlockDecoder {}

/// A buffer that is written at its end while its front is read.
struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Owns the bytes; not touched while this lives, or `start` would no longer be theirs.
    _buffer: Buffer,
}

// SAFETY: only the `BlockDecoder` that has the region as its current one writes, and only behind
// `filled`; all other access is reading, by a `RegionSlice`, and only before `filled`, which only grows.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Bytes of a region that are final.
struct RegionSlice {
    region: Arc<Region>,
    from: usize,
    len: usize,
}

impl AsRef<[u8]> for RegionSlice {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range was initialised (a `Buffer` always is), lies within the region, and
        // is never written again; the region lives as long as this slice.
        unsafe { std::slice::from_raw_parts(self.region.start.as_ptr().add(self.from), self.len) }
    }
}

impl BlockDecoder {
    /// `None` when allocation fails.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: no preconditions.
        let context = NonNull::new(unsafe { ZSTD_createDCtx() })?;
        // SAFETY: the context is valid. It knows the parameter, and would otherwise verify what
        // others verify, too.
        let code = unsafe {
            ZSTD_DCtx_setParameter(
                context.as_ptr(),
                ZSTD_dParameter::ZSTD_d_experimentalParam3,
                1,
            )
        };
        debug_assert_eq!(code, 0, "ZSTD_d_forceIgnoreChecksum");
        let mut blocks = Self {
            context,
            current: None,
            previous: None,
            filled: 0,
            taken: 0,
        };
        blocks.begin_frame();
        Some(blocks)
    }

    /// Resets to the start of another frame, from any state.
    pub(super) fn begin_frame(&mut self) {
        // SAFETY: the context is valid. From here on it refers to no region.
        let code = unsafe { ZSTD_decompressBegin(self.context.as_ptr()) };
        debug_assert_eq!(code, 0);
        self.current = None;
        self.previous = None;
        self.filled = 0;
        self.taken = 0;
    }

    /// Number of packed bytes of the next step; 0 at the end of the frame.
    pub(super) fn next_input_len(&self) -> usize {
        // SAFETY: the context is valid, and is not changed.
        unsafe { ZSTD_nextSrcSizeToDecompress(self.context.as_ptr()) }
    }

    /// Whether the next step takes the frame's checksum, which it does not verify.
    pub(super) fn is_at_checksum(&self) -> bool {
        // SAFETY: the context is valid, and is not changed.
        let next = unsafe { ZSTD_nextInputType(self.context.as_ptr()) };
        next == ZSTD_nextInputType_e::ZSTDnit_checksum
    }

    /// Bytes of a region in which `window_len` bytes stay within reach of each block.
    pub(super) fn region_len(window_len: usize) -> usize {
        REGION_GAP + window_len.max(8 * MAX_BLOCK_LEN) + MAX_BLOCK_LEN
    }

    /// Whether the caller must [take](Self::take) all bytes and [add](Self::add_region) a region to continue.
    pub(super) fn is_full(&self) -> bool {
        let len = self.current.as_ref().map_or(0, |region| region.len);
        len - self.filled < MAX_BLOCK_LEN
    }

    /// Retires the current region, which stays within reach; releases the one before. Add another to decode.
    pub(super) fn retire_region(&mut self) {
        self.previous = self.current.take();
        self.filled = 0;
        self.taken = 0;
    }

    /// Continues in `buffer`. Only the region before it stays within reach.
    pub(super) fn add_region(&mut self, mut buffer: Buffer) {
        let region = Region {
            len: buffer.len(),
            start: NonNull::from(&mut *buffer).cast(),
            _buffer: buffer,
        };
        if self.current.is_some() {
            self.retire_region();
        }
        self.filled = REGION_GAP.min(region.len);
        self.taken = self.filled;
        self.current = Some(Arc::new(region));
    }

    /// Decodes `packed`, which has [`Self::next_input_len`] bytes. Returns the number of plain bytes. After
    /// an error, in libzstd's words, only [`Self::begin_frame`] is valid.
    pub(super) fn step(&mut self, packed: &[u8]) -> Result<usize, String> {
        let Some(region) = &self.current else {
            return Err("no room to decode to".to_owned());
        };
        let room = region.len - self.filled;
        // SAFETY: the target is the part of the region without readers, and `packed` a slice. libzstd also
        // refers to bytes that it wrote to this region and to the one before, and both are kept. It forgot
        // all others when the output moved to this one, because that did not look like a continuation (see
        // `REGION_GAP`).
        let code = unsafe {
            ZSTD_decompressContinue(
                self.context.as_ptr(),
                region.start.as_ptr().add(self.filled).cast(),
                room,
                packed.as_ptr().cast(),
                packed.len(),
            )
        };
        // SAFETY: any code will do; the name is a static string.
        let error =
            unsafe { (ZSTD_isError(code) != 0).then(|| CStr::from_ptr(ZSTD_getErrorName(code))) };
        if let Some(name) = error {
            return Err(name.to_string_lossy().to_lowercase());
        }
        self.filled += code.min(room);
        Ok(code)
    }

    /// Takes the bytes decoded since the last call; empty when there are none.
    pub(super) fn take(&mut self) -> Bytes {
        let (from, len) = (self.taken, self.filled - self.taken);
        self.taken = self.filled;
        match &self.current {
            Some(region) if len > 0 => Bytes::from_owner(RegionSlice {
                region: Arc::clone(region),
                from,
                len,
            }),
            _ => Bytes::new(),
        }
    }

    /// Bytes that [`Self::take`] would return.
    pub(super) fn len(&self) -> usize {
        self.filled - self.taken
    }
}

impl Drop for BlockDecoder {
    fn drop(&mut self) {
        // SAFETY: the context is valid, and this is its last use.
        unsafe { ZSTD_freeDCtx(self.context.as_ptr()) };
    }
}
