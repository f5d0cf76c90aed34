//! `tarfs generate`: man pages and shell completions for packages.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::Shell;

use crate::cli::Cli;

/// Shells that Debian contains.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes additional files for a package of this program.
#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Kind of files to write
    pub what: Artifact,
    /// Directory to write to, created if it is missing
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// Kinds of files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Artifact {
    /// A man page for the program and each verb
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

/// Writes the files.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn run(args: &GenerateArgs) -> anyhow::Result<ExitCode> {
    let directory = &args.directory;
    let failed = || format!("cannot write to {}", directory.display());
    fs::create_dir_all(directory).with_context(failed)?;
    match args.what {
        Artifact::Man => {
            clap_mangen::generate_to(Cli::command(), directory).with_context(failed)?;
        }
        Artifact::Completions => {
            for shell in SHELLS {
                let command = &mut Cli::command();
                clap_complete::generate_to(shell, command, "tarfs", directory)
                    .with_context(failed)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
