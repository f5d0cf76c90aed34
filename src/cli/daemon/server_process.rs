//! The process that serves one mount, for the monitor that has started it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::stdio::dup2_stdout;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::daemonize::{self, LogTarget};
use super::inherited_fds::InheritedFds;
use super::overlay_dirs;
use super::privileges::{self, Successor};
use crate::cli::ui::{cleanup_on_signal, logging, output, panic_hook};
use tarfs::fuse::{Force, SuperblockWatch};
use tarfs::internal::sync::Mutex;
use tarfs::internal::thread::Thread;
use tarfs::locate;
use tarfs::serve::{
    ControlSocket, FirstRequest, Link, MountRequest, Opened, Phase, Process, Server,
};

/// Timeout for the threads to exit after the last unmount.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_millis(2500);

/// Serves the mount of the monitor whose link is standard output.
pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let inherited = InheritedFds::collect();
    inherited.set_cloexec();
    follow_monitor()?;
    let link = Link::from(rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3)?);
    dup2_stdout(File::open("/dev/null")?)?;
    // Signals from a terminal reach only the monitor.
    rustix::process::setsid().context("cannot begin a session")?;
    crate::cli::malloc::return_freed_memory();
    let Some((request, log)) = receive(&link) else {
        return Ok(ExitCode::FAILURE);
    };
    let network = locate::start_network().context("cannot start the network")?;
    let alone = Arc::new(Alone {
        inherited: Mutex::new(inherited),
        log: Mutex::new(log),
        runtime_dir: (&request.spec.runtime_dir).into(),
        server: OnceLock::new(),
        control: Mutex::default(),
    });
    let process = ThisProcess::OfMount(Arc::clone(&alone));
    let server = Server::new(network.handle().clone(), process);
    drop(alone.server.set(Arc::downgrade(&server)));
    watch_signals(&server)?;
    let mount = server.serve(&Arc::new(link), request);
    let is_done = mount.is_some();
    if let Some(mount) = &mount {
        mount.close();
    }
    force_exit_in_time();
    drop(alone.control.lock().take());
    // No caller is left to wait for requests in flight, such as those of a scan.
    network.shutdown_background();
    // Joins the threads of copy and scans, which do not wait for a server any more.
    drop((server, mount));
    Ok(if is_done {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Receives the request, and gives up the rights that it does not need, before any thread starts. `None` after a failure,
/// which the monitor reports.
fn receive(link: &Link) -> Option<(MountRequest, LogTarget)> {
    let received = FirstRequest::receive(link).and_then(|received| {
        let Some(FirstRequest::Mount(mut request, log)) = received else {
            return Ok(None);
        };
        let log = LogTarget::of(log);
        if log.file().is_some() || !request.spec.ends_with_monitor {
            log.start_copying();
        }
        request.prepare()?;
        privileges::drop_capabilities(&request.spec, Successor::None);
        Ok(Some((*request, log)))
    });
    received.unwrap_or_else(|failure| {
        link.report_failure(failure);
        None
    })
}

/// If the monitor is killed, this process unmounts if it can. Fails if the monitor is gone already.
fn follow_monitor() -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the monitor")?;
    let monitor = rustix::net::sockopt::socket_peercred(std::io::stdout())?.pid;
    ensure!(getppid() == Some(monitor), "the monitor is gone");
    Ok(())
}

/// Unmounts at the first signal what is idle, and at a second one all by force. Without a mount, the process ends.
fn watch_signals(server: &Arc<Server>) -> anyhow::Result<()> {
    const FAILED: &str = "cannot watch for signals";
    let mut signals = Signals::new(cleanup_on_signal::termination_signals()).context(FAILED)?;
    let server = Arc::downgrade(server);
    let thread = Thread::spawn("tarfs-signals", move || {
        let mut force = Force::No;
        for signal in signals.forever() {
            let server = server.upgrade();
            let server = server.filter(|server| server.is_used());
            let Some(server) = server else {
                // There is nothing to clean up. Otherwise the end of a monitor is known by its link.
                drop(emulate_default_handler(signal));
                return;
            };
            server.unmount_all(force);
            force = Force::Yes;
        }
    });
    // It ends with the process.
    std::mem::forget(thread.context(FAILED)?);
    Ok(())
}

/// Ends the process successfully after [`THREAD_EXIT_TIMEOUT`]. That may cut off the output of threads, like a kill.
#[expect(
    clippy::exit,
    reason = "threads that do not end cannot be ended by returning"
)]
pub(super) fn force_exit_in_time() {
    let thread = Thread::spawn("tarfs-deadline", move || {
        std::thread::sleep(THREAD_EXIT_TIMEOUT);
        tracing::warn!(
            timeout = ?THREAD_EXIT_TIMEOUT,
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

/// Reports the end of the scan of `opened` to the user.
fn report_scan_end(opened: &Opened) {
    if let Some(failure) = opened.index().failure {
        tracing::error!(
            failure,
            "indexing failed; files that were not indexed yet are unavailable"
        );
    }
    debug_assert_ne!(opened.index().phase, Phase::Scanning, "it is over");
    let (members, named) = opened.damage();
    if members == 0 {
        return;
    }
    let is_logged = opened.layers.is_empty() && opened.stats.scans.get() > 0;
    if !is_logged {
        for member in &named {
            tracing::warn!("{member}");
        }
    }
    let count = output::format_damaged_members(members);
    tracing::warn!("{count}; `tarfs status` names the first ones");
}

/// The parts of this process that its monitors control.
pub(super) enum ThisProcess {
    /// Those of a process for one mount.
    OfMount(Arc<Alone>),
    /// That of a daemon, with its socket.
    Daemon(PathBuf),
}

/// The parts of a process that serves one mount, and has what is its monitor's.
pub(super) struct Alone {
    inherited: Mutex<InheritedFds>,
    log: Mutex<LogTarget>,
    /// Directory of the control socket.
    runtime_dir: PathBuf,
    server: OnceLock<Weak<Server>>,
    control: Mutex<Option<ControlSocket>>,
}

impl Alone {
    fn settle(&self, in_background: bool) {
        let control = self.server.get().and_then(Weak::upgrade).map(|server| {
            ControlSocket::serve(&self.runtime_dir, move |request| server.respond(&request))
        });
        match control.transpose() {
            Ok(control) => *self.control.lock() = control,
            Err(error) => tracing::warn!(%error, "no control socket, so no `tarfs status`"),
        }
        logging::never_block();
        let log = self.log.lock();
        if !in_background {
            log.redirect();
            return;
        }
        if let Err(error) = set_parent_process_death_signal(None) {
            tracing::error!(%error, "cannot stay in the background");
        }
        let inherited = std::mem::take(&mut *self.inherited.lock());
        let left = daemonize::detach(&log, inherited).and_then(|()| std::env::set_current_dir("/"));
        if let Err(error) = left {
            tracing::error!(%error, "cannot leave the terminal");
        }
    }
}

impl Process for ThisProcess {
    fn settle(&self, in_background: bool) {
        if let Self::OfMount(alone) = self {
            alone.settle(in_background);
        }
    }

    fn unmount_abandoned(&self, mountpoint: &Path, scratch: &Path) {
        overlay_dirs::unmount_abandoned(mountpoint, scratch);
    }

    fn remove_scratch(
        &self,
        scratch: &Path,
        end: Option<&SuperblockWatch>,
        timeout: Option<Duration>,
    ) {
        overlay_dirs::remove_scratch_after(scratch, end, timeout);
    }

    fn report_scan_end(&self, opened: &Opened) {
        report_scan_end(opened);
    }

    fn socket(&self) -> Option<&Path> {
        match self {
            Self::OfMount(_) => None,
            Self::Daemon(socket) => Some(socket),
        }
    }

    fn panic_count(&self) -> u64 {
        panic_hook::count()
    }
}
