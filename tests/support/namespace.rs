//! Runs scripts in their own mount namespaces, whose mounts are private and end with the script.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use super::program::stderr_text;

/// Shell script that unmounts inherited mounts of this program and everything on them, unless they are
/// below the directory `kept`.
///
/// A copy of another test's mount would keep that one in use.
const UNMOUNT_INHERITED: &str = r#"
alone() {
    awk '/ - fuse\.(tarfs|fuse-overlayfs) | - overlay .*tarfs/ { print $5 }' /proc/self/mountinfo |
        while read -r mount; do
            case $mount in "$kept"/*) ;; *) umount -l "$mount" 2>/dev/null || true ;; esac
        done
}
"#;

/// Longer than any script takes, so that a hanging test fails.
const SCRIPT_TIMEOUT_SECONDS: &str = "300";

/// Runs `script` with `shell` as root in `directory`, in its own mount namespace. It ends at the first
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

/// Runs `prelude` and then `script` with bash as [`run`] does, in a new directory on a disk.
/// `$program` is the program.
pub(crate) fn run_program(prelude: &str, script: &str) -> Output {
    let place = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let program = env!("CARGO_BIN_EXE_tarfs");
    let script = format!("program={program}\n{prelude}{script}");
    run("bash", &script, place.path())
}

/// Standard output of a script that must succeed.
#[track_caller]
pub(crate) fn stdout_text(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", stderr_text(output));
    said
}

/// A process in its own mount namespace. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct NamespaceProcess(Child);

impl NamespaceProcess {
    /// Runs `script` in `directory` and then waits.
    ///
    /// It inherits only mounts of this program that are below `directory`. `set` adds to its command.
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

    /// The path by which this process reaches `path` in that namespace.
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
