//! Progress of long verbs, in one line on a terminal.

use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::logging;
use super::output::print_error;
use super::units::format_bytes;
use tarfs::Stats;
use tarfs::internal::periodic::PeriodicThread;

const DRAW_INTERVAL: Duration = Duration::from_millis(100);

/// The work whose progress is shown.
#[derive(Clone, Debug)]
pub(crate) struct ProgressOptions {
    /// The first word of the line.
    pub verb: &'static str,
    /// Number of bytes in all, if it is known.
    pub total_bytes: Option<u64>,
    pub work: Work,
    pub stats: Arc<Stats>,
}

/// The bytes and entries that count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Packed bytes and members that a scan has read.
    Read,
    /// Bytes and entries that were written to disk.
    Written,
}

/// Shows the progress until the returned thread is dropped, or nothing with `quiet` or without a terminal.
pub(crate) fn start(options: ProgressOptions, quiet: bool) -> Option<PeriodicThread> {
    if quiet || !stderr().is_terminal() {
        return None;
    }
    let view = ProgressView::new(options);
    let show = move |is_last| if is_last { view.clear() } else { view.draw() };
    PeriodicThread::start("tarfs-progress", DRAW_INTERVAL, show).ok()
}

/// Progress of indexing by another process.
#[derive(Default)]
pub(crate) struct IndexingProgress {
    stats: Arc<Stats>,
    line: Option<PeriodicThread>,
}

impl IndexingProgress {
    /// Shows the packed bytes in all, those that were read, and entries, or nothing any more.
    pub(crate) fn show(&mut self, progress: Option<(Option<u64>, u64, u64)>) {
        let Some((total_bytes, bytes, entries)) = progress else {
            self.line = None;
            return;
        };
        self.stats.scanned_packed_bytes.record_max(bytes);
        self.stats.scanned_members.record_max(entries);
        if self.line.is_none() {
            let options = ProgressOptions {
                verb: "indexing",
                total_bytes,
                work: Work::Read,
                stats: Arc::clone(&self.stats),
            };
            self.line = start(options, false);
        }
    }
}

struct ProgressView {
    options: ProgressOptions,
    bar: ProgressBar,
    start_time: Instant,
}

impl ProgressView {
    fn new(options: ProgressOptions) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{wide_msg}");
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        logging::set_progress_bar(Some(bar.clone()));
        Self {
            options,
            bar,
            start_time: Instant::now(),
        }
    }

    fn draw(&self) {
        let stats = &self.options.stats;
        let (bytes, entries) = match self.options.work {
            Work::Read => (&stats.scanned_packed_bytes, &stats.scanned_members),
            Work::Written => (&stats.written_bytes, &stats.written_entries),
        };
        let state = ProgressState {
            done_bytes: bytes.get(),
            total_bytes: self.options.total_bytes,
            entries: entries.get(),
            elapsed: self.start_time.elapsed(),
        };
        self.bar
            .set_message(state.line(self.options.verb, terminal_columns()));
        self.bar.tick();
    }

    fn clear(&self) {
        logging::set_progress_bar(None);
        self.bar.finish_and_clear();
    }
}

#[derive(Clone, Copy, Debug)]
struct ProgressState {
    done_bytes: u64,
    total_bytes: Option<u64>,
    entries: u64,
    elapsed: Duration,
}

impl ProgressState {
    /// Formats a line for a terminal of `columns`. If space is short, omits the rate first.
    fn line(&self, verb: &str, columns: usize) -> String {
        let done = format_bytes(self.done_bytes);
        let mut parts = vec![match self.total_bytes {
            Some(total) => {
                let percent = self.done_bytes.saturating_mul(100) / total.max(1);
                format!(
                    "{verb} {:>3}% {done}/{}",
                    percent.min(100),
                    format_bytes(total)
                )
            }
            None => format!("{verb} {done}"),
        }];
        parts.extend(
            self.time_left()
                .map(|left| format!("{} left", format_duration(left))),
        );
        parts.push(format!("{} entries", HumanCount(self.entries)));
        parts.push(format!(
            "{}/s",
            format_bytes(bytes_per_second(self.done_bytes, self.elapsed))
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
        let rest = self.total_bytes?.checked_sub(self.done_bytes)?;
        if self.elapsed < Duration::from_secs(1) || self.done_bytes == 0 {
            return None;
        }
        let millis = self.elapsed.as_millis() * u128::from(rest) / u128::from(self.done_bytes);
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
            format_bytes(bytes),
            elapsed.as_secs_f64(),
            format_bytes(bytes_per_second(bytes, elapsed)),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(read_mib: u64, total_mib: Option<u64>, millis: u64) -> ProgressState {
        ProgressState {
            done_bytes: read_mib << 20,
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
            "indexing  50% 512 MiB/1024 MiB, 1m 30s left, 12,345,678 entries, 5825 KiB/s"
        );
        let line = state(512, Some(1024), 90_000).line("indexing", 60);
        assert_eq!(line, "indexing  50% 512 MiB/1024 MiB, 1m 30s left");
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
