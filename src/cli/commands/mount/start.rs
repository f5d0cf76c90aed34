//! The mount itself, its overlay and its supervisor.

use std::os::fd::AsFd;

use crate::cli::args::MountArgs;
use crate::cli::daemon::overlay_dirs::{self, OverlayDirs};
use crate::cli::daemon::supervisor::{SupervisorLink, TakeoverState};
use crate::cli::environment::{self, Role};
use tarfs::fuse::{InheritedSession, NewMount, OpenNamespace, supports_takeover};
use tarfs::serve::{MountCopy, MountOrigin, MountSpec, Opened, ServedMount};

/// Makes or takes over the mount, and reports to the supervisor that it is ready.
pub(super) fn make_mount(
    args: &MountArgs,
    spec: &MountSpec,
    opened: Opened,
    (namespace, writable, copy): (
        Option<OpenNamespace>,
        Option<&OverlayDirs>,
        Option<MountCopy>,
    ),
    takeover: Option<TakeoverState>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<(Option<SupervisorLink>, ServedMount)> {
    let view = spec.view(&*opened.volume)?;
    let (supervisor, session) = connect_supervisor(&opened, takeover)?;
    let place = if let Some(session) = session {
        MountOrigin::Inherited(session)
    } else {
        overlay_dirs::ensure_restart_possible(args, writable.is_none() || opened.is_strong)?;
        let lower = writable.map(|writable| writable.create_lower_dir(supervisor.as_ref()));
        let lower = lower.transpose()?;
        let at = lower.as_deref().unwrap_or(&args.mountpoint);
        let mount = match &namespace {
            Some(namespace) => {
                NewMount::in_namespace((namespace, at), &opened.name, &spec.own_options())?
            }
            None => NewMount::on(at, &opened.name, &spec.own_options())?,
        };
        if let Some(supervisor) = &supervisor {
            supervisor.report_mounted(&mount.target, mount.device.as_fd());
        }
        MountOrigin::New(mount)
    };
    let is_new = matches!(place, MountOrigin::New(_));
    let mut mount = ServedMount::start(spec, (opened, view), copy, place, ended)?;
    if let Some(writable) = writable {
        if is_new {
            let is_possible = supports_takeover(mount.mount.capabilities);
            overlay_dirs::ensure_restart_possible(args, is_possible)?;
            writable.mount_overlay(
                &mut mount.mount,
                &mount.opened.name,
                &args.mountpoint,
                &spec.options,
                supervisor.as_ref(),
            )?;
        } else {
            writable.mark_adopted();
        }
        mount.overlay = Some(writable.status(&mount.mount));
    }
    if let Some(supervisor) = &supervisor {
        let (mount, opened) = (&mount.mount, &mount.opened);
        let state = (mount.capabilities, &*opened.version, opened.is_strong);
        supervisor.report_ready(state, mount.end.as_ref());
    }
    Ok((supervisor, mount))
}

/// Starts or inherits the supervisor. Returns it with the session to take over, if there is one.
fn connect_supervisor(
    opened: &Opened,
    takeover: Option<TakeoverState>,
) -> anyhow::Result<(Option<SupervisorLink>, Option<InheritedSession>)> {
    let Some(takeover) = takeover else {
        let supervisor = match environment::role() {
            Some(Role::SupervisedWorker) => SupervisorLink::from_stdin(),
            _ => SupervisorLink::spawn(),
        };
        let supervisor = supervisor.inspect_err(
            |error| tracing::warn!(%error, "no supervisor; a crash will leave a dead mount"),
        );
        return Ok((supervisor.ok(), None));
    };
    takeover.ensure_version(&opened.version)?;
    Ok((Some(takeover.supervisor), takeover.session))
}
