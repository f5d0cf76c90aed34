//! The tables of docs/robustness.md, against the constants and tests of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::docs::{files, is_word, read, root};

const DOCUMENT: &str = "docs/robustness.md";

/// Timeouts from which on an operation is in the table. Shorter ones are steps of a wait.
const MIN_LISTED: Duration = Duration::from_millis(500);

/// The duration that `value` makes, such as `Duration::from_secs(5)`.
fn duration(value: &str) -> Option<Duration> {
    let (unit, rest) = value.strip_prefix("Duration::from_")?.split_once('(')?;
    let number = rest.split_once(')')?.0.replace('_', "").parse().ok()?;
    Some(match unit {
        "millis" => Duration::from_millis(number),
        "secs" => Duration::from_secs(number),
        "mins" => Duration::from_mins(number),
        _ => return None,
    })
}

/// The constants of the code that are durations, by file and name.
fn constants() -> BTreeMap<(String, String), Duration> {
    let mut constants = BTreeMap::new();
    let folder = root().join("src");
    for path in files(&folder, ".rs") {
        let file = path.strip_prefix(&folder).expect("below src");
        let file = file.to_str().expect("UTF-8").to_owned();
        let text = read(&path);
        for rest in text.split("const ").skip(1) {
            if let Some((name, value)) = rest.split_once(": Duration = ")
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_uppercase() || byte == b'_')
                && let Some(value) = duration(value)
            {
                constants.insert((file.clone(), name.to_owned()), value);
            }
        }
    }
    constants
}

/// How the table may write `value`.
fn texts(value: Duration) -> [String; 2] {
    let seconds = value.as_secs_f64();
    [format!("{seconds} s"), format!("{} min", seconds / 60.0)]
}

// Promises: time-deadline
#[test]
fn table_of_time_limits_has_the_constants_of_the_code() {
    let (constants, mut named) = (constants(), BTreeSet::new());
    let document = read(&root().join(DOCUMENT));
    for row in document.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let &[_, _, limit, _, references, _] = &*cells else {
            continue;
        };
        for reference in references.split(", ").filter(|text| text.starts_with('`')) {
            let (file, name) = reference.split_once("` ").expect("a file and a constant");
            let key = (file[1..].to_owned(), name.to_owned());
            let value = constants
                .get(&key)
                .unwrap_or_else(|| panic!("{reference} is missing"));
            let words = format!(" {limit},");
            let is_told = texts(*value).iter().any(|text| {
                let [start, end] = [format!(" {text},"), format!(" {text} ")];
                words.contains(&start) || words.contains(&end)
            });
            assert!(
                is_told,
                "{reference} is {value:?}, and the table says {limit}"
            );
            named.insert(key);
        }
    }
    let is_listed = |name: &str, value: Duration| name.ends_with("TIMEOUT") && value >= MIN_LISTED;
    for ((file, name), value) in constants {
        // A copy of the default in another layer.
        let is_copy = (&*file, &*name) == ("fuse/pending_replies.rs", "DEFAULT_TIMEOUT");
        let key = (file, name);
        if is_listed(&key.1, value) && !is_copy {
            assert!(named.contains(&key), "the table lacks {key:?}");
        }
    }
}

/// The last cells of the table below `heading`.
fn last_cells<'a>(document: &'a str, heading: &str) -> Vec<&'a str> {
    let (_, section) = document.split_once(heading).expect("the heading");
    let rows = section.lines().skip_while(|line| !line.starts_with("|--"));
    let rows = rows.skip(1).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next())
        .map(str::trim)
        .collect()
}

#[test]
fn table_of_limits_names_constants_of_the_code() {
    let document = read(&root().join(DOCUMENT));
    let cells = last_cells(&document, "\n## Limits");
    assert!(cells.len() > 10, "{cells:?}");
    for cell in cells {
        let mut text = String::new();
        for word in cell.split(", ").flat_map(str::split_whitespace) {
            if let Some(file) = word.strip_prefix('`') {
                text = read(&root().join("src").join(file.trim_end_matches('`')));
            } else {
                assert!(
                    text.contains(&format!("const {word}: ")),
                    "{word} in {cell}"
                );
            }
        }
    }
}

#[test]
fn table_of_attacks_names_tests() {
    let document = read(&root().join(DOCUMENT));
    let cells = last_cells(&document, "\n## Attacks");
    assert!(cells.len() > 20, "{cells:?}");
    let sources = ["src", "tests"].map(|folder| files(&root().join(folder), ".rs"));
    let sources: String = sources.iter().flatten().map(|path| read(path)).collect();
    let functions = sources.split("fn ").skip(1);
    let functions: BTreeSet<_> = functions
        .filter_map(|text| text.split(|letter| !is_word(letter)).next())
        .collect();
    for name in cells.iter().flat_map(|cell| cell.split(", ")) {
        assert!(functions.contains(name), "no test is called {name}");
    }
}
