//! The program, as a test of a real mount runs it.

use std::path::Path;
use std::process::{Command, Output};

/// Runs it in `directory`, where it also keeps what it keeps.
pub(crate) fn tarfs(directory: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tarfs"))
        .args(words)
        .current_dir(directory)
        .env("XDG_RUNTIME_DIR", directory)
        .env("TARFS_CACHE_DIR", directory.join("cache"))
        .env("no_proxy", "*")
        .output()
        .expect("started")
}

/// What it complained about.
pub(crate) fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
