//! `tarfs shard`: cuts an archive into shards for several workers, and writes one.

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::ensure;
use tokio::runtime::Runtime;

use super::args::{ArchiveArgs, DestinationArg, ExistingArgs, WriteArgs};
use super::output::{Output, Stream, TerminalReporter, exit_code};
use crate::cli::args::{self, CacheArgs, JsonArg, LayerArgs, ShardArg, SourceArgs, StatsArg};
use crate::cli::commands::list::operands::ensure_archive;
use crate::cli::open_archive;
use crate::cli::shards;
use crate::cli::ui::output;
use tarfs::archive::{TreeOrigin, Version, Volume};
use tarfs::index::store::RowsToLoad;
use tarfs::index::{MAX_SHARDS, Shard};
use tarfs::locate::TreeSpec;
use tarfs::materialize::{self, ContentSink, Existing, Options, read_entries};

/// Arguments of `tarfs shard`.
#[derive(clap::Args, Debug)]
pub(crate) struct ShardVerbArgs {
    #[command(subcommand)]
    part: Part,
}

#[derive(clap::Subcommand, Debug)]
enum Part {
    /// Print how an archive is cut into shards
    Plan(PlanArgs),
    /// Write the files of a shard to disk
    Write(WriteShardArgs),
    /// Finish a tree after all its shards: check that nothing is missing, and set the attributes of directories
    Finish(ShardTreeArgs),
    /// Write the entries of a shard to standard output, as a tar archive
    Tar(TarArgs),
}

/// Arguments of `tarfs shard plan`.
#[derive(clap::Args, Debug)]
struct PlanArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Number of shards
    #[arg(long, value_name = "N", value_parser = args::count_parser::<u32>(1..=MAX_SHARDS.into()))]
    shards: u32,

    #[command(flatten)]
    json: JsonArg,
}

/// The directory that all shards are written to, and the arguments of `tarfs shard finish`.
#[derive(clap::Args, Debug)]
struct ShardTreeArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    archive: ArchiveArgs,

    #[command(flatten)]
    destination: DestinationArg,

    #[command(flatten)]
    write: WriteArgs,
}

/// Arguments of `tarfs shard write`.
#[derive(clap::Args, Debug)]
struct WriteShardArgs {
    #[command(flatten)]
    tree: ShardTreeArgs,

    /// Shard I of N, as `tarfs shard plan --shards N` cuts them
    ///
    /// Directories get their attributes by `tarfs shard finish`, once all shards are written. Without an index from
    /// `tarfs index`, the whole archive is read first.
    #[arg(value_name = "I/N")]
    shard: ShardArg,

    #[command(flatten)]
    existing: ExistingArgs,
}

/// Arguments of `tarfs shard tar`.
#[derive(clap::Args, Debug)]
struct TarArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Shard I of N, as `tarfs shard plan --shards N` cuts them [default: all]
    ///
    /// Without an index from `tarfs index`, the whole archive is read first.
    #[arg(value_name = "I/N", default_value = "1/1", hide_default_value = true)]
    shard: ShardArg,

    #[command(flatten)]
    stats: StatsArg,
}

pub(crate) fn run(args: &ShardVerbArgs) -> anyhow::Result<ExitCode> {
    match &args.part {
        Part::Plan(args) => plan(args),
        Part::Write(args) => write(&args.tree, args.existing.policy(), Some(args.shard)),
        Part::Finish(args) => write(args, Existing::default(), None),
        Part::Tar(args) => tar(args),
    }
}

/// Opens the tree that is cut into shards, by the same index for the plan as for what is written.
fn open_shards(
    source: &SourceArgs,
    cache: &CacheArgs,
) -> anyhow::Result<(Runtime, Arc<dyn Volume>)> {
    let layers = LayerArgs::default();
    open_archive::open_tree(source, &layers, cache, TreeOrigin::WRITTEN, RowsToLoad::All)
}

