//! Language of comments, documents and names.
//!
//! Comments of Rust sources, comments and docstrings of scripts, comments of manifests, and Markdown outside
//! of code.

use std::fs;
use std::path::{Path, PathBuf};

use crate::source::{files, root};

/// Words that hide the subject of a sentence when they begin it.
const HIDDEN_SUBJECTS: &[&str] = &[
    "What", "Who", "Whoever", "Whatever", "Whose", "Whom", "Somebody", "Someone", "Nobody",
    "Anybody",
];

/// Phrases that have a plainer standard word.
const BANNED_PHRASES: &[&str] = &[
    "in vain",
    "by chance",
    "at the most",
    "comes to",
    "come to",
    "came to",
    "goes by",
    "go by",
    "went by",
    "gone by",
    "is told",
    "are told",
    "was told",
    "were told",
    "be told",
    "all the same",
    "under way",
    "somebody",
    "nobody",
    "someone",
    "anybody",
    "whoever",
    "lies in",
    "lies below",
    "take out",
    "takes out",
    "took out",
    "hear",
    "hears",
    "heard",
    "mend",
    "mends",
    "mended",
];

/// Metaphors that earlier names used.
const RETIRED_WORDS: &[&str] = &[
    "encore",
    "roster",
    "laggard",
    "appetite",
    "leash",
    "purse",
    "estate",
    "heir",
    "inheritance",
    "orphan",
    "bury",
    "farewell",
    "rehearsal",
    "shelf",
    "desk",
    "spool",
    "hop",
    "hops",
    "hopped",
    "vain",
    "patience",
    "telling",
    "laying",
    "keeper",
    "ward",
];

/// A passage of prose, and the line where it begins.
struct Paragraph {
    line: usize,
    text: String,
}

/// Lines that belong together, joined: `None` ends a paragraph.
fn paragraphs<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<Paragraph> {
    let mut found: Vec<Paragraph> = Vec::new();
    let (mut is_open, mut is_code) = (false, false);
    for (number, line) in lines.enumerate() {
        let Some(line) = line else {
            (is_open, is_code) = (false, false);
            continue;
        };
        let line = line.trim();
        if line.starts_with("```") {
            (is_open, is_code) = (false, !is_code);
        } else if is_code || line.is_empty() {
            is_open = false;
        } else {
            let is_item = ["- ", "* ", "| ", "#"]
                .iter()
                .any(|mark| line.starts_with(mark));
            if is_open && !is_item {
                let last = found.last_mut().expect("open");
                last.text.push(' ');
                last.text.push_str(line);
            } else {
                let line_text = line.trim_start_matches(['-', '*', '#', '|', ' ']);
                found.push(Paragraph {
                    line: number + 1,
                    text: line_text.to_owned(),
                });
            }
            is_open = true;
        }
    }
    found
}

fn comments_of_rust(text: &str) -> Vec<Paragraph> {
    paragraphs(text.lines().map(|line| {
        let line = line.trim_start();
        let comment = ["//! ", "/// ", "// "]
            .iter()
            .find_map(|mark| line.strip_prefix(mark));
        comment.or_else(|| {
            ["//!", "///", "//"]
                .contains(&line.trim_end())
                .then_some("")
        })
    }))
}

/// Comments and Python docstrings; of a directive for shellcheck only the reason.
fn comments_of_script(text: &str) -> Vec<Paragraph> {
    const QUOTES: &str = "\"\"\"";
    let mut is_docstring = false;
    paragraphs(text.lines().map(|line| {
        let line = line.trim_start();
        let docstring = line.strip_prefix(QUOTES);
        if is_docstring || docstring.is_some() {
            let text = docstring.filter(|_| !is_docstring).unwrap_or(line);
            is_docstring = !text.ends_with(QUOTES);
            return Some(text.trim_end_matches('"'));
        }
        if let Some(directive) = line.strip_prefix("# shellcheck ") {
            return Some(directive.split_once(" # ").map_or("", |(_, reason)| reason));
        }
        line.strip_prefix("# ")
            .or_else(|| (line == "#").then_some(""))
    }))
}

/// Markdown is prose but for its code; a blank line ends a paragraph without ending a code block.
fn prose_of_markdown(text: &str) -> Vec<Paragraph> {
    paragraphs(text.lines().map(Some))
}

/// The prose of the project by file.
fn prose() -> Vec<(PathBuf, Vec<Paragraph>)> {
    let read = |path: &Path| fs::read_to_string(root().join(path)).expect("UTF-8");
    let mut found = Vec::new();
    for directory in ["src", "tests"] {
        for path in files(directory, ".rs") {
            let paragraphs = comments_of_rust(&read(&path));
            found.push((path, paragraphs));
        }
    }
    let scripts = [
        files("scripts", ""),
        files(".ci", ""),
        files("tests/mount", ".py"),
        vec!["Cargo.toml".into(), "tests/fuzz/Cargo.toml".into()],
    ];
    for path in scripts.into_iter().flatten() {
        let paragraphs = comments_of_script(&read(&path));
        found.push((path, paragraphs));
    }
    for path in files("docs", ".md").into_iter().chain(["README.md".into()]) {
        let paragraphs = prose_of_markdown(&read(&path));
        found.push((path, paragraphs));
    }
    found
}

