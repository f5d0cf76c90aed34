//! The table of how long an operation may take, against the constants of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeouts from which on an operation is in the table. Shorter ones are steps of a wait.
const MIN_LISTED: Duration = Duration::from_millis(500);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(directory: PathBuf, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            sources(path, found);
        } else if path.extension().is_some_and(|suffix| suffix == "rs") {
            found.push(path);
        }
    }
}

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
    let (mut paths, mut constants) = (Vec::new(), BTreeMap::new());
    let folder = root().join("src");
    sources(folder.clone(), &mut paths);
    for path in paths {
        let file = path.strip_prefix(&folder).expect("below src");
        let file = file.to_str().expect("UTF-8").to_owned();
        let text = fs::read_to_string(&path).expect("readable");
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
    let document = fs::read_to_string(root().join("docs/robustness.md")).expect("readable");
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
