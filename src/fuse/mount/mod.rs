//! Mounts: how one is made, found, taken over and unmounted.

mod error;
mod mountinfo;
mod namespace;
mod new_mount;
mod options;
mod overlay;
mod pinned;
mod served_file_system;
mod session;
mod superblock;
mod syscalls;
mod takeover;
mod target;

pub use error::{MountError, UnmountError};
pub use mountinfo::{CurrentMount, TopMount, canonical_mountpoint, has_several_mounts, top_mount};
pub use namespace::{Namespace, OpenNamespace};
pub use new_mount::NewMount;
pub use options::{MountOptions, OptionError};
pub use overlay::{LOWER_DIR_NAME, OverlayKind, SCRATCH_PREFIX, UpperDirs};
pub use pinned::Liveness;
pub use session::{
    Force, Mount, clear_dead_mounts, is_mounted, is_still_mounted, mount_overlay, unmount,
    unmount_bind_mount, unmount_dead_mounts,
};
pub use superblock::SuperblockWatch;
pub use syscalls::unmount_dead;
pub use takeover::{InheritedSession, kernel_supports_takeover, supports_takeover};
pub use target::MountTarget;
