//! The process beside a mount that outlives it.
//!
//! Whoever serves a mount can be killed, and then leaves a dead one in the tree that every `ls` of its
//! parent stumbles over. So it starts this program a second time, gives it the mount's connection, and is
//! watched by it. When it dies with its mount still there, the keeper takes that out; or, with
//! `--restart`, starts somebody who goes on with it, on the same connection. The keeper opens nothing and
//! serves nothing, so that there is little in it to die of. With `--restart` in the foreground it is the
//! process that the user started (`front`).

mod front;
mod wire;

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use super::background::{self, Log};
use super::descriptors::Inherited;
use super::mount::MountArgs;
use super::settings::{self, Role};
use super::{privileges, telemetry, undo, writable};
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use crate::fuse::{OverlayKind, LOWER_DIR_NAME, Namespace, InheritedSession, MountTarget, SuperblockWatch};
use front::Front;
pub(super) use front::follow;
use wire::{Packet, Place, State};

/// How often a process that says nothing is looked at: threads of one that was killed may wait for the
/// mount that it served, and keep its socket open.
const LOOK: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// How long the threads of a killed process may take to go.
const LAST_BREATH: Duration = Duration::from_secs(1);

/// How often a process that is to go on with a mount looks whether the source can be reached.
const REACH_PERIOD: Duration = Duration::from_millis(250);

/// Pauses between those who come after and fail: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(8));

/// Who has lived for less has failed in its task, even if it answered; and how many of them in a row
/// are enough.
const SHORT_LIFE: Duration = Duration::from_secs(10);
/// See [`SHORT_LIFE`].
const SHORT_LIVES: u32 = 5;

/// The longest version that is told as it is, in bytes.
const MAX_VERSION_BYTES: usize = 4096;

/// A mount's end of the conversation.
#[derive(Debug)]
pub(super) struct Keeper {
    socket: OwnedFd,
}

/// What the keeper gives to who comes after.
#[derive(Debug)]
pub(super) struct Inheritance {
    /// Who keeps watch.
    pub(super) keeper: Keeper,
    /// The mount to go on with; none where that cannot be done, and one is made anew.
    pub(super) orphan: Option<InheritedSession>,
    /// The version that must be shown, as it stood in a packet.
    version: String,
    /// The directory that goes with the mount, if there is one.
    pub(super) scratch: Option<PathBuf>,
}

impl Inheritance {
    /// The version that must be shown, or of a long one its digest.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// # Errors
    /// When another version than the one that must be shown is `version`.
    pub(super) fn ensure_version(&self, version: &str) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.version == in_a_packet(version),
            "the archive has changed since it was mounted: it was {}, and is {version}",
            self.version
        );
        Ok(())
    }
}

/// A version of an archive as it fits into a packet: of a thousand layers it is long.
fn in_a_packet(version: &str) -> String {
    if version.len() <= MAX_VERSION_BYTES {
        return version.to_owned();
    }
    format!("sha256:{}", crate::archive::sha256(version.as_bytes()))
}

impl Keeper {
    /// Starts a keeper for what this process is about to mount.
    ///
    /// # Errors
    /// When there is no process to be had.
    pub(super) fn start() -> io::Result<Self> {
        let (ours, theirs) = wire::pair()?;
        start(Role::Keeper, theirs, None, Output::Nowhere)?;
        Ok(Self { socket: ours })
    }

    /// What the keeper that started this process leaves to it.
    ///
    /// # Errors
    /// When it is gone, or says something else.
    pub(super) fn inherit() -> anyhow::Result<Inheritance> {
        let socket = standard_input()?;
        let Some((Packet::Succeed(place, state, scratch), descriptor)) = wire::receive(&socket)?
        else {
            anyhow::bail!("nobody says what is to be gone on with");
        };
        Ok(Inheritance {
            keeper: Self { socket },
            orphan: descriptor.map(|descriptor| InheritedSession {
                target: place.into(),
                descriptor,
                capabilities: state.capabilities,
            }),
            version: state.version,
            scratch: scratch.map(|scratch| PathBuf::from(OsString::from_vec(scratch))),
        })
    }

    /// Tells it what there is to clear up.
    pub(super) fn mounted(&self, site: &MountTarget, device: BorrowedFd<'_>) {
        self.tell(&Packet::Mounted(site.into()), Some(device));
    }

