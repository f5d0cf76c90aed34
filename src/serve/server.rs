//! Server: it serves the mounts of monitors, each behind a link.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, Shutdown, shutdown};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::control_socket::{Request, Response};
use super::failure::Failure;
use super::first_request::{MountRequest, RequestKind, invalid};
use super::link::{Link, OpenedTree, Packet, version_for_packet, work_for, works_for};
use super::metrics_server::MetricsListener;
use super::mount_spec::MountSpec;
use super::opened::Opened;
use super::served_mount::{MountOrigin, ServedMount};
use super::status::{Phase, Status, format_device};
use super::tree_memory::TreeMemory;
use super::volumes::{SharedTree, VolumeKey, VolumeTable};
use crate::archive::{Callback, WaitFor};
use crate::base::periodic::PeriodicThread;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::fetch::CancelToken;
use crate::fuse::{Force, InheritedSession, NewMount, UnmountError};

/// Timeout for mounts that are being made, before all are handed over.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval of checks whether they are made.
const START_INTERVAL: Duration = Duration::from_millis(10);

/// Interval of reports of progress to a monitor.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Interval of reports of the index to a monitor.
const INDEX_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a successor checks whether the source is reachable.
const REACHABILITY_INTERVAL: Duration = Duration::from_millis(250);

/// Interval of checks whether the job of a killed monitor has ended.
const JOB_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout for the users of an overlay whose monitor was killed in the foreground.
const OVERLAY_END_TIMEOUT: Duration = Duration::from_secs(1);

/// The parts of a process that its monitors control.
pub trait Process: Sync {
    /// Leaves the terminal, if it is `in_background`, because the mount answers. No message may block any more.
    fn settle(&self, in_background: bool);

    /// Unmounts the overlay on `mountpoint` that a dead monitor has made with the directory `scratch`, and what is mounted
    /// there.
    fn unmount_abandoned(&self, mountpoint: &Path, scratch: &Path);

    /// Removes that directory.
    fn remove_scratch(&self, scratch: &Path);

    /// Reports the end of the scan of `opened` to the user.
    fn report_scan_end(&self, opened: &Opened);

    /// Whether it serves mounts of several monitors.
    fn is_daemon(&self) -> bool;

    /// Number of panics so far.
    fn panic_count(&self) -> u64;
}

/// Serves mounts in this process.
pub struct Server {
    network: Handle,
    process: Box<dyn Process + Send>,
    mounts: Mutex<Vec<Arc<ServedMount>>>,
    trees: VolumeTable<Arc<Opened>>,
    memory: TreeMemory,
    /// Links of mounts that do not answer yet.
    starting: Mutex<Vec<Weak<Link>>>,
    /// Whether it makes no other mounts, because a successor continues with them.
    is_retiring: AtomicBool,
    /// Number of monitors that mount, or that have a mount.
    monitors: AtomicUsize,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("mounts", &self.mounts)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// A server without mounts. Its requests use the threads of `network`.
    pub fn new(network: Handle, process: impl Process + Send + 'static) -> Arc<Self> {
        Arc::new(Self {
            network,
            process: Box::new(process),
            mounts: Mutex::default(),
            trees: VolumeTable::default(),
            memory: TreeMemory::default(),
            starting: Mutex::default(),
            is_retiring: AtomicBool::default(),
            monitors: AtomicUsize::default(),
        })
    }

    /// Whether a monitor mounts, or has a mount.
    pub fn is_used(&self) -> bool {
        self.monitors.load(Ordering::SeqCst) > 0
    }

    /// The mounts that it serves.
    pub fn mounts(&self) -> Vec<Arc<ServedMount>> {
        self.mounts.lock().clone()
    }

    /// Tells the user who waits for a mount of an event of a thread that works for it, or all users who wait. Must log
    /// nothing itself.
    pub fn tell_waiting(&self, level: &str, text: &str) {
        let links: Vec<_> = self.starting.lock().clone();
        let only = works_for();
        let is_meant = |link: &&Weak<Link>| only.as_ref().is_none_or(|only| only.ptr_eq(link));
        let event = Packet::Event(level.to_owned(), text.to_owned());
        for link in links.iter().filter(is_meant).filter_map(Weak::upgrade) {
            // One that does not read its packets gets fewer.
            drop(link.send(&event, &[], SendFlags::DONTWAIT));
        }
    }

