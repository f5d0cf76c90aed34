//! The monitor: the process of a mount that outlives the one that serves it.
//!
//! A killed server leaves a dead mount, on which each `ls` of the parent directory fails. So the process that the user
//! started mounts, gives the connection to a server, and keeps a duplicate of it. In the background it forks, and the
//! child keeps the mount. When the server dies and the mount remains, the monitor unmounts it, or starts a successor that
//! continues on the same connection. The monitor opens and serves nothing, so little can kill it.

mod errors;
mod kept_mount;
mod process;
mod restart;
mod signals;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::net::SendFlags;

use super::daemonize::{self, LogTarget};
use super::fork::{Fork, fork};
use super::inherited_fds::InheritedFds;
use super::overlay_dirs::OverlayDirs;
use super::privileges::{self, Successor};
use super::resident_memory::ProgramPages;
use crate::cli::ui::progress::IndexingProgress;
use crate::cli::ui::units::format_index;
use crate::cli::ui::{logging, output};
use errors::{EndedBySignal, NO_WRITABLE_RESTART, ServerDied, is_disconnection, unexpected};
use kept_mount::KeptMount;
use process::{KILL_TIMEOUT, ServerProcess};
use signals::{Signals, end_by};
use tarfs::fuse::{MountTarget, NewMount, OpenNamespace, SuperblockWatch, supports_takeover};
use tarfs::internal::wait::{is_readable, wait_for};
use tarfs::serve::{
    DaemonSocket, IndexState, MountSpec, OpenedTree, OverlayStatus, Packet, Phase, SessionState,
};

/// Interval of checks of a silent server, whose blocked threads can keep the link open after a kill.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A server that lives for less than this has failed, even if the mount answered.
const MIN_LIFETIME: Duration = Duration::from_secs(10);

/// Time for an unmount that ends a shared connection to be over.
const ABORT_DELAY: Duration = Duration::from_millis(200);

/// Maximum number of servers in a row that live for less than [`MIN_LIFETIME`].
const MAX_SHORT_LIVED: u32 = 5;

/// How a mount is kept.
#[derive(Debug)]
pub(crate) struct MonitorOptions {
    pub(crate) spec: MountSpec,
    pub(crate) namespace: Option<OpenNamespace>,
    pub(crate) overlay: Option<OverlayDirs>,
    pub(crate) log: LogTarget,
    pub(crate) is_in_foreground: bool,
    pub(crate) shows_progress: bool,
    /// How long a successor may take, if one is started.
    pub(crate) restart_timeout: Option<Duration>,
    /// Whether the user wants one, even if the mount must be made again.
    pub(crate) must_restart: bool,
    /// The daemon that serves the mount, unless it is served alone.
    pub(crate) daemon: Option<DaemonSocket>,
}

/// The monitor of a mount.
pub(crate) struct Monitor {
    options: MonitorOptions,
    server: ServerProcess,
    signals: Signals,
    mount: Option<KeptMount>,
    /// The next process that serves the mount may need it.
    state: Option<SessionState>,
    /// The overlay over the mount.
    overlay: Option<OverlayStatus>,
    has_ended: bool,
    /// Whether the server ends because another one continues.
    is_replaced: bool,
    /// Whether the mount is dead because the connection that it shared has ended.
    is_aborted: bool,
    /// The job list of its file system, for the next process that serves it.
    job_list: Option<OwnedFd>,
    /// The program of the daemon, if it is not this one.
    program: Option<OwnedFd>,
    /// Pages that it needs only while it works, once it keeps the mount.
    pages: Option<ProgramPages>,
    progress: IndexingProgress,
    /// Time during which the source was unreachable, before the server was ready.
    unreachable_time: Duration,
}

/// The reason why a monitor waits no longer for a packet.
enum Received {
    Packet(Packet, Vec<OwnedFd>),
    /// The server is dead, and all its packets are read.
    Gone,
    Signal(i32),
    TimedOut,
}

/// Starts a process for the mount of `options` alone.
fn start_alone(options: &MonitorOptions) -> anyhow::Result<ServerProcess> {
    let server = ServerProcess::start(&options.spec, true, options.is_in_foreground);
    server.context("cannot start a process for the mount")
}

