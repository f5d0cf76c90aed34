//! `tarfs sync`: brings a directory to the state of an archive, an image or another directory.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};

use super::args::{ArchiveArgs, DryRunArg, WriteArgs};
use super::copy::{ensure_apart, ensure_there, make_destination};
use super::output::{Output, Stream, Written, exit_code, shown_name};
use super::shard::open_indexed;
use crate::cli::args::{LayerArgs, SourceArgs};
use crate::cli::commands::list::operands::{self, local_directory, with_contents};
use crate::cli::daemon::inherited_fds::raise_open_file_limit;
use crate::cli::shards;
use crate::cli::ui::output;
use tarfs::archive::Volume;
use tarfs::index::Ino;
use tarfs::internal::error_chain::error_chain;
use tarfs::internal::escape::escape;
use tarfs::materialize::{
    DestinationLock, Materializer, Options, Summary, SyncPlan, SyncPlanner, XattrFilter,
};
use tarfs::source::local_path;
use tarfs::tree::{Comparison, DirectoryTree, IndexTree, Name, Tree};

/// Arguments of `tarfs sync`.
#[derive(clap::Args, Debug)]
pub(crate) struct SyncArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// The directory that is brought to the state of SOURCE; it is made if it is missing, and SOURCE may not lie in it
    #[arg(value_name = "DIR", conflicts_with = "allow_truncated")]
    directory: PathBuf,

    #[command(flatten)]
    layers: LayerArgs,

    #[command(flatten)]
    archive: ArchiveArgs,

    #[command(flatten)]
    write: WriteArgs,

    /// Remove from DIR what SOURCE lacks, once everything else is written
    ///
    /// An archive without an end marker may lack members, so nothing is removed unless --expect-sha256 confirms it.
    #[arg(long)]
    delete: bool,

    /// Compare the contents of files of equal size, and not their times
    #[arg(long)]
    checksum: bool,

    #[command(flatten)]
    dry_run: DryRunArg,
}

pub(crate) fn run(args: &SyncArgs) -> anyhow::Result<ExitCode> {
    let options = args.archive.apply(&args.source, args.write.options());
    if let Some(directory) = local_directory(&args.source.source) {
        let (options, jobs) = args.write.for_directory(options);
        let output = args.output(options);
        return output.end(args.sync_directory(&directory, &output, jobs));
    }
    let output = args.output(options);
    output.end(args.sync_archive(&output))
}

