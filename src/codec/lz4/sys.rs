//! liblz4's block decoder behind a safe interface. It is a third faster than the unsafe decoder of
//! `lz4_flex`, and decoding is an lz4 archive's main cost.

#![expect(unsafe_code, reason = "liblz4 has no safe interface")]

use std::ffi::{c_char, c_int};

// Brings the library; it declares all but what is needed here.
use lz4_sys as _;

/// Blocks refer at most so far back, in bytes.
pub(super) const HISTORY_LEN: usize = 64 << 10;

unsafe extern "C" {
    /// See <https://github.com/lz4/lz4/blob/v1.10.0/lib/lz4.h>.
    fn LZ4_decompress_safe_usingDict(
        packed: *const c_char,
        target: *mut c_char,
        packed_len: c_int,
        room: c_int,
        history: *const c_char,
        history_len: c_int,
    ) -> c_int;
}

/// Decodes the block `packed` into `buffer` from `start` on; it may refer to the bytes before. `None` when it
/// is malformed or `buffer` too short; then the bytes from `start` on are unspecified.
pub(super) fn decode(packed: &[u8], buffer: &mut [u8], start: usize) -> Option<usize> {
    let room = c_int::try_from(buffer.len().checked_sub(start)?).ok()?;
    let packed_len = c_int::try_from(packed.len()).ok()?;
    let history_at = start.saturating_sub(HISTORY_LEN);
    let history_len = c_int::try_from(start - history_at).ok()?;
    let front = buffer.as_mut_ptr();
    // SAFETY: `history_at <= start <= buffer.len()`, so both pointers are into `buffer` or to its end. For
    // any packed bytes, liblz4 reads `packed_len` bytes of `packed` and `history_len` bytes before `target`,
    // and writes and reads `room` bytes from `target` on.
    let made = unsafe {
        LZ4_decompress_safe_usingDict(
            packed.as_ptr().cast(),
            front.add(start).cast(),
            packed_len,
            room,
            front.add(history_at).cast(),
            history_len,
        )
    };
    usize::try_from(made).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::test_support::{noise, text};
    use lz4_flex::block::{compress, compress_with_dict};

    #[test]
    fn decode_writes_only_the_decoded_range() {
        for plain in [text(100_000), noise(1000), vec![0; 70_000], vec![]] {
            let packed = compress(&plain);
            let mut buffer = vec![0xa5; 10 + plain.len()];
            assert_eq!(decode(&packed, &mut buffer, 10), Some(plain.len()));
            assert_eq!(buffer.split_at(10), (&[0xa5; 10][..], &plain[..]));
        }
    }

    #[test]
    fn block_refers_at_most_to_the_history() {
        let (plain, before) = (text(50_000), text(70_000));
        let window = before.get(before.len() - HISTORY_LEN..).unwrap();
        let packed = compress_with_dict(&plain, window);
        for known in [&before[..], window] {
            let mut buffer = [known, &vec![0; plain.len()]].concat();
            let made = decode(&packed, &mut buffer, known.len());
            assert_eq!(made, Some(plain.len()));
            assert_eq!(buffer.get(known.len()..), Some(&plain[..]));
        }
        let mut buffer = vec![0; plain.len()];
        assert_eq!(decode(&packed, &mut buffer, 0), None, "the history is gone");
    }

    #[test]
    fn block_that_does_not_fit_is_rejected() {
        let plain = text(1000);
        let packed = compress(&plain);
        assert_eq!(decode(&packed, &mut vec![0; 999], 0), None);
        assert_eq!(decode(&packed, &mut [], 0), None);
        assert_eq!(decode(&packed, &mut [], 1), None, "outside of the buffer");
        assert_eq!(decode(&[], &mut [0; 10], 0), None);
        let cut = packed.get(..packed.len() - 1).unwrap();
        assert_eq!(decode(cut, &mut vec![0; 1000], 0), None);
    }
}
