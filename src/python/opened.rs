//! The state behind an opened archive, without Python.

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Once};

use crate::archive::{PrefetchOptions, ReadError, Version, Volume};
use crate::base::stats::Stats;
use crate::index::{Index, Ino, ShardPlan};
use crate::materialize::{self, Materializer, Options, ShardError, Summary};

/// Length of one read of the archive.
const READ_BYTES: usize = 8 << 20;

/// An archive and its index.
pub(super) struct Opened {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) index: Arc<Index>,
    pub(super) location: String,
    pub(super) stats: Arc<Stats>,
    pub(super) prefetch: Once,
}

impl Opened {
    /// Writes shard `number` of `plan` below `directory`, or finishes the tree of all shards if it is 0.
    pub(super) fn materialize(
        &self,
        directory: &Path,
        plan: &ShardPlan,
        number: u32,
    ) -> Result<Summary, Box<dyn Error + Send + Sync>> {
        let options = Options::for_this_user();
        let writer = Materializer::new(directory, options, Arc::clone(&self.stats))?;
        if number == 0 {
            let version = Version::of(&*self.volume);
            return Ok(writer.finish_shards(&self.index, &version)?);
        }
        let archive = self.volume.as_archive().ok_or(ReadError::NotAFile)?;
        let (read, summary) = writer.write_shard(archive, &self.index, plan, number);
        // An error of the destination stops the reading, too.
        let summary = summary?;
        read.map_err(cause)?;
        Ok(summary)
    }

    /// Fills `buffer` with the bytes of file `ino` from `offset` on.
    pub(super) fn fill(
        &self,
        ino: Ino,
        mut offset: u64,
        mut buffer: &mut [u8],
    ) -> Result<(), ReadError> {
        // Reads work without it.
        let start = || drop(self.volume.start_prefetch(PrefetchOptions::default()));
        self.prefetch.call_once(start);
        while !buffer.is_empty() {
            let len = u32::try_from(buffer.len().min(READ_BYTES)).unwrap_or(u32::MAX);
            self.volume.note_read(ino, offset, len);
            let bytes = self.volume.read_blocking(ino, offset, len)?;
            let parts = buffer.split_at_mut_checked(bytes.len());
            let (now, later) = parts
                .filter(|_| !bytes.is_empty())
                .ok_or(ReadError::Index)?;
            now.copy_from_slice(&bytes);
            offset = offset.saturating_add(bytes.len() as u64);
            buffer = later;
        }
        Ok(())
    }
}

/// The error of the archive or of the sink.
pub(super) fn cause(error: ShardError<materialize::Error>) -> Box<dyn Error + Send + Sync> {
    match error {
        ShardError::Read(_, error) => error.into(),
        ShardError::Sink(error) => error.into(),
    }
}
