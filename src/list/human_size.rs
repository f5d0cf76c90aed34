//! Sizes with units, as ls(1) and du(1) show them.

const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];

/// `bytes` with a unit of 1024: `512`, `4.0K`, `1.5M`, `12G`. Rounded up, with one decimal digit below ten.
pub fn human_size(bytes: u64) -> String {
    if bytes < 1024 {
        return bytes.to_string();
    }
    let mut unit = 1_u128;
    for letter in UNITS {
        unit *= 1024;
        let tenths = (u128::from(bytes) * 10).div_ceil(unit);
        if tenths < 100 {
            return format!("{}.{}{letter}", tenths / 10, tenths % 10);
        }
        let whole = u128::from(bytes).div_ceil(unit);
        if whole < 1024 {
            return format!("{whole}{letter}");
        }
    }
    format!("{}E", u128::from(bytes).div_ceil(unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_as_by_ls() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1025, "1.1K"),
            (10_137, "9.9K"),
            (10_138, "10K"),
            (1023 * 1024, "1023K"),
            (1023 * 1024 + 1, "1.0M"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(human_size(bytes), text, "{bytes}");
        }
    }
}
