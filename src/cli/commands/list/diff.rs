//! `tarfs diff`: prints what differs between two trees.

use std::cell::Cell;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;

use super::open_place::{self, StartPoint, TreeVerb};
use crate::cli::args::{LayerArgs, TreeArgs};
use crate::cli::ui::output;
use tarfs::list::{Comparison, DiffPrinter, Name, SharedOutput, Tree};
use tarfs::locate::SourceSpec;

/// Exit code if something differs, as of diff(1).
const EXIT_DIFFERENT: u8 = 1;

/// Arguments of `tarfs diff`.
#[derive(clap::Args, Debug)]
#[command(mut_arg("source", |it| it.value_name("A").index(1)))]
pub(crate) struct DiffArgs {
    #[command(flatten)]
    tree: TreeArgs,

    /// Another archive, image or directory, to compare with A
    ///
    /// --index, --expect-sha256 and layers are those of A. Headers are sent only to A's host.
    #[arg(value_name = "B", index = 2)]
    other: SourceSpec,

    /// Compare the contents of files of equal size, too
    #[arg(long)]
    checksum: bool,

    /// Print one JSON object per line for each file that differs
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let differs = Cell::new(None);
    let compared = First {
        args,
        differs: &differs,
    };
    let code = open_place::run(&args.tree, &[OsString::from(".")], compared)?;
    Ok(match differs.get() {
        Some(differs) if code == ExitCode::SUCCESS => {
            ExitCode::from(if differs { EXIT_DIFFERENT } else { 0 })
        }
        _ => ExitCode::from(output::EXIT_FAILURE),
    })
}

/// Compares a tree with B.
struct First<'a> {
    args: &'a DiffArgs,
    /// `None` while it is unknown.
    differs: &'a Cell<Option<bool>>,
}

impl TreeVerb for First<'_> {
    fn reads_contents(&self) -> bool {
        self.args.checksum
    }

    fn run<A: Tree + Send + 'static>(
        self,
        tree: &Arc<A>,
        base: &A::Directory,
        starts: &[StartPoint],
        _: &Arc<SharedOutput>,
    ) -> anyhow::Result<()> {
        let Some(start) = starts.first() else {
            return Ok(());
        };
        let mut place = self.args.tree.clone();
        let source = &mut place.source;
        source.headers_origin = Some(source.origin().to_owned());
        source.source = self.args.other.clone();
        source.expect_sha256 = None;
        place.layers = LayerArgs::default();
        place.cache.saved.index = None;
        place.cache.saved.index_sha256 = None;
        let second = Second {
            args: self.args,
            differs: self.differs,
            tree,
            base,
            name: start.name(),
        };
        let code = open_place::run(&place, &[OsString::from(".")], second)?;
        if code != ExitCode::SUCCESS {
            self.differs.set(None);
        }
        Ok(())
    }
}

/// Compares the directory `name` of a tree with another tree.
struct Second<'a, A: Tree> {
    args: &'a DiffArgs,
    /// `None` while it is unknown.
    differs: &'a Cell<Option<bool>>,
    tree: &'a Arc<A>,
    base: &'a A::Directory,
    name: Name<'a>,
}

impl<A: Tree + Send + 'static> TreeVerb for Second<'_, A> {
    fn reads_contents(&self) -> bool {
        self.args.checksum
    }

    fn run<B: Tree + Send + 'static>(
        self,
        tree: &Arc<B>,
        base: &B::Directory,
        starts: &[StartPoint],
        output: &Arc<SharedOutput>,
    ) -> anyhow::Result<()> {
        let Some(start) = starts.first() else {
            return Ok(());
        };
        let printer = Arc::new(DiffPrinter::new(self.args.json, Arc::clone(output)));
        let comparison = Comparison {
            first: Arc::clone(self.tree),
            second: Arc::clone(tree),
            differences: Arc::clone(&printer),
            contents: self.args.checksum,
        };
        let names = (self.name, start.name());
        comparison
            .run((self.base, base), names, b".", self.args.tree.jobs.jobs)
            .context("cannot compare the trees")?;
        self.differs.set(Some(printer.finish()));
        Ok(())
    }
}
