//! SHA-256 of a packed or a plain stream, taken beside its decoding.
//!
//! It is as fast as a decoder, or slower, and must see every byte in order. So a thread of its own
//! gets a share of each chunk as it passes; a few may wait for it, and then the scan does.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};

use bytes::Bytes;
use ring::digest::{Context, SHA256};

use crate::base::sha256::Sha256;
use crate::base::thread::Thread;

/// Chunks that may wait to be hashed. Each holds a share of the buffers that fetching needs, and an
/// eighth of these at the most.
const MAX_QUEUED_CHUNKS: usize = 2;

/// The digest of `bytes`.
///
/// # Panics
/// Never: the digest has as many bytes as it says.
pub fn sha256(bytes: &[u8]) -> Sha256 {
    let digest = ring::digest::digest(&SHA256, bytes);
    Sha256(digest.as_ref().try_into().expect("32 bytes"))
}

/// A digest being taken.
pub(super) struct Digester {
    sender: SyncSender<Bytes>,
    thread: Thread<Option<Sha256>>,
}

impl Digester {
    /// Of nothing so far.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn start() -> io::Result<Self> {
        let (sender, chunks) = sync_channel::<Bytes>(MAX_QUEUED_CHUNKS);
        let thread = Thread::spawn("tarfs-sha256", move || {
            let mut context = Context::new(&SHA256);
            for chunk in chunks {
                context.update(&chunk);
            }
            let digest = context.finish();
            <[u8; 32]>::try_from(digest.as_ref()).ok().map(Sha256)
        })?;
        Ok(Self { sender, thread })
    }

    /// Goes on with the next bytes; waits while too many wait already.
    pub(super) fn update(&self, bytes: &Bytes) {
        // Nobody takes it only when the thread panicked, and then there is no digest.
        drop(self.sender.send(bytes.clone()));
    }

    /// The digest of everything.
    pub(super) fn finish(self) -> Option<Sha256> {
        drop(self.sender);
        self.thread.join()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_pieces_equals_digest_of_the_whole() {
        let digester = Digester::start().expect("a thread");
        for piece in [&b"a"[..], b"", b"bc"] {
            digester.update(&Bytes::from_static(piece));
        }
        // FIPS 180-2, B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digester.finish(), abc.parse().ok());
    }
}
