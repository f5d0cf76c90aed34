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
use super::background::{self, Environment, Log};
use super::control::{Answer, Control, FailedRead, Phase, Question, Status};
use super::copy::{Copy, Original};
use super::descriptors::Inherited;
use super::keeper::{self, Inheritance, Keeper};
use super::layers::LayerArgs;
use super::metrics::Metrics;
use super::notify::{self, Manager};
use super::prefetch::{PrefetchArgs, Recording};
use super::settings::{self, Role};
use super::telling::Telling;
use super::writable::{self, Writable};
use super::xattrs::XattrArgs;
use super::{control, exit, output, panics, privileges, status as words, telemetry, undo};
use crate::archive::{WaitFor, Callback};
use crate::base::archive_path::ArchivePath;
use crate::base::trusted_dir::TrustedDir;
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use crate::fuse::{
    Content, RecentError, Force, Mount, MountOptions, OpenNamespace, InheritedSession, MountTarget, TarFilesystem, UnmountError,
    Subtree, supports_takeover,
};
use crate::index::Ino;

/// How much longer than a read of the source someone may wait in vain for an answer: a read that is
/// over says why.
const SLACK: Duration = Duration::from_secs(5);

/// How long the threads of a mount may take to end once it is unmounted.
const END_DEADLINE: Duration = Duration::from_millis(2500);

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
          value_parser = args::seconds(1..=86_400))]
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
        value_parser = known_options,
        help = "Mount options: allow_other, default_permissions, uid=N, gid=N, umask=OCTAL, suid, dev, \
                noexec, nosymfollow, ro, fsname=NAME; separated by commas, or \
                repeated"
    )]
    pub options: Vec<String>,
    /// Show only this directory of the archive.
    #[arg(long, value_name = "PATH")]
    pub root: Option<String>,
    /// Descend this many levels first, each through the only directory there is.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = args::count::<usize>(0..=u64::MAX))]
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
fn known_options(argument: &str) -> Result<String, crate::fuse::OptionError> {
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
    fn contradiction(&self) -> Option<&'static str> {
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
    pub(super) fn waits(&self) -> bool {
        // An overlay wants that what lies below it stays as it is.
        self.writable
            || self.wait_index
            || self.root.is_some()
            || self.strip_components > 0
            || self.layers.are_given()
    }

    fn view(&self, content: &dyn Content) -> anyhow::Result<Subtree> {
        let root = self.root.as_deref().unwrap_or_default();
        let path = ArchivePath::sanitize(root.as_bytes()).path;
        Ok(Subtree::new(&content.index(), &path, self.strip_components)?)
    }
}

/// An archive that is open, and what there is to tell about it.
pub(super) struct Opened {
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
    pub telling: Box<dyn Telling>,
    /// Writes what is read to a file, if that is wanted; ends with the mount.
    pub recording: Option<Recording>,
    /// What a copy of it is made from.
    pub original: Original,
    /// The threads that its reads need; last, because they must outlive it.
    pub network: Runtime,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened")
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
    open_archive: impl FnOnce(&MountArgs, Arc<Stats>) -> anyhow::Result<Opened>,
) -> anyhow::Result<ExitCode> {
    if let Some(error) = args.contradiction() {
        output::complain(error);
        return Ok(ExitCode::from(output::USAGE));
    }
    let inherited = Inherited::look();
    let role = settings::role();
    let leads = role.is_none() && args.foreground && args.restart;
    // Who is led is who the user started, but for its parent.
    if role.is_some() || args.foreground && !leads {
        inherited.keep();
    }
    privileges::guard(&args.source, &args.layers);
    let log = || Log::open(args.log_file.as_deref());
    match role {
        Some(Role::Keeper) => keeper::run(args, inherited),
        Some(Role::Successor) => {
            let log = log().or_else(|_| Log::open(None))?;
            let stays = if args.foreground {
                keeper::follow()?;
                Stays::InFront(log, Keeper::manager())
            } else {
                // Nobody stands at a terminal to be told.
                background::detach(log, inherited)?;
                Stays::AsItIs
            };
            let inheritance = Keeper::inherit()?;
            // What the kernel was told must be known before it asks.
            let args = MountArgs {
                wait_index: true,
                shown_version: Some(inheritance.version().to_owned()),
                ..args.clone()
            };
            let served = serve(&args, open_archive, Some(inheritance), stays);
            if let (Err(error), false) = (&served, args.foreground) {
                // In the foreground it is told as any error is.
                tracing::error!("{error:#}");
            }
            served
        }
        Some(Role::Background) => {
            let stays = Stays::Behind(log()?, inherited);
            serve(args, open_archive, None, stays)
        }
        Some(Role::Led) => {
            keeper::follow()?;
            let stays = Stays::InFront(log()?, Keeper::manager());
            serve(args, open_archive, None, stays)
        }
        None if leads => keeper::lead(args, inherited),
        None if args.foreground => {
            let stays = Stays::InFront(log()?, Manager::find());
            serve(args, open_archive, None, stays)
        }
        None => {
            let words: Vec<_> = std::env::args_os().skip(1).collect();
            background::launch(&words, Environment::User)
        }
    }
}

