//! `tarfs plan` and `tarfs cat`: cut an archive into shards, and write one as a tar archive.

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::ensure;
use tokio::runtime::Runtime;

use super::materialize::{self, TerminalReporter};
use crate::cli::args::{self, CacheArgs, LayerArgs, ShardArg, SourceArgs};
use crate::cli::open_archive;
use crate::cli::shards;
use crate::cli::ui::output;
use tarfs::archive::{TreeOrigin, Volume};
use tarfs::index::store::RowsToLoad;
use tarfs::index::{MAX_SHARDS, Shard};
use tarfs::materialize::ContentSink;

/// Arguments of `tarfs plan`.
#[derive(clap::Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Number of shards
    #[arg(long, value_name = "N", value_parser = args::count_parser::<u32>(1..=MAX_SHARDS.into()))]
    shards: u32,

    /// Print one JSON object per line for each shard
    #[arg(long)]
    json: bool,
}

/// Arguments of `tarfs cat`.
#[derive(clap::Args, Debug)]
pub(crate) struct CatArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Use only shard I of N, as `tarfs plan --shards N` cuts them
    ///
    /// Without an index from `tarfs index`, the whole archive is read first.
    #[arg(long, value_name = "I/N", default_value = "1/1")]
    shard: ShardArg,

    /// Print counters at the end
    #[arg(long)]
    stats: bool,
}

/// Opens the tree that is cut into shards, by the same index for the plan as for what is written.
fn open_shards(
    source: &SourceArgs,
    cache: &CacheArgs,
) -> anyhow::Result<(Runtime, Arc<dyn Volume>)> {
    let layers = LayerArgs::default();
    open_archive::open_tree(source, &layers, cache, TreeOrigin::WRITTEN, RowsToLoad::All)
}

pub(crate) fn plan(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let (_network, volume) = open_shards(&args.source, &args.cache)?;
    let (_, index, plan) = shards::plan_of(&*volume, args.shards)?;
    output::print_text(&lines(plan.shards(), args.json))?;
    Ok(output::report_problems(&index))
}

pub(crate) fn cat(args: &CatArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        !stdout().is_terminal(),
        "standard output is a terminal, and a tar archive is not for reading (add `| tar -x`)"
    );
    let (_network, volume) = open_shards(&args.source, &args.cache)?;
    let (archive, index, plan) = shards::plan_of(&*volume, args.shard.count)?;
    let output = output::binary_stdout()?;
    let reporter = Arc::new(TerminalReporter::for_contents(args.source.allow_truncated));
    let mut sink = ContentSink::tar(output, Some(reporter));
    let read = shards::send(archive, &index, &plan, args.shard, &mut sink);
    // After an error, the archive must not look complete.
    let outcome = read.and_then(|complete| {
        let summary = sink.finish()?;
        Ok(materialize::exit_code(complete, &summary))
    });
    if args.stats {
        output::print_counters(archive.stats());
    }
    outcome
}

/// A line for each shard. `docs/semantics.md` describes the fields.
fn lines(shards: &[Shard], json: bool) -> String {
    let line = |shard: &Shard| {
        if json {
            // Fails only for keys that are no text.
            return serde_json::to_string(shard).unwrap_or_default() + "\n";
        }
        format!(
            "{}/{}: {} entries, {} bytes, packed {}-{}\n",
            shard.number,
            shards.len(),
            shard.entries,
            shard.bytes,
            shard.packed_start,
            shard.packed_end
        )
    };
    shards.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_has_one_line_a_shard() {
        let shards = [1, 2].map(|number| Shard {
            number,
            entries: 3,
            bytes: 40,
            packed_start: 5,
            packed_end: 60,
        });
        assert_eq!(
            lines(&shards, false).lines().next(),
            Some("1/2: 3 entries, 40 bytes, packed 5-60")
        );
        assert_eq!(
            lines(&shards, true).lines().nth(1),
            Some("{\"shard\":2,\"entries\":3,\"bytes\":40,\"packed_start\":5,\"packed_end\":60}")
        );
    }
}
