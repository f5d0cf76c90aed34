//! `tarfs mount`: mounts an archive, which another process serves.

use std::io::{IsTerminal, stderr};
use std::process::ExitCode;
use std::time::Duration;

use crate::cli::args::MountArgs;
use crate::cli::daemon::daemonize::LogTarget;
use crate::cli::daemon::inherited_fds::InheritedFds;
use crate::cli::daemon::monitor::{Monitor, MonitorOptions};
use crate::cli::daemon::overlay_dirs::OverlayDirs;
use crate::cli::environment;
use crate::cli::open_archive;
use tarfs::fuse::{Mount, OpenNamespace, kernel_supports_takeover};
use tarfs::internal::trusted_dir::TrustedDir;
use tarfs::serve::DaemonSocket;

/// Mounts an archive. A mount `of_system` outlives the session of root. Returns when the mount is ready. With
/// `--foreground`, and in the process that keeps the mount in the background, returns after the unmount.
pub(crate) fn run(args: &MountArgs, of_system: bool) -> anyhow::Result<ExitCode> {
    args.check()?;
    let inherited = InheritedFds::collect();
    let log = LogTarget::open(args.log_file.as_deref())?;
    if args.log_file.is_some() {
        log.start_copying();
    }
    let mut spec = open_archive::mount_spec(args)?;
    if of_system {
        spec.runtime_dir = environment::SYSTEM_RUNTIME_DIR.into();
        let is_default = args.cache.saved.cache_dir.cache_dir.is_none();
        if is_default {
            spec.open.cache.directory = Some(environment::system_cache_dir().into());
        }
    }
    let namespace = args.namespace.as_deref();
    let namespace = namespace.map(OpenNamespace::open).transpose()?;
    if let Some(namespace) = &namespace {
        Mount::check_in_namespace(namespace, &args.mountpoint)?;
    } else {
        Mount::check(&args.mountpoint)?;
        if let Some(hidden) = Mount::describe_hidden(&args.mountpoint) {
            let mountpoint = args.mountpoint.display();
            tracing::warn!(%mountpoint, "the mount hides {hidden} until it is unmounted");
        }
    }
    let overlay = args
        .writable
        .then(|| OverlayDirs::open(args.upper.as_deref(), &args.mountpoint))
        .transpose()?;
    // A process that serves it may lack the rights to create them. Their later use reports errors.
    if let Some(directory) = &spec.open.cache.directory {
        drop(TrustedDir::create(directory.as_ref()));
    }
    let is_isolated = args.isolated || spec.needs_own_process() || needs_own_process(args);
    // Creates the directory of sockets for a process of its own, too.
    let daemon = DaemonSocket::in_directory(spec.runtime_dir.as_ref());
    let daemon = daemon.inspect_err(|error| tracing::debug!(%error, "no daemon"));
    let daemon = daemon.ok().filter(|_| !is_isolated);
    let is_restarted = args.restart || daemon.is_some();
    let is_slow = spec.waits_for_index || spec.tree.is_layered();
    let options = MonitorOptions {
        namespace,
        overlay,
        log,
        is_in_foreground: args.foreground,
        shows_progress: args.foreground || is_slow && stderr().is_terminal(),
        restart_timeout: is_restarted.then(|| Duration::from_secs(args.restart_timeout)),
        must_restart: args.restart,
        daemon,
        spec,
    };
    Monitor::run(options, inherited)
}

/// Whether only a process of its own can serve the mount of `args` from this process. A daemon logs for many mounts, and
/// systemd ends it at shutdown. When it dies, all mounts must be continued.
fn needs_own_process(args: &MountArgs) -> bool {
    let has_own_log = args.log_file.is_some() || environment::log_level().is_some();
    has_own_log || environment::is_kept_at_shutdown() || !kernel_supports_takeover()
}
