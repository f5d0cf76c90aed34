//! `tarfs umount`: ends a mount and its process.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
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
    // What is below it is not meant.
    let device = fs::mounted_device(&mountpoint).unwrap_or_default();
    for directory in settings::runtime_dirs() {
        match control::umount(&directory, &mountpoint, args.lazy) {
            Ok(Some(Outcome::Refused { error, hint })) => return Err(refusal(error, hint)),
            Ok(Some(Outcome::Ended)) => return Ok(ExitCode::SUCCESS),
            Ok(Some(Outcome::Lingers { pid })) => {
                bail!("unmounted, but its process {pid} has not ended yet");
            }
            Ok(Some(Outcome::ServesOn { pid, is_here })) => {
                tracing::warn!(
                    pid,
                    "it is in use elsewhere, by a bind mount, an overlay or in another mount namespace, and \
                     its process serves that"
                );
                if is_here {
                    break;
                }
                return Ok(ExitCode::SUCCESS);
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "the mount's process does not answer"),
        }
    }
    let force = if args.lazy { Force::Yes } else { Force::No };
    fs::unmount(&mountpoint, device, force)?;
    Ok(ExitCode::SUCCESS)
}

fn refusal(error: String, hint: Option<String>) -> anyhow::Error {
    match hint {
        Some(hint) => anyhow!("{error} ({hint})"),
        None => anyhow!(error),
    }
}
