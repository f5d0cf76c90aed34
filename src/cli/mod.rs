//! The command line: one file per verb.

use std::process::ExitCode;

/// Runs the program.
pub fn run() -> ExitCode {
    ExitCode::FAILURE
}
