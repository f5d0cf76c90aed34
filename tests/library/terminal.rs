//! Output on a terminal that is not printed to a pipe.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use serde_json::Value;

use crate::support::fixture::TestDir;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};
use crate::support::terminal::on_terminal;

const NAME: &str = "a\x1b]0;owned\x07b\n c";
/// The name as `ls --escape` shows it.
const ESCAPED_NAME: &str = r"a\033]0;owned\007b\n\ c";

// Promises: write-messages
#[test]
fn line_that_is_a_name_is_escaped_except_in_a_pipe() {
    let archive = Archive::new().add(Header::new(NAME, b'0'), "").end();
    let directory = TestDir::new(&["out", "source", "new"]);
    directory.put("a.tar", archive);
    directory.put(format!("source/{NAME}"), "");
    for (line, before) in [
        ("materialize -v -C out a.tar", ""),
        ("materialize --dry-run a.tar", ""),
        ("copy --dry-run source new", "./\n"),
    ] {
        let (output, shown) = on_terminal(directory.root(), line);
        assert!(output.status.success(), "{shown}");
        assert!(
            !shown.contains('\x1b') || !shown.contains("]0;"),
            "{shown:?}"
        );
        assert!(shown.contains(ESCAPED_NAME), "{line}: {shown:?}");
        let words: Vec<_> = line.split(' ').collect();
        let piped = directory.tarfs(&words);
        let expected = format!("{before}{NAME}\n");
        assert_eq!(piped.stdout, expected.as_bytes(), "{line}");
        assert!(piped.status.success(), "{}", stderr_text(&piped));
    }
    let piped = directory.tarfs(&["materialize", "-O", "-v", "a.tar"]);
    assert_eq!(stderr_text(&piped), format!("{ESCAPED_NAME}\n"));
}

// Promises: write-messages, sync-dry-run
#[test]
fn name_after_an_action_is_escaped_even_in_a_pipe() {
    let directory = TestDir::new(&["old"]);
    let archive = || Archive::new().add(Header::new(".", b'5').mode(0o711), "");
    let full = archive().add(Header::new(NAME, b'0'), "");
    directory.put("full.tar", full.end());
    directory.put("empty.tar", archive().end());
    let step = |word: &str| format!("{word} {ESCAPED_NAME}");
    let (output, shown) = on_terminal(directory.root(), "sync --dry-run full.tar old");
    assert!(output.status.success(), "{shown}");
    assert!(shown.contains(&step("write")), "{shown:?}");
    let print = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let piped = directory.tarfs(&words);
        assert!(piped.status.success(), "{}", stderr_text(&piped));
        String::from_utf8(piped.stdout).expect("escaped")
    };
    // A raw line break would look like another line.
    let full = print("sync --dry-run full.tar old");
    assert_eq!(full, format!("change ./\n{}\n", step("write")));
    let written = print("sync -v full.tar old");
    let mut names: Vec<_> = written.lines().collect();
    names.sort_unstable();
    assert_eq!(names, ["./", ESCAPED_NAME]);
    for (line, word) in [
        ("sync --dry-run --delete empty.tar old", "delete"),
        ("sync -v --delete empty.tar old", "deleting"),
    ] {
        assert_eq!(print(line), format!("{}\n", step(word)), "{line}");
    }
}

// Promises: walk-terminal
#[test]
fn find_and_du_write_no_escape_sequence_of_a_name() {
    let name = "a\x1b]0;owned\x07b\n\u{9b}2J";
    let archive = Archive::new().add(Header::new(name, b'0'), "").end();
    let directory = TestDir::new(&["d"]);
    directory.put("a.tar", archive);
    directory.put(format!("d/{name}"), "");
    for source in ["a.tar", "d"] {
        for words in [
            "find S",
            "find S -printf %f:%p:%P:%h:%H\\n",
            "find S -ls",
            "du -a S",
            "ls S",
            "ls -R --json S",
        ] {
            let words = words.replace('S', source);
            let (output, shown) = on_terminal(directory.root(), &words);
            assert!(output.status.success(), "{words}: {shown:?}");
            let is_obeyed = |character: char| {
                character.is_control() && !matches!(character, '\r' | '\n' | '\t')
            };
            assert!(shown.contains("]0;owned"), "{words}: {shown:?}");
            assert!(!shown.contains(is_obeyed), "{words}: {shown:?}");
        }
    }
    let (_, shown) = on_terminal(directory.root(), "find a.tar -type f");
    assert_eq!(shown.trim_end(), "./a?]0;owned?b??2J");
}

