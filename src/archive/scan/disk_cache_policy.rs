//! Policy for caching the spans of a scan on disk, and for waiting for the disk.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::base::extent::{Packed, Plain};
use crate::base::stats::Stats;
use crate::base::thread::processor_nanoseconds;
use crate::cache::{DiskCache, QueueTimeout, SparseExtent, bytes_per_second};
use crate::codec::Compression;
use crate::index::{Index, MAX_DECODE_COST, Span, block_len, zero_runs};
use crate::source::{Access, Source};

/// Minimum time that a scan may wait for the disk, however short its work was.
const MIN_DISK_WAIT: Duration = Duration::from_secs(2);

/// Maximum wait for a span that can only be decoded again from far before it, unless the disk has stalled.
const MAX_FAR_SPAN_WAIT: Duration = Duration::from_secs(30);

/// Minimum ratio of plain to packed bytes at which the disk cache may decline a span. Of other spans a short read
/// would decode far more than it reads from disk.
const MIN_DECLINED_RATIO: u64 = 64;

/// Whether to cache spans of `source` on disk. A local uncompressed file is as good as any copy.
pub(crate) fn should_cache_spans(source: &dyn Source, compression: Option<Compression>) -> bool {
    !(is_local(source) && compression == Some(Compression::None))
}

/// Whether packed bytes need no network, so that decoding is all that a missing span costs.
pub(crate) fn is_local(source: &dyn Source) -> bool {
    !source.is_remote() && source.access() == Access::Ranges
}

/// Limit of the spans to decode for one. Without one, a long stream without seek points would stay for years.
const MAX_MEAN_SPANS: u64 = 8;

/// Relative time to fetch and decode as many bytes of each compression, as measured over a link of 100 MB/s.
const fn decode_weight(compression: Compression) -> u64 {
    match compression {
        Compression::None | Compression::Lz4 | Compression::Zstd => 2,
        Compression::Gzip => 3,
        Compression::Xz => 11,
        Compression::Bzip2 => 17,
    }
}

/// Relative cost to make a byte of the archive again, for the eviction from a directory of disk caches.
/// It is the weight of the compression, times the mean number of spans to decode for one, up to
/// [`MAX_MEAN_SPANS`].
pub(crate) fn recovery_cost(index: &Index) -> u64 {
    let costs = (0..index.span_count()).map(|number| u64::from(index.decode_cost(number)));
    let mean = costs.sum::<u64>() / u64::from(index.span_count().max(1));
    decode_weight(index.origin().compression) * mean.clamp(1, MAX_MEAN_SPANS)
}

/// Whether `packed` bytes are decoded to `plain` ones faster than `disk_cache` reads these. Both speeds are measured.
pub(crate) fn is_decoded_faster(
    packed: u64,
    plain: u64,
    disk_cache: &DiskCache,
    stats: &Stats,
) -> bool {
    let (bytes, nanoseconds) = (&stats.timed_decoded_bytes, &stats.decoding_nanoseconds);
    let decoding = bytes_per_second(bytes.get(), nanoseconds.get());
    packed.saturating_mul(MIN_DECLINED_RATIO) <= plain
        && decoding > Some(disk_cache.read_rate().unwrap_or(u64::MAX))
}

/// Clock of decoding: counts its processor time and bytes for [`is_decoded_faster`]. It does not run for an archive whose
/// bytes are not near, because each call of it is a system call, and data of servers is always kept.
#[derive(Clone, Debug)]
pub(crate) struct DecodingClock(Option<Arc<Stats>>);

impl DecodingClock {
    pub(crate) fn new(source: &dyn Source, stats: &Arc<Stats>) -> Self {
        Self(is_local(source).then(|| Arc::clone(stats)))
    }

    /// A clock that does not run, for a scan that makes no index, and so has no disk cache.
    pub(crate) fn stopped() -> Self {
        Self(None)
    }

    /// Runs `decode`, and counts its processor time.
    pub(crate) fn measure<T>(&self, decode: impl FnOnce() -> T) -> T {
        let Some(stats) = &self.0 else {
            return decode();
        };
        let start = processor_nanoseconds();
        let decoded = decode();
        stats
            .decoding_nanoseconds
            .add(processor_nanoseconds().saturating_sub(start));
        decoded
    }

    /// Counts plain bytes that were decoded in measured time.
    pub(crate) fn count(&self, bytes: usize) {
        if let Some(stats) = &self.0 {
            stats.timed_decoded_bytes.add(bytes as u64);
        }
    }
}

/// Writes spans of a scan to the disk cache.
/// A missing span must be decoded again, so a scan waits for the disk at most as long as it has worked. Thus
/// a slow disk at most doubles its time. It waits longer for spans without seek points, because a missing one
/// costs decoding everything before it.
#[derive(Debug)]
pub(crate) struct ScanDiskCache {
    disk_cache: Arc<DiskCache>,
    access: Access,
    is_local: bool,
    block_len: u64,
    stats: Arc<Stats>,
    /// The last seek point.
    last_seek_point: Option<(Packed, Plain)>,
    /// Number of spans from there on.
    spans_since: u32,
    /// Whether the bytes between the last two seek points are decoded faster than read from disk.
    is_decoded_faster: bool,
    started: Instant,
    waited: Duration,
    /// Whether the disk was too slow for a span without a seek point.
    is_disk_stalled: bool,
}

