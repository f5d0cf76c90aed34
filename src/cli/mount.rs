//! `tarfs mount`: an archive in the filesystem, served in the background.

use std::cell::OnceCell;
use std::convert::Infallible;
use std::fmt;
use std::fs;
use std::io::{IsTerminal, stderr};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use signal_hook::iterator::{Handle, Signals};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use super::args::{self, CacheArgs, SourceArgs};
use super::control_socket::{ControlSocket, FailedRead, Phase, Request, Response, Status};
use super::copy::{CopySource, MountCopy};
use super::daemonize::{self, DirectoryScope, LogTarget};
use super::environment::{self, Role};
use super::inherited_fds::InheritedFds;
use super::layers::LayerArgs;
use super::metrics_server::MetricsListener;
use super::overlay_dirs::{self, OverlayDirs};
use super::prefetch::{PrefetchArgs, Recording};
use super::sd_notify::{self, ServiceManager};
use super::status_source::StatusSource;
use super::supervisor::{self, SupervisorLink, TakeoverState};
use super::xattrs::XattrArgs;
use super::{
    cleanup_on_signal, control_socket, exit, logging, output, panic_hook, privileges,
    status as status_text,
};
use crate::archive::{Callback, WaitFor};
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use crate::base::trusted_dir::TrustedDir;
use crate::fuse::{
    Content, Force, InheritedSession, Mount, MountOptions, MountTarget, OpenNamespace, RecentError,
    Subtree, TarFilesystem, UnmountError, supports_takeover,
};
use crate::index::Ino;

/// How much longer than a read of the source someone may wait in vain for an answer: a read that is
/// over says why.
const REPLY_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// How long the threads of a mount may take to end once it is unmounted.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_millis(2500);

/// Arguments of `tarfs mount`.
#[derive(Clone, Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(super) struct MountArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub prefetch: PrefetchArgs,
    #[command(flatten)]
    pub xattrs: XattrArgs,
    /// The directory to mount on.
    pub mountpoint: PathBuf,
    /// Return only when all of the archive is known, instead of letting whoever comes early wait
    /// for the file they want; --root, --strip-components, --writable and --layer imply it, and so do
    /// images.
    #[arg(long)]
    pub wait_index: bool,
    /// When the process that serves the mount dies, let another go on with it: what is open stays
    /// open. Otherwise the mount is taken out. In the foreground the process that was started lives on.
    #[arg(long)]
    pub restart: bool,
    /// With --restart, how long reading the archive's index may take when another process goes on; then the
    /// mount is taken out. Time in which the source cannot be reached does not count.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "restart",
          value_parser = args::seconds_parser(1..=86_400))]
    pub restart_timeout: u64,
    /// The version that this process must show, if it goes on with the mount of another one.
    #[arg(skip)]
    pub shown_version: Option<String>,
    /// Stay in the foreground instead of returning once the mount answers.
    #[arg(short, long)]
    pub foreground: bool,
    /// Let the tree be written to: by an overlay on DIR, of the archive and of what is written.
    #[arg(long)]
    pub writable: bool,
    /// Keep what is written, in DIR/upper, and go on with it in later mounts; otherwise it goes when
    /// the mount does. On a local file system.
    #[arg(long, value_name = "DIR", requires = "writable")]
    pub upper: Option<PathBuf>,
    #[arg(
        short = 'o',
        value_name = "OPTIONS",
        value_parser = parse_mount_options,
        help = "Mount options: allow_other, default_permissions, uid=N, gid=N, umask=OCTAL, suid, dev, \
                noexec, nosymfollow, ro, fsname=NAME; separated by commas, or \
                repeated"
    )]
    pub options: Vec<String>,
    /// Show only this directory of the archive.
    #[arg(long, value_name = "PATH")]
    pub root: Option<String>,
    /// Descend this many levels first, each through the only directory there is.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = args::count_parser::<usize>(0..=u64::MAX))]
    pub strip_components: usize,
    /// Write messages here once the mount answers, instead of to the journal or syslog, or in the
    /// foreground to the terminal.
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Write the tree to DIR meanwhile, and read files from there as they become complete: by the
    /// kernel itself, where it permits that. DIR is empty at first; a later mount goes on with it.
    #[arg(long, value_name = "DIR")]
    pub copy_to: Option<PathBuf>,
    /// Mount in the mount namespace of the process PID, or that the file PATH names, as
    /// /proc/PID/ns/mnt does. MOUNTPOINT is an absolute path there; all other paths, and all programs,
    /// are those of this namespace. Needs root and Linux 5.8.
    #[arg(long, value_name = "PID|PATH", value_parser = |argument: &str| Ok::<_, Infallible>(namespace_path(argument)))]
    pub namespace: Option<PathBuf>,
    /// Serve what `tarfs status` tells to Prometheus, at /metrics of this address and port; to
    /// anyone who can connect to it.
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
}