    /// Tells it what lies over that, and how to see its end.
    pub(super) fn covered(&self, site: &MountTarget, watch: Option<&SuperblockWatch>) {
        self.tell(&Packet::Covered(site.into()), watch.map(AsFd::as_fd));
    }

    /// Tells it of a directory that goes with the mount.
    pub(super) fn scratch(&self, directory: &Path) {
        let directory = directory.as_os_str().as_bytes().to_vec();
        self.tell(&Packet::Scratch(directory), None);
    }

    /// Tells it what there is to go on with.
    pub(super) fn ready(&self, capabilities: u64, version: &str, is_strong: bool) {
        let state = State {
            capabilities,
            version: in_a_packet(version),
            is_strong,
        };
        self.tell(&Packet::Ready(state), None);
    }

    /// Tells it from now on how long the source cannot be reached whose reads `stats` count, until what is
    /// returned is dropped.
    ///
    /// # Errors
    /// When the system has no descriptor or thread left to give.
    pub(super) fn watch_reach(&self, stats: &Arc<Stats>) -> io::Result<ReachWatch> {
        let socket = self.socket.try_clone()?;
        let stats = Arc::clone(stats);
        let (sender, end) = mpsc::channel();
        let thread = Thread::spawn("reach", move || {
            let mut out_of_reach = Duration::ZERO;
            let (mut received, mut looked) = (stats.source_read_bytes.get(), Instant::now());
            // Nothing is ever sent.
            while end.recv_timeout(REACH_PERIOD) == Err(RecvTimeoutError::Timeout) {
                let before = std::mem::replace(&mut received, stats.source_read_bytes.get());
                let since = std::mem::replace(&mut looked, Instant::now());
                if received == before && stats.unreachable_reads.get() > 0 {
                    out_of_reach += looked - since;
                    let milliseconds = u64::try_from(out_of_reach.as_millis()).unwrap_or(u64::MAX);
                    // The next one tells of this time, too.
                    drop(wire::send_at_once(
                        &socket,
                        &Packet::OutOfReach(milliseconds),
                    ));
                }
            }
        })?;
        Ok(ReachWatch {
            _end: sender,
            _thread: thread,
        })
    }

    /// Tells it that this process could do nothing because the source cannot be reached.
    pub(super) fn never_reached(&self) {
        self.tell(&Packet::OutOfReach(u64::MAX), None);
    }

    fn tell(&self, packet: &Packet, device: Option<BorrowedFd<'_>>) {
        if let Err(error) = wire::send(&self.socket, packet, device) {
            tracing::warn!(%error, "nobody would clear up after this process");
        }
    }
}

/// Tells a keeper how long a source cannot be reached, until dropped.
#[derive(Debug)]
pub(super) struct ReachWatch {
    /// Ends the thread, which is joined then.
    _end: Sender<Infallible>,
    _thread: Thread<()>,
}

/// Where a process writes that is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Output {
    Nowhere,
    /// Where this one does.
    Here,
}

