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
    pub fn raise(&self, peak: u64) {
        self.0.fetch_max(peak, Ordering::Relaxed);
    }

    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// One process' counters.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: Counter,)+
        }

        impl Stats {
            /// Every counter's name and value, in the order of the data's way.
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)+]
            }
        }
    };
}

stats! {
    /// Requests sent to a server, the first probing one and repetitions included.
    source_requests,
    /// Requests that were repeated after a failure, or because they were cut.
    source_retries,
    /// Requests cut, and repeated for the rest, because they crawled.
    source_cuts,
    /// Requests sent a second time beside the first, because that one was the last and late.
    source_hedges,
    /// Requests that a scan had in flight at once, at the most.
    source_peak_requests,
    /// Bytes received from a source.
    source_read_bytes,
    /// Packed bytes that a scan has handed to its decoder: how far it is.
    scanned_packed_bytes,
    /// Plain bytes produced by decoders.
    decoded_bytes,
    /// Pieces of plain bytes that a scan's decoder left to any thread to make.
    decoder_jobs,
    /// Shares of a packed stream that a scan's decoder had decoded ahead, useful or not.
    decoder_shares,
    /// Spans decoded again after the scan, to answer reads.
    decoded_spans,
    /// Members seen by a scan.
    scanned_members,
    /// Scans that decoded along the seek points of a saved index.
    indexed_scans,
    /// Scans started.
    scans,
    /// Reads answered from memory.
    cache_hit_spans,
    /// Reads that had to fill a span first.
    cache_miss_spans,
    /// Plain bytes written to spools.
    spooled_bytes,
    /// Plain bytes read back from spools.
    unspooled_bytes,
    /// Bytes handed to readers of a mount.
    served_bytes,
    /// Payload bytes written by materialize.
    written_bytes,
    /// Entries written by materialize.
    written_entries,
    /// File systems brought to disk by materialize, because it was asked to.
    synced_file_systems,
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
}
