//! Output for the user: errors, progress and exit codes.

use std::borrow::Cow;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write, stderr, stdout};
use std::iter::successors;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::pipe::fcntl_setpipe_size;

use super::logging;
use crate::cli::before_main;
use tarfs::Stats;
use tarfs::fuse::{MountError, UnmountError};
use tarfs::index::Index;
use tarfs::internal::error_chain::error_chain;
use tarfs::internal::thread::Thread;
use tarfs::locate::unwrap_transparent;
use tarfs::{archive, locate, materialize, source};

/// Exit code of a failed run, like that of tar.
pub(crate) const EXIT_FAILURE: u8 = 2;

/// Exit code of an invalid command line: `EX_USAGE` of sysexits(3).
pub(crate) const EXIT_USAGE: u8 = 64;

/// Bytes of contents that are written to standard output at once.
const OUTPUT_BUFFER_BYTES: usize = 1 << 20;

const DRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Interval between lines of progress without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Prints a line to standard error, which may be closed.
pub(crate) fn print_error(text: impl std::fmt::Display) {
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

/// Prints an error with its causes and its hint on one line. Returns [`EXIT_FAILURE`]. A reader of the output that has
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
        format_with_hint(error)
    ));
    ExitCode::from(EXIT_FAILURE)
}

/// Formats an error with its causes and its hint on one line.
pub(crate) fn format_with_hint(error: &anyhow::Error) -> String {
    describe(&**error)
}

