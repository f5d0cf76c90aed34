//! `tarfs ls`: lists the entries of an archive, or the files of a directory.

use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::Arc;

use super::operands::{self, Needs, OpenTree, Operands};
use crate::cli::args::{HumanReadableArg, JsonArg, ShardArg, TreeArgs};
use crate::cli::environment;
use crate::cli::exit_status;
use crate::cli::open_archive;
use crate::cli::ui::output;
use tarfs::archive::TreeOrigin;
use tarfs::index::Ino;
use tarfs::index::store::RowsToLoad;
use tarfs::list::{ListOptions, Lister, Order, Style};
use tarfs::tree::{FileKind, FollowedLinks, Item, Tree};

/// Arguments of `tarfs ls`.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true, mut_arg("ignore_zeros", |arg| arg.short(None)),
          mut_arg("source", |arg| arg.required(false).default_value(".").index(1)))]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    tree: TreeArgs,

    /// List these entries of an archive, or also these files if SOURCE is a directory
    #[arg(value_name = "PATH", index = 2)]
    paths: Vec<OsString>,

    /// Show type, mode, links, owner, size and time of each entry
    #[arg(short, long, conflicts_with = "json")]
    long: bool,

    /// List subdirectories too, with full paths
    #[arg(short = 'R', long)]
    recursive: bool,

    /// Draw the whole tree with its hidden names, as `tree -a` does
    #[arg(id = "drawing", long = "tree", conflicts_with_all = ["json", "format", "shard", "directory_itself"])]
    drawing: bool,

    /// Show names that begin with a dot, too
    #[arg(short, long, visible_short_alias = 'A')]
    all: bool,

    /// Show directories themselves, and not their contents
    #[arg(short, long, hide_short_help = true)]
    directory_itself: bool,

    /// Show large files first
    #[arg(short = 'S', long, conflicts_with_all = ["by_time", "unsorted"], hide_short_help = true)]
    by_size: bool,

    /// Show new files first
    #[arg(short = 't', long, conflicts_with = "unsorted", hide_short_help = true)]
    by_time: bool,

    /// Keep the order of the archive or directory, which is the fastest
    #[arg(short = 'U', long, hide_short_help = true)]
    unsorted: bool,

    /// Reverse the order, unless it is that of -U
    #[arg(short, long, hide_short_help = true)]
    reverse: bool,

    /// Show the number of each file
    #[arg(short, long, conflicts_with = "json", hide_short_help = true)]
    inode: bool,

    #[command(flatten)]
    human_readable: HumanReadableArg,

    /// Show one name a line, which is the default
    #[arg(short = '1', hide_short_help = true)]
    one_per_line: bool,

    #[command(flatten)]
    json: JsonArg,

    /// Print the whole tree in the format of another program
    ///
    /// `mkcomposefs --from-file` makes an image of the output for `composefs`. The extracted tree is the base
    /// directory of that image, because the payload of a file is its path.
    #[arg(long, value_name = "FORMAT",
          conflicts_with_all = ["paths", "long", "json", "inode", "recursive", "reverse", "shard", "directory_itself"],
          hide_short_help = true)]
    format: Option<Format>,

    /// List only shard I of N, as `tarfs shard plan --shards N` cuts them
    #[arg(long, value_name = "I/N", conflicts_with_all = ["layer", "whiteouts"],
          hide_short_help = true)]
    shard: Option<ShardArg>,

    /// Show numeric IDs of owners
    #[arg(short, long, hide_short_help = true)]
    numeric_uid_gid: bool,
}

/// The format of another program.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Format {
    /// composefs-dump(5).
    Composefs,
}

impl LsArgs {
    fn is_long(&self) -> bool {
        (self.long || self.numeric_uid_gid) && !self.json.is_set
    }
}

pub(crate) fn run(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let source = &args.tree.source.source;
    if source.is_place() && operands::local_directory(source).is_none() {
        return list_archives(args);
    }
    let is_ordered = args.by_size || args.by_time;
    let is_whole = args.format.is_some() || args.shard.is_some();
    let needs = Needs {
        order: !args.unsorted,
        rows: if is_ordered || args.is_long() || args.json.is_set || is_whole {
            RowsToLoad::All
        } else {
            RowsToLoad::Names
        },
        links: if args.is_long() || args.directory_itself {
            FollowedLinks::None
        } else {
            FollowedLinks::StartDirectories
        },
        is_written: args.format.is_some(),
        ..Needs::default()
    };
    let mut operands = Operands::open(&args.tree, &args.paths, needs)?;
    let are_open = match &operands.tree {
        OpenTree::Index(tree) => list(args, &operands, tree, &Ino::ROOT)?,
        OpenTree::Directory { tree, base, .. } => list(args, &operands, tree, base)?,
    };
    operands.has_all_paths &= are_open;
    Ok(operands.finish(exit_status::FAILURE))
}

