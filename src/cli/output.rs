//! What the user sees: errors told once, progress, exit codes.

use std::borrow::Cow;
use std::error::Error;
use std::io::{IsTerminal, Write, stderr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::telemetry;
use crate::base::stats::Stats;
use crate::base::task::Thread;
use crate::fs::{MountError, UnmountError};
use crate::index::Index;
use crate::stack::StackError;
use crate::{archive, image, materialize, source};

/// The exit code of a run in which something went wrong, as tar's.
pub(super) const FAILURE: u8 = 2;

/// The exit code of a command line that makes no sense: `EX_USAGE` of sysexits(3).
pub(super) const USAGE: u8 = 64;

/// How often a progress bar is drawn anew.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// How often a line of progress is printed where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Prints a line to standard error; a closed standard error is not worth dying for.
pub(super) fn complain(text: impl std::fmt::Display) {
    drop(writeln!(stderr(), "tarfs: {text}"));
}

/// Prints an error, its causes and what to do on one line, and returns [`FAILURE`].
pub(super) fn fail(error: &anyhow::Error) -> ExitCode {
    let mark = telemetry::mark(tracing::Level::ERROR);
    drop(writeln!(stderr(), "{mark}tarfs: {}", with_hint(error)));
    ExitCode::from(FAILURE)
}

/// An error and its causes on one line, each told once, and what to do about it.
pub(super) fn with_hint(error: &anyhow::Error) -> String {
    let told = chain(error);
    match error.chain().find_map(hint) {
        Some(hint) => format!("{told} ({hint})"),
        None => told,
    }
}

/// What to do about an error, if it is of a kind that knows.
fn hint(error: &(dyn Error + 'static)) -> Option<Cow<'static, str>> {
    if let Some(error) = error.downcast_ref::<source::Error>() {
        return error.cause.hint().map(Cow::from);
    }
    if let Some(error) = error.downcast_ref::<archive::Error>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<Box<archive::Error>>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<materialize::Error>() {
        return error.hint().map(Cow::from);
    }
    if let Some(error) = error.downcast_ref::<image::Cause>() {
        return error.hint().map(Cow::from);
    }
    if let Some(error) = error.downcast_ref::<Box<image::Cause>>() {
        return error.hint().map(Cow::from);
    }
    if let Some(StackError::TooManyEntries { .. }) = error.downcast_ref::<StackError>() {
        return Some(Cow::from(archive::MORE_ENTRIES));
    }
    if let Some(error) = error.downcast_ref::<MountError>() {
        return error.hint().map(Cow::from);
    }
    error.downcast_ref::<UnmountError>()?.hint().map(Cow::from)
}

/// An error and its causes on one line, each told once.
pub(super) fn chain(error: &anyhow::Error) -> String {
    chain_of(&**error)
}

/// As [`chain`], for any error.
pub(super) fn chain_of(error: &dyn Error) -> String {
    let mut text = without_number(error.to_string());
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = without_number(error.to_string());
        // Libraries that print their cause and also expose it would say it twice.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text.replace('\n', " ")
}

/// An error's text without the number that the standard library puts behind the system's words.
fn without_number(mut text: String) -> String {
    const MARK: &str = " (os error ";
    if let Some(at) = text.rfind(MARK)
        && let Some(tail) = text.get(at + MARK.len()..)
        && tail
            .strip_suffix(')')
            .is_some_and(|number| number.parse::<i32>().is_ok())
    {
        text.truncate(at);
    }
    text
}

/// Tells what of an archive is not in its tree, one line each when `aloud`; the exit code that
/// this amounts to.
pub(super) fn report_problems(index: &Index, aloud: bool) -> ExitCode {
    if index.problem_count() == 0 {
        return ExitCode::SUCCESS;
    }
    if aloud {
        for problem in index.problems() {
            complain(format_args!("{}: {}", problem.path, problem.what));
        }
    }
    complain(format_args!(
        "{} members are not in the tree",
        index.problem_count()
    ));
    ExitCode::from(FAILURE)
}

/// Prints every counter that counted something, a line each.
pub(super) fn show_counters(stats: &Stats) {
    for (name, value) in stats.snapshot() {
        if value > 0 {
            complain(format_args!("{name}: {value}"));
        }
    }
}

/// Shows how a scan goes on, until dropped: a bar on a terminal, now and then a line elsewhere.
#[derive(Debug)]
pub(super) struct Progress {
    // Before the thread: it ends when this is dropped.
    _stop: Sender<()>,
    _thread: Option<Thread<()>>,
}

/// What to show progress of.
#[derive(Clone, Debug)]
pub(super) struct Task {
    /// The word in front.
    pub verb: &'static str,
    /// Bytes of the source, if known.
    pub total_bytes: Option<u64>,
    /// Where the counting is done.
    pub stats: Arc<Stats>,
}

impl Progress {
    /// Shows progress of `task`, or with `quiet` nothing.
    pub(super) fn start(task: Task, quiet: bool) -> Self {
        let (stop, stopped) = channel();
        let show = move || {
            let view = View::new(task);
            while stopped.recv_timeout(view.every) == Err(RecvTimeoutError::Timeout) {
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

struct View {
    task: Task,
    bar: Option<ProgressBar>,
    every: Duration,
    since: Instant,
}

impl View {
    fn new(task: Task) -> Self {
        let terminal = stderr().is_terminal();
        let bar = terminal.then(|| {
            let target = ProgressDrawTarget::stderr();
            let (bar, template) = match task.total_bytes {
                Some(total) => (
                    ProgressBar::with_draw_target(Some(total), target),
                    "{prefix} {percent:>3}% [{bar:24}] {binary_bytes}/{binary_total_bytes} {msg} {binary_bytes_per_sec} {eta} left",
                ),
                None => (
                    ProgressBar::with_draw_target(None, target),
                    "{prefix} {spinner} {binary_bytes} {msg} {binary_bytes_per_sec}",
                ),
            };
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.with_style(style).with_prefix(task.verb)
        });
        Self {
            every: if terminal { DRAW_EVERY } else { LINE_EVERY },
            task,
            bar,
            since: Instant::now(),
        }
    }

    fn draw(&self) {
        let read = self.task.stats.scanned_packed_bytes.get();
        let entries = HumanCount(self.task.stats.scanned_members.get());
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{entries} entries"));
            bar.set_position(read);
            return;
        }
        let of = match self.task.total_bytes {
            Some(total) => format!(" of {}", HumanBytes(total)),
            None => String::new(),
        };
        let seconds = self.since.elapsed().as_secs().max(1);
        complain(format_args!(
            "{}: {}{of}, {entries} entries, {}/s",
            self.task.verb,
            HumanBytes(read),
            HumanBytes(read / seconds),
        ));
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_tells_each_cause_once() {
        let error = anyhow::anyhow!("refused")
            .context("cannot connect: refused")
            .context("http://host/x");
        assert_eq!(chain(&error), "http://host/x: cannot connect: refused");
    }
}
