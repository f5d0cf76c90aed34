//! Output for the user: errors, text and contents.

use std::fs::File;
use std::io::{self, BufWriter, Write, stderr, stdout};
use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Context;
use rustix::pipe::fcntl_setpipe_size;
use serde::Serialize;

use super::logging;
use crate::cli::before_main;
use crate::cli::exit_status;
use tarfs::Stats;
use tarfs::index::Index;
use tarfs::internal::escape::{escape_controls, escape_json};
use tarfs::internal::redact::redact_urls;
pub(crate) use tarfs::locate::describe;
use tarfs::serve::Failure;
use tarfs::{archive, locate, materialize};

/// Bytes of contents that are written to standard output at once.
const OUTPUT_BUFFER_BYTES: usize = 1 << 20;

/// Prints a line to standard error, which may be closed. No character of `text` controls a terminal.
pub(crate) fn print_error(text: impl std::fmt::Display) {
    print_escaped(&escape_controls(&redact_urls(&text.to_string())));
}

/// Prints lines as [`print_error`] prints one.
pub(crate) fn print_error_lines(text: &str) {
    let text = redact_urls(text);
    let lines: Vec<_> = text.lines().map(escape_controls).collect();
    print_escaped(&lines.join("\n"));
}

fn print_escaped(text: &str) {
    drop(logging::suspend_progress_bar(|| {
        writeln!(stderr(), "tarfs: {text}")
    }));
}

/// Prints a warning as [`print_error`] prints an error.
pub(crate) fn print_warning(text: impl std::fmt::Display) {
    print_error(format_args!("warning: {text}"));
}

/// Prints `text` to standard output. A reader that wants no more of it is no error.
pub(crate) fn print_text(text: &str) -> anyhow::Result<()> {
    match standard_output().and_then(|mut output| output.write_all(text.as_bytes())) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Formats `value` as one line of JSON, which [`print_text`] may print to a terminal.
pub(crate) fn to_json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|json| escape_json(&json))
}

/// Standard output without a buffer. The standard library hides errors of a closed one.
pub(crate) fn standard_output() -> io::Result<File> {
    if before_main::is_stdout_closed() {
        // Every write to it fails as to a closed descriptor.
        return File::open("/dev/null");
    }
    Ok(File::from(stdout().as_fd().try_clone_to_owned()?))
}

/// Standard output for the contents of files, which have no lines to look for. A pipe is made as large as any user
/// may make it.
pub(crate) fn binary_stdout() -> io::Result<BufWriter<File>> {
    let output = standard_output()?;
    // It may be no pipe.
    fcntl_setpipe_size(&output, OUTPUT_BUFFER_BYTES).ok();
    Ok(BufWriter::with_capacity(OUTPUT_BUFFER_BYTES, output))
}

/// A command line that is invalid, or does not fit SOURCE. `clap` cannot refuse it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub String);

/// Prints an error with its causes and its hint on one line. Returns the exit status. A reader of the output that has
/// ended is no error.
pub(crate) fn print_failure(error: &anyhow::Error) -> ExitCode {
    if let Some(materialize::Error::Output(error)) = error.downcast_ref()
        && error.kind() == io::ErrorKind::BrokenPipe
    {
        return ExitCode::SUCCESS;
    }
    let prefix = logging::journal_prefix(tracing::Level::ERROR);
    drop(writeln!(
        stderr(),
        "{prefix}tarfs: {}",
        escape_controls(&describe(&**error))
    ));
    let located: Option<&locate::Error> = error.downcast_ref();
    let failure: Option<&Failure> = error.downcast_ref();
    let is_usage_error = located.is_some_and(locate::Error::is_usage_error)
        || failure.is_some_and(|failure| failure.is_usage_error)
        || error.is::<UsageError>();
    ExitCode::from(if is_usage_error {
        exit_status::USAGE
    } else {
        exit_status::FAILURE
    })
}

/// Prints whether the archive is truncated, the first damaged or missing members, one per line, and their number. Returns
/// the exit code, which is `code` without such members.
pub(crate) fn report_problems(index: &Index, code: ExitCode) -> ExitCode {
    if index.origin().is_truncated {
        print_warning(archive::TRUNCATED_NOTE);
    }
    let count = index.problem_count();
    if count == 0 {
        return code;
    }
    let problems = index.problems();
    problems.iter().for_each(print_error);
    let more = count.saturating_sub(problems.len() as u64);
    if more > 0 && !problems.is_empty() {
        print_error(format_args!("{more} more are not shown"));
    }
    print_error(format_damaged_members(count));
    ExitCode::from(exit_status::FAILURE)
}

pub(crate) fn format_damaged_members(count: u64) -> String {
    match count {
        1 => "1 member is damaged or not in the tree".to_owned(),
        _ => format!("{count} members are damaged or not in the tree"),
    }
}

/// Prints every counter above zero, one per line.
pub(crate) fn print_counters(stats: &Stats) {
    for (name, value) in stats.snapshot() {
        if value > 0 {
            print_error(format_args!("{name}: {value}"));
        }
    }
}
