//! Names and texts of others for people, whom no character may deceive, and for terminals, which obey some.

use std::borrow::Cow;
use std::fmt::Write;

/// Schemes of URLs that may be spelled wrong. A name with `oci:` or `file:` is a path.
const SCHEMES: [&str; 13] = [
    "http", "https", "s3", "s3a", "s3n", "gs", "gcs", "az", "abfs", "abfss", "wasb", "wasbs",
    "docker",
];
/// Characters of a message before a name.
const QUOTES: [char; 4] = ['(', '\'', '"', '`'];
/// Characters of a message behind a name.
const PUNCTUATION: [char; 8] = [':', ',', ';', ')', '?', '\'', '"', '`'];

/// Whether a terminal may obey it, or it ends a line.
pub(crate) fn is_control(character: char) -> bool {
    character.is_control() || matches!(character, '\u{2028}' | '\u{2029}')
}

/// Escapes `name` as `ls --escape` does, to one line. Different names stay different. Backslash, space,
/// terminal controls and bytes that are not UTF-8 become C escapes or `\ooo`.
pub fn escape(name: &[u8]) -> String {
    let is_plain = |&byte: &u8| byte.is_ascii_graphic() && byte != b'\\';
    if name.iter().all(is_plain) {
        return String::from_utf8_lossy(name).into_owned();
    }
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            push(&mut text, character);
        }
        push_octal(&mut text, chunk.invalid());
    }
    text
}

/// A name as it is written to a terminal, where each character that a terminal may obey becomes `?`, as find(1) does.
pub(crate) fn without_controls(name: &[u8]) -> Cow<'_, [u8]> {
    let is_plain = |text: &str| !text.contains(is_control);
    if std::str::from_utf8(name).is_ok_and(is_plain) {
        return Cow::Borrowed(name);
    }
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        text.push_str(&chunk.valid().replace(is_control, "?"));
        text.extend(chunk.invalid().iter().map(|_| '?'));
    }
    Cow::Owned(text.into_bytes())
}

