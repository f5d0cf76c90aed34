//! zlib's inflate with the calls that make checkpoints, behind a safe interface. flate2 hides the block
//! boundaries, priming and dictionaries that they need, so this calls the C interface of zlib-rs.

#![expect(
    unsafe_code,
    reason = "libz-rs-sys is the only zlib-rs interface with Z_BLOCK, inflatePrime and inflateGetDictionary"
)]

use std::ffi::{CStr, c_int};
use std::mem::size_of;
use std::ptr;

use libz_rs_sys::{
    Z_BLOCK, Z_BUF_ERROR, Z_NO_FLUSH, Z_OK, Z_STREAM_END, inflate, inflateEnd,
    inflateGetDictionary, inflateInit2_, inflatePrime, inflateReset, inflateSetDictionary,
    z_stream, zlibVersion,
};

/// Maximum distance of references in deflate, in bytes.
pub(super) const WINDOW_LEN: usize = 32 << 10;

/// zlib's number for "no header, no trailer, a window of [`WINDOW_LEN`]".
const RAW_WINDOW_BITS: c_int = -15;

/// Decodes one raw deflate stream (RFC 1951) after another.
pub(super) struct Inflate {
    /// Initialised by `inflateInit2_` for as long as this lives. Between calls its input and
    /// output pointers are null. Boxed because C zlib's contract lets a stream not move.
    stream: Box<z_stream>,
}

// SAFETY: the stream is owned by this value alone, and its state is plain memory from the Rust
// allocator without ties to a thread.
unsafe impl Send for Inflate {}

/// When [`Inflate::decode`] returns besides when input or output are used up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StopAt {
    StreamEnd,
    /// At the end of the next block too.
    BlockEnd,
}

#[derive(PartialEq, Eq, Debug)]
pub(super) struct Progress {
    pub(super) consumed: usize,
    pub(super) produced: usize,
    pub(super) reason: StopReason,
}

#[derive(PartialEq, Eq, Debug)]
pub(super) enum StopReason {
    Exhausted,
    /// A block, not the last, has ended and is written. The next begins in the last `unused_bits` (0 to 7,
    /// the most significant) of the byte consumed last.
    BlockEnd {
        unused_bits: u8,
    },
    /// The stream has ended; the rest of the byte consumed last is padding.
    StreamEnd,
    /// The stream breaks the format, in zlib's words.
    Damaged(String),
}

impl Inflate {
    /// At the start of a stream.
    ///
    /// # Panics
    /// When there is no memory (40 KiB).
    pub(super) fn new() -> Self {
        let mut stream = Box::<z_stream>::default();
        // SAFETY: `stream` is a valid stream with the default allocator's functions; version and
        // size are those of the library that is called.
        let code = unsafe {
            inflateInit2_(
                &raw mut *stream,
                RAW_WINDOW_BITS,
                zlibVersion(),
                c_int::try_from(size_of::<z_stream>()).expect("a stream is 112 bytes"),
            )
        };
        assert_eq!(code, Z_OK, "inflate gets its memory");
        Self { stream }
    }

    /// Resets to the start of another stream, from any state.
    pub(super) fn reset(&mut self) {
        // SAFETY: the stream is initialised (see the field).
        let code = unsafe { inflateReset(&raw mut *self.stream) };
        debug_assert_eq!(code, Z_OK);
    }

    /// Positions at a block after `window` and the first `bit` bits of `first`, which is `None` on a byte.
    pub(super) fn resume(&mut self, window: &[u8], first: Option<(u8, u8)>) {
        self.reset();
        let skipped = window.len().saturating_sub(WINDOW_LEN);
        let window = window.get(skipped..).unwrap_or_default();
        if !window.is_empty() {
            let len = u32::try_from(window.len()).expect("at most 32 KiB");
            // SAFETY: the stream is initialised; pointer and length are those of a slice.
            let code = unsafe { inflateSetDictionary(&raw mut *self.stream, window.as_ptr(), len) };
            debug_assert_eq!(code, Z_OK);
        }
        if let Some((first, bit)) = first {
            let bit = bit.min(7);
            // SAFETY: the stream is initialised; 1 to 8 bits are within zlib's limit of 16.
            let code = unsafe {
                inflatePrime(
                    &raw mut *self.stream,
                    c_int::from(8 - bit),
                    c_int::from(first >> bit),
                )
            };
            debug_assert_eq!(code, Z_OK);
        }
    }

