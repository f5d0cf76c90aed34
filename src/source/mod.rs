//! Sources: immutable bytes by range, from which an archive's packed bytes are read.
//!
//! A source is one version of a file, pinned by its [`Fingerprint`]. Bytes of another version are an error.

mod directory;
mod error;
mod file;
mod fingerprint;
mod http;
mod location;
mod memory;
mod pipe;
mod read_handle;
mod response;
mod retry;
mod slice;

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt};
use url::Url;

use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::Packed;
use crate::base::random_reads::Wait;
use crate::base::stats::Stats;

pub use directory::SourceDirectory;
pub use error::{Cause, Error, Obstacle};
pub use file::File;
pub use fingerprint::{Doubt, Fingerprint, Validator};
pub use http::{Certificates, CertificatesError, Content, Http, RawResponse, Transport};
pub use location::Location;
pub use memory::MemorySource;
pub use pipe::Pipe;
pub use read_handle::{Continuation, ReadHandle, RetryForever};
pub use retry::Retry;
pub use slice::Slice;

/// Immutable bytes that can be read.
pub trait Source: Send + Sync + fmt::Debug {
    /// Name for the user, without secrets.
    fn location(&self) -> &str;

    /// Key of saved state, together with the fingerprint. It is the same for the same place.
    fn locator(&self) -> &str;

    /// Version and length of the bytes.
    fn fingerprint(&self) -> &Fingerprint;

    /// Whether any range can be read, or all bytes once from the front.
    fn access(&self) -> Access;

    /// Fills `buffer` with the bytes at `offset` and returns it frozen. It fills all of it, because a
    /// source that ends earlier is [`Cause::Changed`] or [`Cause::Truncated`]. Only if the fingerprint has
    /// no length, fewer bytes mean that the source ends there.
    ///
    /// # Errors
    /// If the bytes cannot be read, or belong to another version.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the request and returns the buffer to its pool.
    fn read_at(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>>;

    /// As [`read_at`](Self::read_at), with progress and control through `read_handle`. A stopped read
    /// returns fewer bytes. A source whose reads need no control ignores `read_handle`.
    ///
    /// # Errors
    /// As `read_at`.
    ///
    /// # Cancel safety
    /// As `read_at`.
    fn read_with_handle<'a>(
        &'a self,
        offset: Packed,
        buffer: Buffer,
        _read_handle: &'a ReadHandle,
    ) -> BoxFuture<'a, Result<Bytes, Error>> {
        self.read_at(offset, buffer)
    }

    /// As [`read_at`](Self::read_at), after a read returned corrupt bytes. It shares as little as possible
    /// with that read: no memory, no connection and no cache on the network.
    ///
    /// # Errors
    /// As `read_at`.
    ///
    /// # Cancel safety
    /// As `read_at`.
    fn read_uncached(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        self.read_at(offset, buffer)
    }

    /// Whether [`read_inline`](Self::read_inline) is supported.
    fn can_read_inline(&self) -> bool {
        false
    }

    /// Fills `bytes` from `offset` on the calling thread. It blocks at most on a local disk, and only if
    /// `wait` allows it. `None` if that is not possible.
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

    /// Maximum number of concurrent reads that the server accepts. It is lower after the server throttled,
    /// until the server proves to accept more.
    fn max_concurrent_reads(&self) -> usize {
        usize::MAX
    }

    /// Informs the source that its server answers one request after another. It then sends one at a time,
    /// until many have succeeded.
    fn limit_to_one_read(&self) {}

    /// Cost of the last answer for the server: its latency without network time. `None` if there is no
    /// server.
    fn response_cost(&self) -> Option<Duration> {
        None
    }

    /// Whether reads use the network. Only then can many concurrent requests be faster, and a single one
    /// straggle.
    fn is_remote(&self) -> bool {
        false
    }

    /// Streams all bytes from the front, in pieces of any size. A source with [`Access::Stream`] supports
    /// one call; a second one is an error.
    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>>;
}

/// Access patterns of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Any range, repeatedly and concurrently.
    Ranges,
    /// All bytes once, from the front.
    Stream,
}

/// Default timeout of a read without bytes. A restarted server and a short network failure recover within
/// it.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

/// Options to open a source.
#[derive(Clone, Debug)]
pub struct Options {
    /// Headers sent to the origin of the URL, and to no other.
    pub headers: Vec<(String, String)>,
    /// Whether redirects from HTTPS to HTTP are followed.
    pub allow_insecure_redirects: bool,
    /// Certificates trusted besides the system's.
    pub certificates: Certificates,
    /// Version of a remote source that an earlier process opened. If the server does not answer soon, the
    /// source is opened as this version, and each later answer must match it.
    pub known_version: Option<Fingerprint>,
    /// Maximum number of idle connections.
    pub connections: usize,
    /// Timeout for a connection attempt.
    pub connect_timeout: Duration,
    /// Timeout without any byte, before an answer and within it.
    pub idle_timeout: Duration,
    /// Timeout for a read without substantial progress, retries and pauses included. Each other timeout is
    /// at most half of it.
    pub timeout: Duration,
    /// Retry policy.
    pub retry: Retry,
    /// Seed of the retry pauses, for reproducible ones. Without it they are random.
    pub jitter_seed: Option<u64>,
    /// Counters.
    pub stats: Arc<Stats>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            headers: Vec::new(),
            allow_insecure_redirects: false,
            certificates: Certificates::default(),
            known_version: None,
            connections: 16,
            connect_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(30),
            timeout: DEFAULT_TIMEOUT,
            retry: Retry::default(),
            jitter_seed: None,
            stats: Arc::default(),
        }
    }
}

