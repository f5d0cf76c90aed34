//! The sink that makes an archive usable: members become the index, spans fill memory and disk cache.

use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use super::disk_cache_policy::ScanDiskCache;
use super::lag_limit::LagLimit;
use super::live_index::LiveIndex;
use super::scan::Sink;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{self, FreeList};
use crate::cache::{SpanCache, SpanKey};
use crate::codec::Compression;
use crate::index::{MemberError, NewDigests, Problem, Span, TooMuchMemory};
use crate::tar::Member;

/// Builds an index, and keeps spans where they are wanted.
pub(super) struct IndexSink<'a> {
    pub(super) live_index: &'a LiveIndex,
    /// How long the source says it is.
    pub(super) packed_bytes: Option<u64>,
    /// Set when nobody wants the index any more.
    pub(super) is_cancelled: &'a AtomicBool,
    /// What is decoded anyway is kept for the readers that come after.
    pub(super) span_cache: Option<&'a SpanCache>,
    /// Whose spans they are there.
    pub(super) layer: u16,
    /// To who stores it before it leaves memory.
    pub(super) lag_limit: &'a LagLimit,
    pub(super) disk_cache_writer: Option<ScanDiskCache>,
    /// The bytes of the span that is going by, when someone wants to keep them.
    pub(super) span_bytes: Option<free_list::RecycledBuffer>,
    /// Where the memory for these comes from.
    pub(super) free_list: FreeList,
    /// The last span; the next one begins behind it, and is as long.
    pub(super) last_span: Extent<Plain>,
    /// Whether the index had room for the last span.
    pub(super) memory_check: Result<(), TooMuchMemory>,
    /// Oddities, for the user.
    pub(super) warnings: Vec<String>,
}

/// Oddities that are kept; a hostile archive has one in every record.
const MAX_WARNINGS: usize = 100;

/// What stops it; nothing that concerns one member does.
#[derive(Debug)]
pub(super) enum IndexSinkError {
    /// Nobody wants the index any more.
    Cancelled,
    /// The index needs more memory than is allowed.
    Memory(TooMuchMemory),
    /// There are more entries than are allowed.
    TooManyEntries {
        /// The member that needs one more.
        name: Vec<u8>,
        /// Its header.
        at: Plain,
    },
}

impl From<TooMuchMemory> for IndexSinkError {
    fn from(error: TooMuchMemory) -> Self {
        Self::Memory(error)
    }
}

impl Sink for IndexSink<'_> {
    type Error = IndexSinkError;

    fn begin(&mut self, compression: Compression) {
        let packed_bytes = self.packed_bytes;
        self.live_index
            .grow(|builder| builder.set_compression(compression, packed_bytes));
    }

    fn member(&mut self, member: Member) -> Result<(), IndexSinkError> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            return Err(IndexSinkError::Cancelled);
        }
        let placed = self.live_index.grow(|builder| {
            let placed = builder.add_member(&member);
            builder.check_memory().map(|()| placed)
        });
        match placed.transpose()? {
            Some(Err(MemberError::TooManyEntries)) => Err(IndexSinkError::TooManyEntries {
                name: member.name,
                at: member.header,
            }),
            // What else is refused is among the builder's problems, with its path.
            Some(Ok(_) | Err(_)) | None => Ok(()),
        }
    }

    fn payload(&mut self, _bytes: Bytes) -> Result<(), IndexSinkError> {
        self.check_memory()
    }

    fn member_end(&mut self, _cut: bool) -> Result<(), IndexSinkError> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(text.to_owned());
        }
    }

    fn check_memory(&mut self) -> Result<(), IndexSinkError> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            return Err(IndexSinkError::Cancelled);
        }
        Ok(self.memory_check?)
    }

    fn damage(&mut self, offset: Plain, text: &str) {
        let problem = Problem {
            path: None,
            offset: Some(offset),
            what: text.to_owned(),
        };
        self.live_index.grow(|builder| builder.add_problem(problem));
    }

    fn digests(&mut self, digests: &NewDigests) {
        self.live_index.grow(|builder| builder.add_digests(digests));
    }

    fn span_piece(&mut self, bytes: &Bytes) {
        if self.span_cache.is_some() || self.disk_cache_writer.is_some() {
            let span_bytes = &mut self.span_bytes;
            span_bytes
                .get_or_insert_with(|| {
                    let len = usize::try_from(self.last_span.len()).unwrap_or_default();
                    self.free_list
                        .allocate_empty(len.max(bytes.len()), self.last_span.end().0)
                })
                .append(bytes);
        }
    }

    fn span_end(&mut self, span: Span, checksums: &[u64]) {
        let has_hash = span.hash.is_some();
        let span_bytes = self.span_bytes.take();
        let bytes = span_bytes.map_or_else(Bytes::new, free_list::RecycledBuffer::freeze);
        self.last_span = span.plain;
        if let Some(disk_cache_writer) = &mut self.disk_cache_writer
            && has_hash
        {
            disk_cache_writer.write_span(&span, &bytes);
        }
        if let Some(span_cache) = self.span_cache
            && has_hash
        {
            let key = SpanKey {
                layer: self.layer,
                span: span.number,
            };
            // Before there is room for this one. A third is what is yet to be stored, as what was
            // stored last has been read last, and leaves memory last.
            let max_lag = span_cache.available_bytes() / 3;
            if max_lag >= span.plain.len() {
                self.lag_limit.wait_for_pusher(span.plain.start(), max_lag);
            }
            span_cache.insert(key, bytes);
        }
        // Last: from here on someone may look for the bytes.
        let seek_point = span.seek_point.as_ref();
        let memory_check = self.live_index.grow(|builder| {
            builder.add_span(span.plain, has_hash.then_some(checksums), seek_point);
            builder.check_memory()
        });
        self.memory_check = memory_check.unwrap_or(Ok(()));
    }
}
