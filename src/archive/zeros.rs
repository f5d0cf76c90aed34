//! Runs of zeros in a source that does not say how long it is.

use super::error::Error;

/// Zeros in a row that a source of unknown length may have where no file's content is expected: more
/// than any record of a tape is long. A device like `/dev/zero` or a server may send them for ever.
pub(super) const MAX_ZERO_BYTES: u64 = 64 << 20;

/// Counts zeros in a row.
#[derive(Debug, Default)]
pub(super) struct ZeroRun {
    bytes: u64,
}

impl ZeroRun {
    /// Takes note of the next bytes.
    ///
    /// # Errors
    /// [`Error::EndlessZeros`] when there are more than [`MAX_ZERO_BYTES`] in a row; again at each
    /// further call that adds to them.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.iter().all(|&byte| byte == 0) {
            self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        } else {
            // What follows the last other byte may be the content of a member that begins in here.
            self.bytes = 0;
        }
        if self.bytes > MAX_ZERO_BYTES {
            return Err(Error::EndlessZeros);
        }
        Ok(())
    }

    /// Takes note of bytes that may be any.
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
