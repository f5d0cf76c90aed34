//! `tarfs diff`: prints what differs between two trees.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;

use super::operands::{Needs, OpenTree, Operands, local_directory};
use crate::cli::args::{GivenArgs, JsonArg, LayerArgs, TreeArgs};
use crate::cli::exit_status;
use tarfs::index::Ino;
use tarfs::list::DiffPrinter;
use tarfs::locate::SourceSpec;
use tarfs::tree::{Comparison, FollowedLinks, Name, SharedOutput, Tree};

/// Arguments of `tarfs diff`.
#[derive(clap::Args, Debug)]
#[command(mut_arg("source", |arg| arg.value_name("A").index(1)))]
pub(crate) struct DiffArgs {
    #[command(flatten)]
    tree: TreeArgs,

    /// Another archive, image or directory, to compare with A
    ///
    /// --index, --expect-sha256, --mirror-url and layers are those of A. Headers are sent only to A's host.
    #[arg(value_name = "B", index = 2)]
    other: SourceSpec,

    /// Compare the contents of files of equal size, too
    #[arg(long)]
    checksum: bool,

    #[command(flatten)]
    json: JsonArg,
}

/// Arguments that say how A and B are read.
const SHARED_ARGS: [&str; 5] = [
    "compression",
    "platform",
    "ignore_zeros",
    "max_entries",
    "allow_truncated",
];

pub(crate) fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let needs = Needs {
        contents: args.checksum,
        links: FollowedLinks::StartDirectories,
        ..Needs::default()
    };
    let first = Operands::open(&first_tree(args), &[], needs)?;
    let second = Operands::open(&second_tree(args), &[], needs)?;
    let (Some(one), Some(other)) = (first.starts.first(), second.starts.first()) else {
        return Ok(ExitCode::from(exit_status::FAILURE));
    };
    let (names, root) = ((one.name(), other.name()), &Ino::ROOT);
    let output = &second.output;
    let differs = match (&first.tree, &second.tree) {
        (OpenTree::Index(a), OpenTree::Index(b)) => {
            compare(args, output, names, (a, root), (b, root))
        }
        (OpenTree::Index(a), OpenTree::Directory { tree: b, base, .. }) => {
            compare(args, output, names, (a, root), (b, base))
        }
        (OpenTree::Directory { tree: a, base, .. }, OpenTree::Index(b)) => {
            compare(args, output, names, (a, base), (b, root))
        }
        (
            OpenTree::Directory { tree: a, base, .. },
            OpenTree::Directory {
                tree: b,
                base: other,
                ..
            },
        ) => compare(args, output, names, (a, base), (b, other)),
    }?;
    let codes = [
        second.finish(exit_status::PARTIAL),
        first.finish(exit_status::PARTIAL),
    ];
    Ok(ExitCode::from(if codes != [ExitCode::SUCCESS; 2] {
        exit_status::FAILURE
    } else if differs {
        exit_status::DIFFERENT
    } else {
        0
    }))
}

/// A, and how it is opened. Flags of both operands fit if B is an archive.
fn first_tree(args: &DiffArgs) -> TreeArgs {
    let mut tree = args.tree.clone();
    if local_directory(&args.other).is_none() {
        tree.source.given = tree.source.given.without(&SHARED_ARGS);
    }
    tree
}

/// B, and how it is opened.
fn second_tree(args: &DiffArgs) -> TreeArgs {
    let mut tree = args.tree.clone();
    let source = &mut tree.source;
    source.given = GivenArgs::default();
    source.headers_origin = Some(source.origin().to_owned());
    source.source = args.other.clone();
    source.expect_sha256 = None;
    source.server.mirror_urls.clear();
    tree.layers = LayerArgs::default();
    tree.cache.saved.index = None;
    tree.cache.saved.index_sha256 = None;
    tree
}

/// Prints what differs between two directories. Returns whether anything does.
fn compare<A: Tree + Send + 'static, B: Tree + Send + 'static>(
    args: &DiffArgs,
    output: &Arc<SharedOutput>,
    names: (Name<'_>, Name<'_>),
    (first, base): (&Arc<A>, &A::Directory),
    (second, other_base): (&Arc<B>, &B::Directory),
) -> anyhow::Result<bool> {
    let printer = Arc::new(DiffPrinter::new(args.json.is_set, Arc::clone(output)));
    let comparison = Comparison {
        first: Arc::clone(first),
        second: Arc::clone(second),
        differences: Arc::clone(&printer),
        contents: args.checksum,
    };
    comparison
        .run((base, other_base), names, b".", args.tree.jobs.jobs)
        .context("cannot compare the trees")?;
    Ok(printer.finish())
}
