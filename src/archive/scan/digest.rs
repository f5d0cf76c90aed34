//! SHA-256 of a packed or plain stream, computed in parallel with decoding.
//! Hashing takes as long as decoding, or longer, and needs every byte in order, so it has a thread of its
//! own. If the thread's short queue is full, the scan waits.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};

use bytes::Bytes;
use ring::digest::{Context, SHA256};

use crate::base::sha256::Sha256;
use crate::base::thread::Thread;

/// Maximum number of chunks that wait to be hashed. Each holds up to an eighth of the fetch buffers.
const MAX_QUEUED_CHUNKS: usize = 2;

pub(super) struct Digester {
    sender: SyncSender<Bytes>,
    thread: Thread<Option<Sha256>>,
}

impl Digester {
    pub(crate) fn start() -> io::Result<Self> {
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

    pub(crate) fn update(&self, bytes: &Bytes) {
        // Sending fails only if the thread has panicked, and then there is no digest.
        drop(self.sender.send(bytes.clone()));
    }

    pub(crate) fn finish(self) -> Option<Sha256> {
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
