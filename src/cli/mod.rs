//! The command line: one file per verb.

pub mod background;
pub mod control;
pub mod mount;
pub mod settings;
pub mod status;
pub mod telemetry;
pub mod umount;

use std::process::ExitCode;

/// Runs the program.
pub fn run() -> ExitCode {
    ExitCode::FAILURE
}
