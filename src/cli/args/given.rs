//! The arguments that the user gave, for conflicts that depend on the kind of SOURCE.

use std::path::Path;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches, Id};

use crate::cli::ui::output::UsageError;

/// Arguments for a single archive, which a place with several archives refuses.
const SINGLE_ARCHIVE_ARGS: [&str; 25] = [
    "writable",
    "restart",
    "copy_to",
    "expect_sha256",
    "index",
    "index_sha256",
    "mirror_url",
    "record",
    "replay",
    "prefetch_rate",
    "layer",
    "whiteouts",
    "root",
    "strip_components",
    "paths",
    "long",
    "drawing",
    "json",
    "shard",
    "format",
    "directory_itself",
    "by_size",
    "by_time",
    "inode",
    "numeric_uid_gid",
];

/// Arguments that say how an archive is read, which a directory of this machine refuses.
const ARCHIVE_ARGS: [&str; 13] = [
    "layer",
    "whiteouts",
    "index",
    "index_sha256",
    "expect_sha256",
    "mirror_url",
    "compression",
    "platform",
    "ignore_zeros",
    "max_unpacked_size",
    "max_entries",
    "allow_truncated",
    "shard",
];

/// Those of them that have their effect on an index file.
const INDEX_FILE_ARGS: [&str; 3] = ["max_entries", "allow_truncated", "shard"];

/// Arguments that select a part of SOURCE, which layers and images refuse.
pub(crate) const PART_ARGS: [&str; 9] = [
    "paths",
    "strip_components",
    "exclude",
    "include",
    "keep_old_files",
    "skip_old_files",
    "resume",
    "to_stdout",
    "dry_run",
];

/// Names of the arguments on the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenArgs(Vec<Id>);

impl GivenArgs {
    /// Returns the arguments without `names`, which another operand takes.
    pub(crate) fn without(mut self, names: &[&str]) -> Self {
        self.0
            .retain(|given| !names.iter().any(|name| given == *name));
        self
    }

    /// Refuses arguments for a single archive if SOURCE is a place with several archives.
    pub(crate) fn check_place(&self) -> Result<(), UsageError> {
        self.refuse(&SINGLE_ARCHIVE_ARGS, |flag| {
            format!(
                "{flag} is for a single archive, and SOURCE is a directory of archives (name one of them)"
            )
        })
    }

    /// Refuses arguments for archives if SOURCE is the `directory` of this machine.
    pub(crate) fn check_directory(&self, directory: &Path) -> Result<(), UsageError> {
        self.check_archive(directory, "a directory")
    }

    /// Refuses arguments without an effect on an index if SOURCE is the index file `path`.
    pub(crate) fn check_index_file(&self, path: &Path) -> Result<(), UsageError> {
        let given = self.clone().without(&INDEX_FILE_ARGS);
        given.check_archive(path, "an index file")
    }

    /// Refuses arguments for archives if SOURCE is `kind`, which is at `path`.
    fn check_archive(&self, path: &Path, kind: &str) -> Result<(), UsageError> {
        let name = path.display();
        self.refuse(&ARCHIVE_ARGS, |flag| {
            format!(
                "{name}: is {kind}, and {flag} is for archives (name the archive, or leave it out)"
            )
        })
    }

    /// Refuses arguments for a part of SOURCE if it is an image or has layers.
    pub(crate) fn check_layered(&self) -> Result<(), UsageError> {
        self.refuse(&PART_ARGS, |flag| {
            format!("{flag} cannot be used with an image or layers (leave it out)")
        })
    }

    /// Refuses the first of the arguments `names` that was given. `explain` makes the error of its name.
    fn refuse(
        &self,
        names: &[&str],
        explain: impl FnOnce(String) -> String,
    ) -> Result<(), UsageError> {
        let mut names = names.iter();
        let name = names.find(|name| self.0.iter().any(|given| given == **name));
        name.map_or(Ok(()), |name| {
            Err(UsageError(explain(match *name {
                "paths" => "PATH".to_owned(),
                "drawing" => "--tree".to_owned(),
                flag => format!("--{}", flag.replace('_', "-")),
            })))
        })
    }
}

impl Args for GivenArgs {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for GivenArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given =
            |id: &&Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
        Ok(Self(matches.ids().filter(is_given).cloned().collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