/// Where a process stays that serves a mount, once that answers.
enum Stays {
    /// In the foreground, with a file for its log if there is one, under a service manager that waits
    /// for word if there is one.
    InFront(Log, Option<Manager>),
    /// In the background, behind who started it and waits.
    Behind(Log, Inherited),
    /// In the background already.
    AsItIs,
}

impl Stays {
    /// Tells the terminal what of the archive is damaged, or that listings wait for the index.
    /// Returns whether damage was reported.
    fn announce(&self, opened: &Opened) -> bool {
        match self {
            Self::AsItIs => return false,
            Self::InFront(..) => {}
            Self::Behind(log, _) => {
                log.write_as_well();
                wait_for_scan(opened);
            }
        }
        let index = opened.telling.index();
        if index.phase == Phase::Scanning && stderr().is_terminal() {
            output::complain(format_args!(
                "mounted; files can be opened by name now, but directory listings (`ls`) wait until the \
                 archive has been read ({}); `tarfs status` shows the progress",
                words::index(&index)
            ));
        }
        let is_over = index.phase != Phase::Scanning;
        if is_over {
            report_end(opened);
        }
        is_over
    }

    /// Goes there, and tells who waits that the mount answers.
    fn settle(self) -> anyhow::Result<Option<Manager>> {
        match self {
            Self::AsItIs => Ok(None),
            Self::Behind(log, inherited) => {
                background::leave(log, inherited).context("cannot stay in the background")?;
                Ok(None)
            }
            Self::InFront(log, manager) => {
                log.write_to_file();
                telemetry::serve();
                if let Some(manager) = &manager {
                    manager.ready();
                }
                Ok(manager)
            }
        }
    }
}

/// How long a process waits for the scan before it leaves the terminal, so that the user sees there what
/// of a small archive is damaged.
const SCAN_WAIT: Duration = Duration::from_millis(250);

/// The first part of [`SCAN_WAIT`]. After it a scan of a large archive that is not a fifth done is not waited for.
const SCAN_LOOK: Duration = Duration::from_millis(50);

/// Packed bytes above which an archive is large in this sense.
const LARGE_BYTES: u64 = 64 << 20;

/// Waits until the scan is over, for [`SCAN_WAIT`] at most.
fn wait_for_scan(opened: &Opened) {
    let (sender, scanned) = mpsc::channel::<()>();
    let then = Callback::new(move || drop(sender));
    opened.content.on_available(WaitFor::End, then);
    // Nothing is ever sent.
    let is_over = |wait| scanned.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected);
    if is_over(SCAN_LOOK) {
        return;
    }
    let index = opened.telling.index();
    let takes_longer = |all: u64| all > LARGE_BYTES && index.scanned_bytes < all / 5;
    if !index.of_bytes.is_some_and(takes_longer) {
        is_over(SCAN_WAIT.saturating_sub(SCAN_LOOK));
    }
}

/// Logs what was wrong with the archive, now that the scan is over.
fn report_end(opened: &Opened) {
    if let Some(failure) = opened.telling.index().failure {
        tracing::error!(failure, "what is not known by now cannot be found");
    }
    report_damage(opened);
}

