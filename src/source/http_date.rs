//! Parser for HTTP dates; pure.

const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];

const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];

/// Parses a date like `Sun, 06 Nov 1994 08:49:37 GMT` to seconds since the epoch. This is the format that
/// servers must send (IMF-fixdate, RFC 9110, 5.6.7). Returns `None` for the two obsolete formats, invalid
/// days, and dates before 1970.
pub(super) fn parse_http_date(text: &str) -> Option<u64> {
    let (weekday, rest) = text.split_once(", ")?;
    let mut words = rest.split(' ');
    let mut word = || words.next();
    let (day, month, year) = (
        parse_number(word()?, 2)?,
        word()?,
        parse_number(word()?, 4)?,
    );
    let (time, zone) = (word()?, word()?);
    if words.next().is_some() || zone != "GMT" {
        return None;
    }
    let month = MONTHS.iter().position(|&known| known == month)? as u64 + 1;
    let mut parts = time.split(':');
    let mut part = || parts.next().and_then(|part| parse_number(part, 2));
    let (hour, minute, second) = (part()?, part()?, part()?);
    // A leap second counts as the first second of the next minute.
    if parts.next().is_some() || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let days = days_since_epoch(year, month, day)?;
    let is_right = WEEKDAYS.get(usize::try_from(days % 7).ok()?) == Some(&weekday);
    is_right.then_some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// Parses exactly `len` digits.
fn parse_number(text: &str, len: usize) -> Option<u64> {
    let is_plain = text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

/// Days from the epoch to a day of the Gregorian calendar.
fn days_since_epoch(year: u64, month: u64, day: u64) -> Option<u64> {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let len_of = |month| match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    if year < 1970 || day < 1 || day > len_of(month) {
        return None;
    }
    let years: u64 = (1970..year)
        .map(|year| 365 + u64::from(is_leap(year)))
        .sum();
    let months: u64 = (1..month).map(len_of).sum();
    Some(years + months + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_date_is_parsed_to_unix_seconds() {
        for (text, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Tue, 29 Feb 2000 23:59:59 GMT", 951_868_799),
            ("Sat, 31 Dec 2016 23:59:60 GMT", 1_483_228_800),
            ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_799),
        ] {
            assert_eq!(parse_http_date(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn malformed_http_date_is_rejected() {
        for text in [
            "",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
            "Mon, 06 Nov 1994 08:49:37 GMT",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 06 Nov 1994 08:49:37 GMT ",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 Nov 1994 08:60:37 GMT",
            "Sun, 06 Nov 1994 08:49:61 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 06 Nov 1994 08:49:37:00 GMT",
            "Wed, 31 Nov 1994 08:49:37 GMT",
            "Mon, 29 Feb 2100 00:00:00 GMT",
            "Wed, 31 Dec 1969 23:59:59 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse_http_date(text), None, "{text}");
        }
    }
}
