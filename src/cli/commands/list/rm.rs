//! `tarfs rm`: removes files.

use std::ffi::OsString;
use std::process::ExitCode;

use super::change::change_files;
use crate::cli::args::JobsArg;
use tarfs::change::{Verbosity, ask};
use tarfs::tree::{DirectoryTree, RemoveOptions, Remover};

/// Maximum number of files that `-I` removes without a question.
const MAX_UNASKED: usize = 3;

/// Flags of which the last one holds.
const QUESTIONS: [&str; 4] = ["asks", "asks_once", "interactive", "force"];

/// When a removal needs an answer.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum When {
    #[value(aliases = ["no", "none"])]
    Never,
    Once,
    #[value(alias = "yes")]
    Always,
}

/// Arguments of `tarfs rm`.
#[derive(clap::Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct RmArgs {
    /// Files to remove, without a question but for -i and -I
    #[arg(value_name = "PATH", required_unless_present = "force")]
    paths: Vec<OsString>,

    /// Remove directories and what is below them
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,

    /// Ignore files that do not exist
    #[arg(short, long, overrides_with_all = QUESTIONS)]
    force: bool,

    /// Ask before each removal
    #[arg(short = 'i', overrides_with_all = QUESTIONS)]
    asks: bool,

    /// Ask once before more than three files are removed, or any with -r
    #[arg(short = 'I', overrides_with_all = QUESTIONS)]
    asks_once: bool,

    /// Ask as -i, as -I, or never
    #[arg(
        long,
        value_name = "WHEN",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "always",
        overrides_with_all = QUESTIONS
    )]
    interactive: Option<When>,

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
    let asks = args.asks || args.interactive == Some(When::Always);
    let asks_once = args.asks_once || args.interactive == Some(When::Once);
    if asks_once && (args.recursive || count > MAX_UNASKED) {
        let arguments = if count == 1 { "argument" } else { "arguments" };
        let how = if args.recursive { " recursively" } else { "" };
        if !ask(&format!("remove {count} {arguments}{how}"))? {
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
        asks,
    };
    let verbosity = if args.verbose {
        Verbosity::All
    } else {
        Verbosity::Quiet
    };
    let visitor = |tree, log| Remover::new(tree, options, log);
    change_files(
        tree,
        args.jobs,
        (verbosity, false),
        &args.paths,
        visitor,
        Remover::start,
    )
}
