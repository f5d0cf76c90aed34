//! The promises of docs/semantics.md: each has an id and a test, and the tests name the ids of promises.
//!
//! docs/promises.tsv lists the tests of each promise. After a change of a promise or of a test's ids, write it by
//! `TARFS_WRITE_PROMISES=1 cargo test --test library promises`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use crate::docs::{files, is_word, read, root};

const PROMISES: &str = "docs/semantics.md";
const MATRIX: &str = "docs/promises.tsv";

/// Set to write the matrix instead of comparing it.
const WRITE: &str = "TARFS_WRITE_PROMISES";

/// Fewer promises than this mean that the document is not understood.
const MIN_PROMISES: usize = 300;

/// List items and table rows. Lines that continue an item, and headers of tables, are none.
fn promises(text: &str) -> Vec<&str> {
    let mut promises = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let heads_table = lines.peek().is_some_and(|next| next.starts_with("|--"));
        let start = line.strip_prefix("- ").or_else(|| line.strip_prefix("| "));
        if let Some(promise) = start.filter(|_| !heads_table) {
            promises.push(promise);
        }
    }
    promises
}

/// The id before a promise, in backticks: two to four words, joined by hyphens.
fn id(promise: &str) -> Option<&str> {
    let (id, _) = promise.strip_prefix('`')?.split_once('`')?;
    let is_part = |part: &str| {
        let mut letters = part.chars();
        !part.is_empty()
            && letters.all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit())
    };
    let parts = id.split('-').count();
    ((2..=4).contains(&parts) && id.split('-').all(is_part)).then_some(id)
}

/// A test and an id in the comment above it.
struct Citation {
    id: String,
    /// File and name, as pytest writes them.
    test: String,
}

/// The name in a line that starts a test: a function, or one that runs for every packing.
fn test_name(line: &str) -> Option<&str> {
    let start = ["async fn ", "fn ", "def ", "for_each_packing!("]
        .iter()
        .find_map(|start| line.strip_prefix(start))?;
    start.split(|letter| !is_word(letter)).next()
}

/// The ids after `mark` in comments of one file, with the test below each comment.
fn citations(path: &str, text: &str, mark: &str) -> Vec<Citation> {
    let mut citations = Vec::new();
    let mut ids: Vec<&str> = Vec::new();
    let mut is_attribute = false;
    for line in text.lines().map(str::trim_start) {
        if let Some(list) = line.strip_prefix(mark) {
            ids.extend(list.split(", "));
        } else if let Some(name) = test_name(line) {
            citations.extend(ids.drain(..).map(|id| Citation {
                id: id.to_owned(),
                test: format!("{path}::{name}"),
            }));
        } else {
            is_attribute |= line.starts_with("#[");
            let is_above_test = ids.is_empty() || is_attribute;
            assert!(
                is_above_test,
                "{path}: no test is below the promises {ids:?}"
            );
            is_attribute &= !line.ends_with(']');
        }
    }
    citations
}

/// The citations of all tests in Rust and Python.
fn all_citations() -> Vec<Citation> {
    let places = [
        ("src", ".rs", "// Promises: "),
        ("tests", ".rs", "// Promises: "),
        ("tests/python", ".py", "# Promises: "),
    ];
    let mut citations = Vec::new();
    for (folder, suffix, mark) in places {
        for path in files(&root().join(folder), suffix) {
            let name = path.strip_prefix(root()).expect("below").display();
            citations.extend(self::citations(&name.to_string(), &read(&path), mark));
        }
    }
    citations
}

/// A line for each promise: its id and its tests, separated by tabs.
fn matrix(ids: &[&str], citations: &[Citation]) -> String {
    let mut tests: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Citation { id, test } in citations {
        tests.entry(id).or_default().insert(test);
    }
    let line = |id: &&str| {
        let tests = tests.get(id).into_iter().flatten().copied();
        let fields: Vec<_> = [*id].into_iter().chain(tests).collect();
        fields.join("\t") + "\n"
    };
    ids.iter().map(line).collect()
}

#[test]
fn promises_have_ids_and_tests_cite_them() {
    let text = read(&root().join(PROMISES));
    let promises = promises(&text);
    assert!(promises.len() > MIN_PROMISES, "only {}", promises.len());
    let mut wrong = Vec::new();
    let no_id = promises.iter().filter(|promise| id(promise).is_none());
    wrong.extend(no_id.map(|promise| format!("no id of two to four words: {promise}")));
    let citations = all_citations();
    let cited: BTreeSet<_> = citations.iter().map(|cited| cited.id.as_str()).collect();
    let mut ids = BTreeSet::new();
    for id in promises.iter().filter_map(|promise| id(promise)) {
        if !ids.insert(id) {
            wrong.push(format!("two promises have the id {id}"));
        }
        if !cited.contains(id) {
            wrong.push(format!("no test has the comment `// Promises: {id}`"));
        }
    }
    let unknown = citations
        .iter()
        .filter(|cited| !ids.contains(cited.id.as_str()));
    wrong.extend(unknown.map(|cited| format!("{}: no promise {}", cited.test, cited.id)));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "a contributor asks for the new matrix by a variable"
)]
fn matrix_lists_tests_of_each_promise() {
    let text = read(&root().join(PROMISES));
    let ids: Vec<_> = promises(&text).into_iter().filter_map(id).collect();
    let matrix = matrix(&ids, &all_citations());
    let path = root().join(MATRIX);
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, matrix).expect("written");
        return;
    }
    let is_current = read(&path) == matrix;
    assert!(
        is_current,
        "{MATRIX} is old: {WRITE}=1 cargo test --test library promises writes it"
    );
}