    /// Decodes until input or output is used up, or `stop` says so. A full output may leave bytes that an
    /// empty input brings out.
    pub(super) fn decode(&mut self, input: &[u8], output: &mut [u8], stop: StopAt) -> Progress {
        // More than 4 GiB are taken in several calls.
        let input_len = u32::try_from(input.len()).unwrap_or(u32::MAX);
        let output_len = u32::try_from(output.len()).unwrap_or(u32::MAX);
        let stream = &mut *self.stream;
        stream.next_in = input.as_ptr();
        stream.avail_in = input_len;
        stream.next_out = output.as_mut_ptr();
        stream.avail_out = output_len;
        stream.msg = ptr::null_mut();
        let flush = match stop {
            StopAt::StreamEnd => Z_NO_FLUSH,
            StopAt::BlockEnd => Z_BLOCK,
        };
        // SAFETY: the stream is initialised; its input is readable and its output writable for
        // the lengths given, as both are live slices, and neither is null, as slices never are.
        let mut code = unsafe { inflate(&raw mut *stream, flush) };
        if stop == StopAt::BlockEnd
            && is_ok(code)
            && stream.data_type & LAST_BLOCK_END == LAST_BLOCK_END
        {
            // The last block's end is of no interest; what follows it is the stream's.
            // SAFETY: as before; zlib has moved pointers and lengths on together.
            code = unsafe { inflate(&raw mut *stream, Z_NO_FLUSH) };
        }
        let progress = Progress {
            consumed: (input_len - stream.avail_in) as usize,
            produced: (output_len - stream.avail_out) as usize,
            reason: stop_reason(stream, code, stop),
        };
        stream.next_in = ptr::null();
        stream.avail_in = 0;
        stream.next_out = ptr::null_mut();
        stream.avail_out = 0;
        progress
    }

    /// The plain bytes before, as far as decoding may refer to them: at most [`WINDOW_LEN`].
    pub(super) fn window(&self) -> Vec<u8> {
        let mut window = vec![0; WINDOW_LEN];
        let mut len = 0;
        // SAFETY: the stream is initialised; `window` has room for the 32 KiB that a window of
        // 15 bits has at most; `len` is valid for a write.
        let code = unsafe {
            inflateGetDictionary(&raw const *self.stream, window.as_mut_ptr(), &raw mut len)
        };
        debug_assert_eq!(code, Z_OK);
        window.truncate(len as usize);
        window
    }
}

/// `z_stream::data_type`: number of consumed but unused bits of the input. The flags follow.
const UNUSED_BITS_MASK: c_int = 63;
const LAST_BLOCK: c_int = 64;
const BLOCK_END: c_int = 128;
const LAST_BLOCK_END: c_int = LAST_BLOCK | BLOCK_END;

/// Whether decoding can go on. `Z_BUF_ERROR`: nothing moved, perhaps as a block's end was consumed earlier.
fn is_ok(code: c_int) -> bool {
    matches!(code, Z_OK | Z_BUF_ERROR)
}

fn stop_reason(stream: &z_stream, code: c_int, stop: StopAt) -> StopReason {
    match code {
        Z_STREAM_END => StopReason::StreamEnd,
        _ if is_ok(code) => match u8::try_from(stream.data_type & UNUSED_BITS_MASK) {
            Ok(unused_bits @ 0..8)
                if stop == StopAt::BlockEnd && stream.data_type & LAST_BLOCK_END == BLOCK_END =>
            {
                StopReason::BlockEnd { unused_bits }
            }
            _ => StopReason::Exhausted,
        },
        _ if stream.msg.is_null() => StopReason::Damaged(format!("inflate fails with code {code}")),
        _ => {
            // SAFETY: when not null, `msg` is a constant of zlib-rs that ends with a zero byte.
            let text = unsafe { CStr::from_ptr(stream.msg) };
            StopReason::Damaged(text.to_string_lossy().into_owned())
        }
    }
}

