//! Which spans of a scan are kept on disk, and how long the scan waits for the disk.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::cache::{DiskCache, QueueTimeout};
use crate::codec::Compression;
use crate::index::Span;
use crate::source::{Access, Source};

/// How long a scan may wait for the disk whatever it has done so far.
const MIN_DISK_WAIT: Duration = Duration::from_secs(2);

/// How long a scan waits for the disk to take a span that could only be decoded again from far before it.
/// A disk that takes longer is not waited for again.
const MAX_FAR_SPAN_WAIT: Duration = Duration::from_secs(30);

/// Whether spans of `source`, which is packed in this way as far as that is known, are kept on disk: not
/// those of a local file that is not packed, which is as good as any copy of it.
pub(super) fn should_cache_spans(source: &dyn Source, compression: Option<Compression>) -> bool {
    let is_near = !source.is_remote() && source.access() == Access::Ranges;
    !(is_near && compression == Some(Compression::None))
}

/// Keeps spans of a scan in a disk cache.
///
/// A scan waits for the disk up to as long as it has worked, because a span that is not kept must be made
/// again. So a slow disk at most doubles the time of a scan; except where spans have no seek points, because
/// each that is missing then costs a decoding of all before it.
#[derive(Debug)]
pub(super) struct ScanDiskCache {
    disk_cache: Arc<DiskCache>,
    access: Access,
    started: Instant,
    waited: Duration,
    /// Whether the disk was too slow for a span that is far from a seek point.
    is_disk_stalled: bool,
}

impl ScanDiskCache {
    pub(super) fn new(disk_cache: Arc<DiskCache>, source: &dyn Source) -> Self {
        Self {
            disk_cache,
            access: source.access(),
            started: Instant::now(),
            waited: Duration::ZERO,
            is_disk_stalled: false,
        }
    }

    /// Keeps a span; a span without a hash could not be verified.
    pub(super) fn write_span(&mut self, span: &Span, bytes: &Bytes) {
        if span.hash.is_none() {
            return;
        }
        let is_far = span.seek_point.is_none() && !self.is_disk_stalled;
        let disk_wait = match self.access {
            Access::Stream => QueueTimeout::Never,
            Access::Ranges if is_far => QueueTimeout::UpTo(MAX_FAR_SPAN_WAIT),
            Access::Ranges => {
                QueueTimeout::UpTo(remaining_wait(self.started.elapsed(), self.waited))
            }
        };
        let before = Instant::now();
        self.disk_cache.insert(span.plain, bytes.clone(), disk_wait);
        let waited = before.elapsed();
        self.is_disk_stalled |= is_far && waited >= MAX_FAR_SPAN_WAIT;
        self.waited += waited;
    }
}

/// How long a scan that has taken `elapsed`, of which it has `waited` for the disk, may still wait.
fn remaining_wait(elapsed: Duration, waited: Duration) -> Duration {
    let worked = elapsed.saturating_sub(waited);
    worked.max(MIN_DISK_WAIT).saturating_sub(waited)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_waits_for_the_disk_as_long_as_it_worked() {
        let left = |elapsed, waited| {
            remaining_wait(Duration::from_secs(elapsed), Duration::from_secs(waited)).as_secs()
        };
        assert_eq!(left(0, 0), 2, "a disk may be slow at first");
        assert_eq!(left(100, 0), 100);
        assert_eq!(left(100, 40), 20);
        assert_eq!(left(100, 50), 0, "half of the time");
        assert_eq!(left(100, 90), 0);
    }
}