/// Starts this program again with the same arguments, and `socket` to talk.
fn start(
    role: Role,
    socket: OwnedFd,
    directory: Option<&Path>,
    output: Output,
) -> io::Result<Child> {
    // Not by its name, which may be another version's by now, with other numbers for entries, or gone.
    let mut command = Command::new("/proc/self/exe");
    settings::named_alike(&mut command)
        .args(std::env::args_os().skip(1))
        .env(settings::ROLE, role.name())
        .stdin(Stdio::from(socket));
    if output == Output::Nowhere {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    if let Some(directory) = directory {
        command.current_dir(directory);
    }
    command.spawn()
}

/// The socket that this process was started with.
fn standard_input() -> io::Result<OwnedFd> {
    Ok(fcntl_dupfd_cloexec(io::stdin(), 3)?)
}

/// Keeps the mount of the process that started this one. Returns when nothing is left to keep.
///
/// # Errors
/// When it cannot.
pub(super) fn run(args: &MountArgs, inherited: Inherited) -> anyhow::Result<ExitCode> {
    let socket = standard_input()?;
    // A terminal's signals are for who serves the mount, and so are those to a whole group.
    let heard = Arc::<AtomicBool>::default();
    for signal in undo::ending_signals() {
        signal_hook::flag::register(signal, Arc::clone(&heard))?;
    }
    let directory = std::env::current_dir();
    // It may be another user's, whom we can no longer overrule.
    let log = Log::open(args.log_file.as_deref()).or_else(|_| Log::open(None))?;
    background::detach(log, inherited)?;
    std::env::set_current_dir("/")?;
    let pid = rustix::net::sockopt::socket_peercred(&socket)?.pid;
    let ward = Ward {
        socket,
        pid: pid.as_raw_nonzero().get(),
        child: None,
        status: None,
        born: Instant::now(),
        estate: None,
        state: None,
        scratch: None,
        overlay: Overlay::None,
        front: None,
        out_of_reach: Duration::ZERO,
    };
    Ok(keep(args, ward, directory.ok().as_deref()))
}

/// Starts who serves a mount in the foreground, and keeps it. Returns when nothing is left to keep.
///
/// # Errors
/// When nobody can be started.
pub(super) fn lead(args: &MountArgs, inherited: Inherited) -> anyhow::Result<ExitCode> {
    let front = Front::new()?;
    let (ours, theirs) = wire::pair()?;
    // It has every right that this process has, for what it opens first.
    let child = start(Role::Led, theirs, None, Output::Here)?;
    privileges::give_up(args);
    inherited.close();
    // It complains itself of what is wrong with the file.
    if let Ok(log) = Log::open(args.log_file.as_deref()) {
        log.write_to_file();
    }
    telemetry::serve();
    let directory = std::env::current_dir();
    std::env::set_current_dir("/")?;
    let ward = Ward::of(child, ours, (None, Overlay::None), Some(Rc::new(front)));
    Ok(keep(args, ward, directory.ok().as_deref()))
}

/// Keeps what `ward` serves, and those who come after it. What is relative is so to `directory`.
fn keep(args: &MountArgs, mut ward: Ward, directory: Option<&Path>) -> ExitCode {
    let mut short_lives = 0;
    loop {
        while ward.listen() {}
        let Some(estate) = ward.estate() else {
            // With all that is left to write, it may take its time.
            ward.see_off();
            if let (Some(directory), None) = (directory, &args.namespace) {
                // It may have died between mounting and telling of it.
                crate::fuse::unmount_dead(&directory.join(&args.mountpoint));
            }
            return ward.end(directory, &args.mountpoint);
        };
        if let Some(front) = &ward.front {
            front.heed_what_was_passed_on();
        }
        ward.bury();
        let mountpoint = estate.site.mountpoint.display();
        tracing::error!(%mountpoint, pid = ward.pid, "the process that served this mount has died");
        if let Some(front) = &ward.front {
            front.tell("STATUS=the process that served it has died");
        }
        if ward.born.elapsed() < SHORT_LIFE {
            short_lives += 1;
        } else {
            short_lives = 1;
        }
        if args.restart
            && short_lives <= SHORT_LIVES
            && let Some(directory) = directory
            && let Some(state) = ward.state.clone()
        {
            let heir = Heir::of(args, &state);
            if args.writable && heir == Heir::MountsAnew {
                // Who still has files open in it would write to what the next one has.
                tracing::error!("a writable mount cannot be made anew under who uses it");
            } else if let Some(next) = {
                let patience = Duration::from_secs(args.restart_timeout);
                estate.hand_on(&state, heir, directory, &ward, patience)
            } {
                ward = next;
                continue;
            }
        }
        estate.clear();
        // Its connection ends, and so do requests that wait for an answer.
        drop(estate);
        return ward.end(directory, &args.mountpoint);
    }
}

/// An overlay that writes to the scratch directory.
#[derive(Clone)]
enum Overlay {
    /// There is none yet.
    None,
    /// Its end cannot be seen.
    Unwatched,
    /// Its end can be seen.
    Watched(Rc<SuperblockWatch>),
}

/// A process that serves a mount.
struct Ward {
    socket: OwnedFd,
    pid: i32,
    /// The same, if we have started it.
    child: Option<Child>,
    /// How that one has ended.
    status: Option<ExitStatus>,
    born: Instant,
    /// What it has mounted.
    estate: Option<Estate>,
    state: Option<State>,
    /// A directory that goes with the mount.
    scratch: Option<PathBuf>,
    /// The overlay that may use that directory.
    overlay: Overlay,
    /// Who waits in the foreground, if somebody does.
    front: Option<Rc<Front>>,
    /// How long of its life it could not reach the source, if it has yet to answer.
    out_of_reach: Duration,
}

impl Ward {
    /// The one that was started with the other end of `socket`.
    fn of(
        child: Child,
        socket: OwnedFd,
        (scratch, overlay): (Option<PathBuf>, Overlay),
        front: Option<Rc<Front>>,
    ) -> Self {
        Self {
            socket,
            pid: i32::try_from(child.id()).unwrap_or(i32::MAX),
            child: Some(child),
            status: None,
            born: Instant::now(),
            estate: None,
            state: None,
            scratch,
            overlay,
            front,
            out_of_reach: Duration::ZERO,
        }
    }

    /// Removes what goes with the mount; this process then ends as it did, if anybody waits.
    fn end(&self, directory: Option<&Path>, mountpoint: &Path) -> ExitCode {
        self.clean(directory, mountpoint);
        match &self.front {
            Some(front) => front.end(self.status),
            None => ExitCode::SUCCESS,
        }
    }

    /// Removes what goes with the mount, if that process has not.
    fn clean(&self, directory: Option<&Path>, mountpoint: &Path) {
        if let Some(scratch) = &self.scratch {
            // It may have died before anything lay over its mount.
            let lower = scratch.join(LOWER_DIR_NAME);
            crate::fuse::unmount_dead(&lower);
            if let Some(directory) = directory {
                crate::fuse::unmount_dead_overlay(&directory.join(mountpoint), &lower);
            }
            if self.is_unused(scratch) {
                writable::remove_scratch(scratch);
            } else {
                let scratch = scratch.display();
                tracing::error!(%scratch, "this directory stays, because the mount may be in use");
            }
        }
    }

    /// Waits until no process uses the overlay over `scratch`: it would see empty directories. False if
    /// that is not known, or would keep the foreground waiting.
    fn is_unused(&self, scratch: &Path) -> bool {
        match &self.overlay {
            Overlay::None => true,
            Overlay::Unwatched => !scratch.exists(),
            Overlay::Watched(watch) => watch.wait(self.front.as_ref().map(|_| LAST_BREATH)),
        }
    }

    /// What it leaves, if that is still there.
    fn estate(&mut self) -> Option<Estate> {
        self.estate.take().filter(Estate::is_there)
    }

    /// Hears what it says next, or nothing for a while; false when it is dead and has said no more.
    fn listen(&mut self) -> bool {
        match self.hears(&LOOK) {
            Ok(true) => {}
            Ok(false) | Err(Errno::INTR) => {
                // What it said last may have come since.
                return is_alive(self.pid) || self.hears(&Timespec::default()) == Ok(true);
            }
            Err(_) => return false,
        }
        match wire::receive(&self.socket) {
            Ok(Some((Packet::Mounted(place), device))) => {
                let site = place.into();
                self.estate = device.map(|device| Estate {
                    site,
                    below: None,
                    device,
                });
            }
            Ok(Some((Packet::Covered(place), watch))) => {
                self.overlay = match watch {
                    Some(watch) => Overlay::Watched(Rc::new(watch.into())),
                    None => Overlay::Unwatched,
                };
                if let Some(estate) = &mut self.estate {
                    estate.below = Some(std::mem::replace(&mut estate.site, place.into()));
                }
            }
            Ok(Some((Packet::Scratch(directory), _))) => {
                self.scratch = Some(PathBuf::from(OsString::from_vec(directory)));
            }
            Ok(Some((Packet::Ready(state), _))) => self.state = Some(state),
            Ok(Some((Packet::OutOfReach(milliseconds), _))) => {
                self.out_of_reach = Duration::from_millis(milliseconds).min(self.born.elapsed());
            }
            Ok(Some((Packet::Word(words), _))) => {
                if let Some(front) = &self.front {
                    front.tell(&words);
                }
            }
            Ok(Some((Packet::Succeed(..), _)) | None) => return false,
            Err(error) => tracing::debug!(%error, "what the mount says makes no sense"),
        }
        true
    }

    /// Whether there is something to receive, or the other end has closed, before `deadline` has passed or
    /// a signal was passed on.
    fn hears(&self, deadline: &Timespec) -> Result<bool, Errno> {
        let front = self.front.as_ref().map(|front| &front.heard);
        let front = front.map(|heard| PollFd::new(heard, PollFlags::IN));
        let mut polled: Vec<_> = [Some(PollFd::new(&self.socket, PollFlags::IN)), front]
            .into_iter()
            .flatten()
            .collect();
        poll(&mut polled, Some(deadline))?;
        if let Some(front) = &self.front {
            front.repeat();
        }
        let is_heard = polled.first().is_some_and(|it| !it.revents().is_empty());
        self.pass_signals_on();
        Ok(is_heard)
    }

    /// Waits for its end, if we have started it and it has nothing mounted any more.
    fn see_off(&mut self) {
        while self.child.is_some() && is_alive(self.pid) {
            self.pass_signals_on();
            std::thread::sleep(Duration::from_millis(5));
        }
        self.bury();
    }

    /// Sees to it that none of its threads takes a request any more, but for those that wait for the
    /// mount themselves.
    fn bury(&mut self) {
        if let Some(child) = &mut self.child {
            // It closed its socket, so it is dead or of no use.
            drop(child.kill());
        }
        let deadline = Instant::now() + LAST_BREATH;
        while has_threads(self.pid) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(child) = &mut self.child {
            // Or it stays a zombie; one whose threads wait for the mount is one for longer.
            self.status = child.try_wait().ok().flatten();
        }
    }
}

/// Whether who comes after goes on with the same connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Heir {
    Adopts,
    MountsAnew,
}

