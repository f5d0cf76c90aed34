//! `tarfs mount`: mounts an archive and serves it in the background.

mod events;
mod process_mode;
mod start;

use std::any::Any;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context;
use tokio::runtime::{Handle, Runtime};

use crate::cli::args::MountArgs;
use crate::cli::daemon::daemonize::{self, LogTarget};
use crate::cli::daemon::inherited_fds::InheritedFds;
use crate::cli::daemon::overlay_dirs::{self, OverlayDirs};
use crate::cli::daemon::privileges;
use crate::cli::daemon::sd_notify::ServiceManager;
use crate::cli::daemon::supervisor::{self, SupervisorLink, TakeoverState};
use crate::cli::environment::{self, Role};
use crate::cli::open_archive;
use events::{Event, SignalWatch, handle_events, request_status, send_and_wait, send_event};
use process_mode::ProcessMode;
use start::make_mount;
use tarfs::Stats;
use tarfs::archive::{Callback, WaitFor};
use tarfs::fuse::{Mount, OpenNamespace};
use tarfs::internal::thread::Thread;
use tarfs::internal::trusted_dir::TrustedDir;
use tarfs::serve::{
    ControlSocket, Failure, MetricsListener, MountCopy, MountSpec, Opened, create_private_dir,
};

/// Timeout for the mount's threads to exit after the unmount.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_millis(2500);

/// Mounts an archive. In the process that the user started, returns when the mount is ready. In the
/// background process, and with `--foreground`, returns after the unmount.
pub(crate) fn run(args: &MountArgs) -> anyhow::Result<ExitCode> {
    args.check()?;
    let inherited = InheritedFds::collect();
    let role = environment::role();
    let is_supervisor = role.is_none() && args.foreground && args.restart;
    // Otherwise this process starts one that serves the mount, and that one may need the user's descriptors.
    if role.is_some() || args.foreground && !is_supervisor {
        inherited.set_cloexec();
    }
    let log = || -> anyhow::Result<_> {
        let log = LogTarget::open(args.log_file.as_deref())?;
        if args.log_file.is_some() {
            log.start_copying();
        }
        Ok(log)
    };
    match role {
        Some(Role::Supervisor) => supervisor::run(args, inherited),
        Some(Role::Successor) => run_successor(args, inherited),
        Some(Role::Background) => {
            let mode = ProcessMode::Background(log()?, inherited);
            serve(args, None, mode)
        }
        Some(Role::SupervisedWorker) => {
            supervisor::follow_supervisor()?;
            let mode = ProcessMode::Foreground(log()?, SupervisorLink::service_manager());
            serve(args, None, mode)
        }
        None if is_supervisor => supervisor::run_foreground(args, inherited),
        None if args.foreground => {
            let mode = ProcessMode::Foreground(log()?, ServiceManager::from_environment());
            serve(args, None, mode)
        }
        None => {
            let words: Vec<_> = std::env::args_os().skip(1).collect();
            daemonize::spawn_daemon(&words, false)
        }
    }
}

/// Serves the mount of a process that died.
fn run_successor(args: &MountArgs, inherited: InheritedFds) -> anyhow::Result<ExitCode> {
    let log = LogTarget::open(args.log_file.as_deref()).or_else(|_| LogTarget::open(None))?;
    let mode = if args.foreground {
        supervisor::follow_supervisor()?;
        ProcessMode::Foreground(log, SupervisorLink::service_manager())
    } else {
        // No terminal is left to report to.
        daemonize::detach(log, inherited)?;
        ProcessMode::Detached
    };
    let takeover = SupervisorLink::receive_takeover()?;
    let served = serve(args, Some(takeover), mode);
    if let (Err(error), false) = (&served, args.foreground) {
        // In the foreground, `run`'s caller prints the error.
        tracing::error!("{error:#}");
    }
    served
}

fn serve(
    args: &MountArgs,
    takeover: Option<TakeoverState>,
    mode: ProcessMode,
) -> anyhow::Result<ExitCode> {
    crate::cli::malloc::return_freed_memory();
    let mut spec = open_archive::mount_spec(args)?;
    if let Some(takeover) = &takeover {
        spec = spec.continuing(&takeover.version);
    }
    let namespace = args.namespace.as_deref();
    let namespace = namespace.map(OpenNamespace::open).transpose()?;
    if let Some(namespace) = &namespace {
        Mount::check_in_namespace(namespace, &args.mountpoint)?;
    } else if takeover
        .as_ref()
        .is_none_or(|found| found.session.is_none())
    {
        Mount::check(&args.mountpoint)?;
        if let Some(hidden) = Mount::describe_hidden(&args.mountpoint) {
            let mountpoint = args.mountpoint.display();
            tracing::warn!(%mountpoint, "the mount hides {hidden} until it is unmounted");
        }
    }
    // Bound early, like the mountpoint, so that an error appears before the long work.
    let metrics = args.metrics.map(MetricsListener::bind).transpose()?;
    let copy = args.copy_to.as_deref();
    let copy = copy
        .map(|directory| MountCopy::open(directory, &args.mountpoint, args.xattrs.filter()))
        .transpose()?;
    let writable = overlay_dirs::open_overlay_dirs(args, takeover.as_ref())?;
    create_directories(args);
    privileges::drop_capabilities(args);
    if let ProcessMode::Foreground(_, Some(manager)) = &mode {
        manager.notify_status("reading the archive");
    }
    let (network, opened) = open_reporting_outages(args, &spec, takeover.as_ref())?;
    let place = (namespace, writable, copy);
    let (volume, threads) = (Arc::clone(&opened.volume), network.handle());
    let opened = (opened, threads);
    let result = mount_and_serve(args, &spec, opened, place, takeover, metrics, mode);
    volume.close();
    if result.is_ok() {
        force_exit_after(THREAD_EXIT_TIMEOUT);
    }
    // No caller is left to wait for requests in flight, such as those of a scan.
    network.shutdown_background();
    // Joins the threads of copy and scans, which do not wait for a server any more.
    drop(volume);
    drop(result?);
    Ok(ExitCode::SUCCESS)
}

