//! `tarfs status`: shows the state of this user's mounts.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;

use crate::cli::completion;
use crate::cli::daemon::control_socket::{self, IndexState, Phase, Status};
use crate::cli::environment;
use crate::cli::ui::output;
use tarfs::fuse;

/// Shows the state of one mount, or of all mounts of this user.
#[derive(Clone, Debug, Args)]
pub(crate) struct StatusArgs {
    /// Show only the mount at this mountpoint
    #[arg(add = ArgValueCandidates::new(completion::mountpoints))]
    pub mountpoint: Option<PathBuf>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// Prints the statuses.
///
/// # Errors
/// No process serves an archive at the given mountpoint.
pub(crate) fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let mut statuses: Vec<Status> = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for directory in environment::runtime_dirs() {
        match control_socket::list_statuses(&directory) {
            Ok(found) => statuses.extend(found),
            // Continue with mounts in other directories.
            Err(error) => {
                let name = directory.display();
                output::print_error(format_args!("cannot look for mounts in {name}: {error}"));
                code = ExitCode::from(output::EXIT_FAILURE);
            }
        }
    }
    if let Some(path) = &args.mountpoint {
        let mountpoint = fuse::canonical_mountpoint(path)
            .with_context(|| format!("cannot find {}", path.display()))?;
        statuses.retain(|status| status.is_mounted_on(&mountpoint));
        if statuses.is_empty() {
            bail!("no process of this user serves {}", mountpoint.display());
        }
    }
    let mut stdout = io::stdout().lock();
    for status in &statuses {
        let text = if args.json {
            serde_json::to_string(status)? + "\n"
        } else {
            to_text(status, SystemTime::now())
        };
        stdout.write_all(text.as_bytes())?;
    }
    Ok(code)
}

fn to_text(status: &Status, now: SystemTime) -> String {
    let detached = if status.detached {
        " (detached, still in use)"
    } else {
        ""
    };
    let mut text = format!("{}{detached}\n", status.mountpoint);
    add_line(&mut text, "source", &status.source);
    add_line(&mut text, "version", &status.version);
    add_line(&mut text, "process", &status.pid.to_string());
    add_line(
        &mut text,
        "mounted",
        &format_age(status.since_unix_seconds, now),
    );
    for layer in &status.layers {
        add_line(&mut text, "layer", layer);
    }
    if let Some(url) = &status.metrics {
        add_line(&mut text, "metrics", url);
    }
    add_line(&mut text, "entries", &status.entries.to_string());
    add_line(&mut text, "index", &format_index(&status.index));
    add_line(
        &mut text,
        "memory, resident",
        &format_bytes(status.resident_bytes),
    );
    let memory = &status.memory;
    add_line(
        &mut text,
        "memory, budget",
        &format_bytes(memory.budget_bytes),
    );
    add_line(
        &mut text,
        "memory, blocks",
        &format_bytes(memory.spans_bytes),
    );
    add_line(
        &mut text,
        "memory, reads",
        &format_bytes(memory.reads_bytes),
    );
    add_line(
        &mut text,
        "memory, decoders",
        &format_bytes(memory.decoders_bytes),
    );
    add_line(
        &mut text,
        "memory, index",
        &format_bytes(memory.index_bytes),
    );
    if let Some(disk_cache) = &status.disk_cache {
        add_line(
            &mut text,
            "disk cache, archive",
            &format_bytes(disk_cache.held_bytes),
        );
        add_line(
            &mut text,
            "disk cache, all",
            &format_bytes(disk_cache.all_bytes),
        );
        add_line(
            &mut text,
            "disk cache, limit",
            &format_bytes(disk_cache.limit_bytes),
        );
    }
    let prefetch = &status.prefetch;
    add_line(&mut text, "prefetch", &prefetch.what);
    if prefetch.state != "off" {
        let (done, total) = (prefetch.done_spans, prefetch.total_spans);
        let state = format!("{}, {done} of {total} blocks", prefetch.state);
        add_line(&mut text, "prefetch, all", &state);
    }
    if prefetch.replay_spans > 0 {
        let (done, total) = (prefetch.replayed_spans, prefetch.replay_spans);
        add_line(
            &mut text,
            "prefetch, replay",
            &format!("{done} of {total} blocks"),
        );
    }
    if let Some(copy) = &status.copy {
        let progress = format!(
            "{}, {} of {} files, {} of {}, in {}",
            copy.state,
            copy.files,
            copy.total_files,
            format_bytes(copy.bytes),
            format_bytes(copy.total_bytes),
            copy.directory
        );
        add_line(&mut text, "copy", &progress);
    }
    if let Some(writable) = &status.writable {
        let until = if writable.is_temporary {
            ", until it is unmounted"
        } else {
            ""
        };
        let what = format!("by {}, to {}{until}", writable.by, writable.upper);
        add_line(&mut text, "writable", &what);
    }
    for (name, value) in status.counters.iter().filter(|&(_, &value)| value > 0) {
        add_line(&mut text, name, &value.to_string());
    }
    if status.damaged_members > 0 {
        let count = status.damaged_members.to_string();
        add_line(&mut text, "damaged members", &count);
    }
    for member in &status.damaged {
        add_line(&mut text, "damaged", member);
    }
    for note in &status.notes {
        add_line(&mut text, "note", note);
    }
    for error in &status.errors {
        let when = format_age(error.last_unix_seconds, now);
        let what = format!(
            "{}: {} ({}, {} times)",
            error.path, error.reason, when, error.count
        );
        add_line(&mut text, "error", &what);
    }
    text
}

