//! Limit on runs of zeros in a source of unknown length.

use crate::archive::error::{Error, MAX_ZERO_BYTES};

#[derive(Debug, Default)]
pub(super) struct ZeroRun {
    bytes: u64,
}

impl ZeroRun {
    /// Adds the next bytes. With more than [`MAX_ZERO_BYTES`] in a row, this and later calls with zeros fail.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.iter().all(|&byte| byte == 0) {
            self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        } else {
            // Zeros after the last other byte may be the content of a member that begins in these bytes.
            self.bytes = 0;
        }
        if self.bytes > MAX_ZERO_BYTES {
            return Err(Error::EndlessZeros);
        }
        Ok(())
    }

    /// Resets the count at bytes that may be file contents.
    pub(super) fn reset(&mut self) {
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_zeros_count_across_pieces() {
        let zeros = vec![0; 32 << 20];
        let mut run = ZeroRun::default();
        for _ in 0..2 {
            run.add(&zeros).expect("as many as are allowed");
        }
        let mut member = vec![0; 65 << 20];
        member[0] = 1;
        run.add(&member).expect("a header and its content");
        run.add(&zeros).expect("another run");
        run.add(&zeros).expect("as many as are allowed");
        assert!(matches!(run.add(b"\0"), Err(Error::EndlessZeros)));
        assert!(run.add(b"\0").is_err(), "again");
        run.reset();
        run.add(&zeros).expect("another run");
    }
}
