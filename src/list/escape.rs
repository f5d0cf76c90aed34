//! Escapes names for terminals.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes `name` as `ls --escape` does, to one line. Different names stay different. Backslash, space,
/// terminal controls and bytes that are not UTF-8 become C escapes or `\ooo`.
pub fn escape(name: &[u8]) -> String {
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
pub(super) fn without_controls(name: &[u8]) -> Cow<'_, [u8]> {
    let is_obeyed =
        |character: char| character.is_control() || matches!(character, '\u{2028}' | '\u{2029}');
    let is_plain = |text: &str| !text.contains(is_obeyed);
    if std::str::from_utf8(name).is_ok_and(is_plain) {
        return Cow::Borrowed(name);
    }
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        text.push_str(&chunk.valid().replace(is_obeyed, "?"));
        text.extend(chunk.invalid().iter().map(|_| '?'));
    }
    Cow::Owned(text.into_bytes())
}

/// The name of an owner, or its number if it has none.
pub(super) fn owner_text(name: Option<Cow<'_, [u8]>>, id: u32) -> String {
    name.map_or_else(|| id.to_string(), |name| escape(&name))
}

fn push(text: &mut String, character: char) {
    match character {
        '\\' => text.push_str("\\\\"),
        ' ' => text.push_str("\\ "),
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        _ if character.is_control() || matches!(character, '\u{2028}' | '\u{2029}') => {
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
