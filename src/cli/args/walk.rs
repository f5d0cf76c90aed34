//! How a tree is walked.

use std::num::NonZeroUsize;

use tarfs::list::Jobs;

/// How a tree is walked.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct WalkArgs {
    /// Number of threads [default: as many as the file system keeps busy]
    #[arg(short, long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
}

impl WalkArgs {
    pub(crate) fn jobs(&self) -> Jobs {
        self.jobs.map_or(Jobs::Automatic, Jobs::Fixed)
    }
}
