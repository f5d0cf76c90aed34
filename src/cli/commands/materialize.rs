//! `tarfs materialize`: writes an archive's tree to disk.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write, stdout};
use std::num::NonZeroUsize;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow, bail, ensure};
use tokio::runtime::Runtime;

use super::list::{
    self,
    open_place::{local_directory, with_contents},
};
use crate::cli::args::{
    self, CacheDirArgs, LayerArgs, SavedIndexArgs, ShardArg, Size, SourceArgs, XattrArgs,
};
use crate::cli::daemon::inherited_fds::raise_open_file_limit;
use crate::cli::open_archive;
use crate::cli::shards;
use crate::cli::ui::cleanup_on_signal::CleanupOnSignal;
use crate::cli::ui::output::{self, Progress, ProgressOptions};
use tarfs::ArchivePath;
use tarfs::Plain;
use tarfs::Stats;
use tarfs::archive::scan::{self, ScanError, Sink};
use tarfs::archive::{Error, OpenOptions, SavedIndex, TreeOrigin, Version, Volume};
use tarfs::codec::Compression;
use tarfs::index::{Ino, MemoryLimit};
use tarfs::internal::error_chain::error_chain;
use tarfs::layers::{Layer, WhiteoutFormat};
use tarfs::list::{Comparison, DirectoryTree, IndexTree, Name, Tree, escape};
use tarfs::locate::{OpenContext, Sources, TreeSpec};
use tarfs::materialize::{
    self, Cause, ContentSink, DestinationLock, DryRunSink, Existing, Glob, Materializer, Options,
    PathLinks, Problem, Reporter, SelectedPath, Selection, Staging, Step, Summary, UpdatePlan,
    UpdatePlanner,
};
use tarfs::source::{Access, Source, local_path};

/// Flags for layers. They conflict with all flags that select a part of SOURCE.
const LAYER_FLAGS: [&str; 2] = ["layers", "whiteouts"];

/// Flags that need the whole archive at once, or select other parts of it than a shard.
const SHARD_CONFLICTS: [&str; 10] = [
    "layers",
    "whiteouts",
    "paths",
    "strip_components",
    "exclude",
    "include",
    "atomic",
    "resume",
    "to_stdout",
    "dry_run",
];

/// Flags that select a part of SOURCE, have another policy for existing files, or write no tree.
const UPDATE_CONFLICTS: [&str; 12] = [
    "paths",
    "strip_components",
    "exclude",
    "include",
    "keep_old_files",
    "skip_old_files",
    "atomic",
    "resume",
    "shard",
    "finish",
    "to_stdout",
    "allow_truncated",
];

/// Arguments of `tarfs materialize`.
#[derive(clap::Args, Debug)]
pub(crate) struct MaterializeArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    options: MaterializeOptions,
}

