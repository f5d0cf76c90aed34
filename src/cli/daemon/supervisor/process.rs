//! Processes of a mount: how they are started, and whether they live.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, test_kill_process};

use crate::cli::environment::{self, Role};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Output {
    Null,
    Inherit,
}

/// Starts this program again with the same arguments and `socket` as its stdin.
pub(super) fn spawn_self(
    role: Role,
    socket: OwnedFd,
    directory: Option<&Path>,
    output: Output,
) -> io::Result<Child> {
    // The file's path may be gone, or belong to another version with other inode numbers.
    let mut command = Command::new("/proc/self/exe");
    environment::copy_argv0(&mut command)
        .args(std::env::args_os().skip(1))
        .env(environment::ROLE, role.name())
        .stdin(Stdio::from(socket));
    if output == Output::Null {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    if let Some(directory) = directory {
        command.current_dir(directory);
    }
    command.spawn()
}

/// Duplicates stdin, which is the socket.
pub(super) fn dup_stdin() -> io::Result<OwnedFd> {
    Ok(fcntl_dupfd_cloexec(io::stdin(), 3)?)
}

/// Whether `pid` was not killed, and its main thread has not ended, or any thread if `/proc` does not show the process. A
/// thread that waits for its own mount stays after a kill.
pub(super) fn is_alive(pid: i32) -> bool {
    let Some(Ok(status)) = process_directory(pid).map(|process| fs::read(process.join("status")))
    else {
        return Pid::from_raw(pid).is_some_and(is_running);
    };
    let status = String::from_utf8_lossy(&status);
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        value.unwrap_or_default().trim()
    };
    let is_killed = ["SigPnd:", "ShdPnd:"].into_iter().any(|set| {
        let pending = u64::from_str_radix(field(set), 16);
        pending.is_ok_and(|pending| pending & (1 << (Signal::KILL.as_raw() - 1)) != 0)
    });
    !is_killed && !field("State:").starts_with(['Z', 'X'])
}

/// Whether a dying process still has running threads. A zombie lists only its main thread.
pub(super) fn has_threads(pid: i32) -> bool {
    let tasks = process_directory(pid).map(|process| fs::read_dir(process.join("task")));
    is_alive(pid) || tasks.is_some_and(|tasks| tasks.is_ok_and(|tasks| tasks.count() > 1))
}

/// Directory of process `pid` in `/proc`. `None` if that belongs to another PID namespace with other numbers.
pub(super) fn process_directory(pid: i32) -> Option<PathBuf> {
    let own = fs::read_link("/proc/self").ok()?;
    let is_ours = own.as_os_str() == std::process::id().to_string().as_str();
    is_ours.then(|| format!("/proc/{pid}").into())
}

/// Whether any thread of process `pid` has not ended.
pub(super) fn is_running(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut polled = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())) != Ok(1)
        }
        Err(Errno::SRCH) => false,
        // Linux before 5.3 lacks pidfd_open(2).
        Err(_) => test_kill_process(pid) != Err(Errno::SRCH),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
}
