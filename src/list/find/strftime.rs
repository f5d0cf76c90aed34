//! Times as `-printf` writes them, in UTC and English.

use crate::base::time::Civil;
use crate::tar::Timestamp;

const DAY_SECONDS: i64 = 86_400;

const WEEKDAYS: &str = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday";

const MONTHS: &str =
    "January February March April May June July August September October November December";

fn name_of(names: &'static str, number: i64) -> &'static str {
    let number = usize::try_from(number).unwrap_or(usize::MAX);
    names.split(' ').nth(number).unwrap_or_default()
}

/// Formats `time` by a letter of date(1) formats. `None` if it is unknown. Seconds have nine digits of a fraction and a
/// zero, as in GNU find.
pub(super) fn format(time: Timestamp, letter: u8) -> Option<String> {
    let civil = Civil::new(time.seconds, time.nanoseconds);
    let (year, month, day) = (civil.year, civil.month, civil.day);
    let weekday = (time.seconds.div_euclid(DAY_SECONDS) + 4).rem_euclid(7);
    let (hour, minute, second) = (
        civil.second_of_day / 3600,
        civil.second_of_day / 60 % 60,
        civil.second_of_day % 60,
    );
    let half_day_hour = (hour + 11) % 12 + 1;
    let half = if hour < 12 { "AM" } else { "PM" };
    let short = |name: &'static str| name.get(..3).unwrap_or_default();
    let (short_weekday, short_month) = (
        short(name_of(WEEKDAYS, weekday)),
        short(name_of(MONTHS, month - 1)),
    );
    let fraction = format!("{:09}0", time.nanoseconds);
    Some(match letter {
        b'@' => format!("{}.{fraction}", time.seconds),
        b'a' => short_weekday.to_owned(),
        b'A' => name_of(WEEKDAYS, weekday).to_owned(),
        b'b' | b'h' => short_month.to_owned(),
        b'B' => name_of(MONTHS, month - 1).to_owned(),
        b'c' => format!(
            "{short_weekday} {short_month} {day:2} {hour:02}:{minute:02}:{second:02} {year}"
        ),
        b'd' => format!("{day:02}"),
        b'D' | b'x' => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
        b'e' => format!("{day:2}"),
        b'C' => format!("{:02}", year.div_euclid(100)),
        b'F' => format!("{year}-{month:02}-{day:02}"),
        b'H' => format!("{hour:02}"),
        b'I' => format!("{half_day_hour:02}"),
        b'j' => format!("{:03}", day_of_year(civil) + 1),
        b'k' => format!("{hour:2}"),
        b'l' => format!("{half_day_hour:2}"),
        b'm' => format!("{month:02}"),
        b'M' => format!("{minute:02}"),
        b'n' => "\n".to_owned(),
        b'p' => half.to_owned(),
        b'r' => format!("{half_day_hour:02}:{minute:02}:{second:02} {half}"),
        b'R' => format!("{hour:02}:{minute:02}"),
        b's' => time.seconds.to_string(),
        b'S' => format!("{second:02}.{fraction}"),
        b't' => "\t".to_owned(),
        b'T' | b'X' => format!("{hour:02}:{minute:02}:{second:02}.{fraction}"),
        b'y' => format!("{:02}", year.rem_euclid(100)),
        b'Y' => year.to_string(),
        b'z' => "+0000".to_owned(),
        b'Z' => "UTC".to_owned(),
        b'+' => format!("{year}-{month:02}-{day:02}+{hour:02}:{minute:02}:{second:02}.{fraction}"),
        CTIME => format!(
            "{short_weekday} {short_month} {day:2} {hour:02}:{minute:02}:{second:02}.{fraction} {year:04}"
        ),
        LS_CLOCK => format!("{short_month} {day:2} {hour:02}:{minute:02}"),
        LS_YEAR => format!("{short_month} {day:2}  {year}"),
        _ => return format_week(civil, weekday, letter),
    })
}

/// Formats a day or a week by the letters that count weeks.
fn format_week(civil: Civil, weekday: i64, letter: u8) -> Option<String> {
    // Number of the week, whose first day is `first`.
    let week = |first: i64| (day_of_year(civil) + 7 - (weekday - first).rem_euclid(7)) / 7;
    let iso_day = (weekday + 6) % 7 + 1;
    // The year of a week of ISO 8601 is that of its Thursday.
    let (mut iso_year, mut thursday) = (civil.year, day_of_year(civil) + 4 - iso_day);
    if thursday < 0 {
        iso_year -= 1;
        thursday += year_len(iso_year);
    } else if thursday >= year_len(iso_year) {
        thursday -= year_len(iso_year);
        iso_year += 1;
    }
    Some(match letter {
        b'g' => format!("{:02}", iso_year.rem_euclid(100)),
        b'G' => iso_year.to_string(),
        b'u' => iso_day.to_string(),
        b'U' => format!("{:02}", week(0)),
        b'V' => format!("{:02}", thursday / 7 + 1),
        b'w' => weekday.to_string(),
        b'W' => format!("{:02}", week(1)),
        _ => return None,
    })
}

/// The format of `%t`, as no letter.
pub(super) const CTIME: u8 = 0;

const LS_CLOCK: u8 = 1;
const LS_YEAR: u8 = 2;

/// Days of a year.
fn year_len(year: i64) -> i64 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    if is_leap { 366 } else { 365 }
}

/// Days since the first of January.
fn day_of_year(civil: Civil) -> i64 {
    // The days before a month, as if February had 30.
    let before = civil.month * 275 / 9 - 30;
    let missing = 367 - year_len(civil.year);
    before - if civil.month > 2 { missing } else { 0 } + civil.day - 1
}

/// Formats `time` as `ls -l` does: with the clock if it is of the last six months, else with the year.
pub(super) fn format_ls(time: Timestamp, now: Timestamp) -> String {
    const SIX_MONTHS: i64 = 180 * DAY_SECONDS;
    let age = now.seconds.saturating_sub(time.seconds);
    let is_recent = (-3600..=SIX_MONTHS).contains(&age);
    format(time, if is_recent { LS_CLOCK } else { LS_YEAR }).unwrap_or_default()
}
