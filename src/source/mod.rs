//! Sources: immutable bytes by range, from which an archive's packed bytes are read.
//!
//! A source is one version of a file, pinned by its [`Fingerprint`]. Bytes of another version are an error.

mod client;
mod credentials;
mod error;
mod fingerprint;
mod http;
mod listing;
mod local;
mod location;
mod mirrors;
mod network;
mod open;
mod options;
mod parts;
mod read_handle;
mod registry;
mod retry;
mod upload;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt};

use crate::base::extent::Packed;

pub use crate::base::buffer_pool::{Buffer, BufferPool};
pub use crate::base::random_reads::Wait;

pub use crate::base::redact::redact;
pub use client::{
    Authorizer, ErrorResponse, HeaderArg, HeaderLoader, Identity, Request, Target, UploadContent,
    UserHeaders, Via,
};
#[doc(hidden)]
pub use credentials::registry_login;
pub use error::{Cause, Class, Denial, Error, Obstacle, Rejection};
pub use fingerprint::{Doubt, Fingerprint, Validator};
pub use http::Http;
pub use listing::{ArchivePlace, ListedArchive, Listing, paths_of_page};
pub(crate) use local::SourceDirectory;
pub use local::{File, MemorySource, Pipe};
pub(crate) use location::without_blanks;
pub use location::{Location, canonical_name, canonical_os_name, is_url, location_text};
#[doc(hidden)]
pub use mirrors::{UnopenedMirror, in_order, open as open_mirrors};
pub use network::{
    Certificates, CertificatesError, ClientCertificate, ClientCertificateError, Content,
    RawResponse, Transport,
};
pub use open::{canonical_location, local_path, open, own_name};
pub(crate) use open::{lacks_scheme, open_beside};
pub use options::{
    CONNECTIONS, DEFAULT_CONNECTIONS, DEFAULT_HOSTS_DIR, DEFAULT_TIMEOUT, Options, RETRIES,
    Revalidation, TIMEOUT_SECONDS,
};
pub(crate) use parts::{Join, Slice};
pub use read_handle::{Continuation, ReadHandle, RetryForever};
pub use registry::{
    Annotations, ArtifactLayer, Descriptor, DocumentError, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE,
    INDEX_LAYER_ANNOTATION, Repository,
};
pub(crate) use registry::{documents, open_foreign};
pub use retry::Retry;
pub use upload::put;

/// Whether all bytes of a read are those that were expected.
pub type IsIntact<'a> = &'a (dyn Fn(&[u8]) -> bool + Sync);

/// The future bytes of a read.
pub type Reading<'a> = BoxFuture<'a, Result<Bytes, Error>>;

/// Ways to read from a source.
#[derive(Clone, Copy)]
#[expect(
    missing_debug_implementations,
    reason = "functions have no form for it"
)]
pub enum ReadMode<'a> {
    /// To the end.
    Whole,
    /// With progress and control by a handle. A stop returns fewer bytes.
    Controlled(&'a ReadHandle),
    /// After corrupt bytes, without the memory, connection and network caches of the source. Of several servers, those
    /// whose bytes are intact are preferred.
    Uncached(IsIntact<'a>),
}

/// Immutable bytes that can be read.
pub trait Source: Send + Sync + fmt::Debug {
    /// Name, version and access pattern.
    fn info(&self) -> &SourceInfo;

    /// Name for the user, without secrets.
    fn location(&self) -> &str {
        self.info().location.as_str()
    }

    /// Key of saved state, together with the fingerprint. It is the same for the same place.
    fn canonical_location(&self) -> &str {
        self.info().location.canonical()
    }

    /// Version and length of the bytes.
    fn fingerprint(&self) -> &Fingerprint {
        &self.info().fingerprint
    }

    /// Whether any range can be read, or all bytes once from the front.
    fn access(&self) -> Access {
        self.info().access
    }

    /// Fills all of `buffer` with the bytes at `offset`, and returns it frozen. Only if the fingerprint has
    /// no length, fewer bytes mean the end of the source.
    ///
    /// # Errors
    /// If unreadable, of another version, or short ([`Cause::Changed`] or [`Cause::Truncated`]).
    ///
    /// # Cancel safety
    /// Dropping the future cancels the request and returns the buffer to its pool.
    fn read<'a>(&'a self, offset: Packed, buffer: Buffer, mode: ReadMode<'a>) -> Reading<'a>;

    /// As [`read`](Self::read), to the end.
    ///
    /// # Errors
    /// As `read`.
    fn read_at(&self, offset: Packed, buffer: Buffer) -> Reading<'_> {
        self.read(offset, buffer, ReadMode::Whole)
    }

    /// Whether [`read_inline`](Self::read_inline) is supported.
    fn can_read_inline(&self) -> bool {
        false
    }

    /// Fills `bytes` on this thread, blocking at most on a local disk if `wait` allows; `None` if impossible.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn read_inline(
        &self,
        _offset: Packed,
        _bytes: &mut [u8],
        _wait: Wait,
    ) -> Option<Result<(), Error>> {
        None
    }

    /// Why its bytes cannot be read at present; `None` if they can, as far as known.
    fn outage(&self) -> Option<&'static str> {
        None
    }

    /// Maximum number of concurrent reads that the server accepts, lower for a while after it throttled.
    fn max_concurrent_reads(&self) -> usize {
        usize::MAX
    }

    /// Informs the source that its server is serial. It then sends single requests, until many succeed.
    fn limit_to_one_read(&self) {}

    /// Cost of the last answer for the server: its latency without network time. `None` without a server.
    fn response_cost(&self) -> Option<Duration> {
        None
    }

    /// Whether reads use the network. Only then are many requests faster, and only then can one straggle.
    fn is_remote(&self) -> bool {
        false
    }

    /// Streams all bytes from the front, in pieces of any size; with [`Access::Stream`] only once.
    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        stream_by_ranges(self)
    }
}

/// Properties of a source that never change.
#[derive(Clone, Debug)]
pub struct SourceInfo {
    /// Place, for the user and for saved state.
    pub location: Location,
    /// Version and length of the bytes.
    pub fingerprint: Fingerprint,
    /// Access pattern.
    pub access: Access,
}

/// Access patterns of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Any range, repeatedly and concurrently.
    Ranges,
    /// All bytes once, from the front.
    Stream,
}

const PIECE_LEN: u64 = 1 << 20;

/// Streams the bytes of `source` by reading one range after another.
fn stream_by_ranges<S: Source + ?Sized>(source: &S) -> BoxStream<'_, Result<Bytes, Error>> {
    let pool = BufferPool::new(2 * PIECE_LEN);
    let len = source.fingerprint().len.unwrap_or(u64::MAX);
    stream::unfold(Some(0), move |offset| {
        let pool = pool.clone();
        async move {
            let offset: u64 = offset?;
            let wanted = usize::try_from(len.saturating_sub(offset).min(PIECE_LEN)).ok()?;
            if wanted == 0 {
                return None;
            }
            let buffer = pool.acquire_async(wanted).await;
            match source.read_at(Packed(offset), buffer).await {
                Ok(bytes) if bytes.is_empty() => None,
                Ok(bytes) => {
                    let next = (bytes.len() == wanted).then_some(offset + wanted as u64);
                    Some((Ok(bytes), next))
                }
                Err(error) => Some((Err(error), None)),
            }
        }
    })
    .boxed()
}
