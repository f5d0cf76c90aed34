//! Attributes of files, on descriptors, without following links, and the limit of descriptors.

mod attributes;
pub(crate) mod chmod;
pub mod descriptor_limit;
pub mod lock;
pub(crate) mod mount_point;
pub mod regular_file;
mod syscalls;

pub(crate) use self::attributes::AttributeTarget;
