//! SOURCE as a part of another source: a file in an archive, or a range of bytes. Pure.

use std::fmt;
use std::str::FromStr;

/// Separator before a file's name, as in Java's `jar:` URLs.
const MEMBER_SEPARATOR: &str = "!/";

/// A part of an outer source, which may be a part itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NestedSource {
    /// A path, a URL, or another part.
    pub outer: String,
    pub part: Part,
}

/// Kind of a part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// The file with this path in the archive: `tar:SOURCE!/PATH`.
    File(String),
    /// A range of bytes, up to the end without `len`: `slice:START+LEN:SOURCE`, `slice:START:SOURCE`.
    Range { start: u64, len: Option<u64> },
}

impl NestedSource {
    /// Parses `spec`; `None` for a path or a URL.
    ///
    /// The path of a file with such a name can be written as `./tar:name!/path`.
    pub(crate) fn parse(spec: &str) -> Option<Self> {
        let (kind, rest) = spec.split_once(':')?;
        let (outer, part) = match kind {
            "tar" => {
                let (outer, path) = rest.rsplit_once(MEMBER_SEPARATOR)?;
                (outer, Part::File(path.to_owned()))
            }
            "slice" => {
                let (range, outer) = rest.split_once(':')?;
                let (start, len) = match range.split_once('+') {
                    Some((start, len)) => (start, Some(u64::from_str(len).ok()?)),
                    None => (range, None),
                };
                let start = u64::from_str(start).ok()?;
                (outer, Part::Range { start, len })
            }
            _ => return None,
        };
        Some(Self {
            outer: outer.to_owned(),
            part,
        })
    }
}

impl fmt::Display for NestedSource {
    /// Formats it in the form that `parse` accepts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outer = &self.outer;
        match &self.part {
            Part::File(path) => write!(f, "tar:{outer}{MEMBER_SEPARATOR}{path}"),
            Part::Range { start, len: None } => write!(f, "slice:{start}:{outer}"),
            Part::Range {
                start,
                len: Some(len),
            } => write!(f, "slice:{start}+{len}:{outer}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_source_is_parsed_and_printed() {
        let file = |path: &str| Part::File(path.to_owned());
        let bytes = |start, len| Part::Range { start, len };
        for (spec, outer, part) in [
            ("tar:a.tar!/b.tar.gz", "a.tar", file("b.tar.gz")),
            (
                "tar:https://me:pw@example.com:8443/a.tar?sig=1!/d/b.tar",
                "https://me:pw@example.com:8443/a.tar?sig=1",
                file("d/b.tar"),
            ),
            ("tar:tar:a!/b!/c", "tar:a!/b", file("c")),
            ("tar:slice:512:a!/b", "slice:512:a", file("b")),
            ("slice:7:a:b", "a:b", bytes(7, None)),
            (
                "slice:0+1024:http://h/a",
                "http://h/a",
                bytes(0, Some(1024)),
            ),
            ("slice:1+2:tar:a!/b", "tar:a!/b", bytes(1, Some(2))),
        ] {
            let nested = NestedSource::parse(spec).expect(spec);
            assert_eq!(nested.to_string(), spec);
            assert_eq!(
                (nested.outer.as_str(), nested.part),
                (outer, part),
                "{spec}"
            );
        }
        for spec in [
            "a.tar",
            "tar:a.tar",
            "./tar:a!/b",
            "http://h/tar:a!/b",
            "slice:a",
            "slice:-1:a",
            "slice:1+:a",
            "slice:18446744073709551616:a",
        ] {
            assert_eq!(NestedSource::parse(spec), None, "{spec}");
        }
    }
}
