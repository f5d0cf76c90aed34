//! `tarfs cache`: lists and removes data that is on disk between mounts.

use std::borrow::Cow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::cli::args::{self, CacheDirArgs, JsonArg, Size};
use crate::cli::ui::output;
use crate::cli::ui::units::{format_age, format_bytes, format_version};
use tarfs::archive::cache_inventory::{self, CacheEntry, Kind};
use tarfs::internal::escape::{bytes_unless_utf8, escape};
use tarfs::internal::time::unix_seconds;

/// Arguments of `tarfs cache`.
#[derive(Debug, Args)]
pub(crate) struct CacheVerbArgs {
    #[command(subcommand)]
    verb: CacheVerb,
}

#[derive(Debug, Subcommand)]
enum CacheVerb {
    /// List all files, the most recently used first
    List(ListArgs),
    /// Remove files that are old or exceed a size, but none that are in use
    Prune(PruneArgs),
    /// Remove all files that are not in use
    Clear(ClearArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    cache_dir: CacheDirArgs,

    #[command(flatten)]
    json: JsonArg,
}

#[derive(Debug, Args)]
struct PruneArgs {
    #[command(flatten)]
    clear: ClearArgs,

    /// Remove the least recently used files until the rest takes at most SIZE
    #[arg(long, value_name = "SIZE")]
    max_size: Option<Size>,

    /// Remove files unused for this many days [default: 90, unless --max-size is given]
    #[arg(long, value_name = "DAYS", value_parser = args::count_parser::<u32>(0..=u32::MAX.into()))]
    older_than: Option<u32>,
}

/// Arguments of `tarfs cache clear`, and of each verb that removes files.
#[derive(Debug, Args)]
struct ClearArgs {
    #[command(flatten)]
    cache_dir: CacheDirArgs,

    /// Only print what would be removed
    #[arg(short = 'n', long)]
    dry_run: bool,
}

pub(crate) fn run(args: &CacheVerbArgs) -> anyhow::Result<ExitCode> {
    match &args.verb {
        CacheVerb::List(args) => {
            let directory = args.cache_dir.directory()?;
            let all = cache_inventory::list(&directory)?;
            let text = if args.json.is_set {
                to_json_lines(&directory, &all)?
            } else {
                table(&all, SystemTime::now())
            };
            output::print_text(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        CacheVerb::Prune(args) => {
            let all = cache_inventory::list(&args.clear.cache_dir.directory()?)?;
            let max_bytes = args.max_size.map(|size| size.0);
            let days = |days: u32| Duration::from_hours(24 * u64::from(days));
            let max_age = args.older_than.map(days);
            let surplus = cache_inventory::surplus(&all, max_bytes, max_age, SystemTime::now());
            remove(&all, &surplus, args.clear.dry_run)
        }
        CacheVerb::Clear(args) => {
            let all = cache_inventory::list(&args.cache_dir.directory()?)?;
            let unused: Vec<_> = all.iter().filter(|entry| !entry.in_use).collect();
            remove(&all, &unused, args.dry_run)
        }
    }
}

fn remove(all: &[CacheEntry], entries: &[&CacheEntry], dry_run: bool) -> anyhow::Result<ExitCode> {
    if dry_run {
        let entries: Vec<_> = entries.iter().map(|&entry| entry.clone()).collect();
        output::print_text(&table(&entries, SystemTime::now()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut removed = Totals::default();
    let mut code = ExitCode::SUCCESS;
    for entry in entries {
        match entry.remove() {
            Ok(true) => removed.add(entry),
            // A process has started to use it.
            Ok(false) => {}
            Err(error) => {
                let error = anyhow::Error::new(error);
                let error = error.context(format!("cannot remove {}", entry.path.display()));
                code = output::print_failure(&error);
            }
        }
    }
    let mut remaining = Totals::of(all);
    remaining.files = remaining.files.saturating_sub(removed.files);
    remaining.bytes = remaining.bytes.saturating_sub(removed.bytes);
    output::print_text(&format!("removed {removed}, kept {remaining}\n"))?;
    Ok(code)
}

/// Number of files and their size on disk.
#[derive(Clone, Copy, Default, Debug)]
struct Totals {
    files: u64,
    bytes: u64,
}

impl Totals {
    fn of(all: &[CacheEntry]) -> Self {
        let mut sum = Self::default();
        for entry in all {
            sum.add(entry);
        }
        sum
    }

    fn add(&mut self, entry: &CacheEntry) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(entry.held_bytes);
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let files = if self.files == 1 { "file" } else { "files" };
        write!(f, "{} {files}, {}", self.files, format_bytes(self.bytes))
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Index => "index",
        Kind::Document => "document",
        Kind::DiskCache => "disk-cache",
        Kind::Unfinished => "unfinished",
    }
}

/// Formats a table with one row per file and a sum. Empty without files.
fn table(all: &[CacheEntry], now: SystemTime) -> String {
    if all.is_empty() {
        return String::new();
    }
    let head = ["KIND", "SIZE", "USED", "STATE", "SOURCE"].map(str::to_owned);
    let rows: Vec<_> = [head]
        .into_iter()
        .chain(all.iter().map(|entry| row(entry, now)))
        .collect();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let (kinds, sizes, uses, states) = (width(0), width(1), width(2), width(3));
    let mut text = String::new();
    for [kind, size, used, state, source] in &rows {
        let line =
            format!("{kind:<kinds$}  {size:>sizes$}  {used:<uses$}  {state:<states$}  {source}");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let sum = Totals::of(all).to_string();
    text.push_str(&sum);
    text.push('\n');
    text
}

fn row(entry: &CacheEntry, now: SystemTime) -> [String; 5] {
    let version = entry.version.as_deref().map(format_version);
    let source = match (&entry.source, version) {
        (Some(source), Some(version)) => {
            format!("{} ({})", escape(source), escape(version.as_bytes()))
        }
        _ => "-".to_owned(),
    };
    let state = if entry.in_use { "in use" } else { "-" };
    [
        kind_name(entry.kind).to_owned(),
        format_bytes(entry.held_bytes),
        format_age(unix_seconds(entry.used), now),
        state.to_owned(),
        source,
    ]
}

#[derive(Serialize)]
struct JsonLine<'a> {
    kind: &'static str,
    path: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<&'a [u8]>,
    source: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_bytes: Option<&'a [u8]>,
    version: Option<&'a str>,
    disk_bytes: u64,
    used_unix_seconds: u64,
    in_use: bool,
}

fn to_json_lines(directory: &Path, all: &[CacheEntry]) -> anyhow::Result<String> {
    let mut text = String::new();
    for entry in all {
        let path = directory.join(&entry.path);
        let line = JsonLine {
            kind: kind_name(entry.kind),
            path: path.to_string_lossy(),
            path_bytes: bytes_unless_utf8(path.as_os_str().as_bytes()),
            source: entry.source.as_deref().map(String::from_utf8_lossy),
            source_bytes: entry.source.as_deref().and_then(bytes_unless_utf8),
            version: entry.version.as_deref(),
            disk_bytes: entry.held_bytes,
            used_unix_seconds: unix_seconds(entry.used),
            in_use: entry.in_use,
        };
        text.push_str(&output::to_json(&line)?);
        text.push('\n');
    }
    Ok(text)
}
