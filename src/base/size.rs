//! Sizes as users write them.

use std::str::FromStr;

/// A number of bytes as users write it: `4096`, `64K`, `8MiB`, `1.5GB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size(pub u64);

impl Size {
    /// Returns this size if it is not less than `min` bytes.
    ///
    /// # Errors
    /// A text for the user with the minimum.
    pub fn at_least(self, min: u64) -> Result<Self, String> {
        if self.0 >= min {
            return Ok(self);
        }
        let (min, unit) = match min {
            bytes if bytes.is_multiple_of(1 << 20) => (bytes >> 20, "MiB"),
            bytes => (bytes >> 10, "KiB"),
        };
        Err(format!("the smallest valid value is {min}{unit}"))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

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
