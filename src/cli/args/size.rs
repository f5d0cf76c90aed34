//! Sizes and whole numbers, the values of flags.

use std::ops::RangeInclusive;

use tarfs::internal::size::Size;

/// Parses a size of at least `min` bytes.
pub(super) fn size_parser(min: u64) -> impl Fn(&str) -> Result<Size, String> + Clone {
    move |text| text.parse::<Size>()?.at_least(min)
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
}
