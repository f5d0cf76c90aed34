//! Sizes, times and versions of archives in text for users.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tarfs::internal::time::Civil;
use tarfs::serve::{IndexState, Phase};

/// Units of 1024 bytes, each with its number of bits.
const UNITS: [(u32, &str); 5] = [
    (50, "PiB"),
    (40, "TiB"),
    (30, "GiB"),
    (20, "MiB"),
    (10, "KiB"),
];

/// Least number of the unit that a size is shown in.
const MIN_SHOWN: u64 = 10;

/// Formats `count` in the largest unit of which there are at least ten.
pub(crate) fn format_bytes(count: u64) -> String {
    let unit = UNITS.iter().find(|(bits, _)| count >> bits >= MIN_SHOWN);
    unit.map_or_else(
        || format!("{count} B"),
        |(bits, unit)| format!("{} {unit}", count >> bits),
    )
}

/// Formats how long ago the Unix time `seconds` was.
pub(crate) fn format_age(seconds: u64, now: SystemTime) -> String {
    let then = UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    let seconds = then
        .and_then(|then| now.duration_since(then).ok())
        .map_or(0, |since| since.as_secs());
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// Formats the fingerprint of an archive: its length with a unit, and the time of a file instead of its numbers.
pub(crate) fn format_version(fingerprint: &str) -> String {
    let part = |word: &str| {
        let Some((name, value)) = word.split_once('=') else {
            return Some(word.to_owned());
        };
        match (name, value.parse::<i64>()) {
            ("len", Ok(len)) => Some(format_bytes(len.cast_unsigned())),
            ("mtime", Ok(nanoseconds)) => {
                let time = Civil::new(nanoseconds.div_euclid(1_000_000_000), 0);
                Some(format!("of {}", time.to_date_and_time()))
            }
            ("dev" | "ino" | "ctime", _) => None,
            _ => Some(word.to_owned()),
        }
    };
    let parts: Vec<_> = fingerprint.split(' ').filter_map(part).collect();
    parts.join(" ")
}

/// Formats the state of an index.
pub(crate) fn format_index(state: &IndexState) -> String {
    match (state.phase, state.of_bytes) {
        (Phase::Complete, _) => "complete".to_owned(),
        (Phase::Scanning, Some(of)) => {
            let scanned = format_bytes(state.scanned_bytes);
            format!("scanning, {scanned} of {} so far", format_bytes(of))
        }
        (Phase::Scanning, None) => {
            format!("scanning, {} so far", format_bytes(state.scanned_bytes))
        }
        (Phase::Failed, _) => {
            let why = state.failure.as_deref().unwrap_or("unknown error");
            format!("incomplete, because the scan failed: {why}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: status-counters
    #[test]
    fn sizes_have_units_up_to_pib() {
        let shown = [
            0,
            10_239,
            10_240,
            50 << 20,
            50 << 30,
            12 << 40,
            9 << 50,
            10 << 50,
        ]
        .map(format_bytes);
        let expected = [
            "0 B", "10239 B", "10 KiB", "50 MiB", "50 GiB", "12 TiB", "9216 TiB", "10 PiB",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn age_is_zero_after_the_clock_went_back() {
        assert_eq!(format_age(u64::MAX, UNIX_EPOCH), "0 s ago");
        assert_eq!(format_age(5, UNIX_EPOCH), "0 s ago");
    }

    // Promises: status-counters
    #[test]
    fn version_of_a_file_is_its_size_and_time() {
        let file = "len=53687091200 dev=65024 ino=7 mtime=1779294449123456789 ctime=1";
        assert_eq!(format_version(file), "50 GiB of 2026-05-20 16:27:29");
        let part = format!("start=512 of {file}");
        assert_eq!(
            format_version(&part),
            "start=512 of 50 GiB of 2026-05-20 16:27:29"
        );
        assert_eq!(
            format_version("len=10 etag=\"x y=1\""),
            "10 B etag=\"x y=1\""
        );
    }
}
