//! Cold path: scans an archive in one pass.
//!
//! 1. `fetch` streams packed chunks, and the decode pipeline turns them into plain bytes.
//! 2. The span splitter divides each piece of the plain bytes into spans.
//! 3. The tar parser turns the same piece into members and payloads.
//! 4. A [`Sink`] receives both: the index sink for a mount, others to verify or to write a tree.

mod decode_pipeline;
pub(super) mod digest;
pub(super) mod disk_cache_policy;
pub(super) mod index_sink;
pub(super) mod lag_limit;
pub(super) mod options;
pub(super) mod resume_point;
mod skip_policy;
mod span_splitter;
pub(super) mod verify_sink;
mod zeros;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use tokio::runtime::Handle;

use self::decode_pipeline::{DecodePipeline, StreamItem};
use self::digest::Digester;
use self::disk_cache_policy::DecodingClock;
use self::resume_point::ResumePoint;
use self::skip_policy::SkipPolicy;
use self::span_splitter::{SpanSplitter, plain_seek_point};
use self::zeros::ZeroRun;
use super::error::{Error, TRUNCATED_NOTE};
use crate::base::buffer_pool::{BufferPool, SoftLimit};
use crate::base::extent::{Packed, Plain};
use crate::base::memory_budget::{Budget, DecoderMemory, DecoderUse};
use crate::base::memory_reclaim::{MemoryBroker, Reclaim};
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::codec::{Compression, Context, SeekPoint};
use crate::fetch;
use crate::index::block_len;
use crate::source::{Access, Source};
use crate::tar::{self, Event, Parser};

pub use self::options::{Digest, Options};
pub use super::sink::{PayloadEnd, Sink};
pub use crate::base::memory_budget::{MIN_MEMORY, MemoryShare};

/// Result of a scan.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// Packed format.
    pub compression: Compression,
    /// Length of the source.
    pub packed_len: u64,
    /// Length of the plain stream.
    pub plain_len: u64,
    /// Memory of the largest decoder state, in bytes.
    pub decoder_bytes: u64,
    /// BLAKE3 digest of the packed bytes, if requested.
    pub content_id: Option<[u8; 32]>,
    /// SHA-256 of the packed bytes, if requested.
    pub sha256: Option<Sha256>,
    /// SHA-256 of the plain stream, if requested.
    pub plain_sha256: Option<Sha256>,
    /// Whether the archive is truncated, which the options allowed.
    pub truncated: bool,
    /// Whether two zero records ended the archive.
    pub has_end_marker: bool,
    /// Number of places with unreadable headers, where members may be lost. Only 0 is a success.
    pub damages: u64,
}

/// Reason why a scan ended early.
#[derive(Debug, thiserror::Error)]
pub enum ScanError<E> {
    /// The rest of the archive cannot be read.
    #[error("cannot read the archive")]
    Archive {
        /// The error.
        #[source]
        error: Error,
        /// Name of the member at which it happened.
        member: Option<Vec<u8>>,
        /// SHA-256 of the packed bytes, if [`Digest::Compute`] asked for it and all of them arrived.
        sha256: Option<Box<Sha256>>,
    },
    /// The sink stopped the scan.
    #[error(transparent)]
    Sink(E),
}

/// Plain bytes at the start of a packed stream that are read in pieces of [`SPLIT_PIECE_BYTES`]. So a mount knows its first
/// members before the rest of a large block is hashed and copied.
const SPLIT_BYTES: u64 = 4 << 20;
/// Maximum bytes of such a piece.
const SPLIT_PIECE_BYTES: usize = 64 << 10;

