//! `tarfs index`: builds an archive's index, or writes it to a file.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};

use crate::cli::args::{CacheArgs, LayerArgs, QuietArg, SourceArgs};
use crate::cli::open_archive;
use crate::cli::ui::output::{self, UsageError};
use tarfs::archive::scan::Digest;
use tarfs::archive::{Archive, TRUNCATED_NOTE, TreeOrigin};
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

    /// Upload the index to where other machines search it
    ///
    /// That is SOURCE.tarfs, or for an image its registry. It replaces the index that is there. Machines use it
    /// without being told; see --no-published-index.
    #[arg(long, hide_short_help = true)]
    publish: bool,

    #[command(flatten)]
    quiet: QuietArg,
}

pub(crate) fn run(args: &IndexArgs) -> anyhow::Result<ExitCode> {
    let is_image = args.source.source.is_image();
    ensure!(
        args.output.is_none() || !is_image,
        UsageError(
            "each layer of an image has an index of its own (leave out --output, or use --publish)"
                .into()
        )
    );
    let layers = LayerArgs::default();
    let mut cache = args.cache.clone();
    // A new index describes the archive, and not another index of it.
    cache.saved.no_published_index = true;
    let (origin, quiet) = (TreeOrigin::SHOWN, args.quiet.is_set);
    let (_network, tree, mut context) =
        open_archive::tree_context(&args.source, &layers, &cache, origin, quiet)?;
    if !is_image {
        // The index is for other machines, and they cannot know the digest otherwise.
        context.archive.scan.plain_sha256 = Digest::Compute;
    }
    let volume = context.open(&tree)?;
    if !is_image {
        let notes = volume.archives().into_iter().flat_map(Archive::notes);
        // The list of problems begins with it.
        let notes = notes.filter(|note| note != TRUNCATED_NOTE);
        notes.for_each(output::print_error);
    }
    let index = volume.index();
    let index = index.tree().context("cannot write the index")?;
    if let Some(path) = &args.output {
        store::write(path, index).context("cannot write the index")?;
    }
    if args.publish {
        context.publish_index(&args.source.source, &*volume)?;
    }
    Ok(output::report_problems(index, ExitCode::SUCCESS))
}
