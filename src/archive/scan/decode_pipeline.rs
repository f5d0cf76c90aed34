//! Decoding stage: turns packed chunks into plain bytes, both in order, on its own threads.
//! The walker thread pushes chunks into the decoder, and decodes what needs the bytes before it, such as an
//! ordinary gzip member. Other parts become tickets in the queue. Any job thread runs a ticket, or the
//! consumer if it arrives first, so that a waiting stage works instead. Only job threads run speculative
//! decodes.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::Bytes;

use super::digest::Digester;
use super::disk_cache_policy::DecodingClock;
use super::options::Digest;
use super::zeros::ZeroRun;
use crate::archive::error::Error;
use crate::archive::index_source::saved_index::{SavedIndex, may_have_windows};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::base::memory_reclaim::MemoryBroker;
use crate::base::once_job;
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use crate::base::thread_pool::ThreadPool;
use crate::codec::{
    self, Cause, Compression, ContentChecksum, Context, Detected, Job, Output, Pull, SeekPoint,
};
use crate::fetch;
use crate::index::{BlockHasher, NewDigests};

/// Queue length between walker and consumer, plus two for each job thread. More pieces would only leave the
/// processor's caches before they are written. The buffer pool limits their bytes.
const MAX_QUEUED_PIECES: usize = 4;

#[derive(Debug)]
pub(super) struct Options {
    pub(super) compression: Option<Compression>,
    /// Whether leading zeros are no end of a plain archive.
    pub(super) ignores_zeros: bool,
    /// Resources of decoders, and the number of threads that run jobs.
    pub(super) context: Context,
    pub(super) block_len: Option<u64>,
    pub(super) sha256: Digest,
    /// Point at which to resume; `None` starts at the front. With it, the format is known.
    pub(super) resume: Option<SeekPoint>,
    pub(super) saved_index: Option<SavedIndex>,
    pub(super) has_len: bool,
    pub(super) clock: DecodingClock,
}

#[derive(Debug)]
pub(super) enum StreamItem {
    /// Format of the stream, before all other items but digests.
    Begin(Compression),
    SeekPoint(SeekPoint),
    /// Digests of packed bytes, before any bytes decoded from them.
    Digests(NewDigests),
    Plain(Bytes),
    Warning(String),
    /// End of the stream. [`DecodePipeline::finished`] has the summary.
    End,
}

/// Summary of a packed stream that was read to its end, or to its failure.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamSummary {
    pub(super) compression: Compression,
    pub(super) packed_len: u64,
    pub(super) content_id: Option<[u8; 32]>,
    /// SHA-256 of all packed bytes, if requested and if they were read to their end.
    pub(super) sha256: Option<Sha256>,
}

/// A job in flight, which its first taker runs.
type Ticket = once_job::OnceJob<Result<Output, codec::Error>>;

/// The plain stream, which the consumer's thread pulls.
pub(super) struct DecodePipeline {
    // Dropped before the threads, which end when the receiver is gone.
    slots: Receiver<Slot>,
    output: Option<Output>,
    hash: Option<ContentChecksum>,
    pub(super) finished: Option<StreamSummary>,
    stats: Arc<Stats>,
    clock: DecodingClock,
    /// Control of the packed stream; `None` in tests without one.
    control: Option<fetch::StreamControl>,
    memory: Option<(BufferPool, MemoryBroker)>,
    _walker: Thread<()>,
}

enum Slot {
    Item(StreamItem),
    Ticket(Arc<Ticket>),
    /// A job for the consumer alone, after all earlier items.
    Check(Job),
    ChecksumStart(ContentChecksum),
    ChecksumEnd {
        expected: u32,
        packed: Packed,
    },
    Failed(Error, StreamSummary),
    End(StreamSummary),
}

impl Drop for DecodePipeline {
    /// Cancels waits of the walker thread before its join, because the caller may hold the memory it needs.
    fn drop(&mut self) {
        if let Some(control) = &self.control {
            control.cancel();
        }
        if let Some((pool, broker)) = &self.memory {
            pool.close();
            broker.close();
        }
    }
}

impl DecodePipeline {
    /// Memory of the largest decoder state so far, in bytes.
    pub(super) fn decoder_bytes(&self) -> u64 {
        let broker = self.memory.as_ref().map(|(_, broker)| broker);
        broker.map_or(0, MemoryBroker::largest_need)
    }

