//! The program and its processes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};

use super::wait::wait_until;

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

/// Whether a signal to the process is still pending.
pub(crate) fn is_signal_pending(process: Pid, signal: Signal) -> bool {
    let status =
        fs::read_to_string(format!("/proc/{}/status", process.as_raw_pid())).unwrap_or_default();
    let pending = status.lines().filter_map(|line| {
        let mask = line
            .strip_prefix("ShdPnd:")
            .or_else(|| line.strip_prefix("SigPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    let mask = 1 << (signal.as_raw() - 1);
    pending.fold(0, |all, mask| all | mask) & mask != 0
}

/// Stops the process, and waits until it has stopped.
///
/// A process that is only about to stop would take a lower signal that arrives meanwhile first.
pub(crate) fn stop(process: Pid) {
    kill_process(process, Signal::STOP).expect("running");
    wait_until("it stops", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid()));
        // The state follows the name, which may contain anything.
        let stat = stat.expect("running");
        stat.rsplit_once(") ")
            .is_some_and(|(_, state)| state.starts_with('T'))
    });
}
