//! Retention policy: evicts by total size and by age.

use std::time::{Duration, SystemTime};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RetainedItem {
    pub last_used: SystemTime,
    pub bytes: u64,
    pub in_use: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RetentionPolicy {
    pub max_bytes: u64,
    pub max_age: Duration,
}

impl RetentionPolicy {
    /// Indexes of items to evict, none in use: old ones, then the least recently used until the rest fits.
    pub(crate) fn expired(&self, all: &[RetainedItem], now: SystemTime) -> Vec<usize> {
        let mut numbered: Vec<_> = all.iter().enumerate().collect();
        numbered.sort_by_key(|(_, item)| item.last_used);
        let bytes = all.iter().map(|item| item.bytes);
        let mut left = bytes.fold(0, u64::saturating_add);
        let mut expired = Vec::new();
        for (number, item) in numbered {
            // An item last used in the future has age zero.
            let age = now.duration_since(item.last_used).unwrap_or_default();
            if !item.in_use && (left > self.max_bytes || age > self.max_age) {
                left = left.saturating_sub(item.bytes);
                expired.push(number);
            }
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    fn item(minutes_ago: u64, bytes: u64, in_use: bool) -> RetainedItem {
        RetainedItem {
            last_used: NOW - Duration::from_mins(minutes_ago),
            bytes,
            in_use,
        }
    }

    fn policy(bytes: u64, minutes: u64) -> RetentionPolicy {
        RetentionPolicy {
            max_bytes: bytes,
            max_age: Duration::from_mins(minutes),
        }
    }

    // Promises: index-expiry
    #[test]
    fn least_recently_used_items_expire_until_size_fits() {
        let all = [item(1, 10, false), item(3, 10, false), item(2, 10, false)];
        assert!(policy(30, 9).expired(&all, NOW).is_empty());
        assert_eq!(policy(29, 9).expired(&all, NOW), [1]);
        assert_eq!(policy(10, 9).expired(&all, NOW), [1, 2]);
        assert_eq!(policy(0, 9).expired(&all, NOW), [1, 2, 0]);
    }

    // Promises: index-expiry
    #[test]
    fn old_items_expire_and_items_in_use_never_expire() {
        let future = RetainedItem {
            last_used: NOW + Duration::from_mins(5),
            ..item(0, 10, false)
        };
        let all = [
            item(8, 10, true),
            item(7, 10, false),
            item(6, 10, false),
            future,
        ];
        assert_eq!(policy(99, 6).expired(&all, NOW), [1]);
        assert_eq!(policy(0, 6).expired(&all, NOW), [1, 2, 3]);
        assert_eq!(policy(20, 9).expired(&all, NOW), [1, 2]);
    }
}
