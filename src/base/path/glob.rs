//! Shell patterns of `--exclude` and `--include`, with the fnmatch(3) rules of GNU tar's exclusion. A pattern
//! matches a path that has a matching run of whole components, and everything below it. `*`, `?` and brackets
//! match slashes and leading dots too. Paths have no leading `./`, so that of a pattern is dropped. `?`
//! matches one UTF-8 character, or one byte if the name is not UTF-8.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A parsed pattern.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<u8>", into = "Vec<u8>")]
pub struct Glob {
    pattern: Vec<u8>,
    tokens: Vec<Token>,
}

impl fmt::Debug for Glob {
    /// Writes the pattern, so that equal patterns have the same text in every process.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.pattern.escape_ascii())
    }
}

impl From<Vec<u8>> for Glob {
    /// As [`new`](Self::new).
    fn from(pattern: Vec<u8>) -> Self {
        Self::new(&pattern)
    }
}

impl From<Glob> for Vec<u8> {
    fn from(glob: Glob) -> Self {
        glob.pattern
    }
}

type Class = fn(&char) -> bool;

#[derive(Clone, PartialEq, Eq, Debug)]
enum Token {
    Byte(u8),
    /// `?`
    One,
    /// `*`
    Any,
    /// `[…]`
    Set(Set),
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Set {
    /// `[!…]`: everything but the items.
    negated: bool,
    ranges: Vec<(char, char)>,
    classes: Vec<Class>,
}

impl Set {
    fn contains(&self, character: char) -> bool {
        let listed = self
            .ranges
            .iter()
            .any(|&(low, high)| (low..=high).contains(&character))
            || self.classes.iter().any(|class| class(&character));
        listed != self.negated
    }
}

impl Glob {
    /// Parses a pattern. Every byte sequence is valid, because an unclosed bracket is literal.
    pub fn new(pattern: &[u8]) -> Self {
        let mut rest = pattern;
        while let Some(shorter) = rest.strip_prefix(b"./") {
            rest = shorter;
        }
        Self {
            pattern: pattern.to_vec(),
            ..Self::of_name(rest)
        }
    }

    /// Parses a pattern for [`matches_name`](Self::matches_name), which may begin with `./`.
    pub fn of_name(pattern: &[u8]) -> Self {
        let mut rest = pattern;
        let mut tokens = Vec::new();
        while let Some((&byte, after)) = rest.split_first() {
            rest = after;
            tokens.push(match byte {
                // Several stars in a row equal one.
                b'*' if tokens.last() == Some(&Token::Any) => continue,
                b'*' => Token::Any,
                b'?' => Token::One,
                b'\\' => match after.split_first() {
                    Some((&escaped, after)) => {
                        rest = after;
                        Token::Byte(escaped)
                    }
                    None => Token::Byte(b'\\'),
                },
                b'[' => match parse_set(after) {
                    Some((set, after)) => {
                        rest = after;
                        Token::Set(set)
                    }
                    None => Token::Byte(b'['),
                },
                other => Token::Byte(other),
            });
        }
        Self {
            pattern: pattern.to_vec(),
            tokens,
        }
    }

    /// Whether the pattern matches all of `name`, as fnmatch(3) without flags does.
    pub fn matches_name(&self, name: &[u8]) -> bool {
        self.matches_at_start(name, false)
    }

    /// Whether the pattern matches `path`, a part of it, or a directory above it.
    pub fn matches(&self, path: &[u8]) -> bool {
        let starts = path.iter().enumerate().filter(|&(_, &byte)| byte == b'/');
        std::iter::once(0)
            .chain(starts.map(|(slash, _)| slash + 1))
            .any(|start| self.matches_at_start(path.get(start..).unwrap_or_default(), true))
    }