/// Streams the whole source once into `sink`.
///
/// # Errors
/// [`ScanError::Archive`] if the source, the packed stream or the archive is at fault, after `sink` has
/// received everything before the fault. [`ScanError::Sink`] with the sink's own reason.
pub fn scan<S: Sink>(
    source: &Arc<dyn Source>,
    options: &Options,
    network: &Handle,
    stats: &Arc<Stats>,
    sink: &mut S,
) -> Result<Summary, ScanError<S::Error>> {
    stats.scans.increment();
    let options = &options.for_source(&**source);
    let mut scan = Scan::new(source, options, network, stats, sink)?;
    let resume = options.resume.as_ref();
    let start = resume.map(|point| (point.compression, point.seek_point.clone()));
    if let Some((_, seek_point)) = &start {
        stats.scanned_packed_bytes.add(seek_point.packed.0);
    }
    let mut plain = scan
        .open(start)
        .map_err(|error| scan.archive_error(error))?;
    let truncated = match scan.run(&mut plain) {
        Ok(()) => false,
        Err(ScanError::Archive { error, member, .. }) => {
            scan.end_truncated(&mut plain, error, member)?;
            true
        }
        Err(error) => return Err(error),
    };
    scan.summary(&plain, truncated)
}

fn check_digest(
    wanted: Digest,
    found: Option<Sha256>,
    mismatch: impl FnOnce(Sha256, Sha256) -> Error,
) -> Result<(), Error> {
    let Digest::Expect(expected) = wanted else {
        return Ok(());
    };
    // The digest is missing if the last byte was not read.
    let found = found.ok_or(Error::Interrupted)?;
    if found == expected {
        Ok(())
    } else {
        Err(mismatch(expected, found))
    }
}

/// Plain bytes for each decoding thread, and for the consumer, if buffers are short. A decoder that decodes
/// ahead (gzip) may hold as many.
const PLAIN_BYTES_PER_THREAD: u64 = 8 << 20;

/// Additional plain bytes, for data before everything that is decoded ahead.
const SERIAL_PLAIN_BYTES: u64 = 2 << 20;

/// Buffer limit that keeps `workers` threads decoding. Each thread, and the consumer, has one current buffer
/// and another one, which may be long.
fn plain_soft_limit(workers: usize) -> SoftLimit {
    let holders = workers.saturating_add(1);
    let bytes = PLAIN_BYTES_PER_THREAD.saturating_mul(holders as u64);
    SoftLimit {
        bytes: bytes.saturating_add(SERIAL_PLAIN_BYTES),
        buffers: holders.saturating_mul(2),
    }
}

/// Statistics of streaming since the last start.
#[derive(Clone, Copy)]
struct StreamRun {
    since: Instant,
    /// Time until the first bytes arrived.
    first: Option<Duration>,
    bytes: u64,
}

impl StreamRun {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            first: None,
            bytes: 0,
        }
    }
}

struct Scan<'a, S> {
    parser: Parser,
    span_splitter: Option<SpanSplitter>,
    compression: Compression,
    /// The last two seek points, for resume points. At most headers are between them and the next member.
    seek_points: VecDeque<SeekPoint>,
    plain_len: u64,
    /// The rest of a decoded piece. Only pieces at the start of a packed stream are split.
    unread: Bytes,
    /// Plain bytes before this offset are decoded but not parsed.
    skipped_to: Plain,
    damages: u64,
    member: Option<Vec<u8>>,
    source: &'a Arc<dyn Source>,
    options: &'a Options,
    network: &'a Handle,
    is_plain: bool,
    block_len: u64,
    /// Length of the source, if payloads may be skipped.
    end: Option<u64>,
    skip_policy: SkipPolicy,
    stream_run: StreamRun,
    has_skipped: bool,
    plain_digester: Option<Digester>,
    /// Run of zero bytes in the plain stream, if the stream may be endless.
    zeros: Option<ZeroRun>,
    stats: &'a Arc<Stats>,
    sink: &'a mut S,
}