/// Ends the process successfully after `timeout`. That may cut off the output of threads, like a kill.
#[expect(
    clippy::exit,
    reason = "threads that do not end cannot be ended by returning"
)]
fn force_exit_after(timeout: Duration) {
    let thread = Thread::spawn("tarfs-deadline", move || {
        std::thread::sleep(timeout);
        tracing::warn!(
            ?timeout,
            "some threads have not ended; the process exits without them"
        );
        std::process::exit(0);
    });
    match thread {
        // Dropping it would wait for it. It ends with the process.
        Ok(thread) => std::mem::forget(thread),
        Err(error) => tracing::warn!(%error, "cannot start a thread that ends the process in time"),
    }
}

/// Opens the archive. For a successor, also reports outages of its source to the supervisor.
fn open_reporting_outages(
    args: &MountArgs,
    spec: &MountSpec,
    takeover: Option<&TakeoverState>,
) -> anyhow::Result<(Runtime, Opened)> {
    let stats = Arc::new(Stats::default());
    let supervisor = takeover.map(|takeover| &takeover.supervisor);
    let _watch = supervisor
        .map(|supervisor| supervisor.watch_reachability(&stats))
        .transpose()?;
    let opened = open_archive::open_for_mount(args, spec, &stats);
    if let (Err(error), Some(supervisor)) = (&opened, supervisor)
        && error
            .downcast_ref()
            .is_some_and(|error: &Failure| error.is_outage)
    {
        supervisor.report_unreachable();
    }
    opened
}

/// Creates directories that root cannot create after it drops its capabilities. They may be inside another
/// user's directory. Errors are ignored, because the later use reports them.
fn create_directories(args: &MountArgs) {
    if let Ok(cache_dir) = args.cache.saved.cache_dir.directory() {
        drop(TrustedDir::create(&cache_dir));
    }
    drop(create_private_dir(&environment::runtime_dir()));
}

/// Serves the mount until it is gone. Returns what ends with the scans of its archives.
fn mount_and_serve(
    args: &MountArgs,
    spec: &MountSpec,
    (opened, network): (Opened, &Handle),
    (namespace, writable, copy): (
        Option<OpenNamespace>,
        Option<OverlayDirs>,
        Option<MountCopy>,
    ),
    takeover: Option<TakeoverState>,
    metrics: Option<MetricsListener>,
    mode: ProcessMode,
) -> anyhow::Result<impl Any> {
    let (events, inbox) = mpsc::channel();
    // Until here, a signal ends the process, because there is nothing to clean up.
    let _signals = SignalWatch::start(events.clone())?;
    let metrics_url = metrics.as_ref().map(MetricsListener::url);
    let asking = events.clone();
    let _metrics = metrics
        .map(|metrics| metrics.serve(network, move || request_status(&asking)))
        .transpose()?;
    let scanned = events.clone();
    let then = Callback::new(move || send_event(&scanned, Event::ScanEnded));
    opened.volume.on_available(WaitFor::End, then);
    let ended = events.clone();
    let ended = move || send_event(&ended, Event::MountEnded);
    let is_successor = takeover.is_some();
    let place = (namespace, writable.as_ref(), copy);
    // The supervisor takes the end of its link for the death of this process.
    let (_supervisor, mount) = make_mount(args, spec, opened, place, takeover, ended)?;
    if is_successor {
        // Relative paths are valid until here.
        std::env::set_current_dir("/").context("cannot leave the directory")?;
    }
    let control = ControlSocket::serve(&environment::runtime_dir(), move |request| {
        send_and_wait(&events, request)
    });
    let _control = control
        .inspect_err(|error| tracing::warn!(%error, "no control socket, so no `tarfs status`"))
        .ok();
    handle_events(
        inbox,
        mode,
        (&mount, writable.as_ref(), metrics_url.as_deref()),
    )?;
    Ok(mount.end())
}
