//! `tarfs status`: shows the state of this user's mounts.

use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;

use crate::cli::args::JsonArg;
use crate::cli::completion;
use crate::cli::environment;
use crate::cli::exit_status;
use crate::cli::ui::output;
use crate::cli::ui::units::{format_age, format_bytes, format_index, format_version};
use tarfs::fuse;
use tarfs::internal::escape::{escape, escape_controls};
use tarfs::serve::{self, CopyProgress, Status, figures};

/// Shows the state of one mount, or of all mounts of this user.
#[derive(Clone, Debug, Args)]
pub(crate) struct StatusArgs {
    /// Show only the mount at this mountpoint
    #[arg(add = ArgValueCandidates::new(completion::mountpoints))]
    pub mountpoint: Option<PathBuf>,
    /// Show the use of memory and disk, and counters above zero
    #[arg(short, long, conflicts_with = "json")]
    pub verbose: bool,
    #[command(flatten)]
    json: JsonArg,
    /// Show it again and again, as watch(1) does, until Ctrl-C or until DIR is unmounted
    #[arg(short, long)]
    watch: bool,
    /// Seconds between two times, with --watch
    #[arg(short = 'n', long, value_name = "SECONDS", default_value = "2", requires = "watch",
          value_parser = parse_interval)]
    interval: Duration,
}

/// Least interval, as of watch(1).
const MIN_INTERVAL: f64 = 0.1;

/// Cursor to the first line, and the rest of a line or of the screen cleared.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_REST: &str = "\x1b[J";

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds: &f64| *seconds >= MIN_INTERVAL);
    let interval = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    interval.ok_or_else(|| format!("expected seconds, at least {MIN_INTERVAL}"))
}

/// Prints the statuses. It fails if no process serves an archive at the given mountpoint.
pub(crate) fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let mountpoint = args.mountpoint.as_deref().map(|path| {
        fuse::canonical_mountpoint(path).with_context(|| format!("cannot find {}", path.display()))
    });
    let mountpoint = mountpoint.transpose()?;
    let (mut statuses, mut code) = find_statuses(mountpoint.as_deref());
    if let Some(mountpoint) = mountpoint.as_deref().filter(|_| statuses.is_empty()) {
        bail!("no process of this user serves {}", mountpoint.display());
    }
    let mut output = output::standard_output()?;
    let on_terminal = args.watch && output.is_terminal();
    loop {
        let mut text = String::new();
        for (number, status) in statuses.iter().enumerate() {
            if args.json.is_set {
                text += &(output::to_json(status)? + "\n");
            } else {
                let mut before = statuses.iter().take(number);
                let sharer = before.find(|other| other.shares_tree_with(status));
                text += &to_text(status, sharer, args.verbose, SystemTime::now());
            }
        }
        if on_terminal {
            text = format!("{HOME}{}{CLEAR_REST}", text.replace('\n', CLEAR_LINE));
        }
        match output.write_all(text.as_bytes()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(code),
            written => written.context("cannot write to standard output")?,
        }
        if !args.watch {
            return Ok(code);
        }
        sleep(args.interval);
        (statuses, code) = find_statuses(mountpoint.as_deref());
        if mountpoint.is_some() && statuses.is_empty() {
            return Ok(code);
        }
    }
}

/// The status of the mount at `mountpoint`, or of all mounts. The exit code is a failure after a reported error.
fn find_statuses(mountpoint: Option<&Path>) -> (Vec<Status>, ExitCode) {
    let (mut statuses, mut code) = (Vec::new(), ExitCode::SUCCESS);
    for directory in environment::runtime_dirs() {
        let found = match mountpoint {
            None => serve::list_statuses(&directory),
            Some(mountpoint) => serve::find_status(&directory, mountpoint).map(Vec::from_iter),
        };
        match found {
            Ok(found) => statuses.extend(found),
            // Continue with mounts in other directories.
            Err(error) => {
                let name = directory.display();
                output::print_error(format_args!("cannot look for mounts in {name}: {error}"));
                code = ExitCode::from(exit_status::FAILURE);
            }
        }
    }
    (statuses, code)
}

