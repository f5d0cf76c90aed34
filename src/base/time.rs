//! Times of files, and in text; pure.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY_SECONDS: i64 = 86_400;

/// Days in 400 years, after which the calendar repeats.
const ERA_DAYS: i64 = 146_097;

/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: i64 = 719_468;

/// A time relative to 1970-01-01 00:00:00 UTC; `nanoseconds`, below 10⁹, count forward even before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Timestamp {
    /// Whole seconds, rounded down.
    pub seconds: i64,
    /// The fraction of the second.
    pub nanoseconds: u32,
}

/// Digits of a second that file systems store: all, or those above 100 ns (SMB), 1 µs, 1 ms, 10 ms (exFAT) and 1 s.
const STORED_NANOSECONDS: [u32; 5] = [100, 1_000, 1_000_000, 10_000_000, 1_000_000_000];

/// First and last seconds that file systems store: signed 32 bits (ext4 with small inodes, old XFS), unsigned 32 bits
/// (NFS), FAT and exFAT, ext4, and XFS with large times.
const FIRST_SECONDS: [i64; 3] = [-(1 << 31), 0, 315_532_800];
const LAST_SECONDS: [i64; 6] = [
    (1 << 31) - 1,
    (1 << 32) - 1,
    4_354_819_198,
    4_354_819_199,
    15_032_385_535,
    16_299_260_424,
];

impl Timestamp {
    /// Whether the two are equal, or a file system may have stored the one as the other.
    pub(crate) fn is_same_as(self, other: Self) -> bool {
        self == other || self.may_be_stored_as(other) || other.may_be_stored_as(self)
    }

    fn may_be_stored_as(self, stored: Self) -> bool {
        let is_rounded = |unit: &u32| stored.nanoseconds == self.nanoseconds / unit * unit;
        let is_first = |first: &i64| self.seconds < *first && stored.seconds == *first;
        let is_last = |last: &i64| self.seconds > *last && stored.seconds == *last;
        self.seconds == stored.seconds && STORED_NANOSECONDS.iter().any(is_rounded)
            || FIRST_SECONDS.iter().any(is_first)
            || LAST_SECONDS.iter().any(is_last)
    }
}

/// A time in the proleptic Gregorian calendar, without limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Civil {
    pub(crate) year: i64,
    /// 1 is January.
    pub(crate) month: i64,
    pub(crate) day: i64,
    pub(crate) second_of_day: i64,
    nanoseconds: u32,
}

impl Civil {
    /// Converts seconds and nanoseconds since the start of 1970.
    pub fn new(seconds: i64, nanoseconds: u32) -> Self {
        // Years start in March here, so that the leap day is the last one.
        let days = seconds.div_euclid(DAY_SECONDS) + EPOCH_DAYS;
        let era = days.div_euclid(ERA_DAYS);
        let day_of_era = days.rem_euclid(ERA_DAYS);
        let leap_days = day_of_era / 1460 - day_of_era / 36_524 + day_of_era / 146_096;
        let year_of_era = (day_of_era - leap_days) / 365;
        let year_start = 365 * year_of_era + year_of_era / 4 - year_of_era / 100;
        let day_of_year = day_of_era - year_start;
        // Five months from March on have 153 days, and again five from August on.
        let march_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * march_month + 2) / 5 + 1;
        let new_year_passed = march_month >= 10;
        Self {
            year: era * 400 + year_of_era + i64::from(new_year_passed),
            month: if new_year_passed {
                march_month - 9
            } else {
                march_month + 3
            },
            day,
            second_of_day: seconds.rem_euclid(DAY_SECONDS),
            nanoseconds,
        }
    }

    fn write_date(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // ISO 8601 requires a sign for years outside four digits.
        if (0..=9999).contains(&self.year) {
            write!(f, "{:04}", self.year)?;
        } else {
            write!(f, "{:+05}", self.year)?;
        }
        write!(f, "-{:02}-{:02}", self.month, self.day)
    }

    fn write_time(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (minutes, second) = (self.second_of_day / 60, self.second_of_day % 60);
        write!(f, "{:02}:{:02}:{second:02}", minutes / 60, minutes % 60)
    }

    /// `2026-05-20 16:27:29`.
    pub fn to_date_and_time(self) -> impl fmt::Display {
        fmt::from_fn(move |f| {
            self.write_date(f)?;
            f.write_str(" ")?;
            self.write_time(f)
        })
    }

    /// RFC 3339 with all nanoseconds: `2026-05-20T16:27:29.000000001Z`.
    pub fn to_rfc3339(self) -> impl fmt::Display {
        fmt::from_fn(move |f| {
            self.write_date(f)?;
            f.write_str("T")?;
            self.write_time(f)?;
            write!(f, ".{:09}Z", self.nanoseconds)
        })
    }
}

