//! Indexes and decoded blocks of open archives, for commands of this user.

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
    /// The answer of `lend` for the archive `name`; `None` if no mount has it.
    fn with_archive(
        &self,
        name: &str,
        lend: impl FnOnce(&Opened, &Archive) -> Response,
    ) -> Option<Response> {
        for mount in self.mounts() {
            let archives = mount.opened.volume.archives();
            let mut archives = archives.into_iter();
            if let Some(archive) = archives.find(|archive| archive.peer_name() == name) {
                return Some(lend(&mount.opened, archive));
            }
        }
        None
    }

    /// The index of the archive `name`.
    pub(super) fn lend_index(&self, name: &str) -> Response {
        const NONE: &str = "no complete index of this archive";
        let lent = self.with_archive(name, |_, archive| match archive.index_for_peer() {
            Ok(index) => Response::Index(index),
            Err(true) => Response::Scanning {
                scanned_bytes: archive.stats().scanned_packed_bytes.get(),
            },
            Err(false) => Response::error(NONE),
        });
        lent.unwrap_or_else(|| Response::error(NONE))
    }

    /// The decoded block `number` of the archive `name`.
    pub(super) fn lend_span(&self, name: &str, number: u32) -> Response {
        let lent = self.with_archive(name, |opened, archive| {
            let waiting = self.lending.fetch_add(1, Ordering::SeqCst);
            let timeout = if waiting < MAX_WAITING {
                DECODE_TIMEOUT
            } else {
                Duration::ZERO
            };
            let bytes = archive.span_for_peer(number, timeout);
            self.lending.fetch_sub(1, Ordering::SeqCst);
            let missing_span = number;
            bytes.map_or(Response::SpanMissing { missing_span }, |bytes| {
                opened.stats.lent_spans.increment();
                Response::Span(bytes)
            })
        });
        lent.unwrap_or_else(|| Response::error("the archive is not open"))
    }
}