/// Formats the progress of an index.
pub(crate) fn format_index(state: &IndexState) -> String {
    match (state.phase, state.of_bytes) {
        (Phase::Complete, _) => "complete".to_owned(),
        (Phase::Scanning, Some(of)) => {
            let scanned = format_bytes(state.scanned_bytes);
            format!("scanning, {scanned} of {} so far", format_bytes(of))
        }
        (Phase::Scanning, None) => {
            format!("scanning, {} so far", format_bytes(state.scanned_bytes))
        }
        (Phase::Failed, _) => {
            let why = state.failure.as_deref().unwrap_or("unknown error");
            format!("incomplete, because the scan failed: {why}")
        }
    }
}

fn add_line(text: &mut String, name: &str, value: &str) {
    let line = format!("  {name:<20} {value}\n");
    text.push_str(&line);
}

/// Formats how long ago the Unix time `seconds` was.
pub(crate) fn format_age(seconds: u64, now: SystemTime) -> String {
    let then = UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    let seconds = then
        .and_then(|then| now.duration_since(then).ok())
        .map_or(0, |since| since.as_secs());
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// Formats a rounded number of bytes.
pub(crate) fn format_bytes(count: u64) -> String {
    match count {
        0..10_240 => format!("{count} B"),
        10_240..10_485_760 => format!("{} KiB", count >> 10),
        _ => format!("{} MiB", count >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::daemon::control_socket::{CopyProgress, OverlayStatus};

    #[test]
    fn status_is_printed_as_a_list() {
        let status = Status {
            pid: 7,
            ..Status::example()
        };
        let now = UNIX_EPOCH + Duration::from_secs(1300);
        let text = to_text(&status, now);
        let expected = "/mnt
  source               http://host/a.tar
  version              3 bytes
  process              7
  mounted              5 min ago
  metrics              http://127.0.0.1:9469/metrics
  entries              2
  index                complete
  memory, resident     20 MiB
  memory, budget       128 MiB
  memory, blocks       40 MiB
  memory, reads        5 B
  memory, decoders     6 B
  memory, index        12 KiB
  disk cache, archive  30 MiB
  disk cache, all      50 MiB
  disk cache, limit    70 MiB
  prefetch             all
  prefetch, all        running, 3 of 7 blocks
  prefetch, replay     1 of 2 blocks
  scans                1
  damaged members      2
  damaged              a/c: cut
  note                 stored
  error                a/b: cut (5 min ago, 3 times)
";
        assert_eq!(text, expected);
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
            ..Status::example()
        };
        let text = to_text(&status, UNIX_EPOCH);
        let line = "\n  copy                 writing, 3 of 40 files, 5 B of 20 MiB, in /copy\n";
        assert!(text.contains(line), "{text}");
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
                ..Status::example()
            };
            to_text(&status, UNIX_EPOCH)
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

    #[test]
    fn age_is_zero_after_the_clock_went_back() {
        assert_eq!(format_age(u64::MAX, UNIX_EPOCH), "0 s ago");
        assert_eq!(format_age(5, UNIX_EPOCH), "0 s ago");
    }
}
