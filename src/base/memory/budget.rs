//! The parts of `--memory`, and what decoders can borrow from them.
//!
//! A mount divides it into fixed parts:
//!
//! | part | share | kept by |
//! |---|---|---|
//! | packed buffers of the scan | 1/4 | a [`BufferPool`](super::buffer_pool::BufferPool) |
//! | plain buffers of the scan | 1/4 | a [`BufferPool`](super::buffer_pool::BufferPool) |
//! | span cache | 3/8 | a [`Reclaim`](super::reclaim::Reclaim) |
//! | write queues of disk caches | 1/32 | a [`BufferPool`](super::buffer_pool::BufferPool) |
//! | idle memory of spans | 3/32 | a [`FreeList`](super::free_list::FreeList) |
//!
//! A pool that is empty gives more than it has, so the queue of a small memory holds one span of up to 8 MiB.
//!
//! After the scan, reads that decode have its half as one pool. During the scan they have 1/8, besides these
//! parts. `materialize` has no caches, and gives half of everything to each pool. Decoders have no part. A
//! [`MemoryBroker`](super::reclaim::MemoryBroker) reclaims their state from the pools, and last from the span cache.

/// Minimum memory of a scan, in bytes.
///
/// Half of it must hold everything that a decoder needs before its first output, and the chunks at both ends.
/// A zstd frame has up to 9 MiB of packed bytes. A block of legacy lz4 has up to 8 MiB packed and plain.
pub const MIN_MEMORY: u64 = 32 << 20;

/// Divisor for the part of a pool that is never lent, so that work continues.
const KEPT_DIVISOR: u64 = 4;

/// Divisor of the memory for archives that enclose SOURCE. Uncompressed ones need memory only for the index.
const ENCLOSING_DIVISOR: u64 = 4;

/// Unit of the memory that errors name.
const NAMED_UNIT: u64 = 1 << 20;

/// The largest memory that errors name: 16 TiB.
const MAX_NAMED_UNITS: u64 = 1 << 24;

/// The part of a pool of `bytes` that decoders can borrow.
pub(super) const fn lendable_bytes(bytes: u64) -> u64 {
    bytes - bytes / KEPT_DIVISOR
}

/// The memory of an archive, or of several that share it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Budget(u64);

impl Budget {
    /// The parts of `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// All of it, at least [`MIN_MEMORY`].
    pub(crate) fn bytes(self) -> u64 {
        self.0.max(MIN_MEMORY)
    }

    /// Half of it, for reads, and before for scans. They use at least half of [`MIN_MEMORY`].
    pub(crate) fn half(self) -> u64 {
        self.bytes() / 2
    }

    /// Each of the two pools of a scan that has all of it.
    pub(crate) fn scan_pool_bytes(self) -> u64 {
        self.half()
    }

    /// Memory of a scan beside caches. It uses at least [`MIN_MEMORY`].
    pub(crate) fn scan_bytes(self) -> u64 {
        self.half().max(MIN_MEMORY)
    }

    /// The part of [`Self::scan_bytes`] that cached spans lack meanwhile.
    pub(crate) fn borrowed_span_bytes(self) -> u64 {
        self.scan_bytes().saturating_sub(self.0 / 2)
    }

    /// Memory for cached spans. Excludes allocator overhead and a span's memory beyond its length.
    pub(crate) fn span_bytes(self) -> u64 {
        self.0 / 8 * 3
    }

    /// Memory of the disk writes that are queued.
    pub(crate) fn queue_bytes(self) -> u64 {
        self.0 / 32
    }

    /// Memory of the free list. By default one of the longest spans, of 8 MiB, fits in it.
    pub(crate) fn free_list_bytes(self) -> u64 {
        self.0 / 32 * 3
    }

    /// Number of scans that can have their minimum at the same time: at least one, and at most `max`.
    pub(crate) fn scan_count(self, max: u64) -> u64 {
        (self.0 / 2 / MIN_MEMORY).clamp(1, max.max(1))
    }

    /// Bytes that a decoder can borrow from a scan that has all of it.
    fn stream_decoder_bytes(self) -> u64 {
        2 * lendable_bytes(self.scan_pool_bytes())
    }

    /// Bytes that a decoder can borrow from reads and cached spans.
    pub(crate) fn read_decoder_bytes(self) -> u64 {
        lendable_bytes(self.half()) + self.span_bytes()
    }
}

/// The part of the user's memory that an archive has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum MemoryShare {
    /// All of it, perhaps with other layers.
    #[default]
    Whole,
    /// The rest beside enclosing archives.
    Enclosed,
    /// An equal part for each of `count` enclosing archives.
    Enclosing {
        /// Number of them.
        count: u64,
    },
    /// That of an archive of a directory, of which up to `max_scans` are scanned at the same time.
    Directory {
        /// The maximum.
        max_scans: u64,
        /// The user's memory. More of it may permit another scan, and so less for each.
        total: u64,
    },
}