/// Lets clap say at once what is wrong with `-o`.
fn parse_mount_options(argument: &str) -> Result<String, crate::fuse::OptionError> {
    MountOptions::default().apply(argument)?;
    Ok(argument.to_owned())
}

/// The file that names a mount namespace, for a process or by its own path.
fn namespace_path(argument: &str) -> PathBuf {
    let is_process = !argument.is_empty() && argument.bytes().all(|byte| byte.is_ascii_digit());
    if is_process {
        format!("/proc/{argument}/ns/mnt").into()
    } else {
        argument.into()
    }
}

impl MountArgs {
    fn mount_options(&self) -> anyhow::Result<MountOptions> {
        let mut options = MountOptions::default();
        for argument in &self.options {
            options.apply(argument)?;
        }
        Ok(options)
    }

    /// What makes no sense about it as a whole, if anything.
    fn find_conflict(&self) -> Option<&'static str> {
        let wants_writing = self.mount_options().ok()?.read_only == Some(false);
        if wants_writing && !self.writable {
            return Some(
                "mount option `rw` asks for writing, but a mount is read-only without --writable",
            );
        }
        if self.writable && self.restart && self.copy_to.is_some() {
            return Some(
                "--restart makes a mount with --copy-to anew when its process dies, which cannot \
                 be done with one that is --writable",
            );
        }
        self.namespace.as_ref()?;
        [
            (
                self.writable,
                "--writable cannot be combined with --namespace: an overlay is made in this namespace",
            ),
            (
                self.restart,
                "--restart cannot be combined with --namespace: the mount ends with its process",
            ),
            (
                self.copy_to.is_some(),
                "--copy-to cannot be combined with --namespace: mount here and bind the mount there",
            ),
            (
                !self.mountpoint.is_absolute(),
                "with --namespace the mountpoint must be an absolute path",
            ),
        ]
        .into_iter()
        .find_map(|(is_wrong, error)| is_wrong.then_some(error))
    }

    /// Whether all of the archive must be known before anything is mounted.
    pub(super) fn waits_for_index(&self) -> bool {
        // An overlay wants that what lies below it stays as it is.
        self.writable
            || self.wait_index
            || self.root.is_some()
            || self.strip_components > 0
            || self.layers.is_set()
    }

    fn view(&self, content: &dyn Content) -> anyhow::Result<Subtree> {
        let root = self.root.as_deref().unwrap_or_default();
        let path = ArchivePath::sanitize(root.as_bytes()).path;
        Ok(Subtree::new(
            &content.index(),
            &path,
            self.strip_components,
        )?)
    }
}

/// An archive that is open, and what there is to tell about it.
pub(super) struct OpenedArchive {
    /// Its tree and bytes.
    pub content: Arc<dyn Content>,
    /// SOURCE, wherever the process goes and without secrets: what the kernel lists, and mount(8)
    /// compares with fstab.
    pub name: String,
    /// What is told of: where it is, and of how many layers.
    pub location: String,
    /// What its layers are called, from the bottom, if it has several.
    pub layers: Vec<String>,
    /// Which version of it is pinned.
    pub version: String,
    /// Whether that tells it from every other one.
    pub is_strong: bool,
    /// What has been done so far.
    pub stats: Arc<Stats>,
    /// What there is to tell about it.
    pub status_source: Box<dyn StatusSource>,
    /// Writes what is read to a file, if that is wanted; ends with the mount.
    pub recording: Option<Recording>,
    /// What a copy of it is made from.
    pub copy_source: CopySource,
    /// The threads that its reads need; last, because they must outlive it.
    pub network: Runtime,
}