/// Names of what is shown, each with its value.
type Lines = Vec<(String, String)>;

/// Formats what a user wants first: the source, the index, what is local, and errors. Lines of the tree are with `sharer`, if
/// another mount has the same, and so are notes and details that are equal.
fn to_text(status: &Status, sharer: Option<&Status>, is_verbose: bool, now: SystemTime) -> String {
    let mut lines = Lines::new();
    let mut add = |name: &str, value: String| lines.push((name.to_owned(), value));
    add("source", status.source.clone());
    for layer in &status.layers {
        add("layer", layer.clone());
    }
    match sharer {
        Some(sharer) => add("shares all with", format_mountpoint(sharer)),
        None => lines.extend(tree_lines(status)),
    }
    let mut add = |name: &str, value: String| lines.push((name.to_owned(), value));
    if let Some(copy) = &status.copy {
        add("copy", format_copy(copy));
    }
    if let Some(writable) = &status.writable {
        let until = if writable.is_temporary {
            ", until it is unmounted"
        } else {
            ""
        };
        let place = format!("by {}, to {}{until}", writable.by, writable.upper);
        add("writable", place);
    }
    lines.extend(problem_lines(status, sharer, now));
    lines.push((
        "process".to_owned(),
        format!(
            "{}, mounted {}",
            status.pid,
            format_age(status.since_unix_seconds, now)
        ),
    ));
    if is_verbose {
        let shown = sharer.map(|sharer| detail_lines(sharer, true));
        let shown = shown.unwrap_or_default();
        let details = detail_lines(status, sharer.is_some()).into_iter();
        lines.extend(details.filter(|line| !shown.contains(line)));
    }
    join_lines(status, lines)
}

/// Lines of the tree of a mount.
fn tree_lines(status: &Status) -> Lines {
    let mut lines = Lines::new();
    let mut add = |name: &str, value: String| lines.push((name.to_owned(), value));
    match &status.directory {
        None => {
            let state = format_index(&status.index);
            add("index", format!("{state}, {} entries", status.entries));
        }
        Some(directory) => {
            let (archives, open) = (directory.archives, directory.open);
            let failed = match directory.failed {
                0 => String::new(),
                failed => format!(", {failed} failed"),
            };
            add(
                "archives",
                format!("{archives}, {open} of them open{failed}"),
            );
        }
    }
    add("local", format_local(status));
    if status.prefetch.state != "off" && status.directory.is_none() {
        let (done, total) = (status.prefetch.done_spans, status.prefetch.total_spans);
        let state = format!("{}, {done} of {total} blocks", status.prefetch.state);
        add("prefetch", state);
    }
    lines
}

/// The `lines` of `status`, below its mountpoint.
fn join_lines(status: &Status, lines: Lines) -> String {
    let detached = if status.detached {
        " (detached, still in use)"
    } else {
        ""
    };
    let mut text = format!("{}{detached}\n", format_mountpoint(status));
    for (name, value) in lines {
        // Values name sources and files, which others may have named.
        let line = format!("  {name:<20} {}\n", escape_controls(&value));
        text.push_str(&line);
    }
    text
}

fn format_mountpoint(status: &Status) -> String {
    match &status.mountpoint_bytes {
        Some(bytes) => escape(bytes),
        None => escape_controls(&status.mountpoint),
    }
}

/// Formats how much of the data needs no network.
fn format_local(status: &Status) -> String {
    let memory = format!("{} in memory", format_bytes(status.memory.spans_bytes));
    match &status.disk_cache {
        Some(disk_cache) => format!("{} on disk, {memory}", format_bytes(disk_cache.held_bytes)),
        None => memory,
    }
}

fn format_copy(copy: &CopyProgress) -> String {
    format!(
        "{}, {} of {} files, {} of {}, in {}",
        copy.state,
        copy.files,
        copy.total_files,
        format_bytes(copy.bytes),
        format_bytes(copy.total_bytes),
        copy.directory
    )
}