/// Arguments of `tarfs materialize`, except those about SOURCE.
#[derive(clap::Args, Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct MaterializeOptions {
    #[command(flatten)]
    layers: LayerArgs,

    #[command(flatten)]
    saved: SavedIndexArgs,

    /// Write to this directory, which must exist, except with --atomic [default: .]
    #[arg(short = 'C', long, value_name = "DIR")]
    directory: Option<PathBuf>,

    /// Extract only these members and everything below them
    #[arg(value_name = "PATH", conflicts_with_all = LAYER_FLAGS)]
    paths: Vec<OsString>,

    /// Remove this many leading components of each name
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = LAYER_FLAGS,
          value_parser = args::count_parser::<usize>(0..=u64::MAX))]
    strip_components: usize,

    /// Skip members that match this pattern of GNU tar; repeatable
    #[arg(long, value_name = "PATTERN", conflicts_with_all = LAYER_FLAGS)]
    exclude: Vec<OsString>,

    /// Extract only members that match this pattern of GNU tar; repeatable
    #[arg(long, value_name = "PATTERN", conflicts_with_all = LAYER_FLAGS)]
    include: Vec<OsString>,

    /// Keep existing files, and count each as an error
    #[arg(short = 'k', long, conflicts_with_all = ["skip_old_files", "layers", "whiteouts"])]
    keep_old_files: bool,

    /// Keep existing files silently
    #[arg(long, conflicts_with_all = LAYER_FLAGS)]
    skip_old_files: bool,

    /// Use the numeric IDs of owners, not their names
    #[arg(long)]
    numeric_owner: bool,

    /// Do not set the owners of files [default, except for root]
    #[arg(long)]
    no_same_owner: bool,

    /// Set the owners of files [default for root]
    #[arg(long, conflicts_with = "no_same_owner")]
    same_owner: bool,

    /// Apply the umask to modes [default, except for root]
    #[arg(long)]
    no_same_permissions: bool,

    /// Set the exact modes of files [default for root]
    #[arg(short = 'p', long, conflicts_with = "no_same_permissions")]
    same_permissions: bool,

    #[command(flatten)]
    xattrs: XattrArgs,

    /// Number of threads that write files [default: 2 to 4 by processors, 16 on network file systems]
    ///
    /// FUSE counts as a network file system, because each file costs a round trip there. A directory as SOURCE is copied
    /// by one thread a processor, and more, up to 64, while they wait for the file system.
    #[arg(long, value_name = "N", value_parser = args::count_parser::<usize>(1..=64))]
    writers: Option<usize>,

    /// Create DIR completely or not at all; it must be missing or empty
    #[arg(long, requires = "directory", conflicts_with_all = [
        "keep_old_files", "skip_old_files", "allow_truncated", "to_stdout", "dry_run"])]
    atomic: bool,

    /// Return only when all data is on the disk
    #[arg(long, conflicts_with_all = ["to_stdout", "dry_run"])]
    sync: bool,

    /// Refuse an archive whose files or unpacked stream are larger than this [default: no limit]
    ///
    /// Holes of sparse files count.
    #[arg(long, value_name = "SIZE")]
    max_unpacked_size: Option<Size>,

    /// Save the progress beside DIR, and continue an interrupted run from there
    #[arg(long, conflicts_with_all = ["atomic", "keep_old_files", "skip_old_files", "allow_truncated",
        "expect_sha256", "to_stdout", "dry_run", "layers", "whiteouts"])]
    resume: bool,

    /// Write only shard I of N, as `tarfs plan --shards N` cuts them
    ///
    /// Directories get their attributes by --finish, once all shards are written. Without an index from `tarfs index`,
    /// the whole archive is read first.
    #[arg(long, value_name = "I/N", conflicts_with_all = SHARD_CONFLICTS)]
    shard: Option<ShardArg>,

    /// Finish DIR after all shards: check that nothing is missing, and set the attributes of directories
    #[arg(long, conflicts_with_all = SHARD_CONFLICTS,
          conflicts_with_all = ["shard", "keep_old_files", "skip_old_files"])]
    finish: bool,

    /// Bring the tree in DIR to the state of SOURCE, and write only what differs
    ///
    /// A file is written again if its size or its time differs. Extended attributes alone make no difference.
    #[arg(long, conflicts_with_all = UPDATE_CONFLICTS)]
    update: bool,

    /// Remove from DIR what SOURCE lacks, once everything else is written
    #[arg(long, requires_all = ["update", "directory"])]
    delete: bool,

    /// Compare the contents of files of equal size, and not their times
    #[arg(long, requires = "update")]
    checksum: bool,

    /// Write the contents of files to standard output, and nothing to disk
    #[arg(short = 'O', long, conflicts_with_all = LAYER_FLAGS)]
    to_stdout: bool,

    /// Print what would be written, and write nothing
    #[arg(long, conflicts_with = "to_stdout")]
    dry_run: bool,

    /// List each entry when it is written
    #[arg(short, long)]
    verbose: bool,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,

    /// Print counters at the end
    #[arg(long)]
    stats: bool,

    /// Final place of the tree, for a caller that writes it elsewhere without --atomic.
    #[arg(skip)]
    destination: Option<PathBuf>,

    /// Whether to write empty files for device nodes that this user may not create.
    #[arg(skip)]
    device_placeholders: bool,

    /// Whether SOURCE is a directory of this machine.
    #[arg(skip)]
    copies_directory: bool,
}

pub(crate) fn run(args: &MaterializeArgs) -> anyhow::Result<ExitCode> {
    let MaterializeArgs { source, options } = args;
    if options.dry_run && options.layers.is_set() && !options.update {
        output::print_error(
            "--dry-run can be used with --layer and --whiteouts only beside --update",
        );
        return Ok(ExitCode::from(output::EXIT_USAGE));
    }
    if let Some(directory) = local_directory(&source.source) {
        let write = if options.update {
            update_from_directory
        } else {
            copy_directory
        };
        return write(directory, source, options);
    }
    if options.update {
        return update(source, options);
    }
    if options.shard.is_some() || options.finish {
        return write_shard(source, options);
    }
    run_with(source, options, None)
}

/// Like [`run`], as part of a run that `cleanup` undoes.
pub(crate) fn run_with(
    source_args: &SourceArgs,
    args: &MaterializeOptions,
    cleanup: Option<&CleanupOnSignal>,
) -> anyhow::Result<ExitCode> {
    let network = open_archive::start_network_runtime()?;
    let stats = Arc::new(Stats::default());
    // Checked before anything is fetched.
    let staging = args
        .atomic
        .then(|| Staging::new(args.directory(), Arc::clone(&stats)))
        .transpose()?;
    let tree = args.layers.tree(source_args);
    args.check_before_opening()?;
    let context = args.open_context(source_args, &network, &stats)?;
    let Sources { layers, is_layered } = args.open_sources(&context, &tree)?;
    let first = layers.first().context("there is always SOURCE")?;
    let open_options = OpenOptions {
        published_index: first.published_index.clone(),
        ..context.archive_options(&tree, is_layered)
    };
    let saved = SavedIndex::find(&*first.source, &open_options)?;
    if !args.may_have_paths(saved.as_ref(), &*first.source)? {
        return Ok(ExitCode::from(output::EXIT_FAILURE));
    }
    let run = Run {
        output: Output::new(source_args, args, &stats),
        args,
        scan_options: scan::Options {
            saved_index: saved,
            ..open_options.scan.clone()
        },
        open_options: &open_options,
        network: &network,
        stats: &stats,
        source: &first.source,
        layers: &layers,
    };
    let outcome = if args.to_stdout {
        run.to_stdout()
    } else if args.dry_run {
        run.dry_run()
    } else if let Some(staging) = staging {
        let write = |sink| run.write(sink);
        let output = &run.output;
        output.to_disk_atomically(&Arc::new(staging), cleanup, write)
    } else if args.resume {
        run.resume()
    } else {
        run.to_disk()
    };
    if args.stats {
        output::print_counters(&stats);
    }
    outcome
}