// Promises: write-messages
#[test]
fn materialize_reports_entries_and_bytes_on_a_terminal() {
    let archive = Archive::new().file("d/f", [7; 5000]).end();
    let directory = TestDir::new(&["out"]);
    directory.put("a.tar", archive);
    for (number, flags) in ["", "--atomic", "--resume"].iter().enumerate() {
        if *flags != "--atomic" {
            fs::create_dir(directory.path(format!("out{number}"))).expect("fresh");
        }
        let words = format!("materialize {flags} a.tar -C out{number}");
        let (output, shown) = on_terminal(directory.root(), &words);
        assert!(output.status.success(), "{shown}");
        assert!(shown.contains("entries, 5000 B in "), "{flags}: {shown:?}");
    }
    fs::create_dir(directory.path("quiet")).expect("fresh");
    let (_, shown) = on_terminal(directory.root(), "materialize -q a.tar -C quiet");
    assert_eq!(shown, "");
    let piped = directory.tarfs(&["materialize", "a.tar", "-C", "quiet"]);
    assert!(
        piped.status.success() && piped.stderr.is_empty(),
        "{}",
        stderr_text(&piped)
    );
}

// Promises: error-line
#[test]
fn errors_have_no_escape_sequence_of_a_name() {
    let directory = TestDir::new(&["out"]);
    directory.put("a.tar", Archive::new().file("a", "1").end());
    let name = "x\x1b[31m\u{9b}2J\n\u{2028}y";
    directory.put(name, "no archive");
    let missing = format!("none{name}");
    for words in [
        &["ls", name][..],
        &["ls", &missing],
        &["ls", "--index", &missing, "a.tar"],
        &["ls", "a.tar", name],
        &["cat", "a.tar", name],
        &["cat", &missing, "a"],
        &["materialize", "-C", "out", name],
        &["materialize", "-C", "out", "a.tar", name],
        &["verify", name],
        &["verify", &missing],
        &["sync", name, "out"],
        &["status", &missing],
        &["umount", &missing],
        &["ls", "--memory", name, "a.tar"],
        &[&missing],
    ] {
        let output = directory.tarfs(words);
        assert!(!output.status.success(), "{words:?}");
        let said = stderr_text(&output) + &String::from_utf8_lossy(&output.stdout);
        let is_obeyed = |character: char| {
            character.is_control() && character != '\n' || character == '\u{2028}'
        };
        assert!(said.starts_with("tarfs: "), "{words:?}: {said:?}");
        assert!(!said.contains(is_obeyed), "{words:?}: {said:?}");
    }
}

// Promises: cache-list, json-bytes, verify-checks
#[test]
fn json_has_no_escape_sequence_of_a_name_and_bytes_that_are_not_utf8() {
    let directory = TestDir::new(&["cache"]);
    let name = "x\u{9b}2J\u{2028}\u{7f}\"y";
    directory.put(name, Archive::new().file(name, "1").end());
    let cache = OsStr::from_bytes(b"cache/\xff");
    for verb in [
        &["index", "-q", name][..],
        &["ls", "--json", name],
        &["verify", "--json", name],
        &["cache", "list", "--json"],
    ] {
        let mut command = directory.command(verb);
        command.arg("--cache-dir").arg(cache);
        let output = command.output().expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        for line in text.lines() {
            let is_obeyed = |character: char| character.is_control() || character == '\u{2028}';
            assert!(!line.contains(is_obeyed), "{verb:?}: {line:?}");
            let object: Value = serde_json::from_str(line).expect("JSON");
            let found = object.get("source").or_else(|| object.get("path"));
            let found = found.and_then(Value::as_str).expect("a name");
            assert!(
                [name, "."].iter().any(|end| found.ends_with(end)),
                "{verb:?}: {line}"
            );
            if verb[0] == "cache" {
                let path = object["path_bytes"].as_array().expect("bytes");
                assert!(path.contains(&255.into()), "{line}");
                assert!(object.get("source_bytes").is_none(), "{line}");
            }
        }
    }
}
