//! The `tarfs` program: runs [`tarfs::cli`] and exits with its code.

use std::process::ExitCode;

fn main() -> ExitCode {
    tarfs::cli::run()
}
