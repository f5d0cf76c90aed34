//! Reading and use of bytes at the same time.

use std::io::{self, Read};
use std::sync::mpsc;
use std::thread;

use crate::base::thread::scoped_thread;

/// Bytes that are used while the next ones are read.
const PIECE_BYTES: usize = 512 << 10;

/// Fills `bytes` from `input`, and passes them to `consume` in order, on another thread if there are many.
pub(crate) fn read_overlapped(
    input: &mut impl Read,
    bytes: &mut [u8],
    mut consume: impl FnMut(&[u8]) + Send,
) -> io::Result<()> {
    if bytes.len() < 2 * PIECE_BYTES {
        input.read_exact(bytes)?;
        consume(bytes);
        return Ok(());
    }
    thread::scope(|scope| {
        let (sender, pieces) = mpsc::channel::<&[u8]>();
        scoped_thread(scope, "tarfs-hash", move || {
            for piece in pieces {
                consume(piece);
            }
        })?;
        for piece in bytes.chunks_mut(PIECE_BYTES) {
            input.read_exact(piece)?;
            let is_used = sender.send(piece).is_ok();
            debug_assert!(is_used, "the thread reads until the sender is dropped");
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_filled_and_used_in_order() {
        let all: Vec<u8> = (0..=250).cycle().take(3 * PIECE_BYTES + 5).collect();
        for len in [0, 1, PIECE_BYTES, 2 * PIECE_BYTES, all.len()] {
            let (mut read, mut used) = (vec![0; len], Vec::new());
            read_overlapped(&mut &*all, &mut read, |piece| used.extend_from_slice(piece)).unwrap();
            assert!(read == all[..len] && used == read, "{len}");
        }
    }

    #[test]
    fn end_of_input_is_an_error() {
        let input = vec![1; 2 * PIECE_BYTES];
        let mut bytes = vec![0; 3 * PIECE_BYTES];
        let failed = read_overlapped(&mut &*input, &mut bytes, |_| {}).unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::UnexpectedEof);
    }
}
