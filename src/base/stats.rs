//! Counters of events and bytes for tests, `--stats` and `tarfs status`. Three are of time: how long a lock is held, how
//! long decoders run, and how long spans are filled.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds the nanoseconds since `start`.
    pub fn add_time_since(&self, start: Instant) {
        self.add(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    /// Raises it to `peak` if that is higher.
    pub fn record_max(&self, peak: u64) {
        self.0.fetch_max(peak, Ordering::Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds one.
    pub fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Subtracts one; only after [`increment`](Self::increment).
    pub fn decrement(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Name, help text and kind of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterInfo {
    /// The name, which ends in the unit.
    pub name: &'static str,
    /// One sentence that says what it counts.
    pub help: &'static str,
    /// How the counter grows.
    pub kind: CounterKind,
}

/// How a counter grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CounterKind {
    /// It adds up.
    Sum,
    /// It is the highest value so far.
    Peak,
}

macro_rules! stats {
    (@growth) => { CounterKind::Sum };
    (@growth Peak) => { CounterKind::Peak };
    ($($(#[doc = $text:literal])+ $name:ident $(: $growth:ident)?),+ $(,)?) => {
        /// Counters of one process.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[doc = $text])+ pub $name: Counter,)+
            /// Reads retried because the source is unreachable, or without a byte for two seconds; a gauge.
            pub unreachable_reads: Gauge,
        }

        impl Stats {
            /// Names and values of all counters, in the order of the data flow.
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)+]
            }

            /// Descriptions of the counters, in the order of [`Stats::snapshot`].
            pub const COUNTERS: &'static [CounterInfo] = &[$(
                CounterInfo {
                    name: stringify!($name),
                    help: concat!($($text),+).trim_ascii_start(),
                    kind: stats!(@growth $($growth)?),
                },
            )+];
        }
    };
}

