//! Measured speed of reads from the disk cache.

use std::time::Duration;

use crate::base::stats::Counter;

/// Number of bytes after which the writer measures no more reads.
pub(super) const SAMPLE_BYTES: u64 = 8 << 20;

/// Bytes that were read past the page cache, and the time of these reads.
#[derive(Debug, Default)]
pub struct ReadRate {
    bytes: Counter,
    nanoseconds: Counter,
}

impl ReadRate {
    /// Adds a read.
    pub fn add(&self, bytes: u64, time: Duration) {
        self.bytes.add(bytes);
        self.nanoseconds
            .add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn needs_sample(&self) -> bool {
        self.bytes.get() < SAMPLE_BYTES
    }

    /// Bytes in a second; `None` before the first read.
    pub fn bytes_per_second(&self) -> Option<u64> {
        bytes_per_second(self.bytes.get(), self.nanoseconds.get())
    }
}

/// Bytes in a second, of `bytes` in `nanoseconds`; `None` if one is zero.
pub(crate) fn bytes_per_second(bytes: u64, nanoseconds: u64) -> Option<u64> {
    let rate = (u128::from(bytes) * 1_000_000_000).checked_div(nanoseconds.into())?;
    u64::try_from(rate).ok().filter(|_| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: disk-zeros
    #[test]
    fn read_rate_is_bytes_over_time() {
        let rate = ReadRate::default();
        assert_eq!(rate.bytes_per_second(), None);
        rate.add(1 << 20, Duration::from_millis(250));
        rate.add(1 << 20, Duration::from_millis(750));
        assert_eq!(rate.bytes_per_second(), Some(2 << 20));
        assert!(rate.needs_sample());
        rate.add(6 << 20, Duration::ZERO);
        assert!(!rate.needs_sample());
    }
}