/// As [`format_with_hint`], for an error of another kind.
pub(crate) fn describe(error: &(dyn Error + 'static)) -> String {
    let text = error_chain(error);
    let mut causes = successors(Some(error), |&error| error.source()).map(unwrap_transparent);
    match causes.find_map(find_hint) {
        Some(hint) => format!("{text} ({hint})"),
        None => text,
    }
}

fn find_hint(error: &(dyn Error + 'static)) -> Option<Cow<'static, str>> {
    if let Some(hint) = locate::hint(error) {
        return Some(hint);
    }
    if let Some(error) = error.downcast_ref::<materialize::Error>() {
        return error.hint().map(Cow::from);
    }
    if let Some(error) = error.downcast_ref::<MountError>() {
        return error.hint().map(Cow::from);
    }
    error.downcast_ref::<UnmountError>()?.hint().map(Cow::from)
}

/// Whether an error is a temporary outage of a source.
pub(crate) fn is_outage(error: &anyhow::Error) -> bool {
    error.chain().map(unwrap_transparent).any(|cause| {
        let source = match cause.downcast_ref() {
            Some(archive::Error::Source(error)) => Some(error),
            _ => cause.downcast_ref::<source::Error>(),
        };
        source.is_some_and(|error| error.cause.is_outage())
    })
}

/// Prints whether the archive is truncated, the first damaged or missing members, one per line, and their number. Returns
/// the exit code.
pub(crate) fn report_problems(index: &Index) -> ExitCode {
    if index.origin().is_truncated {
        print_warning(archive::TRUNCATED_NOTE);
    }
    let count = index.problem_count();
    if count == 0 {
        return ExitCode::SUCCESS;
    }
    let problems = index.problems();
    problems.iter().for_each(print_error);
    let more = count.saturating_sub(problems.len() as u64);
    if more > 0 && !problems.is_empty() {
        print_error(format_args!("{more} more are not shown"));
    }
    print_error(format_damaged_members(count));
    ExitCode::from(EXIT_FAILURE)
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

/// Shows the progress of a scan until it is dropped: a bar on a terminal, lines elsewhere.
#[derive(Debug)]
pub(crate) struct Progress {
    // Declared before the thread, because dropping it ends the thread.
    _stop: Sender<()>,
    _thread: Option<Thread<()>>,
}

#[derive(Clone, Debug)]
pub(crate) struct ProgressOptions {
    /// The first word of the line.
    pub verb: &'static str,
    /// Length of the source in bytes, if known.
    pub total_bytes: Option<u64>,
    pub stats: Arc<Stats>,
}

impl Progress {
    /// Shows the progress, or nothing with `quiet`.
    pub(crate) fn start(options: ProgressOptions, quiet: bool) -> Self {
        let (stop, stopped) = channel();
        let show = move || {
            let view = ProgressView::new(options);
            while stopped.recv_timeout(view.interval) == Err(RecvTimeoutError::Timeout) {
                view.draw();
            }
            view.clear();
        };
        let thread = (!quiet)
            .then(|| Thread::spawn("tarfs-progress", show).ok())
            .flatten();
        Self {
            _stop: stop,
            _thread: thread,
        }
    }
}

struct ProgressView {
    options: ProgressOptions,
    bar: Option<ProgressBar>,
    interval: Duration,
    start_time: Instant,
}

impl ProgressView {
    fn new(options: ProgressOptions) -> Self {
        let terminal = stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{wide_msg}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        logging::set_progress_bar(bar.clone());
        Self {
            interval: if terminal {
                DRAW_INTERVAL
            } else {
                LINE_INTERVAL
            },
            options,
            bar,
            start_time: Instant::now(),
        }
    }

    fn draw(&self) {
        let state = ProgressState {
            read_bytes: self.options.stats.scanned_packed_bytes.get(),
            total_bytes: self.options.total_bytes,
            entries: self.options.stats.scanned_members.get(),
            elapsed: self.start_time.elapsed(),
        };
        if let Some(bar) = &self.bar {
            bar.set_message(state.line(self.options.verb, terminal_columns()));
            bar.tick();
            return;
        }
        let (read, entries) = (state.read_bytes, HumanCount(state.entries));
        let of = match self.options.total_bytes {
            Some(total) => format!(" of {}", HumanBytes(total)),
            None => String::new(),
        };
        let seconds = state.elapsed.as_secs().max(1);
        print_error(format_args!(
            "{}: {}{of}, {entries} entries, {}/s",
            self.options.verb,
            HumanBytes(read),
            HumanBytes(read / seconds),
        ));
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            logging::set_progress_bar(None);
            bar.finish_and_clear();
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct ProgressState {
    read_bytes: u64,
    total_bytes: Option<u64>,
    entries: u64,
    elapsed: Duration,
}

impl ProgressState {
    /// Formats a line for a terminal of `columns`. If space is short, omits the rate first.
    fn line(&self, verb: &str, columns: usize) -> String {
        let read = HumanBytes(self.read_bytes);
        let mut parts = vec![match self.total_bytes {
            Some(total) => {
                let percent = self.read_bytes.saturating_mul(100) / total.max(1);
                format!(
                    "{verb} {:>3}% {read}/{}",
                    percent.min(100),
                    HumanBytes(total)
                )
            }
            None => format!("{verb} {read}"),
        }];
        parts.extend(
            self.time_left()
                .map(|left| format!("{} left", format_duration(left))),
        );
        parts.push(format!("{} entries", HumanCount(self.entries)));
        parts.push(format!(
            "{}/s",
            HumanBytes(bytes_per_second(self.read_bytes, self.elapsed))
        ));
        let mut line = String::new();
        for part in parts {
            let longer = if line.is_empty() {
                part
            } else {
                format!("{line}, {part}")
            };
            // Some terminals wrap a line of their full width.
            if longer.len() >= columns && !line.is_empty() {
                break;
            }
            line = longer;
        }
        line.truncate(columns.saturating_sub(1));
        line
    }

    /// Estimates the remaining time from the average speed; `None` if that is unknown.
    fn time_left(&self) -> Option<Duration> {
        let rest = self.total_bytes?.checked_sub(self.read_bytes)?;
        if self.elapsed < Duration::from_secs(1) || self.read_bytes == 0 {
            return None;
        }
        let millis = self.elapsed.as_millis() * u128::from(rest) / u128::from(self.read_bytes);
        Some(Duration::from_millis(
            u64::try_from(millis).unwrap_or(u64::MAX),
        ))
    }
}

fn bytes_per_second(bytes: u64, elapsed: Duration) -> u64 {
    let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    bytes.saturating_mul(1000) / millis.max(1)
}

/// Formats a duration in its two largest units.
fn format_duration(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        seconds => format!("{}h {}m", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Width of the terminal at standard error, or 80 if unknown.
fn terminal_columns() -> usize {
    let size = rustix::termios::tcgetwinsize(stderr());
    let columns = size.map_or(0, |size| usize::from(size.ws_col));
    if columns == 0 { 80 } else { columns }
}

/// Prints to a terminal how many entries and bytes were written, and the time.
pub(crate) fn report_written(entries: u64, bytes: u64, elapsed: Duration) {
    if stderr().is_terminal() {
        print_error(format_args!(
            "{} entries, {} in {:.1} s ({}/s)",
            HumanCount(entries),
            HumanBytes(bytes),
            elapsed.as_secs_f64(),
            HumanBytes(bytes_per_second(bytes, elapsed)),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(read_mib: u64, total_mib: Option<u64>, millis: u64) -> ProgressState {
        ProgressState {
            read_bytes: read_mib << 20,
            total_bytes: total_mib.map(|total| total << 20),
            entries: 12_345_678,
            elapsed: Duration::from_millis(millis),
        }
    }

    // Promises: write-messages
    #[test]
    fn progress_line_fits_the_terminal() {
        let states = [
            state(0, Some(999_999), 0),
            state(1023, Some(999_999), 1500),
            state(999_999, Some(999_999), 1_000_000),
            state(1 << 30, None, 10_000),
        ];
        for state in states {
            for columns in [40, 80, 200] {
                let line = state.line("materializing", columns);
                assert!(line.len() < columns, "{line}");
            }
        }
        let line = state(512, Some(1024), 90_000).line("indexing", 80);
        assert_eq!(
            line,
            "indexing  50% 512.00 MiB/1.00 GiB, 1m 30s left, 12,345,678 entries, 5.69 MiB/s"
        );
        let line = state(512, Some(1024), 90_000).line("indexing", 60);
        assert_eq!(line, "indexing  50% 512.00 MiB/1.00 GiB, 1m 30s left");
    }

    // Promises: write-messages
    #[test]
    fn progress_line_at_the_start_has_no_estimate() {
        for state in [
            state(0, Some(10), 5000),
            state(1, Some(10), 10),
            state(1, None, 5000),
        ] {
            assert!(!state.line("indexing", 80).contains("left"));
        }
        assert_eq!(format_duration(Duration::from_secs(3725)), "1h 2m");
    }
}