/// Copies a directory of this machine. Owners are those of this machine, and modes are exact for any user.
fn copy_directory(
    directory: &Path,
    source: &SourceArgs,
    args: &MaterializeOptions,
) -> anyhow::Result<ExitCode> {
    args.check_for_directory(source)?;
    let stats = Arc::new(Stats::default());
    let staging = args
        .atomic
        .then(|| Staging::new(args.directory(), Arc::clone(&stats)));
    args.check_before_opening()?;
    let (args, jobs) = &args.for_directory();
    raise_open_file_limit();
    let output = Output::new(source, args, &stats);
    let copy = |sink: Materializer| {
        (
            Ok(true),
            sink.copy_directory(directory, *jobs, args.dry_run),
        )
    };
    let outcome = match staging.transpose()? {
        Some(staging) => output.to_disk_atomically(&Arc::new(staging), None, copy),
        None => output.to_disk("run it again", None, copy),
    };
    if args.stats {
        output::print_counters(&stats);
    }
    outcome
}

/// Writes one shard, or finishes the tree of all.
fn write_shard(source_args: &SourceArgs, args: &MaterializeOptions) -> anyhow::Result<ExitCode> {
    materialize::check_empty_destination(args.directory())?;
    let (network, stats) = (open_archive::start_network_runtime()?, Arc::default());
    let output = Output::new(source_args, args, &stats);
    let volume = output.open_indexed(&network, "shards need")?;
    let count = args.shard.map_or(1, |shard| shard.count);
    let (archive, index, plan) = shards::plan_of(&*volume, count)?;
    let write = |sink: Materializer| {
        let Some(shard) = args.shard else {
            let version = Version::of(archive);
            let (read, finished) = sink.finish_shards(&*volume, &index, &version);
            return (shards::whether_complete(read), finished);
        };
        let (read, finished) = sink.write_shard(archive, &index, &plan, shard.number);
        (shards::whether_complete(read), finished)
    };
    let outcome = output.to_disk("run the same command again", None, write);
    if args.stats {
        output::print_counters(&stats);
    }
    outcome
}

/// Brings the tree in the destination to the state of SOURCE.
fn update(source_args: &SourceArgs, args: &MaterializeOptions) -> anyhow::Result<ExitCode> {
    if args.delete {
        let mut sources = args.layers.tree(source_args).local_paths();
        let index = args.saved.index.as_deref();
        sources.extend(index.and_then(|place| local_path(place.as_os_str())));
        args.ensure_outside(sources.iter().map(PathBuf::as_path))?;
    }
    let (network, stats) = (open_archive::start_network_runtime()?, Arc::default());
    let output = Output::new(source_args, args, &stats);
    let volume = output.open_indexed(&network, "--update needs")?;
    let index = volume.complete_index();
    let index = index.context("the archive is not indexed")?;
    let tree = index.tree().context("cannot list the tree")?;
    let is_whole = output::report_problems(tree) == ExitCode::SUCCESS;
    let _lock = args.lock_destination()?;
    let source = with_contents(IndexTree::new(index.clone(), false), &volume);
    let root = (b".".as_slice(), Ino::ROOT.0.into());
    let plan = args.plan_update(source, &Ino::ROOT, root, &output.options()?)?;
    output.update(&plan, is_whole, |sink, delete| {
        let (read, finished) = sink.update(&*volume, tree, &plan, delete);
        (shards::whether_complete(read), finished)
    })
}

/// The same for a directory of this machine as SOURCE.
fn update_from_directory(
    directory: &Path,
    source_args: &SourceArgs,
    args: &MaterializeOptions,
) -> anyhow::Result<ExitCode> {
    args.check_for_directory(source_args)?;
    args.ensure_outside([directory])?;
    let places = [args.directory(), directory].map(fs::canonicalize);
    if let [Ok(destination), Ok(source)] = &places {
        ensure!(
            !destination.starts_with(source),
            "{}: holds the directory that is to be updated",
            directory.display()
        );
    }
    let stats = Arc::default();
    let (args, jobs) = args.for_directory();
    raise_open_file_limit();
    let output = Output::new(source_args, &args, &stats);
    let _lock = args.lock_destination()?;
    let source = DirectoryTree::new();
    let base = source.base().context("cannot open the current directory")?;
    // A link to the directory is followed.
    let path = directory.join(".");
    let root = (path.as_os_str().as_bytes(), 0);
    let plan = args.plan_update(source, &base, root, &output.options()?)?;
    output.update(&plan, true, |sink, delete| {
        (Ok(true), sink.update_from(directory, jobs, &plan, delete))
    })
}

/// Prints what an update would do.
fn print_steps(plan: &UpdatePlan, with_deletions: bool) -> anyhow::Result<()> {
    let mut text = Vec::new();
    for (path, step) in plan.steps(with_deletions) {
        let word = match step {
            Step::Delete => "delete",
            Step::Write => "write",
            Step::Change => "change",
            Step::Link => "link",
        };
        let path = if path.is_root() {
            b"."
        } else {
            path.as_bytes()
        };
        text.extend_from_slice(format!("{word} {}\n", escape(path)).as_bytes());
    }
    let output = list::open_place::standard_output(false)?;
    output.write_last(&text);
    ensure!(
        list::open_place::finish(&output),
        "the steps are not all shown"
    );
    Ok(())
}

