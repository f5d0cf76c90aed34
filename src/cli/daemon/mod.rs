//! The process that serves a mount: how it starts, reports and ends.

pub(crate) mod daemonize;
pub(crate) mod inherited_fds;
pub(crate) mod overlay_dirs;
pub(crate) mod privileges;
pub(crate) mod scratch_dir;
pub(crate) mod sd_notify;
pub(crate) mod supervisor;
