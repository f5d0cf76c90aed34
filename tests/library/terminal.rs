//! Output on a terminal that is not printed to a pipe.

use std::fs;

use crate::support::fixture::TestDir;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header};
use crate::support::terminal::on_terminal;

#[test]
fn names_written_to_a_terminal_are_escaped() {
    let name = "a\x1b]0;owned\x07b\n c";
    let archive = Archive::new().add(Header::new(name, b'0'), "").end();
    let directory = TestDir::new(&["out"]);
    directory.put("a.tar", archive);
    for flags in ["-v -C out", "--dry-run"] {
        let (output, shown) = on_terminal(directory.root(), &format!("materialize {flags} a.tar"));
        assert!(output.status.success(), "{shown}");
        assert!(
            !shown.contains('\x1b') || !shown.contains("]0;"),
            "{shown:?}"
        );
        assert!(shown.contains(r"a\033]0;owned\007b\n\ c"), "{shown:?}");
        let words: Vec<_> = ["materialize"]
            .into_iter()
            .chain(flags.split(' '))
            .chain(["a.tar"])
            .collect();
        let piped = directory.tarfs(&words);
        let line = format!("{name}\n");
        assert_eq!(piped.stdout, line.as_bytes(), "{}", stderr_text(&piped));
    }
}

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
        assert!(
            shown.contains("entries, 4.88 KiB in "),
            "{flags}: {shown:?}"
        );
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
