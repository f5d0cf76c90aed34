//! Indexes and decoded blocks of open archives, for commands of this user.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Server;
use crate::archive::Archive;
use crate::serve::control_socket::Response;
use crate::serve::opened::Opened;

/// Timeout for a block that another caller decodes.
const DECODE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of requests that wait for blocks, so that others are answered meanwhile.
const MAX_WAITING: usize = 4;

impl Server {
    /// The answer of `lend` for one of the open archives `name`, the first that has what is asked for.
    fn first_lent(
        &self,
        name: &str,
        mut lend: impl FnMut(&Opened, &Archive) -> Option<Response>,
    ) -> Option<Response> {
        self.mounts().iter().find_map(|mount| {
            let archives = mount.opened.volume.archives().into_iter();
            let mut archives = archives.filter(|archive| archive.peer_name() == name);
            archives.find_map(|archive| lend(&mount.opened, archive))
        })
    }

    /// The index of the archive `name`.
    pub(super) fn lend_index(&self, name: &str) -> Response {
        let mut scanned_bytes = None;
        let lent = self.first_lent(name, |_, archive| match archive.index_for_peer() {
            Ok(index) => Some(Response::Index(index)),
            Err(is_scanning) => {
                let bytes = is_scanning.then(|| archive.stats().scanned_packed_bytes.get());
                scanned_bytes = scanned_bytes.max(bytes);
                None
            }
        });
        lent.unwrap_or_else(|| match scanned_bytes {
            Some(scanned_bytes) => Response::Scanning { scanned_bytes },
            None => Response::error("no complete index of this archive"),
        })
    }

    /// The decoded block `number` of the archive `name`.
    pub(super) fn lend_span(&self, name: &str, number: u32) -> Response {
        let mut is_open = false;
        let mut find = |timeout| {
            let deadline = Instant::now() + timeout;
            self.first_lent(name, |opened, archive| {
                is_open = true;
                let left = deadline.saturating_duration_since(Instant::now());
                let bytes = archive.span_for_peer(number, left)?;
                opened.stats.lent_spans.increment();
                Some(Response::Span(bytes))
            })
        };
        let lent = find(Duration::ZERO).or_else(|| {
            let waiting = self.lending.fetch_add(1, Ordering::SeqCst);
            let lent = (waiting < MAX_WAITING).then(|| find(DECODE_TIMEOUT));
            self.lending.fetch_sub(1, Ordering::SeqCst);
            lent.flatten()
        });
        lent.unwrap_or_else(|| {
            let missing_span = number;
            if is_open {
                Response::SpanMissing { missing_span }
            } else {
                Response::error("the archive is not open")
            }
        })
    }
}
