//! `tarfs umount`: ends a mount and its process.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;

use super::control_socket::{self, UmountOutcome};
use super::environment;
use crate::fuse::{self, Force};

/// Unmounts an archive and waits until its process has ended.
#[derive(Clone, Debug, Args)]
pub(super) struct UmountArgs {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Unmount although it is in use; what its users read next fails, unless it has bind mounts.
    #[arg(short, long)]
    pub lazy: bool,
}

/// How long the process of a copy that was unmounted may take to end, if that was its last mount.
const LAST_MOUNT_TIMEOUT: Duration = Duration::from_secs(3);

/// Unmounts. The process that serves the mount is asked first; when none answers, the mount is
/// taken out from here, so that what a dead process left behind goes away, too. Another mount of what a
/// process serves, such as a bind mount, is always taken out from here, and the process is not asked.
///
/// # Errors
/// When no archive is mounted there, or it is in use.
pub(super) fn run(args: &UmountArgs) -> anyhow::Result<ExitCode> {
    let mountpoint = fuse::canonical_mountpoint(&args.mountpoint)
        .with_context(|| format!("cannot unmount {}", args.mountpoint.display()))?;
    let force = if args.lazy { Force::Yes } else { Force::No };
    // What is below it is not meant.
    let top = fuse::top_mount(&mountpoint).unwrap_or_default();
    for directory in environment::runtime_dirs() {
        match control_socket::request_umount(&directory, &mountpoint, args.lazy) {
            Ok(Some(UmountOutcome::Failed { error, hint })) => {
                return Err(umount_error(error, hint));
            }
            Ok(Some(UmountOutcome::ProcessEnded)) => return Ok(ExitCode::SUCCESS),
            Ok(Some(UmountOutcome::ProcessRemains { pid })) => {
                bail!("unmounted, but its process {pid} has not ended yet");
            }
            Ok(Some(UmountOutcome::InUseElsewhere { pid })) => {
                warn_of_use(pid);
                return Ok(ExitCode::SUCCESS);
            }
            Ok(Some(UmountOutcome::OtherMount { pid, process })) if let Some(copy) = &top => {
                fuse::unmount_bind_mount(&mountpoint, copy, force)?;
                if !fuse::is_mounted(copy.device) && !has_ended(process.as_ref())? {
                    warn_of_use(pid);
                }
                return Ok(ExitCode::SUCCESS);
            }
            Ok(Some(UmountOutcome::OtherMount { .. }) | None) => {}
            Err(error) => tracing::debug!(%error, "the mount's process does not answer"),
        }
    }
    fuse::unmount(&mountpoint, top.map(|top| top.device), force)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a process whose last mount is gone has ended.
fn has_ended(process: Option<&OwnedFd>) -> anyhow::Result<bool> {
    let ends = |process| control_socket::wait_for_exit(process, LAST_MOUNT_TIMEOUT);
    Ok(process.map_or(Ok(true), ends)?)
}

fn warn_of_use(pid: u32) {
    tracing::warn!(
        pid,
        "it is in use elsewhere, by a bind mount, an overlay or in another mount namespace, and its \
         process serves that"
    );
}

fn umount_error(error: String, hint: Option<String>) -> anyhow::Error {
    match hint {
        Some(hint) => anyhow!("{error} ({hint})"),
        None => anyhow!(error),
    }
}
