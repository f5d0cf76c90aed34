//! `tarfs materialize`: writes an archive's tree to disk.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use tokio::runtime::Handle;

use super::args::{
    ArchiveArgs, AtomicArg, DestinationArg, DryRunArg, ExistingArgs, SelectionArgs, WriteArgs,
};
use super::output::{Output, Stream, Written, exit_code, report_interrupted};
use crate::cli::args::{
    CacheDirArgs, GivenArgs, LayerArgs, PART_ARGS, QuietArg, SavedIndexArgs, SourceArgs, heading,
};
use crate::cli::commands::list::operands::ensure_archive;
use crate::cli::exit_status;
use crate::cli::ui::cleanup_on_signal::CleanupOnSignal;
use crate::cli::ui::output;
use crate::cli::ui::progress::{self, ProgressOptions, Work};
use tarfs::Plain;
use tarfs::archive::scan::{self, ScanError, Sink};
use tarfs::archive::{Error, OpenOptions, SavedIndex};
use tarfs::codec::Compression;
use tarfs::internal::escape::escape;
use tarfs::layers::{Layer, WhiteoutFormat};
use tarfs::locate::{OpenContext, Sources, TreeSpec};
use tarfs::materialize::{
    self, Cause, ContentSink, DestinationLock, DryRunSink, Materializer, Options, PathLinks,
    Problem, SelectedPath, Selection, Staging,
};
use tarfs::source::{Access, Source};

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
#[command(mut_arg("atomic", |atomic| atomic.conflicts_with("allow_truncated")),
          mut_args(|arg| match arg.get_id().as_str() {
              "layer" | "whiteouts" => arg.conflicts_with_all(PART_ARGS),
              _ => arg,
          }))]
pub(crate) struct MaterializeOptions {
    #[command(flatten)]
    layers: LayerArgs,

    #[command(flatten)]
    archive: ArchiveArgs,

    #[command(flatten)]
    destination: DestinationArg,

    /// Extract only these members and everything below them
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,

    #[command(flatten)]
    selection: SelectionArgs,

    #[command(flatten)]
    existing: ExistingArgs,

    #[command(flatten)]
    write: WriteArgs,

    #[command(flatten)]
    atomic: AtomicArg,

    /// Save the progress beside DIR, and continue an interrupted run from there
    #[arg(long, conflicts_with_all = ["ExistingArgs", "atomic", "dry_run", "allow_truncated", "expect_sha256"],
          help_heading = heading::EXISTING)]
    resume: bool,

    /// Write the contents of files to standard output, and nothing to disk
    #[arg(short = 'O', long, conflicts_with_all = ["atomic", "resume", "waits_for_disk", "dry_run"])]
    to_stdout: bool,

    #[command(flatten)]
    dry_run: DryRunArg,

    /// Final place of the tree, for a caller that writes it elsewhere without --atomic.
    #[arg(skip)]
    final_place: Option<PathBuf>,

    /// Whether to write empty files for device nodes that this user may not create.
    #[arg(skip)]
    device_placeholders: bool,
}

pub(crate) fn run(args: &MaterializeArgs) -> anyhow::Result<ExitCode> {
    let MaterializeArgs { source, options } = args;
    ensure_archive(&source.source, "to copy it use `tarfs copy`")?;
    run_with(source, options, None)
}

