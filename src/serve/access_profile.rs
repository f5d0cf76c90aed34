//! Access profiles: the ranges of a tree's files that were read, in order. Pure.
//!
//! The first line identifies the format. Each other one holds a range's offset, its length, and the file's
//! path, escaped as by `tarfs ls` on a terminal. Lines that begin with `#` are comments. Paths are those of the
//! merged tree, so that a profile of an image fits any division into layers.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use crate::archive::{AccessedRange, MAX_ACCESSED_RANGES};
use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape;
use crate::index::Index;

const HEADER_LINE: &str = "# tarfs profile 1";

/// Maximum length of a profile, in bytes.
pub const MAX_PROFILE_BYTES: usize = 64 << 20;

/// A profile is unusable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProfileError {
    /// It is of another format.
    #[error("not a profile: its first line is not `{HEADER_LINE}`")]
    NotAProfile,
    /// A line is malformed.
    #[error("line {0} of the profile is not an offset, a length and a path")]
    InvalidLine(usize),
    /// It is too long.
    #[error("together they have more than {MAX_ACCESSED_RANGES} ranges (cut them with --max-size)")]
    TooManyRanges,
}

/// A range of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProfileRange {
    /// The file.
    pub path: ArchivePath,
    /// Offset of its first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// A profile's ranges, in its order, resolved in an archive.
#[derive(PartialEq, Eq, Debug)]
pub struct ResolvedProfile {
    /// Its ranges.
    pub ranges: Vec<AccessedRange>,
    /// Number of ranges in files that the archive does not have.
    pub missing_ranges: usize,
}

/// The profile of `ranges` of files of `index`.
pub fn format_profile(index: &Index, ranges: &[AccessedRange]) -> String {
    let mut text = format!("{HEADER_LINE}\n");
    for range in ranges {
        if let Some(path) = index.path(range.ino) {
            push_range(&mut text, &path, (range.offset, range.len));
        }
    }
    text
}

fn push_range(text: &mut String, path: &ArchivePath, (offset, len): (u64, u64)) {
    let path = escape(path.as_bytes());
    let written = writeln!(text, "{offset} {len} {path}");
    debug_assert!(written.is_ok(), "a String takes everything");
}

/// Looks up the files of `profile` in `index`.
///
/// # Errors
/// If it is no profile.
pub fn resolve_profile(profile: &str, index: &Index) -> Result<ResolvedProfile, ProfileError> {
    let mut found = ResolvedProfile {
        ranges: Vec::new(),
        missing_ranges: 0,
    };
    for range in parse_profile(profile)? {
        let ProfileRange { path, offset, len } = range?;
        match index.find(&path) {
            Some(entry) => found.ranges.push(AccessedRange {
                ino: entry.ino(),
                offset,
                len: len.min(entry.size().saturating_sub(offset)),
            }),
            None => found.missing_ranges += 1,
        }
    }
    Ok(found)
}

/// Parses `profile`, one range at a time. Ignores ranges beyond [`MAX_ACCESSED_RANGES`].
///
/// # Errors
/// If it is of another format. A malformed line is an error of that item.
pub fn parse_profile(
    profile: &str,
) -> Result<impl Iterator<Item = Result<ProfileRange, ProfileError>>, ProfileError> {
    let mut lines = (1..).zip(profile.lines());
    let first = lines.next().map(|(_, first)| first.trim_end());
    if first != Some(HEADER_LINE) {
        return Err(ProfileError::NotAProfile);
    }
    let lines = lines.filter(|(_, line)| !line.starts_with('#') && !line.is_empty());
    let parse = |(number, line)| parse_range(line).ok_or(ProfileError::InvalidLine(number));
    Ok(lines.take(MAX_ACCESSED_RANGES).map(parse))
}

fn parse_range(line: &str) -> Option<ProfileRange> {
    let mut words = line.splitn(3, ' ');
    let offset = words.next()?.parse().ok()?;
    let len = words.next()?.parse().ok()?;
    let path = ArchivePath::sanitize(&unescape(words.next()?)?).path;
    Some(ProfileRange { path, offset, len })
}

