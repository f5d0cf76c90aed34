//! Output for the user, and the end of the process.

pub(crate) mod cleanup_on_signal;
pub(crate) mod logging;
pub(crate) mod output;
pub(crate) mod panic_hook;
pub(crate) mod progress;
pub(crate) mod units;
