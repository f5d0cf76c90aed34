//! The mount itself, its overlay and its supervisor.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use super::copy::MountCopy;
use crate::cli::args::MountArgs;
use crate::cli::daemon::opened_archive::OpenedArchive;
use crate::cli::daemon::overlay_dirs::{self, OverlayDirs};
use crate::cli::daemon::supervisor::{SupervisorLink, TakeoverState};
use crate::cli::environment::{self, Role};
use tarfs::archive::directory::ArchiveDirectory;
use tarfs::fuse::{
    InheritedSession, Mount, MountOptions, NewMount, OpenNamespace, Subtree, TarFilesystem,
    supports_takeover,
};

/// Extra time for a reply beyond the source's timeout, so that the source's error ends the read first.
const REPLY_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Makes or takes over the mount, and reports to the supervisor that it is ready.
pub(super) fn make_mount(
    args: &MountArgs,
    opened: &OpenedArchive,
    view: Subtree,
    (options, namespace, writable): (&MountOptions, Option<OpenNamespace>, Option<&OverlayDirs>),
    takeover: Option<TakeoverState>,
    copy: Option<&MountCopy>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<(Option<SupervisorLink>, Mount)> {
    // `options` are for the FUSE mount, and `overlay_options` for the overlay over it, if there is one.
    let overlay_options = options;
    let options = &match writable {
        Some(_) => overlay_dirs::lower_options(options),
        None => options.clone(),
    };
    let tree = build_filesystem(args, opened, view, options, copy)?;
    let (supervisor, session) = connect_supervisor(opened, takeover)?;
    let mount = if let Some(session) = session {
        let mount = Mount::take_over(tree, &session, ended)?;
        if let Some(writable) = writable {
            writable.mark_adopted();
        }
        mount
    } else {
        let (tree, namespace) = ((tree, options), namespace.as_ref());
        let writable = writable.map(|writable| (writable, overlay_options));
        start_mount(
            args,
            opened,
            tree,
            namespace,
            writable,
            supervisor.as_ref(),
            ended,
        )?
    };
    if let Some(supervisor) = &supervisor {
        let state = (mount.capabilities, &*opened.version, opened.is_strong);
        supervisor.report_ready(state, mount.end.as_ref());
    }
    Ok((supervisor, mount))
}

fn build_filesystem(
    args: &MountArgs,
    opened: &OpenedArchive,
    view: Subtree,
    options: &MountOptions,
    copy: Option<&MountCopy>,
) -> anyhow::Result<TarFilesystem> {
    let (content, stats) = (Arc::clone(&opened.content), Arc::clone(&opened.stats));
    let timeout = Duration::from_secs(args.source.timeout) + REPLY_TIMEOUT_MARGIN;
    let mut tree = TarFilesystem::new(content, view, options, stats)
        .with_timeout(timeout)
        .with_xattrs(args.xattrs.filter());
    if args.source.allow_truncated {
        tree = tree.for_truncated();
    }
    if args.writable {
        tree = tree.for_overlay();
    }
    if let Some(archives) = &opened.directory {
        let archives = Arc::clone(archives) as Arc<dyn ArchiveDirectory>;
        let idle_timeout = Duration::from_secs(args.idle_timeout);
        let tree = tree.with_archives(archives, idle_timeout);
        return tree.context("cannot start a thread");
    }
    match copy {
        Some(copy) => tree
            .with_backing_files(copy.backing_files())
            .context("cannot start a thread"),
        None => Ok(tree),
    }
}

/// Mounts `tree`, in another mount namespace if one is given, and an overlay over it if it is `writable`.
fn start_mount(
    args: &MountArgs,
    opened: &OpenedArchive,
    (tree, options): (TarFilesystem, &MountOptions),
    namespace: Option<&OpenNamespace>,
    writable: Option<(&OverlayDirs, &MountOptions)>,
    supervisor: Option<&SupervisorLink>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Mount> {
    let serve = |mount: NewMount| {
        if let Some(supervisor) = supervisor {
            supervisor.report_mounted(&mount.target, mount.device.as_fd());
        }
        Mount::serve(tree, mount, ended)
    };
    let (at, source) = (&args.mountpoint, &opened.name);
    if let Some(namespace) = namespace {
        let at = (namespace, at.as_path());
        return Ok(serve(NewMount::in_namespace(at, source, options)?)?);
    }
    let Some((writable, overlay_options)) = writable else {
        return Ok(serve(NewMount::on(at, source, options)?)?);
    };
    overlay_dirs::ensure_restart_possible(args, opened.is_strong)?;
    let lower = writable.create_lower_dir(supervisor)?;
    let mut mount = serve(NewMount::on(&lower, source, options)?)?;
    overlay_dirs::ensure_restart_possible(args, supports_takeover(mount.capabilities))?;
    writable.mount_overlay(&mut mount, source, at, overlay_options, supervisor)?;
    Ok(mount)
}

/// Starts or inherits the supervisor. Returns it with the session to take over, if there is one.
fn connect_supervisor(
    opened: &OpenedArchive,
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
