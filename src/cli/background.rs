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

use super::descriptors::Inherited;
use super::settings::{self, Role};
use super::{headers, telemetry};
use crate::base::trusted_dir;

/// What the second process says when it is ready.
const READY: &str = "ready\n";

/// Whose places a process in the background uses for its socket and its cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Environment {
    /// Those of who starts it.
    User,
    /// Those of the system, whoever happens to start it.
    System,
}

/// Starts this program again with the arguments `words` and returns when that one is ready to be
/// left alone, or has failed and said why.
///
/// # Errors
/// When it cannot be started.
pub(super) fn launch(words: &[OsString], environment: Environment) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let mut command = Command::new(&program);
    if environment == Environment::System {
        command.env_remove(settings::RUNTIME_DIR);
        command.env(settings::CACHE_DIR, settings::system_cache_dir());
    }
    settings::named_alike(&mut command);
    let mut child = settings::pass_arguments(&mut command, words, &headers::shown(words))
        .env(settings::ROLE, Role::Background.name())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut said)?;
    }
    if said == READY {
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
pub(super) struct Log {
    file: Option<File>,
}

impl Log {
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
    pub(super) fn write_as_well(&self) {
        match self.file.as_ref().map(File::try_clone).transpose() {
            Ok(file) => telemetry::copy_to(file),
            Err(error) => tracing::warn!(%error, "cannot write to the log yet"),
        }
    }

    /// Sends events to the file from now on, if there is one.
    pub(super) fn write_to_file(self) {
        if let Some(file) = self.file {
            telemetry::write_to_file(file);
        }
    }
}

/// As [`detach`], and tells the waiting process.
///
/// # Errors
/// When nobody waits any more, because the user has changed their mind; or a system call fails.
pub(super) fn leave(log: Log, inherited: Inherited) -> io::Result<()> {
    detach(log, inherited)?;
    std::env::set_current_dir("/")?;
    let mut stdout = io::stdout();
    stdout.write_all(READY.as_bytes())?;
    stdout.flush()?;
    let nowhere = nowhere()?;
    dup2_stdout(&nowhere)?;
    dup2_stdin(&nowhere)?;
    Ok(())
}

/// Leaves terminal, session and the files of who started this process, and sends events to `log`. Its
/// directory is still good for relative paths.
///
/// # Errors
/// When a system call fails.
pub(super) fn detach(log: Log, inherited: Inherited) -> io::Result<()> {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "this session is its own already");
    }
    inherited.close();
    telemetry::serve();
    let nowhere = nowhere()?;
    // What ends a process may still be written to stderr by whoever it happens to.
    dup2_stderr(log.file.as_ref().unwrap_or(&nowhere))?;
    match log.file {
        Some(file) => telemetry::write_to_file(file),
        None => telemetry::write_to_system(),
    }
    Ok(())
}

fn nowhere() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}