impl fmt::Debug for OpenedArchive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedArchive")
            .field("location", &self.location)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Mounts what `open_archive` opens. In the process that the user started this returns when the
/// mount answers; in the one behind it, and with `--foreground`, when it is unmounted.
///
/// # Errors
/// When the archive cannot be opened or mounted; then nothing is mounted.
pub(super) fn run(
    args: &MountArgs,
    open_archive: impl FnOnce(&MountArgs, Arc<Stats>) -> anyhow::Result<OpenedArchive>,
) -> anyhow::Result<ExitCode> {
    if let Some(error) = args.find_conflict() {
        output::print_error(error);
        return Ok(ExitCode::from(output::EXIT_USAGE));
    }
    let inherited = InheritedFds::collect();
    let role = environment::role();
    let is_supervisor = role.is_none() && args.foreground && args.restart;
    // Who is led is who the user started, but for its parent.
    if role.is_some() || args.foreground && !is_supervisor {
        inherited.set_cloexec();
    }
    privileges::disable_core_dumps(&args.source, &args.layers);
    let log = || LogTarget::open(args.log_file.as_deref());
    match role {
        Some(Role::Supervisor) => supervisor::run(args, inherited),
        Some(Role::Successor) => {
            let log = log().or_else(|_| LogTarget::open(None))?;
            let mode = if args.foreground {
                supervisor::follow_supervisor()?;
                ProcessMode::Foreground(log, SupervisorLink::service_manager())
            } else {
                // Nobody stands at a terminal to be told.
                daemonize::detach(log, inherited)?;
                ProcessMode::Detached
            };
            let takeover = SupervisorLink::receive_takeover()?;
            // What the kernel was told must be known before it asks.
            let args = MountArgs {
                wait_index: true,
                shown_version: Some(takeover.version().to_owned()),
                ..args.clone()
            };
            let served = serve(&args, open_archive, Some(takeover), mode);
            if let (Err(error), false) = (&served, args.foreground) {
                // In the foreground it is told as any error is.
                tracing::error!("{error:#}");
            }
            served
        }
        Some(Role::Background) => {
            let mode = ProcessMode::Background(log()?, inherited);
            serve(args, open_archive, None, mode)
        }
        Some(Role::SupervisedWorker) => {
            supervisor::follow_supervisor()?;
            let mode = ProcessMode::Foreground(log()?, SupervisorLink::service_manager());
            serve(args, open_archive, None, mode)
        }
        None if is_supervisor => supervisor::run_foreground(args, inherited),
        None if args.foreground => {
            let mode = ProcessMode::Foreground(log()?, ServiceManager::from_environment());
            serve(args, open_archive, None, mode)
        }
        None => {
            let words: Vec<_> = std::env::args_os().skip(1).collect();
            daemonize::spawn_daemon(&words, DirectoryScope::User)
        }
    }
}

/// Where a process stays that serves a mount, once that answers.
enum ProcessMode {
    /// In the foreground, with a file for its log if there is one, under a service manager that waits
    /// for word if there is one.
    Foreground(LogTarget, Option<ServiceManager>),
    /// In the background, behind who started it and waits.
    Background(LogTarget, InheritedFds),
    /// In the background already.
    Detached,
}

impl ProcessMode {
    /// Tells the terminal what of the archive is damaged, or that listings wait for the index.
    /// Returns whether damage was reported.
    fn report_to_terminal(&self, opened: &OpenedArchive) -> bool {
        match self {
            Self::Detached => return false,
            Self::Foreground(..) => {}
            Self::Background(log, _) => {
                log.start_copying();
                wait_for_scan(opened);
            }
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

    /// Goes there, and tells who waits that the mount answers.
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
                    manager.notify_ready();
                }
                Ok(manager)
            }
        }
    }
}

/// How long a process waits for the scan before it leaves the terminal, so that the user sees there what
/// of a small archive is damaged.
const SCAN_WAIT_TIMEOUT: Duration = Duration::from_millis(250);