impl SyncArgs {
    fn output(&self, options: Options) -> Output<'_> {
        Output::new(
            &self.directory,
            options,
            &self.write,
            self.dry_run.is_set,
            false,
            Stream::Actions,
        )
    }

    fn sync_archive(&self, output: &Output<'_>) -> anyhow::Result<ExitCode> {
        let mut sources = self.layers.tree(&self.source).local_paths();
        let index = self.archive.saved.index.as_deref();
        sources.extend(index.and_then(|place| local_path(place.as_os_str())));
        self.ensure_outside(sources.iter().map(PathBuf::as_path))?;
        let tree = self.layers.tree(&self.source);
        let (source, archive) = (&self.source, &self.archive);
        let (_network, volume) =
            open_indexed(source, archive, &tree, output, "`tarfs sync` needs")?;
        let index = volume.complete_index();
        let index = index.context("the archive is not indexed")?;
        let tree = index.tree().context("cannot list the tree")?;
        // The plan has them, too.
        let _code = output::report_problems(tree, ExitCode::SUCCESS);
        let _lock = self.lock_destination()?;
        let without_acls = XattrFilter {
            acls: false,
            ..XattrFilter::default()
        };
        // The planner adds the ACLs to the modes that files get.
        let source = IndexTree::new(index.clone(), false).with_xattrs(without_acls);
        let source = with_contents(source, &volume);
        let root = (b".".as_slice(), Ino::ROOT.0.into());
        let plan = self.plan(Some(&*volume), source, &Ino::ROOT, root, &output.options())?;
        self.carry_out(output, &plan, |sink| {
            let (read, finished) = sink.sync(&*volume, tree, &plan);
            (shards::whether_complete(read), finished)
        })
    }

    fn sync_directory(
        &self,
        directory: &Path,
        output: &Output<'_>,
        jobs: Option<NonZeroUsize>,
    ) -> anyhow::Result<ExitCode> {
        self.source.given.check_directory(directory)?;
        self.ensure_outside([directory])?;
        ensure_apart(directory, &self.directory)?;
        raise_open_file_limit();
        let _lock = self.lock_destination()?;
        let source = DirectoryTree::new();
        let base = source.base().context("cannot open the current directory")?;
        // A link to the directory is followed.
        let path = directory.join(".");
        let root = (path.as_os_str().as_bytes(), 0);
        let plan = self.plan(None, source, &base, root, &output.options())?;
        self.carry_out(output, &plan, |sink| {
            (Ok(true), sink.sync_directory(directory, jobs, &plan))
        })
    }

    /// Refuses sources in DIR, which the run would change or delete.
    fn ensure_outside<'a>(
        &self,
        sources: impl IntoIterator<Item = &'a Path>,
    ) -> anyhow::Result<()> {
        let Ok(destination) = fs::canonicalize(&self.directory) else {
            return Ok(());
        };
        for source in sources {
            ensure!(
                !fs::canonicalize(source).is_ok_and(|path| path.starts_with(&destination)),
                "{}: is in {}, which is to be brought to its state (move it elsewhere)",
                source.display(),
                self.directory.display()
            );
        }
        Ok(())
    }

    /// Makes DIR if it is missing, and keeps other processes that update it out, unless nothing is written.
    fn lock_destination(&self) -> anyhow::Result<Option<DestinationLock>> {
        if self.dry_run.is_set {
            ensure_there(&self.directory)?;
            return Ok(None);
        }
        make_destination(&self.directory)?;
        Ok(Some(DestinationLock::acquire(&self.directory)?))
    }

    /// Compares the directory `root` of `source` with DIR.
    fn plan<A: Tree + Send + 'static>(
        &self,
        volume: Option<&dyn Volume>,
        source: A,
        base: &A::Directory,
        root: (&[u8], u64),
        options: &Options,
    ) -> anyhow::Result<SyncPlan> {
        let report = |path: &[u8], error: io::Error| match error.kind() {
            io::ErrorKind::CrossesDevices => output::print_warning(format_args!(
                "{}: something is mounted there, left alone",
                escape(path)
            )),
            _ => operands::report(path, &error),
        };
        let planner = SyncPlanner::new(options, volume, &self.directory, self.checksum, report);
        let planner = Arc::new(planner);
        let destination = Arc::new(DirectoryTree::on_one_file_system());
        let failed = || format!("{}: cannot be compared", self.directory.display());
        let place = destination.base_at(&self.directory);
        let place = place.with_context(failed)?;
        let names = (Name::directory(root.0, root.1), Name::directory(b".", 0));
        let comparison = Comparison {
            first: Arc::new(source),
            second: Arc::clone(&destination),
            differences: Arc::clone(&planner),
            contents: self.checksum,
        };
        comparison
            .run((base, &place), names, b"", None)
            .with_context(failed)?;
        Ok(planner.finish(volume, &destination, &place, self.delete))
    }

    /// Carries out `plan` by `write`, or prints it.
    fn carry_out(
        &self,
        output: &Output<'_>,
        plan: &SyncPlan,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        for path in &plan.sockets {
            output::print_warning(format_args!("{path}: socket ignored"));
        }
        if let Some(refusal) = &plan.deletion_refusal {
            output::print_error(refusal);
        }
        let is_whole = !plan.is_incomplete && !plan.has_mounts && plan.deletion_refusal.is_none();
        if self.dry_run.is_set {
            for (path, cause) in &plan.blocked {
                output::print_error(format_args!("{path}: {}", error_chain(cause)));
            }
            print_steps(plan)?;
            let summary = Summary {
                errors: plan.blocked.len() as u64,
                ..Summary::default()
            };
            return Ok(exit_code(is_whole, &summary));
        }
        output.to_disk("run the same command again", None, |sink| {
            let _progress = output.show_progress("updating", None);
            let (complete, finished) = write(sink);
            (complete.map(|complete| complete && is_whole), finished)
        })
    }
}

/// Prints what a run would do.
fn print_steps(plan: &SyncPlan) -> anyhow::Result<()> {
    let mut text = Vec::new();
    for (path, word) in plan.steps() {
        // A raw line break would look like another step.
        let name = shown_name(path, true);
        text.extend_from_slice(&[word.as_bytes(), b" ", &name, b"\n"].concat());
    }
    let output = operands::standard_output(false)?;
    output.write_last(&text);
    ensure!(operands::finish(&output), "the steps are not all shown");
    Ok(())
}
