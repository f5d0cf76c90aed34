//! Globs and regular expressions over names.
//!
//! Both see text: a byte that is not UTF-8 counts as the character with that number. Neither backtracks, so that
//! no pattern takes more time than its length times that of the name.

use std::borrow::Cow;

use regex_automata::meta;
use regex_automata::{Anchored, Input};

use crate::base::glob::Glob;

/// A shell pattern for a whole name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Pattern {
    glob: Glob,
    ignores_case: bool,
}

impl Pattern {
    pub(super) fn new(pattern: &[u8], ignores_case: bool) -> Self {
        let glob = if ignores_case {
            // A class of capitals matches as one of small letters does.
            let folded = to_text(&fold(pattern)).replace("[:upper:]", "[:lower:]");
            Glob::of_name(folded.as_bytes())
        } else {
            Glob::of_name(pattern)
        };
        Self { glob, ignores_case }
    }

    pub(super) fn matches(&self, name: &[u8]) -> bool {
        if self.ignores_case {
            self.glob.matches_name(&fold(name))
        } else {
            self.glob.matches_name(name)
        }
    }
}

fn fold(name: &[u8]) -> Vec<u8> {
    if name.is_ascii() {
        name.to_ascii_lowercase()
    } else {
        to_text(name).to_lowercase().into_bytes()
    }
}

/// The text of `bytes`, in which each byte that is not UTF-8 is one character.
pub(super) fn to_text(bytes: &[u8]) -> Cow<'_, str> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return Cow::Borrowed(text);
    }
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().copied().map(char::from));
    }
    Cow::Owned(text)
}

/// A regular expression for a whole path.
#[derive(Clone, Debug)]
pub(super) struct Regex(meta::Regex);

impl Regex {
    /// Compiles an expression in the syntax of the crate `regex`.
    pub(super) fn new(syntax: &str, ignores_case: bool) -> Result<Self, String> {
        const MAX_PROGRAM_BYTES: usize = 8 << 20;
        let flags = if ignores_case { "mi" } else { "m" };
        let limits = meta::Config::new().nfa_size_limit(Some(MAX_PROGRAM_BYTES));
        let compiled = meta::Regex::builder()
            .configure(limits)
            .build(&format!(r"(?{flags}:\A(?:{syntax})\z)"));
        compiled
            .map(Self)
            .map_err(|error| match error.size_limit() {
                Some(_) => "the regular expression is too large".to_owned(),
                None => "the regular expression is nested too deeply".to_owned(),
            })
    }

    pub(super) fn matches(&self, path: &[u8]) -> bool {
        let text = to_text(path);
        self.0.is_match(Input::new(&*text).anchored(Anchored::Yes))
    }
}