/// Damaged members and notes, unless `sharer` has those of a shared tree, and failed reads.
fn problem_lines(status: &Status, sharer: Option<&Status>, now: SystemTime) -> Lines {
    let mut lines = Lines::new();
    let mut add = |name: &str, value: String| lines.push((name.to_owned(), value));
    if status.damaged_members > 0 && sharer.is_none() {
        add("damaged members", status.damaged_members.to_string());
        for member in &status.damaged {
            add("damaged", member.clone());
        }
    }
    let is_shown = |note| sharer.is_some_and(|sharer| sharer.notes.contains(note));
    for note in status.notes.iter().filter(|note| !is_shown(note)) {
        add("note", note.clone());
    }
    for error in &status.errors {
        let when = format_age(error.last_unix_seconds, now);
        let (path, reason, count) = (&error.path, &error.reason, error.count);
        add("error", format!("{path}: {reason} ({when}, {count} times)"));
    }
    lines
}

/// The version, the use of memory and disk, unless that of a shared tree is shown, and counters, for `--verbose`.
fn detail_lines(status: &Status, is_tree_shown: bool) -> Lines {
    let mut texts = vec![("version", format_version(&status.version))];
    texts.extend(status.metrics.clone().map(|url| ("metrics", url)));
    let sizes = figures(status).into_iter();
    let sizes = sizes.filter(|figure| !figure.line.is_empty() && !is_tree_shown);
    texts.extend(sizes.map(|figure| (figure.line, format_bytes(figure.value))));
    texts.push(("prefetch, mode", status.prefetch.what.clone()));
    if status.prefetch.replay_spans > 0 {
        let (done, total) = (status.prefetch.replayed_spans, status.prefetch.replay_spans);
        texts.push(("prefetch, replay", format!("{done} of {total} blocks")));
    }
    let counters = status.counters.iter().filter(|&(_, &value)| value > 0);
    texts
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .chain(counters.map(|(name, value)| (name.clone(), value.to_string())))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use tarfs::serve::{IndexState, Phase};

    fn example() -> Status {
        let text = concat!(
            r#"{"source":"http://host/a.tar","mountpoint":"/mnt","pid":7,"since_unix_seconds":1000,"#,
            r#""version":"3 bytes","entries":2,"index":{"phase":"complete","scanned_bytes":7,"of_bytes":7},"#,
            r#""resident_bytes":20971520,"memory":{"budget_bytes":134217728,"spans_bytes":41943040,"#,
            r#""reads_bytes":5,"decoders_bytes":6,"index_bytes":12345},"disk_cache":{"held_bytes":31457280,"#,
            r#""all_bytes":52428800,"limit_bytes":73400320},"prefetch":{"what":"all","state":"running","#,
            r#""done_spans":3,"total_spans":7,"replayed_spans":1,"replay_spans":2},"#,
            r#""metrics":"http://127.0.0.1:9469/metrics","counters":{"scans":1},"damaged_members":2,"#,
            r#""damaged":["a/c: cut"],"notes":["stored"],"#,
            r#""errors":[{"last_unix_seconds":1000,"count":3,"path":"a/b","reason":"cut"}]}"#,
        );
        serde_json::from_str(text).expect("a status")
    }
    use tarfs::fuse::DirectoryStatus;
    use tarfs::serve::OverlayStatus;

    // Promises: status-shows
    #[test]
    fn status_shows_what_a_user_wants_first() {
        let status = example();
        let now = UNIX_EPOCH + Duration::from_secs(1300);
        let summary = "/mnt
  source               http://host/a.tar
  index                complete, 2 entries
  local                30 MiB on disk, 40 MiB in memory
  prefetch             running, 3 of 7 blocks
  damaged members      2
  damaged              a/c: cut
  note                 stored
  error                a/b: cut (5 min ago, 3 times)
  process              7, mounted 5 min ago
";
        let details = "  version              3 bytes
  metrics              http://127.0.0.1:9469/metrics
  memory, resident     20 MiB
  memory, budget       128 MiB
  memory, blocks       40 MiB
  memory, reads        5 B
  memory, decoders     6 B
  memory, index        12 KiB
  disk cache, archive  30 MiB
  disk cache, all      50 MiB
  disk cache, limit    70 MiB
  prefetch, mode       all
  prefetch, replay     1 of 2 blocks
  scans                1
";
        assert_eq!(to_text(&status, None, false, now), summary);
        assert_eq!(
            to_text(&status, None, true, now),
            format!("{summary}{details}")
        );
    }

    // Promises: status-shows
    #[test]
    fn shared_tree_is_shown_once() {
        let (one, mut other) = (example(), example());
        other.mountpoint = "/other".to_owned();
        other.errors.clear();
        other.notes.push("it is elsewhere".to_owned());
        other.counters.insert("opens".to_owned(), 4);
        let text = "/other
  source               http://host/a.tar
  shares all with      /mnt
  note                 it is elsewhere
  process              7, mounted 5 min ago
";
        let now = UNIX_EPOCH + Duration::from_secs(1300);
        assert_eq!(to_text(&other, Some(&one), false, now), text);
        let details = "  opens                4\n";
        assert_eq!(
            to_text(&other, Some(&one), true, now),
            format!("{text}{details}")
        );
    }

    // Promises: status-shows
    #[test]
    fn names_in_a_status_reach_no_terminal_raw() {
        let mut status = example();
        status.source = "http://host/\u{1b}[31m\na.tar".to_owned();
        let text = to_text(&status, None, true, UNIX_EPOCH);
        assert!(
            !text.contains('\u{1b}') && !text.contains("\na.tar"),
            "{text}"
        );
    }

    #[test]
    fn copy_progress_is_printed_in_one_line() {
        let status = Status {
            copy: Some(CopyProgress {
                directory: "/copy".into(),
                state: "writing".into(),
                files: 3,
                total_files: 40,
                bytes: 5,
                total_bytes: 20 << 20,
                failures: 0,
            }),
            ..example()
        };
        let text = to_text(&status, None, false, UNIX_EPOCH);
        let line = "\n  copy                 writing, 3 of 40 files, 5 B of 20 MiB, in /copy\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn archives_of_a_directory_are_printed_instead_of_an_index() {
        let directory = DirectoryStatus {
            archives: 7,
            open: 2,
            failed: 1,
            notes: Vec::new(),
        };
        let status = Status {
            directory: Some(directory),
            ..example()
        };
        let text = to_text(&status, None, false, UNIX_EPOCH);
        let line = "\n  archives             7, 2 of them open, 1 failed\n";
        assert!(text.contains(line) && !text.contains("index"), "{text}");
    }

    #[test]
    fn upper_directory_is_printed() {
        let printed = |is_temporary| {
            let writable = Some(OverlayStatus {
                upper: "/v/upper".into(),
                is_temporary,
                by: "overlayfs".into(),
            });
            let status = Status {
                writable,
                ..example()
            };
            to_text(&status, None, false, UNIX_EPOCH)
        };
        let line = "\n  writable             by overlayfs, to /v/upper\n";
        assert!(printed(false).contains(line), "{}", printed(false));
        assert!(printed(true).contains("/v/upper, until it is unmounted\n"));
    }

    #[test]
    fn index_progress_is_printed() {
        let state = |phase, of_bytes| IndexState {
            phase,
            scanned_bytes: 20 << 20,
            of_bytes,
            failure: Some("cut off".into()),
        };
        let printed = |phase, of_bytes| format_index(&state(phase, of_bytes));
        let scanning = "scanning, 20 MiB of 80 MiB so far";
        assert_eq!(printed(Phase::Scanning, Some(80 << 20)), scanning);
        assert_eq!(printed(Phase::Scanning, None), "scanning, 20 MiB so far");
        assert_eq!(
            printed(Phase::Failed, None),
            "incomplete, because the scan failed: cut off"
        );
    }
}
