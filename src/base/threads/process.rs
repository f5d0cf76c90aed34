//! Whether other processes live.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, test_kill_process};
use serde::{Deserialize, Serialize};

use super::wait::is_readable;

/// Number of the words in `/proc/PID/stat` between the name and the time of the start.
const WORDS_BEFORE_START: usize = 19;

/// A process by its number and the time of its start, because numbers are used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessId {
    pid: i32,
    /// In ticks since the boot. `None` if `/proc` does not show it.
    start: Option<u64>,
}

impl ProcessId {
    /// This process.
    pub fn own() -> Self {
        Self::of(std::process::id().cast_signed())
    }

    /// The process with the number `pid`.
    pub fn of(pid: i32) -> Self {
        let stat = process_directory(pid).map(|process| fs::read_to_string(process.join("stat")));
        // The name may have blanks and parentheses.
        let stat = stat.and_then(Result::ok).unwrap_or_default();
        let words = stat.rsplit_once(')').map(|(_, words)| words);
        let start = words.and_then(|words| words.split_whitespace().nth(WORDS_BEFORE_START));
        Self {
            pid,
            start: start.and_then(|start| start.parse().ok()),
        }
    }

    /// As [`is_alive`].
    pub fn is_alive(self) -> bool {
        self.has_number() && is_alive(self.pid)
    }

    /// As [`has_threads`].
    pub fn has_threads(self) -> bool {
        self.has_number() && has_threads(self.pid)
    }

    /// Whether no other process has its number now, as far as is known.
    fn has_number(self) -> bool {
        match (self.start, Self::of(self.pid).start) {
            (Some(start), Some(now)) => start == now,
            // The system may hide processes of other users.
            (Some(_), None) => !is_of_other_user(self.pid),
            (None, _) => true,
        }
    }
}

/// The first word of the field `name` in `status`, which is the text of `/proc/PID/status`.
pub fn status_field<'a>(status: &'a str, name: &str) -> &'a str {
    let field = status.lines().find_map(|line| line.strip_prefix(name));
    let words = field.and_then(|field| field.strip_prefix(':'));
    words
        .and_then(|words| words.split_whitespace().next())
        .unwrap_or_default()
}

/// Whether `pid` was not killed, and its main thread has not ended, or any thread if `/proc` does not show the process. A
/// thread that waits for its own mount stays after a kill.
pub fn is_alive(pid: i32) -> bool {
    let Some(Ok(status)) = process_directory(pid).map(|process| fs::read(process.join("status")))
    else {
        return Pid::from_raw(pid).is_some_and(is_running);
    };
    let status = String::from_utf8_lossy(&status);
    let is_killed = ["SigPnd", "ShdPnd"].into_iter().any(|set| {
        let pending = u64::from_str_radix(status_field(&status, set), 16);
        pending.is_ok_and(|pending| pending & (1 << (Signal::KILL.as_raw() - 1)) != 0)
    });
    !is_killed && !status_field(&status, "State").starts_with(['Z', 'X'])
}

/// Whether a dying process still has running threads. A zombie lists only its main thread.
pub fn has_threads(pid: i32) -> bool {
    let tasks = process_directory(pid).map(|process| fs::read_dir(process.join("task")));
    is_alive(pid) || tasks.is_some_and(|tasks| tasks.is_ok_and(|tasks| tasks.count() > 1))
}

/// Directory of process `pid` in `/proc`. `None` if that belongs to another PID namespace with other numbers.
fn process_directory(pid: i32) -> Option<PathBuf> {
    let own = fs::read_link("/proc/self").ok()?;
    let is_ours = own.as_os_str() == std::process::id().to_string().as_str();
    is_ours.then(|| format!("/proc/{pid}").into())
}

/// Whether this process may not send signals to process `pid`.
fn is_of_other_user(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) == Err(Errno::PERM))
}

/// Whether any thread of process `pid` has not ended.
fn is_running(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => !is_readable(process, Duration::ZERO),
        Err(Errno::SRCH) => false,
        // Linux before 5.3 lacks pidfd_open(2).
        Err(_) => test_kill_process(pid) != Err(Errno::SRCH),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    // Promises: kill-unmounts
    #[test]
    fn process_is_alive_until_its_main_thread_ends() {
        assert!(is_alive(
            i32::try_from(std::process::id()).expect("a number")
        ));
        let mut child = Command::new("true").spawn().expect("installed");
        let pid = i32::try_from(child.id()).expect("a number");
        while is_alive(pid) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!has_threads(pid), "a zombie until it is reaped");
        child.wait().expect("a child");
        assert!(!has_threads(pid) && !is_alive(pid));
    }

    #[test]
    fn process_with_another_start_is_another_process() {
        let own = ProcessId::own();
        assert!(own.is_alive() && own.start.is_some());
        let start = own.start.map(|start| start - 1);
        assert!(!ProcessId { start, ..own }.is_alive());
    }
}
