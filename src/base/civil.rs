//! Conversion of seconds since 1970 to calendar time in UTC.

use std::fmt;

const DAY_SECONDS: i64 = 86_400;

/// Days in 400 years, after which the calendar repeats.
const ERA_DAYS: i64 = 146_097;

/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: i64 = 719_468;

/// A time in the proleptic Gregorian calendar, without limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Civil {
    year: i64,
    month: i64,
    day: i64,
    second_of_day: i64,
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rfc3339(seconds: i64, nanoseconds: u32) -> String {
        Civil::new(seconds, nanoseconds).to_rfc3339().to_string()
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
}
