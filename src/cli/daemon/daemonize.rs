//! The log of a mount, and how a process leaves the terminal.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::Context;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::inherited_fds::InheritedFds;
use crate::cli::ui::logging;
use tarfs::internal::trusted_dir;

/// Log of a mount's processes, opened while errors still reach the terminal.
#[derive(Debug, Default)]
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

    /// The log of another process.
    pub(crate) fn of(file: Option<OwnedFd>) -> Self {
        Self {
            file: file.map(File::from),
        }
    }

    /// Its file, if it is none of the system.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    fn copy(&self) -> Option<File> {
        let copy = self.file.as_ref().map(File::try_clone).transpose();
        copy.inspect_err(|error| tracing::warn!(%error, "cannot write to the log"))
            .ok()
            .flatten()
    }

    /// Copies events to the log from now on, in addition to the terminal.
    pub(crate) fn start_copying(&self) {
        logging::start_copying_to(self.copy());
    }

    /// Sends events to the file from now on, if there is one.
    pub(crate) fn redirect(&self) {
        if self.file.is_some() {
            logging::log_to(self.copy());
        }
    }
}

/// Leaves the terminal, the session and the inherited files, and logs to `log`.
pub(crate) fn detach(log: &LogTarget, inherited: InheritedFds) -> io::Result<()> {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "already a session leader");
    }
    inherited.close();
    let dev_null = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    dup2_stdin(&dev_null)?;
    dup2_stdout(&dev_null)?;
    // The runtime or libc may still write a fatal error to stderr.
    dup2_stderr(log.file.as_ref().unwrap_or(&dev_null))?;
    logging::log_to(log.copy());
    Ok(())
}
