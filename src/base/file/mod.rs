//! Attributes of files, on descriptors, without following links, the limit of descriptors, and variables of this program.

mod attributes;
pub(crate) mod chmod;
pub mod descriptor_limit;
pub mod lock;
pub(crate) mod mount_point;
pub(crate) mod own_variables;
pub mod regular_file;
mod syscalls;

pub(crate) use self::attributes::AttributeTarget;