impl Drop for Inflate {
    fn drop(&mut self) {
        // SAFETY: the stream is initialised and not used again.
        let code = unsafe { inflateEnd(&raw mut *self.stream) };
        debug_assert_eq!(code, Z_OK);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A raw deflate stream of several blocks, and what it holds.
    fn blocks() -> (Vec<u8>, Vec<u8>) {
        let level = flate2::Compression::new(6);
        let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), level);
        let mut plain = Vec::new();
        for number in 0_u32..6 {
            let part = number.to_string().repeat(40) + "and something that comes again";
            writer
                .write_all(part.as_bytes())
                .expect("a vector takes all");
            // Ends a block, on a byte.
            writer.flush().expect("a vector takes all");
            plain.extend_from_slice(part.as_bytes());
        }
        (writer.finish().expect("a vector takes all"), plain)
    }

    #[test]
    fn inflate_resumes_at_every_block() {
        let (packed, plain) = blocks();
        let mut inflate = Inflate::new();
        let mut output = vec![0; 1000];
        let (mut consumed, mut produced, mut ends) = (0, 0, 0);
        loop {
            let output = &mut output[produced..];
            let progress = inflate.decode(&packed[consumed..], output, StopAt::BlockEnd);
            consumed += progress.consumed;
            produced += progress.produced;
            let StopReason::BlockEnd { unused_bits } = progress.reason else {
                assert_eq!(progress.reason, StopReason::StreamEnd);
                break;
            };
            ends += 1;
            let window = inflate.window();
            assert_eq!(window, plain[..produced]);
            let first = (unused_bits > 0).then(|| (packed[consumed - 1], 8 - unused_bits));
            let mut resumed = Inflate::new();
            resumed.resume(&window, first);
            let mut rest = vec![0; 1000];
            let progress = resumed.decode(&packed[consumed..], &mut rest, StopAt::StreamEnd);
            assert_eq!(progress.reason, StopReason::StreamEnd);
            assert_eq!(rest[..progress.produced], plain[produced..]);
        }
        assert_eq!((consumed, &output[..produced]), (packed.len(), &plain[..]));
        assert!(ends >= 6, "{ends}");
    }

    #[test]
    fn inflate_accepts_single_byte_input_and_output() {
        let (packed, plain) = blocks();
        let mut inflate = Inflate::new();
        let (mut consumed, mut decoded) = (0, Vec::new());
        loop {
            let mut byte = [0];
            let input = packed.get(consumed..=consumed).unwrap_or_default();
            let progress = inflate.decode(input, &mut byte, StopAt::StreamEnd);
            consumed += progress.consumed;
            decoded.extend_from_slice(&byte[..progress.produced]);
            match progress.reason {
                StopReason::Exhausted => {}
                reason => break assert_eq!(reason, StopReason::StreamEnd),
            }
        }
        assert_eq!(decoded, plain);
    }

    #[test]
    fn inflate_reports_damage_and_reset_clears_it() {
        let (packed, plain) = blocks();
        let mut inflate = Inflate::new();
        let mut output = vec![0; 1000];
        let progress = inflate.decode(&[0b111], &mut output, StopAt::StreamEnd);
        assert_eq!(
            progress.reason,
            StopReason::Damaged("invalid block type".to_owned())
        );
        inflate.reset();
        assert!(inflate.window().is_empty());
        let progress = inflate.decode(&packed, &mut output, StopAt::StreamEnd);
        assert_eq!(output[..progress.produced], plain);
    }

    #[test]
    fn only_the_last_32_kib_of_a_window_are_used() {
        let mut inflate = Inflate::new();
        let mut window = vec![1; 10];
        window.resize(10 + WINDOW_LEN, 2);
        inflate.resume(&window, None);
        assert_eq!(inflate.window(), window[10..]);
    }
}
