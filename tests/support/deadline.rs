//! A deadline for the processes of a test, so that a test that hangs fails.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tarfs::internal::thread::Thread;

use super::rounds::rounds;

/// Longer than a test of few rounds takes, also on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_mins(10);

/// Kills the processes of a directory when a test takes too long.
pub(crate) struct Deadline {
    has_passed: Arc<AtomicBool>,
    // Declared before the thread, because dropping it ends the thread.
    _stop: Sender<()>,
    _thread: Thread<()>,
}

impl Deadline {
    /// Begins now, for processes that work in `directory` or have its path in their environment.
    #[expect(clippy::print_stderr, reason = "says which test hangs")]
    pub(crate) fn start(directory: PathBuf) -> Self {
        let test = std::thread::current().name().unwrap_or("?").to_owned();
        let timeout =
            TEST_TIMEOUT.saturating_mul(1 + u32::try_from(rounds(0)).unwrap_or(u32::MAX - 1));
        let has_passed = Arc::<AtomicBool>::default();
        let (stop, stopped) = mpsc::channel::<()>();
        let noted = Arc::clone(&has_passed);
        let thread = Thread::spawn("deadline", move || {
            if stopped.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
                noted.store(true, Ordering::SeqCst);
                let killed = kill_processes(&directory);
                eprintln!("{test} hangs, so these processes are killed: {killed:#?}");
            }
        });
        Self {
            has_passed,
            _stop: stop,
            _thread: thread.expect("a thread"),
        }
    }

    pub(crate) fn has_passed(&self) -> bool {
        self.has_passed.load(Ordering::SeqCst)
    }
}

/// Kills all other processes of `directory`. Returns their command lines.
pub(crate) fn kill_processes(directory: &Path) -> Vec<String> {
    let killed = processes_of(directory)
        .into_iter()
        .filter_map(|(pid, command)| {
            kill_process(pid, Signal::KILL).ok()?;
            Some(format!("{} {command}", pid.as_raw_pid()))
        });
    killed.collect()
}

/// All other processes that work in `directory` or have its path in their environment, and their command lines.
pub(crate) fn processes_of(directory: &Path) -> Vec<(Pid, String)> {
    let own = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    let found = pids.filter(|&pid| pid != own).filter_map(|pid| {
        let file = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let works_there = fs::read_link(format!("/proc/{pid}/cwd"))
            .is_ok_and(|working| working.starts_with(directory));
        let path = directory.as_os_str().as_bytes();
        if !works_there && !file("environ").windows(path.len()).any(|part| part == path) {
            return None;
        }
        let command = String::from_utf8_lossy(&file("cmdline")).replace('\0', " ");
        Some((Pid::from_raw(i32::try_from(pid).ok()?)?, command))
    });
    found.collect()
}