    /// Tells all monitors that the daemon at `successor`, of the file `program`, continues with their mounts when this
    /// process has ended. Until then it makes no other mounts.
    ///
    /// # Errors
    /// If a mount cannot be continued. Then this process goes on.
    pub(super) fn name_successor(
        &self,
        successor: &Path,
        program: BorrowedFd<'_>,
    ) -> Result<(), Failure> {
        self.is_retiring.store(true, Ordering::SeqCst);
        let named = self.try_name_successor(successor, program);
        self.is_retiring.store(named.is_ok(), Ordering::SeqCst);
        named
    }

    fn try_name_successor(&self, successor: &Path, program: BorrowedFd<'_>) -> Result<(), Failure> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !self.starting.lock().is_empty() {
            if Instant::now() >= deadline {
                return Err(Failure::new("a mount that is being made takes too long"));
            }
            std::thread::sleep(START_INTERVAL);
        }
        let mounts = self.mounts();
        let stays = |mount: &&Arc<ServedMount>| mount.link_to_continue().is_none();
        if let Some(mount) = mounts.iter().find(stays) {
            let mountpoint = mount.mount.target().mountpoint.display().to_string();
            return Err(Failure::new(format!(
                "no other process can continue with {mountpoint}: that needs Linux 6.9, a source with a strong version, \
                 and the process that keeps the mount"
            )));
        }
        let packet = Packet::Successor(successor.into());
        for link in mounts.iter().filter_map(|mount| mount.link_to_continue()) {
            let sent = link.send(&packet, &[program], SendFlags::DONTWAIT);
            sent.map_err(|error| Failure::to("a process that keeps a mount is gone", &error))?;
        }
        Ok(())
    }

    /// The statuses of its mounts.
    pub fn statuses(&self) -> Vec<Status> {
        let status = |mount: &Arc<ServedMount>| {
            let panics = &mount.opened.stats.panics;
            panics.record_max(self.process.panic_count());
            Status {
                daemon: self.process.is_daemon(),
                ..mount.status()
            }
        };
        self.mounts().iter().map(status).collect()
    }

    /// Answers a request of another process.
    pub fn respond(&self, request: &Request) -> Vec<Response> {
        let statuses = |status| Response::Status(Box::new(status));
        vec![match request {
            Request::Status => return self.statuses().into_iter().map(statuses).collect(),
            Request::Umount { force, device } => {
                let force = if *force { Force::Yes } else { Force::No };
                match self.find(device.as_deref()) {
                    Some(mount) => umount(&mount, force),
                    None => no_mount(),
                }
            }
            Request::Index { device } => {
                let index = self.find(device.as_deref());
                match index.and_then(|mount| mount.shown_index()) {
                    Some(index) => Response::Index(index),
                    None => Response::error("the mount shows something else than a complete index"),
                }
            }
        }]
    }

    /// The mount with the device number `device`, or the only one.
    fn find(&self, device: Option<&str>) -> Option<Arc<ServedMount>> {
        let mounts = self.mounts();
        let is_wanted = |mount: &&Arc<ServedMount>| match device {
            Some(device) => format_device(mount.mount.target().device) == device,
            None => mounts.len() == 1,
        };
        mounts.iter().find(is_wanted).cloned()
    }

    /// Unmounts all mounts, without `force` those that are not in use. By force, they end even if that fails.
    pub fn unmount_all(&self, force: Force) {
        self.mounts().iter().for_each(|mount| stop(mount, force));
    }

    /// Serves the mount of `request`, from the monitor behind `link`, until it has ended, and returns it. `None` if there was
    /// none.
    pub fn serve(self: &Arc<Self>, link: Link, request: MountRequest) -> Option<Arc<ServedMount>> {
        let link = Arc::new(link);
        let mut session = Session {
            server: self,
            link: &link,
            scratch: None,
            is_mounting: false,
        };
        let ends_with_monitor = request.spec.ends_with_monitor;
        let mountpoint = request.spec.mountpoint.clone();
        let own = Arc::downgrade(&link);
        self.starting.lock().push(Weak::clone(&own));
        let started = if self.is_retiring.load(Ordering::SeqCst) {
            // The monitor starts its own server.
            Ok(None)
        } else {
            work_for(&own, || session.start(request))
        };
        let is_other = |other: &Weak<Link>| !Weak::ptr_eq(other, &own);
        self.starting.lock().retain(is_other);
        let served = match started {
            Ok(Some(started)) => Some(session.follow(started)),
            Ok(None) => None,
            Err(failure) => {
                link.report_failure(failure);
                None
            }
        };
        let scratch = session.scratch.take();
        if let Some(scratch) = scratch.filter(|_| link.is_closed()) {
            self.process
                .unmount_abandoned(mountpoint.as_ref(), scratch.as_ref());
            let timeout = ends_with_monitor.then_some(OVERLAY_END_TIMEOUT);
            let end = served.as_ref().and_then(|served| served.mount.end());
            if end.is_none_or(|end| end.wait(timeout)) {
                self.process.remove_scratch(scratch.as_ref());
            } else {
                let scratch = scratch.display();
                tracing::error!(%scratch, "this directory stays, because the mount may be in use");
            }
        }
        shutdown(&*link, Shutdown::Both).ok();
        if session.is_mounting {
            self.monitors.fetch_sub(1, Ordering::SeqCst);
        }
        served
    }
}

