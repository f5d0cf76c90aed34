//! Conversation of a server with one monitor, from the request for a mount to the end of the mount.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use rustix::net::SendFlags;

use super::ending::Ending;
use super::first_request::{MountRequest, RequestKind, invalid};
use super::job_list::JobList;
use super::served_mount::{FileSystemKey, MountOrigin, ServedMount};
use super::{OVERLAY_END_TIMEOUT, START_TIMEOUT, Server, detach};
use crate::archive::{Callback, WaitFor};
use crate::base::periodic::PeriodicThread;
use crate::base::stats::Stats;
use crate::base::wait::is_readable;
use crate::fetch::CancelToken;
use crate::fuse::{Force, InheritedSession, MountTarget, NewMount};
use crate::serve::copy::MountCopy;
use crate::serve::failure::Failure;
use crate::serve::link::{Link, OpenedTree, Packet, Taken, version_for_packet, work_for};
use crate::serve::metrics_server::{MetricsListener, MetricsPage};
use crate::serve::mount_spec::MountSpec;
use crate::serve::opened::Opened;
use crate::serve::status::Phase;
use crate::serve::volumes::{SharedTree, VolumeKey};

/// Interval of reports of progress to a monitor.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Interval of reports of the index to a monitor.
const INDEX_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of checks while a tree is opened: whether the client is gone, or for a successor, whether the source is
/// reachable.
const REACHABILITY_INTERVAL: Duration = Duration::from_millis(250);

/// Interval of checks whether the job of a killed monitor has ended.
const JOB_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout for another monitor that mounts the same. Then this mount has a file system of its own.
const SHARE_TIMEOUT: Duration = Duration::from_secs(1);

impl Server {
    /// Serves the mount of `request`, from the monitor behind `link`, until it has ended, and returns it. `None` if there was
    /// none. The monitor ends when the link is closed.
    pub fn serve(
        self: &Arc<Self>,
        link: &Arc<Link>,
        request: MountRequest,
    ) -> Option<Arc<ServedMount>> {
        let mut session = Session::new(self, link);
        let ends_with_monitor = request.spec.ends_with_monitor;
        let mountpoint = request.spec.mountpoint.clone();
        let own = Arc::downgrade(link);
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
        let attached = session.attached.take();
        if let Some(target) = attached.filter(|_| served.is_none()) {
            // Its monitor may be killed before it does so itself.
            detach(&target);
        }
        let scratch = session.scratch.take();
        if let Some(scratch) = scratch.filter(|_| link.is_closed()) {
            self.process
                .unmount_abandoned(mountpoint.as_ref(), scratch.as_ref());
            let timeout = ends_with_monitor.then_some(OVERLAY_END_TIMEOUT);
            let end = served.as_ref().and_then(|served| served.mount.end());
            self.process
                .remove_scratch(scratch.as_ref(), end.as_deref(), timeout);
        }
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

/// A mount that has begun.
pub(super) struct Started {
    mount: Arc<ServedMount>,
    /// Closes at its end.
    ended: mpsc::Receiver<()>,
    ends_with_monitor: bool,
    /// Whether a monitor keeps it.
    is_kept: bool,
    _index_reports: Option<PeriodicThread>,
    _metrics: Option<Arc<MetricsPage>>,
}

/// The conversation with one monitor.
pub(super) struct Session<'a> {
    server: &'a Arc<Server>,
    link: &'a Arc<Link>,
    /// The directory that the monitor makes for the mount.
    pub(super) scratch: Option<OsString>,
    /// The copy of a mount that the monitor makes.
    attached: Option<MountTarget>,
    /// Whether it counts as a monitor.
    pub(super) is_mounting: bool,
}

impl<'a> Session<'a> {
    /// That of `server` with the monitor behind `link`.
    pub(super) fn new(server: &'a Arc<Server>, link: &'a Arc<Link>) -> Self {
        Self {
            server,
            link,
            scratch: None,
            attached: None,
            is_mounting: false,
        }
    }

