//! Verification of a saved index by samples of the archive.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};

use super::Reader;
use crate::archive::error::ReadError;
use crate::index::{Entry, EntryKind, Index, Ino};

/// Number of random samples, in addition to the front and the end of a source.
const RANDOM_SAMPLES: u64 = 4;

/// Maximum number of packed bytes that are fetched to decode one sample.
const MAX_SAMPLE_BYTES: u64 = 4 << 20;

/// Maximum number of spans that are decoded for one sample.
const MAX_SAMPLE_SPANS: u32 = 4;

impl Reader {
    /// Loads span `number` from the source. Fails if it is unavailable or its hash differs. A cache proves nothing about
    /// the bytes of the source now. Always fails if the source can be read only once.
    pub(crate) fn verify_source(&self, number: u32) -> Result<(), ReadError> {
        let span = self.live_index.span(number)?;
        span.hash.ok_or(ReadError::Index)?;
        self.fetch_span(&span).map(drop)
    }

    /// Whether the disk cache holds every span, undamaged.
    pub(crate) fn is_fully_on_disk(&self) -> bool {
        let count = self.live_index.lock().span_count();
        (0..count).all(|number| {
            let span = self.live_index.span(number).ok();
            span.is_some_and(|span| self.span_from_disk_cache(&span).is_some())
        })
    }

    /// Runs `verify` on the archive's front, end and some random spans; returns its first error.
    pub(crate) fn verify_samples(
        &self,
        verify: impl Fn(&Self, u32) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let mut samples = self.live_index.read(sample_spans)?.into_iter();
        samples.try_for_each(|span| verify(self, span))
    }

    /// Compares the headers of some random files with the index; returns the first error.
    pub(crate) fn verify_header_samples(&self) -> Result<(), ReadError> {
        let count = u64::from(self.live_index.lock().last_ino().0).max(1);
        let random = RandomState::new();
        // Few numbers are those of files with bytes if the archive holds mostly links or directories.
        for sample in 0..RANDOM_SAMPLES {
            let number = u32::try_from(random.hash_one(sample) % count + 1).unwrap_or(u32::MAX);
            let is_file = |entry: Entry<'_>| entry.kind() == EntryKind::File;
            let is_file = |index: &Index| index.entry(Ino(number)).is_some_and(is_file);
            if self.live_index.read(is_file)? {
                self.check_header(Ino(number))?;
            }
        }
        Ok(())
    }
}

/// Numbers of the sampled spans; at least one.
fn sample_spans(index: &Index) -> BTreeSet<u32> {
    let starts = (0..index.span_count()).filter(|&span| index.seek_offset(span).is_some());
    let starts: Vec<u32> = starts.collect();
    let random = RandomState::new();
    let count = starts.len().max(1) as u64;
    let random_samples = (0..RANDOM_SAMPLES).map(|sample| random.hash_one(sample) % count);
    let stretches = [0, count - 1].into_iter().chain(random_samples);
    let spans = stretches.map(|stretch| sample_span(index, &starts, stretch));
    spans.collect()
}

/// The last span that is cheap to decode from the seek point at `starts[stretch]`.
fn sample_span(index: &Index, starts: &[u32], stretch: u64) -> u32 {
    let place = usize::try_from(stretch).unwrap_or(usize::MAX);
    let Some(&first) = starts.get(place) else {
        return 0;
    };
    let next = starts.get(place + 1).copied();
    let packed_end = next.and_then(|next| index.seek_offset(next));
    let packed_end = packed_end.map_or(index.origin().packed_bytes, |end| end.0);
    let packed_start = index.seek_offset(first).map_or(0, |start| start.0);
    if packed_end.saturating_sub(packed_start) > MAX_SAMPLE_BYTES {
        return first;
    }
    let last = next.unwrap_or(index.span_count()).saturating_sub(1);
    last.min(first.saturating_add(MAX_SAMPLE_SPANS - 1))
}
