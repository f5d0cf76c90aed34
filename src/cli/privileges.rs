//! What a process gives up before it begins to work.
//!
//! Capabilities belong to threads: what one gives up, those that it starts afterwards do not have,
//! and those that it started before keep. So this happens while there is one.

use std::ffi::OsString;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_ambient_set, set_capabilities,
    set_no_new_privs,
};

use super::args::SourceArgs;
use super::environment;
use super::layers::LayerArgs;
use super::mount::MountArgs;

/// What a mount needs as long as it lives: to mount and unmount, to list names to the kernel in a
/// copy of the mount and to hand files over to it; and to find mountpoint and archive in directories
/// that other users have closed.
const MOUNT_CAPABILITIES: CapabilitySet =
    CapabilitySet::SYS_ADMIN.union(CapabilitySet::DAC_READ_SEARCH);

/// What `--record` needs besides: its file is renamed in a directory that may be another user's.
const RECORD_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// What `--restart` needs besides for `--metrics` at a low port: who comes after takes it anew.
const RESTART_CAPABILITIES: CapabilitySet = CapabilitySet::NET_BIND_SERVICE;

/// What `--namespace` needs besides: setns(2) changes a thread's root directory, and opening the namespace
/// of a process with more capabilities counts as tracing it.
const NAMESPACE_CAPABILITIES: CapabilitySet =
    CapabilitySet::SYS_CHROOT.union(CapabilitySet::SYS_PTRACE);

/// What `--copy-to` needs besides: to make whatever an archive can hold, whoever owns it.
const COPY_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::MAC_ADMIN);

/// What `--writable` needs besides, and what is copied to its upper directory: the kernel does that with
/// what this process had when it mounted the overlay, whoever writes.
const WRITABLE_CAPABILITIES: CapabilitySet =
    COPY_CAPABILITIES.union(CapabilitySet::LINUX_IMMUTABLE);

/// Gives up every capability that the mount of `args` does not need, for this thread and those that
/// it starts from now on. Who can mount by themselves give up as well what programs could give them
/// that they start (`no_new_privs`); others need fusermount3 for the unmount, which has more than
/// they have.
pub(super) fn drop_capabilities(args: &MountArgs) {
    if let Err(error) = try_drop_capabilities(needed_capabilities(args)) {
        tracing::warn!(%error, "capabilities that are not needed could not be given up");
    }
}

fn try_drop_capabilities(needed: CapabilitySet) -> rustix::io::Result<()> {
    let had = capabilities(None)?;
    let has = restrict(had, ambient_capabilities(), needed);
    set_capabilities(None, has)?;
    if has.effective.contains(CapabilitySet::SYS_ADMIN) {
        set_no_new_privs(true)?;
    }
    Ok(())
}

fn needed_capabilities(args: &MountArgs) -> CapabilitySet {
    let mut needed = MOUNT_CAPABILITIES;
    if args.prefetch.record.is_some() {
        needed |= RECORD_CAPABILITIES;
    }
    if args.copy_to.is_some() {
        needed |= COPY_CAPABILITIES;
    }
    if args.writable {
        needed |= WRITABLE_CAPABILITIES;
    }
    if args.namespace.is_some() {
        needed |= NAMESPACE_CAPABILITIES;
    }
    if args.restart && args.metrics.is_some_and(|address| address.port() < 1024) {
        needed |= RESTART_CAPABILITIES;
    }
    needed
}

/// What programs that are started have at once.
fn ambient_capabilities() -> CapabilitySet {
    // What the kernel does not know is in no set.
    let is_ambient = |one: &CapabilitySet| capability_is_in_ambient_set(*one).unwrap_or(false);
    CapabilitySet::all().iter().filter(is_ambient).collect()
}

/// What is left of `had` for who needs `needed`. Programs that are started inherit nothing, unless
/// that is how this one came by it: who is not root, and was given capabilities of which `ambient` are
/// for its children too, as services are, would have a supervisor and successors without any. The other
/// programs that a mount starts, fusermount3 and fuse-overlayfs, are for who has none. (What is not
/// inheritable the kernel takes out of the ambient set by itself.)
fn restrict(had: CapabilitySets, ambient: CapabilitySet, needed: CapabilitySet) -> CapabilitySets {
    CapabilitySets {
        effective: had.effective & needed,
        permitted: had.permitted & needed,
        inheritable: had.inheritable & ambient & needed,
    }
}

/// Sees to it that no core file is written of a process with secrets and that no other process of its
/// user looks into its memory: where there are headers, or a URL, as servers send secrets along with
/// redirects.
pub(super) fn disable_core_dumps(args: &SourceArgs, layers: &LayerArgs) {
    let mut sources = std::iter::once(&args.source).chain(&layers.layers);
    let is_url = |source: &OsString| source.to_str().is_some_and(|text| text.contains("://"));
    if !sources.any(is_url) && args.headers.is_empty() && environment::headers().is_none() {
        return;
    }
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "a core file of this process would hold its secrets");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