    fn count_monitor(&mut self) {
        self.is_mounting = true;
        self.server.monitors.fetch_add(1, Ordering::SeqCst);
    }

    fn send(&self, packet: &Packet, descriptors: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let sent = self.link.send(packet, descriptors, SendFlags::empty());
        sent.map_err(|error| Failure::to("the process that keeps the mount is gone", &error))
    }

    /// Opens and serves the mount. `None` if the monitor is gone before.
    pub(super) fn start(&mut self, request: MountRequest) -> Result<Option<Started>, Failure> {
        let MountRequest {
            spec,
            key,
            kind,
            copy,
            metrics,
        } = request;
        let page = self.metrics_page(&spec, metrics, &kind)?;
        let url = page.as_ref().map(|page| page.url.clone());
        let (ending, ended) = Ending::of(self.link);
        let is_kept = matches!(kind, RequestKind::TakeOver(..));
        let started = match kind {
            RequestKind::Open { shows_progress } => {
                let tree = self.share(key, &spec, || self.open(&spec, shows_progress))?;
                self.start_new(&spec, tree, (copy, url), &ending)?
            }
            RequestKind::TakeOver(taken, connection, job_list) => {
                let tree = self.reopen(key, &spec, &taken.state.version)?;
                self.continue_mount(
                    (&spec, tree),
                    (*taken, url),
                    (connection, job_list),
                    &ending,
                )?
            }
        };
        let Some(mount) = started else {
            return Ok(None);
        };
        let index_reports = spec.reports_index.then(|| self.report_index(&mount));
        Ok(Some(Started {
            mount,
            ended,
            ends_with_monitor: spec.ends_with_monitor,
            is_kept,
            _index_reports: index_reports.transpose()?,
            _metrics: page,
        }))
    }

    /// Starts a new mount, which shares a file system if the monitor can mount that.
    fn start_new(
        &mut self,
        spec: &MountSpec,
        tree: Arc<SharedTree<Arc<Opened>>>,
        (copy, url): (Option<MountCopy>, Option<String>),
        ending: &Arc<Ending>,
    ) -> Result<Option<Arc<ServedMount>>, Failure> {
        let key = FileSystemKey::new(spec, &tree, None)?;
        let turn = self.server.turns.take(&key, SHARE_TIMEOUT);
        let shared = self.server.find_shared(&key);
        let template = shared.as_ref().and_then(|shared| shared.mount.template());
        // Others need not wait for this monitor to mount a file system that is there.
        let turn = turn.filter(|_| template.is_none());
        let Some(mut mount) = self.receive_mount(&tree, template.as_deref())? else {
            return Ok(None);
        };
        let shared = shared.filter(|_| mount.device.is_none());
        let mount = if let Some(shared) = &shared {
            ServedMount::join(shared, tree, (mount.target.clone(), url), ending)?
        } else {
            let own = mount.template.take();
            let socket = self.server.process.socket();
            let own = own.filter(|_| socket.is_some());
            let claim = || JobList::claim(None, socket);
            let job_list = own.is_some().then(claim).transpose();
            let job_list = job_list.map_err(|error| Failure::of(&error))?;
            let origin = (MountOrigin::New(mount), job_list);
            let mount = ServedMount::serve(spec, (key, tree), (copy, url), origin, ending)?;
            mount.mount.set_template(own.map(Arc::new));
            mount
        };
        let mount = self.begin(mount, shared.is_some())?;
        drop(turn);
        Ok(Some(mount))
    }