    pub(super) fn start(
        chunks: fetch::Stream,
        options: Options,
        stats: &Arc<Stats>,
    ) -> io::Result<Self> {
        let (sender, slots) = sync_channel(MAX_QUEUED_PIECES + 2 * options.context.workers);
        let job_threads = ThreadPool::start("tarfs-job", options.context.workers)?;
        let digester = (options.sha256 != Digest::Ignore)
            .then(Digester::start)
            .transpose()?;
        let progress = Arc::clone(stats);
        let clock = options.clock.clone();
        let control = chunks.control();
        let memory = (options.context.pool.clone(), options.context.broker.clone());
        let resume = options.resume;
        let start = resume
            .as_ref()
            .map_or(Packed(0), |seek_point| seek_point.packed);
        let thread = Thread::spawn("tarfs-decode", move || {
            let mut walker = Walker {
                chunks,
                sender,
                job_threads,
                compression: options.compression,
                ignores_zeros: options.ignores_zeros,
                hasher: options.block_len.map(|len| BlockHasher::new(len, start)),
                digester,
                is_at_end: false,
                packed_len: start.0,
                zeros: (!options.has_len).then(ZeroRun::default),
                stats: progress,
                clock: options.clock,
            };
            let last = match walker.walk(options.context, options.saved_index, resume) {
                Ok(()) => Slot::End(walker.finished()),
                Err(WalkError::Failed(error)) => {
                    if options.sha256 == Digest::Compute {
                        while walker.next_chunk().is_ok_and(|chunk| chunk.is_some()) {}
                    }
                    Slot::Failed(error, walker.finished())
                }
                Err(WalkError::ReceiverClosed) => return,
            };
            // Sending fails only if the consumer is gone, and then the summary is useless.
            drop(walker.sender.send(last));
        })?;
        Ok(Self {
            slots,
            output: None,
            hash: None,
            finished: None,
            stats: Arc::clone(stats),
            clock,
            control: Some(control),
            memory: Some(memory),
            _walker: thread,
        })
    }

    /// Returns the next item, in stream order, up to [`StreamItem::End`] or an error.
    pub(super) fn next(&mut self) -> Result<StreamItem, Error> {
        loop {
            if let Some(output) = &mut self.output {
                if let Some(bytes) = self.clock.measure(|| output.next_piece())? {
                    return Ok(self.deliver(bytes));
                }
                self.output = None;
            }
            // The sender ends without a last slot only if its thread panicked.
            let slot = self.slots.recv().map_err(|_| Error::Interrupted)?;
            match slot {
                Slot::Item(StreamItem::Plain(bytes)) => return Ok(self.deliver(bytes)),
                Slot::Item(item) => return Ok(item),
                // The result is missing only if the job panicked.
                Slot::Ticket(ticket) => {
                    self.output = Some(ticket.run_or_take().ok_or(Error::Interrupted)??);
                }
                Slot::Check(job) => {
                    self.output = Some(self.clock.measure(|| job.run())?);
                }
                Slot::ChecksumStart(hash) => self.hash = Some(hash),
                Slot::ChecksumEnd { expected, packed } => self.verify_checksum(expected, packed)?,
                Slot::Failed(error, finished) => {
                    self.finished = Some(finished);
                    return Err(error);
                }
                Slot::End(finished) => {
                    self.finished = Some(finished);
                    return Ok(StreamItem::End);
                }
            }
        }
    }

    pub(super) fn requested_end(&self) -> Packed {
        self.control
            .as_ref()
            .map_or(Packed(0), fetch::StreamControl::requested_end)
    }

    pub(super) fn stop_requesting(&self) -> Packed {
        self.control
            .as_ref()
            .map_or(Packed(0), fetch::StreamControl::stop_requesting)
    }

    fn deliver(&mut self, bytes: Bytes) -> StreamItem {
        if let Some(hash) = &mut self.hash {
            hash.update(&bytes);
        }
        self.stats.decoded_bytes.add(bytes.len() as u64);
        self.clock.count(bytes.len());
        StreamItem::Plain(bytes)
    }

    fn verify_checksum(&mut self, expected: u32, packed: Packed) -> Result<(), Error> {
        // A checksum that ends without a start is a decoder's bug, and nothing must pass as verified.
        let hash = self.hash.take().ok_or(Error::Interrupted)?;
        let computed = hash.digest();
        if computed == expected {
            return Ok(());
        }
        Err(Error::Codec(codec::Error {
            compression: hash.compression(),
            packed,
            cause: Cause::Checksum {
                what: "content checksum",
                expected: expected.into(),
                computed: computed.into(),
            },
        }))
    }
}

enum WalkError {
    ReceiverClosed,
    Failed(Error),
}

impl<E: Into<Error>> From<E> for WalkError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

