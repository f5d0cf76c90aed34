//! `tarfs umount`: unmounts an archive and ends its process.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;

use crate::cli::completion;
use crate::cli::daemon::control_socket::{self, UmountOutcome};
use crate::cli::environment;
use tarfs::fuse::{self, Force};

/// Unmounts an archive and waits until its process has ended.
#[derive(Clone, Debug, Args)]
pub(crate) struct UmountArgs {
    /// The directory on which the archive is mounted
    #[arg(add = ArgValueCandidates::new(completion::mountpoints))]
    pub mountpoint: PathBuf,
    /// Unmount even if it is in use
    ///
    /// Later reads by its users fail, unless it has bind mounts.
    #[arg(short, long)]
    pub lazy: bool,
}

/// Timeout for the process to exit if a bind mount was its last mount.
const LAST_MOUNT_TIMEOUT: Duration = Duration::from_secs(3);

/// Unmounts the archive at the mountpoint. Asks the serving process first. If none responds, this process
/// unmounts, which also removes a dead mount. A bind mount is always unmounted by this process.
pub(crate) fn run(args: &UmountArgs) -> anyhow::Result<ExitCode> {
    let mountpoint = fuse::canonical_mountpoint(&args.mountpoint)
        .with_context(|| format!("cannot unmount {}", args.mountpoint.display()))?;
    let force = if args.lazy { Force::Yes } else { Force::No };
    // Only the mount on top is meant.
    let top = fuse::top_mount(&mountpoint).unwrap_or_default();
    for directory in environment::runtime_dirs() {
        match control_socket::request_umount(&directory, &mountpoint, args.lazy) {
            Ok(Some(UmountOutcome::Failed { error, hint })) => {
                return Err(match hint {
                    Some(hint) => anyhow!("{error} ({hint})"),
                    None => anyhow!(error),
                });
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

/// Whether a process without any mount left has ended.
fn has_ended(process: Option<&OwnedFd>) -> anyhow::Result<bool> {
    let ends = |process| control_socket::wait_for_exit(process, LAST_MOUNT_TIMEOUT);
    Ok(process.map_or(Ok(true), ends)?)
}

fn warn_of_use(pid: u32) {
    tracing::warn!(
        pid,
        "the mount is in use elsewhere (by a bind mount, an overlay or another mount namespace), so its process \
         continues"
    );
}
