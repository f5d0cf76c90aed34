//! Help and man pages: what they list, compared with the code.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use tarfs::internal::passwd::Accounts;
use tarfs::list::find::{Expression, ParseContext};
use tarfs::tar::Timestamp;
use tarfs::tree::metadata_of;

use crate::support::cli::{Outcome, Place};

/// The words of `text` that look like primaries.
fn primaries(text: &str) -> BTreeSet<&str> {
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    let words = text.split(|letter| !is_name(letter));
    let words = words.filter(|word| word.starts_with('-') && word.len() > 1);
    words
        .filter(|word| word[1..].starts_with(|letter: char| letter.is_ascii_lowercase()))
        .collect()
}

#[test]
fn help_of_find_lists_each_accepted_primary() {
    let output = Command::new(env!("CARGO_BIN_EXE_tarfs"))
        .args(["find", "--help"])
        .output();
    let help = String::from_utf8(output.expect("started").stdout).expect("UTF-8");
    let (table, _) = help
        .split_once("Arguments:")
        .expect("a table before the flags");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let parser = sources(&root.join("src"), "find/primaries.rs");
    let context = ParseContext {
        now: Timestamp {
            seconds: 0,
            nanoseconds: 0,
        },
        accounts: &Accounts::load_system(),
        is_terminal: false,
        metadata: &|path| metadata_of(path),
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

/// The text of the file below `directory` whose path ends with `name`.
fn sources(directory: &Path, name: &str) -> String {
    let entries = fs::read_dir(directory).expect("a directory");
    let paths = entries.map(|entry| entry.expect("read").path());
    let texts = paths.map(|path| {
        if path.is_dir() {
            sources(&path, name)
        } else if path.ends_with(name) {
            fs::read_to_string(&path).expect("text")
        } else {
            String::new()
        }
    });
    texts.collect()
}

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