impl<'a, S: Sink> Scan<'a, S> {
    fn new(
        source: &'a Arc<dyn Source>,
        options: &'a Options,
        network: &'a Handle,
        stats: &'a Arc<Stats>,
        sink: &'a mut S,
    ) -> Result<Self, ScanError<S::Error>> {
        let archive_error = |error| ScanError::Archive {
            error,
            member: None,
            sha256: None,
        };
        let fingerprint = source.fingerprint();
        let needs_all = [options.sha256, options.plain_sha256] != [Digest::Ignore; 2];
        let may_skip = options.allow_skipping
            && !sink.needs_payloads()
            && !needs_all
            && source.access() == Access::Ranges
            && fingerprint.is_strong();
        let resume = options.resume.as_ref();
        let tar = options.tar.clone();
        let parser = match resume {
            None => Ok(Parser::new(tar)),
            Some(point) => Parser::resume(tar, point.member, point.sums, &point.globals),
        };
        let parser = parser.map_err(|error| archive_error(error.into()))?;
        let plain_digester = (options.plain_sha256 != Digest::Ignore)
            .then(Digester::start)
            .transpose()
            .map_err(|_| archive_error(Error::Interrupted))?;
        let block_len = block_len(fingerprint.len);
        Ok(Self {
            parser,
            span_splitter: options.spans.then(|| SpanSplitter::new(block_len)),
            compression: resume.map_or(Compression::None, |point| point.compression),
            seek_points: resume
                .map(|point| point.seek_point.clone())
                .into_iter()
                .collect(),
            plain_len: resume.map_or(0, |point| point.seek_point.plain.0),
            unread: Bytes::new(),
            skipped_to: resume.map_or(Plain(0), |point| point.member),
            damages: 0,
            member: None,
            source,
            options,
            network,
            is_plain: false,
            block_len,
            end: fingerprint.len.filter(|_| may_skip),
            skip_policy: SkipPolicy::default(),
            stream_run: StreamRun::new(),
            has_skipped: false,
            plain_digester,
            zeros: fingerprint.len.is_none().then(ZeroRun::default),
            stats,
            sink,
        })
    }

    fn run(&mut self, plain: &mut DecodePipeline) -> Result<(), ScanError<S::Error>> {
        loop {
            match self
                .parser
                .pull()
                .map_err(|error| self.archive_error(error.into()))?
            {
                Event::NeedInput if self.should_skip_payload(plain) => {
                    // The stream keeps requesting until it is stopped.
                    let requested_end = plain.stop_requesting();
                    *plain = self.skip_payload(requested_end)?;
                }
                Event::NeedInput => match self.next_bytes(plain)? {
                    Some(bytes) => self.parser.push(bytes),
                    None => self.parser.finish(),
                },
                Event::End => break,
                event => self.handle_event(event).map_err(ScanError::Sink)?,
            }
        }
        // After the end of the archive, the stream still has checksums to verify and bytes to count.
        while self.next_bytes(plain)?.is_some() {}
        Ok(())
    }

    fn open(&self, resume: Option<(Compression, SeekPoint)>) -> Result<DecodePipeline, Error> {
        let options = self.options;
        // Each gets half, so that neither fetched nor decoded data can starve the other.
        let half = Budget::new(options.memory).scan_pool_bytes();
        let packed = BufferPool::new(half);
        let plain = BufferPool::with_soft_limit(half, plain_soft_limit(options.workers));
        let mut reclaimers = options.reclaimers.clone();
        reclaimers.push(Arc::new(plain.clone()));
        // Packed buffers are last, because fetched data is here and takes time to be released.
        reclaimers.push(Arc::new(packed.clone()));
        let fetch = fetch::Config {
            // Several chunks must fit. Otherwise fetching and decoding take turns, and deadlock if a unit of
            // decoding spans several chunks.
            chunk_len: options.chunk_len.min(half / 8),
            connections: options.connections,
            min_speed: options.min_speed,
            retry_forever: options.retry_forever.clone(),
            cancel_token: options.cancel_token.clone(),
            pool: packed,
            stats: Arc::clone(self.stats),
        };
        let start = resume
            .as_ref()
            .map_or(Packed(0), |(_, seek_point)| seek_point.packed);
        let source_len = self.source.fingerprint().len;
        let chunks = fetch::Stream::start(self.network, Arc::clone(self.source), start, fetch);
        let is_empty = options.tar.accepts_empty && source_len == Some(0);
        let requested = options
            .compression
            .or(is_empty.then_some(Compression::None));
        let decode = decode_pipeline::Options {
            compression: resume
                .as_ref()
                .map_or(requested, |(compression, _)| Some(*compression)),
            ignores_zeros: options.tar.ignore_zeros,
            resume: resume.map(|(_, seek_point)| seek_point),
            context: Context {
                pool: plain,
                wants_seek_points: options.spans || options.resume_points,
                broker: self.broker(reclaimers),
                workers: options.workers,
            },
            block_len: options.spans.then_some(self.block_len),
            sha256: options.sha256,
            saved_index: options
                .saved_index
                .clone()
                .filter(|_| !options.spans && !options.resume_points),
            has_len: self.source.fingerprint().len.is_some(),
            clock: if options.spans {
                DecodingClock::new(&**self.source, self.stats)
            } else {
                DecodingClock::stopped()
            },
        };
        DecodePipeline::start(chunks, decode, self.stats).map_err(|_| Error::Interrupted)
    }

