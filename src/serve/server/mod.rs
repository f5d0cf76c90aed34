//! Server: it serves the mounts of monitors, each behind a link.

mod cgroup;
mod ending;
mod first_request;
mod job_list;
mod lending;
mod served_mount;
mod session;
mod tree_memory;
mod turns;

pub use first_request::{FirstRequest, MountRequest};
pub use job_list::socket_of_claim;
pub use served_mount::ServedMount;
pub(super) use tree_memory::{Granted, TreeMemory};

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::net::SendFlags;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::control_socket::{Request, Response};
use super::failure::Failure;
use super::link::{Link, Packet, works_for};
use super::metrics_server::{MetricsListener, MetricsPage};
use super::opened::Opened;
use super::status::{Status, format_device};
use super::volumes::VolumeTable;
use crate::base::process::status_field;
use crate::base::sync::Mutex;
use crate::base::wait::wait_until;
use crate::fuse::{Force, MountTarget, SuperblockWatch, UnmountError};
use job_list::{JobList, JobMount};
use served_mount::{FileSystemKey, ProcessFigures};
use turns::Turns;

/// Timeout for mounts that are being made, before all are handed over, for one that continues a shared file system, and for a
/// monitor that mounts a copy of one.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval of checks whether they are made.
const START_INTERVAL: Duration = Duration::from_millis(10);

/// Timeout for the users of an overlay whose monitor was killed in the foreground or with its job.
const OVERLAY_END_TIMEOUT: Duration = Duration::from_secs(1);

/// The parts of a process that its monitors control.
pub trait Process: Sync {
    /// Leaves the terminal, if it is `in_background`, because the mount answers. No message may block any more.
    fn settle(&self, in_background: bool);

    /// Unmounts the overlay on `mountpoint` that a dead monitor has made with the directory `scratch`, and what is mounted
    /// there.
    fn unmount_abandoned(&self, mountpoint: &Path, scratch: &Path);

    /// Removes that directory after the `end` of the overlay. Leaves it if that is unknown, or does not come within `timeout`.
    fn remove_scratch(
        &self,
        scratch: &Path,
        end: Option<&SuperblockWatch>,
        timeout: Option<Duration>,
    );

    /// Reports the end of the scan of `opened` to the user.
    fn report_scan_end(&self, opened: &Opened);