/// Refuses flags that have no meaning for `source`.
fn refuse(flags: &[(&str, bool)], source: &str) -> anyhow::Result<()> {
    match flags.iter().find(|(_, is_requested)| *is_requested) {
        Some((flag, _)) => bail!("{flag} cannot be used with {source} (leave it out)"),
        None => Ok(()),
    }
}

/// Whether `path` has the form of a directory on this machine, and hardly of a member.
fn looks_like_destination(path: &Path) -> bool {
    match path.components().next() {
        Some(Component::RootDir) => path != Path::new("/"),
        Some(first) => first == Component::ParentDir || first.as_os_str() == "~",
        None => false,
    }
}

/// Returns the error for a PATH that probably means the destination.
fn not_a_member_error(path: &Path, reason: &str) -> anyhow::Error {
    let name = path.display();
    anyhow!(
        "{name}: {reason}, but a PATH is a member of the archive (to write into it use -C {name}; to \
         take the member of this name add -C .)"
    )
}

impl MaterializeOptions {
    /// Options that write all of an image to `directory`, which the caller moves to `destination`. Names of
    /// owners are ignored, because they belong to another system. Modes are exact even for an ordinary user.
    pub(crate) fn for_bundle(
        cache_dir: CacheDirArgs,
        directory: PathBuf,
        destination: PathBuf,
        quiet: bool,
    ) -> Self {
        Self {
            saved: SavedIndexArgs {
                cache_dir,
                ..SavedIndexArgs::default()
            },
            directory: Some(directory),
            numeric_owner: true,
            same_permissions: true,
            atomic: true,
            quiet,
            destination: Some(destination),
            device_placeholders: true,
            ..Self::default()
        }
    }

    fn directory(&self) -> &Path {
        self.directory.as_deref().unwrap_or(Path::new("."))
    }

