//! `tarfs ls`: list an archive's entries.

use std::process::ExitCode;

use super::args::{CacheArgs, SourceArgs};

/// Arguments of `tarfs ls`.
#[derive(clap::Args, Debug)]
pub(super) struct LsArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,
}

pub(super) fn run(args: &LsArgs) -> anyhow::Result<ExitCode> {
    anyhow::bail!("{args:?}")
}
