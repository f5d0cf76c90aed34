//! `tarfs umount`: unmounts archives and ends their processes.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;

use crate::cli::completion;
use crate::cli::environment;
use crate::cli::ui::output;
use tarfs::fuse::{self, Force};
use tarfs::serve::{self, Status, UmountOutcome};

/// Unmounts archives and waits until their processes have ended.
#[derive(Clone, Debug, Args)]
pub(crate) struct UmountArgs {
    /// The directories on which archives are mounted
    #[arg(value_name = "DIR", required_unless_present = "all",
          add = ArgValueCandidates::new(completion::mountpoints))]
    mountpoints: Vec<PathBuf>,
    /// Unmount all archives that this user has mounted here, but for those whose process has died
    #[arg(short, long, conflicts_with = "mountpoints")]
    all: bool,
    /// Unmount even if it is in use
    ///
    /// Later reads by its users fail, unless it has bind mounts or shares its file system with other mounts.
    #[arg(short, long)]
    lazy: bool,
}

/// Maximum number of mounts on one directory that `--all` unmounts.
const MAX_STACKED_MOUNTS: usize = 1000;

/// Timeout for the process to exit if a bind mount was its last mount.
const LAST_MOUNT_TIMEOUT: Duration = Duration::from_secs(3);

/// Unmounts each of the archives, also after an error of another one.
pub(crate) fn run(args: &UmountArgs) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    let mut failed = HashSet::new();
    let mut mountpoints = args.mountpoints.clone();
    for _ in 0..MAX_STACKED_MOUNTS {
        if args.all {
            mountpoints = all_mountpoints()?;
        }
        mountpoints.retain(|mountpoint| !failed.contains(mountpoint));
        for mountpoint in &mountpoints {
            if let Err(error) = unmount(mountpoint, args.lazy) {
                code = output::print_failure(&error);
                failed.insert(mountpoint.clone());
            }
        }
        // A mount may have covered another one on the same directory.
        if !args.all || mountpoints.is_empty() {
            break;
        }
    }
    Ok(code)
}

/// The mountpoints of this user's mounts that answer. In reverse byte order, one below another precedes it.
fn all_mountpoints() -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for directory in environment::runtime_dirs() {
        let statuses = serve::list_statuses(&directory);
        let name = directory.display();
        let statuses = statuses.with_context(|| format!("cannot look for mounts in {name}"))?;
        // Others are in another mount namespace, or have no mountpoint any more.
        let path_here = |status: &Status| {
            let path = PathBuf::from(OsStr::from_bytes(status.mountpoint_bytes()));
            status.is_mounted_on(&path).then_some(path)
        };
        found.extend(statuses.iter().filter_map(path_here));
    }
    found.sort_unstable_by(|one, other| other.as_os_str().cmp(one.as_os_str()));
    Ok(found)
}

/// Unmounts the archive at the mountpoint. Asks the serving process first. If none responds, this process
/// unmounts, which also removes a dead mount. A bind mount is always unmounted by this process.
fn unmount(mountpoint: &Path, lazy: bool) -> anyhow::Result<()> {
    let mountpoint = fuse::canonical_mountpoint(mountpoint)
        .with_context(|| format!("cannot unmount {}", mountpoint.display()))?;
    let force = if lazy { Force::Yes } else { Force::No };
    // Only the mount on top is meant.
    let top = fuse::top_mount(&mountpoint).unwrap_or_default();
    for directory in environment::runtime_dirs() {
        match serve::request_umount(&directory, &mountpoint, lazy) {
            Ok(Some(UmountOutcome::Failed { error, hint })) => {
                return Err(match hint {
                    Some(hint) => anyhow!("{error} ({hint})"),
                    None => anyhow!(error),
                });
            }
            Ok(Some(UmountOutcome::ProcessEnded)) => return Ok(()),
            Ok(Some(UmountOutcome::ProcessRemains { pid })) => {
                bail!("unmounted, but its process {pid} has not ended yet");
            }
            Ok(Some(UmountOutcome::InUseElsewhere { pid })) => {
                warn_of_use(pid);
                return Ok(());
            }
            Ok(Some(UmountOutcome::OtherMount { pid, processes })) if let Some(copy) = &top => {
                fuse::unmount_bind_mount(&mountpoint, copy, force)?;
                if !fuse::is_mounted(copy.device)
                    && !serve::wait_for_exit(&processes, LAST_MOUNT_TIMEOUT)?
                {
                    warn_of_use(pid);
                }
                return Ok(());
            }
            Ok(Some(UmountOutcome::OtherMount { .. }) | None) => {}
            Err(error) => tracing::debug!(%error, "the mount's process does not answer"),
        }
    }
    fuse::unmount(&mountpoint, top.map(|top| top.device), force)?;
    Ok(())
}

fn warn_of_use(pid: u32) {
    tracing::warn!(
        pid,
        "the mount is in use elsewhere (by a bind mount, an overlay or another mount namespace), so its process \
         continues"
    );
}
