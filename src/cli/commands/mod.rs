//! The verbs: a file each, with its arguments and its implementation.

pub(crate) mod bundle;
pub(crate) mod cache;
pub(crate) mod cat;
pub(crate) mod daemon;
pub(crate) mod generate;
pub(crate) mod image;
pub(crate) mod index;
pub(crate) mod list;
pub(crate) mod mount;
pub(crate) mod profile;
pub(crate) mod status;
pub(crate) mod umount;
pub(crate) mod verify;
pub(crate) mod write;
