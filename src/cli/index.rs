//! `tarfs index`: build an archive's index, or write it to a file.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};

use super::args::{CacheArgs, SourceArgs};
use super::given::Outer;
use super::layers::{self, LayerArgs};
use super::{headers, open, output, privileges};
use crate::archive::Spooling;
use crate::base::stats::Stats;
use crate::index::store;

/// Arguments of `tarfs index`.
#[derive(clap::Args, Debug)]
pub(super) struct IndexArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Write the index to this file, for --index
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn run(args: &IndexArgs) -> anyhow::Result<ExitCode> {
    let network = open::network()?;
    let stats = Arc::new(Stats::default());
    let none = LayerArgs::default();
    if none.make_a_stack(&args.source) {
        ensure!(
            args.output.is_none(),
            "each layer of an image has an index of its own (leave out -o)"
        );
        privileges::guard(&args.source, &none);
        let headers = headers::all(&args.source.headers)?;
        let outer = Outer::with(&args.cache, args.quiet);
        let sources = layers::sources(&args.source, &none, &headers, &outer, &network, &stats)?;
        let stack = layers::stack(
            &sources,
            &none,
            (&args.source, &args.cache),
            (Spooling::TreeOnly, false),
            &network,
            &stats,
            args.quiet,
        )?;
        return Ok(output::report_problems(stack.index(), !args.quiet));
    }
    let archive = open::archive(
        &args.source,
        &args.cache,
        Spooling::TreeOnly,
        &network,
        &stats,
        false,
        args.quiet,
    )?;
    for note in archive.notes() {
        output::complain(&note);
    }
    if let Some(path) = &args.output {
        store::write(path, &archive.index()).context("cannot write the index")?;
    }
    Ok(output::report_problems(&archive.index(), !args.quiet))
}
