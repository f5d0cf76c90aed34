//! Access profiles: the ranges of an archive that were read, in order. Pure.
//!
//! The first line identifies the format. Each other one holds a range's offset, its length, and the file's
//! path, escaped as by `tarfs ls` on a terminal. Lines that begin with `#` are comments.

use std::fmt::Write;

use tarfs::ArchivePath;
use tarfs::archive::AccessedRange;
use tarfs::index::Index;
use tarfs::list::escape;

const HEADER_LINE: &str = "# tarfs profile 1";

const MAX_RANGES: usize = 1 << 20;

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ProfileError {
    #[error("not a profile: its first line is not `{HEADER_LINE}`")]
    NotAProfile,
    #[error("line {0} of the profile is not an offset, a length and a path")]
    InvalidLine(usize),
}

/// A profile's ranges, in its order, resolved in an archive.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct ResolvedProfile {
    pub ranges: Vec<AccessedRange>,
    /// Number of ranges in files that the archive does not have.
    pub missing_ranges: usize,
}

pub(crate) fn format_profile(index: &Index, ranges: &[AccessedRange]) -> String {
    let mut text = format!("{HEADER_LINE}\n");
    for range in ranges {
        let Some(path) = index.path(range.ino) else {
            continue;
        };
        let path = escape(path.as_bytes());
        let written = writeln!(text, "{} {} {path}", range.offset, range.len);
        debug_assert!(written.is_ok(), "a String takes everything");
    }
    text
}

pub(crate) fn resolve_profile(
    profile: &str,
    index: &Index,
) -> Result<ResolvedProfile, ProfileError> {
    let mut lines = profile.lines().enumerate();
    if lines
        .next()
        .is_none_or(|(_, first)| first.trim_end() != HEADER_LINE)
    {
        return Err(ProfileError::NotAProfile);
    }
    let mut found = ResolvedProfile {
        ranges: Vec::new(),
        missing_ranges: 0,
    };
    for (number, line) in lines {
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let (offset, len, path) = parse_range(line).ok_or(ProfileError::InvalidLine(number + 1))?;
        let path = ArchivePath::sanitize(&path).path;
        match index.find(&path) {
            Some(entry) if found.ranges.len() < MAX_RANGES => found.ranges.push(AccessedRange {
                ino: entry.ino(),
                offset,
                len: len.min(entry.size().saturating_sub(offset)),
            }),
            Some(_) => break,
            None => found.missing_ranges += 1,
        }
    }
    Ok(found)
}

fn parse_range(line: &str) -> Option<(u64, u64, Vec<u8>)> {
    let mut words = line.splitn(3, ' ');
    let offset = words.next()?.parse().ok()?;
    let len = words.next()?.parse().ok()?;
    Some((offset, len, unescape(words.next()?)?))
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
    use proptest::prelude::*;
    use tarfs::index::{Builder, Ino, Options, Origin};
    use tarfs::tar::{Member, MemberKind};
    use tarfs::{Extent, Plain};

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
        #[test]
        fn escaped_name_is_unescaped(name in prop::collection::vec(any::<u8>(), 0..30)) {
            prop_assert_eq!(unescape(&escape(&name)), Some(name));
        }
    }
}
