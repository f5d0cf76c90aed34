//! Sizes and whole numbers, the values of flags.

use std::ops::RangeInclusive;
use std::str::FromStr;

/// A number of bytes as users write it: `4096`, `64K`, `8MiB`, `1.5GB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    /// `K`, `M`, `G`, `T` and `KiB` and so on are powers of 1024; `KB` and so on are powers of 1000.
    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("'{text}' is not a size like 4096, 64K, 8MiB or 1.5GB");
        let end = text
            .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let number: f64 = number.parse().map_err(|_| invalid())?;
        let unit = unit.trim().to_ascii_lowercase();
        let (exponent, base) = match unit.as_str() {
            "" | "b" => (0, 1024_f64),
            "k" | "kib" => (1, 1024.0),
            "m" | "mib" => (2, 1024.0),
            "g" | "gib" => (3, 1024.0),
            "t" | "tib" => (4, 1024.0),
            "kb" => (1, 1000.0),
            "mb" => (2, 1000.0),
            "gb" => (3, 1000.0),
            "tb" => (4, 1000.0),
            _ => return Err(invalid()),
        };
        let bytes = number * base.powi(exponent);
        if !(0.0..=9e18).contains(&bytes) {
            return Err(invalid());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range is checked, and fractions of a byte are dropped"
        )]
        Ok(Self(bytes as u64))
    }
}

/// Parses a size of at least `min` bytes.
pub(super) fn size_parser(min: u64) -> impl Fn(&str) -> Result<Size, String> + Clone {
    move |text| {
        let size: Size = text.parse()?;
        if size.0 >= min {
            return Ok(size);
        }
        let (min, unit) = match min {
            bytes if bytes.is_multiple_of(1 << 20) => (bytes >> 20, "MiB"),
            bytes => (bytes >> 10, "KiB"),
        };
        Err(format!("the smallest valid value is {min}{unit}"))
    }
}

pub(crate) fn seconds_parser(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| parse_whole_number(text, &range, " of seconds")
}

pub(crate) fn count_parser<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let count = parse_whole_number(text, &range, "")?;
        T::try_from(count).map_err(|_| format!("{count} is too large"))
    }
}

fn parse_whole_number(text: &str, range: &RangeInclusive<u64>, unit: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    let (start, end) = (range.start(), range.end());
    number.ok_or_else(|| match *end {
        u64::MAX => format!(
            "expected a whole number{unit}, for example {}",
            start.max(&1)
        ),
        end => format!("expected a whole number{unit} from {start} to {end}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_below_minimum_is_rejected_with_the_minimum() {
        assert_eq!(size_parser(32 << 20)("32MiB"), Ok(Size(32 << 20)));
        let refused = size_parser(32 << 20)("31MiB").expect_err("too little");
        assert_eq!(refused, "the smallest valid value is 32MiB");
        let refused = size_parser(4096)("0").expect_err("nothing");
        assert_eq!(refused, "the smallest valid value is 4KiB");
    }

    #[test]
    fn number_out_of_range_is_rejected_with_the_range() {
        assert_eq!(seconds_parser(1..=60)("60"), Ok(60));
        for invalid in ["abc", "0", "61", "-1", "1.5", "", "99999999999999999999"] {
            let refused = seconds_parser(1..=60)(invalid).expect_err("out of range");
            assert_eq!(refused, "expected a whole number of seconds from 1 to 60");
        }
        let refused = count_parser::<u64>(0..=u64::MAX)("many").expect_err("no number");
        assert_eq!(refused, "expected a whole number, for example 1");
        assert!(count_parser::<u8>(0..=1000)("300").is_err());
    }

    #[test]
    fn size_with_unit_is_parsed() {
        let size = |text: &str| text.parse::<Size>().ok().map(|size| size.0);
        assert_eq!(size("4096"), Some(4096));
        assert_eq!(size("64K"), Some(65536));
        assert_eq!(size("8MiB"), Some(8 << 20));
        assert_eq!(size("1.5GB"), Some(1_500_000_000));
        for invalid in ["", "x", "1X", "-1", "1e99T", "99999999999999T"] {
            assert_eq!(size(invalid), None, "{invalid}");
        }
    }
}