/// Merges `profiles` into one of at most `max_bytes` bytes of files. Sorts the ranges by the number of bytes
/// before them in their own profiles. Bytes that several ranges contain come once, where they come first.
///
/// # Errors
/// With more than [`MAX_ACCESSED_RANGES`] ranges.
pub fn merge_profiles(
    profiles: Vec<Vec<ProfileRange>>,
    max_bytes: u64,
) -> Result<String, ProfileError> {
    let mut ranges = Vec::new();
    for profile in profiles {
        let mut bytes_before = 0_u64;
        for range in profile {
            let len = range.len;
            ranges.push((bytes_before, range));
            bytes_before = bytes_before.saturating_add(len);
        }
    }
    // A stable sort, so that equal places have the order of the profiles.
    ranges.sort_by_key(|(bytes_before, _)| *bytes_before);
    let mut text = format!("{HEADER_LINE}\n");
    let (mut left, mut ranges_left) = (max_bytes, MAX_ACCESSED_RANGES);
    let mut covered = HashMap::<ArchivePath, BTreeMap<u64, u64>>::new();
    for (_, range) in ranges {
        let (start, end) = (range.offset, range.offset.saturating_add(range.len));
        let covered = covered.entry(range.path.clone()).or_default();
        for (start, end) in cover(covered, start, end) {
            let len = (end - start).min(left);
            if len == 0 {
                return Ok(text);
            }
            if ranges_left == 0 {
                return Err(ProfileError::TooManyRanges);
            }
            (left, ranges_left) = (left - len, ranges_left - 1);
            push_range(&mut text, &range.path, (start, len));
        }
    }
    Ok(text)
}

/// Adds the range from `start` to `end` to `covered`, the ends of disjoint ranges by start. Returns the parts
/// that it did not contain.
fn cover(covered: &mut BTreeMap<u64, u64>, start: u64, end: u64) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    let mut from = start;
    let mut whole = (start, end);
    if let Some((&before, &until)) = covered.range(..start).next_back()
        && until >= start
    {
        whole = (before, end.max(until));
        from = until;
        covered.remove(&before);
    }
    while let Some((&next, &until)) = covered.range(start..=end).next() {
        if next > from {
            parts.push((from, next));
        }
        from = from.max(until);
        whole.1 = whole.1.max(until);
        covered.remove(&next);
    }
    if end > from {
        parts.push((from, end));
    }
    if whole.1 > whole.0 {
        covered.insert(whole.0, whole.1);
    }
    parts
}

