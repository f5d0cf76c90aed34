//! Peers: other processes of this user that have the same archive open, such as the daemon of its mounts.
//!
//! They have its index, and decoded blocks in memory, which need not be made twice. The reader compares these blocks with the
//! index, as bytes from the disk cache.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::codec::ExpectedSpan;
use crate::index::{Index, MemoryLimit};

/// Pause after an answer that no peer has the archive.
const PAUSE: Duration = Duration::from_secs(1);

/// Other processes of this user. An archive is named by its location, version and options, as a saved index is.
pub trait Peers: fmt::Debug + Send + Sync {
    /// The complete index of the archive `name`, of at most `limit`. Waits for the end of a scan as long as that makes
    /// progress.
    fn index(&self, name: &str, limit: &MemoryLimit) -> Option<Index>;

    /// The decoded block `number` of the archive `name`, with at most `max_bytes`.
    fn span(&self, name: &str, number: u32, max_bytes: u64) -> PeerSpan;
}

/// Answer of peers to a request for a decoded block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerSpan {
    /// Its bytes, which are not proven.
    Bytes(Vec<u8>),
    /// A peer has the archive, but not this block.
    Absent,
    /// No peer has the archive.
    Unknown,
}

/// An archive at peers.
#[derive(Debug)]
pub(crate) struct PeerArchive {
    peers: Arc<dyn Peers>,
    name: String,
    stats: Arc<Stats>,
    /// Until when none is asked.
    pause: Mutex<Option<Instant>>,
}

impl PeerArchive {
    pub(crate) fn new(peers: &Arc<dyn Peers>, name: String, stats: &Arc<Stats>) -> Self {
        Self {
            peers: Arc::clone(peers),
            name,
            stats: Arc::clone(stats),
            pause: Mutex::default(),
        }
    }

    /// Whether a peer has it open.
    pub(crate) fn exists(&self) -> bool {
        self.peers.span(&self.name, 0, 0) != PeerSpan::Unknown
    }

    /// The block `number`, which is as `expected`: a peer has it, or decodes it at this moment. `block_len` is that of the
    /// index.
    pub(crate) fn span(
        &self,
        number: u32,
        expected: ExpectedSpan,
        block_len: u64,
    ) -> Option<Bytes> {
        let is_paused = self
            .pause
            .lock()
            .is_some_and(|until| Instant::now() < until);
        if is_paused {
            return None;
        }
        match self.peers.span(&self.name, number, expected.len) {
            PeerSpan::Bytes(bytes) if expected.is_of(&bytes, block_len) => {
                self.stats.peer_spans.increment();
                Some(bytes.into())
            }
            PeerSpan::Bytes(_) | PeerSpan::Absent => None,
            PeerSpan::Unknown => {
                *self.pause.lock() = Some(Instant::now() + PAUSE);
                None
            }
        }
    }
}
