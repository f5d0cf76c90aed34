//! Policy for caching the spans of a scan on disk, and for waiting for the disk.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::cache::{DiskCache, QueueTimeout};
use crate::codec::Compression;
use crate::index::Span;
use crate::source::{Access, Source};

/// Minimum time that a scan may wait for the disk, however short its work was.
const MIN_DISK_WAIT: Duration = Duration::from_secs(2);

/// Maximum wait for a span that can only be decoded again from far before it, unless the disk has stalled.
const MAX_FAR_SPAN_WAIT: Duration = Duration::from_secs(30);

/// Whether to cache spans of `source` on disk. A local uncompressed file is as good as any copy.
pub(crate) fn should_cache_spans(source: &dyn Source, compression: Option<Compression>) -> bool {
    let is_near = !source.is_remote() && source.access() == Access::Ranges;
    !(is_near && compression == Some(Compression::None))
}

/// Writes spans of a scan to the disk cache.
/// A missing span must be decoded again, so a scan waits for the disk at most as long as it has worked. Thus
/// a slow disk at most doubles its time. It waits longer for spans without seek points, because a missing one
/// costs decoding everything before it.
#[derive(Debug)]
pub(crate) struct ScanDiskCache {
    disk_cache: Arc<DiskCache>,
    access: Access,
    started: Instant,
    waited: Duration,
    /// Whether the disk was too slow for a span without a seek point.
    is_disk_stalled: bool,
}

impl ScanDiskCache {
    pub(crate) fn new(disk_cache: Arc<DiskCache>, source: &dyn Source) -> Self {
        Self {
            disk_cache,
            access: source.access(),
            started: Instant::now(),
            waited: Duration::ZERO,
            is_disk_stalled: false,
        }
    }

    /// Writes a span, unless it has no hash to verify it with.
    pub(crate) fn write_span(&mut self, span: &Span, bytes: &Bytes) {
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