/// Like [`run`], as part of a run that `cleanup` undoes.
pub(crate) fn run_with(
    source_args: &SourceArgs,
    args: &MaterializeOptions,
    cleanup: Option<&CleanupOnSignal>,
) -> anyhow::Result<ExitCode> {
    let output = Output::new(
        args.destination.path(),
        args.options(source_args)?,
        &args.write,
        args.dry_run.is_set,
        source_args.allow_truncated,
        args.names(),
    );
    // Checked before anything is fetched.
    let staging = args
        .atomic
        .is_set
        .then(|| Staging::new(args.destination.path(), Arc::clone(&output.stats)))
        .transpose()?;
    let tree = args.layers.tree(source_args);
    args.check_before_opening()?;
    let (archive, quiet) = (&args.archive, args.write.quiet.is_set);
    let (_network, context) = archive.open_context(source_args, &output.stats, quiet)?;
    let Sources { layers, is_layered } = args.open_sources(&context, &tree, &source_args.given)?;
    let first = layers.first().context("there is always SOURCE")?;
    let open_options = OpenOptions {
        published_index: first.published_index.clone(),
        ..context.archive_options(&tree, is_layered)
    };
    let saved = SavedIndex::find(&*first.source, &open_options)?;
    if !args.may_have_paths(saved.as_ref(), &*first.source)? {
        return Ok(ExitCode::from(exit_status::FAILURE));
    }
    let run = Run {
        output: &output,
        args,
        scan_options: scan::Options {
            saved_index: saved,
            ..open_options.scan.clone()
        },
        open_options: &open_options,
        network: &context.network,
        source: &first.source,
        layers: &layers,
    };
    output.end(if args.to_stdout {
        run.to_stdout()
    } else if args.dry_run.is_set {
        Ok(run.dry_run())
    } else if let Some(staging) = staging {
        let (write, place) = (|sink| run.write(sink), args.final_place.as_deref());
        output.to_disk_atomically(&Arc::new(staging), place, cleanup, write)
    } else if args.resume {
        run.resume()
    } else {
        run.to_disk()
    })
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
    /// Options that write all of an image to `directory`, which the caller moves to `final_place`. Names of
    /// owners are ignored, because they belong to another system. Modes are exact even for an ordinary user.
    pub(crate) fn for_bundle(
        cache_dir: CacheDirArgs,
        directory: PathBuf,
        final_place: PathBuf,
        quiet: bool,
    ) -> Self {
        Self {
            archive: ArchiveArgs {
                saved: SavedIndexArgs {
                    cache_dir,
                    ..SavedIndexArgs::default()
                },
                numeric_owner: true,
                ..ArchiveArgs::default()
            },
            destination: DestinationArg {
                directory: Some(directory),
            },
            write: WriteArgs {
                same_permissions: true,
                quiet: QuietArg { is_set: quiet },
                ..WriteArgs::default()
            },
            atomic: AtomicArg { is_set: true },
            final_place: Some(final_place),
            device_placeholders: true,
            ..Self::default()
        }
    }

    fn check_before_opening(&self) -> anyhow::Result<()> {
        if let Some(path) = self.possible_destination()
            && materialize::is_empty_directory(path)
        {
            return Err(not_a_member_error(path, "is an empty directory here"));
        }
        if !(self.atomic.is_set || self.to_stdout || self.dry_run.is_set) {
            materialize::check_empty_destination(self.destination.path())?;
        }
        Ok(())
    }

    /// Opens SOURCE and its layers. Checks the flags for layers as soon as it is known that there are some.
    fn open_sources(
        &self,
        context: &OpenContext,
        tree: &TreeSpec,
        given: &GivenArgs,
    ) -> anyhow::Result<Sources> {
        let is_known = !tree.may_be_artifact();
        if is_known && tree.is_layered() {
            self.check_layered(given)?;
        }
        let sources = context.open_sources(tree)?;
        if !is_known && sources.is_layered {
            self.check_layered(given)?;
        }
        Ok(sources)
    }

    /// Checks the arguments `given` for a SOURCE that is opened as layers.
    fn check_layered(&self, given: &GivenArgs) -> anyhow::Result<()> {
        given.check_layered()?;
        if !self.atomic.is_set {
            ensure_empty(self.destination.path())?;
        }
        Ok(())
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
        match (self.paths.as_slice(), &self.destination.directory) {
            ([path], None) if !self.to_stdout => Some(Path::new(path)),
            _ => None,
        }
    }

    fn selection(&self) -> anyhow::Result<Selection> {
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
            paths: paths.collect::<Result<_, _>>()?,
            // A journal has no links.
            links: if self.resume {
                PathLinks::default()
            } else {
                PathLinks::followed()
            },
            ..self.selection.selection()
        })
    }

    /// The output for names of entries.
    fn names(&self) -> Stream {
        if self.to_stdout {
            Stream::Stderr
        } else {
            Stream::Names
        }
    }

    fn options(&self, source: &SourceArgs) -> anyhow::Result<Options> {
        Ok(Options {
            selection: self.selection()?,
            existing: self.existing.policy(),
            device_placeholders: self.device_placeholders,
            ..self.archive.apply(source, self.write.options())
        })
    }
}

/// One run over archives, for any destination.
struct Run<'a> {
    output: &'a Output<'a>,
    args: &'a MaterializeOptions,
    network: &'a Handle,
    source: &'a Arc<dyn Source>,
    /// SOURCE and its layers.
    layers: &'a [Layer],
    open_options: &'a OpenOptions,
    scan_options: scan::Options,
}

impl Run<'_> {
    fn to_disk(&self) -> anyhow::Result<ExitCode> {
        let layers_directory = self.open_options.layer;
        let layers_directory = layers_directory.map(|_| self.args.destination.path().to_owned());
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
        let mut left_bytes = self.args.archive.max_unpacked_size.map(|size| size.0);
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
            let _lock = DestinationLock::acquire(self.args.destination.path())?;
            return self.to_disk();
        }
        let options = self.output.options();
        let resume_key = self.resume_key(&options);
        let stats = Arc::clone(&self.output.stats);
        let directory = self.args.destination.path();
        let (mut sink, resume_point) =
            Materializer::with_journal(directory, options, stats, &resume_key)?;
        let place = directory.display().to_string();
        let counted = Arc::clone(&self.output.stats);
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
            source.canonical_location(),
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
        let options = self.output.options();
        let standard_output = output::binary_stdout()?;
        let mut sink = ContentSink::new(standard_output, options.selection, options.reporter);
        let scanned = self.scan(&mut sink);
        let finished = sink.finish();
        let complete = report_scan(self.source, scanned);
        Ok(exit_code(complete, &finished?))
    }

    fn dry_run(&self) -> ExitCode {
        let options = self.output.options();
        let mut sink = DryRunSink::new(options.selection, options.reporter);
        let scanned = self.scan(&mut sink);
        let complete = report_scan(self.source, scanned);
        exit_code(complete, &sink.finish())
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
            work: Work::Read,
            stats: Arc::clone(&self.output.stats),
        };
        let _progress = progress::start(task, self.output.shows_no_progress());
        scan::scan(source, options, self.network, &self.output.stats, sink)
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
            output::print_error(output::describe(&*anyhow::Error::new(error).context(place)));
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
