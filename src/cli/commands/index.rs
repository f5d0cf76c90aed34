//! `tarfs index`: builds an archive's index, or writes it to a file.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};

use crate::cli::args::{CacheArgs, LayerArgs, SourceArgs};
use crate::cli::open_archive::{self, OpenRequest, OpenedTree};
use crate::cli::resolve;
use crate::cli::ui::output;
use tarfs::archive::DiskCacheMode;
use tarfs::index::store;

/// Arguments of `tarfs index`.
#[derive(clap::Args, Debug)]
pub(crate) struct IndexArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Write the index to this file, for --index
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(args: &IndexArgs) -> anyhow::Result<ExitCode> {
    let network = open_archive::start_network_runtime()?;
    let request = OpenRequest {
        source: &args.source,
        layers: &LayerArgs::default(),
        cache: &args.cache,
        disk_cache: DiskCacheMode::IndexOnly,
        allow_skipping: false,
        should_rescan_unproven: false,
        should_log_problems: false,
        quiet: args.quiet,
    };
    ensure!(
        args.output.is_none() || resolve::image_reference(&args.source).is_none(),
        "each layer of an image has an index of its own (leave out --output)"
    );
    let tree = request.open(&network, &Arc::default())?;
    if let OpenedTree::Archive(archive) = &tree {
        for note in archive.notes() {
            output::print_error(&note);
        }
    }
    let index = tree.index();
    if let Some(path) = &args.output {
        store::write(path, &index).context("cannot write the index")?;
    }
    Ok(output::report_problems(&index))
}
