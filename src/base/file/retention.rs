//! Retention policy: evicts by total size and by age.

use std::time::{Duration, SystemTime};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RetainedItem {
    pub last_used: SystemTime,
    pub bytes: u64,
    pub in_use: bool,
    /// An unfinished item that is not in use was left by a dead process.
    pub is_finished: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RetentionPolicy {
    pub max_bytes: u64,
    pub max_age: Duration,
}

impl RetentionPolicy {
    /// Items to evict, none in use: unfinished and old ones, then the least recently used until the rest fits.
    pub(crate) fn expired<'a, T>(
        &self,
        all: &'a [T],
        now: SystemTime,
        retained_item: impl Fn(&T) -> RetainedItem,
    ) -> Vec<&'a T> {
        let mut items: Vec<_> = all.iter().map(|item| (item, retained_item(item))).collect();
        items.sort_by_key(|(_, item)| (item.is_finished, item.last_used));
        let bytes = items.iter().map(|(_, item)| item.bytes);
        let mut left = bytes.fold(0, u64::saturating_add);
        let expired = items.into_iter().filter(|(_, item)| {
            // An item last used in the future has age zero.
            let age = now.duration_since(item.last_used).unwrap_or_default();
            let is_old = !item.is_finished || age > self.max_age;
            let expires = !item.in_use && (is_old || left > self.max_bytes);
            if expires {
                left = left.saturating_sub(item.bytes);
            }
            expires
        });
        expired.map(|(item, _)| item).collect()
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
            is_finished: true,
        }
    }

    fn policy(bytes: u64, minutes: u64) -> RetentionPolicy {
        RetentionPolicy {
            max_bytes: bytes,
            max_age: Duration::from_mins(minutes),
        }
    }

    fn expired(policy: RetentionPolicy, all: &[RetainedItem]) -> Vec<usize> {
        let numbers: Vec<_> = (0..all.len()).collect();
        let expired = policy.expired(&numbers, NOW, |&number| all[number]);
        expired.into_iter().copied().collect()
    }

    // Promises: index-expiry
    #[test]
    fn least_recently_used_items_expire_until_size_fits() {
        let all = [item(1, 10, false), item(3, 10, false), item(2, 10, false)];
        assert!(expired(policy(30, 9), &all).is_empty());
        assert_eq!(expired(policy(29, 9), &all), [1]);
        assert_eq!(expired(policy(10, 9), &all), [1, 2]);
        assert_eq!(expired(policy(0, 9), &all), [1, 2, 0]);
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
        assert_eq!(expired(policy(99, 6), &all), [1]);
        assert_eq!(expired(policy(0, 6), &all), [1, 2, 3]);
        assert_eq!(expired(policy(20, 9), &all), [1, 2]);
    }
}