/// The first part of [`SCAN_WAIT_TIMEOUT`]. After it a scan of a large archive that is not a fifth done is not waited for.
const SCAN_CHECK_DELAY: Duration = Duration::from_millis(50);

/// Packed bytes above which an archive is large in this sense.
const LARGE_ARCHIVE_BYTES: u64 = 64 << 20;

/// Waits until the scan is over, for [`SCAN_WAIT_TIMEOUT`] at most.
fn wait_for_scan(opened: &OpenedArchive) {
    let (sender, scanned) = mpsc::channel::<()>();
    let then = Callback::new(move || drop(sender));
    opened.content.on_available(WaitFor::End, then);
    // Nothing is ever sent.
    let is_over = |wait| scanned.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected);
    if is_over(SCAN_CHECK_DELAY) {
        return;
    }
    let index = opened.status_source.index();
    let takes_longer = |all: u64| all > LARGE_ARCHIVE_BYTES && index.scanned_bytes < all / 5;
    if !index.of_bytes.is_some_and(takes_longer) {
        is_over(SCAN_WAIT_TIMEOUT.saturating_sub(SCAN_CHECK_DELAY));
    }
}

/// Logs what was wrong with the archive, now that the scan is over.
fn report_scan_end(opened: &OpenedArchive) {
    if let Some(failure) = opened.status_source.index().failure {
        tracing::error!(failure, "what is not known by now cannot be found");
    }
    report_damage(opened);
}

/// Logs how many members are damaged or not in the tree. Names the first ones if no scan of this process
/// has named them.
fn report_damage(opened: &OpenedArchive) {
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

/// Takes an answer to who asked.
type ResponseFn = Box<dyn FnOnce(Response) + Send>;

/// Something the serving process has to react to.
enum Event {
    /// The user, or the system, wants it to end.
    Signal,
    /// The scan is over, if there was one.
    ScanEnded,
    /// Another process asks.
    Request(Request, ResponseFn),
    /// Nothing is mounted any more.
    MountEnded,
}

fn serve(
    args: &MountArgs,
    open_archive: impl FnOnce(&MountArgs, Arc<Stats>) -> anyhow::Result<OpenedArchive>,
    takeover: Option<TakeoverState>,
    mode: ProcessMode,
) -> anyhow::Result<ExitCode> {
    super::malloc::set_mmap_threshold();
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
            tracing::warn!(%mountpoint, "until it is unmounted this hides {hidden}");
        }
    }
    // Like the mountpoint, before there is long work to do.
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
    let opened = open_reporting_outages(args, open_archive, takeover.as_ref())?;
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
        exit::force_exit_after(THREAD_EXIT_TIMEOUT);
    }
    // Brings what was read to disk.
    drop(opened.recording);
    // Nobody is left to wait for what may still be on its way, a scan's bytes among it.
    opened.network.shutdown_background();
    // Waits for its threads, who wait for nothing now.
    drop(copy);
    result
}

/// What `open_archive` opens. A supervisor for which this goes on with a mount hears how long the source cannot be
/// reached.
fn open_reporting_outages(
    args: &MountArgs,
    open_archive: impl FnOnce(&MountArgs, Arc<Stats>) -> anyhow::Result<OpenedArchive>,
    takeover: Option<&TakeoverState>,
) -> anyhow::Result<OpenedArchive> {
    let stats = Arc::new(Stats::default());
    let supervisor = takeover.map(|takeover| &takeover.supervisor);
    let _watch = supervisor
        .map(|supervisor| supervisor.watch_reachability(&stats))
        .transpose()?;
    let opened = open_archive(args, stats);
    if let (Err(error), Some(supervisor)) = (&opened, supervisor)
        && output::is_outage(error)
    {
        supervisor.report_unreachable();
    }
    opened
}

/// Makes what may lie in another user's directory, where root can make it now and not later. Who
/// needs it says what is wrong with it.
fn create_directories(args: &MountArgs) {
    if let Ok(cache_dir) = args.cache.saved.cache_dir.directory() {
        drop(TrustedDir::create(&cache_dir));
    }
    drop(control_socket::create_private_dir(
        &environment::runtime_dir(),
    ));
}

