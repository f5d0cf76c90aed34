//! The verbs, and how a command line is parsed.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use super::commands::list::{chmod, chown, diff, du, find, ls, rm};
use super::commands::write::{copy, materialize, shard, sync};
use super::commands::{
    bundle, cache, cat, daemon, generate, image, index, profile, status, umount, verify,
};
use super::help::Sorted;
use super::ui::output;
use super::{args, help};
use tarfs::internal::escape::escape_controls;

/// Mounts, lists and extracts remote tarballs without downloading them first.
#[derive(Parser, Debug)]
#[command(name = "tarfs", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

/// Arguments of the process that serves a mount.
#[derive(clap::Args, Debug)]
pub(crate) struct ServeMountArgs {
    /// The mountpoint, for those who list processes
    mountpoint: OsString,
}

/// Arguments of a daemon.
#[derive(clap::Args, Debug)]
pub(crate) struct ServeMountsArgs {
    /// Path of the socket that is its standard output
    pub socket: PathBuf,
    /// Stay the process that was started
    #[arg(long)]
    pub foreground: bool,
}

#[derive(Subcommand, Debug)]
// A run defines the arguments of one verb.
#[command(defer = true)]
pub(crate) enum Verb {
    /// Mount an archive, read-only unless --writable is given
    Mount(Sorted<args::MountArgs>),
    /// Unmount archives
    Umount(Sorted<umount::UmountArgs>),
    /// Show the state of mounts
    Status(Sorted<status::StatusArgs>),
    /// Extract an archive to disk
    #[command(visible_alias = "extract")]
    Materialize(Sorted<materialize::MaterializeArgs>),
    /// Bring a directory to the state of an archive, an image or another directory
    Sync(Sorted<sync::SyncArgs>),
    /// Copy a directory of this machine, as `cp -a` does
    Copy(Sorted<copy::CopyArgs>),
    /// Cut an archive into shards for several workers, and write one
    Shard(Sorted<shard::ShardVerbArgs>),
    /// Print files of an archive
    Cat(Sorted<cat::CatArgs>),
    /// List an archive's entries
    Ls(Sorted<ls::LsArgs>),
    /// Print the files for which an expression is true
    Find(Sorted<find::FindArgs>),
    /// Sum the space that directories use
    Du(Sorted<du::DuArgs>),
    /// Change the modes of files, in parallel
    Chmod(Sorted<chmod::ChmodArgs>),
    /// Change the owners of files, in parallel
    Chown(Sorted<chown::ChownArgs>),
    /// Remove files and directories, in parallel
    Rm(Sorted<rm::RmArgs>),
    /// Print what differs between two trees
    Diff(Sorted<diff::DiffArgs>),
    /// Show the layers and the configuration of an image
    Image(Sorted<image::ImageArgs>),
    /// Make a bundle for a container runtime from an image
    Bundle(Sorted<bundle::BundleArgs>),
    /// Build an archive's index, or write it to a file
    Index(Sorted<index::IndexArgs>),
    /// Read an archive to its end and check it for damage
    Verify(Sorted<verify::VerifyArgs>),
    /// Merge profiles of `mount --record`, and cut them at a size
    Profile(Sorted<profile::ProfileArgs>),
    /// Show and clean the disk cache
    Cache(Sorted<cache::CacheVerbArgs>),
    /// Run or replace the process that serves this user's mounts
    Daemon(Sorted<daemon::DaemonArgs>),
    /// Serve a mount for the process that keeps it
    #[command(hide = true)]
    ServeMount(ServeMountArgs),
    /// Serve the mounts of all processes that connect
    #[command(hide = true)]
    ServeMounts(ServeMountsArgs),
    /// Write man pages or shell completions for a package
    #[command(hide = true)]
    Generate(Sorted<generate::GenerateArgs>),
}

/// Returns the definition of the command line, with headings and examples.
pub(crate) fn command() -> Command {
    help::arrange(Cli::command())
}

/// As [`command`], with the arguments of all verbs at once. Otherwise `help` has no verbs of verbs.
pub(crate) fn whole_command() -> Command {
    command().mut_subcommands(|mut verb| {
        verb.build();
        verb
    })
}

/// Parses `words`, the program's name first. A request for help is an error, too. The error holds no
/// [secret](without_secret) and no control characters of the words.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Verb, clap::Error> {
    let words: Vec<OsString> = words.into_iter().collect();
    parse_words(&words).map_err(|error| {
        let escape = |word: &OsString| escape_controls(&word.to_string_lossy()).into();
        let escaped: Vec<OsString> = words.iter().map(escape).collect();
        if escaped == words || !error.use_stderr() {
            return error;
        }
        // Only the control characters were refused if there is no other error.
        let other = parse_words(&escaped).err();
        other.unwrap_or_else(|| escape_value(error))
    })
}

/// Escapes control characters of the value that is refused, and of the reason.
fn escape_value(mut error: clap::Error) -> clap::Error {
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidValue] {
        if let Some(ContextValue::String(value)) = error.get(kind) {
            let escaped = escape_controls(value);
            error.insert(kind, ContextValue::String(escaped));
        }
    }
    let mut text = error.render().to_string();
    if let Some(reason) = error.source().map(ToString::to_string) {
        text = text.replace(&reason, &escape_controls(&reason));
    }
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    clap::Error::raw(error.kind(), text.trim_end())
}

fn parse_words(words: &[OsString]) -> Result<Verb, clap::Error> {
    let mut command = command();
    command
        .try_get_matches_from_mut(words)
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map(|cli| cli.verb)
        .map_err(|error| without_secret(error.format(&mut command)))
}

/// Removes the value of --header from the error, because it may be secret, and the output may be a log.
pub(crate) fn without_secret(mut error: clap::Error) -> clap::Error {
    let argument = error.get(ContextKind::InvalidArg).map(ToString::to_string);
    if argument.is_some_and(|argument| argument.starts_with("--header")) {
        let hidden = ContextValue::String("…".to_owned());
        error.insert(ContextKind::InvalidValue, hidden);
    }
    error
}

/// Prints an error as all others are printed, or the help that the user asked for. Returns its kind.
pub(crate) fn print_error(error: &clap::Error) -> ErrorKind {
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        Some(text) => output::print_error_lines(text.trim_end()),
        // Ignored: the terminal may be closed.
        None => drop(error.print()),
    }
    error.kind()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Verb, clap::Error> {
        parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn command_line_definition_is_valid() {
        command().debug_assert();
    }

    // Promises: writable-index
    #[test]
    fn writable_mount_waits_for_the_whole_index() {
        let waits = |line: &str| match parse_line(line).expect("valid") {
            Verb::Mount(args) => args.waits_for_index(),
            verb => panic!("{verb:?}"),
        };
        assert!(waits("tarfs mount a.tar mnt --writable"));
        assert!(!waits("tarfs mount a.tar mnt"));
    }

    // Promises: secret-hidden
    #[test]
    fn invalid_header_is_not_printed() {
        let words = ["tarfs", "ls", "http://host/a", "--header", "secret"];
        let error = Cli::try_parse_from(words).expect_err("no header");
        assert!(error.to_string().contains("secret"), "clap prints it");
        let text = parse(words.map(OsString::from))
            .expect_err("no header")
            .to_string();
        assert!(
            text.contains("--header") && text.contains("Name: value"),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
    }
}
