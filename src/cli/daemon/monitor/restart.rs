//! Restart of the process that serves a mount.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::net::SendFlags;

use super::Monitor;
use super::errors::{EndedBySignal, is_disconnection, may_pass, unexpected};
use super::kept_mount::KeptMount;
use super::process::ServerProcess;
use crate::cli::daemon::overlay_dirs::OverlayDirs;
use tarfs::serve::{DaemonSocket, Failure, Packet, SessionState, Taken, socket_of_claim};

/// Pauses between failed successors: the first and the maximum.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(8));

/// Number of daemons in a row that die with a mount, after which it is served alone.
const MAX_SHORT_LIVED_DAEMONS: u32 = 2;

impl Monitor {
    /// Starts successors until one serves the mount. False if none may, or does in time, which excludes outages of the
    /// source.
    pub(super) fn restart(&mut self, short_lived_count: u32) -> bool {
        let (Some(timeout), Some(state)) = (self.options.restart_timeout, self.state.clone())
        else {
            return false;
        };
        let is_taken_over =
            state.can_be_continued() && self.options.spec.copy_to.is_none() && !self.is_aborted;
        if !is_taken_over && !self.end_mount() {
            return false;
        }
        // The mount may be what kills the daemon.
        let mut may_share = short_lived_count < MAX_SHORT_LIVED_DAEMONS;
        let mut deadline = Instant::now() + timeout;
        let (mut pause, longest) = RESTART_BACKOFF;
        loop {
            let is_mounted = || self.mount.as_ref().is_some_and(KeptMount::is_mounted);
            if Instant::now() >= deadline || is_taken_over && !is_mounted() {
                return false;
            }
            self.unreachable_time = Duration::ZERO;
            match self.try_restart(&state, is_taken_over, deadline, may_share) {
                Ok(()) => {
                    // The time before it was ready does not count towards its lifetime.
                    self.server.started = Instant::now();
                    tracing::info!(pid = self.server.pid, "a new process serves the mount");
                    self.signals.notify("READY=1");
                    return true;
                }
                Err(error) if error.is::<EndedBySignal>() => return false,
                Err(error) => {
                    self.server.kill();
                    tracing::error!("the new process failed to take over the mount: {error:#}");
                    let failure = error.downcast_ref::<Failure>();
                    let is_outage = failure.is_some_and(|failure| failure.is_outage);
                    // A daemon that lacks something may lack it again.
                    may_share &= is_outage || error.downcast_ref().is_some_and(is_disconnection);
                    if is_outage {
                        self.unreachable_time = self.server.started.elapsed();
                    }
                    if self.unreachable_time > Duration::ZERO {
                        tracing::error!(
                            "the source cannot be reached; this time does not count against --restart-timeout"
                        );
                        // The pause does not count either.
                        deadline += self.unreachable_time + pause;
                    }
                }
            }
            if self.signals.sleep(pause).is_some() && self.options.is_in_foreground {
                return false;
            }
            pause = (2 * pause).min(longest);
        }
    }

    /// Unmounts the dead mount, to mount again. False if that may not be.
    fn end_mount(&mut self) -> bool {
        let was_aborted = std::mem::take(&mut self.is_aborted);
        if !self.options.must_restart && !was_aborted {
            return false;
        }
        if self.options.spec.is_writable || self.options.namespace.is_some() {
            // Processes with open files in the old mount would write to the directories of the new one.
            tracing::error!("this mount cannot be mounted again while it is in use");
            return false;
        }
        let Some(mount) = self.mount.take() else {
            return false;
        };
        // A new mount would hide the one that hides this one.
        if was_aborted {
            mount.unmount_alone()
        } else {
            mount.unmount()
        }
    }

    /// Starts one successor, and waits until it serves the mount.
    fn try_restart(
        &mut self,
        state: &SessionState,
        is_taken_over: bool,
        deadline: Instant,
        may_share: bool,
    ) -> anyhow::Result<()> {
        self.server = self.start_successor(is_taken_over, may_share)?;
        let memory = self.options.spec.to_memory()?;
        if is_taken_over {
            if let Some(log) = self.options.log.file() {
                self.send(&Packet::Log, &[log])?;
            }
            let mount = self.mount.as_ref().context("there is no mount")?;
            let taken = Packet::TakeOver(Box::new(Taken {
                target: mount.target.clone(),
                state: state.clone(),
                overlay: self.overlay.clone(),
                scratch: self
                    .options
                    .overlay
                    .as_ref()
                    .and_then(OverlayDirs::scratch)
                    .map(Into::into),
            }));
            let mut descriptors = vec![memory.as_fd(), mount.device.as_fd()];
            descriptors.extend(self.job_list.as_ref().map(AsFd::as_fd));
            let sent = self
                .server
                .link
                .send(&taken, &descriptors, SendFlags::empty());
            sent?;
            match self.next_answer(Some(deadline))? {
                (Packet::Ready(..), _) => {}
                (other, _) => return Err(unexpected(&other)),
            }
        } else {
            let spec = self.options.spec.clone().continuing(&state.version);
            let opened = self.open(&spec.to_memory()?)?;
            if opened.0.version != state.version {
                bail!(
                    "the archive has changed since it was mounted: it was {}, and is {}",
                    state.version,
                    opened.0.version
                );
            }
            self.mount_opened(opened)?;
        }
        self.report_monitor()
    }

    /// Starts the next process that serves the mount, or connects to it. Mounts of one file system have one: the first that
    /// any of their monitors has found.
    fn start_successor(
        &self,
        is_taken_over: bool,
        may_share: bool,
    ) -> anyhow::Result<ServerProcess> {
        let device = self.mount.as_ref().map(|mount| mount.target.lower_device());
        let job_list = self.job_list.as_ref().filter(|_| is_taken_over);
        let claim = job_list.and_then(|job_list| socket_of_claim(job_list.as_fd()));
        let socket = match (&self.options.daemon, device) {
            _ if claim.is_some() => claim.as_deref().map(DaemonSocket::at),
            (Some(daemon), _) if may_share => Some(daemon.clone()),
            (Some(daemon), Some(device)) if is_taken_over => Some(daemon.of_device(device)),
            _ => None,
        };
        let program = self.program.as_ref();
        match socket.map(|socket| ServerProcess::connect(&socket, program)) {
            Some(Ok(server)) => Ok(server),
            // A process for one mount would keep the others of its file system from the next daemon.
            Some(Err(error))
                if is_disconnection(&error)
                    || job_list.is_some() && may_pass(&error) && self.may_be_shared() =>
            {
                Err(error.into())
            }
            _ => {
                let is_in_foreground = self.options.is_in_foreground;
                Ok(ServerProcess::start(
                    &self.options.spec,
                    is_in_foreground,
                    false,
                )?)
            }
        }
    }

    /// Whether the file system may have other mounts. Overlays that share it have other device numbers.
    fn may_be_shared(&self) -> bool {
        let device = self.mount.as_ref().map(|mount| mount.target.lower_device());
        self.overlay.is_some() || device.is_some_and(tarfs::fuse::has_several_mounts)
    }
}
