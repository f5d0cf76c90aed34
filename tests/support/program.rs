//! The program and its processes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use rustix::process::Pid;

/// Copies the program to `path`, in another process.
///
/// A child of another test would inherit a descriptor that this process has open for writing. A file
/// that is open for writing cannot be executed (ETXTBSY).
pub(crate) fn copy_to(path: &Path) {
    let mut copy = Command::new("cp");
    let copied = copy.arg(env!("CARGO_BIN_EXE_tarfs")).arg(path).status();
    assert!(copied.expect("coreutils").success());
}

/// The child processes of `parent`.
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

/// Peak memory of process `pid` in MiB. Returns `None` if it has ended.
pub(crate) fn peak_mib(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib >> 10)
}

/// Standard error of a run.
pub(crate) fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
