//! Conversion of file times from the kernel and from archives; pure.

use std::time::{Duration, SystemTime};

/// Converts the nanoseconds of a file time. Their type is signed in some APIs (under Miri in libc's).
pub fn nanoseconds(part: impl TryInto<u64>) -> u64 {
    part.try_into().unwrap_or_default()
}

/// Converts to [`SystemTime`]; a time out of its range becomes 1970.
pub fn system_time(seconds: i64, nanoseconds: u64) -> SystemTime {
    let nanoseconds = Duration::from_nanos(nanoseconds);
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let whole = if seconds < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(whole)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(whole)
    };
    whole
        .and_then(|whole| whole.checked_add(nanoseconds))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_and_after_1970_are_converted() {
        let before = SystemTime::UNIX_EPOCH - Duration::from_millis(1500);
        assert_eq!(system_time(-2, 500_000_000), before);
        assert_eq!(system_time(i64::MAX, 0), system_time(i64::MAX, 0));
        let after = SystemTime::UNIX_EPOCH + Duration::from_millis(1500);
        assert_eq!(system_time(1, 500_000_000), after);
    }
}