/// Fails unless `opened` has the version that a mount shows.
fn check_version(opened: &Opened, version: &str) -> Result<(), Failure> {
    let found = version_for_packet(&opened.version);
    if found == version {
        return Ok(());
    }
    Err(Failure::new(format!(
        "the archive has changed since it was mounted: it was {version}, and is {found}"
    )))
}

fn no_mount() -> Response {
    Response::error("the mount is being unmounted already")
}

fn umount(served: &ServedMount, force: Force) -> Response {
    let mount = &served.mount;
    match served.unmount(force) {
        Ok(()) => Response::Unmounted {
            unmounted: mount.target().mountpoint.to_string_lossy().into_owned(),
            elsewhere: mount.is_mounted() || force == Force::No && mount.is_still_in_use(),
        },
        Err(error) => Response::Error {
            hint: error.hint().map(str::to_owned),
            error: crate::base::error_chain::error_chain(&error),
        },
    }
}

/// A mount that has begun.
struct Started {
    mount: Arc<ServedMount>,
    /// Closes at its end.
    ended: mpsc::Receiver<()>,
    ends_with_monitor: bool,
    /// Whether a monitor keeps it.
    is_kept: bool,
    _index_reports: Option<PeriodicThread>,
    _metrics: Option<JoinSet<()>>,
}

/// The end of a mount, once.
struct Ending {
    link: Arc<Link>,
    running: Mutex<Option<mpsc::Sender<()>>>,
}

impl Ending {
    /// That of the mount behind `link`, and what closes with it.
    fn of(link: &Arc<Link>) -> (Arc<Self>, mpsc::Receiver<()>) {
        let (sender, ended) = mpsc::channel();
        let ending = Self {
            link: Arc::clone(link),
            running: Mutex::new(Some(sender)),
        };
        (Arc::new(ending), ended)
    }

    /// Tells the monitor, and ends the wait for its requests.
    fn reach(&self) {
        if self.running.lock().take().is_some() {
            // The monitor may be gone.
            drop(self.link.send(&Packet::Ended, &[], SendFlags::DONTWAIT));
            shutdown(&*self.link, Shutdown::Read).ok();
        }
    }
}

/// The conversation with one monitor.
struct Session<'a> {
    server: &'a Arc<Server>,
    link: &'a Arc<Link>,
    /// The directory that the monitor makes for the mount.
    scratch: Option<OsString>,
    /// Whether it counts as a monitor.
    is_mounting: bool,
}

