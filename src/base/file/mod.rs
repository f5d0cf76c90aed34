//! Files and directories: attributes, locks, how they are published and read, and how long they are kept.

mod attributes;
pub mod bounded_read;
pub(crate) mod chmod;
pub mod descriptor_limit;
pub mod directory;
pub(crate) mod foreign_command;
pub mod lock;
pub(crate) mod mount_point;
pub mod publish;
pub(crate) mod random_reads;
pub mod regular_file;
pub(crate) mod retention;
pub mod shared_dir;
mod syscalls;
pub mod trusted_dir;

pub(crate) use self::attributes::AttributeTarget;
