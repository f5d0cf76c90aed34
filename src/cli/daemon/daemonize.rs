//! The background process, and the foreground process that waits until it is ready.
//!
//! A multithreaded program cannot fork, so it starts itself again, with the terminal for errors and a pipe as
//! stdout. Once the mount is ready, the new process writes `ready` to the pipe and detaches. If it ends
//! before, the first process exits with the same code.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::inherited_fds::InheritedFds;
use crate::cli::args::headers;
use crate::cli::environment::{self, Role};
use crate::cli::exit_status;
use crate::cli::ui::logging;
use tarfs::internal::trusted_dir;

const READY_MESSAGE: &str = "ready\n";

/// Starts this program again with `arguments`, and waits until it is ready or has printed why it failed. Its socket and
/// its cache are in directories of the system or of this user.
pub(crate) fn spawn_daemon(arguments: &[OsString], is_of_system: bool) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let mut command = Command::new(&program);
    if is_of_system {
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
        Some(code) => Ok(ExitCode::from(
            u8::try_from(code).unwrap_or(exit_status::FAILURE),
        )),
        None => bail!(
            "the background process was ended by signal {}",
            status.signal().unwrap_or_default()
        ),
    }
}

/// Log of a background process, opened while errors still reach the terminal.
#[derive(Debug)]
pub(crate) struct LogTarget {
    file: Option<File>,
}

impl LogTarget {
    /// Opens the file at `path` for appending, or the system's log. Only this user can read a new file.
    pub(crate) fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let file = path.map(|path| {
            trusted_dir::open_append(path)
                .with_context(|| format!("cannot write the log {}", path.display()))
        });
        Ok(Self {
            file: file.transpose()?,
        })
    }

    /// Copies events to the log from now on, in addition to the terminal.
    pub(crate) fn start_copying(&self) {
        match self.file.as_ref().map(File::try_clone).transpose() {
            Ok(file) => logging::start_copying_to(file),
            Err(error) => tracing::warn!(%error, "cannot write to the log yet"),
        }
    }

    /// Sends events to the file from now on, if there is one.
    pub(crate) fn redirect(self) {
        if self.file.is_some() {
            logging::log_to(self.file);
        }
    }
}

/// As [`detach`], and reports readiness to the waiting process. Fails if the user interrupted that process.
pub(crate) fn detach_and_report_ready(log: LogTarget, inherited: InheritedFds) -> io::Result<()> {
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

/// Leaves the terminal, the session and the inherited files, and logs to `log`. Relative paths stay valid.
pub(crate) fn detach(log: LogTarget, inherited: InheritedFds) -> io::Result<()> {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "already a session leader");
    }
    inherited.close();
    logging::never_block();
    let dev_null = open_dev_null()?;
    // The runtime or libc may still write a fatal error to stderr.
    dup2_stderr(log.file.as_ref().unwrap_or(&dev_null))?;
    logging::log_to(log.file);
    Ok(())
}

fn open_dev_null() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}
