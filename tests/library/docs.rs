//! The documents: the files, headings, flags and identifiers that they name exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERBS: [&[&str]; 26] = [
    &["mount"],
    &["umount"],
    &["status"],
    &["materialize"],
    &["ls"],
    &["find"],
    &["du"],
    &["diff"],
    &["chmod"],
    &["chown"],
    &["rm"],
    &["sync"],
    &["copy"],
    &["shard", "plan"],
    &["shard", "write"],
    &["shard", "finish"],
    &["shard", "tar"],
    &["cat"],
    &["image"],
    &["bundle"],
    &["index"],
    &["verify"],
    &["profile"],
    &["cache", "list"],
    &["cache", "prune"],
    &["cache", "clear"],
];

/// Flags of other programs, and the documents that mention them.
const FOREIGN_FLAGS: [(&str, &[&str]); 9] = [
    ("README.md", &["--path"]),
    ("docs/semantics.md", &["--acls"]),
    ("docs/robustness.md", &["--test"]),
    ("docs/guides/boot.md", &["--install", "--move", "--parents"]),
    (
        "docs/guides/containers.md",
        &[
            "--as-pid2",
            "--bind",
            "--build-context",
            "--bundle",
            "--cgroup-manager",
            "--cgroups",
            "--cmd",
            "--cpu-shares",
            "--dev",
            "--env",
            "--fork",
            "--gid",
            "--keep-unit",
            "--map-auto",
            "--map-root-user",
            "--mount",
            "--network",
            "--pid",
            "--private-users-ownership",
            "--proc",
            "--read-only",
            "--register",
            "--rm",
            "--ro-bind",
            "--rootfs",
            "--runtime",
            "--tmpfs",
            "--uid",
            "--ulimit",
            "--unshare-pid",
            "--unshare-user",
            "--user",
            "--volatile",
        ],
    ),
    ("docs/guides/jobs.md", &["--array", "--dependency"]),
    (
        "docs/guides/object-stores.md",
        &[
            "--account-name",
            "--as-user",
            "--auth-mode",
            "--container-name",
            "--expiry",
            "--name",
            "--permissions",
        ],
    ),
    ("docs/guides/mirror.md", &["--now"]),
    ("docs/guides/system.md", &["--now"]),
];

/// Documents that describe scripts and benchmarks, with their flags.
const ABOUT_SCRIPTS: [&str; 2] = ["docs/CONTRIBUTING.md", "docs/performance.md"];

/// Words that a document may have. Older measurements and reasons are in the history.
const MAX_WORDS: [(&str, usize); 4] = [
    ("docs/CHANGELOG.md", 1_200),
    ("docs/architecture.md", 9_400),
    ("docs/performance.md", 4_400),
    ("docs/semantics.md", 12_550),
];

/// Placeholders of a registry and of a name in one.
const PLACEHOLDERS: [&str; 2] = ["REGISTRY", "NAME"];

/// Schemes before the name of a bucket, or of a file in an archive.
const SCHEMES_WITHOUT_HOST: [&str; 5] = ["s3", "gs", "az", "abfss", "tarfs"];

/// The only host that a document may name.
const EXAMPLE_HOST: &str = "example.com";

/// Names in docs/CONTRIBUTING.md that no code has: a variable of cargo, which a script removes by a pattern.
const FOREIGN_NAMES: [&str; 1] = ["RUSTC_WRAPPER"];

/// Folders of the project's files.
const FOLDERS: [&str; 4] = ["src/", "tests/", "docs/", "scripts/"];

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files below `directory` whose names end in `suffix`.
pub(crate) fn files(directory: &Path, suffix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).expect("readable") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                pending.push(path);
            } else if path.to_string_lossy().ends_with(suffix) {
                found.push(path);
            }
        }
    }
    found
}

fn documents() -> Vec<PathBuf> {
    let mut documents = files(&root().join("docs"), ".md");
    documents.push(root().join("README.md"));
    documents
}

pub(crate) fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

