//! Destination of a run, and its reports.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::bail;

use super::args::WriteArgs;
use crate::cli::exit_status;
use crate::cli::ui::cleanup_on_signal::CleanupOnSignal;
use crate::cli::ui::output;
use crate::cli::ui::progress::{self, ProgressOptions, Work};
use tarfs::ArchivePath;
use tarfs::Stats;
use tarfs::internal::error_chain::error_chain;
use tarfs::internal::escape::escape;
use tarfs::internal::periodic::PeriodicThread;
use tarfs::materialize::{self, Cause, Materializer, Options, Problem, Reporter, Staging, Summary};
use tarfs::tree::remove_tree;

/// Whether the source had no errors, and the result of the writer.
pub(super) type Written = (anyhow::Result<bool>, Result<Summary, materialize::Error>);

/// The destination of a run, and its reports.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(super) struct Output<'a> {
    start_time: Instant,
    pub(super) directory: &'a Path,
    options: Options,
    reporter: Arc<TerminalReporter>,
    pub(super) is_quiet: bool,
    dry_run: bool,
    prints_entries: bool,
    prints_counters: bool,
    pub(super) stats: Arc<Stats>,
}

impl<'a> Output<'a> {
    /// A destination that is written by `options`. Errors name truncated members if `reports_truncation`. Names of entries
    /// go to `names`.
    pub(super) fn new(
        directory: &'a Path,
        options: Options,
        args: &WriteArgs,
        dry_run: bool,
        reports_truncation: bool,
        names: Stream,
    ) -> Self {
        let prints_entries = args.verbose || dry_run;
        let reporter = Arc::new(TerminalReporter {
            names: prints_entries.then_some(names),
            ..TerminalReporter::for_contents(reports_truncation)
        });
        Self {
            start_time: Instant::now(),
            directory,
            options: Options {
                reporter: Some(Arc::clone(&reporter) as Arc<dyn Reporter>),
                ..options
            },
            reporter,
            is_quiet: args.quiet.is_set,
            dry_run,
            prints_entries,
            prints_counters: args.stats.is_set,
            stats: Arc::default(),
        }
    }

    pub(super) fn options(&self) -> Options {
        self.options.clone()
    }

    /// Prints the counters, if they are wanted, after the run that gave `outcome`. An error of the output is one of the
    /// run.
    pub(super) fn end(&self, outcome: anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
        if self.prints_counters {
            output::print_counters(&self.stats);
        }
        let code = outcome?;
        let error = self.reporter.output_error.get();
        error.map_or(Ok(code), |error| {
            bail!("cannot write the output: {}", output::describe(error))
        })
    }