/// The sentences of a paragraph, with the word `code` for each piece of code.
fn sentences(text: &str) -> Vec<String> {
    let prose: String = text
        .split('`')
        .enumerate()
        .map(|(number, part)| if number % 2 == 0 { part } else { "code" })
        .collect();
    let mut found = vec![String::new()];
    let mut previous = ' ';
    for letter in prose.chars() {
        if letter == ' ' && ".!?:;".contains(previous) {
            found.push(String::new());
        } else {
            found.last_mut().expect("one").push(letter);
        }
        previous = letter;
    }
    found.retain(|sentence| !sentence.trim().is_empty());
    found
}

/// Sentences of `text` without a named subject.
fn hidden_subjects(text: &str) -> Vec<String> {
    let mut found = sentences(text);
    found.retain(|sentence| {
        let first = sentence
            .trim_start_matches(|letter: char| !letter.is_alphabetic())
            .split(|letter: char| !letter.is_alphabetic())
            .next()
            .unwrap_or_default();
        HIDDEN_SUBJECTS.contains(&first) && !sentence.ends_with('?')
    });
    found
}

/// Banned phrases in `text`, as whole words.
fn banned_phrases(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let is_in_text = |phrase: &&&str| {
        text.match_indices(**phrase).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            let after = text[at + phrase.len()..].chars().next();
            !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
        })
    };
    let found = BANNED_PHRASES.iter().filter(is_in_text);
    found.map(|phrase| format!("{phrase:?}: {text}")).collect()
}

/// Fails with all places of the project's prose in which `find` finds something.
fn expect_none(find: impl Fn(&str) -> Vec<String>) {
    let mut wrong = Vec::new();
    for (path, paragraphs) in prose() {
        for Paragraph { line, text } in paragraphs {
            let found = find(&text).into_iter();
            wrong.extend(found.map(|found| format!("{}:{line}: {found}", path.display())));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn sentences_name_their_subjects() {
    expect_none(hidden_subjects);
}

#[test]
fn prose_uses_standard_words() {
    expect_none(banned_phrases);
}

#[test]
fn comments_and_docstrings_of_scripts_are_checked() {
    let text = r#"
# shellcheck shell=bash
# What every script needs.
# shellcheck disable=SC2016 # Whoever reads this.
code = 1
"""Sums up.

Who calls it waits.
"""
What = "code"
    """Someone calls."""
"#;
    let paragraphs = comments_of_script(text);
    let found: Vec<_> = paragraphs
        .iter()
        .flat_map(|paragraph| hidden_subjects(&paragraph.text))
        .collect();
    let expected = [
        "What every script needs.",
        "Whoever reads this.",
        "Who calls it waits.",
        "Someone calls.",
    ];
    assert_eq!(found, expected);
}

#[test]
fn banned_phrases_are_found_as_whole_words() {
    let found = |text: &str| banned_phrases(text).len();
    assert_eq!(found("The file lies in a directory that nobody reads."), 2);
    assert_eq!(found("Heard: the mount is mended."), 2);
    assert_eq!(
        found("It mentions hearts and amends; it relies in part."),
        0
    );
}

/// The words of an identifier: of `is_kernel_retry` and of `TimedOutRead`.
fn words(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for letter in identifier.chars() {
        let begins = letter == '_'
            || letter.is_uppercase() && !words.last().expect("one").chars().all(char::is_uppercase);
        if begins {
            words.push(String::new());
        }
        if letter != '_' {
            words.last_mut().expect("one").push(letter);
        }
    }
    words.retain(|word| !word.is_empty());
    words.iter().map(|word| word.to_lowercase()).collect()
}

#[test]
fn identifiers_are_no_retired_metaphors() {
    let mut wrong = Vec::new();
    for directory in ["src", "tests"] {
        for path in files(directory, ".rs") {
            if path.ends_with("architecture/prose.rs") {
                continue;
            }
            let text = fs::read_to_string(root().join(&path)).expect("UTF-8");
            for (number, line) in text.lines().enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                let identifiers =
                    code.split(|letter: char| !(letter.is_alphanumeric() || letter == '_'));
                let retired = identifiers.filter(|identifier| {
                    words(identifier)
                        .iter()
                        .any(|word| RETIRED_WORDS.contains(&word.as_str()))
                });
                for identifier in retired {
                    wrong.push(format!("{}:{}: {identifier}", path.display(), number + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
