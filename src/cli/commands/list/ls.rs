//! `tarfs ls`: lists the entries of an archive, or the files of a directory.

use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::ensure;

use super::open_place::{self, StartPoint, TreeVerb};
use crate::cli::args::{ShardArg, TreeArgs};
use crate::cli::ui::output;
use crate::cli::{open_archive, shards};
use tarfs::archive::Volume;
use tarfs::index::{Ino, ShardPlan};
use tarfs::list::{FileKind, Item, ListOptions, Lister, Order, SharedOutput, Style, Tree};

/// Arguments of `tarfs ls`.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true, mut_arg("ignore_zeros", |it| it.short(None)))]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    tree: TreeArgs,

    /// List these entries, or the contents of these directories
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,

    /// Show type, mode, links, owner, size and time of each entry
    #[arg(short, long)]
    long: bool,

    /// List subdirectories too, with full paths
    #[arg(short = 'R', long)]
    recursive: bool,

    /// Show names that begin with a dot, too
    #[arg(short, long, visible_short_alias = 'A')]
    all: bool,

    /// Show directories themselves, and not their contents
    #[arg(short, long)]
    directory_itself: bool,

    /// Show large files first
    #[arg(short = 'S', long, conflicts_with_all = ["by_time", "unsorted"])]
    by_size: bool,

    /// Show new files first
    #[arg(short = 't', long, conflicts_with = "unsorted")]
    by_time: bool,

    /// Keep the order of the archive or directory, which is the fastest
    #[arg(short = 'U', long)]
    unsorted: bool,

    /// Reverse the order, unless it is that of -U
    #[arg(short, long)]
    reverse: bool,

    /// Show the number of each file
    #[arg(short, long)]
    inode: bool,

    /// Show sizes with units, such as 1.5M
    #[arg(short, long)]
    human_readable: bool,

    /// Show one name a line, which is the default
    #[arg(short = '1')]
    one_per_line: bool,

    /// Print one JSON object per line for each entry
    #[arg(long, conflicts_with_all = ["long", "inode"])]
    json: bool,

    /// Print the whole tree in the format of another program
    ///
    /// `mkcomposefs --from-file` makes an image of the output for `composefs`. The extracted tree is the base
    /// directory of that image, because the payload of a file is its path.
    #[arg(
        long,
        value_name = "FORMAT",
        conflicts_with_all = ["paths", "long", "json", "inode", "recursive", "reverse", "shard", "directory_itself"]
    )]
    format: Option<Format>,

    /// List only shard I of N, as `tarfs plan --shards N` cuts them
    #[arg(long, value_name = "I/N", conflicts_with_all = ["layers", "whiteouts"])]
    shard: Option<ShardArg>,

    /// Show numeric IDs of owners
    #[arg(short, long)]
    numeric_uid_gid: bool,

    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// The format of another program.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Format {
    /// composefs-dump(5).
    Composefs,
}

pub(crate) fn run(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let source = &args.tree.source.source;
    let is_remote = open_place::local_directory(source).is_none();
    if source.is_place() && is_remote {
        return list_archives(args);
    }
    ensure!(
        args.shard.is_none() || is_remote,
        "a directory has no shards, and SOURCE is one"
    );
    open_place::run(&args.tree, &args.paths, Listing { args, shard: None })
}

/// Prints the paths of the archives that a mount of SOURCE shows as directories.
fn list_archives(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let has_flag = !args.paths.is_empty()
        || args.long
        || args.json
        || args.shard.is_some()
        || args.tree.layers.is_set();
    ensure!(
        !has_flag,
        "SOURCE is a directory of archives, of which only the names are listed (name one of them)"
    );
    let network = open_archive::start_network_runtime()?;
    let TreeArgs {
        source,
        layers,
        cache,
        ..
    } = &args.tree;
    let (tree, context) = open_archive::tree_context(source, layers, cache, &network, true)?;
    let listing = context.list_place(&tree.source)?;
    listing.notes.iter().for_each(output::print_error);
    // A name has no control characters.
    let lines = listing
        .archives
        .iter()
        .map(|archive| format!("{}\n", archive.path));
    output::print_text(&lines.collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

struct Listing<'a> {
    args: &'a LsArgs,
    /// Only the entries of this shard are listed.
    shard: Option<(ShardPlan, u32)>,
}

impl Listing<'_> {
    fn options(&self) -> ListOptions {
        let args = self.args;
        ListOptions {
            order: match (args.by_size, args.by_time, args.unsorted) {
                (true, ..) => Order::Size,
                (_, true, _) => Order::Time,
                (.., true) => Order::Stored,
                _ => Order::Name,
            },
            reverse: args.reverse,
            recursive: args.recursive || args.format.is_some(),
            // For programs, nothing is hidden.
            all: args.all || args.json || args.format.is_some(),
            json: args.json,
            composefs: matches!(args.format, Some(Format::Composefs)),
            style: Style {
                long: args.long,
                numeric: args.numeric_uid_gid,
                escaped: stdout().is_terminal(),
                inode: args.inode,
                human: args.human_readable,
            },
        }
    }
}

impl TreeVerb for Listing<'_> {
    const EXIT_MISSING: u8 = 2;

    fn prepare(&mut self, volume: &dyn Volume) -> anyhow::Result<()> {
        if let Some(shard) = self.args.shard {
            let (_, _, plan) = shards::plan_of(volume, shard.count)?;
            self.shard = Some((plan, shard.number));
        }
        Ok(())
    }

    fn needs_attributes(&self) -> bool {
        let args = self.args;
        let is_ordered = args.by_size || args.by_time;
        is_ordered || args.long || args.json || args.format.is_some() || args.shard.is_some()
    }

    fn is_sorted(&self) -> bool {
        !self.args.unsorted
    }

    fn run<T: Tree + Send + 'static>(
        self,
        tree: &Arc<T>,
        base: &T::Directory,
        starts: &[StartPoint],
        output: &Arc<SharedOutput>,
    ) -> anyhow::Result<()> {
        let mut lister = Lister::new(Arc::clone(tree), self.options(), Arc::clone(output));
        if let Some((plan, number)) = self.shard {
            lister.show_only(move |inode| {
                let ino = u32::try_from(inode).map(Ino);
                ino.is_ok_and(|ino| plan.shard_of(ino) == Some(number))
            });
        }
        let (lister, jobs) = (Arc::new(lister), self.args.tree.jobs.jobs);
        for start in starts {
            let (name, path) = (start.name(), start.inner_path());
            let item = Item::at_start(&**tree, base, name);
            if name.kind != FileKind::Directory || self.args.directory_itself {
                let shown = if path.is_empty() { b"." } else { path };
                if lister.list_item(&item, shown).is_break() {
                    break;
                }
                continue;
            }
            if self.args.format.is_some() && lister.list_item(&item, b"").is_break() {
                break;
            }
            let directory = match item.open() {
                Ok(directory) => directory,
                Err(error) => {
                    output.report(name.name, &error);
                    continue;
                }
            };
            let flow = if lister.is_unordered() {
                start.walk(tree, &lister, (path, directory), (), jobs)?
            } else {
                lister.list_directory(directory, name.inode, path)
            };
            if flow.is_break() {
                break;
            }
        }
        Ok(())
    }
}
