//! Sizes of folders, files and functions.

use std::collections::BTreeMap;
use std::fs;

use crate::source::{files, functions, modules, root};

const MAX_FILES_IN_FOLDER: usize = 16;
const MAX_FILE_LINES: usize = 700;
const MAX_FUNCTION_LINES: usize = 60;

/// Begins the line at the top of a longer file that says why it is not divided.
const REASON: &str = "// Length: ";

#[test]
fn folders_are_small() {
    let mut folders: BTreeMap<_, usize> = BTreeMap::new();
    for file in files("src", ".rs") {
        *folders
            .entry(file.parent().expect("in src").to_owned())
            .or_default() += 1;
    }
    folders.retain(|_, count| *count > MAX_FILES_IN_FOLDER);
    assert!(
        folders.is_empty(),
        "more than {MAX_FILES_IN_FOLDER} files: {folders:#?}"
    );
}

#[test]
fn files_are_short() {
    let mut long = Vec::new();
    for file in files("src", ".rs") {
        let text = fs::read_to_string(root().join(&file)).expect("UTF-8");
        let lines = text.lines().count();
        let has_reason = text
            .lines()
            .next()
            .is_some_and(|first| first.starts_with(REASON));
        if lines > MAX_FILE_LINES && !has_reason {
            long.push(format!("{}: {lines} lines", file.display()));
        }
    }
    assert!(
        long.is_empty(),
        "more than {MAX_FILE_LINES} lines without a reason: {long:#?}"
    );
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for module in modules().values() {
        let file = module.file.display().to_string();
        for function in functions(&module.syntax) {
            if function.lines > MAX_FUNCTION_LINES {
                long.push(format!(
                    "{file}: {} has {} lines",
                    function.name, function.lines
                ));
            }
        }
    }
    assert!(
        long.is_empty(),
        "more than {MAX_FUNCTION_LINES} lines: {long:#?}"
    );
}