struct Walker {
    chunks: fetch::Stream,
    sender: SyncSender<Slot>,
    job_threads: ThreadPool,
    compression: Option<Compression>,
    ignores_zeros: bool,
    hasher: Option<BlockHasher>,
    digester: Option<Digester>,
    is_at_end: bool,
    packed_len: u64,
    /// Zero run of packed bytes, if the stream may be endless. Zeros after a packed stream are padding.
    zeros: Option<ZeroRun>,
    stats: Arc<Stats>,
    clock: DecodingClock,
}

impl Walker {
    fn walk(
        &mut self,
        context: Context,
        saved_index: Option<SavedIndex>,
        resume: Option<SeekPoint>,
    ) -> Result<(), WalkError> {
        let (first, skipped) = self.first_bytes()?;
        let compression = match self.compression {
            Some(compression) => compression,
            None => detect_format(&first, skipped, self.ignores_zeros)?,
        };
        self.compression = Some(compression);
        self.send(Slot::Item(StreamItem::Begin(compression)))?;
        let mut decoder = self.start_decoder(context, saved_index, resume, skipped)?;
        let mut first = Some(first).filter(|first| !first.is_empty());
        loop {
            match self.clock.measure(|| decoder.pull())? {
                Pull::NeedInput => match first.take() {
                    Some(first) => decoder.push(first),
                    None => match self.next_chunk()? {
                        Some(chunk) => decoder.push(chunk),
                        None => decoder.finish(),
                    },
                },
                Pull::SeekPoint(seek_point) => {
                    self.send(Slot::Item(StreamItem::SeekPoint(seek_point)))?;
                }
                Pull::Plain(bytes) => self.send(Slot::Item(StreamItem::Plain(bytes)))?,
                Pull::Job(job) => self.submit_job(job)?,
                Pull::OrderedJob(job) => self.send(Slot::Check(job))?,
                Pull::Speculative(ahead) => {
                    self.stats.speculative_decodes.increment();
                    let clock = self.clock.clone();
                    self.job_threads
                        .submit(move || clock.measure(|| ahead.run()));
                }
                Pull::WaitFor(ahead) => ahead.wait(),
                Pull::ChecksumStart(hash) => self.send(Slot::ChecksumStart(hash))?,
                Pull::ChecksumEnd { expected, packed } => {
                    self.send(Slot::ChecksumEnd { expected, packed })?;
                }
                Pull::Warning(text) => self.send(Slot::Item(StreamItem::Warning(text)))?,
                Pull::End => break,
            }
        }
        // Bytes after the end of the stream still count in the content ID.
        while self.next_chunk()?.is_some() {}
        Ok(())
    }

    fn finished(&mut self) -> StreamSummary {
        let digester = self.digester.take().filter(|_| self.is_at_end);
        StreamSummary {
            sha256: digester.and_then(Digester::finish),
            compression: self.compression.unwrap_or(Compression::None),
            packed_len: self.packed_len,
            content_id: self.hasher.take().map(BlockHasher::content_id),
        }
    }

    fn start_decoder(
        &self,
        context: Context,
        saved_index: Option<SavedIndex>,
        resume: Option<SeekPoint>,
        skipped: Packed,
    ) -> Result<Box<dyn codec::Decoder>, WalkError> {
        let compression = self.compression.unwrap_or_default();
        let wants_seek_points = context.wants_seek_points;
        let pool_bytes = context.pool.budget();
        let indexed =
            saved_index.and_then(|saved| saved.seek_ranges(compression, pool_bytes, &self.stats));
        Ok(match (indexed, resume) {
            (_, Some(seek_point)) => codec::resume(compression, context, &seek_point)?,
            _ if skipped > Packed(0) => {
                let (decoder, seek_point) =
                    codec::start_after_skippable(compression, context, skipped)?;
                if wants_seek_points {
                    self.send(Slot::Item(StreamItem::SeekPoint(seek_point)))?;
                }
                decoder
            }
            (Some((seek_ranges, decoded)), None) => {
                self.stats.indexed_scans.increment();
                match decoded {
                    Some(decoded) if !may_have_windows(compression) => {
                        codec::start_around(compression, context, seek_ranges, decoded)
                    }
                    decoded => codec::start_indexed(compression, context, seek_ranges, decoded),
                }
            }
            (None, None) => codec::start(compression, context),
        })
    }

