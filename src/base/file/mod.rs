//! Attributes of files, on descriptors, without following links.

mod attributes;
pub(crate) mod chmod;
pub(crate) mod mount_point;
pub mod regular_file;
mod syscalls;

pub(crate) use self::attributes::AttributeTarget;
