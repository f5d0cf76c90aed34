//! The command line: one file per verb, with its arguments and its implementation.

mod args;
mod commands;
mod daemon;
mod environment;
mod layers;
mod mount_helper;
mod nested;
mod open_archive;
mod resolve;
mod ui;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

use commands::{
    bundle, cache, generate, image, index, ls, materialize, mount, status, umount, verify,
};
use daemon::inherited_fds;
use ui::{logging, output, panic_hook};

/// Mounts, lists and extracts remote tarballs without downloading them first.
#[derive(Parser, Debug)]
#[command(name = "tarfs", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Mount an archive, read-only unless --writable is given
    Mount(args::MountArgs),
    /// Unmount a tarfs mount
    Umount(umount::UmountArgs),
    /// Show the state of mounts
    Status(status::StatusArgs),
    /// Extract an archive to disk
    #[command(visible_alias = "extract")]
    Materialize(materialize::MaterializeArgs),
    /// List an archive's entries
    Ls(ls::LsArgs),
    /// Show the layers and the configuration of an image
    Image(image::ImageArgs),
    /// Make a bundle for a container runtime from an image
    Bundle(bundle::BundleArgs),
    /// Build an archive's index, or write it to a file
    Index(index::IndexArgs),
    /// Read an archive to its end and check it for damage
    Verify(verify::VerifyArgs),
    /// Show and clean the disk cache
    Cache(cache::CacheVerbArgs),
    /// Write man pages or shell completions for a package
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
}

/// Runs the program with this process's command line and environment.
///
/// Exit codes: 0 for success, 2 for a failure, 64 for an invalid command line. When mount(8) started the
/// program, the codes are those of mount(8).
pub(crate) fn run() -> ExitCode {
    panic_hook::install();
    let words: Vec<_> = std::env::args_os().collect();
    if environment::role().is_none()
        && let Some(words) = mount_helper::helper_arguments(&words)
    {
        return mount_helper::run(&words);
    }
    let cli = match Cli::try_parse_from(environment::arguments()) {
        Ok(cli) => cli,
        Err(error) => return print_usage_error(error),
    };
    let level = match cli.verb {
        // A mount logs when it begins and ends, which are INFO events.
        Verb::Mount(_) => tracing::Level::INFO,
        _ => tracing::Level::WARN,
    };
    logging::init(environment::log_level().unwrap_or(level));
    inherited_fds::raise_open_file_limit();
    let result = match cli.verb {
        Verb::Mount(args) => mount::run(&args, open_archive::open_for_mount),
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
    result.unwrap_or_else(|error| output::print_failure(&error))
}

/// Prints the help that the user asked for, or the error in the command line.
fn print_usage_error(error: clap::Error) -> ExitCode {
    let error = without_secret(error);
    // Ignored: the terminal may be closed.
    drop(error.print());
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(output::EXIT_USAGE),
    }
}

/// Removes the value of --header from the error.
///
/// It may be secret, and the output may be a log.
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
    fn command_line_definition_is_valid() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn writable_mount_waits_for_the_whole_index() {
        let waits = |flags: &[&str]| {
            let words = [&["tarfs", "mount", "a.tar", "mnt"], flags].concat();
            match super::Cli::try_parse_from(words).expect("sound").verb {
                super::Verb::Mount(args) => args.waits_for_index(),
                verb => panic!("{verb:?}"),
            }
        };
        assert!(waits(&["--writable"]) && !waits(&[]));
    }

    #[test]
    fn invalid_header_is_not_printed() {
        let words = ["tarfs", "ls", "http://host/a", "--header", "secret"];
        let error = super::Cli::try_parse_from(words).expect_err("no header");
        assert!(error.to_string().contains("secret"), "clap prints it");
        let text = super::without_secret(error).to_string();
        assert!(
            text.contains("--header") && text.contains("Name: value"),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
    }
}
