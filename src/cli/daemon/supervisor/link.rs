//! The worker's side of its connection to the supervisor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::net::SendFlags;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::process::{self, Output, dup_stdin};
use super::protocol::{self, Packet, SessionState};
use crate::cli::daemon::sd_notify::ServiceManager;
use crate::cli::environment::Role;
use tarfs::Stats;
use tarfs::fuse::{InheritedSession, MountTarget, SuperblockWatch};
use tarfs::internal::periodic::PeriodicThread;

/// Interval at which a successor checks whether the source is reachable.
const REACHABILITY_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum length of a version that is sent unchanged, in bytes.
const MAX_VERSION_BYTES: usize = 4096;

#[derive(Debug)]
pub(crate) struct SupervisorLink {
    socket: OwnedFd,
}

/// State that a successor receives from the supervisor.
#[derive(Debug)]
pub(crate) struct TakeoverState {
    pub(crate) supervisor: SupervisorLink,
    /// The session to take over, or `None` if the successor must mount again.
    pub(crate) session: Option<InheritedSession>,
    /// The version to serve, or the digest of a long version.
    pub(crate) version: String,
    pub(crate) scratch: Option<PathBuf>,
}

impl TakeoverState {
    /// Checks that `version` is the one that the mount has shown, or fails because the archive has changed.
    pub(crate) fn ensure_version(&self, version: &str) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.version == version_for_packet(version),
            "the archive has changed since it was mounted: it was {}, and is {version}",
            self.version
        );
        Ok(())
    }
}

/// Returns a version that fits into a packet; that of a thousand layers is long.
fn version_for_packet(version: &str) -> String {
    if version.len() <= MAX_VERSION_BYTES {
        return version.to_owned();
    }
    format!("sha256:{}", tarfs::Sha256::of(version.as_bytes()))
}

impl SupervisorLink {
    /// Returns the link to the supervisor that started this process.
    pub(crate) fn from_stdin() -> io::Result<Self> {
        Ok(Self {
            socket: dup_stdin()?,
        })
    }

    /// Returns the service manager behind the supervisor.
    pub(crate) fn service_manager() -> Option<ServiceManager> {
        let socket = dup_stdin().ok()?;
        // A stopped supervisor must not block the mount.
        ServiceManager::with_transport(move |text| {
            let packet = Packet::Notify(text.to_owned());
            protocol::send(&socket, &packet, None, SendFlags::DONTWAIT)
        })
    }

    /// Starts a supervisor for the mount that this process is about to make.
    pub(crate) fn spawn() -> io::Result<Self> {
        let (ours, theirs) = protocol::pair()?;
        process::spawn_self(Role::Supervisor, theirs, None, Output::Null)?;
        Ok(Self { socket: ours })
    }

    /// Receives the state from the supervisor that started this process, or fails if that is gone.
    pub(crate) fn receive_takeover() -> anyhow::Result<TakeoverState> {
        let socket = dup_stdin()?;
        let Some((Packet::TakeOver(target, state, scratch), descriptor)) =
            protocol::receive(&socket)?
        else {
            anyhow::bail!("the supervisor sent no mount to take over");
        };
        Ok(TakeoverState {
            supervisor: Self { socket },
            session: descriptor.map(|descriptor| InheritedSession {
                target,
                descriptor,
                capabilities: state.capabilities,
            }),
            version: state.version,
            scratch: scratch.map(PathBuf::from),
        })
    }

    pub(crate) fn report_mounted(&self, target: &MountTarget, device: BorrowedFd<'_>) {
        self.send(&Packet::Mounted(target.clone()), Some(device));
    }

    /// Reports the overlay over the mount, with a watch for its end.
    pub(crate) fn report_overlay(&self, target: &MountTarget, watch: Option<&SuperblockWatch>) {
        self.send(
            &Packet::OverlayMounted(target.clone()),
            watch.map(|watch| watch.0.as_fd()),
        );
    }

    pub(crate) fn report_scratch_dir(&self, directory: &Path) {
        self.send(&Packet::ScratchDir(directory.into()), None);
    }

    /// Reports the state that a successor must have, and a watch for the end of the mount.
    pub(crate) fn report_ready(
        &self,
        (capabilities, version, is_strong): (u64, &str, bool),
        end: Option<&SuperblockWatch>,
    ) {
        let state = SessionState {
            capabilities,
            version: version_for_packet(version),
            is_strong,
        };
        self.send(&Packet::Ready(state), end.map(|end| end.0.as_fd()));
    }

    /// Reports how long the source of `stats` is unreachable, until the returned value is dropped.
    pub(crate) fn watch_reachability(&self, stats: &Arc<Stats>) -> io::Result<PeriodicThread> {
        let socket = self.socket.try_clone()?;
        let stats = Arc::clone(stats);
        let mut unreachable_time = Duration::ZERO;
        let (mut received, mut looked) = (stats.source_read_bytes.get(), Instant::now());
        PeriodicThread::start("tarfs-reach", REACHABILITY_INTERVAL, move |is_last| {
            let before = std::mem::replace(&mut received, stats.source_read_bytes.get());
            let since = std::mem::replace(&mut looked, Instant::now());
            if !is_last && received == before && stats.unreachable_reads.get() > 0 {
                unreachable_time += looked - since;
                let milliseconds = u64::try_from(unreachable_time.as_millis()).unwrap_or(u64::MAX);
                // May be lost, because the next packet includes this time.
                let packet = Packet::Unreachable(milliseconds);
                drop(protocol::send(&socket, &packet, None, SendFlags::DONTWAIT));
            }
        })
    }

    /// Reports that this process failed because the source is unreachable.
    pub(crate) fn report_unreachable(&self) {
        self.send(&Packet::Unreachable(u64::MAX), None);
    }

    fn send(&self, packet: &Packet, device: Option<BorrowedFd<'_>>) {
        if let Err(error) = protocol::send(&self.socket, packet, device, SendFlags::empty()) {
            tracing::warn!(%error, "lost the supervisor; a crash will leave a dead mount");
        }
    }
}

/// Makes this process the worker of a supervisor in the foreground, or fails if that is gone already. Signals
/// from a terminal reach only the supervisor. If it is killed, this process unmounts if it can.
pub(crate) fn follow_supervisor() -> anyhow::Result<()> {
    rustix::process::setsid().context("cannot begin a session")?;
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the supervisor")?;
    let supervisor = rustix::net::sockopt::socket_peercred(io::stdin())?.pid;
    anyhow::ensure!(getppid() == Some(supervisor), "the supervisor is gone");
    Ok(())
}