stats! {
    /// Requests sent to a server, including probes and retries.
    source_requests,
    /// Requests retried after a failure or a cut.
    source_retries,
    /// Requests sent again with renewed credentials, or to the region that the server named.
    source_renewed_credentials,
    /// Reads continued at another mirror because one failed or was slow.
    source_mirror_switches,
    /// Mirrors not used because their bytes differ from those of SOURCE.
    source_rejected_mirrors,
    /// Failures of the caching proxy, after which the origin was asked.
    source_via_failures,
    /// Requests cut because they were too slow, and retried for the rest.
    source_straggler_retries,
    /// Requests cancelled and sent again because the server answered later requests before them.
    source_starved_retries,
    /// Reads that continued in the response to the request of the previous read.
    source_reused_responses,
    /// Hedges: requests sent a second time because the first one was late and a reader waited for it.
    source_hedges,
    /// Times that the limit of concurrent requests was lowered because the server was busy.
    source_slowdowns,
    /// Reads of a source that timed out.
    source_timeouts,
    /// Maximum number of requests that a scan had in flight at once.
    source_peak_requests: Peak,
    /// Bytes received from a source.
    source_read_bytes,
    /// Bytes received from a source for a background scan or a reader from the front.
    scan_received_bytes,
    /// Packed bytes that a scan decoded or skipped.
    scanned_packed_bytes,
    /// Bytes of large payloads that a scan skipped without fetching them.
    skipped_bytes,
    /// Plain bytes produced by decoders.
    decoded_bytes,
    /// Processor time of decoding archives that need no network, in nanoseconds: by reads, and by scans that make an index.
    decoding_nanoseconds,
    /// Plain bytes that were decoded in this time.
    timed_decoded_bytes,
    /// Archives that were opened by an index published beside them, or a SOCI ztoc, without a scan.
    published_indexes,
    /// Reads of published indexes.
    index_reads,
    /// Packed bytes of published indexes that were read.
    index_read_bytes,
    /// Files whose headers differ from the published index, so that they cannot be read.
    index_mismatches,
    /// Decoding jobs that a scan's decoder submitted to the thread pool.
    decoder_jobs,
    /// Parts of a packed stream that a scan decoded speculatively ahead of its position, useful or not.
    speculative_decodes,
    /// Decoded blocks made after the scan, for reads and prefetch.
    decoded_spans,
    /// Plain bytes that were decoded, or fetched if they are not packed, after the scan.
    filled_bytes,
    /// Time of fetching and decoding spans after the scan, in nanoseconds, added up over threads.
    fill_nanoseconds,
    /// Decoded blocks from the source that do not match the index, each of which is fetched again once.
    damaged_spans,
    /// Longest time in microseconds that a scan kept readers from the index at once.
    index_lock_peak_microseconds: Peak,
    /// Times that a command, a lookup, a listing or a read waited for a part of a scan, or for its end.
    scan_waits,
    /// Members that scans found.
    scanned_members,
    /// Scans that decoded along the seek points of a saved index.
    indexed_scans,
    /// Scans started.
    scans,
    /// Decoded blocks that reads found in memory.
    memory_hit_spans,
    /// Decoded blocks that reads did not find in memory and had to fill.
    memory_miss_spans,
    /// Decoded blocks that reads did not find in memory, and waited for while another read filled them.
    memory_shared_spans,
    /// Decoded blocks that reads found in the disk cache and not in memory.
    disk_cache_hit_spans,
    /// Decoded blocks that reads found neither in memory nor in the disk cache.
    disk_cache_miss_spans,
    /// Decoded blocks that reads got from another process of this user.
    peer_spans,
    /// Indexes that were got from another process of this user, instead of a scan.
    peer_indexes,
    /// Decoded blocks that were sent to other processes of this user.
    lent_spans,
    /// Reads of a local disk that read little more than the requested bytes.
    exact_reads,
    /// Decoded blocks that prefetch put into memory.
    prefetched_spans,
    /// Packed bytes fetched by prefetch.
    prefetched_packed_bytes,
    /// Decoded blocks read from the disk cache that do not match the index because they are lost, torn or
    /// damaged.
    disk_cache_damaged_spans,
    /// Decoded bytes written to the disk cache.
    disk_cache_written_bytes,
    /// Decoded bytes read from the disk cache.
    disk_cache_read_bytes,
    /// Decoded blocks not written to the disk cache because the disk was busy.
    disk_cache_skipped_spans,
    /// Decoded blocks not written to the disk cache because decoding them again is faster than reading them.
    disk_cache_declined_spans,
    /// Bytes evicted from the disk cache for decoded blocks of this archive, those of other archives included.
    disk_cache_evicted_bytes,
    /// Archives of a directory that were opened because a file or directory of theirs was wanted.
    opened_archives,
    /// Archives of a directory that were closed because they were not in use, or for others.
    closed_archives,
    /// Bytes returned to readers of a mount.
    served_bytes,
    /// Read requests of the kernel inside a file, answered or failed.
    served_reads,
    /// Requests of the kernel that were cancelled because the calling process was killed.
    interrupted_requests,
    /// Requests of the kernel that failed because no data arrived within the timeout.
    timed_out_requests,
    /// Lookups by the kernel that found an entry.
    served_lookups,
    /// Indexes sent to programs that list the mount, instead of requests of the kernel.
    sent_indexes,
    /// Files pushed into the kernel's page cache before they were read.
    pushed_files,
    /// Bytes of those files.
    pushed_bytes,
    /// Inodes whose cached attributes were invalidated in the kernel because a scan changed them.
    invalidated_inodes,
    /// Reads of a mount that failed.
    failed_reads,
    /// Opens of a mount's files that the kernel serves from a local copy by itself (passthrough).
    passthrough_opens,
    /// Opens of files of a mount with --copy-to that this process serves.
    served_opens,
    /// Bytes returned to readers of a mount from local copies of its files.
    copied_bytes,
    /// Payload bytes written by materialize.
    written_bytes,
    /// Entries written by materialize.
    written_entries,
    /// Device nodes of an image that bundle wrote as empty files, because the user may not create devices.
    written_device_placeholders,
    /// File systems that materialize synced to disk on request.
    synced_file_systems,
    /// Panics, each of which is a bug of this program and is logged.
    panics,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_snapshot_names_what_was_counted() {
        let stats = Stats::default();
        stats.source_requests.increment();
        stats.source_requests.add(2);
        assert!(stats.snapshot().contains(&("source_requests", 3)));
    }

    #[test]
    fn every_counter_says_what_it_counts() {
        let snapshot = Stats::default().snapshot();
        assert_eq!(snapshot.len(), Stats::COUNTERS.len());
        for ((name, _), counter) in snapshot.into_iter().zip(Stats::COUNTERS) {
            assert_eq!(name, counter.name);
            assert!(counter.help.starts_with(char::is_uppercase), "{counter:?}");
            assert!(counter.help.ends_with('.'), "{counter:?}");
            let is_peak = name.contains("_peak_");
            assert_eq!(counter.kind == CounterKind::Peak, is_peak, "{counter:?}");
        }
    }

    /// Programs depend on these names. Counters may be added, but none may be renamed or removed.
    // Promises: status-json
    #[test]
    fn names_of_counters_are_stable() {
        let names: BTreeSet<_> = Stats::COUNTERS.iter().map(|counter| counter.name).collect();
        let expected = BTreeSet::from([
            "source_requests",
            "source_reused_responses",
            "source_retries",
            "source_renewed_credentials",
            "source_mirror_switches",
            "source_via_failures",
            "source_rejected_mirrors",
            "source_starved_retries",
            "source_straggler_retries",
            "source_hedges",
            "source_slowdowns",
            "source_timeouts",
            "source_peak_requests",
            "source_read_bytes",
            "scan_received_bytes",
            "scanned_packed_bytes",
            "skipped_bytes",
            "decoded_bytes",
            "decoding_nanoseconds",
            "timed_decoded_bytes",
            "published_indexes",
            "index_reads",
            "index_read_bytes",
            "index_mismatches",
            "index_lock_peak_microseconds",
            "decoder_jobs",
            "speculative_decodes",
            "decoded_spans",
            "filled_bytes",
            "fill_nanoseconds",
            "peer_spans",
            "peer_indexes",
            "lent_spans",
            "exact_reads",
            "scan_waits",
            "scanned_members",
            "indexed_scans",
            "scans",
            "memory_hit_spans",
            "memory_miss_spans",
            "memory_shared_spans",
            "damaged_spans",
            "disk_cache_hit_spans",
            "disk_cache_miss_spans",
            "disk_cache_written_bytes",
            "disk_cache_read_bytes",
            "disk_cache_damaged_spans",
            "disk_cache_skipped_spans",
            "disk_cache_declined_spans",
            "disk_cache_evicted_bytes",
            "opened_archives",
            "closed_archives",
            "served_bytes",
            "served_reads",
            "served_lookups",
            "sent_indexes",
            "pushed_files",
            "pushed_bytes",
            "invalidated_inodes",
            "prefetched_spans",
            "prefetched_packed_bytes",
            "failed_reads",
            "interrupted_requests",
            "timed_out_requests",
            "passthrough_opens",
            "served_opens",
            "copied_bytes",
            "written_bytes",
            "written_entries",
            "written_device_placeholders",
            "synced_file_systems",
            "panics",
        ]);
        assert_eq!(names, expected);
    }
}
