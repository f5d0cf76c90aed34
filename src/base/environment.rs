//! Environment variables with settings of the user, for the program and the Python module alike.

use std::env;
use std::path::PathBuf;

/// Variable with headers in the form of `--header`, one per line.
pub const HEADERS: &str = "TARFS_HEADERS";

/// Returns the variable `name`, unless it is unset or empty.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads the environment"
)]
pub fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Returns the absolute path of the user's netrc file, which may not exist.
pub fn netrc() -> Option<PathBuf> {
    // Without HOME, the system's database of users names the directory.
    let home = || env::home_dir().map(|home| home.join(".netrc"));
    std::path::absolute(variable("NETRC").or_else(home)?).ok()
}
