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
use crate::index::{Index, Locator, MemoryLimit};
use crate::source::Fingerprint;

/// Pause after an answer that no peer has the archive, or one of other bytes.
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

/// The complete index of an archive that a peer has open, if it is one that the archive itself vouches for.
pub(crate) fn index_of_peer(
    peers: &Arc<dyn Peers>,
    locator: &Locator,
    limit: &MemoryLimit,
) -> Option<Index> {
    let found = peers.index(&locator.file_name(), limit);
    found.filter(|index| index.origin().locator == *locator && !index.is_published())
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
    /// The archive at `peers`. `None` if nothing tells its versions apart, because their blocks may be of another one then,
    /// and so may the index.
    pub(crate) fn new(
        peers: &Arc<dyn Peers>,
        locator: &Locator,
        fingerprint: &Fingerprint,
        stats: &Arc<Stats>,
    ) -> Option<Self> {
        fingerprint.doubt().is_none().then(|| Self {
            peers: Arc::clone(peers),
            name: locator.file_name(),
            stats: Arc::clone(stats),
            pause: Mutex::default(),
        })
    }

    /// Whether a peer has it open.
    pub(crate) fn exists(&self) -> bool {
        self.peers.span(&self.name, u32::MAX, 0) != PeerSpan::Unknown
    }

    /// The block `number`, which is as `expected`: a peer has it, or decodes it at this moment. `block_len` is that of the
    /// index. After a block of other bytes, none is asked for a while: its index has other blocks.
    pub(crate) fn span(
        &self,
        number: u32,
        expected: ExpectedSpan,
        block_len: u64,
    ) -> Option<Bytes> {
        let is_paused = |until: Instant| Instant::now() < until;
        if self.pause.lock().is_some_and(is_paused) {
            return None;
        }
        match self.peers.span(&self.name, number, expected.len) {
            PeerSpan::Bytes(bytes) if expected.is_of(&bytes, block_len) => {
                self.stats.peer_spans.increment();
                return Some(bytes.into());
            }
            PeerSpan::Absent => {}
            PeerSpan::Bytes(_) | PeerSpan::Unknown => {
                *self.pause.lock() = Some(Instant::now() + PAUSE);
            }
        }
        None
    }
}
