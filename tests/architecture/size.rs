//! Sizes of folders and functions.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::source::{files, functions, modules};

const MAX_FILES_IN_FOLDER: usize = 16;
const MAX_FUNCTION_LINES: usize = 60;

/// Folders with more files, and their number of files. The list only shrinks.
const LARGE_FOLDERS: &[(&str, usize)] = &[
    ("src/archive", 34),
    ("src/base", 28),
    ("src/cli", 39),
    ("src/fuse", 24),
    ("src/index", 17),
    ("src/materialize", 23),
];

/// Functions with more lines that are no tables. The number only falls, until it is 0.
const LONG_FUNCTIONS: usize = 26;

/// Functions that are tables: a line for each of many equal things, which would be harder to read apart.
const TABLES: &[(&str, &str)] = &[("src/cli/daemon/prometheus.rs", "render")];

#[test]
fn folders_are_small() {
    let mut folders: BTreeMap<_, usize> = BTreeMap::new();
    for file in files("src", ".rs") {
        *folders
            .entry(file.parent().expect("in src").to_owned())
            .or_default() += 1;
    }
    folders.retain(|_, count| *count > MAX_FILES_IN_FOLDER);
    let known = LARGE_FOLDERS
        .iter()
        .map(|&(folder, count)| (PathBuf::from(folder), count));
    assert_eq!(
        folders,
        known.collect(),
        "folders with more than {MAX_FILES_IN_FOLDER} files"
    );
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    let mut tables = TABLES.to_vec();
    for module in modules().values() {
        let file = module.file.display().to_string();
        for function in functions(&module.syntax) {
            if function.lines <= MAX_FUNCTION_LINES {
                continue;
            }
            let before = tables.len();
            tables.retain(|table| *table != (file.as_str(), function.name.as_str()));
            if tables.len() == before {
                long.push(format!(
                    "{file}: {} has {} lines",
                    function.name, function.lines
                ));
            }
        }
    }
    assert_eq!(
        long.len(),
        LONG_FUNCTIONS,
        "more than {MAX_FUNCTION_LINES} lines: {long:#?}"
    );
    assert!(tables.is_empty(), "no longer needed: {tables:?}");
}
