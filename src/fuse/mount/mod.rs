//! Mounts: how one is made, found, taken over and unmounted.

mod mountinfo;
mod namespace;
mod options;
mod overlay;
mod pinned;
mod session;
mod superblock;
mod syscalls;
mod takeover;

pub use mountinfo::{Attachment, TopMount};
pub use namespace::{Namespace, OpenNamespace};
pub use options::{MountOptions, OptionError};
pub use overlay::{LOWER_DIR_NAME, OverlayKind, SCRATCH_PREFIX, UpperDirs, unmount_dead_overlay};
pub use session::{
    Force, Mount, canonical_mountpoint, clear_dead_mounts, is_mounted, is_still_mounted, top_mount,
    unmount, unmount_bind_mount,
};
pub use superblock::SuperblockWatch;
pub use syscalls::{MountError, UnmountError, unmount_dead};
pub use takeover::{InheritedSession, MountTarget, supports_takeover};