impl MemoryShare {
    /// The part of `total` for the scan of the archive, and without a directory for everything.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Whole => total,
            Self::Enclosed => total - total / ENCLOSING_DIVISOR,
            Self::Enclosing { count } => total / ENCLOSING_DIVISOR / count.max(1),
            Self::Directory { max_scans, .. } => total / Budget::new(total).scan_count(max_scans),
        }
    }

    /// The part of `total` for reads and caches.
    fn of_reads(self, total: u64) -> u64 {
        match self {
            Self::Directory { .. } => total,
            _ => self.of(total),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DecoderUse {
    /// A scan without caches, such as that of `materialize`.
    Stream,
    /// The scan of a mount, and its reads.
    Scan,
    /// Reads by an index.
    Reads,
}

/// How the memory that a decoder can borrow follows from the user's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DecoderMemory {
    /// The archive's part.
    pub(crate) share: MemoryShare,
    pub(crate) used_by: DecoderUse,
}

impl DecoderMemory {
    /// Bytes that a decoder can borrow if the user allows `total`.
    pub(crate) fn bytes(self, total: u64) -> u64 {
        let own = Budget::new(self.share.of(total));
        let shared = Budget::new(self.share.of_reads(total));
        match self.used_by {
            DecoderUse::Stream => own.stream_decoder_bytes(),
            DecoderUse::Reads => shared.read_decoder_bytes(),
            DecoderUse::Scan => {
                let pools = Budget::new(own.scan_bytes()).stream_decoder_bytes();
                let spans = match own.borrowed_span_bytes() {
                    0 => shared.span_bytes(),
                    _ => 0,
                };
                (pools + spans).min(shared.read_decoder_bytes())
            }
        }
    }

    /// The least memory, in whole MiB, with which a decoder can borrow `needed_bytes`. `None` if there is none.
    pub(crate) fn sufficient_for(self, needed_bytes: u64) -> Option<u64> {
        let known = match self.share {
            MemoryShare::Directory { total, .. } => total,
            _ => 0,
        };
        // A decoder never gets more than there is.
        let least = needed_bytes.max(MIN_MEMORY).max(known);
        let mut units = least.div_ceil(NAMED_UNIT)..=MAX_NAMED_UNITS;
        units
            .find(|units| self.bytes(units * NAMED_UNIT) >= needed_bytes)
            .map(|units| units * NAMED_UNIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn all_uses() -> impl Iterator<Item = DecoderMemory> {
        let shares = [
            MemoryShare::Whole,
            MemoryShare::Enclosed,
            MemoryShare::Enclosing { count: 1 },
            MemoryShare::Enclosing { count: 3 },
            MemoryShare::Directory {
                max_scans: 2,
                total: MIN_MEMORY,
            },
        ];
        let uses = [DecoderUse::Stream, DecoderUse::Scan, DecoderUse::Reads];
        shares
            .into_iter()
            .flat_map(move |share| uses.map(|used_by| DecoderMemory { share, used_by }))
    }

    // Promises: memory-needed
    #[test]
    fn named_memory_suffices_and_is_the_least() {
        let needs = (0..900).map(|number| number * MIB / 3 + number * 7);
        for needed in needs {
            for memory in all_uses() {
                let named = memory.sufficient_for(needed).expect("some suffices");
                assert!(named >= MIN_MEMORY && named.is_multiple_of(MIB));
                let context = format!("{memory:?}: {named} for {needed}");
                assert!(memory.bytes(named) >= needed, "{context}");
                assert!(memory.bytes(named) <= named, "{context}");
                let less = named - MIB;
                assert!(
                    less < MIN_MEMORY || memory.bytes(less) < needed,
                    "{context}"
                );
            }
        }
        for memory in all_uses() {
            assert_eq!(memory.sufficient_for(u64::MAX), None);
        }
    }

    // Promises: memory-needed
    #[test]
    fn named_memory_is_never_less_than_that_of_a_directory() {
        let need = 90 * MIB;
        for total in (32..400).map(|units| units * MIB) {
            let share = MemoryShare::Directory {
                max_scans: 2,
                total,
            };
            let memory = DecoderMemory {
                share,
                used_by: DecoderUse::Scan,
            };
            let named = memory.sufficient_for(need).expect("some suffices");
            assert!(
                named >= total && memory.bytes(named) >= need,
                "{total}: {named}"
            );
        }
    }

    // Promises: memory-decoder
    #[test]
    fn decoder_of_a_mount_borrows_three_quarters_from_64_mib_on() {
        let memory = |used_by| DecoderMemory {
            share: MemoryShare::Whole,
            used_by,
        };
        for total in [64, 86, 128, 1000].map(|units| units * MIB) {
            for used_by in [DecoderUse::Stream, DecoderUse::Scan, DecoderUse::Reads] {
                assert_eq!(memory(used_by).bytes(total), total / 4 * 3);
            }
        }
        for total in [32, 50, 63].map(|units| units * MIB) {
            assert_eq!(memory(DecoderUse::Stream).bytes(total), total / 4 * 3);
            assert_eq!(memory(DecoderUse::Scan).bytes(total), 24 * MIB);
        }
    }
}
