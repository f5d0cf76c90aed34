//! Members that are damaged or not in the tree, and their form in an index file.

use std::fmt;

use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape_controls;
use crate::base::extent::Plain;

/// Maximum bytes of each text in an index file; the rest is cut.
const MAX_TEXT_BYTES: usize = 4096;

/// Maximum bytes of all problems in an index file.
pub(super) const MAX_SECTION_BYTES: u64 = 1 << 20;

const UNKNOWN_OFFSET: u64 = u64::MAX;

/// A member that is damaged or not in the tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The member's path below the root, if it is known.
    pub path: Option<ArchivePath>,
    /// The plain offset of its header, if it is known.
    pub offset: Option<Plain>,
    /// The description of the problem.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{path}: ")?;
        }
        // Escapes any text of a hostile archive or index file.
        f.write_str(&escape_controls(&self.what))?;
        match self.offset {
            Some(offset) => write!(f, " (header at byte {offset} of the tar stream)"),
            None => Ok(()),
        }
    }
}

/// Encodes the first `problems` that fit into the section.
pub(super) fn encode(problems: &[Problem]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for problem in problems {
        let path = match &problem.path {
            None => &[][..],
            // An empty path is an unknown one.
            Some(path) if path.is_root() => b".".as_slice(),
            Some(path) => path.as_bytes(),
        };
        let texts =
            [path, problem.what.as_bytes()].map(|text| text.get(..MAX_TEXT_BYTES).unwrap_or(text));
        let offset = problem.offset.map_or(UNKNOWN_OFFSET, |offset| offset.0);
        let row_bytes = 24 + texts.iter().map(|text| text.len()).sum::<usize>();
        if (bytes.len() + row_bytes) as u64 > MAX_SECTION_BYTES {
            break;
        }
        bytes.extend_from_slice(&offset.to_le_bytes());
        for text in texts {
            push_text(&mut bytes, text);
        }
    }
    bytes
}

pub(super) fn push_text(bytes: &mut Vec<u8>, text: &[u8]) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text);
}

/// The problems in a section from [`encode`]; `None` if it is cut.
pub(super) fn decode(mut bytes: &[u8]) -> Option<Vec<Problem>> {
    let mut problems = Vec::new();
    while !bytes.is_empty() {
        let (offset, rest) = U64::read_from_prefix(bytes).ok()?;
        let (path, rest) = split_text(rest)?;
        let (what, rest) = split_text(rest)?;
        problems.push(Problem {
            path: (!path.is_empty()).then(|| ArchivePath::sanitize(path).path),
            offset: Some(Plain(offset.get())).filter(|offset| offset.0 != UNKNOWN_OFFSET),
            what: String::from_utf8_lossy(what).into_owned(),
        });
        bytes = rest;
    }
    Some(problems)
}

pub(super) fn split_text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = U64::read_from_prefix(bytes).ok()?;
    rest.split_at_checked(usize::try_from(len.get()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(path: &str, offset: Option<u64>) -> Problem {
        Problem {
            path: (!path.is_empty()).then(|| ArchivePath::sanitize(path.as_bytes()).path),
            offset: offset.map(Plain),
            what: "not a header".to_owned(),
        }
    }

    #[test]
    fn problem_text_escapes_control_characters() {
        let mut problem = problem("a", None);
        problem.what = "bad \x1b]0;title\x07 \u{9b}2J \u{e4}".to_owned();
        let shown = problem.to_string();
        assert_eq!(shown, "a: bad \\u{1b}]0;title\\u{7} \\u{9b}2J \u{e4}");
    }

    // Promises: damaged-listed
    #[test]
    fn problems_are_read_as_they_were_written() {
        let problems = [problem("a/b\n", Some(512)), problem("", None)];
        let packed = encode(&problems);
        assert_eq!(decode(&packed).as_deref(), Some(&problems[..]));
        for len in 1..packed.len() {
            let read = decode(&packed[..len]);
            assert!(read.is_none_or(|read| read.len() == 1), "{len}");
        }
        let texts = problems.map(|problem| problem.to_string());
        assert_eq!(
            texts,
            [
                "a/b\\n: not a header (header at byte 512 of the tar stream)",
                "not a header"
            ]
        );
    }

    #[test]
    fn problem_of_the_root_is_read_as_it_was_written() {
        let problem = Problem {
            path: Some(ArchivePath::root()),
            offset: None,
            what: "only a directory can take the root's place".to_owned(),
        };
        let packed = encode(std::slice::from_ref(&problem));
        assert_eq!(decode(&packed), Some(vec![problem]));
    }

    #[test]
    fn section_of_many_long_problems_is_bounded() {
        let long = "x".repeat(60_000);
        let problems = vec![problem(&long, Some(0)); 1000];
        let packed = encode(&problems);
        assert!(packed.len() as u64 <= MAX_SECTION_BYTES);
        let read = decode(&packed).expect("whole");
        assert!(read.len() > 100);
        assert_eq!(
            read[0].path.as_ref().expect("a path").as_bytes().len(),
            MAX_TEXT_BYTES
        );
    }
}