    fn broker(&self, reclaimers: Vec<Arc<dyn Reclaim>>) -> MemoryBroker {
        let (share, readers) = (self.options.memory_share, self.options.readers.as_ref());
        let used_by = match readers {
            Some(_) => DecoderUse::Scan,
            None => DecoderUse::Stream,
        };
        let max_bytes = readers.map_or(u64::MAX, MemoryBroker::limit_bytes);
        MemoryBroker::for_archive(DecoderMemory { share, used_by }, max_bytes, reclaimers)
    }

    /// Whether to skip the rest of a payload. Requested bytes are never skipped, so none is requested twice.
    fn should_skip_payload(&mut self, plain: &DecodePipeline) -> bool {
        let Some(source_end) = self.end.filter(|_| self.is_plain) else {
            return false;
        };
        let block_len = self.block_len;
        let Some(end) = self.payload_end().filter(|&end| end <= source_end) else {
            return false;
        };
        let requested_end = plain.requested_end().0.max(self.plain_len);
        let last_block = end / block_len * block_len;
        // A block that is partly skipped has no digest.
        if !self.plain_len.is_multiple_of(block_len) || last_block <= requested_end {
            return false;
        }
        if let Some(first) = self.stream_run.first {
            self.skip_policy.record_run(
                self.stream_run.bytes,
                self.stream_run.since.elapsed(),
                first,
            );
        }
        self.skip_policy.should_skip(last_block - requested_end)
    }

    /// End of the current payload, if some of it is missing.
    fn payload_end(&self) -> Option<u64> {
        let lacking = self.parser.missing_payload();
        let end = self.plain_len.checked_add(lacking)?;
        (lacking > 0).then_some(end)
    }

    /// Skips to the block in which the payload ends. Nothing from `requested_end` on has been requested.
    fn skip_payload(
        &mut self,
        requested_end: Packed,
    ) -> Result<DecodePipeline, ScanError<S::Error>> {
        let end = self.payload_end().unwrap_or(self.plain_len);
        let block_len = self.block_len;
        let skipped = (end / block_len * block_len).saturating_sub(self.plain_len);
        self.parser.skip_payload(skipped);
        if let Some(splitter) = &mut self.span_splitter {
            let skipped = splitter.skip(skipped, self.sink);
            skipped.map_err(ScanError::Sink)?;
        }
        self.plain_len += skipped;
        self.stats
            .skipped_bytes
            .add(self.plain_len.saturating_sub(requested_end.0));
        self.stats.scanned_packed_bytes.add(skipped);
        self.stream_run = StreamRun::new();
        self.has_skipped = true;
        let here = plain_seek_point(Plain(self.plain_len));
        self.open(Some((Compression::None, here)))
            .map_err(|error| self.archive_error(error))
    }