/// Logs how many members are damaged or not in the tree. Names the first ones if no scan of this process
/// has named them.
fn report_damage(opened: &Opened) {
    let damage = opened.telling.damage();
    if damage.members == 0 {
        return;
    }
    let is_logged = opened.layers.is_empty() && opened.stats.scans.get() > 0;
    if !is_logged {
        for member in &damage.named {
            tracing::warn!("{member}");
        }
    }
    let count = output::damaged_members(damage.members);
    tracing::warn!("{count}; `tarfs status` names the first ones");
}

/// Takes an answer to who asked.
type Reply = Box<dyn FnOnce(Answer) + Send>;

/// Something the serving process has to react to.
enum Event {
    /// The user, or the system, wants it to end.
    Signal,
    /// The scan is over, if there was one.
    Scanned,
    /// Another process asks.
    Question(Question, Reply),
    /// Nothing is mounted any more.
    Ended,
}

fn serve(
    args: &MountArgs,
    open_archive: impl FnOnce(&MountArgs, Arc<Stats>) -> anyhow::Result<Opened>,
    inheritance: Option<Inheritance>,
    stays: Stays,
) -> anyhow::Result<ExitCode> {
    super::allocator::settle();
    let options = args.mount_options()?;
    let namespace = args.namespace.as_deref();
    let namespace = namespace.map(OpenNamespace::open).transpose()?;
    if let Some(namespace) = &namespace {
        Mount::check_in_namespace(namespace, &args.mountpoint)?;
    } else if inheritance
        .as_ref()
        .is_none_or(|found| found.orphan.is_none())
    {
        Mount::check(&args.mountpoint)?;
        if let Some(hidden) = Mount::describe_hidden(&args.mountpoint) {
            let mountpoint = args.mountpoint.display();
            tracing::warn!(%mountpoint, "until it is unmounted this hides {hidden}");
        }
    }
    // Like the mountpoint, before there is long work to do.
    let metrics = args.metrics.map(Metrics::bind).transpose()?;
    let copy = args.copy_to.as_deref();
    let copy = copy
        .map(|directory| Copy::open(directory, &args.mountpoint, args.xattrs.filter()))
        .transpose()?;
    let writable = writable::claim(args, inheritance.as_ref())?;
    make_directories(args);
    privileges::give_up(args);
    if let Stays::InFront(_, Some(manager)) = &stays {
        manager.status("reading the archive");
    }
    let opened = open_watched(args, open_archive, inheritance.as_ref())?;
    let result = serve_opened(
        args,
        &opened,
        (&options, namespace, writable),
        inheritance,
        metrics,
        copy.as_ref(),
        stays,
    );
    if let Some(copy) = &copy {
        copy.end();
    }
    if result.is_ok() {
        exit::at_the_latest_in(END_DEADLINE);
    }
    // Brings what was read to disk.
    drop(opened.recording);
    // Nobody is left to wait for what may still be on its way, a scan's bytes among it.
    opened.network.shutdown_background();
    // Waits for its threads, who wait for nothing now.
    drop(copy);
    result
}

/// What `open_archive` opens. A keeper for which this goes on with a mount hears how long the source cannot be
/// reached.
fn open_watched(
    args: &MountArgs,
    open_archive: impl FnOnce(&MountArgs, Arc<Stats>) -> anyhow::Result<Opened>,
    inheritance: Option<&Inheritance>,
) -> anyhow::Result<Opened> {
    let stats = Arc::new(Stats::default());
    let keeper = inheritance.map(|inheritance| &inheritance.keeper);
    let _watch = keeper
        .map(|keeper| keeper.watch_reach(&stats))
        .transpose()?;
    let opened = open_archive(args, stats);
    if let (Err(error), Some(keeper)) = (&opened, keeper)
        && output::is_outage(error)
    {
        keeper.never_reached();
    }
    opened
}