    /// Refuses sources in the destination, which an update would change or delete.
    fn ensure_outside<'a>(
        &self,
        sources: impl IntoIterator<Item = &'a Path>,
    ) -> anyhow::Result<()> {
        let Ok(destination) = fs::canonicalize(self.directory()) else {
            return Ok(());
        };
        for source in sources {
            ensure!(
                !fs::canonicalize(source).is_ok_and(|path| path.starts_with(&destination)),
                "{}: is in {}, which is to be updated (move it elsewhere)",
                source.display(),
                self.directory().display()
            );
        }
        Ok(())
    }

    fn check_before_opening(&self) -> anyhow::Result<()> {
        if let Some(path) = self.possible_destination()
            && materialize::is_empty_directory(path)
        {
            return Err(not_a_member_error(path, "is an empty directory here"));
        }
        self.selection()?;
        if !(self.atomic || self.to_stdout || self.dry_run) {
            materialize::check_empty_destination(self.directory())?;
        }
        Ok(())
    }

    /// Opens SOURCE and its layers. Checks the flags for layers as soon as it is known that there are some.
    fn open_sources(&self, context: &OpenContext, tree: &TreeSpec) -> anyhow::Result<Sources> {
        let is_known = !tree.may_be_artifact();
        if is_known && tree.is_layered() {
            self.check_layered()?;
        }
        let sources = context.open_sources(tree)?;
        if !is_known && sources.is_layered {
            self.check_layered()?;
        }
        Ok(sources)
    }

    /// Checks the flags for a SOURCE that is opened as layers.
    fn check_layered(&self) -> anyhow::Result<()> {
        self.ensure_whole()?;
        if !self.atomic {
            ensure_empty(self.directory())?;
        }
        Ok(())
    }

    fn open_context(
        &self,
        source: &SourceArgs,
        network: &Runtime,
        stats: &Arc<Stats>,
    ) -> anyhow::Result<OpenContext> {
        let cache_dir = &self.saved.cache_dir;
        let mut context =
            open_archive::open_context(source, cache_dir, network, stats, self.quiet)?;
        self.saved.apply(&mut context, TreeOrigin::WRITTEN);
        if let Some(size) = self.max_unpacked_size {
            context.archive.scan.tar.limits.size = size.0;
        }
        Ok(context)
    }

    /// Keeps other processes that update the destination out of it, unless nothing is written.
    fn lock_destination(&self) -> anyhow::Result<Option<DestinationLock>> {
        let lock = (!self.dry_run).then(|| DestinationLock::acquire(self.directory()));
        Ok(lock.transpose()?)
    }

    /// Compares the directory `root` of `source` with the destination.
    fn plan_update<A: Tree + Send + 'static>(
        &self,
        source: A,
        base: &A::Directory,
        root: (&[u8], u64),
        options: &Options,
    ) -> anyhow::Result<UpdatePlan> {
        let report = |path: &[u8], error: io::Error| match error.kind() {
            io::ErrorKind::CrossesDevices => output::print_warning(format_args!(
                "{}: something is mounted there, left alone",
                escape(path)
            )),
            _ => list::open_place::report(path, &error),
        };
        let planner = UpdatePlanner::new(options, self.directory(), self.checksum, report);
        let planner = Arc::new(planner);
        let destination = Arc::new(DirectoryTree::on_one_file_system());
        let failed = || format!("{}: cannot be compared", self.directory().display());
        let place = destination.base_at(self.directory());
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
        Ok(planner.finish(&destination, &place, self.delete))
    }

    /// Returns whether the archive may have one of the PATHs. Prints those that it certainly lacks.
    fn may_have_paths(
        &self,
        saved: Option<&SavedIndex>,
        source: &dyn Source,
    ) -> anyhow::Result<bool> {
        let wanted = self.selection()?.paths.into_iter();
        let wanted: Vec<_> = wanted.map(|wanted| wanted.path).collect();
        if wanted.is_empty() {
            return Ok(true);
        }
        match saved.and_then(|saved| saved.may_have_any(&wanted)) {
            Some(false) => {
                for path in wanted {
                    let cause = Cause::NotFound;
                    output::print_error(Problem { path, cause });
                }
                Ok(false)
            }
            None if source.is_remote() => match self.possible_destination() {
                Some(path) if looks_like_destination(path) => Err(not_a_member_error(
                    path,
                    "has the form of a directory on this machine",
                )),
                _ => Ok(true),
            },
            Some(true) | None => Ok(true),
        }
    }

    /// Returns the PATH that may mean the destination: the only one, without -C.
    fn possible_destination(&self) -> Option<&Path> {
        match (self.paths.as_slice(), &self.directory) {
            ([path], None) if !self.to_stdout => Some(Path::new(path)),
            _ => None,
        }
    }

    /// Refuses flags that select a part of an image. With --layer, clap refuses them.
    fn ensure_whole(&self) -> anyhow::Result<()> {
        let requested = [
            ("PATH", !self.paths.is_empty()),
            ("--strip-components", self.strip_components > 0),
            ("--exclude", !self.exclude.is_empty()),
            ("--include", !self.include.is_empty()),
            ("--keep-old-files", self.keep_old_files),
            ("--skip-old-files", self.skip_old_files),
            ("--resume", self.resume),
            ("--to-stdout", self.to_stdout),
            ("--dry-run", self.dry_run),
        ];
        refuse(&requested, "an image")
    }

    /// The flags, and the number of threads, for a directory as SOURCE.
    fn for_directory(&self) -> (Self, Option<NonZeroUsize>) {
        let jobs = self.writers.and_then(NonZeroUsize::new);
        let args = Self {
            numeric_owner: true,
            same_permissions: true,
            copies_directory: true,
            // The threads of the walk write.
            writers: Some(1),
            ..self.clone()
        };
        (args, jobs)
    }

    /// Refuses flags that have no meaning for a directory as SOURCE.
    fn check_for_directory(&self, source: &SourceArgs) -> anyhow::Result<()> {
        let requested = [
            ("--shard", self.shard.is_some()),
            ("--finish", self.finish),
            ("--resume", self.resume),
            ("--to-stdout", self.to_stdout),
            ("--max-unpacked-size", self.max_unpacked_size.is_some()),
            ("--layer", self.layers.is_set()),
            ("--expect-sha256", source.expect_sha256.is_some()),
        ];
        refuse(&requested, "a directory")
    }

    fn selection(&self) -> anyhow::Result<Selection> {
        let globs = |patterns: &[OsString]| {
            patterns
                .iter()
                .map(|pattern| Glob::new(pattern.as_bytes()))
                .collect()
        };
        let paths = self.paths.iter().map(|path| {
            SelectedPath::new(path.as_bytes()).with_context(|| {
                let path = Path::new(path).display();
                format!(
                    "{path}: a PATH of `tarfs materialize` cannot contain `..` (name the member as `tarfs find` \
                     shows it; to write into a directory use -C {path})"
                )
            })
        });
        Ok(Selection {
            strip_components: self.strip_components,
            exclude: globs(&self.exclude),
            include: globs(&self.include),
            paths: paths.collect::<Result<_, _>>()?,
            // A journal has no links.
            links: if self.resume {
                PathLinks::default()
            } else {
                PathLinks::followed()
            },
        })
    }

    fn options(&self, source: &SourceArgs, reporter: Arc<dyn Reporter>) -> anyhow::Result<Options> {
        let defaults = Options::for_this_user();
        Ok(Options {
            selection: self.selection()?,
            existing: match (self.keep_old_files, self.skip_old_files) {
                (true, _) => Existing::Keep,
                (_, true) => Existing::Skip,
                _ => Existing::Replace,
            },
            device_placeholders: self.device_placeholders,
            same_owner: (defaults.same_owner || self.same_owner) && !self.no_same_owner,
            same_permissions: (defaults.same_permissions || self.same_permissions)
                && !self.no_same_permissions,
            numeric_owner: self.numeric_owner,
            copies_directory: self.copies_directory,
            xattrs: self.xattrs.filter(),
            writers: self.writers,
            sync: self.sync,
            max_entries: source.max_entries.unwrap_or(u64::MAX),
            index_memory: MemoryLimit::new(source.index_memory.0),
            reporter: Some(reporter),
        })
    }
}

/// Whether the source had no errors, and the result of the writer.
type Written = (anyhow::Result<bool>, Result<Summary, materialize::Error>);

/// The destination of a run, and its reports.
struct Output<'a> {
    start_time: Instant,
    source_args: &'a SourceArgs,
    args: &'a MaterializeOptions,
    stats: &'a Arc<Stats>,
    reporter: Arc<dyn Reporter>,
}

