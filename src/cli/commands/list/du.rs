//! `tarfs du`: sums the space that directories use.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;

use super::operands::{Needs, OpenTree, Operands};
use crate::cli::args::{HumanReadableArg, LinkFlags, TreeArgs};
use crate::cli::exit_status;
use tarfs::index::Ino;
use tarfs::list::{DiskUsage, DuOptions, Measure, human_size};
use tarfs::tree::{FollowedLinks, Item, Tree};

/// Arguments of `tarfs du`.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true, mut_arg("ignore_zeros", |arg| arg.short(None)),
          mut_arg("source", |arg| arg.required(false).default_value(".").index(1)))]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct DuArgs {
    #[command(flatten)]
    tree: TreeArgs,

    /// Sum these entries of an archive, or also these files if SOURCE is a directory
    #[arg(value_name = "PATH", index = 2)]
    paths: Vec<OsString>,

    /// Show files, too, and not only directories
    #[arg(short, long, conflicts_with = "summarize")]
    all: bool,

    /// Show only the sum of each PATH
    #[arg(short, long, conflicts_with = "max_depth")]
    summarize: bool,

    /// Show only what is at most N levels below PATH
    #[arg(short = 'd', long, value_name = "N")]
    max_depth: Option<usize>,

    /// Show the sum of all PATHs, too
    #[arg(short = 'c', long, hide_short_help = true)]
    total: bool,

    /// Sum the sizes of files instead of the space that they use
    #[arg(long, conflicts_with = "inodes", hide_short_help = true)]
    apparent_size: bool,

    /// Count files instead of their space
    #[arg(long)]
    inodes: bool,

    #[command(flatten)]
    human_readable: HumanReadableArg,

    #[command(flatten)]
    links: LinkFlags,

    /// Follow links that are PATHs, as -H
    #[arg(short = 'D', long, overrides_with_all = LinkFlags::NAMES, hide_short_help = true)]
    dereference_args: bool,
}

pub(crate) fn run(args: &DuArgs) -> anyhow::Result<ExitCode> {
    // Flags that come before it are overridden.
    let links = args.links.followed(if args.dereference_args {
        FollowedLinks::Starts
    } else {
        FollowedLinks::None
    });
    let needs = Needs {
        links,
        ..Needs::default()
    };
    let operands = Operands::open(&args.tree, &args.paths, needs)?;
    let options = DuOptions {
        has_several_starts: operands.starts.len() > 1,
        links,
        ..options(args)
    };
    let usage = Arc::new(DiskUsage::new(options, Arc::clone(&operands.output)));
    match &operands.tree {
        OpenTree::Index(tree) => sum(&usage, &operands, (tree, tree), &Ino::ROOT),
        OpenTree::Directory { tree, starts, base } => {
            sum(&usage, &operands, (starts, tree), base);
        }
    }
    if args.total {
        let line = usage.line(usage.grand_total(), b"total");
        operands.output.write_last(&line);
    }
    Ok(operands.finish(exit_status::PARTIAL))
}

fn options(args: &DuArgs) -> DuOptions {
    let measure = match (args.inodes, args.apparent_size) {
        (true, _) => Measure::Inodes,
        (_, true) => Measure::ApparentSize,
        _ => Measure::Space,
    };
    DuOptions {
        measure,
        all: args.all,
        max_depth: if args.summarize {
            0
        } else {
            args.max_depth.unwrap_or(usize::MAX)
        },
        has_several_starts: false,
        links: FollowedLinks::None,
        format: match (args.human_readable.is_set, args.inodes) {
            (true, _) => human_size,
            (false, true) => |count| count.to_string(),
            (false, false) => |bytes| bytes.div_ceil(1024).to_string(),
        },
    }
}

fn sum<T: Tree + Send + 'static>(
    usage: &Arc<DiskUsage>,
    operands: &Operands,
    (start_tree, tree): (&Arc<T>, &Arc<T>),
    base: &T::Directory,
) {
    // One after the other, so that their lines are in order.
    for start in &operands.starts {
        let name = start.name();
        let item = Item::at_start(&**start_tree, base, name);
        let Some(state) = usage.start(&item) else {
            continue;
        };
        match operands.walk(tree, usage, (&item, name.name), state) {
            ControlFlow::Continue(None) => {}
            ControlFlow::Continue(Some(state)) => usage.end_closed(&state, name.name),
            ControlFlow::Break(()) => break,
        }
    }
}
