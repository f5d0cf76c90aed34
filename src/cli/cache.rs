//! `tarfs cache`: what is kept on disk between mounts, and how to have less of it.

use std::io::{self, Write, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::args::{self, CacheDirArgs, Size};
use super::{output, status};
use crate::archive::cache_inventory::{self, CacheEntry, Kind};
use crate::list::escape;

/// Arguments of `tarfs cache`.
#[derive(Debug, Args)]
pub(super) struct CacheVerbArgs {
    #[command(subcommand)]
    verb: CacheVerb,
}

#[derive(Debug, Subcommand)]
enum CacheVerb {
    /// Show what is kept, the one used last first
    List(ListArgs),
    /// Remove what was not used for long, or is too much; never what is in use
    Prune(PruneArgs),
    /// Remove everything that is not in use
    Clear(ClearArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    place: CacheDirArgs,

    /// One JSON object a line for each file
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct PruneArgs {
    #[command(flatten)]
    place: CacheDirArgs,

    /// Remove what was used longest ago until the rest takes no more than SIZE of disk
    #[arg(long, value_name = "SIZE")]
    max_size: Option<Size>,

    /// Remove what was not used for so many days [default: 90, unless --max-size is given]
    #[arg(long, value_name = "DAYS", value_parser = args::count::<u32>(0..=u32::MAX.into()))]
    older_than: Option<u32>,

    /// Only show what would be removed
    #[arg(short = 'n', long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
struct ClearArgs {
    #[command(flatten)]
    place: CacheDirArgs,

    /// Only show what would be removed
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// Does what `args` say.
///
/// # Errors
/// When the directory is no cache, or what should go cannot be removed.
pub(super) fn run(args: &CacheVerbArgs) -> anyhow::Result<ExitCode> {
    match &args.verb {
        CacheVerb::List(args) => {
            let directory = args.place.directory()?;
            let all = cache_inventory::list(&directory)?;
            let text = if args.json {
                in_json(&directory, &all)?
            } else {
                table(&all, SystemTime::now())
            };
            print(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        CacheVerb::Prune(args) => {
            let all = cache_inventory::list(&args.place.directory()?)?;
            let max_bytes = args.max_size.map(|size| size.0);
            let days = |days: u32| Duration::from_hours(24 * u64::from(days));
            let max_age = args.older_than.map(days);
            let surplus = cache_inventory::surplus(&all, max_bytes, max_age, SystemTime::now());
            remove(&all, &surplus, args.dry_run)
        }
        CacheVerb::Clear(args) => {
            let all = cache_inventory::list(&args.place.directory()?)?;
            let unused: Vec<_> = all.iter().filter(|kept| !kept.in_use).collect();
            remove(&all, &unused, args.dry_run)
        }
    }
}

/// Removes `those` of `all` and says what came of it.
fn remove(all: &[CacheEntry], those: &[&CacheEntry], dry_run: bool) -> anyhow::Result<ExitCode> {
    if dry_run {
        let those: Vec<_> = those.iter().map(|&kept| kept.clone()).collect();
        print(&table(&those, SystemTime::now()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut removed = Sum::default();
    let mut code = ExitCode::SUCCESS;
    for kept in those {
        match kept.remove() {
            Ok(true) => removed.add(kept),
            // Somebody has begun to use it.
            Ok(false) => {}
            Err(error) => {
                let error = anyhow::Error::new(error);
                let error = error.context(format!("cannot remove {}", kept.path.display()));
                code = output::fail(&error);
            }
        }
    }
    let mut left = Sum::of(all);
    left.files = left.files.saturating_sub(removed.files);
    left.bytes = left.bytes.saturating_sub(removed.bytes);
    print(&format!("removed {removed}, kept {left}\n"))?;
    Ok(code)
}

fn print(text: &str) -> anyhow::Result<()> {
    match stdout().write_all(text.as_bytes()) {
        // Whoever read along has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write the list"),
    }
}

/// Files and the disk they take.
#[derive(Clone, Copy, Default, Debug)]
struct Sum {
    files: u64,
    bytes: u64,
}

impl Sum {
    fn of(all: &[CacheEntry]) -> Self {
        let mut sum = Self::default();
        for kept in all {
            sum.add(kept);
        }
        sum
    }

    fn add(&mut self, kept: &CacheEntry) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(kept.held_bytes);
    }
}

impl std::fmt::Display for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let files = if self.files == 1 { "file" } else { "files" };
        write!(f, "{} {files}, {}", self.files, status::bytes(self.bytes))
    }
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Index => "index",
        Kind::DiskCache => "disk-cache",
        Kind::Unfinished => "unfinished",
    }
}

/// A line for each file, its columns under each other; at the end the sum. Nothing for nothing.
fn table(all: &[CacheEntry], now: SystemTime) -> String {
    if all.is_empty() {
        return String::new();
    }
    let head = ["KIND", "SIZE", "USED", "STATE", "SOURCE"].map(str::to_owned);
    let rows: Vec<_> = [head]
        .into_iter()
        .chain(all.iter().map(|kept| row(kept, now)))
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
    let sum = Sum::of(all).to_string();
    text.push_str(&sum);
    text.push('\n');
    text
}

fn row(kept: &CacheEntry, now: SystemTime) -> [String; 5] {
    let shown = |text: &Option<String>| text.as_ref().map(|text| escape(text.as_bytes()));
    let source = match (shown(&kept.source), shown(&kept.version)) {
        (Some(source), Some(version)) => format!("{source} ({version})"),
        _ => "-".to_owned(),
    };
    let state = if kept.in_use { "in use" } else { "-" };
    [
        word(kept.kind).to_owned(),
        status::bytes(kept.held_bytes),
        status::ago(unix_seconds(kept.used), now),
        state.to_owned(),
        source,
    ]
}

/// As [`CacheEntry`], for programs.
#[derive(Serialize)]
struct Line<'a> {
    kind: &'static str,
    path: String,
    source: Option<&'a str>,
    version: Option<&'a str>,
    disk_bytes: u64,
    used_unix_seconds: u64,
    in_use: bool,
}

fn in_json(directory: &Path, all: &[CacheEntry]) -> anyhow::Result<String> {
    let mut text = String::new();
    for kept in all {
        let line = Line {
            kind: word(kept.kind),
            path: directory.join(&kept.path).to_string_lossy().into_owned(),
            source: kept.source.as_deref(),
            version: kept.version.as_deref(),
            disk_bytes: kept.held_bytes,
            used_unix_seconds: unix_seconds(kept.used),
            in_use: kept.in_use,
        };
        text.push_str(&serde_json::to_string(&line)?);
        text.push('\n');
    }
    Ok(text)
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