fn mount_and_serve(
    args: &MountArgs,
    opened: &OpenedArchive,
    (options, namespace, writable): (&MountOptions, Option<OpenNamespace>, Option<OverlayDirs>),
    takeover: Option<TakeoverState>,
    metrics: Option<MetricsListener>,
    copy: Option<&MountCopy>,
    mode: ProcessMode,
) -> anyhow::Result<ExitCode> {
    let view = args.view(&*opened.content)?;
    let (events, inbox) = mpsc::channel();
    // Until here a signal ends the process, as there is nothing to clear up.
    let _signals = SignalWatch::start(events.clone())?;
    let metrics_url = metrics.as_ref().map(MetricsListener::url);
    let asking = events.clone();
    let _metrics = metrics
        .map(|metrics| metrics.serve(opened.network.handle(), move || request_status(&asking)))
        .transpose()?;
    let root = view.root();
    // What is mounted, and what is seen of it where something lies over it.
    let overlay_options = options;
    let options = &match writable {
        Some(_) => overlay_dirs::lower_options(options),
        None => options.clone(),
    };
    let tree = build_filesystem(args, opened, view, options, copy)?;
    let scanned = events.clone();
    let then = Callback::new(move || send_event(&scanned, Event::ScanEnded));
    opened.content.on_available(WaitFor::End, then);
    let ended = events.clone();
    let ended = move || send_event(&ended, Event::MountEnded);
    let is_successor = takeover.is_some();
    let (supervisor, session) = connect_supervisor(opened, takeover)?;
    let mount = match (&session, namespace, &writable) {
        (None, Some(namespace), _) => {
            let supervisor = supervisor.as_ref();
            mount_in_namespace(&namespace, args, opened, tree, options, supervisor, ended)?
        }
        (Some(session), _, writable) => {
            let mount = Mount::take_over(tree, session, ended)?;
            if let Some(writable) = writable {
                writable.mark_adopted();
            }
            mount
        }
        (None, None, writable) => {
            let writable = writable
                .as_ref()
                .map(|writable| (writable, overlay_options));
            mount_here(
                args,
                opened,
                tree,
                options,
                writable,
                supervisor.as_ref(),
                ended,
            )?
        }
    };
    // The session has its own.
    drop(session);
    if let Some(supervisor) = &supervisor {
        supervisor.report_ready(mount.capabilities(), &opened.version, opened.is_strong);
    }
    if is_successor {
        // Until now paths could be relative.
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
    let is_reported = mode.report_to_terminal(opened);
    let manager = match mode.enter() {
        Ok(manager) => manager,
        Err(error) => {
            // Or who asks just now would wait for an answer, and the control socket's end for them.
            drop(inbox);
            return Err(error);
        }
    };
    tracing::info!(
        source = opened.location,
        mountpoint = %mount.mountpoint().display(),
        "mounted"
    );
    let state = ServeState {
        mount: &mount,
        opened,
        copy,
        writable: writable.as_ref(),
        root,
        metrics_url: metrics_url.as_deref(),
        manager: manager.as_ref(),
        is_reported,
        unmapped_acl_entries: OnceCell::new(),
    };
    let has_ended = event_loop(inbox, &state);
    if let (true, Some(writable)) = (has_ended, &writable) {
        writable.mark_lower_ended();
    }
    // Who still reads has its error now, and not only when the connection is cut.
    opened.content.close();
    if let Some(manager) = &manager {
        manager.notify_stopping();
    }
    tracing::info!("unmounted");
    Ok(ExitCode::SUCCESS)
}

/// What the kernel asks.
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
    if args.writable {
        tree = tree.for_overlay();
    }
    match copy {
        Some(copy) => tree
            .with_backing_files(copy.backing_files())
            .context("cannot start a thread"),
        None => Ok(tree),
    }
}

/// Mounts `tree` in another mount namespace.
fn mount_in_namespace(
    namespace: &OpenNamespace,
    args: &MountArgs,
    opened: &OpenedArchive,
    tree: TarFilesystem,
    options: &MountOptions,
    supervisor: Option<&SupervisorLink>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Mount> {
    let mounted = |site: &MountTarget, device: BorrowedFd<'_>| {
        if let Some(supervisor) = supervisor {
            supervisor.report_mounted(site, device);
        }
    };
    let at = (namespace, args.mountpoint.as_path());
    let mount = Mount::start_in_namespace(tree, &opened.name, at, options, mounted, ended)?;
    Ok(mount)
}

