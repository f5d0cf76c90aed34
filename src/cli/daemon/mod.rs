//! The processes of a mount: how they start, report and end.

pub(crate) mod daemon_process;
pub(crate) mod daemonize;
mod fork;
pub(crate) mod inherited_fds;
pub(crate) mod monitor;
pub(crate) mod overlay_dirs;
pub(crate) mod privileges;
mod resident_memory;
mod scope;
pub(crate) mod sd_notify;
pub(crate) mod server_process;