    /// Writes to the destination by `write`, with files of layers in `layers_directory`. An interrupted run gives
    /// `hint`.
    pub(super) fn to_disk(
        &self,
        hint: &'static str,
        layers_directory: Option<PathBuf>,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let sink = Materializer::new(self.directory, self.options(), Arc::clone(&self.stats))?;
        let stats = Arc::clone(&self.stats);
        let place = self.directory.display().to_string();
        let _cleanup = CleanupOnSignal::install(move || {
            if let Some(directory) = layers_directory {
                // Errors are ignored, because the process ends in any case.
                let name = materialize::UNPLACED_DIRECTORY.as_bytes();
                File::open(directory)
                    .map(|parent| remove_tree(&parent, name))
                    .ok();
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

    /// Adds the destination to an error that stopped the run.
    pub(super) fn with_destination(
        &self,
        finished: Result<Summary, materialize::Error>,
    ) -> anyhow::Result<Summary> {
        finished.map_err(|error| {
            let is_for_entry = error.is_for_entry();
            let error = anyhow::Error::new(error);
            if is_for_entry {
                error.context(self.directory.display().to_string())
            } else {
                error
            }
        })
    }

    /// Shows what is written, of `total_bytes` if they are known, until the returned value is dropped.
    pub(super) fn show_progress(
        &self,
        verb: &'static str,
        total_bytes: Option<u64>,
    ) -> Option<PeriodicThread> {
        let options = ProgressOptions {
            verb,
            total_bytes,
            work: Work::Written,
            stats: Arc::clone(&self.stats),
        };
        progress::start(options, self.shows_no_progress())
    }

    /// Whether lines about entries take the place of the progress, or the user wants neither.
    pub(super) fn shows_no_progress(&self) -> bool {
        self.is_quiet || self.prints_entries
    }

    pub(super) fn report_summary(&self, summary: &Summary) {
        if !(self.is_quiet || self.dry_run) {
            progress::report_written(summary.entries, summary.bytes, self.start_time.elapsed());
        }
    }

    /// Like [`Output::to_disk`], but removes an incomplete tree, even when a signal ends the process. The caller moves a
    /// complete one to `final_place`, if it is given.
    pub(super) fn to_disk_atomically(
        &self,
        staging: &Arc<Staging>,
        final_place: Option<&Path>,
        caller_cleanup: Option<&CleanupOnSignal>,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let to_interrupt = Arc::clone(staging);
        let cleanup = move || report_leftover(to_interrupt.interrupt());
        let _own = match caller_cleanup {
            Some(caller_cleanup) => {
                caller_cleanup.run_first(cleanup);
                None
            }
            None => Some(CleanupOnSignal::install(cleanup)?),
        };
        let outcome = self.write_and_commit(staging, final_place, write);
        report_leftover(staging.discard());
        outcome
    }

    fn write_and_commit(
        &self,
        staging: &Staging,
        final_place: Option<&Path>,
        write: impl FnOnce(Materializer) -> Written,
    ) -> anyhow::Result<ExitCode> {
        let sink = Materializer::staged(staging, self.options(), Arc::clone(&self.stats))?;
        let (complete, finished) = write(sink);
        let (complete, summary) = (complete?, self.with_destination(finished)?);
        if complete && summary.errors == 0 {
            staging.commit(self.options.sync)?;
            self.report_summary(&summary);
            self.report_device_placeholders(final_place);
            return Ok(ExitCode::SUCCESS);
        }
        let code = exit_code(complete, &summary);
        let (place, hint) = match final_place {
            Some(place) => (place, ""),
            None => (self.directory, " (without --atomic the rest is kept)"),
        };
        output::print_error(format_args!(
            "{}: nothing was written there, because the tree is incomplete{hint}",
            place.display()
        ));
        Ok(code)
    }

    fn report_device_placeholders(&self, final_place: Option<&Path>) {
        let count = self.stats.written_device_placeholders.get();
        if count > 0 {
            output::print_warning(format_args!(
                "{}: device nodes written as empty files, because this user may not create device nodes: \
                 {count}",
                final_place.unwrap_or(self.directory).display()
            ));
        }
    }
}

/// Prints how much an interrupted run has written to `place`.
pub(super) fn report_interrupted(stats: &Stats, place: &str, hint: &str) {
    output::print_error(format_args!(
        "{place}: interrupted, {} entries and {} bytes were written ({hint})",
        stats.written_entries.get(),
        stats.written_bytes.get(),
    ));
}

fn report_leftover(removed: Result<(), materialize::Error>) {
    if let Err(error) = removed {
        output::print_error(output::describe(&error));
    }
}

pub(crate) fn exit_code(complete: bool, summary: &Summary) -> ExitCode {
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
    ExitCode::from(exit_status::FAILURE)
}

/// An output for names of entries.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stream {
    /// Standard output. Names are raw unless it is a terminal, because each line is a name.
    Names,
    /// Standard output. Names are escaped, because lines may begin with an action.
    Actions,
    /// Standard error. Names are escaped.
    Stderr,
}

/// Prints entries and problems at once.
#[derive(Debug)]
pub(crate) struct TerminalReporter {
    /// The output for names of entries, if they are printed.
    names: Option<Stream>,
    /// Whether to report truncated members. Otherwise the error that truncated them names them.
    reports_truncation: bool,
    /// The first error of printing an entry. A closed pipe is no error.
    output_error: OnceLock<io::Error>,
}

impl TerminalReporter {
    /// Reports only problems.
    pub(crate) fn for_contents(reports_truncation: bool) -> Self {
        Self {
            names: None,
            reports_truncation,
            output_error: OnceLock::new(),
        }
    }

    /// Prints the name of an entry, after `action` if there is one.
    fn print_entry(&self, action: &[u8], path: &ArchivePath) {
        let line = |is_escaped| [action, &shown_name(path, is_escaped), b"\n"].concat();
        let written = match self.names {
            None => Ok(()),
            Some(Stream::Names) => stdout().write_all(&line(stdout().is_terminal())),
            Some(Stream::Actions) => stdout().write_all(&line(true)),
            Some(Stream::Stderr) => stderr().write_all(&line(true)),
        };
        if let Err(error) = written
            && error.kind() != ErrorKind::BrokenPipe
        {
            // Only the first is reported.
            drop(self.output_error.set(error));
        }
    }
}

/// The name of an entry as it is printed, perhaps escaped as by `ls --escape`.
pub(super) fn shown_name(path: &ArchivePath, is_escaped: bool) -> Cow<'_, [u8]> {
    match path.as_bytes() {
        // As tar and rsync show it.
        b"" => b"./".into(),
        name if is_escaped => escape(name).into_bytes().into(),
        name => Cow::Borrowed(name),
    }
}

impl Reporter for TerminalReporter {
    fn entry(&self, path: &ArchivePath) {
        self.print_entry(b"", path);
    }

    fn deletion(&self, path: &ArchivePath) {
        self.print_entry(b"deleting ", path);
    }

    fn problem(&self, problem: &Problem) {
        let is_reported = match problem.cause {
            Cause::Truncated | Cause::EndsEarly => self.reports_truncation,
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