/// Mounts `tree`; below an overlay, which is seen as its options say, if it is `writable`.
fn mount_here(
    args: &MountArgs,
    opened: &OpenedArchive,
    tree: TarFilesystem,
    options: &MountOptions,
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
    let Some((writable, overlay_options)) = writable else {
        return Ok(Mount::start_with_callback(
            tree, source, at, options, mounted, ended,
        )?);
    };
    overlay_dirs::ensure_restart_possible(args, opened.is_strong)?;
    let lower = writable.create_lower_dir(supervisor)?;
    let mut mount = Mount::start_with_callback(tree, source, &lower, options, mounted, ended)?;
    overlay_dirs::ensure_restart_possible(args, supports_takeover(mount.capabilities()))?;
    writable.mount_overlay(&mut mount, source, at, overlay_options, supervisor)?;
    Ok(mount)
}

/// Who clears up after this process, and what it goes on with, if that is what was opened.
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
            |error| tracing::warn!(%error, "nobody clears up if this process is killed"),
        );
        return Ok((supervisor.ok(), None));
    };
    takeover.ensure_version(&opened.version)?;
    Ok((Some(takeover.supervisor), takeover.session))
}

/// What a status tells of.
struct ServeState<'a> {
    mount: &'a Mount,
    opened: &'a OpenedArchive,
    copy: Option<&'a MountCopy>,
    writable: Option<&'a OverlayDirs>,
    root: Ino,
    metrics_url: Option<&'a str>,
    manager: Option<&'a ServiceManager>,
    /// Whether damaged members were reported before the process left the terminal.
    is_reported: bool,
    /// Entries of ACLs that are left out, once the index is complete.
    unmapped_acl_entries: OnceCell<usize>,
}

/// Reacts to events until nothing is mounted any more. Takes the inbox with it, so that questions
/// it did not come to are refused. Returns whether the mount's connection has ended.
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
                    tracing::debug!("without a copy, as its status says");
                }
            }
            Event::Request(Request::Status, answer) => {
                let status = build_status(state);
                answer(Response::Status(Box::new(status)));
            }
            Event::Request(Request::Umount { force }, answer) => {
                let force = if force { Force::Yes } else { Force::No };
                let result = mount.unmount(force);
                answer(umount_response(mount, &result, force));
                if result.is_ok() && force == Force::Yes && !mount.is_mounted() {
                    return false;
                }
            }
            Event::Signal => match mount.unmount(signal_force) {
                // Its end arrives as an event; by force it might go on for its last user.
                Ok(()) if signal_force == Force::No => {}
                Ok(()) | Err(UnmountError::NotMounted(_)) => return false,
                Err(error) if signal_force == Force::No => {
                    tracing::warn!(%error, "a second signal unmounts all the same");
                    signal_force = Force::Yes;
                }
                Err(error) => {
                    // The mount ends with its connection; whoever keeps watch takes out what is left.
                    tracing::error!(%error, "this process ends without having unmounted");
                    return false;
                }
            },
        }
    }
    false
}

