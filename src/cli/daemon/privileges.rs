//! Drops privileges before a process begins to work.
//!
//! This runs while the process has a single thread, because existing threads keep their capabilities.

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_ambient_set, set_capabilities,
    set_no_new_privs,
};

use tarfs::serve::MountSpec;

/// Capabilities that a mount needs for its whole lifetime. It mounts, unmounts, lists names in a clone of the
/// mount, and passes files to the kernel. It must also reach mountpoint and archive in directories that
/// others closed.
const MOUNT_CAPABILITIES: CapabilitySet =
    CapabilitySet::SYS_ADMIN.union(CapabilitySet::DAC_READ_SEARCH);

/// Capabilities for `--record`, which renames a file in a directory of possibly another user.
const RECORD_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// Capabilities for `--metrics` at a low port, which a daemon binds, and a successor again.
const RESTART_CAPABILITIES: CapabilitySet = CapabilitySet::NET_BIND_SERVICE;

/// Capabilities for `--namespace`. setns(2) changes a thread's root directory, and opening the namespace of a
/// process with more capabilities counts as tracing it.
const NAMESPACE_CAPABILITIES: CapabilitySet =
    CapabilitySet::SYS_CHROOT.union(CapabilitySet::SYS_PTRACE);

/// Capabilities for `--copy-to`, which creates all kinds of files of all owners.
const COPY_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::MAC_ADMIN);

/// Capabilities for `--writable`. The kernel copies all writers' files with those of the mounting process.
const WRITABLE_CAPABILITIES: CapabilitySet =
    COPY_CAPABILITIES.union(CapabilitySet::LINUX_IMMUTABLE);

/// Capabilities of a daemon, which serves mounts of all kinds, and of the monitors that start the next one.
const DAEMON_CAPABILITIES: CapabilitySet = MOUNT_CAPABILITIES
    .union(WRITABLE_CAPABILITIES)
    .union(RESTART_CAPABILITIES);

/// The process that another one may start after the death of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Successor {
    None,
    /// A process for the same mount alone.
    OfMount,
    Daemon,
}

/// Drops all capabilities that serving `spec` does not need, or starting `successor`, for this thread and those it starts
/// later.
/// A process that can mount by itself also sets `no_new_privs`. Others need fusermount3 for the unmount,
/// which has more privileges than they have.
pub(crate) fn drop_capabilities(spec: &MountSpec, successor: Successor) {
    try_drop_capabilities(needed_capabilities(spec, successor));
}

/// As [`drop_capabilities`], for a process that serves mounts of all kinds of others.
pub(crate) fn drop_capabilities_of_daemon() {
    try_drop_capabilities(DAEMON_CAPABILITIES);
}

fn try_drop_capabilities(needed: CapabilitySet) {
    let drop = || {
        let had = capabilities(None)?;
        let has = restrict(had, ambient_capabilities(), needed);
        set_capabilities(None, has)?;
        if has.effective.contains(CapabilitySet::SYS_ADMIN) {
            set_no_new_privs(true)?;
        }
        rustix::io::Result::Ok(())
    };
    if let Err(error) = drop() {
        tracing::warn!(%error, "cannot drop unneeded capabilities");
    }
}

fn needed_capabilities(spec: &MountSpec, successor: Successor) -> CapabilitySet {
    let has_low_port = spec.metrics.is_some_and(|address| address.port() < 1024);
    let needs = [
        (spec.prefetch.record.is_some(), RECORD_CAPABILITIES),
        (spec.copy_to.is_some(), COPY_CAPABILITIES),
        (spec.is_writable, WRITABLE_CAPABILITIES),
        (spec.is_in_other_namespace, NAMESPACE_CAPABILITIES),
        (
            successor == Successor::OfMount && has_low_port,
            RESTART_CAPABILITIES,
        ),
        // It serves other mounts, too.
        (successor == Successor::Daemon, DAEMON_CAPABILITIES),
    ];
    let needed = needs.iter().filter(|(is_needed, _)| *is_needed);
    needed.fold(MOUNT_CAPABILITIES, |all, (_, more)| all | *more)
}

