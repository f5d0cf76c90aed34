//! Prefetch, and the profiles that --record writes and --replay reads.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::access_profile::{self, MAX_PROFILE_BYTES};
use super::failure::Failure;
use crate::archive::{AccessedRange, PrefetchMode, PrefetchOptions, Profile, Volume};
use crate::base::bounded_read::read_text;
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::base::periodic::PeriodicThread;
use crate::base::publish::publish_private;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::fetch;
use crate::locate::{OpenContext, SourceSpec};
use crate::source::{self, Revalidation};

/// Interval at which new reads are written to the recording.
const RECORDING_INTERVAL: Duration = Duration::from_secs(3);

/// Prefetch of a mount, with the profiles that it reads and writes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PrefetchSpec {
    /// Data that is prefetched.
    pub mode: PrefetchMode,
    /// Maximum number of bytes fetched per second; `None` is unlimited.
    pub bytes_per_second: Option<u64>,
    /// Path or URL of the profile to prefetch.
    pub replay: Option<String>,
    /// File for the profile of the mount's reads.
    pub record: Option<OsString>,
}

/// Notes for the user, which may become more.
pub(super) type Notes = Arc<Mutex<Vec<String>>>;

/// Starts prefetch, replay and recording. Returns the recording, if any, and notes.
pub(super) fn start(
    spec: &PrefetchSpec,
    context: &OpenContext,
    volume: &Arc<dyn Volume>,
) -> Result<(Option<PeriodicThread>, Notes), Failure> {
    let notes = Notes::default();
    let replay = spec.replay.as_deref().and_then(|location| {
        // A profile is only a hint, so its errors become notes.
        match fetch_profile(location, context) {
            Ok(text) => Some(resolve_replay(
                source::redact(location),
                text,
                Arc::clone(&notes),
            )),
            Err(error) => {
                add_note(&notes, format!("nothing is replayed: {error}"));
                None
            }
        }
    });
    let options = PrefetchOptions {
        mode: spec.mode,
        bytes_per_second: spec.bytes_per_second,
        replay,
        record: spec.record.is_some(),
        other_archives: 0,
    };
    volume
        .start_prefetch(options)
        .map_err(|error| no_thread(&error))?;
    // The kernel has cached what a dead process served, and does not read it again.
    let is_successor = context.shown_version.is_some();
    let record = spec.record.as_deref().map(Path::new);
    let recording = record
        .map(|path| start_recording(path, Arc::clone(volume), is_successor))
        .transpose()?;
    Ok((recording, notes))
}

fn no_thread(error: &io::Error) -> Failure {
    Failure::to("cannot start a thread", error)
}

fn add_note(notes: &Mutex<Vec<String>>, text: String) {
    tracing::warn!("{text}");
    let mut notes = notes.lock();
    notes.push(text);
}

/// Returns the function that finds the files of the profile `text` in an index.
fn resolve_replay(location: String, text: String, notes: Notes) -> Profile {
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

fn fetch_profile(location: &str, context: &OpenContext) -> Result<String, Failure> {
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
        ..fetch::Config::new(BufferPool::new(8 << 20), stats)
    };
    let mut stream = fetch::Stream::start(&context.network, profile, Packed(0), config);
    let mut text = Vec::new();
    while let Some(chunk) = stream.next().map_err(|error| Failure::of(&error))? {
        if text.len() + chunk.len() > MAX_PROFILE_BYTES {
            let name = source::redact(location);
            return Err(Failure::new(format!(
                "{name} is longer than a profile may be"
            )));
        }
        text.extend_from_slice(&chunk);
    }
    let not_text =
        |error| Failure::to(format!("{} is not UTF-8", source::redact(location)), &error);
    String::from_utf8(text).map_err(not_text)
}

/// Writes the read ranges to the file at `path`, after those in it if `continues`, until the returned thread is dropped.
fn start_recording(
    path: &Path,
    volume: Arc<dyn Volume>,
    continues: bool,
) -> Result<PeriodicThread, Failure> {
    let path = path.to_owned();
    let earlier = if continues {
        read_earlier_recording(&path, &*volume)
    } else {
        Vec::new()
    };
    write_profile(&path, &*volume, &earlier)
        .map_err(|error| Failure::to(format!("cannot write {}", path.display()), &error))?;
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
    let thread = PeriodicThread::start("tarfs-record", RECORDING_INTERVAL, record);
    thread.map_err(|error| no_thread(&error))
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
