//! `tarfs rm`: removes files.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use super::change::Run;
use crate::cli::args::JobsArg;
use tarfs::change::Verbosity;
use tarfs::tree::{DirectoryTree, RemoveOptions, Remover};

/// Maximum number of files that `-I` removes without a question.
const MAX_UNASKED: usize = 3;

/// Arguments of `tarfs rm`.
#[derive(clap::Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct RmArgs {
    /// Files to remove, without a question but for -I
    #[arg(value_name = "PATH", required_unless_present = "force")]
    paths: Vec<OsString>,

    /// Remove directories and what is below them
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,

    /// Ignore files that do not exist
    #[arg(short, long, overrides_with_all = ["asks_once", "force"])]
    force: bool,

    /// Ask once before more than three files are removed, or any with -r
    #[arg(short = 'I', overrides_with_all = ["asks_once", "force"])]
    asks_once: bool,

    /// Remove empty directories
    #[arg(short, long = "dir")]
    dir: bool,

    /// Show each file that is removed
    #[arg(short, long)]
    verbose: bool,

    /// Leave mount points alone, which is the default
    #[arg(long)]
    one_file_system: bool,

    /// Remove what is below mount points, too
    #[arg(long, overrides_with = "one_file_system")]
    no_one_file_system: bool,

    /// Refuse to remove `/`, which is the default
    #[arg(long)]
    preserve_root: bool,

    /// Do not refuse to remove `/`
    #[arg(long, overrides_with = "preserve_root")]
    no_preserve_root: bool,

    #[command(flatten)]
    jobs: JobsArg,
}

pub(crate) fn run(args: &RmArgs) -> anyhow::Result<ExitCode> {
    let count = args.paths.len();
    if args.asks_once && (args.recursive || count > MAX_UNASKED) {
        let arguments = if count == 1 { "argument" } else { "arguments" };
        let how = if args.recursive { " recursively" } else { "" };
        if !is_agreed(&format!("tarfs: remove {count} {arguments}{how}? "))? {
            return Ok(ExitCode::SUCCESS);
        }
    }
    let mut tree = DirectoryTree::new();
    tree.is_one_file_system = !args.no_one_file_system;
    let options = RemoveOptions {
        recursive: args.recursive,
        empty_directories: args.dir,
        force: args.force,
        root: args.no_preserve_root,
    };
    let run = Run {
        tree: Arc::new(tree),
        jobs: args.jobs,
        verbosity: if args.verbose {
            Verbosity::All
        } else {
            Verbosity::Quiet
        },
        quiet: false,
    };
    run.at(
        &args.paths,
        |tree, log| Remover::new(tree, options, log),
        Remover::start,
    )
}

/// Asks `question`. Returns whether the answer on standard input begins with a `y`.
fn is_agreed(question: &str) -> io::Result<bool> {
    io::stderr().write_all(question.as_bytes())?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(answer.starts_with(['y', 'Y']))
}