/// Opens and indexes `tree`, which is to be written. `user` is what needs its index.
pub(super) fn open_indexed(
    source: &SourceArgs,
    archive: &ArchiveArgs,
    tree: &TreeSpec,
    output: &Output<'_>,
    user: &str,
) -> anyhow::Result<(Runtime, Arc<dyn Volume>)> {
    ensure!(
        !tree.source.is_stdin(),
        "standard input can be read only once, and {user} its index first (save it to a file)"
    );
    let opened = archive.open_context(source, &output.stats, output.is_quiet);
    let (network, mut context) = opened?;
    context.archive.scan.allow_skipping = true;
    let volume = context.open(tree)?;
    Ok((network, volume))
}

fn plan(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let (_network, volume) = open_shards(&args.source, &args.cache)?;
    let (_, index, plan) = shards::plan_of(&*volume, args.shards)?;
    output::print_text(&lines(plan.shards(), args.json.is_set))?;
    Ok(output::report_problems(&index, ExitCode::SUCCESS))
}

/// Writes `shard`, or without one finishes the tree of all.
fn write(
    args: &ShardTreeArgs,
    existing: Existing,
    shard: Option<ShardArg>,
) -> anyhow::Result<ExitCode> {
    ensure_archive(&args.source.source, "only an archive has shards")?;
    materialize::check_empty_destination(args.destination.path())?;
    let options = Options {
        existing,
        ..args.archive.apply(&args.source, args.write.options())
    };
    let truncated = args.source.allow_truncated;
    let output = Output::new(
        args.destination.path(),
        options,
        &args.write,
        false,
        truncated,
        Stream::Names,
    );
    let tree = LayerArgs::default().tree(&args.source);
    let (source, archive) = (&args.source, &args.archive);
    let (_network, volume) = open_indexed(source, archive, &tree, &output, "shards need")?;
    let count = shard.map_or(1, |shard| shard.count);
    let (archive, index, plan) = shards::plan_of(&*volume, count)?;
    let bytes = shard.and_then(|shard| plan.shards().get(shard.number.checked_sub(1)? as usize));
    let bytes = bytes.map(|shard| shard.bytes);
    let written = output.to_disk("run the same command again", None, |sink| {
        let _progress = output.show_progress("writing", bytes);
        let (read, finished) = match shard {
            Some(shard) => sink.write_shard(archive, &index, &plan, shard.number),
            None => sink.finish_shards(&*volume, &index, &Version::of(archive)),
        };
        (shards::whether_complete(read), finished)
    });
    // Members that are not in the tree are in no shard.
    output.end(written.map(|code| match shard {
        Some(_) => code,
        None => output::report_problems(&index, code),
    }))
}

fn tar(args: &TarArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        !stdout().is_terminal(),
        "standard output is a terminal, and a tar archive is not for reading (add `| tar -x`)"
    );
    let (_network, volume) = open_shards(&args.source, &args.cache)?;
    let (archive, index, plan) = shards::plan_of(&*volume, args.shard.count)?;
    let output = output::binary_stdout()?;
    let reporter = Arc::new(TerminalReporter::for_contents(args.source.allow_truncated));
    let mut sink = ContentSink::tar(output, Some(reporter));
    let read = read_entries(archive, &index, plan.entries(args.shard.number), &mut sink);
    // After an error, the archive must not look complete.
    let outcome = shards::whether_complete(read).and_then(|complete| {
        let summary = sink.finish()?;
        Ok(output::report_problems(
            &index,
            exit_code(complete, &summary),
        ))
    });
    if args.stats.is_set {
        output::print_counters(archive.stats());
    }
    outcome
}

/// A line for each shard. `docs/semantics.md` describes the fields.
fn lines(shards: &[Shard], json: bool) -> String {
    let line = |shard: &Shard| {
        if json {
            // Fails only for keys that are no text.
            return output::to_json(shard).unwrap_or_default() + "\n";
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

    // Promises: shard-plan
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
