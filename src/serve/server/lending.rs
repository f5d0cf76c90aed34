//! Indexes and decoded blocks of open archives, for commands of this user.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Server;
use crate::archive::Archive;
use crate::serve::control_socket::Response;
use crate::serve::opened::Opened;

/// Timeout for a block that another caller decodes.
const DECODE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of requests that wait for blocks, so that others are answered meanwhile.
const MAX_WAITING: usize = 4;

impl Server {
    /// The tree that has the archive `name`, and the archive's place in it.
    fn archive(&self, name: &str) -> Option<(Arc<Opened>, usize)> {
        let mounts = self.mounts();
        let mut opened = mounts.iter().map(|mount| &mount.opened);
        opened.find_map(|opened| {
            let archives = opened.volume.archives();
            let mut names = archives.iter().map(|archive| archive.peer_name());
            let place = names.position(|found| found == name)?;
            Some((Arc::clone(opened), place))
        })
    }

    /// The index of the archive `name`.
    pub(super) fn lend_index(&self, name: &str) -> Response {
        let found = self.archive(name);
        let archives = found.as_ref().map(|(opened, _)| opened.volume.archives());
        let archive = found.as_ref().zip(archives);
        let archive = archive.and_then(|((_, place), archives)| archives.get(*place).copied());
        match archive.map(Archive::index_for_peer) {
            Some(Ok(index)) => Response::Index(index),
            Some(Err(true)) => Response::Scanning {
                scanned_bytes: archive
                    .map_or(0, |archive| archive.stats().scanned_packed_bytes.get()),
            },
            Some(Err(false)) | None => Response::error("no complete index of this archive"),
        }
    }

    /// The decoded block `number` of the archive `name`.
    pub(super) fn lend_span(&self, name: &str, number: u32) -> Response {
        let Some((opened, place)) = self.archive(name) else {
            return Response::error("the archive is not open");
        };
        let archives = opened.volume.archives();
        let archive = archives.get(place);
        let waiting = self.lending.fetch_add(1, Ordering::SeqCst);
        let timeout = if waiting < MAX_WAITING {
            DECODE_TIMEOUT
        } else {
            Duration::ZERO
        };
        let bytes = archive.and_then(|archive| archive.span_for_peer(number, timeout));
        self.lending.fetch_sub(1, Ordering::SeqCst);
        match bytes {
            Some(bytes) => {
                opened.stats.lent_spans.increment();
                Response::Span(bytes)
            }
            None => Response::SpanMissing {
                missing_span: number,
            },
        }
    }
}
