//! An index file in memory whose frames are loaded when a row is first used.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use zstd::bulk::Decompressor;

use super::frame_checksum::frame_checksum;
use super::frame_memory::FrameMemory;
use super::missing_row::{self, MissingRow};
use crate::base::sync::{Condvar, Mutex};

/// Least packed bytes of a request to a server, because a round trip costs more.
const MIN_REQUEST_BYTES: u64 = 256 << 10;

/// Maximum packed bytes of one request.
const MAX_REQUEST_BYTES: u64 = 4 << 20;

/// The packed bytes of a published index.
pub trait PackedIndex: Send + Sync + fmt::Debug {
    /// Reads `range`. Blocks, with a deadline.
    ///
    /// # Errors
    /// When the bytes are unavailable, or of another version.
    fn read(&self, range: Range<u64>) -> io::Result<Bytes>;

    /// Reports that rows are missing, because they could not be read or are damaged.
    fn report_failure(&self, error: &io::Error);

    /// Packed bytes that one use of a missing row requests at least.
    fn min_request_bytes(&self) -> u64 {
        MIN_REQUEST_BYTES
    }
}

fn damaged(error: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The bytes of an index file, of which frames are loaded when they are needed.
#[derive(Debug)]
pub(crate) struct OnDemand {
    memory: FrameMemory,
    /// Offset of each frame's packed bytes, and their end.
    offsets: Vec<u64>,
    /// Checksum of each frame's packed bytes.
    checksums: Vec<u32>,
    packed: Box<dyn PackedIndex>,
    /// Frames that are being requested.
    in_flight: Mutex<Vec<Range<usize>>>,
    landed: Condvar,
    loaded_bytes: AtomicU64,
}

impl OnDemand {
    /// `offsets` holds that of each frame, and the end of the last. `None` if they do not fit the memory.
    pub(crate) fn new(
        memory: FrameMemory,
        offsets: Vec<u64>,
        checksums: Vec<u32>,
        packed: Box<dyn PackedIndex>,
    ) -> Option<Self> {
        (offsets.len() == memory.frame_count() + 1).then(|| Self {
            memory,
            offsets,
            checksums,
            packed,
            in_flight: Mutex::default(),
            landed: Condvar::default(),
            loaded_bytes: AtomicU64::new(0),
        })
    }

    /// Bytes of the file in memory.
    pub(crate) fn loaded_bytes(&self) -> u64 {
        self.loaded_bytes.load(Ordering::Relaxed)
    }

    /// Whether all frames are in memory.
    pub(crate) fn is_loaded(&self) -> bool {
        self.loaded_bytes() == self.len() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Length of the packed frames.
    pub(crate) fn packed_len(&self) -> u64 {
        let ends = (self.offsets.first(), self.offsets.last());
        ends.1.unwrap_or(&0) - ends.0.unwrap_or(&0)
    }

    /// The bytes of `range`; `None` past the end, or if they are missing, which [`missing_row::find_missing`] reports.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        if let Some(bytes) = self.memory.get(range.clone()) {
            return Some(bytes);
        }
        if range.start > range.end || range.end > self.memory.len() {
            return None;
        }
        if !missing_row::may_wait() {
            missing_row::report(MissingRow::NotLoaded);
            return None;
        }
        if let Err(error) = self.load(&range) {
            missing_row::report(MissingRow::Unavailable);
            self.packed.report_failure(&error);
            return None;
        }
        self.memory.get(range)
    }

    /// Loads the first missing frames, at most one request of them. Returns whether it found any.
    pub(crate) fn load_next(&self) -> io::Result<bool> {
        let count = self.memory.frame_count();
        let Some(first) = (0..count).find(|&frame| self.is_missing(frame)) else {
            return Ok(false);
        };
        self.load_run(first, MAX_REQUEST_BYTES)?;
        Ok(true)
    }

    /// Reads the packed bytes of all frames that are not loaded, and compares their checksums.
    pub(crate) fn verify(&self) -> io::Result<()> {
        let count = self.memory.frame_count();
        let mut frames = 0..count;
        while let Some(first) = frames.find(|&frame| self.is_missing(frame)) {
            let is_in_run = |&frame: &usize| {
                let packed = self.packed_range(first..frame + 1);
                self.is_missing(frame) && packed.end - packed.start <= MAX_REQUEST_BYTES
            };
            let end = (first + 1..count).find(|frame| !is_in_run(frame));
            let run = first..end.unwrap_or(count);
            let range = self.packed_range(run.clone());
            let bytes = self.packed.read(range.clone())?;
            for frame in run.clone() {
                self.check(frame, self.frame_of(frame, &bytes, range.start)?)?;
            }
            frames.start = run.end;
        }
        Ok(())
    }

    /// Compares the packed bytes of `frame` with its checksum.
    fn check(&self, frame: usize, packed: &[u8]) -> io::Result<()> {
        let is_same = self.checksums.get(frame) == Some(&frame_checksum(packed));
        is_same
            .then_some(())
            .ok_or_else(|| damaged("a frame of the index has another checksum"))
    }

    /// The packed bytes of `frame` from `packed`, which starts at byte `start` of the packed file.
    fn frame_of<'a>(&self, frame: usize, packed: &'a [u8], start: u64) -> io::Result<&'a [u8]> {
        let own = self.packed_range(frame..frame + 1);
        let within = |at: u64| usize::try_from(at.checked_sub(start)?).ok();
        let range = within(own.start).zip(within(own.end));
        let bytes = range.and_then(|(start, end)| packed.get(start..end));
        bytes.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Stores the frames that `packed` holds, which starts at byte `start` of the packed file.
    pub(crate) fn add_packed(&self, start: u64, packed: &[u8]) -> io::Result<()> {
        let mut decoder = Decompressor::new()?;
        for frame in 0..self.memory.frame_count() {
            let Ok(bytes) = self.frame_of(frame, packed, start) else {
                break;
            };
            self.unpack(frame, bytes, &mut decoder)?;
        }
        Ok(())
    }

    fn is_missing(&self, frame: usize) -> bool {
        !self.memory.is_written(frame)
    }

    /// Loads the frames that hold the bytes of `range`. Damaged frames are an error.
    pub(crate) fn load(&self, range: &Range<usize>) -> io::Result<()> {
        let frames = self.memory.frames(range);
        let mut rest = frames.clone();
        while let Some(first) = rest.find(|&frame| self.is_missing(frame)) {
            let wanted = self.packed_range(first..frames.end);
            let len = wanted.end - wanted.start;
            let min_bytes = self.packed.min_request_bytes();
            self.load_run(first, len.clamp(min_bytes, MAX_REQUEST_BYTES))?;
            rest.start = first;
        }
        Ok(())
    }

    /// Loads frame `first` and the missing ones behind it, up to `max_bytes`. Waits for a request of another
    /// thread that has the frame. Such a request may fail, so the frame may still be missing then.
    fn load_run(&self, first: usize, max_bytes: u64) -> io::Result<()> {
        let mut in_flight = self.in_flight.lock();
        if in_flight.iter().any(|run| run.contains(&first)) {
            let is_in_flight =
                |runs: &mut Vec<Range<usize>>| runs.iter().any(|run| run.contains(&first));
            drop(self.landed.wait_while(in_flight, is_in_flight));
            return Ok(());
        }
        if !self.is_missing(first) {
            return Ok(());
        }
        let is_in_run = |&frame: &usize| {
            let packed = self.packed_range(first..frame + 1);
            self.is_missing(frame)
                && packed.end - packed.start <= max_bytes
                && !in_flight.iter().any(|run| run.contains(&frame))
        };
        let count = self.memory.frame_count();
        let end = (first + 1..count).find(|frame| !is_in_run(frame));
        let run = first..end.unwrap_or(count);
        in_flight.push(run.clone());
        drop(in_flight);
        let loaded = self.request(&run);
        self.in_flight.lock().retain(|other| *other != run);
        self.landed.notify_all();
        loaded
    }

    fn request(&self, run: &Range<usize>) -> io::Result<()> {
        let range = self.packed_range(run.clone());
        let bytes = self.packed.read(range.clone())?;
        let mut decoder = Decompressor::new()?;
        for frame in run.clone() {
            let packed = self.frame_of(frame, &bytes, range.start)?;
            self.unpack(frame, packed, &mut decoder)?;
        }
        Ok(())
    }

    fn unpack(
        &self,
        frame: usize,
        packed: &[u8],
        decoder: &mut Decompressor<'_>,
    ) -> io::Result<()> {
        let written = self.memory.write(frame, |bytes| {
            self.check(frame, packed)?;
            let decoded = decoder.decompress_to_buffer(packed, bytes);
            match decoded.map_err(|error| damaged(&error.to_string()))? {
                len if len == bytes.len() => Ok(()),
                _ => Err(damaged("a frame of the index has another length")),
            }
        });
        if let Some(written) = written {
            written?;
            let len = self.memory.len_of(frame);
            self.loaded_bytes.fetch_add(len as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Packed bytes of adjacent frames, which exist.
    fn packed_range(&self, frames: Range<usize>) -> Range<u64> {
        let at = |frame: usize| self.offsets.get(frame).copied().unwrap_or_default();
        at(frames.start)..at(frames.end)
    }
}
