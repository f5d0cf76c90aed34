//! Start of a verb: its log, and limits.

use tracing::Level;

use super::daemon::inherited_fds;
use super::ui::logging;
use super::{before_main, environment};

/// Starts to log, and raises limits. A mount logs when it begins and ends, which are INFO events.
pub(super) fn start(is_mount: bool) {
    let level = if is_mount { Level::INFO } else { Level::WARN };
    logging::init(environment::log_level().unwrap_or(level));
    if before_main::is_dumpable() {
        tracing::warn!("cannot disable core files, which may contain secrets");
    }
    inherited_fds::raise_open_file_limit();
    if is_mount {
        // A process that was started as `/proc/self/exe` has the name `exe`.
        rustix::thread::set_name(c"tarfs").ok();
    }
}
