//! `tarfs umount`: ends a mount and its process.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::Args;

use super::control::{self, Outcome};
use super::settings;
use crate::fs::{self, Force};

/// Unmounts an archive and waits until its process has ended.
#[derive(Clone, Debug, Args)]
pub(super) struct UmountArgs {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Unmount although it is in use; what its users read next fails.
    #[arg(short, long)]
    pub lazy: bool,
}

/// Unmounts. The process that serves the mount is asked first; when none answers, the mount is
/// taken out from here, so that what a dead process left behind goes away, too.
///
/// # Errors
/// When no archive is mounted there, or it is in use.
pub(super) fn run(args: &UmountArgs) -> anyhow::Result<ExitCode> {
    let mountpoint = fs::mountpoint(&args.mountpoint)
        .with_context(|| format!("cannot unmount {}", args.mountpoint.display()))?;
    for directory in settings::runtime_dirs() {
        match control::umount(&directory, &mountpoint, args.lazy) {
            Ok(Some(Outcome::Refused { error, hint })) => return Err(refusal(error, hint)),
            Ok(Some(Outcome::Ended)) => return Ok(ExitCode::SUCCESS),
            Ok(Some(Outcome::ServesOn { pid, is_here })) => {
                tracing::warn!(
                    pid,
                    "it is mounted in another mount namespace, too, and its process serves that"
                );
                return if is_here {
                    from_here(&mountpoint, args.lazy)
                } else {
                    Ok(ExitCode::SUCCESS)
                };
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "the mount's process does not answer"),
        }
    }
    from_here(&mountpoint, args.lazy)
}

fn from_here(mountpoint: &Path, lazy: bool) -> anyhow::Result<ExitCode> {
    let force = if lazy { Force::Yes } else { Force::No };
    fs::unmount(mountpoint, force)?;
    Ok(ExitCode::SUCCESS)
}

fn refusal(error: String, hint: Option<String>) -> anyhow::Error {
    match hint {
        Some(hint) => anyhow!("{error} ({hint})"),
        None => anyhow!(error),
    }
}
