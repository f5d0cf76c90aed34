//! What goes when there is too much, or when nobody has wanted it for long.

use std::time::{Duration, SystemTime};

/// Something that is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kept {
    /// When it was used last.
    pub used: SystemTime,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Whether it must stay.
    pub in_use: bool,
}

/// How much may be kept, and how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Bytes of all together.
    pub bytes: u64,
    /// Since it was used last.
    pub age: Duration,
}

impl Bounds {
    /// The numbers of those in `all` that have to go at `now`: what is too old, and then what was
    /// used longest ago until the rest is little enough. Nothing goes that is in use.
    pub fn surplus(&self, all: &[Kept], now: SystemTime) -> Vec<usize> {
        let mut numbered: Vec<_> = all.iter().enumerate().collect();
        numbered.sort_by_key(|(_, kept)| kept.used);
        let bytes = all.iter().map(|kept| kept.bytes);
        let mut left = bytes.fold(0, u64::saturating_add);
        let mut surplus = Vec::new();
        for (number, kept) in numbered {
            // What comes from the future is new.
            let age = now.duration_since(kept.used).unwrap_or_default();
            if !kept.in_use && (left > self.bytes || age > self.age) {
                left = left.saturating_sub(kept.bytes);
                surplus.push(number);
            }
        }
        surplus
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    fn kept(minutes_ago: u64, bytes: u64, in_use: bool) -> Kept {
        Kept {
            used: NOW - Duration::from_mins(minutes_ago),
            bytes,
            in_use,
        }
    }

    fn bounds(bytes: u64, minutes: u64) -> Bounds {
        Bounds {
            bytes,
            age: Duration::from_mins(minutes),
        }
    }

    #[test]
    fn what_was_used_longest_ago_goes_until_there_is_little_enough() {
        let all = [kept(1, 10, false), kept(3, 10, false), kept(2, 10, false)];
        assert!(bounds(30, 9).surplus(&all, NOW).is_empty());
        assert_eq!(bounds(29, 9).surplus(&all, NOW), [1]);
        assert_eq!(bounds(10, 9).surplus(&all, NOW), [1, 2]);
        assert_eq!(bounds(0, 9).surplus(&all, NOW), [1, 2, 0]);
    }

    #[test]
    fn what_is_too_old_goes_however_little_it_is_and_what_is_in_use_never() {
        let future = Kept {
            used: NOW + Duration::from_mins(5),
            ..kept(0, 10, false)
        };
        let all = [
            kept(8, 10, true),
            kept(7, 10, false),
            kept(6, 10, false),
            future,
        ];
        assert_eq!(bounds(99, 6).surplus(&all, NOW), [1]);
        assert_eq!(bounds(0, 6).surplus(&all, NOW), [1, 2, 3]);
        assert_eq!(bounds(20, 9).surplus(&all, NOW), [1, 2]);
    }
}
