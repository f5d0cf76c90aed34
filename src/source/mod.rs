//! Immutable bytes by range: where an archive's packed bytes come from.
//!
//! A source is one version of something: its [`Fingerprint`] pins it, and bytes of another
//! version are an error, never an answer.

mod directory;
mod error;
mod file;
mod fingerprint;
mod http;
mod http_date;
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

/// Immutable bytes.
pub trait Source: Send + Sync + fmt::Debug {
    /// What the user calls it, without secrets.
    fn location(&self) -> &str;

    /// What saved state is found by, together with the fingerprint: the same for the same place.
    fn locator(&self) -> &str;

    /// Which version of the bytes this is, and how many there are.
    fn fingerprint(&self) -> &Fingerprint;

    /// Whether any range can be read, or only everything from the front, once.
    fn access(&self) -> Access;

    /// Fills `buffer` with the bytes at `offset` and returns it frozen. All of it: a source that
    /// ends earlier is [`Cause::Changed`] or [`Cause::Truncated`]. Only where the fingerprint has
    /// no length, fewer bytes, or none, say that the source ends there.
    ///
    /// # Errors
    /// When the bytes cannot be had, or belong to another version.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the request; the buffer goes back to its pool.
    fn read_at(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>>;

    /// As [`read_at`](Self::read_at), and `read_handle` tells how far it is and can interfere. A read
    /// that was told to stop returns fewer bytes. A source whose reads nobody need watch leaves
    /// `read_handle` alone.
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

    /// As [`read_at`](Self::read_at) for who got bytes there that cannot be right: asked for again by
    /// a way that shares as little as possible with the one before, neither what is in memory, nor a
    /// connection, nor a cache on the way.
    ///
    /// # Errors
    /// As `read_at`.
    ///
    /// # Cancel safety
    /// As `read_at`.
    fn read_uncached(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        self.read_at(offset, buffer)
    }

    /// Whether [`read_inline`](Self::read_inline) can do anything.
    fn can_read_inline(&self) -> bool {
        false
    }

    /// Fills `bytes` with what lies at `offset` on the calling thread, which waits for nothing but a local
    /// disk, and only if `wait` says so. `None` when that cannot be done.
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

    /// Reads at once that the source bears, however many are asked for: fewer after its server
    /// complained, and until it has proved to bear more.
    fn max_concurrent_reads(&self) -> usize {
        usize::MAX
    }

    /// Tells the source that its server answers one request after the other: from now on it sends no more
    /// than one at once, until many of them went well.
    fn limit_to_one_read(&self) {}

    /// How long the last request took to be answered, but for the way there and back: what it cost the
    /// server. `None` where nobody is asked.
    fn response_cost(&self) -> Option<Duration> {
        None
    }

    /// Whether requests travel: only then are many of them better than few, and can one of them
    /// be slower than the others for no reason of its own.
    fn is_remote(&self) -> bool {
        false
    }

    /// Everything from the front, in pieces of any size. A source with [`Access::Stream`] gives
    /// it once; a second call is an error.
    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>>;
}

/// How a source can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Any range, any number of times, several at once.
    Ranges,
    /// Once, from the front.
    Stream,
}

/// How long a read waits for bytes, unless someone wants it otherwise: a server that is started
/// again and a network that is gone for a moment are back by then.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

/// How to open a source.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names and values to send to the host of the URL, and to no other.
    pub headers: Vec<(String, String)>,
    /// Whether redirects may lead from HTTPS to HTTP.
    pub allow_insecure_redirects: bool,
    /// Certificates that are trusted besides the system's.
    pub certificates: Certificates,
    /// The version of a remote source that an earlier process has opened. If the source does not answer
    /// soon, it is opened as this version without an answer, and each later answer must be of it.
    pub known_version: Option<Fingerprint>,
    /// Connections kept for reuse.
    pub connections: usize,
    /// How long to wait for a connection to be there.
    pub connect_timeout: Duration,
    /// How long a server may be silent: before its answer, and between any two bytes of it.
    pub idle_timeout: Duration,
    /// How long a read waits for bytes worth the name, repetitions and pauses included; each other
    /// wait ends within half of that.
    pub timeout: Duration,
    /// How often to try again.
    pub retry: Retry,
    /// The pauses between attempts are the same again for the same number; without one they are
    /// others each time.
    pub jitter_seed: Option<u64>,
    /// What counts requests and bytes.
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
/// A name with `://` is a URL; a file of such a name is opened as `./name`.
///
/// # Errors
/// When it cannot be understood, does not exist, cannot be reached, or is no kind of source.
pub async fn open(spec: &str, options: Options) -> Result<Arc<dyn Source>, Error> {
    if spec == "-" {
        return Ok(Arc::new(Pipe::stdin(options.stats)));
    }
    if !spec.contains("://") {
        return open_path(PathBuf::from(spec), options.stats).await;
    }
    // A URL that cannot be parsed cannot be cleaned of secrets either, and is not repeated.
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

/// What saved state of the URL `spec` is found by (see [`Source::locator`]); `None` of anything else.
pub fn locator(spec: &str) -> Option<String> {
    let url = Url::parse(spec).ok()?;
    let is_remote = matches!(url.scheme(), "http" | "https");
    is_remote.then(|| Location::from_url(&url).locator().to_owned())
}

/// Whether two URLs are of one scheme, host and port, so that what one may be told the other may; of
/// paths nothing is.
pub fn is_same_origin(one: &str, other: &str) -> bool {
    match (Url::parse(one), Url::parse(other)) {
        // Those of files are equal to nothing.
        (Ok(one), Ok(other)) => one.origin() == other.origin(),
        _ => false,
    }
}

/// What may be shown of `spec` (see [`open`]) to anyone: all of it, as it is written, if no part of it
/// may be a secret.
pub fn redact(spec: &str) -> String {
    let Some(colon) = spec.find("://") else {
        return spec.to_owned();
    };
    let before = spec.get(..colon).unwrap_or_default();
    // What it is in, if it is an image or a part: `tar:https://...`.
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
        // Nobody can tell what of it is a secret.
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
    // The task ends without a result only when the runtime goes away.
    let done = tokio::task::spawn_blocking(opening).await;
    done.unwrap_or_else(|_| Err(Error::new("the file", Cause::Cancelled)))
}

/// Whether `spec` is probably a URL without its scheme: it names a host, and nothing here.
pub fn lacks_scheme(spec: &str) -> bool {
    with_scheme(spec).is_some()
}

/// The URL that `name` probably means, if it has the form of a host and a path.
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

/// Bytes of one piece of [`stream_by_ranges`].
const PIECE_LEN: u64 = 1 << 20;

/// A source with ranges from the front, one range after the other: for its [`Source::stream`].
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
