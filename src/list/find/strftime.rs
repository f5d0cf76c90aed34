//! Times as `-printf` writes them, in UTC and English.

use crate::base::time::{Civil, MONTHS};
use crate::tar::Timestamp;

const DAY_SECONDS: i64 = 86_400;

const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

const LONG_MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

fn name_of(names: &[&'static str], number: i64) -> &'static str {
    let number = usize::try_from(number).ok();
    number
        .and_then(|it| names.get(it))
        .copied()
        .unwrap_or_default()
}

/// A time, and its parts.
struct Parts {
    time: Timestamp,
    civil: Civil,
    /// Days since Sunday.
    weekday: i64,
    /// Days since the first of January.
    day_of_year: i64,
}

impl Parts {
    fn new(time: Timestamp) -> Self {
        let civil = Civil::new(time.seconds, time.nanoseconds);
        let is_leap = civil.year % 4 == 0 && (civil.year % 100 != 0 || civil.year % 400 == 0);
        // Months before it have 30 days and a half, on average; February lacks two, or one.
        let of_months = (civil.month * 275 / 9 - 30)
            - match civil.month {
                1 | 2 => 0,
                _ if is_leap => 1,
                _ => 2,
            };
        Self {
            time,
            civil,
            weekday: (time.seconds.div_euclid(DAY_SECONDS) + 4).rem_euclid(7),
            day_of_year: of_months + civil.day - 1,
        }
    }

    /// Seconds with nine digits of a fraction and a zero, as GNU find writes them.
    fn clock(&self) -> String {
        let second = self.civil.second_of_day;
        let fraction = self.time.nanoseconds;
        format!(
            "{:02}:{:02}:{:02}.{fraction:09}0",
            second / 3600,
            second / 60 % 60,
            second % 60
        )
    }

    fn half_day_hour(&self) -> i64 {
        (self.civil.second_of_day / 3600 + 11) % 12 + 1
    }

    fn half(&self) -> &'static str {
        if self.civil.second_of_day < DAY_SECONDS / 2 {
            "AM"
        } else {
            "PM"
        }
    }

    /// Number of the week, whose first day is `first` (0 is Sunday).
    fn week(&self, first: i64) -> i64 {
        (self.day_of_year + 7 - (self.weekday - first).rem_euclid(7)) / 7
    }

    /// The time by the letter of a date(1) format.
    fn field(&self, letter: u8) -> Option<String> {
        let Civil {
            year,
            month,
            day,
            second_of_day: second,
            ..
        } = self.civil;
        let weekday = name_of(&WEEKDAYS, self.weekday);
        let short_weekday = weekday.get(..3).unwrap_or_default();
        let short_month = name_of(&MONTHS, month - 1);
        let (hour, minute) = (second / 3600, second / 60 % 60);
        let short_year = year.rem_euclid(100);
        Some(match letter {
            b'@' => format!("{}.{:09}0", self.time.seconds, self.time.nanoseconds),
            b'a' => short_weekday.to_owned(),
            b'A' => weekday.to_owned(),
            b'b' | b'h' => short_month.to_owned(),
            b'B' => name_of(&LONG_MONTHS, month - 1).to_owned(),
            b'c' => format!(
                "{short_weekday} {short_month} {day:2} {hour:02}:{minute:02}:{:02} {year}",
                second % 60
            ),
            b'd' => format!("{day:02}"),
            b'D' | b'x' => format!("{month:02}/{day:02}/{short_year:02}"),
            b'F' => format!("{year}-{month:02}-{day:02}"),
            b'H' => format!("{hour:02}"),
            b'I' => format!("{:02}", self.half_day_hour()),
            b'j' => format!("{:03}", self.day_of_year + 1),
            b'k' => format!("{hour:2}"),
            b'l' => format!("{:2}", self.half_day_hour()),
            b'm' => format!("{month:02}"),
            b'M' => format!("{minute:02}"),
            b'p' => self.half().to_owned(),
            b'r' => format!(
                "{:02}:{minute:02}:{:02} {}",
                self.half_day_hour(),
                second % 60,
                self.half()
            ),
            b'S' => self.clock().split_off(6),
            b'T' | b'X' => self.clock(),
            b'U' => format!("{:02}", self.week(0)),
            b'w' => self.weekday.to_string(),
            b'W' => format!("{:02}", self.week(1)),
            b'y' => format!("{short_year:02}"),
            b'Y' => year.to_string(),
            b'Z' => "UTC".to_owned(),
            b'+' => format!("{year}-{month:02}-{day:02}+{}", self.clock()),
            _ => return None,
        })
    }
}

/// Whether [`format`] knows this letter.
pub(super) fn is_field(letter: u8) -> bool {
    Parts::new(Timestamp::default()).field(letter).is_some()
}

/// Formats `time` by the letter of a `-printf` directive such as `%TY`.
pub(super) fn format(time: Timestamp, letter: u8) -> String {
    Parts::new(time).field(letter).unwrap_or_default()
}

/// Formats `time` as `%t` does: `Sun Sep 13 12:26:40.1234567890 2020`.
pub(super) fn format_ctime(time: Timestamp) -> String {
    let parts = Parts::new(time);
    let field = |letter| parts.field(letter).unwrap_or_default();
    format!(
        "{} {} {:2} {} {}",
        field(b'a'),
        field(b'b'),
        parts.civil.day,
        parts.clock(),
        parts.civil.year
    )
}

/// Formats `time` as `ls -l` does: with the clock if it is of the last six months, else with the year.
pub(super) fn format_ls(time: Timestamp, now: Timestamp) -> String {
    const SIX_MONTHS: i64 = 180 * DAY_SECONDS;
    let parts = Parts::new(time);
    let month = name_of(&MONTHS, parts.civil.month - 1);
    let day = parts.civil.day;
    let age = now.seconds.saturating_sub(time.seconds);
    if (-3600..=SIX_MONTHS).contains(&age) {
        let clock = parts.clock();
        format!("{month} {day:2} {}", clock.get(..5).unwrap_or_default())
    } else {
        format!("{month} {day:2}  {}", parts.civil.year)
    }
}
