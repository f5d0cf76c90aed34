//! Trees to walk, and how.

use std::num::NonZeroUsize;

use super::{CacheArgs, LayerArgs, SourceArgs, heading};

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
