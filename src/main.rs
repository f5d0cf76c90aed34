//! The `tarfs` program: runs [`cli`] and exits with its code.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
