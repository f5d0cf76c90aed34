//! Counters: what was done, in bytes and numbers, never in time. Tests assert on them
//! ("second read: zero requests"), `--stats` and `tarfs status` show them.

use std::sync::atomic::{AtomicU64, Ordering};

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

    /// Makes it `peak`, unless it is higher already.
    pub fn record_max(&self, peak: u64) {
        self.0.fetch_max(peak, Ordering::Relaxed);
    }

    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many there are now of what comes and goes.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// How many there are now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// One more.
    pub fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less. Only after [`increment`](Self::increment).
    pub fn decrement(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a counter is, apart from its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterInfo {
    /// Its name, which carries the unit.
    pub name: &'static str,
    /// What it counts, in a sentence.
    pub help: &'static str,
    /// How it grows.
    pub kind: CounterKind,
}

/// How a counter grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CounterKind {
    /// By what happens.
    Sum,
    /// To the highest value there was.
    Peak,
}

macro_rules! stats {
    (@growth) => { CounterKind::Sum };
    (@growth Peak) => { CounterKind::Peak };
    ($($(#[doc = $text:literal])+ $name:ident $(: $growth:ident)?),+ $(,)?) => {
        /// One process' counters.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[doc = $text])+ pub $name: Counter,)+
            /// Reads of the source that are repeated at present because the source cannot be reached, or
            /// that have received nothing for two seconds. No counter.
            pub unreachable_reads: Gauge,
        }

        impl Stats {
            /// Every counter's name and value, in the order of the data's way.
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)+]
            }

            /// What each counter is, in the order of [`Stats::snapshot`].
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
    /// Requests sent to a server, the first probing one and repetitions included.
    source_requests,
    /// Requests that were repeated after a failure, or because they were cut.
    source_retries,
    /// Requests cut off because they were too slow, and repeated for the rest.
    source_straggler_retries,
    /// Requests cancelled and sent again because the server answered later requests before them.
    source_starved_retries,
    /// Reads that continued in the response to the request of the previous read.
    source_reused_responses,
    /// Requests sent a second time beside the first, because someone waited for it and it was late.
    source_hedges,
    /// Times that fewer requests were sent at once because the server said to be busy.
    source_slowdowns,
    /// Reads of a source that were given up because their time was over.
    source_timeouts,
    /// Requests that a scan had in flight at once, at the most.
    source_peak_requests: Peak,
    /// Bytes received from a source.
    source_read_bytes,
    /// Bytes of these that were received for a scan in the background, or for whoever reads a source from
    /// its front.
    scan_received_bytes,
    /// Packed bytes that a scan has handed to its decoder, or skipped.
    scanned_packed_bytes,
    /// Bytes of large payloads that a scan skipped without fetching them.
    skipped_bytes,
    /// Plain bytes produced by decoders.
    decoded_bytes,
    /// Pieces of plain bytes that a scan's decoder left to any thread to make.
    decoder_jobs,
    /// Parts of a packed stream that a scan decoded ahead of its position, useful or not.
    speculative_decodes,
    /// Blocks decoded again after the scan, to answer reads.
    decoded_spans,
    /// Blocks decoded from the source that do not match the index. Each is fetched once more, unless that
    /// was done already.
    damaged_spans,
    /// Members seen by a scan.
    scanned_members,
    /// Scans that decoded along the seek points of a saved index.
    indexed_scans,
    /// Scans started.
    scans,
    /// Decoded blocks that reads found in memory.
    memory_hit_spans,
    /// Decoded blocks that reads did not find in memory, and made.
    memory_miss_spans,
    /// Decoded blocks that reads did not find in memory, and waited for while another read made them.
    memory_shared_spans,
    /// Decoded blocks that reads found in the disk cache and not in memory.
    disk_cache_hit_spans,
    /// Decoded blocks that reads found neither in memory nor in the disk cache.
    disk_cache_miss_spans,
    /// Reads of a local disk, for readers, of no more than the blocks in which the wanted bytes lie.
    exact_reads,
    /// Blocks decoded ahead of reads.
    prefetched_spans,
    /// Packed bytes fetched ahead of reads.
    prefetched_packed_bytes,
    /// Decoded blocks read from the disk cache that do not match the index: lost, torn or damaged.
    disk_cache_damaged_spans,
    /// Decoded bytes written to the disk cache.
    disk_cache_written_bytes,
    /// Decoded bytes read from the disk cache.
    disk_cache_read_bytes,
    /// Decoded blocks not written to the disk cache because the disk was busy.
    disk_cache_skipped_spans,
    /// Bytes of the disk cache freed to make room for other blocks of the same archive.
    disk_cache_evicted_bytes,
    /// Bytes handed to readers of a mount.
    served_bytes,
    /// Reads that the kernel asked a mount for.
    served_reads,
    /// Requests of the kernel that were given up because who had asked was killed.
    interrupted_requests,
    /// Requests of the kernel that failed because no data arrived within the timeout.
    timed_out_requests,
    /// Names the kernel asked for, of entries that are there.
    served_lookups,
    /// Files put into the kernel's page cache before they were read.
    pushed_files,
    /// Bytes of those files.
    pushed_bytes,
    /// Inodes whose cached attributes were invalidated in the kernel because a scan changed them.
    invalidated_inodes,
    /// Reads of a mount that were answered with an error.
    failed_reads,
    /// Opens of a mount's files that were handed to the kernel, to read a copy by itself.
    passthrough_opens,
    /// Opens of a mount's files whose reads come to this process, where opens are counted.
    served_opens,
    /// Bytes handed to readers of a mount from copies of its files.
    copied_bytes,
    /// Payload bytes written by materialize.
    written_bytes,
    /// Entries written by materialize.
    written_entries,
    /// Device nodes of an image that bundle wrote as empty files, because the user may not create them.
    written_device_placeholders,
    /// File systems brought to disk by materialize, because it was asked to.
    synced_file_systems,
    /// Panics, each of which is a fault of this program and is told in its log.
    panics,
}

#[cfg(test)]
mod tests {
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

    /// Programs read these. One may be added; none may change or go.
    #[test]
    fn names_of_counters_are_stable() {
        let names: Vec<_> = Stats::COUNTERS.iter().map(|counter| counter.name).collect();
        for name in [
            "source_requests",
            "source_retries",
            "source_straggler_retries",
            "source_hedges",
            "source_slowdowns",
            "source_timeouts",
            "source_peak_requests",
            "source_read_bytes",
            "scan_received_bytes",
            "scanned_packed_bytes",
            "decoded_bytes",
            "decoder_jobs",
            "speculative_decodes",
            "decoded_spans",
            "scanned_members",
            "indexed_scans",
            "scans",
            "memory_hit_spans",
            "memory_miss_spans",
            "memory_shared_spans",
            "disk_cache_hit_spans",
            "disk_cache_miss_spans",
            "disk_cache_written_bytes",
            "disk_cache_read_bytes",
            "disk_cache_skipped_spans",
            "disk_cache_evicted_bytes",
            "served_bytes",
            "served_reads",
            "served_lookups",
            "pushed_files",
            "pushed_bytes",
            "invalidated_inodes",
            "prefetched_spans",
            "prefetched_packed_bytes",
            "failed_reads",
            "passthrough_opens",
            "served_opens",
            "copied_bytes",
            "written_bytes",
            "written_entries",
            "synced_file_systems",
        ] {
            assert!(names.contains(&name), "{name} is gone");
        }
    }
}