/// A text in which each character that a terminal may obey is escaped as in Rust.
pub fn escape_controls(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if is_control(character) {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    escaped
}

/// A text without users, passwords and queries of URLs, also of those that are spelled wrong.
pub fn redact_urls(text: &str) -> String {
    let (mut redacted, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(start) = rest.find(|next: char| !next.is_whitespace()) {
        let (blanks, words) = rest.split_at(start);
        redacted.push_str(blanks);
        let word = words.split_at(word_len(words)).0;
        // An absolute path is one of this machine.
        let is_path = word.trim_start_matches(QUOTES).starts_with('/');
        let len = if let Some(scheme_len) = scheme_len(word).filter(|_| !is_path) {
            push_url(&mut redacted, words, scheme_len)
        } else {
            redacted.push_str(word);
            word.len()
        };
        rest = words.split_at(len).1;
    }
    redacted + rest
}

/// Length of the word at the start of `text`, in which blanks may be escaped.
fn word_len(text: &str) -> usize {
    let mut is_escaped = false;
    let is_end = |next: char| {
        let is_end = next.is_whitespace() && !is_escaped;
        is_escaped = next == '\\' && !is_escaped;
        is_end
    };
    text.find(is_end).unwrap_or(text.len())
}

/// Length of the text of `word` up to the host of a URL. A known scheme may lack its colon or a slash.
fn scheme_len(word: &str) -> Option<usize> {
    word.match_indices([':', '/']).find_map(|(at, _)| {
        let (before, mark) = word.split_at(at);
        if mark.starts_with("://") {
            return Some(at + "://".len());
        }
        let is_in_scheme = |last: char| last.is_ascii_alphanumeric();
        let others = before.trim_end_matches(is_in_scheme).len();
        let scheme = before.split_at(others).1.to_ascii_lowercase();
        let is_mark = mark.starts_with(':') || mark.starts_with("//");
        let host = mark.trim_start_matches([':', '/']);
        (is_mark && SCHEMES.contains(&scheme.as_str())).then(|| word.len() - host.len())
    })
}

/// Adds the URL at the start of `text` without secrets, as far as it has them. Returns its length.
fn push_url(redacted: &mut String, text: &str, scheme_len: usize) -> usize {
    let (scheme, behind) = text.split_at(scheme_len);
    // Another URL of a list is not a part of this one.
    let (before, _) = behind.split_once("://").unwrap_or_default();
    let list = before.rsplit_once(',');
    let list = list.filter(|(_, scheme)| !scheme.contains(['@', '/', '?', '=']));
    let behind = list.map_or(behind, |(url, _)| url);
    let name = scheme.trim_end_matches([':', '/']).to_ascii_lowercase();
    let has_scheme = |schemes: &[&str]| schemes.iter().any(|scheme| name.ends_with(scheme));
    let word = behind.split_at(word_len(behind)).0;
    let word = word.trim_end_matches(PUNCTUATION);
    let authority = word.split(['/', '?', '#']).next().unwrap_or_default();
    let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
    // A tag, an ARN or an IPv6 address may be behind the colon.
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit())
        || has_scheme(&["oci", "docker"])
        || host == "arn"
        || host.starts_with('[');
    let is_host = !has_scheme(&["http", "https"]) || host.contains('.') || host == "localhost";
    // A password may have blanks.
    let line = behind.lines().next().unwrap_or_default();
    let len = match line.rfind('@') {
        Some(at) if !is_port && !word.contains('@') => at + word_len(line.split_at(at).1),
        _ => word_len(behind),
    };
    let url = behind.split_at(len).0;
    let (url, tail) = url.split_at(url.trim_end_matches(PUNCTUATION).len());
    let query = url.find('?').unwrap_or(url.len());
    let users = if is_port { url.split_at(query).0 } else { url };
    let is_user = |&at: &usize| !users.split_at(at).1.starts_with("@sha256:");
    let users_end = users.rmatch_indices('@').map(|(at, _)| at).find(is_user);
    // The container of a data lake is no user.
    let is_lake = has_scheme(&["abfs", "abfss", "wasb", "wasbs"]);
    let container = authority.split([':', '@']).next().unwrap_or_default();
    let has_user = if is_lake {
        !authority.split_at(container.len()).1.starts_with('@')
    } else {
        authority.contains('@') || !is_port || !is_host
    };
    redacted.push_str(scheme);
    let url = match users_end.filter(|_| has_user) {
        Some(at) => {
            redacted.push_str(if is_lake { container } else { "" });
            url.split_at(if is_lake { at } else { at + 1 }).1
        }
        None => url,
    };
    let (place, mark) = url
        .split_once('?')
        .map_or((url, ""), |(place, _)| (place, "?…"));
    redacted.extend([place, mark, tail]);
    scheme_len + len
}

/// JSON in whose strings each character that a terminal may obey is escaped.
pub fn escape_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        if is_control(character) {
            write!(escaped, "\\u{:04x}", u32::from(character)).expect("a String takes everything");
        } else {
            escaped.push(character);
        }
    }
    escaped
}

/// The bytes that JSON has beside a text, because the text cannot have them.
pub fn bytes_unless_utf8(bytes: &[u8]) -> Option<&[u8]> {
    str::from_utf8(bytes).is_err().then_some(bytes)
}

/// The name of an owner, or its number if it has none.
pub(crate) fn owner_text(name: Option<Cow<'_, [u8]>>, id: u32) -> String {
    name.map_or_else(|| id.to_string(), |name| escape(&name))
}

fn push(text: &mut String, character: char) {
    match character {
        '\\' => text.push_str("\\\\"),
        ' ' => text.push_str("\\ "),
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        _ if is_control(character) => {
            push_octal(text, character.encode_utf8(&mut [0; 4]).as_bytes());
        }
        _ => text.push(character),
    }
}

fn push_octal(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        write!(text, "\\{byte:03o}").expect("a String takes everything");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_escaped() {
        assert_eq!(
            escape(b"a b\\c\nd\x1b[31m\x7f"),
            "a\\ b\\\\c\\nd\\033[31m\\177"
        );
        assert_eq!(escape("\u{9b}".as_bytes()), "\\302\\233");
        assert_eq!(escape("\u{2028}".as_bytes()), "\\342\\200\\250");
        assert_eq!(escape_controls("a b\n\u{2029}\\"), "a b\\n\\u{2029}\\");
        assert_eq!(without_controls(b"a b\n\x1b[31m"), &b"a b??[31m"[..]);
        assert_eq!(without_controls(b"\xff\xc2\x9b"), &b"??"[..]);
        assert_eq!(
            without_controls("gr\u{fc}n".as_bytes()),
            "gr\u{fc}n".as_bytes()
        );
    }

    #[test]
    fn utf8_stays_and_invalid_bytes_are_escaped() {
        assert_eq!(escape("grün".as_bytes()), "grün");
        assert_eq!(escape(b"gr\xfcn"), "gr\\374n");
    }
}