/// Reverses [`escape`]; `None` for text that is not escaped correctly.
fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        let (&letter, tail) = rest.split_first()?;
        let (byte, tail) = match letter {
            b'\\' | b' ' => (letter, tail),
            b'n' => (b'\n', tail),
            b'r' => (b'\r', tail),
            b't' => (b'\t', tail),
            _ => {
                let (digits, tail) = rest.split_at_checked(3)?;
                let digits = std::str::from_utf8(digits).ok()?;
                (u8::from_str_radix(digits, 8).ok()?, tail)
            }
        };
        bytes.push(byte);
        rest = tail;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::extent::{Extent, Plain};
    use crate::index::{Builder, Ino, Options, Origin};
    use crate::tar::{Member, MemberKind};
    use proptest::prelude::*;

    /// Returns an index of files of 100 bytes.
    fn index(names: &[&[u8]]) -> Index {
        let mut builder = Builder::new(Options::default());
        for (number, name) in names.iter().enumerate() {
            let member = Member {
                header: Plain(number as u64 * 1024),
                payload: Extent::with_len(Plain(number as u64 * 1024 + 512), 100),
                size: 100,
                ..Member::new(*name, MemberKind::File)
            };
            builder.add_member(&member).expect("well-formed");
        }
        builder.finish(Origin::default())
    }

    fn touched(index: &Index, name: &[u8], offset: u64, len: u64) -> AccessedRange {
        let entry = index.find(&ArchivePath::sanitize(name).path);
        AccessedRange {
            ino: entry.expect("there").ino(),
            offset,
            len,
        }
    }

    // Promises: profile-mismatch
    #[test]
    fn profile_is_resolved_in_another_archive_by_path() {
        let here = index(&[b"a", b"dir/b c", b"gr\xfcn\n"]);
        let ranges = [
            touched(&here, b"gr\xfcn\n", 10, 20),
            touched(&here, b"dir/b c", 0, 100),
            touched(&here, b"a", 0, 5),
        ];
        let text = format_profile(&here, &ranges);
        let expected = "# tarfs profile 1\n10 20 gr\\374n\\n\n0 100 dir/b\\ c\n0 5 a\n";
        assert_eq!(text, expected);
        let there = index(&[b"other", b"a", b"gr\xfcn\n"]);
        let found = resolve_profile(&text, &there).expect("a profile");
        assert_eq!(found.missing_ranges, 1);
        let expected = [
            touched(&there, b"gr\xfcn\n", 10, 20),
            touched(&there, b"a", 0, 5),
        ];
        assert_eq!(found.ranges, expected);
    }

    #[test]
    fn ranges_are_clamped_and_comments_skipped() {
        let index = index(&[b"a"]);
        let text = "# tarfs profile 1\n# a remark\n\n90 500 a\n700 5 a\n";
        let found = resolve_profile(text, &index).expect("a profile");
        assert_eq!(
            found.ranges,
            [touched(&index, b"a", 90, 10), touched(&index, b"a", 700, 0)]
        );
    }

    // Promises: profile-mismatch
    #[test]
    fn invalid_profile_is_rejected_with_its_line() {
        let index = index(&[b"a"]);
        assert_eq!(resolve_profile("", &index), Err(ProfileError::NotAProfile));
        assert_eq!(
            resolve_profile("0 1 a\n", &index),
            Err(ProfileError::NotAProfile)
        );
        for line in ["0 1", "x 1 a", "0 -1 a", "0 1 a\\", "0 1 \\777", "0 1 \\12"] {
            let text = format!("# tarfs profile 1\n0 1 a\n{line}\n");
            assert_eq!(
                resolve_profile(&text, &index),
                Err(ProfileError::InvalidLine(3)),
                "{line}"
            );
        }
    }

    fn parsed(text: &str) -> Vec<ProfileRange> {
        let text = format!("{HEADER_LINE}\n{text}");
        let ranges = parse_profile(&text).expect("a profile");
        ranges.collect::<Result<_, _>>().expect("valid lines")
    }

    fn merged(profiles: &[&str], max_bytes: u64) -> String {
        let profiles = profiles.iter().map(|text| parsed(text)).collect();
        let text = merge_profiles(profiles, max_bytes).expect("few ranges");
        let ranges = text.strip_prefix(HEADER_LINE).expect("a profile");
        ranges.trim_start().to_owned()
    }

    // Promises: profile-merge
    #[test]
    fn merged_profiles_have_the_order_of_bytes_before() {
        let one = "0 10 a\n0 30 b\n0 5 c\n";
        let other = "0 20 x\n0 10 /a\n7 9 y\\ z\n";
        let expected = "0 10 a\n0 20 x\n0 30 b\n7 9 y\\ z\n0 5 c\n";
        assert_eq!(merged(&[one, other], u64::MAX), expected);
        assert_eq!(merged(&[one], u64::MAX), one);
        assert_eq!(merged(&[], u64::MAX), "");
    }

    // Promises: profile-merge
    #[test]
    fn overlapping_ranges_are_merged_at_the_first() {
        let one = "10 10 a\n0 1 b\n30 10 a\n";
        let other = "0 0 c\n5 30 a\n0 50 a\n";
        let expected = "10 10 a\n5 5 a\n20 15 a\n0 1 b\n35 5 a\n0 5 a\n40 10 a\n";
        assert_eq!(merged(&[one, other], u64::MAX), expected);
    }

    // Promises: profile-merge
    #[test]
    fn merged_profile_is_cut_at_a_size() {
        let profile = "0 10 a\n0 30 b\n0 5 c\n";
        assert_eq!(merged(&[profile], 45), profile);
        assert_eq!(merged(&[profile, profile], 40), "0 10 a\n0 30 b\n");
        assert_eq!(merged(&[profile], 12), "0 10 a\n0 2 b\n");
        assert_eq!(merged(&[profile], 0), "");
        let huge = format!("{} 9 a\n5 {} a\n0 1 b\n", u64::MAX - 1, u64::MAX);
        let expected = format!("{} 1 a\n5 1 a\n", u64::MAX - 1);
        assert_eq!(merged(&[&huge], 2), expected);
    }

    #[test]
    fn missing_file_is_left_out_of_the_profile() {
        let index = index(&[b"a"]);
        let gone = AccessedRange {
            ino: Ino(77),
            offset: 0,
            len: 1,
        };
        assert_eq!(format_profile(&index, &[gone]), "# tarfs profile 1\n");
    }

    proptest! {
        // Promises: profile-merge
        #[test]
        fn merged_profile_covers_each_byte_once(
            reads in prop::collection::vec((0..2_usize, 0..3_u8, 0..60_u64, 0..20_u64), 0..30)
        ) {
            let bytes = |ranges: &[ProfileRange]| {
                let bytes = ranges.iter().flat_map(|range| {
                    let bytes = range.offset..range.offset + range.len;
                    bytes.map(|byte| (range.path.clone(), byte))
                });
                let mut bytes: Vec<_> = bytes.collect();
                bytes.sort_unstable();
                bytes
            };
            let mut profiles = [Vec::new(), Vec::new()];
            for (profile, name, offset, len) in reads {
                let path = ArchivePath::sanitize(&[b'a' + name]).path;
                profiles[profile].push(ProfileRange { path, offset, len });
            }
            let mut expected = bytes(&profiles.concat());
            expected.dedup();
            let merged = merge_profiles(profiles.to_vec(), u64::MAX).expect("few ranges");
            let merged = parse_profile(&merged).expect("a profile");
            let merged: Vec<_> = merged.collect::<Result<_, _>>().expect("valid lines");
            prop_assert_eq!(bytes(&merged), expected);
        }

        // Promises: profile-format
        #[test]
        fn escaped_name_is_unescaped(name in prop::collection::vec(any::<u8>(), 0..30)) {
            prop_assert_eq!(unescape(&escape(&name)), Some(name));
        }
    }
}