impl<'a> Output<'a> {
    fn new(
        source_args: &'a SourceArgs,
        args: &'a MaterializeOptions,
        stats: &'a Arc<Stats>,
    ) -> Self {
        Self {
            start_time: Instant::now(),
            source_args,
            args,
            stats,
            reporter: Arc::new(TerminalReporter {
                prints_entries: args.verbose || args.dry_run,
                escapes_names: stdout().is_terminal(),
                reports_truncation: source_args.allow_truncated,
            }),
        }
    }

    fn options(&self) -> anyhow::Result<Options> {
        let reporter = Arc::clone(&self.reporter);
        self.args.options(self.source_args, reporter)
    }

    /// Opens and indexes SOURCE, which the flag or noun `user` needs.
    fn open_indexed(&self, network: &Runtime, user: &str) -> anyhow::Result<Arc<dyn Volume>> {
        let tree = self.args.layers.tree(self.source_args);
        ensure!(
            !tree.source.is_stdin(),
            "standard input can be read only once, and {user} its index first (save it to a file)"
        );
        let mut context = self
            .args
            .open_context(self.source_args, network, self.stats)?;
        context.archive.scan.allow_skipping = true;
        Ok(context.open(&tree)?)
    }

    /// Writes to the destination by `write`, with files of layers in `layers_directory`. An interrupted run gives
    /// `hint`.
    fn to_disk(
        &self,
        hint: &'static str,
        layers_directory: Option<PathBuf>,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let options = self.options()?;
        let sink = Materializer::new(self.args.directory(), options, Arc::clone(self.stats))?;
        let stats = Arc::clone(self.stats);
        let place = self.args.directory().display().to_string();
        let _cleanup = CleanupOnSignal::install(move || {
            if let Some(directory) = layers_directory {
                // Errors are ignored, because the process ends in any case.
                drop(File::open(directory).and_then(|directory| {
                    materialize::remove_tree(&directory, OsStr::new(materialize::UNPLACED_FILES))
                }));
            }
            report_interrupted(&stats, &place, hint);
        })?;
        let (complete, finished) = write(sink);
        // An error of the destination stops the reading, too.
        let summary = self.with_destination(finished)?;
        let complete = complete?;
        self.report_summary(&summary);
        Ok(exit_code(complete, &summary))
    }

    /// Carries out `plan` by `write`, which also receives whether to delete, or prints it.
    fn update(
        &self,
        plan: &UpdatePlan,
        is_whole: bool,
        write: impl FnOnce(Materializer, bool) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let is_known = is_whole && !plan.is_incomplete;
        if self.args.delete && !is_known {
            output::print_warning("nothing is deleted, because not everything can be compared");
        }
        let delete = self.args.delete && is_known;
        if self.args.dry_run {
            print_steps(plan, delete)?;
            return Ok(exit_code(is_known && !plan.has_mounts, &Summary::default()));
        }
        let outcome = self.to_disk("run the same command again", None, |sink| {
            let (complete, finished) = write(sink, delete);
            let is_whole = is_known && !plan.has_mounts;
            (complete.map(|complete| complete && is_whole), finished)
        });
        if self.args.stats {
            output::print_counters(self.stats);
        }
        outcome
    }

    /// Adds the destination to an error that stopped the run.
    fn with_destination(
        &self,
        finished: Result<Summary, materialize::Error>,
    ) -> anyhow::Result<Summary> {
        finished.map_err(|error| {
            let is_for_entry = error.is_for_entry();
            let error = anyhow::Error::new(error);
            if is_for_entry {
                error.context(self.args.directory().display().to_string())
            } else {
                error
            }
        })
    }

    fn report_summary(&self, summary: &Summary) {
        if !(self.args.quiet || self.args.dry_run) {
            output::report_written(summary.entries, summary.bytes, self.start_time.elapsed());
        }
    }

    /// Like [`Output::to_disk`], but removes an incomplete tree, even when a signal ends the process.
    fn to_disk_atomically(
        &self,
        staging: &Arc<Staging>,
        bundle_cleanup: Option<&CleanupOnSignal>,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let to_interrupt = Arc::clone(staging);
        let cleanup = move || report_leftover(to_interrupt.interrupt());
        let _own = match bundle_cleanup {
            Some(bundle_cleanup) => {
                bundle_cleanup.run_first(cleanup);
                None
            }
            None => Some(CleanupOnSignal::install(cleanup)?),
        };
        let outcome = self.write_and_commit(staging, write);
        report_leftover(staging.discard());
        outcome
    }

    fn write_and_commit(
        &self,
        staging: &Staging,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let options = self.options()?;
        let sink = Materializer::staged(staging, options, Arc::clone(self.stats))?;
        let (complete, finished) = write(sink);
        let (complete, summary) = (complete?, self.with_destination(finished)?);
        if complete && summary.errors == 0 {
            staging.commit(self.args.sync)?;
            self.report_summary(&summary);
            self.report_device_placeholders();
            return Ok(ExitCode::SUCCESS);
        }
        let code = exit_code(complete, &summary);
        let (place, hint) = match &self.args.destination {
            Some(destination) => (destination.as_path(), ""),
            None => (
                self.args.directory(),
                " (without --atomic the rest is kept)",
            ),
        };
        output::print_error(format_args!(
            "{}: nothing was written there, because the tree is incomplete{hint}",
            place.display()
        ));
        Ok(code)
    }

