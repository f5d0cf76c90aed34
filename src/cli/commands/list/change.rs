//! Flags and runs of the verbs that change directory trees.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use super::operands;
use crate::cli::args::JobsArg;
use crate::cli::exit_status;
use crate::cli::ui::output;
use tarfs::change::{Attributes, ChangeLog, ChangeOptions, Changer, Verbosity, quote};
use tarfs::internal::error_chain::error_chain;
use tarfs::tree::{DirectoryTree, Metadata, Start, Visitor, metadata_of, walk_parallel};

/// Flags of `tarfs chmod` and `tarfs chown`.
#[derive(clap::Args, Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct ChangeFlags {
    /// Change the files below directories, too
    #[arg(short = 'R', long)]
    recursive: bool,

    /// Show each file that is changed
    #[arg(short = 'c', long, overrides_with = "verbose")]
    changes: bool,

    /// Show each file, also those that stay as they are
    #[arg(short, long, overrides_with = "changes")]
    verbose: bool,

    /// Print no errors about single files
    #[arg(short = 'f', long = "silent", visible_alias = "quiet")]
    quiet: bool,

    /// Take the attributes from FILE
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,

    /// Refuse to change the files below `/`
    #[arg(long)]
    preserve_root: bool,

    /// Change the files below `/`, too, which is the default
    #[arg(long, overrides_with = "preserve_root")]
    no_preserve_root: bool,

    #[command(flatten)]
    jobs: JobsArg,
}

impl ChangeFlags {
    /// The attributes of the file `--reference`, or the exit code after a reported error.
    pub(crate) fn reference(&self) -> Result<Option<Metadata>, ExitCode> {
        let Some(path) = &self.reference else {
            return Ok(None);
        };
        let found = path.canonicalize().and_then(|path| metadata_of(&path));
        found.map(Some).map_err(|error| {
            let (name, error) = (quote(path.as_os_str().as_bytes()), error_chain(&error));
            output::print_error(format_args!("failed to get attributes of {name}: {error}"));
            ExitCode::from(exit_status::PARTIAL)
        })
    }

    /// Sets `attributes` of the files at `paths`.
    pub(crate) fn run(
        &self,
        attributes: Attributes,
        no_dereference: bool,
        paths: &[OsString],
    ) -> anyhow::Result<ExitCode> {
        let is_owner = matches!(attributes, Attributes::Owner { .. });
        let options = ChangeOptions {
            attributes,
            recursive: self.recursive,
            follow: !(no_dereference || self.recursive && is_owner),
            root: !self.preserve_root,
        };
        let verbosity = match (self.verbose, self.changes) {
            (true, _) => Verbosity::All,
            (_, true) => Verbosity::Changes,
            _ => Verbosity::Quiet,
        };
        let (tree, reports) = (DirectoryTree::new(), (verbosity, self.quiet));
        let visitor = |tree, log| Changer::new(tree, options, log);
        change_files(tree, self.jobs, reports, paths, visitor, Changer::start)
    }
}

/// Starts a visitor at each of `paths`, and walks what it returns. With `quiet`, errors are not printed.
pub(crate) fn change_files<V: Visitor<DirectoryTree>>(
    tree: DirectoryTree,
    jobs: JobsArg,
    (verbosity, quiet): (Verbosity, bool),
    paths: &[OsString],
    visitor: impl FnOnce(Arc<DirectoryTree>, Arc<ChangeLog>) -> V,
    start: impl Fn(&V, &[u8]) -> Option<Start<DirectoryTree, V::State>>,
) -> anyhow::Result<ExitCode> {
    let output = operands::standard_output(quiet)?;
    let (tree, log) = (
        Arc::new(tree),
        ChangeLog::new(verbosity, Arc::clone(&output)),
    );
    let visitor = Arc::new(visitor(Arc::clone(&tree), Arc::new(log)));
    // One after the other, because one path may be below another.
    for path in paths {
        if let Some(start) = start(&visitor, path.as_bytes()) {
            let _never_broken = walk_parallel(&tree, &visitor, vec![start], jobs.jobs);
        }
    }
    operands::finish(&output);
    Ok(if output.has_failed() {
        ExitCode::from(exit_status::PARTIAL)
    } else {
        ExitCode::SUCCESS
    })
}

/// Prints that the attributes on the command line are invalid. Returns the exit code of the namesakes.
pub(crate) fn invalid(what: &str, word: &[u8]) -> ExitCode {
    output::print_error(format_args!("invalid {what}: {}", quote(word)));
    ExitCode::from(exit_status::PARTIAL)
}
