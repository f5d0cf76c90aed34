//! Trees to walk, and how.

use std::num::NonZeroUsize;

use super::{CacheArgs, LayerArgs, SourceArgs};
use tarfs::list::Jobs;

/// A tree to walk: SOURCE, how it is opened, and the number of threads.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TreeArgs {
    #[command(flatten)]
    pub source: SourceArgs,

    #[command(flatten)]
    pub layers: LayerArgs,

    #[command(flatten)]
    pub cache: CacheArgs,

    /// Number of threads [default: as many as the file system keeps busy]
    #[arg(short, long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
}

impl TreeArgs {
    pub(crate) fn jobs(&self) -> Jobs {
        self.jobs.map_or(Jobs::Automatic, Jobs::Fixed)
    }
}