    /// Continues with the mount `taken` of a dead process. `None` if its monitor is gone.
    fn continue_mount(
        &mut self,
        (spec, tree): (&MountSpec, Arc<SharedTree<Arc<Opened>>>),
        (taken, url): (Taken, Option<String>),
        (descriptor, job_list): (OwnedFd, Option<OwnedFd>),
        ending: &Arc<Ending>,
    ) -> Result<Option<Arc<ServedMount>>, Failure> {
        check_version(&tree, &taken.state.version)?;
        let key = FileSystemKey::new(spec, &tree, Some(&taken.target))?;
        let turn = self.server.turns.take(&key, START_TIMEOUT);
        let turn = turn.ok_or_else(|| Failure::new("the file system is being continued"))?;
        self.count_monitor();
        self.scratch = taken.scratch;
        if self.link.is_closed() {
            // The next successor of this mount may be at work.
            return Ok(None);
        }
        let mount = if let Some(shared) = self.server.find_shared(&key) {
            ServedMount::join(&shared, tree, (taken.target, url), ending)?
        } else {
            let socket = self.server.process.socket();
            let can_be_shared = job_list.is_some() || socket.is_some();
            let claim = can_be_shared.then(|| JobList::claim(job_list, socket));
            let job_list = claim.transpose().map_err(|error| Failure::of(&error))?;
            if let Some(job_list) = &job_list {
                self.server.add_abandoned(job_list);
            }
            let origin = MountOrigin::Inherited(InheritedSession {
                target: taken.target,
                descriptor,
                capabilities: taken.state.capabilities,
            });
            ServedMount::serve(spec, (key, tree), (None, url), (origin, job_list), ending)?
        };
        self.server.remove_abandoned(&mount.mount.target());
        if let Some(overlay) = taken.overlay {
            mount.set_overlay(overlay);
        }
        if self.server.process.socket().is_some() && mount.mount.template().is_none() {
            let template = mount.mount.make_template(&spec.own_options());
            mount.mount.set_template(template);
        }
        // Its monitor has the connection already.
        let mount = self.begin(mount, false)?;
        drop(turn);
        Ok(Some(mount))
    }

    /// Tells the monitor that `mount` answers, with its connection if the monitor `needs_connection`.
    fn begin(
        &self,
        mount: ServedMount,
        needs_connection: bool,
    ) -> Result<Arc<ServedMount>, Failure> {
        mount.set_link(self.link);
        let mount = Arc::new(mount);
        let mounts = &self.server.mounts;
        mounts.lock().push(Arc::clone(&mount));
        let reported = self.report_ready(&mount, needs_connection);
        if reported.is_err() {
            mounts.lock().retain(|other| !Arc::ptr_eq(other, &mount));
        }
        // The others of its file system may have been unmounted meanwhile.
        self.server.end_detached();
        reported.map(|()| mount)
    }

    /// Lets the monitor mount the tree, or the file system of `template`. `None` if it is gone.
    fn receive_mount(
        &mut self,
        opened: &Opened,
        template: Option<&OwnedFd>,
    ) -> Result<Option<NewMount>, Failure> {
        let tree = OpenedTree {
            name: opened.name.clone(),
            version: version_for_packet(&opened.version),
            is_strong: opened.is_strong,
        };
        self.count_monitor();
        let template = template.map(AsFd::as_fd);
        self.send(&Packet::Opened(tree), template.as_slice())?;
        let deadline = Instant::now() + START_TIMEOUT;
        let (packet, descriptors) = loop {
            // The file system of the template cannot end meanwhile.
            let left = deadline.saturating_duration_since(Instant::now());
            if template.is_some() && !is_readable(self.link, left) {
                return Err(Failure::new("the mount was not made in time"));
            }
            match self.link.receive().map_err(invalid)? {
                Some((Packet::Scratch(scratch), _)) => self.scratch = Some(scratch),
                Some((Packet::Attach(target), _)) => self.attached = Some(target),
                Some(received) => break received,
                None => return Ok(None),
            }
        };
        match packet {
            Packet::Serve(target) if template.is_some() || !descriptors.is_empty() => {
                Ok(Some(NewMount::of_monitor(target, descriptors)))
            }
            _ => Err(Failure::new("a mount was expected")),
        }
    }

