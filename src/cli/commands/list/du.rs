//! `tarfs du`: sums the space that directories use.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use super::open_place::{self, StartPoint, TreeVerb};
use crate::cli::args::TreeArgs;
use tarfs::list::{DiskUsage, DuOptions, Item, Measure, SharedOutput, Tree, human_size};

/// Arguments of `tarfs du`.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true, mut_arg("ignore_zeros", |it| it.short(None)))]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct DuArgs {
    #[command(flatten)]
    tree: TreeArgs,

    /// Sum the files at these paths in SOURCE [default: all]
    #[arg(value_name = "PATH")]
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
    #[arg(short = 'c', long)]
    total: bool,

    /// Sum the sizes of files instead of the space that they use
    #[arg(long, conflicts_with = "inodes")]
    apparent_size: bool,

    /// Count files instead of their space
    #[arg(long)]
    inodes: bool,

    /// Show sizes with units, such as 1.5M [default: units of 1024 bytes]
    #[arg(short, long)]
    human_readable: bool,

    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

pub(crate) fn run(args: &DuArgs) -> anyhow::Result<ExitCode> {
    open_place::run(&args.tree, &args.paths, Sums(args))
}

struct Sums<'a>(&'a DuArgs);

impl Sums<'_> {
    fn options(&self) -> DuOptions {
        let args = self.0;
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
            format: match (args.human_readable, args.inodes) {
                (true, _) => human_size,
                (false, true) => |count| count.to_string(),
                (false, false) => |bytes| bytes.div_ceil(1024).to_string(),
            },
        }
    }
}

impl TreeVerb for Sums<'_> {
    fn run<T: Tree + Send + 'static>(
        self,
        tree: &Arc<T>,
        base: &T::Directory,
        starts: &[StartPoint],
        output: &Arc<SharedOutput>,
    ) -> anyhow::Result<()> {
        let usage = Arc::new(DiskUsage::new(self.options(), Arc::clone(output)));
        // One after the other, so that their lines are in order.
        for start in starts {
            let name = start.name();
            let Some(state) = usage.start(&Item::at_start(&**tree, base, name)) else {
                continue;
            };
            match tree.open(base, name) {
                Ok(directory) => {
                    let (directory, jobs) = ((name.name, directory), self.0.tree.jobs.jobs);
                    let walked = start.walk(tree, &usage, directory, state, jobs)?;
                    if walked.is_break() {
                        break;
                    }
                }
                Err(error) => {
                    output.report(name.name, &error);
                    usage.end_closed(&state, name.name);
                }
            }
        }
        if self.0.total {
            output.write_last(&usage.line(usage.grand_total(), b"total"));
        }
        Ok(())
    }
}