impl ScanDiskCache {
    pub(crate) fn new(disk_cache: Arc<DiskCache>, source: &dyn Source, stats: Arc<Stats>) -> Self {
        Self {
            disk_cache,
            access: source.access(),
            is_local: is_local(source),
            stats,
            last_seek_point: None,
            spans_since: 0,
            is_decoded_faster: false,
            block_len: block_len(source.fingerprint().len),
            started: Instant::now(),
            waited: Duration::ZERO,
            is_disk_stalled: false,
        }
    }

    /// Writes a span, unless it has no hash to verify it with, or is probably decoded faster than read. The packed length
    /// of a span is unknown before the next one, so that it counts as compressed as the span before it.
    pub(crate) fn write_span(&mut self, span: &Span, checksums: &[u64], bytes: &Bytes) {
        self.spans_since = (self.spans_since + 1).min(MAX_DECODE_COST);
        if let Some(point) = &span.seek_point {
            self.spans_since = 1;
            let here = (point.packed, span.plain.start());
            if let Some((packed, plain)) = self.last_seek_point.replace(here) {
                let packed = here.0.0.saturating_sub(packed.0);
                let plain = here.1.0.saturating_sub(plain.0);
                self.is_decoded_faster = self.is_local
                    && is_decoded_faster(packed, plain, &self.disk_cache, &self.stats);
            }
        }
        if span.hash.is_none() {
            return;
        }
        if self.is_decoded_faster && span.seek_point.is_some() {
            self.stats.disk_cache_declined_spans.increment();
            return;
        }
        let is_far = span.seek_point.is_none() && !self.is_disk_stalled;
        let disk_wait = match self.access {
            Access::Stream => QueueTimeout::Unlimited,
            Access::Ranges if is_far => QueueTimeout::UpTo(MAX_FAR_SPAN_WAIT),
            Access::Ranges => {
                QueueTimeout::UpTo(remaining_wait(self.started.elapsed(), self.waited))
            }
        };
        let before = Instant::now();
        let zeros = zero_runs(span.plain, self.block_len, checksums.iter().copied());
        let extent = SparseExtent::new(span.plain, zeros).with_cost(self.spans_since);
        self.disk_cache.insert(extent, bytes.clone(), disk_wait);
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
    use crate::base::buffer_pool::BufferPool;
    use crate::base::extent::Extent;
    use crate::base::free_list::FreeList;
    use crate::cache::{DiskCacheDir, DiskCacheOptions, ReadRate};
    use crate::codec::SeekPoint;
    use crate::source::MemorySource;

    /// Bytes that a scan stores of spans of 1 MiB with so many packed bytes each, and the spans that it declines.
    fn stored(packed: u64, decoding_seconds: u64, is_remote: bool) -> (u64, u64) {
        const LEN: u64 = 1 << 20;
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let stats = Arc::<Stats>::default();
        stats.timed_decoded_bytes.add(100 << 20);
        stats
            .decoding_nanoseconds
            .add(decoding_seconds * 1_000_000_000);
        let read_rate = Arc::<ReadRate>::default();
        read_rate.add(100 << 20, Duration::from_secs(10));
        let options = DiskCacheOptions {
            write_pool: BufferPool::new(4 << 20),
            is_only_copy: false,
            free_list: FreeList::new(0),
            read_rate,
            stats: Arc::clone(&stats),
        };
        let cache_dir = DiskCacheDir::new(directory.path(), Some(1 << 30));
        let disk_cache = DiskCache::open(cache_dir, "a", options).expect("a disk cache");
        let disk_cache = Arc::new(disk_cache);
        let source = MemorySource::new("test", Vec::new());
        let mut writer = ScanDiskCache::new(Arc::clone(&disk_cache), &source, Arc::clone(&stats));
        writer.is_local = !is_remote;
        for number in 0..5 {
            let plain = Extent::with_len(Plain(u64::from(number) * LEN), LEN);
            let seek_point = SeekPoint {
                packed: Packed(u64::from(number) * packed),
                bit: 0,
                plain: plain.start(),
                state: 0,
                window: Bytes::new(),
            };
            let span = Span {
                number,
                plain,
                hash: Some(1),
                seek_point: Some(seek_point).filter(|_| number < 4),
            };
            writer.write_span(&span, &[], &vec![1; 1 << 20].into());
        }
        disk_cache.flush();
        let stored = disk_cache.disk_usage().held_bytes / LEN;
        (stored, stats.disk_cache_declined_spans.get())
    }

    // Promises: disk-zeros
    #[test]
    fn scan_declines_compressed_spans_that_decode_faster_than_the_disk_reads() {
        // The first span has none before it, and the last one is decoded from far away.
        assert_eq!(stored(1 << 14, 5, false), (2, 3));
        assert_eq!(stored(1 << 14, 20, false), (5, 0), "the disk is faster");
        assert_eq!(
            stored(1 << 15, 5, false),
            (5, 0),
            "a short read would decode much"
        );
        assert_eq!(
            stored(1 << 14, 5, true),
            (5, 0),
            "a server would be asked again"
        );
    }

    // Promises: disk-slow
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
