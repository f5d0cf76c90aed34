//! The `tarfs` program: hands the command line to [`tarfs::cli`] and exits with its code.

use std::process::ExitCode;

fn main() -> ExitCode {
    tarfs::cli::run()
}
