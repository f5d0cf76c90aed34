//! Trees to walk, and how.

use std::num::NonZeroUsize;

use super::{CacheArgs, LayerArgs, SourceArgs, heading};
use tarfs::tree::FollowedLinks;

/// A tree to walk: SOURCE, how it is opened, and the number of threads.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TreeArgs {
    #[command(flatten)]
    pub source: SourceArgs,

    #[command(flatten)]
    pub layers: LayerArgs,

    #[command(flatten)]
    pub cache: CacheArgs,

    #[command(flatten)]
    pub jobs: JobsArg,
}

/// The number of threads of a walk.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct JobsArg {
    /// Number of threads [default: as many as the file system keeps busy]
    #[arg(short, long, value_name = "N", help_heading = heading::LIMITS)]
    pub jobs: Option<NonZeroUsize>,
}

/// Flags that say which links a walk follows. The last one holds.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct LinkFlags {
    /// Follow no links, which is the default
    #[arg(short = 'P', overrides_with_all = Self::NAMES, hide_short_help = true)]
    no_dereference: bool,

    /// Follow links that are PATHs
    #[arg(short = 'H', overrides_with_all = Self::NAMES, hide_short_help = true)]
    dereference_command_line: bool,

    /// Follow all links
    #[arg(short = 'L', long, overrides_with_all = Self::NAMES, hide_short_help = true)]
    dereference: bool,
}

impl LinkFlags {
    /// Names of these flags.
    pub(crate) const NAMES: [&str; 3] =
        ["no_dereference", "dereference_command_line", "dereference"];

    /// The links that are followed. Without a flag `default`.
    pub(crate) fn followed(self, default: FollowedLinks) -> FollowedLinks {
        match self {
            Self {
                dereference: true, ..
            } => FollowedLinks::All,
            Self {
                dereference_command_line: true,
                ..
            } => FollowedLinks::Starts,
            Self {
                no_dereference: true,
                ..
            } => FollowedLinks::None,
            _ => default,
        }
    }
}