    /// The first bytes. If the format has to be detected, leaves out skippable frames that hide it, and says
    /// how many bytes these have.
    fn first_bytes(&mut self) -> Result<(Bytes, Packed), WalkError> {
        let mut first = self.fill(Bytes::new())?;
        let mut skipped = Packed(0);
        while self.compression.is_none()
            && let Detected::Skippable(len) = codec::detect(&first)
        {
            skipped = Packed(skipped.0 + len);
            let mut left = len;
            while left > first.len() as u64 {
                left -= first.len() as u64;
                let Some(chunk) = self.next_chunk()? else {
                    return Ok((Bytes::new(), skipped));
                };
                first = chunk;
            }
            first = self.fill(first.split_off(usize::try_from(left).unwrap_or(usize::MAX)))?;
        }
        Ok((first, skipped))
    }

    /// `first` and so many chunks after it that the format can be detected.
    fn fill(&mut self, mut first: Bytes) -> Result<Bytes, WalkError> {
        while first.len() < codec::detect::DETECT_LEN {
            match self.next_chunk()? {
                Some(more) if first.is_empty() => first = more,
                Some(more) => first = [first, more].concat().into(),
                None => break,
            }
        }
        Ok(first)
    }

    fn next_chunk(&mut self) -> Result<Option<Bytes>, WalkError> {
        let chunk = self.chunks.next()?;
        if let Some(chunk) = &chunk {
            self.packed_len += chunk.len() as u64;
            self.stats.scanned_packed_bytes.add(chunk.len() as u64);
            if let Some(digester) = &self.digester {
                digester.update(chunk);
            }
            // In a plain archive, zeros may be a file's content.
            if let Some(zeros) = &mut self.zeros
                && self.compression != Some(Compression::None)
            {
                zeros.add(chunk)?;
            }
        }
        self.is_at_end = chunk.is_none();
        if let (Some(hasher), Some(chunk)) = (&mut self.hasher, &chunk) {
            let digests = hasher.update(chunk);
            self.send(Slot::Item(StreamItem::Digests(digests)))?;
        }
        Ok(chunk)
    }

    fn submit_job(&self, job: Job) -> Result<(), WalkError> {
        self.stats.decoder_jobs.increment();
        let clock = self.clock.clone();
        let ticket = Arc::new(Ticket::new(move || clock.measure(|| job.run())));
        self.send(Slot::Ticket(Arc::clone(&ticket)))?;
        self.job_threads.submit(move || ticket.run());
        Ok(())
    }

    fn send(&self, slot: Slot) -> Result<(), WalkError> {
        self.sender
            .send(slot)
            .map_err(|_| WalkError::ReceiverClosed)
    }
}

/// The format by the `first` bytes after `skipped` ones of skippable frames.
fn detect_format(first: &[u8], skipped: Packed, ignores_zeros: bool) -> Result<Compression, Error> {
    let record = first.get(..codec::detect::DETECT_LEN);
    match codec::detect(first) {
        Detected::Supported(Compression::Lz4) => Ok(Compression::Lz4),
        // Its decoder says what is wrong after the frames.
        _ if skipped > Packed(0) => Ok(Compression::Zstd),
        Detected::Supported(compression) => Ok(compression),
        Detected::Unsupported(format) => Err(Error::UnsupportedFormat(format)),
        Detected::Encrypted(encryption) => Err(Error::Encrypted(encryption)),
        Detected::WebPage => Err(Error::WebPage),
        Detected::GitLfsPointer => Err(Error::GitLfsPointer),
        Detected::Unknown if first.is_empty() => Err(Error::Empty),
        Detected::Unknown if ignores_zeros && record.is_some_and(is_zero) => Ok(Compression::None),
        Detected::Skippable(_) | Detected::Unknown => Err(Error::NotAnArchive),
    }
}