/// Converts the nanoseconds of a file time. Their type is signed in some APIs (under Miri in libc's).
pub fn nanoseconds(part: impl TryInto<u64>) -> u64 {
    part.try_into().unwrap_or_default()
}

/// Seconds from the start of 1970 to `time`.
pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
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

fn parse_number(text: &str, len: usize) -> Option<u64> {
    let is_plain = text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

/// Parses a date and time of RFC 3339 in any zone, such as `2009-11-06T08:49:37.5+01:00`, to seconds since the
/// epoch and nanoseconds.
pub fn parse_rfc3339(text: &str) -> Option<(i64, u32)> {
    let number = |at: usize, len| parse_number(text.get(at..at + len)?, len);
    let separators = [(4, "-"), (7, "-"), (10, "T"), (13, ":"), (16, ":")];
    let is_separated = |&(at, separator)| text.get(at..=at) == Some(separator);
    let (hour, minute, second) = (number(11, 2)?, number(14, 2)?, number(17, 2)?);
    if !separators.iter().all(is_separated) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let days = days_since_epoch(number(0, 4)?, number(5, 2)?, number(8, 2)?)?;
    let seconds = i64::try_from((hour * 60 + minute) * 60 + second).ok()?;
    let rest = text.get(19..)?;
    let (fraction, zone) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(|digit: char| !digit.is_ascii_digit())?),
        None => ("0", rest),
    };
    let nanoseconds = format!("{fraction:0<9}");
    let nanoseconds = u32::try_from(parse_number(&nanoseconds, 9)?).ok()?;
    let offset = match zone.split_at_checked(1)? {
        ("Z", "") => 0,
        (sign @ ("+" | "-"), zone) => {
            let (hours, minutes) = zone.split_once(':')?;
            let offset = (parse_number(hours, 2)? * 60 + parse_number(minutes, 2)?) * 60;
            let offset = i64::try_from(offset).ok()?;
            if sign == "+" { offset } else { -offset }
        }
        _ => return None,
    };
    Some((days * 86_400 + seconds - offset, nanoseconds))
}

