//! Events that the serving process handles: requests, signals, and the end of the scan or the mount.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};

use anyhow::Context;
use signal_hook::iterator::{Handle, Signals};
use tokio::sync::oneshot;

use super::process_mode::{ProcessMode, report_scan_end};
use crate::cli::commands::status as status_text;
use crate::cli::daemon::overlay_dirs::OverlayDirs;
use crate::cli::daemon::sd_notify::{self, ServiceManager};
use crate::cli::ui::{cleanup_on_signal, panic_hook};
use tarfs::fuse::{Force, Mount, UnmountError};
use tarfs::internal::error_chain::error_chain;
use tarfs::internal::thread::Thread;
use tarfs::serve::{Phase, Request, Response, ServedMount, Status};

type ResponseFn = Box<dyn FnOnce(Response) + Send>;

/// An event that the serving process handles.
pub(super) enum Event {
    Signal,
    /// The scan ended, or there was none.
    ScanEnded,
    Request(Request, ResponseFn),
    MountEnded,
}

/// State of the serving process.
struct ServeState<'a> {
    mount: &'a ServedMount,
    /// URL of the metrics.
    metrics: Option<&'a str>,
    manager: Option<ServiceManager>,
    /// Whether damaged members were reported before the process left the terminal.
    is_reported: bool,
}

/// Leaves the terminal as `mode` says, and handles events until the mount is gone. On an error, drops `inbox`
/// first, because the control socket would wait for a client, and the client for a response.
pub(super) fn handle_events(
    inbox: Receiver<Event>,
    mode: ProcessMode,
    (mount, writable, metrics): (&ServedMount, Option<&OverlayDirs>, Option<&str>),
) -> anyhow::Result<()> {
    let state = ServeState {
        mount,
        metrics,
        is_reported: mode.report_to_terminal(&mount.opened),
        manager: mode.enter()?,
    };
    tracing::info!(
        source = mount.opened.location,
        mountpoint = %mount.mount.target.mountpoint.display(),
        "mounted"
    );
    let has_ended = event_loop(inbox, &state);
    if let (true, Some(writable)) = (has_ended, writable) {
        writable.mark_lower_ended();
    }
    if let Some(manager) = &state.manager {
        manager.notify("STOPPING=1");
    }
    tracing::info!("unmounted");
    Ok(())
}

/// Handles events until the mount is gone, then refuses the others. Returns whether the connection ended.
#[expect(clippy::needless_pass_by_value, reason = "its end is part of the job")]
fn event_loop(inbox: Receiver<Event>, state: &ServeState<'_>) -> bool {
    let mount = &state.mount.mount;
    let mut signal_force = Force::No;
    while let Some(event) = next_event(&inbox, state) {
        match event {
            Event::MountEnded => return true,
            Event::ScanEnded => {
                if !state.is_reported {
                    report_scan_end(&state.mount.opened);
                }
                if state.mount.start_copy().is_err() {
                    tracing::debug!("no copy; the status shows the reason");
                }
            }
            Event::Request(Request::Status, answer) => {
                let panics = &state.mount.opened.stats.panics;
                panics.record_max(panic_hook::count());
                let status = state.mount.status(state.metrics);
                answer(Response::Status(Box::new(status)));
            }
            Event::Request(Request::Index, answer) => answer(index_response(state)),
            Event::Request(Request::Umount { force }, answer) => {
                let force = if force { Force::Yes } else { Force::No };
                let result = mount.unmount(force);
                answer(umount_response(mount, &result, force));
                if result.is_ok() && force == Force::Yes && !mount.is_mounted() {
                    return false;
                }
            }
            Event::Signal => match mount.unmount(signal_force) {
                // The unmount arrives as an event. After a forced one, a user may keep the mount alive.
                Ok(()) if signal_force == Force::No => {}
                Ok(()) | Err(UnmountError::NotMounted(_)) => return false,
                Err(error) if signal_force == Force::No => {
                    tracing::warn!(%error, "still mounted; a second signal unmounts anyway");
                    signal_force = Force::Yes;
                }
                Err(error) => {
                    // The mount ends with its connection. The supervisor unmounts what is left.
                    tracing::error!(%error, "cannot unmount; this process ends anyway");
                    return false;
                }
            },
        }
    }
    false
}

/// Returns the next event, or `None` without senders. Meanwhile reports progress to the service manager.
fn next_event(inbox: &Receiver<Event>, state: &ServeState<'_>) -> Option<Event> {
    let Some(manager) = &state.manager else {
        return inbox.recv().ok();
    };
    loop {
        let index = state.mount.opened.index();
        let location = &state.mount.opened.location;
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

/// The index, if it is complete and says all that the mount shows.
fn index_response(state: &ServeState<'_>) -> Response {
    match state.mount.shown_index() {
        Some(index) => Response::Index(index),
        None => Response::Error {
            error: "the mount shows something else than a complete index".to_owned(),
            hint: None,
        },
    }
}

fn umount_response(mount: &Mount, result: &Result<(), UnmountError>, force: Force) -> Response {
    match result {
        Ok(()) => Response::Unmounted {
            unmounted: mount.target.mountpoint.to_string_lossy().into_owned(),
            elsewhere: mount.is_mounted() || force == Force::No && mount.is_still_in_use(),
        },
        Err(error) => Response::Error {
            hint: error.hint().map(str::to_owned),
            error: error_chain(error),
        },
    }
}

pub(super) fn send_and_wait(events: &Sender<Event>, request: Request) -> Response {
    let (sender, answer) = mpsc::sync_channel(1);
    let taken = Box::new(move |response| {
        if sender.send(response).is_err() {
            tracing::debug!("the client is gone");
        }
    });
    send_event(events, Event::Request(request, taken));
    answer.recv().unwrap_or_else(|_| Response::Error {
        error: "the mount is being unmounted already".to_owned(),
        hint: None,
    })
}

/// Like [`send_and_wait`] for a status, without a blocked thread. The channel closes if there is no response.
pub(super) fn request_status(events: &Sender<Event>) -> oneshot::Receiver<Status> {
    let (sender, status) = oneshot::channel();
    let taken = Box::new(move |answer| {
        if let Response::Status(status) = answer
            && sender.send(*status).is_err()
        {
            tracing::debug!("the client is gone");
        }
    });
    send_event(events, Event::Request(Request::Status, taken));
    status
}

pub(super) fn send_event(events: &Sender<Event>, event: Event) {
    if events.send(event).is_err() {
        tracing::debug!("the serving thread has ended already");
    }
}

/// Turns signals into events until it is dropped.
pub(super) struct SignalWatch {
    handle: Handle,
    _thread: Thread<()>,
}

impl SignalWatch {
    pub(super) fn start(events: Sender<Event>) -> anyhow::Result<Self> {
        let signals = Signals::new(cleanup_on_signal::termination_signals());
        let mut signals = signals.context("cannot watch for signals")?;
        let handle = signals.handle();
        let thread = Thread::spawn("tarfs-signals", move || {
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