    fn next_bytes(
        &mut self,
        plain: &mut DecodePipeline,
    ) -> Result<Option<Bytes>, ScanError<S::Error>> {
        while plain.finished.is_none() {
            let piece = self.next_piece();
            if !piece.is_empty() {
                let bytes = self.receive(piece)?;
                if bytes.is_empty() {
                    continue;
                }
                return Ok(Some(bytes));
            }
            match plain.next().map_err(|error| self.archive_error(error))? {
                StreamItem::Begin(compression) => {
                    self.is_plain = compression == Compression::None;
                    self.compression = compression;
                    self.sink.begin(compression);
                }
                StreamItem::Plain(bytes) => self.unread = bytes,
                StreamItem::SeekPoint(seek_point) => {
                    if self.options.resume_points {
                        self.keep_seek_point(&seek_point);
                    }
                    if let Some(splitter) = &mut self.span_splitter {
                        splitter.add_seek_point(seek_point, self.sink);
                    }
                }
                StreamItem::Digests(digests) => self.sink.digests(&digests),
                StreamItem::Warning(text) => self.sink.warning(&text),
                StreamItem::End => {
                    self.check_len()?;
                    self.end_span();
                }
            }
        }
        Ok(None)
    }

    /// Takes the next bytes of the piece being read.
    fn next_piece(&mut self) -> Bytes {
        let is_at_start = !self.is_plain && self.plain_len < SPLIT_BYTES;
        let most = if is_at_start {
            SPLIT_PIECE_BYTES
        } else {
            usize::MAX
        };
        self.unread.split_to(most.min(self.unread.len()))
    }

    /// Counts `bytes` and adds them to their span. Returns those to parse.
    fn receive(&mut self, mut bytes: Bytes) -> Result<Bytes, ScanError<S::Error>> {
        let before = self.skipped_to.0.saturating_sub(self.plain_len);
        let before = usize::try_from(before).unwrap_or(usize::MAX);
        // Checked before these bytes count, because their members are not parsed yet.
        self.check_len()?;
        self.check_zeros(&bytes)?;
        self.plain_len += bytes.len() as u64;
        self.stream_run.bytes += bytes.len() as u64;
        self.stream_run
            .first
            .get_or_insert_with(|| self.stream_run.since.elapsed());
        if let Some(digester) = &self.plain_digester {
            digester.update(&bytes);
        }
        if let Some(splitter) = &mut self.span_splitter {
            splitter.push(&bytes, self.sink);
            // Spans after the last member need memory, too.
            self.sink.check_memory().map_err(ScanError::Sink)?;
        }
        bytes.advance(before.min(bytes.len()));
        Ok(bytes)
    }

    /// Checks the limit on the plain length, which payloads alone cannot exceed.
    fn check_len(&self) -> Result<(), ScanError<S::Error>> {
        let members = self.parser.members();
        let limit = self.options.tar.limits.stream_bytes(members);
        if self.plain_len <= limit {
            return Ok(());
        }
        Err(self.archive_error(Error::Tar(tar::Error {
            offset: Plain(self.plain_len),
            cause: tar::Cause::TooLong { members, limit },
        })))
    }

    fn check_zeros(&mut self, bytes: &[u8]) -> Result<(), ScanError<S::Error>> {
        let Some(zeros) = &mut self.zeros else {
            return Ok(());
        };
        let content = usize::try_from(self.parser.missing_payload()).unwrap_or(usize::MAX);
        if content > 0 {
            zeros.reset();
        }
        let added = zeros.add(bytes.get(content..).unwrap_or_default());
        added.map_err(|error| self.archive_error(error))
    }

    fn handle_event(&mut self, event: Event) -> Result<(), S::Error> {
        match event {
            Event::Member(member) => {
                self.stats.scanned_members.increment();
                self.member = Some(member.name.clone());
                if self.options.resume_points {
                    self.report_resume_point(member.header);
                }
                self.sink.member(*member)
            }
            Event::Payload(bytes) => self.sink.payload(bytes),
            Event::MemberEnd => {
                self.member = None;
                self.sink.member_end(PayloadEnd::Complete)
            }
            Event::Warning(warning) => {
                self.sink.warning(&warning.text);
                Ok(())
            }
            Event::Damaged(warning) => {
                self.damages += 1;
                self.sink.damage(warning.offset, &warning.text);
                Ok(())
            }
            Event::NeedInput | Event::End => Ok(()),
        }
    }

