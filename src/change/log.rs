//! Lines about changed files, and errors.

use std::io;
use std::sync::Arc;

use crate::base::escape::{escape, is_control};

use crate::tree::SharedOutput;

/// The files that have a line.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Verbosity {
    /// None.
    #[default]
    Quiet,
    /// Those that are changed.
    Changes,
    /// All.
    All,
}

/// Receives the lines of changed files, and the errors, from several threads.
#[derive(Debug)]
pub struct ChangeLog {
    verbosity: Verbosity,
    output: Arc<SharedOutput>,
}

impl ChangeLog {
    /// Writes to `output`.
    pub fn new(verbosity: Verbosity, output: Arc<SharedOutput>) -> Self {
        Self { verbosity, output }
    }

    /// Reports that `action` failed on the file at `path`.
    pub fn fail(&self, action: &str, path: &[u8], error: &io::Error) {
        let action = format!("{action} {}", quote(path));
        self.output.report_action(&action, error);
    }

    /// Reports that the walk of `/` is refused.
    pub(super) fn fail_on_root(&self, path: &[u8]) {
        let path = match path {
            b"/" => quote(path),
            _ => format!("{} (same as '/')", quote(path)),
        };
        let text = "it is dangerous to operate recursively on";
        self.output.fail(&format!("{text} {path}"));
        self.output
            .fail("use --no-preserve-root to override this failsafe");
    }

    pub(super) fn fail_with(&self, text: &str) {
        self.output.fail(text);
    }

    /// Writes a line if such lines are wanted.
    pub(super) fn write(&self, verbosity: Verbosity, line: impl FnOnce() -> String) {
        if self.verbosity >= verbosity {
            // The files are changed in any case.
            self.output.write_last((line() + "\n").as_bytes());
        }
    }
}

/// Quotes `name` for a shell, as the GNU programs do in their messages.
pub fn quote(name: &[u8]) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b" %+,-./:]_'".contains(byte);
    if name.contains(&b'\'') && name.iter().all(is_plain) {
        return format!("\"{}\"", String::from_utf8_lossy(name));
    }
    let (mut text, mut is_escape) = ("'".to_owned(), false);
    let mut push = |part: &str, is_escaped: bool| {
        match (is_escape, is_escaped) {
            (false, true) => text.push_str("'$'"),
            (true, false) => text.push_str("''"),
            _ => {}
        }
        is_escape = is_escaped;
        text.push_str(part);
    };
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            let mut bytes = [0; 4];
            let character_text = &*character.encode_utf8(&mut bytes);
            match character {
                '\'' => push("'\\''", false),
                _ if is_control(character) => push(&escape(character_text.as_bytes()), true),
                _ => push(character_text, false),
            }
        }
        if !chunk.invalid().is_empty() {
            push(&escape(chunk.invalid()), true);
        }
    }
    text.push('\'');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_gnu_programs_quote_them() {
        for (name, expected) in [
            (&b"a b"[..], "'a b'"),
            (b"it's", "\"it's\""),
            (b"a'b$", "'a'\\''b$'"),
            (b"n\nl", "'n'$'\\n''l'"),
            (b"\xff", "''$'\\377'"),
            (b"a$b\"", "'a$b\"'"),
            ("\u{fc}".as_bytes(), "'\u{fc}'"),
        ] {
            assert_eq!(quote(name), expected);
        }
    }
}