/// Prints the paths of the archives that a mount of SOURCE shows as directories.
fn list_archives(args: &LsArgs) -> anyhow::Result<ExitCode> {
    args.tree.source.given.check_place()?;
    let TreeArgs {
        source,
        layers,
        cache,
        ..
    } = &args.tree;
    let (_network, tree, context) =
        open_archive::tree_context(source, layers, cache, TreeOrigin::SHOWN, true)?;
    let mut listing = context.list_place(&tree.source)?;
    if args.reverse {
        listing.archives.reverse();
    }
    listing.notes.iter().for_each(output::print_error);
    // A name has no control characters.
    let lines = listing
        .archives
        .iter()
        .map(|archive| format!("{}\n", archive.path));
    output::print_text(&lines.collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

fn options(args: &LsArgs) -> ListOptions {
    ListOptions {
        order: match (args.by_size, args.by_time, args.unsorted) {
            (true, ..) => Order::Size,
            (_, true, _) => Order::Time,
            (.., true) => Order::Stored,
            _ => Order::Name,
        },
        reverse: args.reverse,
        drawing: args.drawing.then(environment::drawing),
        recursive: args.recursive || args.drawing || args.format.is_some(),
        // For programs, nothing is hidden.
        all: args.all || args.drawing || args.json.is_set || args.format.is_some(),
        json: args.json.is_set,
        composefs: matches!(args.format, Some(Format::Composefs)),
        style: Style {
            long: args.is_long(),
            numeric: args.numeric_uid_gid,
            escaped: stdout().is_terminal(),
            inode: args.inode,
            human: args.human_readable.is_set,
            targets: args.drawing,
        },
    }
}

fn lister<T: Tree + Send + 'static>(
    args: &LsArgs,
    operands: &Operands,
    tree: &Arc<T>,
) -> anyhow::Result<Lister<T>> {
    let output = Arc::clone(&operands.output);
    let mut lister = Lister::new(Arc::clone(tree), options(args), output);
    if let Some(shard) = args.shard {
        let plan = operands.plan(shard.count)?;
        lister.show_only(move |inode| {
            let ino = u32::try_from(inode).map(Ino);
            ino.is_ok_and(|ino| plan.shard_of(ino) == Some(shard.number))
        });
    }
    if let Some(directory) = operands::local_directory(&args.tree.source.source)
        && !operands.has_several
    {
        lister.set_source(directory.as_os_str().as_bytes());
    }
    Ok(lister)
}

/// Returns whether each directory at which a listing starts could be opened.
fn list<T: Tree + Send + 'static>(
    args: &LsArgs,
    operands: &Operands,
    tree: &Arc<T>,
    base: &T::Directory,
) -> anyhow::Result<bool> {
    let lister = Arc::new(lister(args, operands, tree)?);
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    for start in &operands.starts {
        let item = Item::at_start(&**tree, base, start.name()).with_parent(start.parent);
        let is_listed = item.kind() == FileKind::Directory && !args.directory_itself;
        let path = if args.json.is_set {
            &start.inner_path
        } else {
            &start.label
        };
        match (is_listed, &**path) {
            (true, path) => directories.push((item, path)),
            (false, b"") if args.json.is_set => files.push((item, &b"."[..])),
            (false, b"") => files.push((item, start.name().name)),
            (false, path) => files.push((item, path)),
        }
    }
    lister.sort_items(&mut files);
    lister.sort_items(&mut directories);
    let (mut is_first, mut are_open) = (files.is_empty(), true);
    // In the format of another program the root has a line, too.
    let with_lines = if args.format.is_some() {
        &directories
    } else {
        &files
    };
    if lister.list_items(with_lines).is_break() {
        return Ok(true);
    }
    // A path or an object names its directory by itself.
    let has_headings =
        operands.has_several && !(args.recursive || args.drawing) && !args.json.is_set;
    for (item, path) in directories {
        let shown = if path.is_empty() { b"." } else { path };
        if has_headings && lister.write_heading(shown, is_first).is_break() {
            break;
        }
        is_first = false;
        let prefix = operands::without_slashes(path);
        let is_open = if lister.is_unordered() {
            let walked = operands.walk(tree, &lister, (&item, prefix), ());
            walked.map_continue(|closed| closed.is_none())
        } else {
            lister.list_directory(&item, prefix)
        };
        match is_open {
            ControlFlow::Continue(is_open) => are_open &= is_open,
            ControlFlow::Break(()) => break,
        }
    }
    let _ended = lister.write_counts();
    Ok(are_open)
}
