//! Serving: mounts, the trees that they share, and what other processes ask about them.

pub mod access_profile;
mod control_socket;
mod copy;
mod daemon;
mod failure;
mod link;
mod metrics_server;
mod mount_spec;
mod opened;
mod prefetch;
mod prometheus;
mod runtime_dir;
mod server;
mod source_variables;
mod status;
mod volumes;

pub use control_socket::{
    ControlSocket, Request, Response, SocketPeers, UmountOutcome, find_status, list_statuses,
    request_index, request_umount, wait_for_exit,
};
pub use copy::MountCopy;
pub use daemon::{Daemon, DaemonSocket};
pub use failure::Failure;
pub use link::{Link, OpenedTree, Packet, SessionState, Taken};
pub use metrics_server::MetricsListener;
pub use mount_spec::MountSpec;
pub use opened::Opened;
pub use prefetch::PrefetchSpec;
pub use prometheus::{Figure, figures};
pub use runtime_dir::{RUNTIME_DIR, SYSTEM_RUNTIME_DIR, runtime_dir, runtime_dirs};
pub use server::{FirstRequest, MountRequest, Process, ServedMount, Server, socket_of_claim};
pub use status::{
    CopyProgress, FailedRead, IndexState, OverlayStatus, Phase, PrefetchStatus, Status,
    format_device,
};
pub use volumes::{Shareable, SharedTree, VolumeKey, VolumeTable};