impl Session<'_> {
    fn count_monitor(&mut self) {
        self.is_mounting = true;
        self.server.monitors.fetch_add(1, Ordering::SeqCst);
    }

    fn send(&self, packet: &Packet, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Failure> {
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        let sent = self.link.send(packet, &descriptors, SendFlags::empty());
        sent.map_err(|error| Failure::to("the process that keeps the mount is gone", &error))
    }

    /// Opens and serves the mount. `None` if the monitor is gone before.
    fn start(&mut self, request: MountRequest) -> Result<Option<Started>, Failure> {
        let MountRequest {
            spec,
            kind,
            copy,
            metrics,
        } = request;
        let (opened, origin, overlay) = match kind {
            RequestKind::Open { shows_progress } => {
                let opened = self.share(&spec, || self.open(&spec, shows_progress))?;
                let view = spec.view(&*opened.volume)?;
                let Some(mount) = self.receive_mount(&opened)? else {
                    return Ok(None);
                };
                ((opened, view), MountOrigin::New(mount), None)
            }
            RequestKind::TakeOver(taken, descriptor) => {
                let opened = self.reopen(&spec)?;
                check_version(&opened, &taken.state.version)?;
                let view = spec.view(&*opened.volume)?;
                self.count_monitor();
                self.scratch = taken.scratch;
                let session = InheritedSession {
                    target: taken.target,
                    descriptor,
                    capabilities: taken.state.capabilities,
                };
                let origin = MountOrigin::Inherited(session);
                ((opened, view), origin, taken.overlay)
            }
        };
        let is_kept = matches!(origin, MountOrigin::Inherited(_));
        if is_kept && self.link.is_closed() {
            // The next successor of this mount may be at work.
            return Ok(None);
        }
        let url = metrics.as_ref().map(MetricsListener::url);
        let (ending, ended) = Ending::of(self.link);
        let at_end = Arc::clone(&ending);
        let on_end = move || at_end.reach();
        let mount = ServedMount::start(&spec, opened, (copy, url), origin, on_end)?;
        mount.on_release(move || ending.reach());
        if let Some(overlay) = overlay {
            mount.set_overlay(overlay);
        }
        mount.set_link(self.link);
        let mount = Arc::new(mount);
        self.report_ready(&mount)?;
        self.server.mounts.lock().push(Arc::clone(&mount));
        let index_reports = spec.reports_index.then(|| self.report_index(&mount));
        let metrics = metrics.map(|metrics| self.serve_metrics(metrics, &mount));
        Ok(Some(Started {
            mount,
            ended,
            ends_with_monitor: spec.ends_with_monitor,
            is_kept,
            _index_reports: index_reports.transpose()?,
            _metrics: metrics.transpose()?,
        }))
    }

    /// Lets the monitor mount the tree. `None` if it is gone.
    fn receive_mount(&mut self, opened: &Opened) -> Result<Option<NewMount>, Failure> {
        let tree = OpenedTree {
            name: opened.name.clone(),
            version: version_for_packet(&opened.version),
            is_strong: opened.is_strong,
        };
        self.count_monitor();
        self.send(&Packet::Opened(tree), None)?;
        let (packet, descriptors) = loop {
            match self.link.receive().map_err(invalid)? {
                Some((Packet::Scratch(scratch), _)) => self.scratch = Some(scratch),
                Some(received) => break received,
                None => return Ok(None),
            }
        };
        let mut descriptors = descriptors.into_iter();
        let (Packet::Serve(target), Some(device)) = (packet, descriptors.next()) else {
            return Err(Failure::new("a mount was expected"));
        };
        let root = descriptors.next();
        Ok(Some(NewMount::of_monitor(target, device, root)))
    }

    fn report_ready(&self, mount: &Arc<ServedMount>) -> Result<(), Failure> {
        let opened = &mount.opened;
        let state = mount.state();
        let index = opened.index();
        let is_scanning = index.phase == Phase::Scanning;
        if !is_scanning {
            self.server.process.report_scan_end(opened);
        }
        let end = mount.mount.end();
        let end = end.as_ref().map(|end| end.0.as_fd());
        self.send(&Packet::Ready(state, index), end)?;
        // Callbacks must not block.
        let (server, weak) = (Arc::clone(self.server), Arc::downgrade(mount));
        let (network, link) = (self.server.network.clone(), Arc::downgrade(self.link));
        let after_scan = move || {
            let Some(mount) = Weak::upgrade(&weak) else {
                return;
            };
            if is_scanning {
                work_for(&link, || server.process.report_scan_end(&mount.opened));
            }
            if mount.start_copy().is_err() {
                tracing::debug!("no copy; the status shows the reason");
            }
        };
        let then = Callback::new(move || drop(network.spawn_blocking(after_scan)));
        opened.volume.on_available(WaitFor::End, then);
        Ok(())
    }

    fn serve_metrics(
        &self,
        metrics: MetricsListener,
        mount: &Arc<ServedMount>,
    ) -> Result<JoinSet<()>, Failure> {
        let (network, mount) = (self.server.network.clone(), Arc::downgrade(mount));
        let request_status = move || {
            let (sender, status) = oneshot::channel();
            let mount = Weak::clone(&mount);
            network.spawn_blocking(move || {
                // Without a mount or a client, the channel closes.
                if let Some(mount) = mount.upgrade() {
                    drop(sender.send(mount.status()));
                }
            });
            status
        };
        let served = metrics.serve(&self.server.network, request_status);
        served.map_err(|error| Failure::to("cannot serve metrics", &error))
    }

    /// Reports each change of the index to the monitor, until the index is complete or the returned thread is dropped.
    fn report_index(&self, mount: &Arc<ServedMount>) -> Result<PeriodicThread, Failure> {
        let (link, weak) = (Arc::clone(self.link), Arc::downgrade(mount));
        let mut last = None;
        let report = move |_| {
            let index = weak.upgrade().map(|mount| mount.opened.index());
            if index != last
                && let Some(index) = &index
            {
                // A full queue gets the next one.
                let sent = link.send(&Packet::Index(index.clone()), &[], SendFlags::DONTWAIT);
                if sent.is_ok() {
                    last = Some(index.clone());
                }
            }
        };
        let thread = PeriodicThread::start("tarfs-report", INDEX_INTERVAL, report);
        thread.map_err(|error| Failure::to("cannot start a thread", &error))
    }

    /// Serves until the mount has ended.
    fn follow(&self, started: Started) -> Arc<ServedMount> {
        let mount = &started.mount;
        let (mut force, mut is_kept) = (Force::No, started.is_kept);
        loop {
            match self.link.receive() {
                Ok(Some((Packet::Stop, _))) => {
                    stop(mount, force);
                    force = Force::Yes;
                }
                Ok(Some((Packet::Cover(target, overlay), _))) => {
                    mount.cover(target, overlay);
                    if self.send(&Packet::Done, None).is_err() {
                        break;
                    }
                }
                Ok(Some((
                    Packet::Kept {
                        monitor,
                        is_in_background,
                    },
                    _,
                ))) => {
                    is_kept = true;
                    mount.set_monitor(monitor);
                    self.server.process.settle(is_in_background);
                    let target = mount.mount.target();
                    let mountpoint = target.mountpoint.display();
                    tracing::info!(source = mount.opened.location, %mountpoint, "mounted");
                    if self.send(&Packet::Done, None).is_err() {
                        break;
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => tracing::debug!(%error, "invalid request of a monitor"),
            }
        }
        let is_running = started.ended.try_recv() == Err(mpsc::TryRecvError::Empty);
        if is_running && (started.ends_with_monitor || !is_kept) {
            stop(mount, Force::Yes);
        } else if is_running {
            tracing::warn!("lost the monitor; a crash will leave a dead mount");
        }
        // Closed by the end of the mount.
        while started.ended.recv_timeout(JOB_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
            if mount.has_job_ended() {
                stop(mount, Force::Yes);
            }
        }
        tracing::info!("unmounted");
        let mut mounts = self.server.mounts.lock();
        mounts.retain(|other| !Arc::ptr_eq(other, mount));
        drop(mounts);
        started.mount
    }

    /// Opens the tree of `spec` by `open`, unless other mounts share it.
    fn share(
        &self,
        spec: &MountSpec,
        open: impl FnOnce() -> Result<Opened, Failure>,
    ) -> Result<Arc<SharedTree<Arc<Opened>>>, Failure> {
        let requested = Instant::now();
        let open = || open().map(Arc::new);
        let context = || {
            let context = spec
                .open
                .context(self.server.network.clone(), &Arc::default());
            context.map_err(|error| Failure::of(&error))
        };
        let is_current = |opened: &Arc<Opened>| opened.is_current(spec, context, requested);
        self.server
            .trees
            .open(VolumeKey::new(spec)?, is_current, open)
    }

    fn open(&self, spec: &MountSpec, shows_progress: bool) -> Result<Opened, Failure> {
        let stats = Arc::new(Stats::default());
        let context = spec.open.context(self.server.network.clone(), &stats);
        let mut context = context.map_err(|error| Failure::of(&error))?;
        if shows_progress {
            let link = Arc::clone(self.link);
            let start = move |total, stats: &Arc<Stats>| {
                let (link, stats) = (Arc::clone(&link), Arc::clone(stats));
                let report = move |is_last: bool| {
                    let read = stats.scanned_packed_bytes.get();
                    let progress = (total, read, stats.scanned_members.get());
                    let packet = Packet::Progress((!is_last).then_some(progress));
                    // The next one says more.
                    drop(link.send(&packet, &[], SendFlags::DONTWAIT));
                };
                let thread = PeriodicThread::start("tarfs-report", PROGRESS_INTERVAL, report);
                Box::new(thread) as Box<dyn std::any::Any + Send>
            };
            context.progress = Some(Arc::new(start));
        }
        let cancel_token = CancelToken::default();
        context.archive.scan.cancel_token = cancel_token.clone();
        let link = Arc::clone(self.link);
        let cancels = cancel_token.clone();
        let watch = move |is_last: bool| {
            if !is_last && link.is_closed() {
                cancels.cancel();
            }
        };
        let watch = PeriodicThread::start("tarfs-reach", REACHABILITY_INTERVAL, watch);
        let watch = watch.map_err(|error| Failure::to("cannot start a thread", &error))?;
        let opened = Opened::open(spec, context, &self.server.memory);
        drop(watch);
        if cancel_token.is_cancelled() {
            // No other mount may share this tree, because it would end early.
            return Err(Failure::abandoned());
        }
        opened
    }

    /// Opens the tree of a dead process. Reports for how long its source is unreachable, or another successor opens it.
    fn reopen(&self, spec: &MountSpec) -> Result<Arc<SharedTree<Arc<Opened>>>, Failure> {
        let stats = Arc::new(Stats::default());
        let context = spec.open.context(self.server.network.clone(), &stats);
        let context = context.map_err(|error| Failure::of(&error))?;
        let link = Arc::clone(self.link);
        let is_opening = Arc::<AtomicBool>::default();
        let begins = Arc::clone(&is_opening);
        let mut unreachable_time = Duration::ZERO;
        let (mut received, mut looked) = (0, Instant::now());
        let watch = move |is_last: bool| {
            let before = std::mem::replace(&mut received, stats.source_read_bytes.get());
            let since = std::mem::replace(&mut looked, Instant::now());
            let is_unreachable = received == before && stats.unreachable_reads.get() > 0;
            if !is_last && (is_unreachable || !is_opening.load(Ordering::Relaxed)) {
                unreachable_time += looked - since;
                let milliseconds = u64::try_from(unreachable_time.as_millis()).unwrap_or(u64::MAX);
                // May be lost, because the next packet includes this time.
                let packet = Packet::Unreachable(milliseconds);
                drop(link.send(&packet, &[], SendFlags::DONTWAIT));
            }
        };
        let watch = PeriodicThread::start("tarfs-reach", REACHABILITY_INTERVAL, watch);
        let _watch = watch.map_err(|error| Failure::to("cannot start a thread", &error))?;
        self.share(spec, || {
            begins.store(true, Ordering::Relaxed);
            Opened::open(spec, context, &self.server.memory)
        })
    }
}

/// Unmounts `mount`. By force, it ends even if it cannot be unmounted. The monitor unmounts what is left.
fn stop(mount: &ServedMount, force: Force) {
    match mount.unmount(force) {
        Ok(()) => {}
        Err(UnmountError::NotMounted(_)) => mount.release(),
        Err(error) if force == Force::No => {
            tracing::warn!(%error, "still mounted; a second signal unmounts anyway");
        }
        Err(error) => {
            tracing::error!(%error, "cannot unmount; it ends anyway");
            mount.release();
        }
    }
}
