//! Where a mount is served, and its reports to the terminal.

use std::io::{IsTerminal, stderr};

use anyhow::Context;

use crate::cli::commands::status as status_text;
use crate::cli::daemon::daemonize::{self, LogTarget};
use crate::cli::daemon::inherited_fds::InheritedFds;
use crate::cli::daemon::sd_notify::ServiceManager;
use crate::cli::ui::{logging, output};
use tarfs::serve::{Opened, Phase};

/// Where the serving process runs once the mount is ready.
pub(super) enum ProcessMode {
    /// In the foreground, with an optional log file and an optional service manager to notify.
    Foreground(LogTarget, Option<ServiceManager>),
    /// In the background, started by a process that waits until the mount is ready.
    Background(LogTarget, InheritedFds),
    /// In the background already.
    Detached,
}

impl ProcessMode {
    /// Reports that listings wait for the index, or how its scan ended, if it has. Returns whether it has.
    pub(super) fn report_to_terminal(&self, opened: &Opened) -> bool {
        match self {
            Self::Detached => return false,
            Self::Foreground(..) => {}
            Self::Background(log, _) => log.start_copying(),
        }
        let index = opened.index();
        if index.phase == Phase::Scanning && stderr().is_terminal() {
            output::print_error(format_args!(
                "mounted; files can be opened by name now, but directory listings (`ls`) wait until the \
                 archive has been read ({}); `tarfs status` shows the progress",
                status_text::format_index(&index)
            ));
        }
        let is_over = index.phase != Phase::Scanning;
        if is_over {
            report_scan_end(opened);
        }
        is_over
    }

    /// Enters this mode and reports that the mount is ready.
    pub(super) fn enter(self) -> anyhow::Result<Option<ServiceManager>> {
        match self {
            Self::Detached => Ok(None),
            Self::Background(log, inherited) => {
                daemonize::detach_and_report_ready(log, inherited)
                    .context("cannot stay in the background")?;
                Ok(None)
            }
            Self::Foreground(log, manager) => {
                log.redirect();
                logging::never_block();
                if let Some(manager) = &manager {
                    manager.notify("READY=1");
                }
                Ok(manager)
            }
        }
    }
}

/// Logs the scan's error and the number of damaged members, and the first ones unless they are logged.
pub(super) fn report_scan_end(opened: &Opened) {
    if let Some(failure) = opened.index().failure {
        tracing::error!(
            failure,
            "indexing failed; files that were not indexed yet are unavailable"
        );
    }
    let (members, named) = opened.damage();
    if members == 0 {
        return;
    }
    let is_logged = opened.layers.is_empty() && opened.stats.scans.get() > 0;
    if !is_logged {
        for member in &named {
            tracing::warn!("{member}");
        }
    }
    let count = output::format_damaged_members(members);
    tracing::warn!("{count}; `tarfs status` names the first ones");
}