    fn report_device_placeholders(&self) {
        let count = self.stats.written_device_placeholders.get();
        if count > 0 {
            let place = self.args.destination.as_deref();
            output::print_warning(format_args!(
                "{}: device nodes written as empty files, because this user may not create device nodes: \
                 {count}",
                place.unwrap_or(self.args.directory()).display()
            ));
        }
    }
}

/// One run over archives, for any destination.
struct Run<'a> {
    output: Output<'a>,
    args: &'a MaterializeOptions,
    network: &'a Runtime,
    stats: &'a Arc<Stats>,
    source: &'a Arc<dyn Source>,
    /// SOURCE and its layers.
    layers: &'a [Layer],
    open_options: &'a OpenOptions,
    scan_options: scan::Options,
}

impl Run<'_> {
    fn to_disk(&self) -> anyhow::Result<ExitCode> {
        let layers_directory = self.open_options.layer;
        let layers_directory = layers_directory.map(|_| self.args.directory().to_owned());
        let hint = "run it again; with --resume an interrupted run can continue";
        self.output
            .to_disk(hint, layers_directory, |sink| self.write(sink))
    }

    /// Writes everything to `sink`. Returns whether the archives had no errors, and the sink's result.
    fn write(&self, mut sink: Materializer) -> Written {
        if let Some(whiteouts) = self.open_options.layer {
            let complete = self.write_layers(&mut sink, whiteouts);
            return (complete, sink.finish());
        }
        let scanned = self.scan(&mut sink);
        // Directories get their attributes even if the archive ended with an error.
        let finished = sink.finish();
        (Ok(report_scan(self.source, scanned)), finished)
    }

    /// Writes the layers over each other. Returns whether they had no errors.
    fn write_layers(
        &self,
        sink: &mut Materializer,
        whiteouts: WhiteoutFormat,
    ) -> anyhow::Result<bool> {
        let mut left_bytes = self.args.max_unpacked_size.map(|size| size.0);
        sink.begin_layers(whiteouts);
        for layer in self.layers {
            let mut options = self.open_options.scan.clone();
            options.sha256 = layer.digest;
            options.tar.limits.size = left_bytes.unwrap_or(options.tar.limits.size);
            let open_options = OpenOptions {
                published_index: layer.published_index.clone(),
                ..self.open_options.clone()
            };
            options.saved_index = SavedIndex::find(&*layer.source, &open_options)?;
            sink.begin_layer();
            let scanned = self.scan_source(&layer.source, &options, sink);
            if !report_scan(&layer.source, scanned) {
                return Ok(false);
            }
            // An error that stops the run is printed at its end.
            let Ok(file_bytes) = sink.end_layer() else {
                return Ok(false);
            };
            left_bytes = left_bytes.map(|left| left.saturating_sub(file_bytes));
        }
        Ok(true)
    }

    /// Like [`Run::to_disk`], but continues an interrupted run and can be continued.
    fn resume(mut self) -> anyhow::Result<ExitCode> {
        let is_pinned = self.source.fingerprint().is_strong();
        if !is_pinned || self.source.access() == Access::Stream {
            output::print_warning(format_args!(
                "{}: the source has no reliable version or can be read only once, so an interrupted \
                 run starts again from the beginning",
                self.source.location()
            ));
            let _lock = DestinationLock::acquire(self.args.directory())?;
            return self.to_disk();
        }
        let options = self.output.options()?;
        let resume_key = self.resume_key(&options);
        let stats = Arc::clone(self.stats);
        let directory = self.args.directory();
        let (mut sink, resume_point) =
            Materializer::with_journal(directory, options, stats, &resume_key)?;
        let place = directory.display().to_string();
        let counted = Arc::clone(self.stats);
        let _cleanup = CleanupOnSignal::install(move || {
            report_interrupted(&counted, &place, "run the same command again to continue");
        })?;
        self.scan_options.resume_points = true;
        let has_checksums = resume_point
            .as_ref()
            .is_some_and(|point| point.compression != Compression::None && point.member > Plain(0));
        self.scan_options.resume = resume_point;
        let scanned = self.scan(&mut sink);
        let is_interrupted = match &scanned {
            Ok(_) => false,
            Err(ScanError::Sink(_)) => true,
            Err(ScanError::Archive { error, .. }) => {
                matches!(error, Error::Source(_) | Error::Interrupted)
            }
        };
        let finished = if is_interrupted {
            sink.suspend()
        } else {
            sink.finish()
        };
        let complete = report_scan(self.source, scanned);
        let code = self.output.with_destination(finished).map(|summary| {
            if !is_interrupted {
                self.output.report_summary(&summary);
            }
            exit_code(complete, &summary)
        });
        if is_interrupted || code.is_err() {
            output::print_error(format_args!(
                "{}: incomplete (run the same command again to continue)",
                directory.display()
            ));
        } else if has_checksums {
            output::print_warning(format_args!(
                "{}: checksums over bytes from before and after an interruption were not verified",
                self.source.location()
            ));
        }
        code
    }

    /// Returns the settings that a continued run must share with the first.
    fn resume_key(&self, options: &Options) -> String {
        let source = self.source;
        let scan = &self.scan_options;
        format!(
            "{} {} {} {:?} {:?} {:?} {:?}",
            env!("CARGO_PKG_VERSION"),
            source.locator(),
            source.fingerprint(),
            (scan.compression, scan.tar.ignore_zeros),
            options.selection,
            (
                options.same_owner,
                options.same_permissions,
                options.numeric_owner
            ),
            options.xattrs,
        )
    }

    fn to_stdout(&self) -> anyhow::Result<ExitCode> {
        let selection = self.args.selection()?;
        let reporter = Some(Arc::clone(&self.output.reporter));
        let mut sink = ContentSink::new(output::binary_stdout()?, selection, reporter);
        let scanned = self.scan(&mut sink);
        let finished = sink.finish();
        let complete = report_scan(self.source, scanned);
        Ok(exit_code(complete, &finished?))
    }

    fn dry_run(&self) -> anyhow::Result<ExitCode> {
        let selection = self.args.selection()?;
        let mut sink = DryRunSink::new(selection, Some(Arc::clone(&self.output.reporter)));
        let scanned = self.scan(&mut sink);
        let complete = report_scan(self.source, scanned);
        Ok(exit_code(complete, &sink.finish()))
    }

    fn scan<S: Sink>(&self, sink: &mut S) -> Result<scan::Summary, ScanError<S::Error>> {
        self.scan_source(self.source, &self.scan_options, sink)
    }

    fn scan_source<S: Sink>(
        &self,
        source: &Arc<dyn Source>,
        options: &scan::Options,
        sink: &mut S,
    ) -> Result<scan::Summary, ScanError<S::Error>> {
        let lens = self.layers.iter().map(|layer| &layer.source);
        let task = ProgressOptions {
            verb: "materializing",
            total_bytes: lens.map(|source| source.fingerprint().len).sum(),
            stats: Arc::clone(self.stats),
        };
        let _progress = Progress::start(task, self.args.quiet || self.args.verbose);
        scan::scan(source, options, self.network.handle(), self.stats, sink)
    }
}