impl Heir {
    /// Of a mount with these arguments, of which that much is known.
    fn of(args: &MountArgs, state: &State) -> Self {
        // The kernel keeps what it was told: of another version that looks the same it would show old
        // bytes among new ones.
        let may_adopt = state.is_strong && crate::fuse::supports_takeover(state.capabilities);
        match args.copy_to {
            None if may_adopt => Self::Adopts,
            _ => Self::MountsAnew,
        }
    }
}

/// A mount.
struct Estate {
    site: MountTarget,
    /// The mount itself, if something lies over it: it is out of the tree before long.
    below: Option<MountTarget>,
    /// Its connection: until that has ended the mount's number is no other's.
    device: OwnedFd,
}

impl Estate {
    fn is_there(&self) -> bool {
        let is_there = |site| crate::fuse::is_still_mounted(site, self.device.as_fd());
        is_there(&self.site) || self.below.as_ref().is_some_and(is_there)
    }

    /// Takes it out.
    fn clear(&self) {
        for site in [Some(&self.site), self.below.as_ref()]
            .into_iter()
            .flatten()
        {
            if let Err(error) = crate::fuse::clear_dead_mounts(site, self.device.as_fd()) {
                tracing::error!(%error, "what it has left cannot be taken out");
            }
        }
        if self.is_there() {
            tracing::error!("what it has left is below another mount, and stays");
        }
    }

