//! The process that serves a mount: how it starts, reports and ends.

pub(crate) mod access_profile;
pub(crate) mod control_socket;
pub(crate) mod daemonize;
pub(crate) mod inherited_fds;
pub(crate) mod metrics_server;
pub(crate) mod opened_archive;
pub(crate) mod overlay_dirs;
pub(crate) mod prefetch;
pub(crate) mod privileges;
pub(crate) mod prometheus;
pub(crate) mod scratch_dir;
pub(crate) mod sd_notify;
pub(crate) mod supervisor;
