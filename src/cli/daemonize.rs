//! A process that stays in the background, and the one that waits until it is ready.
//!
//! A multithreaded program cannot fork; it starts itself again. The second process inherits the
//! terminal for its errors and a pipe as its stdout, says `ready` there once there is something
//! to leave behind, and from then on belongs to nobody. Should it end before, its exit code is
//! passed on.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::environment::{self, Role};
use super::inherited_fds::InheritedFds;
use super::{headers, logging};
use crate::base::trusted_dir;

/// What the second process says when it is ready.
const READY_MESSAGE: &str = "ready\n";

/// Whose places a process in the background uses for its socket and its cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DirectoryScope {
    /// Those of who starts it.
    User,
    /// Those of the system, whoever happens to start it.
    System,
}

/// Starts this program again with the arguments `arguments` and returns when that one is ready to be
/// left alone, or has failed and said why.
///
/// # Errors
/// When it cannot be started.
pub(super) fn spawn_daemon(
    arguments: &[OsString],
    scope: DirectoryScope,
) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let mut command = Command::new(&program);
    if scope == DirectoryScope::System {
        command.env_remove(environment::RUNTIME_DIR);
        command.env(environment::CACHE_DIR, environment::system_cache_dir());
    }
    environment::copy_argv0(&mut command);
    let mut child = environment::pass_arguments(
        &mut command,
        arguments,
        &headers::redact_arguments(arguments),
    )
    .env(environment::ROLE, Role::Background.name())
    .stdin(Stdio::null())
    .stdout(Stdio::piped())
    .spawn()
    .with_context(|| format!("cannot start {}", program.display()))?;
    let mut message = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut message)?;
    }
    if message == READY_MESSAGE {
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait()?;
    match status.code() {
        Some(0) => bail!("the background process ended before it was ready"),
        Some(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(2))),
        None => bail!(
            "the background process was ended by signal {}",
            status.signal().unwrap_or_default()
        ),
    }
}

/// Where a background process writes its log; opened while the terminal can still be told.
#[derive(Debug)]
pub(super) struct LogTarget {
    file: Option<File>,
}

impl LogTarget {
    /// The file at `path`, appended to, and for this user only if it is new; the system's log
    /// without one.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub(super) fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let file = path.map(|path| {
            trusted_dir::open_append(path)
                .with_context(|| format!("cannot write the log {}", path.display()))
        });
        Ok(Self {
            file: file.transpose()?,
        })
    }

    /// Sends events to it from now on as well as to the terminal.
    pub(super) fn start_copying(&self) {
        match self.file.as_ref().map(File::try_clone).transpose() {
            Ok(file) => logging::start_copying_to(file),
            Err(error) => tracing::warn!(%error, "cannot write to the log yet"),
        }
    }

    /// Sends events to the file from now on, if there is one.
    pub(super) fn redirect(self) {
        if let Some(file) = self.file {
            logging::log_to_file(file);
        }
    }
}

/// As [`detach`], and tells the waiting process.
///
/// # Errors
/// When nobody waits any more, because the user has changed their mind; or a system call fails.
pub(super) fn detach_and_report_ready(log: LogTarget, inherited: InheritedFds) -> io::Result<()> {
    detach(log, inherited)?;
    std::env::set_current_dir("/")?;
    let mut stdout = io::stdout();
    stdout.write_all(READY_MESSAGE.as_bytes())?;
    stdout.flush()?;
    let dev_null = open_dev_null()?;
    dup2_stdout(&dev_null)?;
    dup2_stdin(&dev_null)?;
    Ok(())
}

/// Leaves terminal, session and the files of who started this process, and sends events to `log`. Its
/// directory is still good for relative paths.
///
/// # Errors
/// When a system call fails.
pub(super) fn detach(log: LogTarget, inherited: InheritedFds) -> io::Result<()> {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "this session is its own already");
    }
    inherited.close();
    logging::never_block();
    let dev_null = open_dev_null()?;
    // What ends a process may still be written to stderr by whoever it happens to.
    dup2_stderr(log.file.as_ref().unwrap_or(&dev_null))?;
    match log.file {
        Some(file) => logging::log_to_file(file),
        None => logging::log_to_syslog(),
    }
    Ok(())
}

fn open_dev_null() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}