    /// Starts processes until one goes on; `None` when none did within `patience`, in which time is not
    /// counted when the source cannot be reached.
    fn hand_on(
        &self,
        state: &State,
        heir: Heir,
        directory: &Path,
        before: &Ward,
        patience: Duration,
    ) -> Option<Ward> {
        if heir == Heir::MountsAnew {
            self.clear();
            if self.is_there() {
                // A new one would cover what covers it.
                return None;
            }
        }
        let mut deadline = Instant::now() + patience;
        let (mut pause, longest) = PAUSES;
        let is_over = || {
            let front = before.front.as_ref();
            front.is_some_and(|front| front.is_over())
        };
        while !is_over()
            && Instant::now() < deadline
            && (heir == Heir::MountsAnew || self.is_there())
        {
            match self.try_once(state, heir, (directory, before), deadline) {
                Ok(Attempt::GoesOn(ward)) => return Some(*ward),
                Ok(Attempt::Failed) => tracing::error!("who was to go on has failed"),
                Ok(Attempt::OutOfReach(time)) => {
                    tracing::error!(
                        "the source cannot be reached; this time does not count against --restart-timeout"
                    );
                    // The pause does not count either.
                    deadline += time + pause;
                }
                Err(error) => tracing::error!(%error, "nobody can be started to go on"),
            }
            match &before.front {
                Some(front) => front.pause(pause),
                None => std::thread::sleep(pause),
            }
            pause = (2 * pause).min(longest);
        }
        None
    }

