//! Runs of the program on a terminal.

use std::path::Path;
use std::process::{Command, Output};

/// Runs the program in `directory` on a terminal of 80 columns. Returns what the terminal shows.
pub(crate) fn on_terminal(directory: &Path, words: &str) -> (Output, String) {
    let program = env!("CARGO_BIN_EXE_tarfs");
    let line = format!("stty cols 80 rows 24; exec {program} {words}");
    let output = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(directory)
        .env("TARFS_CACHE_DIR", directory.join("cache"))
        .env("XDG_RUNTIME_DIR", directory)
        // Without TERM, as for services, progress is not shown.
        .env("TERM", "xterm")
        .output()
        .expect("script (bsdutils) is installed");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, shown)
}