/// Days from the epoch to a day, perhaps before it. `None` if there is no such day.
fn days_since_epoch(year: u64, month: u64, day: u64) -> Option<i64> {
    let leap_days = |year: u64| year / 4 - year / 100 + year / 400;
    let is_leap = year > 0 && leap_days(year) > leap_days(year - 1) || year == 0;
    let len_of = |month| match month {
        2 => 28 + u64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    if !(1..=12).contains(&month) || day < 1 || day > len_of(month) {
        return None;
    }
    // Days of the years before, counted from the year 0, which is a leap year.
    let before = |year: u64| year * 365 + year.checked_sub(1).map_or(0, |last| leap_days(last) + 1);
    let months: u64 = (1..month).map(len_of).sum();
    let days = i64::try_from(before(year) + months + day - 1).ok()?;
    Some(days - i64::try_from(before(1970)).ok()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Promises: sync-differs
    #[test]
    fn times_are_the_same_as_file_systems_store_them() {
        let time = |seconds, nanoseconds| Timestamp {
            seconds,
            nanoseconds,
        };
        let is_same = |one: (i64, u32), other: (i64, u32)| {
            let (one, other) = (time(one.0, one.1), time(other.0, other.1));
            assert_eq!(one.is_same_as(other), other.is_same_as(one));
            one.is_same_as(other)
        };
        let exact = (5, 123_456_789);
        for stored in [
            123_456_789,
            123_456_700,
            123_456_000,
            123_000_000,
            120_000_000,
            0,
        ] {
            assert!(is_same(exact, (5, stored)), "{stored}");
        }
        for other in [123_456_788, 123_456_800, 123_455_000, 100_000_000] {
            assert!(!is_same(exact, (5, other)), "{other}");
        }
        assert!(!is_same(exact, (6, 0)) && !is_same(exact, (4, 123_456_789)));
        assert!(is_same((1 << 40, 5), ((1 << 31) - 1, 0)));
        assert!(is_same((1 << 40, 5), (15_032_385_535, 0)));
        assert!(is_same((-(1 << 40), 5), (-(1 << 31), 0)));
        assert!(!is_same((7, 0), ((1 << 31) - 1, 0)));
    }

    fn rfc3339(seconds: i64, nanoseconds: u32) -> String {
        Civil::new(seconds, nanoseconds).to_rfc3339().to_string()
    }

    #[test]
    fn rfc3339_of_any_zone_is_parsed() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", (0, 0)),
            ("1969-12-31T23:59:59.999999999Z", (-1, 999_999_999)),
            ("2000-02-29T00:00:00.5Z", (951_782_400, 500_000_000)),
            ("2000-02-29T01:30:00+01:30", (951_782_400, 0)),
            ("2000-02-28T23:00:00.000000001-01:00", (951_782_400, 1)),
            ("0001-01-01T00:00:00Z", (-62_135_596_800, 0)),
            ("0000-01-01T00:00:00Z", (-62_167_219_200, 0)),
        ] {
            assert_eq!(parse_rfc3339(text), Some(expected), "{text}");
        }
        for wrong in [
            "",
            "1970-01-01",
            "1970-01-01T00:00:00",
            "1970-01-01 00:00:00Z",
            "1970-02-29T00:00:00Z",
            "1970-13-01T00:00:00Z",
            "1970-00-01T00:00:00Z",
            "1970-01-01T24:00:00Z",
            "1970-01-01T00:00:00.Z1",
            "1970-01-01T00:00:00.1234567890Z",
            "1970-01-01T00:00:00+0100",
            "1970-01-01T00:00:00+é:00",
        ] {
            assert_eq!(parse_rfc3339(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn known_dates_are_right() {
        assert_eq!(rfc3339(0, 0), "1970-01-01T00:00:00.000000000Z");
        assert_eq!(rfc3339(-1, 999_999_999), "1969-12-31T23:59:59.999999999Z");
        assert_eq!(rfc3339(951_782_400, 1), "2000-02-29T00:00:00.000000001Z");
        assert_eq!(rfc3339(951_868_800, 0), "2000-03-01T00:00:00.000000000Z");
        assert_eq!(rfc3339(4_107_542_400, 0), "2100-03-01T00:00:00.000000000Z");
        assert_eq!(
            rfc3339(253_402_300_799, 0),
            "9999-12-31T23:59:59.000000000Z"
        );
        assert_eq!(
            rfc3339(253_402_300_800, 0),
            "+10000-01-01T00:00:00.000000000Z"
        );
        assert_eq!(
            rfc3339(-62_167_219_201, 0),
            "-0001-12-31T23:59:59.000000000Z"
        );
    }

    #[test]
    fn extreme_times_are_formatted() {
        assert!(rfc3339(i64::MAX, 0).starts_with("+292277026596-12-04T15:30:07"));
        assert!(rfc3339(i64::MIN, 0).starts_with("-292277022657-01-27T08:29:52"));
    }

    proptest! {
        #[test]
        fn the_next_day_is_the_next_date(day in -1_000_000_i64..5_000_000) {
            let civil = |day: i64| Civil::new(day * DAY_SECONDS, 0);
            let (today, tomorrow) = (civil(day), civil(day + 1));
            let same_month = (today.year, today.month) == (tomorrow.year, tomorrow.month);
            if same_month {
                prop_assert_eq!(tomorrow.day, today.day + 1);
            } else {
                prop_assert_eq!(tomorrow.day, 1);
                prop_assert!((28..=31).contains(&today.day));
                prop_assert_eq!(tomorrow.month, today.month % 12 + 1);
                prop_assert_eq!(tomorrow.year, today.year + i64::from(today.month == 12));
            }
        }
    }

    #[test]
    fn times_before_and_after_1970_are_converted() {
        let before = SystemTime::UNIX_EPOCH - Duration::from_millis(1500);
        assert_eq!(system_time(-2, 500_000_000), before);
        assert_eq!(system_time(i64::MAX, 0), system_time(i64::MAX, 0));
        let after = SystemTime::UNIX_EPOCH + Duration::from_millis(1500);
        assert_eq!(system_time(1, 500_000_000), after);
    }
}
