//! The command line: one file per verb, each with its arguments and its run.

mod allocator;
mod args;
mod background;
mod bundle;
mod cache;
mod control;
mod copy;
mod descriptors;
mod exit;
mod exposition;
mod generate;
mod given;
mod headers;
mod helper;
mod image;
mod index;
mod keeper;
mod layers;
mod ls;
mod materialize;
mod metrics;
mod mount;
mod notify;
mod open;
mod output;
mod panics;
mod part;
mod prefetch;
mod privileges;
mod profile;
mod settings;
mod status;
mod telemetry;
mod telling;
mod umount;
mod undo;
mod verify;
mod writable;
mod xattrs;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

/// Makes a remote tarball usable before it has been downloaded.
#[derive(Parser, Debug)]
#[command(name = "tarfs", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Put an archive's tree behind a mount point, read-only unless it is --writable
    Mount(mount::MountArgs),
    /// Unmount a tarfs mount
    Umount(umount::UmountArgs),
    /// Tell how mounts are doing
    Status(status::StatusArgs),
    /// Write an archive's tree to disk
    #[command(visible_alias = "extract")]
    Materialize(materialize::MaterializeArgs),
    /// List an archive's entries
    Ls(ls::LsArgs),
    /// Tell what an image is made of and what it runs
    Image(image::ImageArgs),
    /// Make an image's tree and configuration a bundle for a container runtime
    Bundle(bundle::BundleArgs),
    /// Build an archive's index, or write it to a file
    Index(index::IndexArgs),
    /// Read an archive to its end, and say whether it is good
    Verify(verify::VerifyArgs),
    /// Show and bound what is kept on disk between mounts
    Cache(cache::CacheVerbArgs),
    /// Write man pages or completions, for a package
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
}

/// Runs the program with the command line and environment of this process. Exit codes: 0 when
/// all went well, 2 when something did not, 64 when the command line makes no sense; those of mount(8)
/// when that has started it.
pub fn run() -> ExitCode {
    panics::tell();
    let words: Vec<_> = std::env::args_os().collect();
    if settings::role().is_none()
        && let Some(words) = helper::called(&words)
    {
        return helper::run(&words);
    }
    let cli = match Cli::try_parse_from(settings::arguments()) {
        Ok(cli) => cli,
        Err(error) => return explain(error),
    };
    let level = match cli.verb {
        // A log of a mount tells when it began and ended.
        Verb::Mount(_) => tracing::Level::INFO,
        _ => tracing::Level::WARN,
    };
    telemetry::start(settings::log_level().unwrap_or(level));
    descriptors::allow_all();
    let result = match cli.verb {
        Verb::Mount(args) => mount::run(&args, open::for_mount),
        Verb::Umount(args) => umount::run(&args),
        Verb::Status(args) => status::run(&args),
        Verb::Materialize(args) => materialize::run(&args),
        Verb::Ls(args) => ls::run(&args),
        Verb::Image(args) => image::run(&args),
        Verb::Bundle(args) => bundle::run(&args),
        Verb::Index(args) => index::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Cache(args) => cache::run(&args),
        Verb::Generate(args) => generate::run(&args),
    };
    result.unwrap_or_else(|error| output::fail(&error))
}

/// Shows help where help was asked for, and what is wrong with the command line elsewhere.
fn explain(error: clap::Error) -> ExitCode {
    let error = without_secret(error);
    // A closed terminal is not worth dying for.
    drop(error.print());
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(output::USAGE),
    }
}

/// The error, without what was given to --header: it may be a secret, and the terminal a log.
fn without_secret(mut error: clap::Error) -> clap::Error {
    let argument = error.get(ContextKind::InvalidArg).map(ToString::to_string);
    if argument.is_some_and(|argument| argument.starts_with("--header")) {
        let hidden = ContextValue::String("…".to_owned());
        error.insert(ContextKind::InvalidValue, hidden);
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    #[test]
    fn the_command_line_is_well_formed() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn what_is_written_to_waits_for_the_whole_index() {
        let waits = |flags: &[&str]| {
            let words = [&["tarfs", "mount", "a.tar", "mnt"], flags].concat();
            match super::Cli::try_parse_from(words).expect("sound").verb {
                super::Verb::Mount(args) => args.waits(),
                verb => panic!("{verb:?}"),
            }
        };
        assert!(waits(&["--writable"]) && !waits(&[]));
    }

    #[test]
    fn a_header_that_is_none_is_not_repeated() {
        let words = ["tarfs", "ls", "http://host/a", "--header", "secret"];
        let error = super::Cli::try_parse_from(words).expect_err("no header");
        assert!(error.to_string().contains("secret"), "clap would tell");
        let told = super::without_secret(error).to_string();
        assert!(
            told.contains("--header") && told.contains("Name: value"),
            "{told}"
        );
        assert!(!told.contains("secret"), "{told}");
    }
}
