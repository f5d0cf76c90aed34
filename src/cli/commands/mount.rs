//! `tarfs mount`: mounts an archive and serves it in the background.

use std::any::Any;
use std::cell::OnceCell;
use std::fs;
use std::io::{IsTerminal, stderr};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::Context;
use signal_hook::iterator::{Handle, Signals};
use tokio::sync::oneshot;

use super::mount_copy::MountCopy;
use super::status as status_text;
use crate::cli::args::MountArgs;
use crate::cli::daemon::control_socket::{
    ControlSocket, FailedRead, Phase, Request, Response, Status,
};
use crate::cli::daemon::daemonize::{self, DirectoryScope, LogTarget};
use crate::cli::daemon::inherited_fds::InheritedFds;
use crate::cli::daemon::metrics_server::MetricsListener;
use crate::cli::daemon::opened_archive::OpenedArchive;
use crate::cli::daemon::overlay_dirs::{self, OverlayDirs};
use crate::cli::daemon::sd_notify::{self, ServiceManager};
use crate::cli::daemon::supervisor::{self, SupervisorLink, TakeoverState};
use crate::cli::daemon::{control_socket, privileges};
use crate::cli::environment::{self, Role};
use crate::cli::exit_status;
use crate::cli::open_archive;
use crate::cli::ui::units::unix_seconds;
use crate::cli::ui::{cleanup_on_signal, logging, output, panic_hook};
use tarfs::Stats;
use tarfs::archive::directory::ArchiveDirectory;
use tarfs::archive::{Callback, WaitFor};
use tarfs::fuse::{
    Force, InheritedSession, LeftOutXattrs, Mount, MountOptions, MountTarget, OpenNamespace,
    Ownership, Subtree, TarFilesystem, UnmountError, supports_takeover,
};
use tarfs::index::Ino;
use tarfs::internal::error_chain::error_chain;
use tarfs::internal::thread::Thread;
use tarfs::internal::trusted_dir::TrustedDir;

/// Extra time for a reply beyond the source's timeout, so that the source's error ends the read first.
const REPLY_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Timeout for the mount's threads to exit after the unmount.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_millis(2500);

/// Mounts an archive. In the process that the user started, returns when the mount is ready. In the
/// background process, and with `--foreground`, returns after the unmount.
pub(crate) fn run(args: &MountArgs) -> anyhow::Result<ExitCode> {
    if let Some(error) = args.find_conflict() {
        output::print_error(error);
        return Ok(ExitCode::from(exit_status::USAGE));
    }
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
            daemonize::spawn_daemon(&words, DirectoryScope::User)
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
    // The kernel knows this archive's files already, so the index must be complete before its next request.
    let args = MountArgs {
        wait_index: true,
        shown_version: Some(takeover.version.clone()),
        ..args.clone()
    };
    let served = serve(&args, Some(takeover), mode);
    if let (Err(error), false) = (&served, args.foreground) {
        // In the foreground, `run`'s caller prints the error.
        tracing::error!("{error:#}");
    }
    served
}

/// Where the serving process runs once the mount is ready.
enum ProcessMode {
    /// In the foreground, with an optional log file and an optional service manager to notify.
    Foreground(LogTarget, Option<ServiceManager>),
    /// In the background, started by a process that waits until the mount is ready.
    Background(LogTarget, InheritedFds),
    /// In the background already.
    Detached,
}

