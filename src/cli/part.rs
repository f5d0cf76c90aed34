//! SOURCE as a part of something else: a file of an archive, or a stretch of bytes; pure.

use std::fmt;
use std::str::FromStr;

/// What stands in front of a file's name, as in the URLs of Java's archives.
const BANG: &str = "!/";

/// A part of what is at another place, which may be a part itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Part {
    /// A path, a URL, or the name of a part.
    pub place: String,
    pub what: What,
}

/// Which part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// The file of this path in the archive: `tar:PLACE!/PATH`.
    File(String),
    /// So many bytes from here on, or all of them: `slice:START+LEN:PLACE`, `slice:START:PLACE`.
    Bytes { start: u64, len: Option<u64> },
}

impl Part {
    /// The part that `spec` names; `None` when it names none, and so is a path or a URL. A file of such
    /// a name is given as `./tar:name!/path`.
    pub(super) fn parse(spec: &str) -> Option<Self> {
        let (kind, rest) = spec.split_once(':')?;
        let (place, what) = match kind {
            "tar" => {
                let (place, path) = rest.rsplit_once(BANG)?;
                (place, What::File(path.to_owned()))
            }
            "slice" => {
                let (range, place) = rest.split_once(':')?;
                let (start, len) = match range.split_once('+') {
                    Some((start, len)) => (start, Some(u64::from_str(len).ok()?)),
                    None => (range, None),
                };
                let start = u64::from_str(start).ok()?;
                (place, What::Bytes { start, len })
            }
            _ => return None,
        };
        Some(Self {
            place: place.to_owned(),
            what,
        })
    }
}

impl fmt::Display for Part {
    /// As it is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = &self.place;
        match &self.what {
            What::File(path) => write!(f, "tar:{place}{BANG}{path}"),
            What::Bytes { start, len: None } => write!(f, "slice:{start}:{place}"),
            What::Bytes {
                start,
                len: Some(len),
            } => write!(f, "slice:{start}+{len}:{place}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_named_by_its_place_and_what_it_is_there() {
        let file = |path: &str| What::File(path.to_owned());
        let bytes = |start, len| What::Bytes { start, len };
        for (spec, place, what) in [
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
            let part = Part::parse(spec).expect(spec);
            assert_eq!(part.to_string(), spec);
            assert_eq!((part.place.as_str(), part.what), (place, what), "{spec}");
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
            assert_eq!(Part::parse(spec), None, "{spec}");
        }
    }
}
