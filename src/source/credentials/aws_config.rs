//! Syntax of the AWS CLI's files: INI as Python's `configparser` reads it, with words of a shell; pure.

use std::collections::HashMap;

/// Settings of a section. Those of a nested one have names such as `s3.endpoint_url`.
pub(super) type Settings = HashMap<String, String>;

/// The sections of a file, each with its name, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Sections(Vec<(String, Settings)>);

impl Sections {
    /// Parses `text`, and ignores lines that are no settings.
    pub(super) fn parse(text: &str) -> Self {
        let mut sections = Vec::<(String, Settings)>::new();
        // The last setting and its indentation, which the further lines of its value exceed.
        let mut last: Option<(String, usize)> = None;
        for line in text.lines() {
            let (content, indent) = (line.trim(), line.len() - line.trim_start().len());
            if content.is_empty() || content.starts_with(['#', ';']) {
                continue;
            }
            let settings = sections.last_mut().map(|(_, settings)| settings);
            if let (Some(settings), Some((key, limit))) = (settings, &last)
                && indent > *limit
            {
                continue_setting(settings, key, content);
                continue;
            }
            last = None;
            // A comment may follow the bracket.
            if let Some(rest) = content.strip_prefix('[') {
                let (name, _) = rest.rsplit_once(']').unwrap_or_default();
                sections.push((name.to_owned(), Settings::new()));
            } else if let Some((key, value)) = split_setting(content)
                && let Some((_, settings)) = sections.last_mut()
            {
                settings.insert(key.clone(), value);
                last = Some((key, indent));
            }
        }
        Self(sections)
    }

    /// Settings of the section with this name.
    pub(super) fn named(&self, name: &str) -> Option<&Settings> {
        self.find(|found| found == name)
    }

    /// Settings of the section whose name is `kind` and `name`, such as `profile work`.
    pub(super) fn of_kind(&self, kind: &str, name: &str) -> Option<&Settings> {
        self.find(|found| split_words(found).is_some_and(|words| words == [kind, name]))
    }

    /// The last one counts.
    fn find(&self, is_it: impl Fn(&str) -> bool) -> Option<&Settings> {
        let mut sections = self.0.iter();
        sections
            .rfind(|(name, _)| is_it(name))
            .map(|(_, found)| found)
    }
}

/// Adds a further line of the value of `key`, which is a setting of a nested section if nothing is in the first line.
fn continue_setting(settings: &mut Settings, key: &str, line: &str) {
    if let Some(value) = settings.get_mut(key).filter(|value| !value.is_empty()) {
        value.push('\n');
        value.push_str(line);
        return;
    }
    let inner = split_setting(line);
    settings.extend(inner.map(|(inner, value)| (format!("{key}.{inner}"), value)));
}

/// Splits a line into a key without capitals, and its value.
fn split_setting(line: &str) -> Option<(String, String)> {
    let (key, value) = line.split_once(['=', ':'])?;
    Some((key.trim_end().to_lowercase(), value.trim_start().to_owned()))
}

/// Splits `text` into words as a shell does, without expansions; `None` if a quote or escape has no end.
pub(super) fn split_words(text: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            (letter, Some(end)) if letter == end => quote = None,
            ('\\', None) => word.get_or_insert_default().push(letters.next()?),
            ('\\', Some('"')) if matches!(letters.peek(), Some('"' | '\\')) => {
                word.get_or_insert_default().extend(letters.next());
            }
            ('"' | '\'', None) => {
                quote = Some(letter);
                // The word may be empty.
                word.get_or_insert_default();
            }
            (letter, None) if letter.is_ascii_whitespace() => words.extend(word.take()),
            (letter, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: s3-credentials
    #[test]
    fn words_are_those_of_a_shell() {
        for (text, expected) in [
            ("", &[][..]),
            ("  a  b\t", &["a", "b"]),
            (
                "\"/my tools/x\" 'two words' c",
                &["/my tools/x", "two words", "c"],
            ),
            (r"a\ b '\' ''", &["a b", r"\", ""]),
            (r#""a\"b\\c\d" e"f g"h"#, &[r#"a"b\c\d"#, "ef gh"]),
        ] {
            let words = split_words(text).expect("it ends");
            assert_eq!(words, expected, "{text}");
        }
        for text in ["\"a", "'a", "a\\"] {
            assert_eq!(split_words(text), None, "{text}");
        }
    }

    // Promises: s3-credentials
    #[test]
    fn sections_are_found_by_the_words_of_their_names() {
        let text = "ignored = 1\n[profile   a] # comment\nKey=1\r\n[profile \"b c\"]\nkey: 2 ; not a comment\n\
                    [default]\nkey=3\n[plain name]\nkey=4\n[profile 'open]\nkey=5\n[profile a]\nkey=6\n";
        let sections = Sections::parse(text);
        let key =
            |settings: Option<&Settings>| settings.and_then(|found| found.get("key").cloned());
        assert_eq!(key(sections.of_kind("profile", "a")).as_deref(), Some("6"));
        let of_words = key(sections.of_kind("profile", "b c"));
        assert_eq!(of_words.as_deref(), Some("2 ; not a comment"));
        assert_eq!(key(sections.named("default")).as_deref(), Some("3"));
        assert_eq!(key(sections.named("plain name")).as_deref(), Some("4"));
        assert!(sections.of_kind("profile", "open").is_none());
    }

    // Promises: s3-credentials
    #[test]
    fn settings_may_have_nested_ones_and_further_lines() {
        let text = "[services x]\ns3 =\n  endpoint_url = http://a\n  # comment\n\n  other = 1\nec2 =\n  endpoint_url = http://b\n\
                    command = run\n  this\nlast = 1\n";
        let sections = Sections::parse(text);
        let settings = sections.of_kind("services", "x").expect("found");
        let get = |name: &str| settings.get(name).map(String::as_str);
        assert_eq!(get("s3.endpoint_url"), Some("http://a"));
        assert_eq!(get("s3.other"), Some("1"));
        assert_eq!(get("ec2.endpoint_url"), Some("http://b"));
        assert_eq!(get("command"), Some("run\nthis"));
        assert_eq!(get("last"), Some("1"));
    }
}