/// Returns the ambient set, which started programs have at once.
fn ambient_capabilities() -> CapabilitySet {
    // Capabilities unknown to the kernel are in no set.
    let is_ambient = |one: &CapabilitySet| capability_is_in_ambient_set(*one).unwrap_or(false);
    CapabilitySet::all().iter().filter(is_ambient).collect()
}

/// Returns the part of `had` that is `needed`. Started programs inherit only the `ambient` set, by which a
/// service that is not root passes its capabilities to monitors and successors. fusermount3 and
/// fuse-overlayfs are only for processes without capabilities. The kernel removes capabilities that are not
/// inheritable from the ambient set.
fn restrict(had: CapabilitySets, ambient: CapabilitySet, needed: CapabilitySet) -> CapabilitySets {
    CapabilitySets {
        effective: had.effective & needed,
        permitted: had.permitted & needed,
        inheritable: had.inheritable & ambient & needed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::{self, Verb};
    use crate::cli::open_archive;

    // Promises: privilege-kept
    #[test]
    fn each_mount_flag_keeps_the_capabilities_it_needs() {
        let none = CapabilitySet::empty();
        for (flags, more) in [
            (&[][..], none),
            (&["--record", "profile"], CapabilitySet::DAC_OVERRIDE),
            (&["--copy-to", "copy"], COPY_CAPABILITIES),
            (
                &["--writable"],
                COPY_CAPABILITIES | CapabilitySet::LINUX_IMMUTABLE,
            ),
            (
                &["--namespace", "1"],
                CapabilitySet::SYS_CHROOT | CapabilitySet::SYS_PTRACE,
            ),
            (
                &["--restart", "--metrics", "127.0.0.1:80"],
                CapabilitySet::NET_BIND_SERVICE,
            ),
            (&["--restart", "--metrics", "127.0.0.1:8080"], none),
            (&["--metrics", "127.0.0.1:80"], none),
        ] {
            let words = [&["tarfs", "mount"], flags, &["a.tar", "/mnt"]].concat();
            let verb = command_line::parse(words.into_iter().map(Into::into));
            let Ok(Verb::Mount(args)) = verb else {
                panic!("{flags:?}");
            };
            let spec = open_archive::mount_spec(&args).expect("valid");
            let expected = CapabilitySet::SYS_ADMIN | CapabilitySet::DAC_READ_SEARCH | more;
            let successor = if args.restart {
                Successor::OfMount
            } else {
                Successor::None
            };
            assert_eq!(needed_capabilities(&spec, successor), expected, "{flags:?}");
            let kept = needed_capabilities(&spec, Successor::Daemon);
            let of_daemon = CapabilitySet::NET_BIND_SERVICE | CapabilitySet::LINUX_IMMUTABLE;
            assert!(kept.contains(expected | of_daemon), "{flags:?}: {kept:?}");
        }
    }

    // Promises: privilege-kept, privilege-same
    #[test]
    fn unneeded_capabilities_are_dropped_and_none_added() {
        let had = CapabilitySets {
            effective: CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_BOOT,
            permitted: MOUNT_CAPABILITIES | CapabilitySet::SYS_BOOT,
            inheritable: CapabilitySet::SYS_ADMIN,
        };
        let has = restrict(
            had,
            CapabilitySet::empty(),
            MOUNT_CAPABILITIES | COPY_CAPABILITIES,
        );
        assert_eq!(has.effective, CapabilitySet::SYS_ADMIN);
        assert_eq!(has.permitted, MOUNT_CAPABILITIES);
        assert_eq!(has.inheritable, CapabilitySet::empty());
        let had = CapabilitySets {
            inheritable: CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_BOOT,
            ..had
        };
        let ambient = CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_BOOT;
        let has = restrict(had, ambient, MOUNT_CAPABILITIES | COPY_CAPABILITIES);
        assert_eq!(has.inheritable, CapabilitySet::SYS_ADMIN);
    }
}