    fn report_ready(
        &self,
        mount: &Arc<ServedMount>,
        needs_connection: bool,
    ) -> Result<(), Failure> {
        let opened = &mount.opened;
        let state = mount.state();
        let index = opened.index();
        let is_scanning = index.phase == Phase::Scanning;
        if !is_scanning {
            self.server.process.report_scan_end(opened);
        }
        let end = mount.mount.end();
        let end = end.as_ref().map(|end| end.0.as_fd());
        let connection = needs_connection.then(|| mount.mount.connection());
        let descriptors: Vec<_> = connection.into_iter().chain(end).collect();
        self.send(&Packet::Ready(state, index), &descriptors)?;
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

    /// The page of metrics that `spec` asks for, at the address of `listener` if that is bound already. For the mount of a dead
    /// process, a page that cannot be served is none.
    fn metrics_page(
        &self,
        spec: &MountSpec,
        listener: Option<MetricsListener>,
        kind: &RequestKind,
    ) -> Result<Option<Arc<MetricsPage>>, Failure> {
        let Some(address) = spec.metrics else {
            return Ok(None);
        };
        match self.server.metrics_page(address, listener) {
            Err(failure) if matches!(kind, RequestKind::TakeOver(..)) => {
                tracing::warn!(%failure, "no metrics");
                Ok(None)
            }
            page => page.map(Some),
        }
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
    pub(super) fn follow(&self, started: Started) -> Arc<ServedMount> {
        let mount = &started.mount;
        let (mut force, mut is_kept) = (Force::No, started.is_kept);
        loop {
            match self.link.receive() {
                Ok(Some((Packet::Stop, _))) => {
                    self.server.stop(mount, force);
                    force = Force::Yes;
                }
                Ok(Some((Packet::Cover(target, overlay), _))) => {
                    mount.cover(target, overlay);
                    if self.send(&Packet::Done, &[]).is_err() {
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
                    mount.set_monitor(monitor, self.scratch.as_ref());
                    self.server.process.settle(is_in_background);
                    let target = mount.mount.target();
                    let mountpoint = target.mountpoint.display();
                    tracing::info!(source = mount.opened.location, %mountpoint, "mounted");
                    let job_list = mount.job_list().map(|job_list| job_list.as_fd());
                    if self.send(&Packet::Done, job_list.as_slice()).is_err() {
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
            self.server.stop(mount, Force::Yes);
        } else if is_running {
            tracing::warn!("lost the monitor; a crash will leave a dead mount");
        }
        // Closed by the end of the mount.
        while started.ended.recv_timeout(JOB_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
            if mount.has_job_ended() {
                self.server.stop(mount, Force::Yes);
            }
        }
        tracing::info!("unmounted");
        // A monitor that was killed unmounts nothing.
        if mount.was_aborted() && !self.link.is_closed() {
            mount.mount.leave();
        }
        let mut mounts = self.server.mounts.lock();
        mounts.retain(|other| !Arc::ptr_eq(other, mount));
        drop(mounts);
        started.mount
    }

    /// Opens the tree of `spec` by `open`, unless other mounts share it.
    fn share(
        &self,
        key: VolumeKey,
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
        self.server.trees.open(key, is_current, open)
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
    fn reopen(
        &self,
        key: VolumeKey,
        spec: &MountSpec,
        version: &str,
    ) -> Result<Arc<SharedTree<Arc<Opened>>>, Failure> {
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
        // The kernel knows files of it already, so all must be known here.
        let is_same = |opened: &Arc<Opened>| {
            let is_complete = opened.volume.index().is_complete();
            Ok(is_complete && version_for_packet(&opened.version) == version)
        };
        self.server.trees.open(key, is_same, || {
            begins.store(true, Ordering::Relaxed);
            Opened::open(spec, context, &self.server.memory).map(Arc::new)
        })
    }
}