/// Makes what may lie in another user's directory, where root can make it now and not later. Who
/// needs it says what is wrong with it.
fn make_directories(args: &MountArgs) {
    if let Ok(cache_dir) = args.cache.saved.place.directory() {
        drop(TrustedDir::create(&cache_dir));
    }
    drop(control::make_private(&settings::runtime_dir()));
}

fn serve_opened(
    args: &MountArgs,
    opened: &Opened,
    (options, namespace, writable): (&MountOptions, Option<OpenNamespace>, Option<Writable>),
    inheritance: Option<Inheritance>,
    metrics: Option<Metrics>,
    copy: Option<&Copy>,
    stays: Stays,
) -> anyhow::Result<ExitCode> {
    let view = args.view(&*opened.content)?;
    let (events, inbox) = mpsc::channel();
    // Until here a signal ends the process, as there is nothing to clear up.
    let _signals = SignalWatch::start(events.clone())?;
    let metrics_url = metrics.as_ref().map(Metrics::url);
    let asking = events.clone();
    let _metrics = metrics
        .map(|metrics| metrics.serve(opened.network.handle(), move || ask_later(&asking)))
        .transpose()?;
    let root = view.root();
    // What is mounted, and what is seen of it where something lies over it.
    let seen_as = options;
    let options = &match writable {
        Some(_) => writable::lower_options(options),
        None => options.clone(),
    };
    let tree = tree(args, opened, view, options, copy)?;
    let scanned = events.clone();
    let then = Callback::new(move || tell(&scanned, Event::Scanned));
    opened.content.on_available(WaitFor::End, then);
    let ended = events.clone();
    let ended = move || tell(&ended, Event::Ended);
    let is_heir = inheritance.is_some();
    let (keeper, orphan) = kept(opened, inheritance)?;
    let mount = match (&orphan, namespace, &writable) {
        (None, Some(namespace), _) => {
            let keeper = keeper.as_ref();
            mount_in(&namespace, args, opened, tree, options, keeper, ended)?
        }
        (Some(orphan), _, writable) => {
            let mount = Mount::take_over(tree, orphan, ended)?;
            if let Some(writable) = writable {
                writable.adopted();
            }
            mount
        }
        (None, None, writable) => {
            let writable = writable.as_ref().map(|writable| (writable, seen_as));
            put_in_place(
                args,
                opened,
                tree,
                options,
                writable,
                keeper.as_ref(),
                ended,
            )?
        }
    };
    // The session has its own.
    drop(orphan);
    if let Some(keeper) = &keeper {
        keeper.ready(mount.capabilities(), &opened.version, opened.is_strong);
    }
    if is_heir {
        // Until now paths could be relative.
        std::env::set_current_dir("/").context("cannot leave the directory")?;
    }
    if let Some(copy) = copy {
        copy.start(opened, root)?;
    }
    let control = Control::serve(&settings::runtime_dir(), move |question| {
        ask(&events, question)
    });
    let _control = control
        .inspect_err(|error| tracing::warn!(%error, "no control socket, so no `tarfs status`"))
        .ok();
    let is_reported = stays.announce(opened);
    let manager = match stays.settle() {
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
    let seen = Seen {
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
    let has_ended = react(inbox, &seen);
    if let (true, Some(writable)) = (has_ended, &writable) {
        writable.ended();
    }
    // Who still reads has its error now, and not only when the connection is cut.
    opened.content.close();
    if let Some(manager) = &manager {
        manager.stopping();
    }
    tracing::info!("unmounted");
    Ok(ExitCode::SUCCESS)
}

/// What the kernel asks.
fn tree(
    args: &MountArgs,
    opened: &Opened,
    view: Subtree,
    options: &MountOptions,
    copy: Option<&Copy>,
) -> anyhow::Result<TarFilesystem> {
    let (content, stats) = (Arc::clone(&opened.content), Arc::clone(&opened.stats));
    let timeout = Duration::from_secs(args.source.timeout) + SLACK;
    let mut tree = TarFilesystem::new(content, view, options, stats)
        .with_timeout(timeout)
        .with_xattrs(args.xattrs.filter());
    if args.writable {
        tree = tree.for_overlay();
    }
    match copy {
        Some(copy) => tree
            .with_backing_files(copy.copies())
            .context("cannot start a thread"),
        None => Ok(tree),
    }
}

/// Mounts `tree` in another mount namespace.
fn mount_in(
    namespace: &OpenNamespace,
    args: &MountArgs,
    opened: &Opened,
    tree: TarFilesystem,
    options: &MountOptions,
    keeper: Option<&Keeper>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Mount> {
    let mounted = |site: &MountTarget, device: BorrowedFd<'_>| {
        if let Some(keeper) = keeper {
            keeper.mounted(site, device);
        }
    };
    let at = (namespace, args.mountpoint.as_path());
    let mount = Mount::start_in_namespace(tree, &opened.name, at, options, mounted, ended)?;
    Ok(mount)
}

/// Mounts `tree`; below an overlay, which is seen as its options say, if it is `writable`.
fn put_in_place(
    args: &MountArgs,
    opened: &Opened,
    tree: TarFilesystem,
    options: &MountOptions,
    writable: Option<(&Writable, &MountOptions)>,
    keeper: Option<&Keeper>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Mount> {
    let mounted = |site: &MountTarget, device: BorrowedFd<'_>| {
        if let Some(keeper) = keeper {
            keeper.mounted(site, device);
        }
    };
    let (at, source) = (&args.mountpoint, &opened.name);
    let Some((writable, seen_as)) = writable else {
        return Ok(Mount::start_with_callback(
            tree, source, at, options, mounted, ended,
        )?);
    };
    writable::refuse_restart(args, opened.is_strong)?;
    let lower = writable.make_lower(keeper)?;
    let mut mount = Mount::start_with_callback(tree, source, &lower, options, mounted, ended)?;
    writable::refuse_restart(args, supports_takeover(mount.capabilities()))?;
    writable.cover(&mut mount, source, at, seen_as, keeper)?;
    Ok(mount)
}

/// Who clears up after this process, and what it goes on with, if that is what was opened.
fn kept(
    opened: &Opened,
    inheritance: Option<Inheritance>,
) -> anyhow::Result<(Option<Keeper>, Option<InheritedSession>)> {
    let Some(inheritance) = inheritance else {
        let keeper = match settings::role() {
            Some(Role::Led) => Keeper::that_leads(),
            _ => Keeper::start(),
        };
        let keeper = keeper.inspect_err(
            |error| tracing::warn!(%error, "nobody clears up if this process is killed"),
        );
        return Ok((keeper.ok(), None));
    };
    inheritance.ensure_version(&opened.version)?;
    Ok((Some(inheritance.keeper), inheritance.orphan))
}

/// What a status tells of.
struct Seen<'a> {
    mount: &'a Mount,
    opened: &'a Opened,
    copy: Option<&'a Copy>,
    writable: Option<&'a Writable>,
    root: Ino,
    metrics_url: Option<&'a str>,
    manager: Option<&'a Manager>,
    /// Whether damaged members were reported before the process left the terminal.
    is_reported: bool,
    /// Entries of ACLs that are left out, once the index is complete.
    unmapped_acl_entries: OnceCell<usize>,
}

/// Reacts to events until nothing is mounted any more. Takes the inbox with it, so that questions
/// it did not come to are refused. Returns whether the mount's connection has ended.
#[expect(clippy::needless_pass_by_value, reason = "its end is part of the job")]
fn react(inbox: Receiver<Event>, seen: &Seen<'_>) -> bool {
    let mount = seen.mount;
    let mut insists = Force::No;
    while let Some(event) = next(&inbox, seen) {
        match event {
            Event::Ended => return true,
            Event::Scanned => {
                if !seen.is_reported {
                    report_end(seen.opened);
                }
                if let Some(copy) = seen.copy
                    && copy.start(seen.opened, seen.root).is_err()
                {
                    tracing::debug!("without a copy, as its status says");
                }
            }
            Event::Question(Question::Status, answer) => {
                let status = status(seen);
                answer(Answer::Status(Box::new(status)));
            }
            Event::Question(Question::Umount { force }, answer) => {
                let force = if force { Force::Yes } else { Force::No };
                let result = mount.unmount(force);
                answer(outcome(mount, &result, force));
                if result.is_ok() && force == Force::Yes && !mount.is_mounted() {
                    return false;
                }
            }
            Event::Signal => match mount.unmount(insists) {
                // Its end arrives as an event; by force it might go on for its last user.
                Ok(()) if insists == Force::No => {}
                Ok(()) | Err(UnmountError::NotMounted(_)) => return false,
                Err(error) if insists == Force::No => {
                    tracing::warn!(%error, "a second signal unmounts all the same");
                    insists = Force::Yes;
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
fn next(inbox: &Receiver<Event>, seen: &Seen<'_>) -> Option<Event> {
    let Some(manager) = seen.manager else {
        return inbox.recv().ok();
    };
    loop {
        let index = seen.opened.telling.index();
        let location = &seen.opened.location;
        let is_told = manager.status(&format!("{location}: {}", words::index(&index)));
        if is_told && index.phase != Phase::Scanning {
            return inbox.recv().ok();
        }
        match inbox.recv_timeout(notify::PERIOD) {
            Ok(event) => return Some(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

fn outcome(mount: &Mount, result: &Result<(), UnmountError>, force: Force) -> Answer {
    match result {
        Ok(()) => Answer::Unmounted {
            unmounted: mount.mountpoint().to_string_lossy().into_owned(),
            elsewhere: mount.is_mounted() || force == Force::No && mount.is_still_in_use(),
        },
        Err(error) => Answer::Refused {
            hint: error.hint().map(str::to_owned),
            error: output::chain_of(error),
        },
    }
}

fn status(seen: &Seen<'_>) -> Status {
    let &Seen {
        mount,
        opened,
        copy,
        writable,
        metrics_url,
        ref unmapped_acl_entries,
        ..
    } = seen;
    // First: what it says to be so is explained by notes that come after.
    let progress = copy.map(Copy::progress);
    let mut notes = opened.telling.notes();
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
    let damage = opened.telling.damage();
    opened.stats.panics.record_max(panics::count());
    Status {
        source: opened.location.clone(),
        layers: opened.layers.clone(),
        mountpoint: mountpoint.to_string_lossy().into_owned(),
        device: Some(control::device_word(mount.device())),
        mount_id,
        detached,
        pid: std::process::id(),
        since_unix_seconds: unix_seconds(mount.mounted_at()),
        version: opened.version.clone(),
        entries,
        index: opened.telling.index(),
        resident_bytes: resident_bytes().unwrap_or(0),
        memory: opened.telling.memory(),
        disk_cache: opened.telling.spool(),
        prefetch: opened.telling.prefetch(),
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

/// Hands `question` to the serving thread and waits for its answer.
fn ask(events: &Sender<Event>, question: Question) -> Answer {
    let (sender, answer) = mpsc::sync_channel(1);
    let taken = Box::new(move |text| reply(&sender, text));
    tell(events, Event::Question(question, taken));
    answer.recv().unwrap_or_else(|_| Answer::Refused {
        error: "it is being unmounted already".to_owned(),
        hint: None,
    })
}

/// As [`ask`], for a status and who does not wait on a thread; closes when there is none.
fn ask_later(events: &Sender<Event>) -> oneshot::Receiver<Status> {
    let (sender, status) = oneshot::channel();
    let taken = Box::new(move |answer| {
        if let Answer::Status(status) = answer
            && sender.send(*status).is_err()
        {
            tracing::debug!("who asked is gone");
        }
    });
    tell(events, Event::Question(Question::Status, taken));
    status
}

fn tell(events: &Sender<Event>, event: Event) {
    if events.send(event).is_err() {
        tracing::debug!("the serving thread has ended already");
    }
}

fn reply(answer: &SyncSender<Answer>, text: Answer) {
    if answer.send(text).is_err() {
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
        let signals = Signals::new(undo::ending_signals());
        let mut signals = signals.context("cannot watch for signals")?;
        let handle = signals.handle();
        let thread = Thread::spawn("signals", move || {
            for _ in signals.forever() {
                tell(&events, Event::Signal);
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