    /// Matches all tokens against the whole of `text`, or with `or_front` against a part before a slash. Only
    /// the last star is backtracked, as it can replace earlier ones. Time is at most pattern times text.
    fn matches_at_start(&self, text: &[u8], or_front: bool) -> bool {
        let (mut token, mut at) = (0, 0);
        let mut star: Option<(usize, usize)> = None;
        loop {
            let rest = text.get(at..).unwrap_or_default();
            let step = match self.tokens.get(token) {
                None if rest.is_empty() => return true,
                None if or_front && rest.first() == Some(&b'/') => return true,
                None => None,
                Some(Token::Any) => {
                    star = Some((token, at));
                    token += 1;
                    continue;
                }
                Some(single) => single.match_len(rest),
            };
            if let Some(len) = step {
                token += 1;
                at += len;
            } else {
                let Some((star_token, star_at)) = star.filter(|&(_, at)| at < text.len()) else {
                    return false;
                };
                star = Some((star_token, star_at + 1));
                (token, at) = (star_token + 1, star_at + 1);
            }
        }
    }
}

impl Token {
    /// Length of the match at the start of `text`; not called for stars.
    fn match_len(&self, text: &[u8]) -> Option<usize> {
        match self {
            Self::Byte(byte) => (text.first() == Some(byte)).then_some(1),
            Self::One => decode_char(text).map(|(_, len)| len),
            Self::Set(set) => decode_char(text)
                .filter(|&(character, _)| set.contains(character))
                .map(|(_, len)| len),
            Self::Any => None,
        }
    }
}

/// Decodes the first character and its length. A byte that is not UTF-8 counts as that code point.
fn decode_char(text: &[u8]) -> Option<(char, usize)> {
    let first = *text.first()?;
    let longest = text.get(..text.len().min(4))?;
    let valid = match std::str::from_utf8(longest) {
        Ok(valid) => valid,
        Err(error) => std::str::from_utf8(longest.get(..error.valid_up_to())?).unwrap_or_default(),
    };
    Some(
        valid
            .chars()
            .next()
            .map_or((char::from(first), 1), |c| (c, c.len_utf8())),
    )
}

/// Parses a bracket expression after its `[`, and returns the rest too. `None` if it is not closed.
fn parse_set(text: &[u8]) -> Option<(Set, &[u8])> {
    let mut set = Set::default();
    let mut rest = text;
    if let Some((b'!' | b'^', after)) = rest.split_first() {
        set.negated = true;
        rest = after;
    }
    let mut first = true;
    loop {
        if !first && let Some(after) = rest.strip_prefix(b"]") {
            return Some((set, after));
        }
        first = false;
        if let Some((class, after)) = parse_class(rest) {
            set.classes.push(class);
            rest = after;
            continue;
        }
        let (low, after) = parse_bracket_char(rest)?;
        let (high, after) = match after.strip_prefix(b"-") {
            Some(behind) if behind.first() != Some(&b']') => parse_bracket_char(behind)?,
            _ => (low, after),
        };
        set.ranges.push((low, high));
        rest = after;
    }
}

fn parse_bracket_char(text: &[u8]) -> Option<(char, &[u8])> {
    let text = match text.strip_prefix(b"\\") {
        Some(escaped) if !escaped.is_empty() => escaped,
        _ => text,
    };
    let (character, len) = decode_char(text)?;
    Some((character, text.get(len..)?))
}

fn parse_class(text: &[u8]) -> Option<(Class, &[u8])> {
    const CLASSES: [(&[u8], Class); 12] = [
        (b"[:alnum:]", |c| c.is_alphanumeric()),
        (b"[:alpha:]", |c| c.is_alphabetic()),
        (b"[:blank:]", |c| matches!(c, ' ' | '\t')),
        (b"[:cntrl:]", |c| c.is_control()),
        (b"[:digit:]", char::is_ascii_digit),
        (b"[:graph:]", |c| !c.is_control() && !c.is_whitespace()),
        (b"[:lower:]", |c| c.is_lowercase()),
        (b"[:print:]", |c| !c.is_control()),
        (b"[:punct:]", char::is_ascii_punctuation),
        (b"[:space:]", |c| c.is_whitespace()),
        (b"[:upper:]", |c| c.is_uppercase()),
        (b"[:xdigit:]", char::is_ascii_hexdigit),
    ];
    CLASSES
        .iter()
        .find_map(|&(name, class)| Some((class, text.strip_prefix(name)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, path: &str) -> bool {
        Glob::new(pattern.as_bytes()).matches(path.as_bytes())
    }

    // Promises: gnu-arguments
    #[test]
    fn a_pattern_matches_any_run_of_components_and_everything_below() {
        assert!(matches("b", "a/b/c"));
        assert!(matches("a/b", "a/b/c"));
        assert!(matches("b/c", "a/b/c"));
        assert!(matches("./a", "a/x"));
        assert!(!matches("b", "ab/c"));
        assert!(!matches("b", "a/bc"));
        assert!(!matches("/a", "a"));
        assert!(!matches("a/", "a/b"));
    }

    #[test]
    fn wildcards_match_slashes_and_leading_dots() {
        assert!(matches("*.o", "a/.hidden.o"));
        assert!(matches("a*c", "a/b/c"));
        assert!(matches("a*c", "a/b/c/f.o"));
        assert!(matches("a?b", "a/b"));
        assert!(!matches("a*c", "a/x.d"));
    }

    #[test]
    fn brackets_support_ranges_classes_and_negation() {
        assert!(matches("[a-c]x", "bx"));
        assert!(!matches("[!a-c]x", "bx"));
        assert!(matches("[[:digit:]_]", "7"));
        assert!(matches("[]]", "]"));
        assert!(matches("[a-]", "-"));
        assert!(matches("[a", "[a"));
        assert!(matches("[\\]]", "]"));
    }

    #[test]
    fn escaped_wildcards_match_literally() {
        assert!(matches("\\*", "*"));
        assert!(!matches("\\*", "x"));
        assert!(matches("\\", "\\"));
    }

    #[test]
    fn question_mark_matches_one_character() {
        assert!(matches("caf?", "café"));
        assert!(Glob::new(b"caf?").matches(b"caf\xe9"));
        assert!(!matches("caf??", "café"));
    }

    // Promises: xattr-flags
    #[test]
    fn name_is_matched_as_a_whole() {
        let matches =
            |pattern: &str, name: &str| Glob::new(pattern.as_bytes()).matches_name(name.as_bytes());
        assert!(matches("user.*", "user.a.b/c"));
        assert!(matches("*", "trusted.x"));
        assert!(matches("user.a", "user.a"));
        for name in ["user.ab", "user.a/b", "x/user.a", "user"] {
            assert!(!matches("user.a", name), "{name}");
        }
    }

    #[test]
    fn debug_text_is_the_pattern() {
        let text = format!("{:?}", Glob::new(b"[[:digit:]]\xff"));
        assert_eq!(text, r#""[[:digit:]]\xff""#);
    }

    #[test]
    fn many_stars_match_in_bounded_time() {
        let pattern = "*a".repeat(200) + "b";
        assert!(!matches(&pattern, &"a".repeat(2000)));
    }
}