fn is_zero(record: &[u8]) -> bool {
    record.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use xxhash_rust::xxh32::xxh32;

    /// A stream of these slots, whose sender then ends.
    fn stream(slots: Vec<Slot>) -> DecodePipeline {
        let (sender, receiver) = sync_channel(MAX_QUEUED_PIECES);
        let thread = Thread::spawn("test", move || {
            for slot in slots {
                sender.send(slot).expect("a receiver with room");
            }
        });
        DecodePipeline {
            slots: receiver,
            output: None,
            hash: None,
            finished: None,
            stats: Arc::default(),
            clock: DecodingClock::stopped(),
            control: None,
            memory: None,
            _walker: thread.expect("a thread"),
        }
    }

    fn plain(bytes: &'static [u8]) -> Slot {
        Slot::Item(StreamItem::Plain(Bytes::from_static(bytes)))
    }

    fn ticket(bytes: &'static [u8]) -> Slot {
        let job = Job::new(move || Ok(Bytes::from_static(bytes)));
        Slot::Ticket(Arc::new(Ticket::new(|| job.run())))
    }

    fn hash_end(bytes: &[u8]) -> Slot {
        Slot::ChecksumEnd {
            expected: xxh32(bytes, 0),
            packed: Packed(77),
        }
    }

    fn end() -> Slot {
        Slot::End(StreamSummary {
            compression: Compression::Lz4,
            packed_len: 0,
            content_id: None,
            sha256: None,
        })
    }

    /// Reads the bytes up to the end or an error, and returns both.
    fn drain(mut stream: DecodePipeline) -> (Vec<u8>, Option<Error>) {
        let mut bytes = Vec::new();
        loop {
            match stream.next() {
                Ok(StreamItem::Plain(piece)) => bytes.extend_from_slice(&piece),
                Ok(StreamItem::End) => return (bytes, None),
                Ok(
                    StreamItem::Begin(_)
                    | StreamItem::SeekPoint(_)
                    | StreamItem::Digests(_)
                    | StreamItem::Warning(_),
                ) => {}
                Err(error) => return (bytes, Some(error)),
            }
        }
    }

    #[test]
    fn hash_covers_plain_bytes_and_jobs_since_its_start() {
        let slots = vec![
            plain(b"before"),
            Slot::ChecksumStart(ContentChecksum::lz4()),
            ticket(b"ab"),
            ticket(b""),
            plain(b"c"),
            hash_end(b"abc"),
            plain(b"after"),
            Slot::ChecksumStart(ContentChecksum::lz4()),
            hash_end(b""),
            end(),
        ];
        let (bytes, error) = drain(stream(slots));
        assert_eq!(bytes, b"beforeabcafter");
        assert!(error.is_none(), "{error:?}");
    }

    #[test]
    fn wrong_hash_fails_after_the_bytes_it_covers() {
        let slots = vec![
            Slot::ChecksumStart(ContentChecksum::lz4()),
            ticket(b"ab"),
            hash_end(b"other"),
            plain(b"after"),
            end(),
        ];
        let (bytes, error) = drain(stream(slots));
        assert_eq!(bytes, b"ab");
        let Some(Error::Codec(error)) = error else {
            panic!("{error:?}");
        };
        assert_eq!(error.packed, Packed(77));
        assert!(matches!(error.cause, Cause::Checksum { .. }));
    }

    #[test]
    fn hash_end_without_hash_start_is_interrupted() {
        let (bytes, error) = drain(stream(vec![plain(b""), hash_end(b""), end()]));
        assert_eq!(bytes, b"");
        assert!(matches!(error, Some(Error::Interrupted)), "{error:?}");
    }

    #[test]
    fn lost_walker_thread_interrupts_the_stream() {
        let (bytes, error) = drain(stream(vec![plain(b"some")]));
        assert_eq!(bytes, b"some");
        assert!(matches!(error, Some(Error::Interrupted)));
    }

    #[test]
    fn failed_job_fails_the_stream_at_its_position() {
        let broken = Ticket::new(|| {
            Err(codec::Error {
                compression: Compression::Lz4,
                packed: Packed(5),
                cause: Cause::Truncated,
            })
        });
        let broken = Slot::Ticket(Arc::new(broken));
        let (bytes, error) = drain(stream(vec![ticket(b"a"), broken, end()]));
        assert_eq!(bytes, b"a");
        assert!(error.is_some_and(|error| error.is_truncation()));
    }

    #[test]
    fn panicking_job_interrupts_the_stream() {
        let broken = Slot::Ticket(Arc::new(Ticket::new(|| panic!("on purpose"))));
        let (bytes, error) = drain(stream(vec![ticket(b"a"), broken, end()]));
        assert_eq!(bytes, b"a");
        assert!(matches!(error, Some(Error::Interrupted)));
    }

    #[test]
    fn check_runs_after_all_earlier_jobs() {
        let has_run = Arc::new(AtomicBool::new(false));
        let job = {
            let has_run = Arc::clone(&has_run);
            move || {
                has_run.store(true, Ordering::SeqCst);
                Ok(Output::from(vec![Bytes::from_static(b"a")]))
            }
        };
        let check = Job::new(move || {
            assert!(has_run.load(Ordering::SeqCst));
            Ok(Bytes::from_static(b"b"))
        });
        let job = Slot::Ticket(Arc::new(Ticket::new(job)));
        let (bytes, error) = drain(stream(vec![job, Slot::Check(check), end()]));
        assert_eq!(bytes, b"ab");
        assert!(error.is_none(), "{error:?}");
    }
}