    /// The socket on which it accepts monitors. `None` if it serves one mount alone.
    fn socket(&self) -> Option<&Path>;

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
    /// Pages of metrics.
    pages: Mutex<HashMap<SocketAddr, Weak<MetricsPage>>>,
    /// Turns to make a file system, or to take it over.
    turns: Turns<FileSystemKey>,
    /// Number of requests of commands that wait for blocks.
    lending: AtomicUsize,
    /// Mounts of dead daemons whose monitors have not come.
    abandoned: Mutex<Vec<JobMount>>,
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
            pages: Mutex::default(),
            turns: Turns::default(),
            lending: AtomicUsize::default(),
            abandoned: Mutex::default(),
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
        let is_idle = || self.starting.lock().is_empty();
        if !wait_until(START_TIMEOUT, START_INTERVAL, is_idle) {
            return Err(Failure::new("a mount that is being made takes too long"));
        }
        let mounts = self.mounts();
        let links = mounts.iter().map(|mount| mount.link_to_continue());
        let links = links.collect::<Result<Vec<_>, _>>()?;
        let packet = Packet::Successor(successor.into());
        for link in links {
            let sent = link.send(&packet, &[program], SendFlags::DONTWAIT);
            sent.map_err(|error| Failure::to("a process that keeps a mount is gone", &error))?;
        }
        Ok(())
    }

    /// The statuses of its mounts.
    pub fn statuses(&self) -> Vec<Status> {
        let figures = self.figures();
        let mounts = self.mounts();
        let status = |mount: &Arc<ServedMount>| {
            mount.opened.stats.panics.record_max(figures.panics);
            mount.status(&figures)
        };
        mounts.iter().map(status).collect()
    }

    /// The page of metrics at `address`, which shows all mounts. Several may want the same one. `listener` is bound already.
    fn metrics_page(
        self: &Arc<Self>,
        address: SocketAddr,
        listener: Option<MetricsListener>,
    ) -> Result<Arc<MetricsPage>, Failure> {
        let mut pages = self.pages.lock();
        pages.retain(|_, page| page.strong_count() > 0);
        if let Some(page) = pages.get(&address).and_then(Weak::upgrade) {
            return Ok(page);
        }
        let listener = listener.map_or_else(|| MetricsListener::bind(address), Ok)?;
        let (network, server) = (self.network.clone(), Arc::downgrade(self));
        let request_statuses = move || {
            let (sender, statuses) = oneshot::channel();
            let server = Weak::clone(&server);
            network.spawn_blocking(move || {
                // Without a server or a client, the channel closes.
                if let Some(server) = server.upgrade() {
                    drop(sender.send(server.statuses()));
                }
            });
            statuses
        };
        let page = MetricsPage::serve(listener, &self.network, request_statuses);
        let page = Arc::new(page.map_err(|error| Failure::to("cannot serve metrics", &error))?);
        // Any free port is another one each time.
        if address.port() != 0 {
            pages.insert(address, Arc::downgrade(&page));
        }
        Ok(page)
    }

    /// The figures of this process.
    fn figures(&self) -> ProcessFigures {
        ProcessFigures {
            is_daemon: self.process.socket().is_some(),
            resident_bytes: resident_bytes().unwrap_or(0),
            panics: self.process.panic_count(),
        }
    }

    /// Answers a request of another process.
    pub fn respond(&self, request: &Request) -> Vec<Response> {
        let statuses = |status| Response::Status(Box::new(status));
        vec![match request {
            Request::Status => return self.statuses().into_iter().map(statuses).collect(),
            Request::Umount {
                force,
                device,
                mount_id,
            } => {
                let force = if *force { Force::Yes } else { Force::No };
                match &self.find(device.as_deref(), *mount_id)[..] {
                    [mount] => self.umount(mount, force),
                    [] => no_mount(),
                    [..] => {
                        Response::error("several mounts have this device: name one by mount_id")
                    }
                }
            }
            Request::Archive { name } => self.lend_index(name),
            Request::Span { name, number } => self.lend_span(name, *number),
            Request::Index { device } => {
                let mounts = self.find(device.as_deref(), None);
                let mount = mounts
                    .first()
                    .filter(|_| device.is_some() || mounts.len() == 1);
                match mount.and_then(|mount| mount.shown_index()) {
                    Some(index) => Response::Index(index),
                    None => Response::error("the mount shows something else than a complete index"),
                }
            }
        }]
    }

    /// The mounts with the device number `device`, and the number `mount_id` in the table of mounts.
    fn find(&self, device: Option<&str>, mount_id: Option<u32>) -> Vec<Arc<ServedMount>> {
        let mut mounts = self.mounts();
        if let Some(device) = device {
            mounts.retain(|mount| format_device(mount.mount.target().device) == device);
        }
        if let Some(mount_id) = mount_id {
            mounts.retain(|mount| mount.mount_id() == Some(mount_id));
        }
        mounts
    }

    /// A mount whose file system another mount of `key` can share.
    fn find_shared(&self, key: &FileSystemKey) -> Option<Arc<ServedMount>> {
        let mut mounts = self.mounts().into_iter();
        mounts.find(|mount| mount.can_be_shared_by(key))
    }

    /// Another mount of the file system of `mount` that is attached.
    fn sibling(&self, mount: &Arc<ServedMount>) -> Option<Arc<ServedMount>> {
        let mounts = self.mounts();
        let is_sibling = |other: &Arc<ServedMount>| {
            !Arc::ptr_eq(other, mount)
                && other.mount.shares_with(&mount.mount)
                && other.is_attached()
        };
        mounts.into_iter().find(is_sibling)
    }

    /// Ends each mount that was unmounted, if other mounts of its file system remain. The last one ends with its last user.
    pub(super) fn end_detached(&self) {
        for mount in self.mounts() {
            if mount.is_attached() {
                continue;
            }
            if self.sibling(&mount).is_some() {
                mount.release();
            } else {
                mount.mount.stop_sharing();
            }
        }
    }

    /// Notes the mounts of `job_list`, of which some have monitors that will come.
    fn add_abandoned(&self, job_list: &JobList) {
        match job_list.mounts() {
            Ok(mounts) => {
                let mounts = mounts
                    .into_iter()
                    .filter(|mount| mount.target.is_attached());
                for mount in mounts {
                    // It is added again if an earlier attempt failed.
                    self.remove_abandoned(&mount.target);
                    self.abandoned.lock().push(mount);
                }
            }
            Err(error) => tracing::warn!(%error, "mounts of killed jobs may stay"),
        }
    }

    /// The monitor of the mount at `target` has come.
    fn remove_abandoned(&self, target: &MountTarget) {
        let is_other = |mount: &JobMount| !mount.target.is_same_mount(target);
        self.abandoned.lock().retain(is_other);
    }

    /// Unmounts the mounts that have lost their daemon and their monitor when their jobs have ended.
    pub(super) fn end_abandoned(&self) {
        let ended: Vec<_> = self
            .abandoned
            .lock()
            .extract_if(.., |mount| mount.group.has_ended())
            .collect();
        for JobMount {
            target, scratch, ..
        } in ended
        {
            let Some(scratch) = scratch else {
                detach(&target);
                continue;
            };
            let (scratch, end) = (Path::new(&scratch), target.watch_end());
            self.process.unmount_abandoned(&target.mountpoint, scratch);
            self.process
                .remove_scratch(scratch, end.as_ref(), Some(OVERLAY_END_TIMEOUT));
        }
    }

    /// Descriptors that become readable when a mount ends that the table of mounts does not show.
    pub(super) fn ends(&self) -> Vec<OwnedFd> {
        let ends = self
            .mounts()
            .into_iter()
            .filter_map(|mount| mount.overlay_end())
            // It stays readable while other users keep the mount.
            .filter(|end| !end.has_ended());
        ends.filter_map(|end| end.0.try_clone().ok()).collect()
    }

    /// Unmounts all mounts, without `force` those that are not in use. By force, they end even if that fails.
    pub fn unmount_all(&self, force: Force) {
        self.mounts()
            .iter()
            .for_each(|mount| self.stop(mount, force));
    }

    /// Unmounts `mount`. By force, its service ends, too, because a user could keep it alive.
    fn unmount(&self, mount: &Arc<ServedMount>, force: Force) -> Result<(), UnmountError> {
        let has_sibling = self.sibling(mount).is_some();
        if has_sibling && !mount.is_attached() {
            mount.release();
            return Ok(());
        }
        let mut was_shared = false;
        if force == Force::Yes && !has_sibling {
            // Otherwise the end of its connection would look like that of a shared one, and its monitor would mount again.
            self.end_detached();
            was_shared = mount.set_shared(false);
            mount.mount.stop_sharing();
        }
        let unmounted = mount.mount.unmount(force);
        if unmounted.is_err() && was_shared {
            mount.set_shared(true);
        }
        unmounted?;
        if force == Force::Yes && !mount.mount.is_mounted() {
            mount.release();
        }
        self.end_detached();
        Ok(())
    }

    fn umount(&self, served: &Arc<ServedMount>, force: Force) -> Response {
        let mount = &served.mount;
        match self.unmount(served, force) {
            Ok(()) => Response::Unmounted {
                unmounted: mount.target().mountpoint.to_string_lossy().into_owned(),
                elsewhere: self.sibling(served).is_none()
                    && (mount.is_mounted() || force == Force::No && mount.is_still_in_use()),
            },
            Err(error) => Response::Error {
                hint: error.hint().map(str::to_owned),
                error: crate::base::error_chain::error_chain(&error),
            },
        }
    }

    /// Unmounts `mount`. By force, it ends even if it cannot be unmounted. The monitor unmounts what is left.
    fn stop(&self, mount: &Arc<ServedMount>, force: Force) {
        match self.unmount(mount, force) {
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
}

/// Detaches the mount at `target`, which its killed monitor cannot unmount.
fn detach(target: &MountTarget) {
    match target.detach() {
        Ok(()) | Err(UnmountError::NotMounted(_)) => {}
        Err(error) => tracing::warn!(%error, "the mount of a killed process stays"),
    }
}

fn no_mount() -> Response {
    Response::error("the mount is being unmounted already")
}

/// Resident memory of this process, from `/proc/self/status` (`VmRSS:   12345 kB`).
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 = status_field(&status, "VmRSS").parse().ok()?;
    kib.checked_mul(1024)
}
