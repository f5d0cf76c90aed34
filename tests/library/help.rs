//! Help and man pages: what they list, compared with the code.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::process::Command;

use tarfs::internal::passwd::Accounts;
use tarfs::list::find::{Expression, ParseContext};
use tarfs::tar::Timestamp;
use tarfs::tree::{FollowedLinks, metadata_of};

use super::docs::{files, read, root};
use crate::support::cli::{Outcome, Place};

/// The code without unit tests of the files below `src` whose paths end with `name`.
fn sources(name: &str) -> String {
    let paths = files(&root().join("src"), name).into_iter();
    let texts = paths.map(|path| read(&path));
    let texts = texts.map(|text| text.split("#[cfg(test)]").next().map(str::to_owned));
    texts.flatten().collect()
}

/// The words of `text` that look like primaries.
fn primaries(text: &str) -> BTreeSet<&str> {
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    let words = text.split(|letter| !is_name(letter));
    let words = words.filter(|word| word.starts_with('-') && word.len() > 1);
    words
        .filter(|word| word[1..].starts_with(|letter: char| letter.is_ascii_lowercase()))
        .collect()
}

// Promises: help-short
#[test]
fn help_of_find_lists_each_accepted_primary() {
    let output = Command::new(env!("CARGO_BIN_EXE_tarfs"))
        .args(["find", "--help"])
        .output();
    let help = String::from_utf8(output.expect("started").stdout).expect("UTF-8");
    let (table, _) = help
        .split_once("Arguments:")
        .expect("a table before the flags");
    let parser = sources("find/primaries.rs");
    let context = ParseContext {
        now: Timestamp {
            seconds: 0,
            nanoseconds: 0,
        },
        accounts: &Accounts::load_system(),
        is_terminal: false,
        links: FollowedLinks::None,
        metadata: &|path, _| metadata_of(path),
    };
    let is_accepted = |word: &&str| {
        let words = [*word, "1"].map(OsString::from);
        let parsed = Expression::parse(&words, &context).err();
        let error = parsed.map_or_else(String::new, |error| error.to_string());
        !error.contains("not supported") && !error.contains("unknown predicate")
    };
    let operators = ["-not", "-a", "-and", "-o", "-or"];
    let mut listed = primaries(table);
    listed.retain(|word| !operators.contains(word) && !["-newerXY", "-dils"].contains(word));
    let refused: Vec<_> = listed.iter().filter(|word| !is_accepted(word)).collect();
    assert!(refused.is_empty(), "{refused:?}");
    let known = primaries(&parser);
    let missing: Vec<_> = known
        .iter()
        .filter(|word| is_accepted(word) && !listed.contains(**word))
        .collect();
    assert!(missing.is_empty() && known.len() > 40, "{missing:?}");
}

// Promises: help-short
#[test]
fn ls_and_du_take_h_for_human_readable_sizes() {
    let place = Place::new();
    place.put("out/large", vec![0; 3 << 20]);
    for verb in ["ls", "du"] {
        let outcome = Outcome::of(
            place
                .tarfs()
                .args([verb, "-h"])
                .current_dir(place.path("out")),
        );
        assert_eq!(
            (outcome.code, outcome.complaints.as_str()),
            (0, ""),
            "{verb}"
        );
    }
    let long = place.succeeds(&["ls", "-lh", "out"]);
    assert!(long.text().contains(" 3.0M "), "{}", long.text());
    let help = place.succeeds(&["ls", "--help"]);
    assert!(help.text().contains("Usage: tarfs ls"), "{}", help.text());
}

/// Words of section `title` in the man page `name`, without the marks of roff(7).
fn manual_section(name: &str, title: &str) -> String {
    let place = Place::new();
    place.succeeds(&["generate", "man", "man"]);
    let page = read(&place.path("man").join(name));
    let (_, section) = page
        .split_once(&format!(".SH \"{title}\"\n"))
        .or_else(|| page.split_once(&format!(".SH {title}\n")))
        .expect("a section");
    let section = section.split(".SH ").next().unwrap_or_default();
    let section = section
        .replace("\\fB", "")
        .replace("\\fR", "")
        .replace("\\-", "-");
    section.replace("\\(bu", "").replace("\\*(Aq", "'")
}

// Promises: help-short
#[test]
fn man_pages_list_each_variable_that_is_read() {
    // Names that look like those of variables: of file systems, capabilities, and of variables between own processes.
    const OTHER: [&str; 9] = [
        "_MAGIC",
        "CAP_",
        "SCMP_",
        "SECCOMP_",
        "CARGO_",
        "Z_",
        "TARFS_COMPLETE",
        // Of servers that call a program.
        "REQUEST_METHOD",
        "__",
    ];
    // Read by Rust's library.
    const OF_LIBRARIES: [&str; 5] = [
        "RUST_BACKTRACE",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
    ];
    let code = sources(".rs");
    let is_name = |word: &str| {
        word.contains('_')
            && !word.ends_with('_')
            && word.starts_with(|letter: char| letter.is_ascii_uppercase())
            && word
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let literals = code
        .lines()
        .flat_map(|line| line.split('"').skip(1).step_by(2));
    let words = literals.flat_map(|text| text.split([' ', ',', '(', ')', ':', '$', '/']));
    let mut read: BTreeSet<_> = words.filter(|word| is_name(word)).collect();
    let single = code
        .split("variable(\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        // Another form of the name in capitals.
        .filter(|name| !name.starts_with(|letter: char| letter.is_ascii_lowercase()));
    read.extend(single);
    read.retain(|name| !OTHER.iter().any(|other| name.contains(other)));
    assert!(
        read.contains("NETRC") && read.contains("DOCKER_CONFIG"),
        "{read:?}"
    );
    let listed = manual_section("tarfs.1", "ENVIRONMENT");
    let listed: BTreeSet<_> = listed
        .split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'))
        .collect();
    let missing: Vec<_> = read
        .iter()
        .chain(&OF_LIBRARIES)
        .filter(|name| !listed.contains(**name))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

// Promises: exit-status
#[test]
fn exit_statuses_of_readme_are_those_of_the_man_page() {
    let readme = read(&root().join("README.md"));
    let rows = readme
        .lines()
        .skip_while(|line| !line.starts_with("| status |"))
        .skip(2);
    let rows = rows.map_while(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let rows: Vec<_> = rows.filter_map(|row| row.split_once(" | ")).collect();
    let manual = manual_section("tarfs.1", "EXIT STATUS");
    let lines: Vec<_> = manual.lines().filter(|line| *line != ".TP").collect();
    let expected: Vec<_> = lines
        .chunks(2)
        .filter_map(|pair| Some((*pair.first()?, *pair.last()?)))
        .collect();
    let plain = |text: &str| text.replace('`', "");
    let rows: Vec<_> = rows
        .iter()
        .map(|(status, meaning)| (*status, plain(meaning)))
        .collect();
    let rows: Vec<_> = rows
        .iter()
        .map(|(status, meaning)| (*status, meaning.as_str()))
        .collect();
    assert_eq!(rows, expected);
    let diff = manual_section("tarfs-diff.1", "EXIT STATUS");
    assert!(
        diff.contains("the trees differ") && !diff.contains("could not be examined"),
        "{diff}"
    );
}