/// The next event, or none when nobody is left to make any. Meanwhile a service manager hears how far
/// the scan is.
fn next_event(inbox: &Receiver<Event>, state: &ServeState<'_>) -> Option<Event> {
    let Some(manager) = state.manager else {
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

fn umount_response(mount: &Mount, result: &Result<(), UnmountError>, force: Force) -> Response {
    match result {
        Ok(()) => Response::Unmounted {
            unmounted: mount.mountpoint().to_string_lossy().into_owned(),
            elsewhere: mount.is_mounted() || force == Force::No && mount.is_still_in_use(),
        },
        Err(error) => Response::Error {
            hint: error.hint().map(str::to_owned),
            error: output::format_error_chain(error),
        },
    }
}

fn build_status(state: &ServeState<'_>) -> Status {
    let &ServeState {
        mount,
        opened,
        copy,
        writable,
        metrics_url,
        ref unmapped_acl_entries,
        ..
    } = state;
    // First: what it says to be so is explained by notes that come after.
    let progress = copy.map(MountCopy::progress);
    let mut notes = opened.status_source.notes();
    if let Some(copy) = copy {
        notes.extend(copy.notes(mount));
    }
    if let Some(namespace) = mount.namespace() {
        let path = namespace.path.display();
        notes.push(format!("it is in another mount namespace: {path}"));
    }
    let attachment = mount.attachment();
    let detached = matches!(attachment, Ok(None));
    let (mountpoint, mount_id) = match attachment.ok().flatten() {
        Some(found) => (found.path, Some(found.mount_id)),
        None => (mount.mountpoint().to_owned(), None),
    };
    {
        let index = opened.content.index();
        let count = || crate::fuse::unmapped_acl_entries(&index);
        let count = index
            .is_complete()
            .then(|| *unmapped_acl_entries.get_or_init(count));
        if let Some(count @ 1..) = count {
            notes.push(format!(
                "{count} entries of ACLs are left out, because they name users or groups that this user \
                 namespace does not map"
            ));
        }
    }
    // Released before it is asked for again below: to hold it twice while the scan waits to change it
    // would be a deadlock.
    let entries = opened.content.index().entry_count();
    let damage = opened.status_source.damage();
    opened.stats.panics.record_max(panic_hook::count());
    Status {
        source: opened.location.clone(),
        layers: opened.layers.clone(),
        mountpoint: mountpoint.to_string_lossy().into_owned(),
        device: Some(control_socket::format_device(mount.device())),
        mount_id,
        detached,
        pid: std::process::id(),
        since_unix_seconds: unix_seconds(mount.mounted_at()),
        version: opened.version.clone(),
        entries,
        index: opened.status_source.index(),
        resident_bytes: resident_bytes().unwrap_or(0),
        memory: opened.status_source.memory(),
        disk_cache: opened.status_source.disk_cache(),
        prefetch: opened.status_source.prefetch(),
        metrics: metrics_url.map(str::to_owned),
        counters: opened
            .stats
            .snapshot()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
        copy: progress,
        writable: writable.map(|writable| writable.status(mount)),
        damaged_members: damage.members,
        damaged: damage.named,
        notes,
        errors: mount.recent_errors().into_iter().map(failed_read).collect(),
    }
}

fn failed_read(failure: RecentError) -> FailedRead {
    FailedRead {
        last_unix_seconds: unix_seconds(failure.last),
        count: failure.count,
        path: failure.path,
        reason: failure.reason,
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Resident memory of this process, as `/proc/self/status` has it (`VmRSS:   12345 kB`).
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    kib.checked_mul(1024)
}

/// Hands `request` to the serving thread and waits for its answer.
fn send_and_wait(events: &Sender<Event>, request: Request) -> Response {
    let (sender, answer) = mpsc::sync_channel(1);
    let taken = Box::new(move |response| send_response(&sender, response));
    send_event(events, Event::Request(request, taken));
    answer.recv().unwrap_or_else(|_| Response::Error {
        error: "it is being unmounted already".to_owned(),
        hint: None,
    })
}

/// As [`send_and_wait`], for a status and who does not wait on a thread; closes when there is none.
fn request_status(events: &Sender<Event>) -> oneshot::Receiver<Status> {
    let (sender, status) = oneshot::channel();
    let taken = Box::new(move |answer| {
        if let Response::Status(status) = answer
            && sender.send(*status).is_err()
        {
            tracing::debug!("who asked is gone");
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

fn send_response(answer: &SyncSender<Response>, response: Response) {
    if answer.send(response).is_err() {
        tracing::debug!("who asked is gone");
    }
}

/// Turns signals into events while it lives.
struct SignalWatch {
    handle: Handle,
    _thread: Thread<()>,
}

impl SignalWatch {
    fn start(events: Sender<Event>) -> anyhow::Result<Self> {
        let signals = Signals::new(cleanup_on_signal::termination_signals());
        let mut signals = signals.context("cannot watch for signals")?;
        let handle = signals.handle();
        let thread = Thread::spawn("signals", move || {
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