#[test]
fn links_and_scripts_name_existing_files() {
    let mut wrong = Vec::new();
    for document in documents() {
        let text = read(&document);
        let folder = document.parent().expect("a folder");
        for target in text.split("](").skip(1) {
            let target = target.split([')', '#']).next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                wrong.push(format!("{}: link to {target}", document.display()));
            }
        }
        for name in text.split("scripts/").skip(1) {
            let name = format!("scripts/{}", leading_path(name));
            if !root().join(&name).exists() {
                wrong.push(format!("{}: {name}", document.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A heading of a document.
struct Heading {
    level: usize,
    title: String,
    /// The name that GitHub gives to links to it.
    anchor: String,
}

fn headings(text: &str) -> Vec<Heading> {
    let mut headings = Vec::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        let title = line.trim_start_matches('#');
        let level = line.len() - title.len();
        let Some(title) = title.strip_prefix(' ').filter(|_| level > 0 && !is_code) else {
            continue;
        };
        let letters = title.to_lowercase().replace(' ', "-");
        let is_kept = |letter: &char| letter.is_alphanumeric() || "-_".contains(*letter);
        let slug: String = letters.chars().filter(is_kept).collect();
        let count = counts.entry(slug.clone()).or_default();
        let anchor = if *count == 0 {
            slug
        } else {
            format!("{slug}-{count}")
        };
        *count += 1;
        headings.push(Heading {
            level,
            title: title.to_owned(),
            anchor,
        });
    }
    headings
}

#[test]
fn links_name_existing_headings() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for document in documents() {
        let folder = document.parent().expect("a folder");
        for link in read(&document).split("](").skip(1) {
            let link = link.split(')').next().unwrap_or_default();
            let Some((target, anchor)) = link.split_once('#') else {
                continue;
            };
            if target.contains("://") {
                continue;
            }
            count += 1;
            let target = if target.is_empty() {
                document.clone()
            } else {
                folder.join(target)
            };
            let headings = headings(&read(&target));
            if !headings.iter().any(|heading| heading.anchor == anchor) {
                wrong.push(format!("{}: link to {link}", document.display()));
            }
        }
    }
    assert!(count > 50, "only {count} links to headings");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn contents_list_every_heading() {
    let text = read(&root().join("docs/semantics.md"));
    let (start, _) = text.split_once("\n\n## ").expect("headings");
    let (_, contents) = start.split_once("\n* ").expect("a list of contents");
    let listed = contents.split('[').skip(1).map(|link| {
        let (link, _) = link.rsplit_once(')').expect("a link");
        link.to_owned()
    });
    let listed: BTreeSet<_> = listed.collect();
    let headings = headings(&text);
    let links = headings.iter().filter(|heading| heading.level > 1);
    let expected: BTreeSet<_> = links
        .map(|Heading { title, anchor, .. }| format!("{title}](#{anchor}"))
        .collect();
    let wrong: Vec<_> = listed.symmetric_difference(&expected).collect();
    assert!(
        wrong.is_empty(),
        "only in the contents, or missing there: {wrong:?}"
    );
}

/// The start of `text` up to the first character that no path of ours contains.
fn leading_path(text: &str) -> &str {
    let end = text.find(|letter| !(is_word(letter) || "-/.".contains(letter)));
    let path = end.map_or(text, |end| text.split_at(end).0);
    path.trim_end_matches('.')
}

#[test]
fn files_named_in_documents_exist() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for document in documents() {
        let text = read(&document);
        // Text between backticks. A fence is three of them.
        let code = text.split('`').skip(1).step_by(2);
        for word in code.flat_map(str::split_whitespace) {
            let from_root = FOLDERS.iter().any(|folder| word.starts_with(folder));
            let extension = Path::new(word).extension();
            let is_source = extension.is_some_and(|extension| extension == "rs");
            if !from_root && !is_source {
                continue;
            }
            count += 1;
            // Modules are named by their paths below `src`.
            let is_module = is_source && root().join("src").join(word).exists();
            if !is_module && !root().join(word).exists() {
                wrong.push(format!("{}: {word}", document.display()));
            }
        }
    }
    assert!(count > 100, "only {count} files");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The words of `src`, `tests`, `scripts` and `Cargo.toml`.
fn words_of_code() -> BTreeSet<String> {
    let folders = [
        ("src", ".rs"),
        ("tests", ".rs"),
        ("tests", ".py"),
        ("scripts", ""),
    ];
    let paths = folders
        .iter()
        .flat_map(|(folder, suffix)| files(&root().join(folder), suffix));
    let mut words = BTreeSet::new();
    for path in paths.chain([root().join("Cargo.toml")]) {
        let text = read(&path);
        let found = text.split(|letter| !is_word(letter));
        words.extend(found.map(str::to_owned));
    }
    words
}

#[test]
fn names_of_code_in_contributing_exist() {
    let text = read(&root().join("docs/CONTRIBUTING.md"));
    let code = text.split('`').skip(1).step_by(2);
    let names = code.map(|code| code.strip_suffix("()").unwrap_or(code));
    let names: BTreeSet<_> = names
        .filter(|name| name.contains('_') && name.chars().all(is_word))
        .collect();
    assert!(names.len() > 20, "only {names:?}");
    let mut words = words_of_code();
    // They are in this file.
    words.retain(|word| !FOREIGN_NAMES.contains(&word.as_str()));
    let exists = |name: &str| {
        // A part of names begins with an underscore, such as `_bytes`.
        words.contains(name)
            || name.starts_with('_') && words.iter().any(|word| word.contains(name))
    };
    let unknown: BTreeSet<_> = names.into_iter().filter(|name| !exists(name)).collect();
    assert_eq!(unknown, FOREIGN_NAMES.into(), "names that no code has");
}

/// Words that begin with `--`.
fn flags(text: &str) -> BTreeSet<&str> {
    let letter = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    text.match_indices("--")
        .filter(|&(at, _)| {
            !text
                .get(..at)
                .unwrap_or_default()
                .ends_with(['-', '|', ':'])
        })
        .filter_map(|(at, _)| {
            let rest = text.get(at + 2..)?;
            let len = rest
                .find(|other| !(letter(other) || other == '-'))
                .unwrap_or(rest.len());
            (len > 1 && rest.starts_with(letter)).then(|| text.get(at..at + 2 + len))?
        })
        .collect()
}

#[test]
fn flags_in_documents_exist_in_program() {
    let mut help = String::new();
    for verb in VERBS {
        let program = env!("CARGO_BIN_EXE_tarfs");
        let output = Command::new(program).args(verb).arg("--help").output();
        help.push_str(&String::from_utf8_lossy(&output.expect("started").stdout));
    }
    let ours = flags(&help);
    let scripts: Vec<_> = ["scripts", "tests/bench"]
        .iter()
        .flat_map(|directory| files(&root().join(directory), ""))
        .map(|path| read(&path))
        .collect();
    let of_scripts: BTreeSet<_> = scripts.iter().flat_map(|text| flags(text)).collect();
    for document in documents() {
        let text = read(&document);
        let name = document.strip_prefix(root()).expect("below");
        let name = name.to_str().expect("UTF-8");
        let is_about_scripts = ABOUT_SCRIPTS.contains(&name);
        let foreign = FOREIGN_FLAGS.iter().find(|(of, _)| *of == name);
        let foreign = foreign.map_or(&[][..], |(_, flags)| flags);
        let mut unknown = flags(&text);
        unknown.retain(|flag| !ours.contains(flag));
        unknown.retain(|flag| !(is_about_scripts && of_scripts.contains(flag)));
        let expected: BTreeSet<_> = foreign.iter().copied().collect();
        assert_eq!(unknown, expected, "{name}: flags that no verb takes");
    }
}

#[test]
fn documents_name_example_hosts_only() {
    for document in documents() {
        let text = read(&document);
        let parts: Vec<_> = text.split("://").collect();
        for pair in parts.windows(2) {
            let [before, rest] = pair else { continue };
            let mut hostless = SCHEMES_WITHOUT_HOST.iter();
            if hostless.any(|scheme| before.ends_with(scheme)) {
                continue;
            }
            let host = rest.split(|letter: char| !(is_word(letter) || ".-".contains(letter)));
            let host = host.into_iter().next().unwrap_or_default();
            let known = host.is_empty() || host == EXAMPLE_HOST || PLACEHOLDERS.contains(&host);
            assert!(known, "{}: names {host}", document.display());
        }
    }
}

/// The numbers in `text`. Commas between digits are left out.
fn numbers(text: &str) -> impl Iterator<Item = String> {
    let is_part = |letter: char| letter.is_ascii_digit() || ".,".contains(letter);
    let parts = text.split(move |letter| !is_part(letter));
    let numbers = parts.map(|part| part.trim_matches(['.', ',']).replace(',', ""));
    numbers.filter(|number| !number.is_empty())
}

/// The numbers in the tables of docs/performance.md.
fn measured_numbers() -> BTreeSet<String> {
    let text = read(&root().join("docs/performance.md"));
    let rows = text.lines().filter(|line| line.starts_with('|'));
    rows.flat_map(numbers).collect()
}

/// Each chart that a document shows, with its alternative text.
fn shown_charts() -> Vec<(PathBuf, String)> {
    let mut charts = Vec::new();
    for document in documents() {
        let text = read(&document);
        let folder = document.parent().expect("a folder");
        for image in text.split("![").skip(1) {
            let (alternative, rest) = image.split_once("](").expect("an image");
            let target = rest.split(')').next().expect("a target");
            let path = folder.join(target).canonicalize();
            charts.push((path.expect("an existing image"), alternative.to_owned()));
        }
    }
    charts
}

#[test]
fn charts_are_drawn_from_tables() {
    let script = Command::new(root().join("scripts/bench/charts"))
        .arg("--check")
        .output();
    let output = script.expect("started");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn charts_show_measured_numbers() {
    let measured = measured_numbers();
    let shown = shown_charts();
    let mut wrong = Vec::new();
    for chart in files(&root().join("docs/charts"), ".svg") {
        let text = read(&chart);
        let values: Vec<_> = text.split("class=\"value\"").skip(1).collect();
        assert!(
            values.len() > 3,
            "{}: {} figures",
            chart.display(),
            values.len()
        );
        for value in values {
            let value = value.split(['>', '<']).nth(1).unwrap_or_default();
            let unknown = numbers(value).filter(|number| !measured.contains(number));
            wrong.extend(unknown.map(|number| format!("{}: {number}", chart.display())));
        }
        let is_shown = shown.iter().any(|(path, _)| *path == chart);
        assert!(is_shown, "{}: no document shows it", chart.display());
    }
    for (path, alternative) in &shown {
        assert!(
            !alternative.is_empty(),
            "{}: no alternative text",
            path.display()
        );
        let unknown = numbers(alternative).filter(|number| !measured.contains(number));
        wrong.extend(unknown.map(|number| format!("alternative of {}: {number}", path.display())));
    }
    assert!(
        wrong.is_empty(),
        "numbers that no table has:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn readme_has_measured_times() {
    let text = read(&root().join("README.md"));
    let measured = measured_numbers();
    let (_, rest) = text.split_once("![Bars").expect("a chart");
    let (figures, _) = rest
        .split_once("Methods, machines")
        .expect("a link to the methods");
    let mut unknown = numbers(figures).filter(|number| !measured.contains(number));
    assert_eq!(unknown.next(), None, "a number that no table has");
}

#[test]
fn documents_have_bounded_lengths() {
    for (name, limit) in MAX_WORDS {
        let words = read(&root().join(name)).split_whitespace().count();
        assert!(words <= limit, "{name}: {words} words");
    }
}
