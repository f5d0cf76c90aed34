//! The program, as a test of a real mount runs it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use rustix::process::Pid;

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

/// Copies it to `path`. Another process does: what this one has open for writing is held open by whatever
/// another test starts meanwhile, and what somebody may write to cannot be run (ETXTBSY).
pub(crate) fn copy_to(path: &Path) {
    let mut copy = Command::new("cp");
    let copied = copy.arg(env!("CARGO_BIN_EXE_tarfs")).arg(path).status();
    assert!(copied.expect("coreutils").success());
}

/// The processes that `parent` has started.
pub(crate) fn children(parent: Pid) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{}/task", parent.as_raw_nonzero()));
    tasks
        .into_iter()
        .flatten()
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|children| {
            let numbers = children.split_whitespace();
            let pids = numbers.filter_map(|number| Pid::from_raw(number.parse().ok()?));
            pids.collect::<Vec<_>>()
        })
        .collect()
}

/// The most memory that process `pid` has taken so far, in MiB; `None` when it has ended.
pub(crate) fn peak_mib(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib >> 10)
}

/// What it complained about.
pub(crate) fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
