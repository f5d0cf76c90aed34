//! Flags for what several verbs print.

use clap::{ArgAction, Args};

/// `--json`
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct JsonArg {
    /// Print JSON: one object per line
    #[arg(id = "json", long = "json")]
    pub is_set: bool,
}

/// `--quiet`
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct QuietArg {
    /// Show no progress
    #[arg(id = "quiet", short, long = "quiet")]
    pub is_set: bool,
}

/// `--stats`
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct StatsArg {
    /// Print counters at the end
    #[arg(id = "stats", long = "stats", hide_short_help = true)]
    pub is_set: bool,
}

/// `--human-readable`, of verbs whose `-h` is not help, as of their namesakes.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct HumanReadableArg {
    /// Show sizes with units, such as 1.5M
    #[arg(id = "human_readable", short = 'h', long = "human-readable")]
    pub is_set: bool,

    #[command(flatten)]
    help: LongHelpArg,
}

/// `--help`, of verbs whose `-h` is another flag.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct LongHelpArg {
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}