    fn try_once(
        &self,
        state: &State,
        heir: Heir,
        (directory, before): (&Path, &Ward),
        deadline: Instant,
    ) -> io::Result<Attempt> {
        let (ours, theirs) = wire::pair()?;
        let output = match &before.front {
            Some(_) => Output::Here,
            None => Output::Nowhere,
        };
        let child = start(Role::Successor, theirs, Some(directory), output)?;
        let scratch = before.scratch.clone();
        let bytes = scratch
            .as_ref()
            .map(|scratch| scratch.as_os_str().as_bytes().to_vec());
        let goes_with = (scratch, before.overlay.clone());
        let mut ward = Ward::of(child, ours, goes_with, before.front.clone());
        let packet = Packet::Succeed((&self.site).into(), state.clone(), bytes);
        let device = (heir == Heir::Adopts).then(|| self.device.as_fd());
        let told = wire::send(&ward.socket, &packet, device);
        while told.is_ok() && ward.state.is_none() && Instant::now() < deadline + ward.out_of_reach
        {
            if !ward.listen() {
                break;
            }
        }
        if ward.state.is_none() {
            ward.bury();
            // It may have died between mounting and answering.
            if heir == Heir::MountsAnew
                && let Some(left) = ward.estate()
            {
                left.clear();
            }
            return Ok(match ward.out_of_reach {
                Duration::ZERO => Attempt::Failed,
                time => Attempt::OutOfReach(time),
            });
        }
        if heir == Heir::Adopts {
            ward.estate = Some(Self {
                site: self.site.clone(),
                below: None,
                device: self.device.try_clone()?,
            });
        }
        // Opening is no part of its life.
        ward.born = Instant::now();
        tracing::info!(pid = ward.pid, "another process goes on with the mount");
        Ok(Attempt::GoesOn(Box::new(ward)))
    }
}

/// How a process ended up that was to go on with a mount.
enum Attempt {
    GoesOn(Box<Ward>),
    Failed,
    /// It failed, and could not reach the source for so long.
    OutOfReach(Duration),
}

/// Whether there is a process of that number whose main thread has not ended. Where `/proc` does not show
/// the process, whether any of its threads has not ended.
fn is_alive(pid: i32) -> bool {
    let Some(Ok(stat)) = process_directory(pid).map(|process| fs::read(process.join("stat")))
    else {
        return Pid::from_raw(pid).is_some_and(is_running);
    };
    // Behind the name, which may hold anything, in parentheses.
    let state = stat.rsplit(|&byte| byte == b')').next().unwrap_or_default();
    !matches!(state.trim_ascii_start().first(), Some(b'Z' | b'X'))
}

/// Whether a process that is dying still has threads that run. A zombie is listed as its main one.
fn has_threads(pid: i32) -> bool {
    let tasks = process_directory(pid).map(|process| fs::read_dir(process.join("task")));
    is_alive(pid) || tasks.is_some_and(|tasks| tasks.is_ok_and(|tasks| tasks.count() > 1))
}

/// The directory of process `pid` in `/proc`; `None` where `/proc` is of another PID namespace, in which
/// that number is another process's.
fn process_directory(pid: i32) -> Option<PathBuf> {
    let own = fs::read_link("/proc/self").ok()?;
    let is_ours = own.as_os_str() == std::process::id().to_string().as_str();
    is_ours.then(|| format!("/proc/{pid}").into())
}

/// Whether a thread of process `pid` has not ended.
fn is_running(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut polled = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())) != Ok(1)
        }
        Err(Errno::SRCH) => false,
        // Linux before 5.3.
        Err(_) => test_kill_process(pid) != Err(Errno::SRCH),
    }
}

impl From<&MountTarget> for Place {
    fn from(site: &MountTarget) -> Self {
        Self {
            mountpoint: site.mountpoint.as_os_str().as_bytes().to_vec(),
            device: site.device,
            cover: site.overlay
                .map(|(cover, device)| (cover.fs_type().to_owned(), device)),
            namespace: site.namespace.as_ref().map(|namespace| {
                let path = namespace.path.as_os_str().as_bytes().to_vec();
                (path, namespace.identity)
            }),
        }
    }
}

impl From<Place> for MountTarget {
    fn from(place: Place) -> Self {
        Self {
            mountpoint: PathBuf::from(OsString::from_vec(place.mountpoint)),
            device: place.device,
            overlay: place
                .cover
                .and_then(|(name, device)| Some((OverlayKind::from_fs_type(&name)?, device))),
            namespace: place.namespace.map(|(path, identity)| Namespace {
                path: PathBuf::from(OsString::from_vec(path)),
                identity,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_alive_until_its_main_thread_has_ended() {
        assert!(is_alive(
            i32::try_from(std::process::id()).expect("a number")
        ));
        let mut child = Command::new("true").spawn().expect("installed");
        let pid = i32::try_from(child.id()).expect("a number");
        while is_alive(pid) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!has_threads(pid), "a zombie until somebody waits for it");
        child.wait().expect("a child");
        assert!(!has_threads(pid) && !is_alive(pid));
    }
}