/// Opens `spec`: a URL (`http://`, `https://`, `file://`), a path, or `-` for standard input.
///
/// A name with `://` is a URL. The path of such a file is `./name`.
///
/// # Errors
/// If it is malformed, missing, unreachable, or not supported as a source.
pub async fn open(spec: &str, options: Options) -> Result<Arc<dyn Source>, Error> {
    if spec == "-" {
        return Ok(Arc::new(Pipe::stdin(options.stats)));
    }
    if !spec.contains("://") {
        return open_path(PathBuf::from(spec), options.stats).await;
    }
    // A URL that does not parse may contain secrets, so the error does not repeat it.
    let malformed = |text: String| Error::new("the URL", Cause::Malformed(text));
    let url = Url::parse(spec).map_err(|error| malformed(error.to_string()))?;
    match url.scheme() {
        "http" | "https" => Ok(Arc::new(Http::open(url, options).await?)),
        "file" => match url.to_file_path() {
            Ok(path) => open_path(path, options.stats).await,
            Err(()) => Err(malformed("a file URL names no other host".to_owned())),
        },
        scheme => Err(Error::new(
            Location::from_url(&url).as_str(),
            Cause::UnknownScheme(scheme.to_owned()),
        )),
    }
}

/// Returns the locator of the URL `spec` (see [`Source::locator`]); `None` for any other spec.
pub fn locator(spec: &str) -> Option<String> {
    let url = Url::parse(spec).ok()?;
    let is_remote = matches!(url.scheme(), "http" | "https");
    is_remote.then(|| Location::from_url(&url).locator().to_owned())
}

/// Whether two URLs have the same scheme, host and port, so that they may share credentials. Paths never
/// do.
pub fn is_same_origin(one: &str, other: &str) -> bool {
    match (Url::parse(one), Url::parse(other)) {
        // The origins of file URLs are never equal.
        (Ok(one), Ok(other)) => one.origin() == other.origin(),
        _ => false,
    }
}

/// Redacts secrets in `spec` (see [`open`]). Returns it unchanged if it contains none.
pub fn redact(spec: &str) -> String {
    let Some(colon) = spec.find("://") else {
        return spec.to_owned();
    };
    let before = spec.get(..colon).unwrap_or_default();
    // The prefix of an image or a part, as in `tar:https://...`.
    let scheme = before.rfind(':').map_or(0, |last| last + 1);
    let (around, url) = spec.split_at(scheme);
    match Url::parse(url) {
        Ok(url) if !around.contains('@') => {
            let shown = Location::from_url(&url);
            if shown.as_str() == url.as_str() {
                spec.to_owned()
            } else {
                format!("{around}{shown}")
            }
        }
        // Secrets cannot be located in it.
        _ => "the URL".to_owned(),
    }
}

async fn open_path(path: PathBuf, stats: Arc<Stats>) -> Result<Arc<dyn Source>, Error> {
    let opening = move || match (file::open(&path, stats), path.to_string_lossy()) {
        (Err(Cause::NotFound), name) if let Some(url) = with_scheme(&name) => {
            let url = Location::from_url(&url).to_string();
            let (_, place) = url.split_once("://").unwrap_or_default();
            Err(Error::new(place, Cause::MissingScheme { url: url.clone() }))
        }
        (opened, name) => opened.map_err(|cause| Error::new(name, cause)),
    };
    // The task fails only if the runtime ends.
    let done = tokio::task::spawn_blocking(opening).await;
    done.unwrap_or_else(|_| Err(Error::new("the file", Cause::Cancelled)))
}

/// Whether `spec` is probably a URL without a scheme. It then names a host, and no local file.
pub fn lacks_scheme(spec: &str) -> bool {
    with_scheme(spec).is_some()
}

/// Returns the URL that `name` probably means, if it looks like a host and a path.
fn with_scheme(name: &str) -> Option<Url> {
    let (authority, _) = name.split_once('/')?;
    let host = match authority.rsplit_once(':') {
        Some((host, port)) => port.parse::<u16>().is_ok().then_some(host)?,
        None => authority,
    };
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = |label: &str| !label.is_empty() && label.bytes().all(is_letter);
    let is_here = host == "localhost" || host.parse::<Ipv4Addr>().is_ok();
    let is_name = host.contains('.') && host.split('.').all(is_label);
    if !(is_here || is_name) || Path::new(authority).exists() {
        return None;
    }
    let scheme = if is_here { "http" } else { "https" };
    Url::parse(&format!("{scheme}://{name}")).ok()
}

/// Length of a piece of [`stream_by_ranges`], in bytes.
const PIECE_LEN: u64 = 1 << 20;

/// Implements [`Source::stream`] by reading one range after another.
pub fn stream_by_ranges<S: Source>(source: &S) -> BoxStream<'_, Result<Bytes, Error>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_origin_compares_scheme_host_and_port() {
        for (one, other, expected) in [
            ("http://host:1/a/b", "http://me:pass@HOST:1/c?d", true),
            ("https://host", "https://host:443/", true),
            ("http://host/a", "https://host/a", false),
            ("http://host/a", "http://host:8080/a", false),
            ("http://host.evil/a", "http://host/a", false),
            ("/a/path", "/a/path", false),
            ("file:///a", "file:///a", false),
        ] {
            assert_eq!(is_same_origin(one, other), expected, "{one} {other}");
        }
    }
}
