//! The arguments that the user gave, for conflicts that depend on the kind of SOURCE.

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches, Id};

/// Names of the arguments on the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenArgs(Vec<Id>);

impl GivenArgs {
    /// Returns the first of the arguments `names` that was given, as the user wrote it.
    pub(crate) fn first_of(&self, names: &[&str]) -> Option<String> {
        let mut names = names.iter();
        let name = names.find(|name| self.0.iter().any(|given| given == **name))?;
        Some(match *name {
            "paths" => "PATH".to_owned(),
            flag => format!("--{}", flag.replace('_', "-")),
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
