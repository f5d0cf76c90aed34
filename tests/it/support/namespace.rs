//! Scripts that may mount what they like: nobody else sees it, and it is taken out when they end.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use super::program::stderr_text;

/// Shell: takes out what is mounted by this program and whatever else lies on such a mount, as far as this
/// namespace has it and it is not below the directory `kept`. A copy of another test's mount would keep
/// that in use.
const UNMOUNT_INHERITED: &str = r#"
alone() {
    awk '/ - fuse\.(tarfs|fuse-overlayfs) | - overlay .*tarfs/ { print $5 }' /proc/self/mountinfo |
        while read -r mount; do
            case $mount in "$kept"/*) ;; *) umount -l "$mount" 2>/dev/null || true ;; esac
        done
}
"#;

/// Longer than any script takes, so that a test that waits for ever fails.
const SCRIPT_TIMEOUT_SECONDS: &str = "300";

/// Runs `script` by `shell` as root in `directory`, in a mount namespace of its own; it ends at the first
/// command that fails.
pub(crate) fn run(shell: &str, script: &str, directory: &Path) -> Output {
    let script = format!("{UNMOUNT_INHERITED}kept=none; alone; trap alone EXIT\n{script}");
    Command::new("timeout")
        .args(["-k", "1", SCRIPT_TIMEOUT_SECONDS, "unshare", "--mount"])
        .args(["--propagation", "private", shell, "-euc", &script])
        .current_dir(directory)
        .output()
        .expect("util-linux")
}

/// Runs `prelude` and then `script` by bash as [`run`] does, in a new directory on a disk. `$program` is the
/// program.
pub(crate) fn run_program(prelude: &str, script: &str) -> Output {
    let place = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let program = env!("CARGO_BIN_EXE_tarfs");
    let script = format!("program={program}\n{prelude}{script}");
    run("bash", &script, place.path())
}

/// What a script that ended well has said.
#[track_caller]
pub(crate) fn stdout_text(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", stderr_text(output));
    said
}

/// A process in a mount namespace of its own, which ends with this.
#[derive(Debug)]
pub(crate) struct NamespaceProcess(Child);

impl NamespaceProcess {
    /// Runs `script` in `directory` and then stays. Of this program's mounts it has those below `directory`.
    /// `set` tells it more.
    pub(crate) fn start(
        directory: &Path,
        script: &str,
        set: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Self {
        let script = format!(
            "{UNMOUNT_INHERITED}kept=$PWD; alone\n{script}\nexec sleep 1000 >/dev/null 2>&1"
        );
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sh", "-euc", &script])
            .current_dir(directory);
        Self(set(&mut command).spawn().expect("util-linux"))
    }

    /// What it sees as `path`.
    pub(crate) fn path_inside(&self, path: &Path) -> PathBuf {
        let mut seen = format!("/proc/{}/root", self.0.id());
        seen.push_str(&path.to_string_lossy());
        seen.into()
    }
}

impl Drop for NamespaceProcess {
    fn drop(&mut self) {
        let ended = self.0.kill().and_then(|()| self.0.wait());
        drop(ended);
    }
}