/// Prints why a scan of `source` ended early, unless the sink reports it. Returns whether it was complete.
fn report_scan<E>(source: &Arc<dyn Source>, scanned: Result<scan::Summary, ScanError<E>>) -> bool {
    match scanned {
        Ok(summary) => summary.damages == 0,
        Err(ScanError::Sink(_)) => false,
        Err(ScanError::Archive { error, member, .. }) => {
            let location = source.location();
            let place = match member {
                Some(name) => format!("{location}: in member '{}'", escape(&name)),
                None => location.to_owned(),
            };
            output::print_error(output::format_with_hint(
                &anyhow::Error::new(error).context(place),
            ));
            false
        }
    }
}

/// Refuses a `directory` with contents, because whiteouts in layers could delete them.
fn ensure_empty(directory: &Path) -> anyhow::Result<()> {
    let name = directory.display();
    let mut entries =
        fs::read_dir(directory).with_context(|| format!("{name}: cannot read the directory"))?;
    ensure!(
        entries.next().is_none(),
        "{name}: is not empty, and whiteouts in layers could delete its files (name an empty directory)"
    );
    Ok(())
}

/// Prints how much an interrupted run has written to `place`.
fn report_interrupted(stats: &Stats, place: &str, hint: &str) {
    output::print_error(format_args!(
        "{place}: interrupted, {} entries and {} bytes were written ({hint})",
        stats.written_entries.get(),
        stats.written_bytes.get(),
    ));
}

fn report_leftover(removed: Result<(), materialize::Error>) {
    if let Err(error) = removed {
        output::print_error(output::format_with_hint(&error.into()));
    }
}

pub(super) fn exit_code(complete: bool, summary: &Summary) -> ExitCode {
    if complete && summary.errors == 0 {
        return ExitCode::SUCCESS;
    }
    // A single problem is on the screen already.
    if summary.errors > 1 {
        output::print_error(format_args!(
            "{} entries are missing or incomplete, for the reasons above",
            summary.errors
        ));
    }
    ExitCode::from(output::EXIT_FAILURE)
}

/// Prints entries and problems at once.
#[derive(Debug)]
pub(super) struct TerminalReporter {
    prints_entries: bool,
    /// Whether to escape names that could control a terminal, as `ls` does.
    escapes_names: bool,
    /// Whether to report truncated members. Otherwise the error that truncated them names them.
    reports_truncation: bool,
}

impl TerminalReporter {
    /// Reports only problems.
    pub(super) fn for_contents(reports_truncation: bool) -> Self {
        Self {
            prints_entries: false,
            escapes_names: stdout().is_terminal(),
            reports_truncation,
        }
    }
}

impl Reporter for TerminalReporter {
    fn entry(&self, path: &ArchivePath) {
        if self.prints_entries {
            let mut line = if self.escapes_names {
                escape(path.as_bytes()).into_bytes()
            } else {
                path.as_bytes().to_vec()
            };
            line.push(b'\n');
            // Ignored, because a closed pipe is no failure.
            drop(stdout().write_all(&line));
        }
    }

    fn problem(&self, problem: &Problem) {
        let is_reported = match problem.cause {
            Cause::Truncated => self.reports_truncation,
            // Its place in the archive is printed.
            Cause::Damaged => false,
            _ => true,
        };
        if is_reported {
            output::print_error(error_chain(problem));
        }
    }

    fn warning(&self, text: &str) {
        output::print_warning(text);
    }

    fn failure(&self, text: &str) {
        output::print_error(text);
    }
}
