//! Flags for prefetch.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Size, heading};
use tarfs::archive::PrefetchMode;

/// Prefetch in the background.
#[derive(Clone, Debug, Args)]
pub(crate) struct PrefetchArgs {
    /// Data to fetch before it is read
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Mode::Ahead,
          help_heading = heading::PREFETCH, hide_short_help = true)]
    pub prefetch: Mode,

    /// Maximum rate of the prefetch, in bytes per second [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = heading::PREFETCH, hide_short_help = true)]
    pub prefetch_rate: Option<Size>,

    /// Write the ranges of files that are read to FILE, for --replay
    #[arg(long, value_name = "FILE", help_heading = heading::PREFETCH, hide_short_help = true)]
    pub record: Option<PathBuf>,

    /// Prefetch the ranges in FILE, which --record wrote; a path or URL
    #[arg(long, value_name = "FILE", help_heading = heading::PREFETCH, hide_short_help = true)]
    pub replay: Option<String>,
}

/// Data to fetch before it is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Mode {
    /// Nothing
    None,
    /// The data that readers want next
    Ahead,
    /// Everything, while there are no reads
    All,
}

impl From<Mode> for PrefetchMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::None => Self::Off,
            Mode::Ahead => Self::ReadAhead,
            Mode::All => Self::All,
        }
    }
}
