//! Scripts that may mount what they like: nobody else sees it, and it ends with them.

use std::path::Path;
use std::process::{Command, Output};

use super::program::told;

/// Runs `script` by `shell` as root in `directory`, in a mount namespace of its own; it ends at the first
/// command that fails.
pub(crate) fn run(shell: &str, script: &str, directory: &Path) -> Output {
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", shell, "-euc", script])
        .current_dir(directory)
        .output()
        .expect("util-linux")
}

/// What a script that ended well has said.
#[track_caller]
pub(crate) fn said(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", told(output));
    said
}
