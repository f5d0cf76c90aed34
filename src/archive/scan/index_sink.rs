//! Sink that builds the index, and fills the span cache and the disk cache.

use bytes::Bytes;

use super::disk_cache_policy::ScanDiskCache;
use super::lag_limit::LagLimit;
use crate::archive::live_index::LiveIndex;
use crate::archive::sink::Sink;
use crate::base::cancel_token::CancelToken;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{self, FreeList};
use crate::cache::{SpanCache, SpanKey};
use crate::codec::Compression;
use crate::index::{MemberError, NewDigests, Problem, Span, TooMuchMemory};
use crate::tar::Member;

pub(crate) struct IndexSink<'a> {
    pub(crate) live_index: &'a LiveIndex,
    pub(crate) packed_bytes: Option<u64>,
    pub(crate) cancel_token: &'a CancelToken,
    pub(crate) span_cache: Option<&'a SpanCache>,
    pub(crate) span_owner: u32,
    pub(crate) lag_limit: &'a LagLimit,
    pub(crate) disk_cache_writer: Option<ScanDiskCache>,
    /// Bytes of the current span, if a cache needs them.
    pub(crate) span_bytes: Option<free_list::RecycledBuffer>,
    pub(crate) free_list: FreeList,
    /// The last span. The next one starts at its end, and probably has the same length.
    pub(crate) last_span: Extent<Plain>,
    /// Whether the index had memory for the last span.
    pub(crate) memory_check: Result<(), TooMuchMemory>,
    pub(crate) warnings: Vec<String>,
}

/// Maximum number of warnings. A hostile archive has one in every record.
const MAX_WARNINGS: usize = 100;

/// Reason to stop the scan. A problem of a single member is none.
#[derive(Debug)]
pub(crate) enum IndexSinkError {
    Cancelled,
    Memory(TooMuchMemory),
    TooManyEntries { name: Vec<u8>, at: Plain },
}

impl Sink for IndexSink<'_> {
    type Error = IndexSinkError;

    fn needs_payloads(&self) -> bool {
        false
    }

    fn begin(&mut self, compression: Compression) {
        let packed_bytes = self.packed_bytes;
        self.live_index
            .grow(|builder| builder.set_compression(compression, packed_bytes));
    }

    fn member(&mut self, member: Member) -> Result<(), IndexSinkError> {
        if self.cancel_token.is_cancelled() {
            return Err(IndexSinkError::Cancelled);
        }
        let placed = self.live_index.grow(|builder| {
            let placed = builder.add_member(&member);
            builder.check_memory().map(|()| placed)
        });
        match placed.transpose().map_err(IndexSinkError::Memory)? {
            Some(Err(MemberError::TooManyEntries)) => Err(IndexSinkError::TooManyEntries {
                name: member.name,
                at: member.header,
            }),
            // The builder's problems include all other rejected members, with their paths.
            Some(Ok(_) | Err(_)) | None => Ok(()),
        }
    }

    fn payload(&mut self, _bytes: Bytes) -> Result<(), IndexSinkError> {
        self.check_memory()
    }

    fn warning(&mut self, text: &str) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(text.to_owned());
        }
    }

    fn check_memory(&mut self) -> Result<(), IndexSinkError> {
        if self.cancel_token.is_cancelled() {
            return Err(IndexSinkError::Cancelled);
        }
        self.memory_check.map_err(IndexSinkError::Memory)
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
            disk_cache_writer.write_span(&span, checksums, &bytes);
        }
        if let Some(span_cache) = self.span_cache
            && has_hash
        {
            let key = SpanKey {
                span_owner: self.span_owner,
                span: span.number,
            };
            // Waits before the cache makes room for this span. At most a third of it may be unpushed. The
            // pusher has just read the spans it stored last, so they are evicted last.
            let max_lag = span_cache.available_bytes() / 3;
            if max_lag >= span.plain.len() {
                self.lag_limit.wait_for_pusher(span.plain.start(), max_lag);
            }
            span_cache.insert(key, bytes);
        }
        // Last, because readers may look for the bytes from here on.
        let seek_point = span.seek_point.as_ref();
        let memory_check = self.live_index.grow(|builder| {
            builder.add_span(span.plain, has_hash.then_some(checksums), seek_point);
            builder.check_memory()
        });
        self.memory_check = memory_check.unwrap_or(Ok(()));
    }
}
