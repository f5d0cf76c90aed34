//! Names and texts of others for people, whom no character may deceive, and for terminals, which obey some.

use std::borrow::Cow;
use std::fmt::Write;

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