impl ProcessMode {
    /// Reports that listings wait for the index, or how its scan ended, if it has. Returns whether it has.
    fn report_to_terminal(&self, opened: &OpenedArchive) -> bool {
        match self {
            Self::Detached => return false,
            Self::Foreground(..) => {}
            Self::Background(log, _) => log.start_copying(),
        }
        let index = opened.status_source.index();
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
    fn enter(self) -> anyhow::Result<Option<ServiceManager>> {
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
fn report_scan_end(opened: &OpenedArchive) {
    if let Some(failure) = opened.status_source.index().failure {
        tracing::error!(
            failure,
            "indexing failed; files that were not indexed yet are unavailable"
        );
    }
    let damage = opened.status_source.damage();
    if damage.members == 0 {
        return;
    }
    let is_logged = opened.layers.is_empty() && opened.stats.scans.get() > 0;
    if !is_logged {
        for member in &damage.named {
            tracing::warn!("{member}");
        }
    }
    let count = output::format_damaged_members(damage.members);
    tracing::warn!("{count}; `tarfs status` names the first ones");
}

type ResponseFn = Box<dyn FnOnce(Response) + Send>;

/// An event that the serving process handles.
enum Event {
    Signal,
    /// The scan ended, or there was none.
    ScanEnded,
    Request(Request, ResponseFn),
    MountEnded,
}

fn serve(
    args: &MountArgs,
    takeover: Option<TakeoverState>,
    mode: ProcessMode,
) -> anyhow::Result<ExitCode> {
    crate::cli::malloc::return_freed_memory();
    let options = args.mount_options()?;
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
    let opened = open_reporting_outages(args, takeover.as_ref())?;
    let result = mount_and_serve(
        args,
        &opened,
        (&options, namespace, writable),
        takeover,
        metrics,
        copy.as_ref(),
        mode,
    );
    if let Some(copy) = &copy {
        copy.stop();
    }
    if result.is_ok() {
        force_exit_after(THREAD_EXIT_TIMEOUT);
    }
    // Writes the recorded files to disk.
    drop(opened.recording);
    // No caller is left to wait for requests in flight, such as those of a scan.
    opened.network.shutdown_background();
    // Joins the threads of the copy, which are not blocked any more.
    drop(copy);
    // Joins scans, which do not wait for a server any more.
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
    takeover: Option<&TakeoverState>,
) -> anyhow::Result<OpenedArchive> {
    let stats = Arc::new(Stats::default());
    let supervisor = takeover.map(|takeover| &takeover.supervisor);
    let _watch = supervisor
        .map(|supervisor| supervisor.watch_reachability(&stats))
        .transpose()?;
    let opened = open_archive::open_for_mount(args, stats);
    if let (Err(error), Some(supervisor)) = (&opened, supervisor)
        && output::is_outage(error)
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
    drop(control_socket::create_private_dir(
        &environment::runtime_dir(),
    ));
}

/// Serves the mount until it is gone. Returns the archives of a directory, for which their scans wait.
fn mount_and_serve(
    args: &MountArgs,
    opened: &OpenedArchive,
    (options, namespace, writable): (&MountOptions, Option<OpenNamespace>, Option<OverlayDirs>),
    takeover: Option<TakeoverState>,
    metrics: Option<MetricsListener>,
    copy: Option<&MountCopy>,
    mode: ProcessMode,
) -> anyhow::Result<Option<Arc<dyn Any + Send + Sync>>> {
    let view = args.view(&*opened.content)?;
    let root = view.root;
    let (events, inbox) = mpsc::channel();
    // Until here, a signal ends the process, because there is nothing to clean up.
    let _signals = SignalWatch::start(events.clone())?;
    let metrics_url = metrics.as_ref().map(MetricsListener::url);
    let asking = events.clone();
    let _metrics = metrics
        .map(|metrics| metrics.serve(opened.network.handle(), move || request_status(&asking)))
        .transpose()?;
    let scanned = events.clone();
    let then = Callback::new(move || send_event(&scanned, Event::ScanEnded));
    opened.content.on_available(WaitFor::End, then);
    let ended = events.clone();
    let ended = move || send_event(&ended, Event::MountEnded);
    let has_own_attributes = options.ownership != Ownership::default();
    let shows_index = opened.directory.is_none() && root == Ino::ROOT && !has_own_attributes;
    let is_successor = takeover.is_some();
    let options = (options, namespace, writable.as_ref());
    // The supervisor takes the end of its link for the death of this process.
    let (_supervisor, mount) = make_mount(args, opened, view, options, takeover, copy, ended)?;
    if is_successor {
        // Relative paths are valid until here.
        std::env::set_current_dir("/").context("cannot leave the directory")?;
    }
    if let Some(copy) = copy {
        copy.start(opened, root)?;
    }
    let control = ControlSocket::serve(&environment::runtime_dir(), move |request| {
        send_and_wait(&events, request)
    });
    let _control = control
        .inspect_err(|error| tracing::warn!(%error, "no control socket, so no `tarfs status`"))
        .ok();
    let state = ServeState {
        mount: &mount,
        opened,
        copy,
        writable: writable.as_ref(),
        root,
        shows_index,
        metrics_url,
        manager: None,
        is_reported: false,
        left_out_xattrs: OnceCell::new(),
    };
    handle_events(inbox, mode, state)?;
    Ok(mount.archives())
}

/// Makes or takes over the mount, and reports to the supervisor that it is ready.
fn make_mount(
    args: &MountArgs,
    opened: &OpenedArchive,
    view: Subtree,
    (options, namespace, writable): (&MountOptions, Option<OpenNamespace>, Option<&OverlayDirs>),
    takeover: Option<TakeoverState>,
    copy: Option<&MountCopy>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<(Option<SupervisorLink>, Mount)> {
    // `options` are for the FUSE mount, and `overlay_options` for the overlay over it, if there is one.
    let overlay_options = options;
    let options = &match writable {
        Some(_) => overlay_dirs::lower_options(options),
        None => options.clone(),
    };
    let tree = build_filesystem(args, opened, view, options, copy)?;
    let (supervisor, session) = connect_supervisor(opened, takeover)?;
    let mount = if let Some(session) = session {
        let mount = Mount::take_over(tree, &session, ended)?;
        if let Some(writable) = writable {
            writable.mark_adopted();
        }
        mount
    } else {
        let (tree, namespace) = ((tree, options), namespace.as_ref());
        let writable = writable.map(|writable| (writable, overlay_options));
        start_mount(
            args,
            opened,
            tree,
            namespace,
            writable,
            supervisor.as_ref(),
            ended,
        )?
    };
    if let Some(supervisor) = &supervisor {
        let state = (mount.capabilities, &*opened.version, opened.is_strong);
        supervisor.report_ready(state, mount.end.as_ref());
    }
    Ok((supervisor, mount))
}

/// Leaves the terminal as `mode` says, and handles events until the mount is gone. On an error, drops `inbox`
/// first, because the control socket would wait for a client, and the client for a response.
fn handle_events(
    inbox: Receiver<Event>,
    mode: ProcessMode,
    mut state: ServeState<'_>,
) -> anyhow::Result<()> {
    state.is_reported = mode.report_to_terminal(state.opened);
    state.manager = mode.enter()?;
    tracing::info!(
        source = state.opened.location,
        mountpoint = %state.mount.target.mountpoint.display(),
        "mounted"
    );
    let has_ended = event_loop(inbox, &state);
    if let (true, Some(writable)) = (has_ended, state.writable) {
        writable.mark_lower_ended();
    }
    // Fails pending reads now instead of when the connection is aborted.
    state.opened.content.close();
    if let Some(manager) = &state.manager {
        manager.notify("STOPPING=1");
    }
    tracing::info!("unmounted");
    Ok(())
}

fn build_filesystem(
    args: &MountArgs,
    opened: &OpenedArchive,
    view: Subtree,
    options: &MountOptions,
    copy: Option<&MountCopy>,
) -> anyhow::Result<TarFilesystem> {
    let (content, stats) = (Arc::clone(&opened.content), Arc::clone(&opened.stats));
    let timeout = Duration::from_secs(args.source.timeout) + REPLY_TIMEOUT_MARGIN;
    let mut tree = TarFilesystem::new(content, view, options, stats)
        .with_timeout(timeout)
        .with_xattrs(args.xattrs.filter());
    if args.source.allow_truncated {
        tree = tree.for_truncated();
    }
    if args.writable {
        tree = tree.for_overlay();
    }
    if let Some(archives) = &opened.directory {
        let archives = Arc::clone(archives) as Arc<dyn ArchiveDirectory>;
        let idle_timeout = Duration::from_secs(args.idle_timeout);
        let tree = tree.with_archives(archives, idle_timeout);
        return tree.context("cannot start a thread");
    }
    match copy {
        Some(copy) => tree
            .with_backing_files(copy.backing_files())
            .context("cannot start a thread"),
        None => Ok(tree),
    }
}

/// Mounts `tree`, in another mount namespace if one is given, and an overlay over it if it is `writable`.
fn start_mount(
    args: &MountArgs,
    opened: &OpenedArchive,
    (tree, options): (TarFilesystem, &MountOptions),
    namespace: Option<&OpenNamespace>,
    writable: Option<(&OverlayDirs, &MountOptions)>,
    supervisor: Option<&SupervisorLink>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Mount> {
    let mounted = |site: &MountTarget, device: BorrowedFd<'_>| {
        if let Some(supervisor) = supervisor {
            supervisor.report_mounted(site, device);
        }
    };
    let (at, source) = (&args.mountpoint, &opened.name);
    if let Some(namespace) = namespace {
        let at = (namespace, at.as_path());
        let mount = Mount::start_in_namespace(tree, source, at, options, mounted, ended)?;
        return Ok(mount);
    }
    let Some((writable, overlay_options)) = writable else {
        return Ok(Mount::start(tree, source, at, options, mounted, ended)?);
    };
    overlay_dirs::ensure_restart_possible(args, opened.is_strong)?;
    let lower = writable.create_lower_dir(supervisor)?;
    let mut mount = Mount::start(tree, source, &lower, options, mounted, ended)?;
    overlay_dirs::ensure_restart_possible(args, supports_takeover(mount.capabilities))?;
    writable.mount_overlay(&mut mount, source, at, overlay_options, supervisor)?;
    Ok(mount)
}

/// Starts or inherits the supervisor. Returns it with the session to take over, if there is one.
fn connect_supervisor(
    opened: &OpenedArchive,
    takeover: Option<TakeoverState>,
) -> anyhow::Result<(Option<SupervisorLink>, Option<InheritedSession>)> {
    let Some(takeover) = takeover else {
        let supervisor = match environment::role() {
            Some(Role::SupervisedWorker) => SupervisorLink::from_stdin(),
            _ => SupervisorLink::spawn(),
        };
        let supervisor = supervisor.inspect_err(
            |error| tracing::warn!(%error, "no supervisor; a crash will leave a dead mount"),
        );
        return Ok((supervisor.ok(), None));
    };
    takeover.ensure_version(&opened.version)?;
    Ok((Some(takeover.supervisor), takeover.session))
}

/// State of the serving process from which a status is built.
struct ServeState<'a> {
    mount: &'a Mount,
    opened: &'a OpenedArchive,
    copy: Option<&'a MountCopy>,
    writable: Option<&'a OverlayDirs>,
    root: Ino,
    /// Whether files of the mount have the numbers and attributes of the index.
    shows_index: bool,
    metrics_url: Option<String>,
    manager: Option<ServiceManager>,
    /// Whether damaged members were reported before the process left the terminal.
    is_reported: bool,
    /// Once the index is complete.
    left_out_xattrs: OnceCell<LeftOutXattrs>,
}

/// Handles events until the mount is gone, then refuses the others. Returns whether the connection ended.
#[expect(clippy::needless_pass_by_value, reason = "its end is part of the job")]
fn event_loop(inbox: Receiver<Event>, state: &ServeState<'_>) -> bool {
    let mount = state.mount;
    let mut signal_force = Force::No;
    while let Some(event) = next_event(&inbox, state) {
        match event {
            Event::MountEnded => return true,
            Event::ScanEnded => {
                if !state.is_reported {
                    report_scan_end(state.opened);
                }
                if let Some(copy) = state.copy
                    && copy.start(state.opened, state.root).is_err()
                {
                    tracing::debug!("no copy; the status shows the reason");
                }
            }
            Event::Request(Request::Status, answer) => {
                let status = build_status(state);
                answer(Response::Status(Box::new(status)));
            }
            Event::Request(Request::Index, answer) => answer(index_response(state)),
            Event::Request(Request::Umount { force }, answer) => {
                let force = if force { Force::Yes } else { Force::No };
                let result = mount.unmount(force);
                answer(umount_response(mount, &result, force));
                if result.is_ok() && force == Force::Yes && !mount.is_mounted() {
                    return false;
                }
            }
            Event::Signal => match mount.unmount(signal_force) {
                // The unmount arrives as an event. After a forced one, a user may keep the mount alive.
                Ok(()) if signal_force == Force::No => {}
                Ok(()) | Err(UnmountError::NotMounted(_)) => return false,
                Err(error) if signal_force == Force::No => {
                    tracing::warn!(%error, "still mounted; a second signal unmounts anyway");
                    signal_force = Force::Yes;
                }
                Err(error) => {
                    // The mount ends with its connection. The supervisor unmounts what is left.
                    tracing::error!(%error, "cannot unmount; this process ends anyway");
                    return false;
                }
            },
        }
    }
    false
}

/// Returns the next event, or `None` without senders. Meanwhile reports progress to the service manager.
fn next_event(inbox: &Receiver<Event>, state: &ServeState<'_>) -> Option<Event> {
    let Some(manager) = &state.manager else {
        return inbox.recv().ok();
    };
    loop {
        let index = state.opened.status_source.index();
        let location = &state.opened.location;
        let is_sent = manager.notify_status(&format!(
            "{location}: {}",
            status_text::format_index(&index)
        ));
        if is_sent && index.phase != Phase::Scanning {
            return inbox.recv().ok();
        }
        match inbox.recv_timeout(sd_notify::STATUS_INTERVAL) {
            Ok(event) => return Some(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// The index, if it is complete and says all that the mount shows.
fn index_response(state: &ServeState<'_>) -> Response {
    let index = state.opened.content.complete_index();
    match index.filter(|_| state.shows_index) {
        Some(index) => {
            state.opened.stats.sent_indexes.increment();
            Response::Index(index)
        }
        None => Response::Error {
            error: "the mount shows something else than a complete index".to_owned(),
            hint: None,
        },
    }
}

fn umount_response(mount: &Mount, result: &Result<(), UnmountError>, force: Force) -> Response {
    match result {
        Ok(()) => Response::Unmounted {
            unmounted: mount.target.mountpoint.to_string_lossy().into_owned(),
            elsewhere: mount.is_mounted() || force == Force::No && mount.is_still_in_use(),
        },
        Err(error) => Response::Error {
            hint: error.hint().map(str::to_owned),
            error: error_chain(error),
        },
    }
}

fn bytes_unless_utf8(path: &Path) -> Option<Vec<u8>> {
    let bytes = || path.as_os_str().as_bytes().to_vec();
    path.to_str().is_none().then(bytes)
}

fn build_status(state: &ServeState<'_>) -> Status {
    let (mount, opened) = (state.mount, state.opened);
    // Taken first, because the notes explain states that `progress` reports.
    let progress = state.copy.map(MountCopy::progress);
    let notes = notes(state);
    let attachment = mount.target.find();
    let detached = matches!(attachment, Ok(None));
    let (mountpoint, mount_id) = match attachment.ok().flatten() {
        Some(found) => (found.path, Some(found.mount_id)),
        None => (mount.target.mountpoint.clone(), None),
    };
    let entries = opened.content.index().entry_count();
    let damage = opened.status_source.damage();
    opened.stats.panics.record_max(panic_hook::count());
    let mut memory = opened.content.memory_use();
    if let Some(archives) = &opened.directory {
        memory.index_bytes = archives.index_bytes();
    }
    Status {
        source: opened.location.clone(),
        layers: opened.layers.clone(),
        mountpoint: mountpoint.to_string_lossy().into_owned(),
        mountpoint_bytes: bytes_unless_utf8(&mountpoint),
        device: Some(control_socket::format_device(mount.target.device)),
        mount_id,
        detached,
        pid: std::process::id(),
        since_unix_seconds: unix_seconds(mount.mounted_at),
        version: opened.version.clone(),
        entries,
        index: opened.status_source.index(),
        resident_bytes: resident_bytes().unwrap_or(0),
        memory,
        disk_cache: opened.status_source.disk_cache(),
        prefetch: opened.status_source.prefetch(),
        metrics: state.metrics_url.clone(),
        counters: opened
            .stats
            .snapshot()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
        directory: mount.directory_status(),
        copy: progress,
        writable: state.writable.map(|writable| writable.status(mount)),
        damaged_members: damage.members,
        damaged: damage.named,
        notes,
        errors: mount
            .recent_errors()
            .into_iter()
            .map(|failure| FailedRead {
                last_unix_seconds: unix_seconds(failure.last),
                count: failure.count,
                path: failure.path,
                reason: failure.reason,
            })
            .collect(),
    }
}

/// States of the mount that need an explanation.
fn notes(state: &ServeState<'_>) -> Vec<String> {
    let mut notes = state.opened.status_source.notes();
    if let Some(copy) = state.copy {
        notes.extend(copy.notes(state.mount));
    }
    if let Some(namespace) = &state.mount.target.namespace {
        let path = namespace.path.display();
        notes.push(format!("it is in another mount namespace: {path}"));
    }
    if let Some(directory) = state.mount.directory_status() {
        notes.extend(directory.notes);
    }
    let index = state.opened.content.index();
    let count = || {
        let left_out = index.read(tarfs::fuse::left_out_xattrs);
        left_out.unwrap_or_default()
    };
    let left_out = index.is_complete();
    let left_out = left_out.then(|| *state.left_out_xattrs.get_or_init(count));
    let left_out = left_out.unwrap_or_default();
    if left_out.acl_entries > 0 {
        notes.push(format!(
            "{} entries of ACLs are left out, because they name users or groups that this user \
             namespace does not map",
            left_out.acl_entries
        ));
    }
    if left_out.attributes > 0 {
        notes.push(format!(
            "{} extended attributes are left out, because Linux cannot hold them",
            left_out.attributes
        ));
    }
    notes
}

/// Resident memory of this process, from `/proc/self/status` (`VmRSS:   12345 kB`).
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    kib.checked_mul(1024)
}

fn send_and_wait(events: &Sender<Event>, request: Request) -> Response {
    let (sender, answer) = mpsc::sync_channel(1);
    let taken = Box::new(move |response| {
        if sender.send(response).is_err() {
            tracing::debug!("the client is gone");
        }
    });
    send_event(events, Event::Request(request, taken));
    answer.recv().unwrap_or_else(|_| Response::Error {
        error: "the mount is being unmounted already".to_owned(),
        hint: None,
    })
}

/// Like [`send_and_wait`] for a status, without a blocked thread. The channel closes if there is no response.
fn request_status(events: &Sender<Event>) -> oneshot::Receiver<Status> {
    let (sender, status) = oneshot::channel();
    let taken = Box::new(move |answer| {
        if let Response::Status(status) = answer
            && sender.send(*status).is_err()
        {
            tracing::debug!("the client is gone");
        }
    });
    send_event(events, Event::Request(Request::Status, taken));
    status
}

fn send_event(events: &Sender<Event>, event: Event) {
    if events.send(event).is_err() {
        tracing::debug!("the serving thread has ended already");
    }
}

/// Turns signals into events until it is dropped.
struct SignalWatch {
    handle: Handle,
    _thread: Thread<()>,
}

impl SignalWatch {
    fn start(events: Sender<Event>) -> anyhow::Result<Self> {
        let signals = Signals::new(cleanup_on_signal::termination_signals());
        let mut signals = signals.context("cannot watch for signals")?;
        let handle = signals.handle();
        let thread = Thread::spawn("tarfs-signals", move || {
            for _ in signals.forever() {
                send_event(&events, Event::Signal);
            }
        })
        .context("cannot watch for signals")?;
        Ok(Self {
            handle,
            _thread: thread,
        })
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        self.handle.close();
    }
}
