//! Numbers, sizes and ages in arguments.

use crate::tar::Timestamp;

const SECOND: i128 = 1_000_000_000;

/// Nanoseconds of a day.
pub(super) const DAY: i128 = 86_400 * SECOND;

/// Nanoseconds of a minute.
pub(super) const MINUTE: i128 = 60 * SECOND;

/// `N`, `+N` or `-N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NumericTest {
    /// Exactly this number.
    Equal(u64),
    /// More than it.
    More(u64),
    /// Less than it.
    Less(u64),
}

impl NumericTest {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (make, digits): (fn(u64) -> Self, _) = match text.split_at_checked(1)? {
            ("+", digits) => (Self::More, digits),
            ("-", digits) => (Self::Less, digits),
            _ => (Self::Equal, text),
        };
        parse_digits(digits).map(make)
    }

    pub(super) fn matches(self, value: u64) -> bool {
        match self {
            Self::Equal(wanted) => value == wanted,
            Self::More(wanted) => value > wanted,
            Self::Less(wanted) => value < wanted,
        }
    }
}

impl NumericTest {
    /// Whether this many units of time are wanted. A part of a unit is more than none, and less than one.
    pub(super) fn matches_age(self, age: i128, unit: i128) -> bool {
        let time = |count: u64| i128::from(count) * unit;
        match self {
            Self::Equal(wanted) => (time(wanted)..time(wanted) + unit).contains(&age),
            Self::More(wanted) => age > time(wanted),
            Self::Less(wanted) => age < time(wanted),
        }
    }
}

/// Parses a decimal number without a sign.
pub(super) fn parse_digits(text: &str) -> Option<u64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

/// The argument of `-size`: a number of units, to which sizes are rounded up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size {
    unit: u64,
    count: NumericTest,
}

impl Size {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let units = [
            ('c', 1),
            ('w', 2),
            ('b', 512),
            ('k', 1 << 10),
            ('M', 1 << 20),
            ('G', 1 << 30),
        ];
        let with_unit =
            |&(letter, unit): &(char, u64)| text.strip_suffix(letter).map(|count| (count, unit));
        let (count, unit) = units.iter().find_map(with_unit).unwrap_or((text, 512));
        let count = NumericTest::parse(count)?;
        Some(Self { unit, count })
    }

    pub(super) fn matches(self, bytes: u64) -> bool {
        self.count.matches(bytes.div_ceil(self.unit))
    }
}

/// Nanoseconds since the epoch.
pub(super) fn nanoseconds(time: Timestamp) -> i128 {
    i128::from(time.seconds) * SECOND + i128::from(time.nanoseconds)
}

/// Times that a test accepts, in nanoseconds since the epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TimeRange {
    /// Later than this.
    After(i128),
    /// Earlier than this.
    Before(i128),
    /// Later than the first, and not later than the second.
    Between(i128, i128),
}

impl TimeRange {
    /// Parses an age in units of `unit`, perhaps with a fraction. `day_start` is a day before the time from which
    /// ages count. `None` if it is no number.
    pub(super) fn parse_age(text: &str, unit: i128, day_start: i128) -> Option<Self> {
        let number = text.strip_prefix(['+', '-']).unwrap_or(text);
        // Rust also reads names, such as `inf`, and a second sign.
        let is_decimal = |byte: u8| byte.is_ascii_digit() || b".eE+-".contains(&byte);
        if number.starts_with(['+', '-']) || !number.bytes().all(is_decimal) {
            return None;
        }
        let units: f64 = number.parse().ok()?;
        // A day has few enough nanoseconds for an exact conversion, and a huge age becomes the longest one.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            reason = "saturates, and loses less than a microsecond in ages of years"
        )]
        let age = (units * unit as f64) as i128;
        let minutes_origin = day_start.saturating_add(DAY);
        let time = |origin: i128| origin.saturating_sub(age);
        Some(match (text.as_bytes().first(), unit == DAY) {
            (Some(b'+'), true) => Self::Before(time(day_start)),
            (Some(b'+'), false) => Self::Before(time(minutes_origin)),
            // As in GNU find, a day counts as a second shorter here.
            (Some(b'-'), true) => Self::After(time(minutes_origin - SECOND)),
            (Some(b'-'), false) => Self::After(time(minutes_origin)),
            (_, is_days) => {
                let start = time(if is_days { day_start } else { minutes_origin });
                Self::Between(start, start.saturating_add(unit))
            }
        })
    }

    pub(super) fn contains(self, time: Timestamp) -> bool {
        let time = nanoseconds(time);
        match self {
            Self::After(start) => time > start,
            Self::Before(end) => time < end,
            Self::Between(start, end) => time > start && time <= end,
        }
    }
}
