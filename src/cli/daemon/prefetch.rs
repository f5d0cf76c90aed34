//! Prefetch, and the profiles that --record writes and --replay reads.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};

use super::access_profile::{self, MAX_PROFILE_BYTES};
use crate::cli::args::PrefetchArgs;
use crate::cli::environment::{self, Role};
use crate::cli::periodic::PeriodicThread;
use tarfs::Packed;
use tarfs::Stats;
use tarfs::archive::{AccessedRange, PrefetchOptions, Profile, Volume};
use tarfs::fetch;
use tarfs::internal::bounded_read::read_text;
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::internal::publish::publish_private;
use tarfs::internal::sync::Mutex;
use tarfs::locate::{OpenContext, SourceSpec};
use tarfs::source::{self, Revalidation};

/// Interval at which new reads are written to the recording.
const RECORDING_INTERVAL: Duration = Duration::from_secs(3);

/// Returns notes for the user; called for each status.
pub(crate) type NotesFn = Box<dyn Fn() -> Vec<String>>;

/// Starts prefetch, replay and recording. Returns the recording, if any, and notes.
pub(crate) fn start(
    args: &PrefetchArgs,
    context: &OpenContext,
    volume: &Arc<dyn Volume>,
) -> anyhow::Result<(Option<PeriodicThread>, NotesFn)> {
    let notes = Arc::<Mutex<Vec<String>>>::default();
    let replay = args.replay.as_deref().and_then(|location| {
        // A profile is only a hint, so its errors become notes.
        match fetch_profile(location, context) {
            Ok(text) => Some(resolve_replay(
                source::redact(location),
                text,
                Arc::clone(&notes),
            )),
            Err(error) => {
                add_note(&notes, format!("nothing is replayed: {error:#}"));
                None
            }
        }
    });
    let options = PrefetchOptions {
        mode: args.prefetch.into(),
        bytes_per_second: args.prefetch_rate.map(|rate| rate.0),
        replay,
        record: args.record.is_some(),
        other_archives: 0,
    };
    volume
        .start_prefetch(options)
        .context("cannot start a thread")?;
    let record = args.record.as_deref();
    let recording = record
        .map(|path| start_recording(path, Arc::clone(volume)))
        .transpose()?;
    let read_notes = move || notes.lock().clone();
    Ok((recording, Box::new(read_notes)))
}

fn add_note(notes: &Mutex<Vec<String>>, text: String) {
    tracing::warn!("{text}");
    let mut notes = notes.lock();
    notes.push(text);
}

/// Returns the function that finds the files of the profile `text` in an index.
fn resolve_replay(location: String, text: String, notes: Arc<Mutex<Vec<String>>>) -> Profile {
    Box::new(
        move |index| match access_profile::resolve_profile(&text, index) {
            Ok(found) => {
                if found.missing_ranges > 0 {
                    let unknown = found.missing_ranges;
                    let text = format!(
                        "{unknown} ranges of {location} are in files that the archive does not have"
                    );
                    add_note(&notes, text);
                }
                found.ranges
            }
            Err(error) => {
                add_note(&notes, format!("nothing is replayed: {location}: {error}"));
                Vec::new()
            }
        },
    )
}

fn fetch_profile(location: &str, context: &OpenContext) -> anyhow::Result<String> {
    let stats = Arc::new(Stats::default());
    let mut context = context.clone();
    context.source.stats = Arc::clone(&stats);
    if context.source.revalidation != Revalidation::Never {
        // A profile is read anew.
        context.source.revalidation = Revalidation::Required;
    }
    let profile = context.open_source(&SourceSpec::Plain(location.into()))?;
    let config = fetch::Config {
        chunk_len: fetch::DEFAULT_CHUNK_LEN.min(1 << 20),
        connections: 1,
        min_speed: fetch::MinSpeed::default(),
        retry_forever: source::RetryForever::default(),
        pool: BufferPool::new(8 << 20),
        stats,
    };
    let mut stream = fetch::Stream::start(&context.network, profile, Packed(0), config);
    let mut text = Vec::new();
    while let Some(chunk) = stream.next()? {
        if text.len() + chunk.len() > MAX_PROFILE_BYTES {
            bail!(
                "{} is longer than a profile may be",
                source::redact(location)
            );
        }
        text.extend_from_slice(&chunk);
    }
    String::from_utf8(text).with_context(|| format!("{} is not UTF-8", source::redact(location)))
}

/// Writes the read ranges to the file at `path` until the returned thread is dropped.
fn start_recording(path: &Path, volume: Arc<dyn Volume>) -> anyhow::Result<PeriodicThread> {
    // The process changes its current directory.
    let path = std::path::absolute(path)?;
    // The kernel has cached what the dead process served, and does not read it again.
    let earlier = match environment::role() {
        Some(Role::Successor) => read_earlier_recording(&path, &*volume),
        _ => Vec::new(),
    };
    write_profile(&path, &*volume, &earlier)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut reads = 0;
    let record = move |_| {
        if let Some((ranges, now)) = volume.accesses_since(reads) {
            let ranges = [&earlier[..], &ranges].concat();
            match write_profile(&path, &*volume, &ranges) {
                Ok(()) => reads = now,
                Err(error) => tracing::warn!(%error, "the recording cannot be written"),
            }
        }
    };
    PeriodicThread::start("tarfs-record", RECORDING_INTERVAL, record)
        .context("cannot start a thread")
}

/// Reads the recording of the dead process; empty if that fails.
fn read_earlier_recording(path: &Path, volume: &dyn Volume) -> Vec<AccessedRange> {
    let read = File::open(path).and_then(|file| read_text(file, MAX_PROFILE_BYTES as u64));
    let found = read.ok().and_then(|text| {
        let index = volume.index();
        index
            .read(|index| access_profile::resolve_profile(&text, index))
            .ok()
    });
    found
        .and_then(Result::ok)
        .map_or_else(Vec::new, |found| found.ranges)
}

/// Writes a profile of `ranges`, readable only by this user because it reveals names in the archive.
fn write_profile(path: &Path, volume: &dyn Volume, ranges: &[AccessedRange]) -> io::Result<()> {
    let text = volume
        .index()
        .read(|index| access_profile::format_profile(index, ranges));
    let text = text.map_err(io::Error::other)?;
    publish_private(path, |mut file| file.write_all(text.as_bytes()))
}