impl Monitor {
    /// Opens the tree, mounts it, and serves it by another process. Returns when the mount has ended, or in the background
    /// when it answers.
    pub(crate) fn run(
        options: MonitorOptions,
        inherited: InheritedFds,
    ) -> anyhow::Result<ExitCode> {
        let mut monitor = Self::new(options)?;
        let index = match monitor.mount() {
            Ok(index) => index,
            Err(error) => {
                monitor.undo();
                return match error.downcast_ref() {
                    Some(&EndedBySignal(signal)) => Ok(end_by(signal)),
                    None => Err(error),
                };
            }
        };
        if index.phase == Phase::Scanning && std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            output::print_error(format_args!(
                "mounted; files can be opened by name now, but directory listings (`ls`) wait until the \
                 archive has been read ({}); `tarfs status` shows the progress",
                format_index(&index)
            ));
        }
        if monitor.options.is_in_foreground {
            monitor.settle(inherited)?;
            monitor.signals.notify("READY=1");
            let code = monitor.keep();
            monitor.signals.notify("STOPPING=1");
            return Ok(code);
        }
        monitor.continue_in_background(inherited)
    }

    /// With a server, and nothing mounted.
    fn new(options: MonitorOptions) -> anyhow::Result<Self> {
        let signals = Signals::new()?;
        signals.notify_status("reading the archive");
        let daemon = options.daemon.as_ref();
        let daemon = daemon.map(|socket| ServerProcess::connect(socket, None));
        let server = match daemon {
            Some(Ok(server)) => server,
            daemon => {
                if let Some(Err(error)) = daemon {
                    tracing::debug!(%error, "no daemon; the mount is served alone");
                }
                start_alone(&options)?
            }
        };
        Ok(Self {
            options,
            server,
            signals,
            mount: None,
            state: None,
            overlay: None,
            has_ended: false,
            is_replaced: false,
            is_aborted: false,
            job_list: None,
            program: None,
            pages: None,
            progress: IndexingProgress::default(),
            unreachable_time: Duration::ZERO,
        })
    }

    /// Divides this process. The child keeps the mount, and the parent returns when it does.
    fn continue_in_background(mut self, inherited: InheritedFds) -> anyhow::Result<ExitCode> {
        self.progress.show(None);
        let forked = fork().inspect_err(|_| self.undo())?;
        match forked {
            Fork::Parent(child) => {
                let has_settled = child.wait_for_report();
                // The child owns the mount now.
                std::mem::forget(self);
                if !has_settled {
                    bail!("the process that keeps the mount has ended early");
                }
                Ok(ExitCode::SUCCESS)
            }
            Fork::Child(parent) => {
                self.server.forget_child();
                let settled = self.settle(inherited);
                match &settled {
                    Ok(()) => parent.report(),
                    Err(error) => {
                        tracing::error!("{error:#}");
                        self.undo();
                        return Ok(ExitCode::FAILURE);
                    }
                }
                Ok(self.keep())
            }
        }
    }

    /// Mounts, and waits until the mount answers. Returns the state of its index then.
    fn mount(&mut self) -> anyhow::Result<IndexState> {
        let memory = self.options.spec.to_memory()?;
        let tree = match self.open(&memory) {
            Err(error) if self.server.is_daemon && error.is::<ServerDied>() => {
                tracing::debug!(%error, "the mount is served alone");
                self.server = start_alone(&self.options)?;
                self.open(&memory)
            }
            opened => opened,
        };
        self.mount_opened(tree?)
    }

    /// Has the server open the tree of the description in `memory`. If a mount of it can be shared, returns that, too.
    fn open(&mut self, memory: &OwnedFd) -> anyhow::Result<(OpenedTree, Option<OwnedFd>)> {
        if let Some(log) = self.options.log.file() {
            self.send(&Packet::Log, &[log])?;
        }
        let shows_progress = self.options.shows_progress;
        self.send(&Packet::Open { shows_progress }, &[memory.as_fd()])?;
        match self.next_answer(None)? {
            (Packet::Opened(tree), template) => Ok((tree, template.into_iter().next())),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Mounts the opened `tree`, as a copy of the mount `template` if there is one.
    fn mount_opened(
        &mut self,
        (tree, template): (OpenedTree, Option<OwnedFd>),
    ) -> anyhow::Result<IndexState> {
        let spec = &self.options.spec;
        let mountpoint = PathBuf::from(&spec.mountpoint);
        let wants_restart = self.options.must_restart;
        if spec.is_writable && wants_restart && !tree.is_strong {
            bail!(NO_WRITABLE_RESTART);
        }
        let lower = match &self.options.overlay {
            Some(dirs) => {
                let scratch = dirs.new_scratch()?;
                self.send(&Packet::Scratch(scratch.clone().into()), &[])?;
                Some(dirs.create_scratch(scratch)?)
            }
            None => None,
        };
        let at = lower.as_deref().unwrap_or(&mountpoint);
        let mount = self.new_mount(at, &tree.name, template)?;
        let device = mount.device.as_ref().map(OwnedFd::try_clone).transpose()?;
        let descriptors: Vec<_> = mount.descriptors().collect();
        self.send(&Packet::Serve(mount.target.clone()), &descriptors)?;
        let (state, index, descriptors) = match self.next_answer(None)? {
            (Packet::Ready(state, index), descriptors) => (state, index, descriptors),
            (other, _) => return Err(unexpected(&other)),
        };
        let mut descriptors = descriptors.into_iter();
        let device = device.or_else(|| descriptors.next());
        let device = device.context("the server has sent no connection")?;
        let capabilities = state.capabilities;
        let target = mount.give().target;
        self.state = Some(state);
        self.mount = Some(KeptMount {
            target: target.clone(),
            lower: None,
            device,
            end: descriptors.next().map(SuperblockWatch),
        });
        if self.options.overlay.is_some() {
            if wants_restart && !supports_takeover(capabilities) {
                bail!(NO_WRITABLE_RESTART);
            }
            self.mount_overlay(&target, &tree.name, &mountpoint)?;
        }
        Ok(index)
    }

    /// Makes the mount at `at`, which the kernel lists with `name`.
    fn new_mount(
        &self,
        at: &Path,
        name: &str,
        template: Option<OwnedFd>,
    ) -> anyhow::Result<NewMount> {
        if let Some(template) = template {
            let announce = |target: &MountTarget| {
                let packet = Packet::Attach(target.clone());
                self.server.link.send(&packet, &[], SendFlags::empty())
            };
            match NewMount::copy(at, template, announce) {
                Ok(mount) => return Ok(mount),
                Err(error) => tracing::debug!(%error, "the mount has a file system of its own"),
            }
        }
        let options = self.options.spec.own_options();
        Ok(match &self.options.namespace {
            Some(namespace) => NewMount::in_namespace((namespace, at), name, &options)?,
            None => NewMount::on(at, name, &options)?,
        })
    }

    fn mount_overlay(
        &mut self,
        lower: &MountTarget,
        name: &str,
        mountpoint: &Path,
    ) -> anyhow::Result<()> {
        let Some(dirs) = &self.options.overlay else {
            return Ok(());
        };
        let (target, overlay) =
            dirs.mount_overlay(lower, name, mountpoint, &self.options.spec.options)?;
        if let Some(mount) = &mut self.mount {
            mount.lower = Some(std::mem::replace(&mut mount.target, target.clone()));
            mount.end = SuperblockWatch::on(&target.mountpoint).ok();
        }
        self.overlay = Some(overlay.clone());
        self.send(&Packet::Cover(target, overlay), &[])?;
        match self.next_answer(None)? {
            (Packet::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// This process keeps the mount from now on, in the background without the user's terminal.
    fn settle(&mut self, inherited: InheritedFds) -> anyhow::Result<()> {
        let is_in_background = !self.options.is_in_foreground;
        if is_in_background {
            daemonize::detach(&self.options.log, inherited)
                .context("cannot stay in the background")?;
        } else {
            inherited.close();
            self.options.log.redirect();
        }
        logging::never_block();
        let successor = match (&self.options.restart_timeout, &self.options.daemon) {
            (None, _) => Successor::None,
            (Some(_), None) => Successor::OfMount,
            (Some(_), Some(_)) => Successor::Daemon,
        };
        privileges::drop_capabilities(&self.options.spec, successor);
        std::env::set_current_dir("/").context("cannot leave the directory")?;
        self.report_monitor()
    }

    /// Tells the server which process keeps the mount.
    fn report_monitor(&mut self) -> anyhow::Result<()> {
        let kept = Packet::Kept {
            monitor: std::process::id(),
            is_in_background: !self.options.is_in_foreground,
        };
        self.send(&kept, &[])?;
        loop {
            match self.next(None) {
                Received::Packet(Packet::Done, job_list) => {
                    self.job_list = job_list.into_iter().next();
                    return Ok(());
                }
                // Its death is handled next.
                Received::Gone => return Ok(()),
                Received::Packet(..) | Received::TimedOut => {}
                Received::Signal(_) => self.stop(),
            }
            if self.has_ended {
                return Ok(());
            }
        }
    }

    /// Keeps the mount until it has ended. Returns the exit code for the user.
    fn keep(&mut self) -> ExitCode {
        self.pages = Some(ProgramPages::find());
        let mut short_lived_count = 0;
        loop {
            loop {
                match self.next(None) {
                    Received::Gone => break,
                    Received::Signal(_) => self.stop(),
                    Received::Packet(..) | Received::TimedOut => {}
                }
            }
            if self.is_aborted {
                // One of the mounts is being unmounted, perhaps this one.
                self.signals.sleep(ABORT_DELAY);
            }
            let is_mounted = if self.is_aborted {
                KeptMount::is_attached
            } else {
                KeptMount::is_mounted
            };
            let is_mounted = self.mount.as_ref().is_some_and(is_mounted);
            if self.has_ended || !is_mounted {
                // It may still write data, so there is no timeout.
                self.server.wait();
                // Requests of those who still use the overlay fail with the end of the connection.
                if let Some(mount) = self.mount.take().filter(KeptMount::is_attached) {
                    mount.unmount();
                }
                self.finish();
                return self.exit_code();
            }
            self.server.kill();
            if !self.is_aborted {
                self.server.wait_for_death();
            }
            if !std::mem::take(&mut self.is_replaced) && !self.is_aborted {
                self.report_death();
                let is_short = self.server.started.elapsed() < MIN_LIFETIME;
                short_lived_count = if is_short { short_lived_count + 1 } else { 1 };
            }
            let is_stopped = self.options.is_in_foreground && self.signals.recent().is_some();
            if !is_stopped
                && short_lived_count <= MAX_SHORT_LIVED
                && self.restart(short_lived_count)
            {
                continue;
            }
            if let Some(mount) = self.mount.take() {
                mount.unmount();
            }
            self.finish();
            return self.exit_code();
        }
    }

    fn report_death(&self) {
        let mountpoint = self.options.spec.mountpoint.display();
        let pid = self.server.pid;
        tracing::error!(%mountpoint, pid, "the process that served this mount has died");
        self.signals
            .notify_status("the process that served it has died");
    }

    /// Asks the server to unmount.
    fn stop(&self) {
        // In the background, signals from a terminal or to a process group are meant for others.
        if self.options.is_in_foreground {
            self.signals.notify_status("unmounting");
            drop(self.send(&Packet::Stop, &[]));
        }
    }

    /// Waits for the answer of the server. A failure is an error, and so is a signal.
    fn next_answer(&mut self, deadline: Option<Instant>) -> anyhow::Result<(Packet, Vec<OwnedFd>)> {
        loop {
            match self.next(deadline) {
                Received::Packet(Packet::Failed(failure), _) => return Err(failure.into()),
                Received::Packet(packet, descriptors) => return Ok((packet, descriptors)),
                Received::TimedOut => bail!("it is not ready in time"),
                Received::Signal(signal) => {
                    // Signals to a monitor in the background are meant for others.
                    if self.state.is_none() || self.options.is_in_foreground {
                        return Err(EndedBySignal(signal).into());
                    }
                }
                Received::Gone => {
                    self.server.wait();
                    return Err(self.death());
                }
            }
        }
    }

    /// The error of a server that has ended without an answer.
    fn death(&self) -> anyhow::Error {
        match self.server.status.and_then(|status| status.signal()) {
            Some(signal) => ServerDied(format!(
                "the process that served the mount was ended by signal {signal}"
            )),
            None => ServerDied(
                "the process that served the mount has ended before it was ready".to_owned(),
            ),
        }
        .into()
    }

    /// Waits for the next packet, until `deadline`, which excludes time without a source. Handles reports itself.
    fn next(&mut self, deadline: Option<Instant>) -> Received {
        loop {
            if let Some(deadline) = deadline
                && Instant::now() >= deadline + self.unreachable_time
            {
                return Received::TimedOut;
            }
            if let Some(pages) = &self.pages {
                pages.release();
            }
            let polled = wait_for(
                &mut [self.server.poll_fd(), self.signals.poll_fd()],
                POLL_INTERVAL,
            );
            self.signals.retry_unsent();
            if let Some(signal) = self.signals.take() {
                return Received::Signal(signal);
            }
            // Its last packet comes before its end.
            let is_gone = polled.is_err() || !self.server.is_alive();
            if !is_readable(&self.server.link, Duration::ZERO) {
                if is_gone {
                    return Received::Gone;
                }
                continue;
            }
            match self.server.link.receive() {
                Ok(Some((packet, descriptors))) => match packet {
                    Packet::Successor(socket) => {
                        self.options.daemon = Some(DaemonSocket::at(Path::new(&socket)));
                        self.program = descriptors.into_iter().next();
                        self.is_replaced = true;
                    }
                    packet => {
                        if let Some(packet) = self.handle_report(packet) {
                            return Received::Packet(packet, descriptors);
                        }
                    }
                },
                Ok(None) => return Received::Gone,
                Err(error) => {
                    tracing::debug!(%error, "invalid packet from the process that serves the mount");
                }
            }
        }
    }

    /// Handles `packet` if it is a report; returns any other.
    fn handle_report(&mut self, packet: Packet) -> Option<Packet> {
        match packet {
            Packet::Progress(progress) => self.progress.show(progress),
            Packet::Index(index) => {
                let name = self.options.spec.tree.source.redacted();
                let text = format!("{name}: {}", format_index(&index));
                self.signals.notify_status(&text);
            }
            Packet::Unreachable(milliseconds) => {
                let time = Duration::from_millis(milliseconds);
                self.unreachable_time = time.min(self.server.started.elapsed());
            }
            Packet::Server(pid) => self.server.pid = i32::try_from(pid).ok(),
            Packet::Event(level, text) => {
                if let Ok(level) = level.parse() {
                    logging::repeat(level, &text);
                }
            }
            Packet::Ended => self.has_ended = true,
            Packet::Aborted => self.is_aborted = true,
            other => return Some(other),
        }
        None
    }

    fn send(&self, packet: &Packet, descriptors: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        let sent = self
            .server
            .link
            .send(packet, descriptors, SendFlags::empty());
        // The reason why it is gone comes with the next packet.
        match sent {
            Err(error) if is_disconnection(&error) => Ok(()),
            sent => sent.context("cannot ask the process that serves the mount"),
        }
    }

    /// Unmounts and removes everything, because the mount has failed.
    fn undo(&mut self) {
        self.progress.show(None);
        if let Some(mount) = self.mount.take() {
            mount.unmount();
        }
        self.server.kill();
        self.finish();
    }

    /// Removes the files that were written to a temporary overlay, once no process uses it.
    fn finish(&mut self) {
        if let Some(overlay) = self.options.overlay.take() {
            let timeout = self.options.is_in_foreground.then_some(KILL_TIMEOUT);
            overlay.finish(timeout);
        }
    }

    fn exit_code(&self) -> ExitCode {
        if !self.options.is_in_foreground || self.has_ended {
            return ExitCode::SUCCESS;
        }
        match self.signals.recent() {
            Some(signal) => end_by(signal),
            None => output::print_failure(&self.death()),
        }
    }
}