    fn keep_seek_point(&mut self, seek_point: &SeekPoint) {
        if self.seek_points.len() > 1 {
            self.seek_points.pop_front();
        }
        self.seek_points.push_back(SeekPoint {
            plain: Plain(self.plain_len),
            ..seek_point.clone()
        });
    }

    fn report_resume_point(&mut self, member: Plain) {
        let mut latest = self.seek_points.iter().rev();
        let seek_point = latest.find(|seek_point| seek_point.plain <= member);
        if let Some(seek_point) = seek_point
            && let Some(globals) = self.parser.globals()
        {
            self.sink.resume_point(ResumePoint {
                compression: self.compression,
                seek_point: seek_point.clone(),
                member,
                sums: self.parser.totals_before_last(),
                globals: Arc::clone(globals),
            });
        }
    }

    fn archive_error(&self, error: Error) -> ScanError<S::Error> {
        ScanError::Archive {
            error,
            member: self.member.clone(),
            sha256: None,
        }
    }

    /// Digest of a source whose archive is unreadable, if [`Digest::Compute`] wants it.
    fn digest_despite_error(&self, plain: &mut DecodePipeline) -> Option<Sha256> {
        if self.options.sha256 != Digest::Compute {
            return None;
        }
        // The decoded data is useless, and further errors add nothing.
        while plain.finished.is_none() {
            if let Err(Error::Interrupted) = plain.next() {
                break;
            }
        }
        plain.finished?.sha256
    }

    /// Ends the span and member after `error`. Returns it, unless the options allow this truncation.
    fn end_truncated(
        &mut self,
        plain: &mut DecodePipeline,
        error: Error,
        member: Option<Vec<u8>>,
    ) -> Result<(), ScanError<S::Error>> {
        self.end_span();
        if self.member.take().is_some() {
            let end = if error.is_truncation() {
                PayloadEnd::Cut
            } else {
                PayloadEnd::Damaged
            };
            self.sink.member_end(end).map_err(ScanError::Sink)?;
        }
        if self.options.allow_truncated && error.is_truncation() {
            self.sink.warning(TRUNCATED_NOTE);
            return Ok(());
        }
        let sha256 = match error {
            // Such a stream may be endless, so it has no digest.
            Error::EndlessZeros => None,
            _ => self.digest_despite_error(plain),
        };
        Err(ScanError::Archive {
            error,
            member,
            sha256: sha256.map(Box::new),
        })
    }

    fn summary(
        mut self,
        plain: &DecodePipeline,
        truncated: bool,
    ) -> Result<Summary, ScanError<S::Error>> {
        let finished = plain
            .finished
            .ok_or_else(|| self.archive_error(Error::Interrupted))?;
        check_digest(self.options.sha256, finished.sha256, |expected, found| {
            Error::DigestMismatch { expected, found }
        })
        .map_err(|error| self.archive_error(error))?;
        let plain_sha256 = self.plain_digester.take().and_then(Digester::finish);
        check_digest(
            self.options.plain_sha256,
            plain_sha256,
            |expected, found| Error::PlainDigestMismatch { expected, found },
        )
        .map_err(|error| self.archive_error(error))?;
        Ok(Summary {
            compression: finished.compression,
            packed_len: finished.packed_len,
            plain_len: self.plain_len,
            decoder_bytes: plain.decoder_bytes(),
            content_id: finished.content_id.filter(|_| !self.has_skipped),
            sha256: finished.sha256,
            plain_sha256,
            truncated,
            has_end_marker: self.parser.has_end_marker(),
            damages: self.damages,
        })
    }

    fn end_span(&mut self) {
        if let Some(splitter) = &mut self.span_splitter {
            splitter.end_span(self.sink);
        }
    }
}
