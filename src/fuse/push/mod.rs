//! Pushing into the kernel's caches, before a caller asks and when attributes change.

mod dentries;
mod kernel_cache;
mod mount_root;
mod priming_dir;

pub(super) use kernel_cache::KernelCache;
pub(super) use mount_root::MountRoot;
pub(super) use priming_dir::PrimingDir;
