//! Transport of requests: the network, or its replacement in tests.

mod certificates;
mod client_certificate;
mod connect_time;
mod proxies;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use http_body::Frame;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::HeaderMap;
use reqwest::redirect::Policy;
use reqwest::{Body, Method, Response, StatusCode};
use url::Url;

use self::certificates::SystemCertificates;
use self::connect_time::ConnectTimer;
use self::proxies::Proxies;
use crate::base::descriptor_limit::{check_descriptor_limit, is_descriptor_limit};
use crate::base::sync::Mutex;
use crate::source::location::is_own_address;
use crate::source::location::may_identify;
use crate::source::{Cause, Obstacle, Options};

pub use self::certificates::{Certificates, CertificatesError};
pub use self::client_certificate::{ClientCertificate, ClientCertificateError};

/// Maximum number of header lines of a response. The parser reserves memory for them.
const MAX_HEADER_LINES: usize = 500;

/// Descriptors that the system's resolver opens at once.
const RESOLVER_DESCRIPTORS: usize = 2;

/// Sends requests and returns responses unchecked.
pub trait Transport: Send + Sync + fmt::Debug {
    /// Sends a request without following redirects, and returns when the head is received, whatever its
    /// status. The caller applies the timeouts.
    ///
    /// # Errors
    /// If no response arrives, or the error of `body`, whose length is in `headers`.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the request, and dropping the content the rest of the response.
    fn send(
        &self,
        method: Method,
        url: Url,
        headers: HeaderMap,
        body: Option<Content>,
    ) -> BoxFuture<'_, Result<RawResponse, Cause>>;

    /// Time to establish a connection; zero if unknown.
    fn connect_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Creates a transport without state of earlier requests, for requests to `url`.
    ///
    /// # Errors
    /// If it cannot be created.
    fn reconnect(&self, url: &Url, options: &Options) -> Result<Box<dyn Transport>, Cause>;
}

/// A response with unread content.
#[derive(Debug)]
pub struct RawResponse {
    /// Status code.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// The body.
    pub content: Content,
}

/// The body of a request or response as a stream.
pub struct Content(Mutex<BoxStream<'static, Result<Bytes, Cause>>>);

impl Content {
    /// Wraps `pieces`, which end with the first error.
    pub fn new(pieces: impl Stream<Item = Result<Bytes, Cause>> + Send + 'static) -> Self {
        Self(Mutex::new(pieces.boxed()))
    }

    /// Lets `bytes`, which came from it, come again, before the rest if it has not ended.
    pub(crate) fn put_back(&mut self, bytes: Bytes, has_ended: bool) {
        let rest = std::mem::replace(self.0.get_mut(), stream::empty().boxed());
        let rest = if has_ended {
            stream::empty().boxed()
        } else {
            rest
        };
        *self.0.get_mut() = stream::iter([Ok(bytes)]).chain(rest).boxed();
    }

    /// Waits for the next bytes; `None` at the end. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Cause> {
        self.0.get_mut().next().await.transpose()
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").finish_non_exhaustive()
    }
}

/// The network. Clones share their connections.
#[derive(Clone, Debug)]
pub(crate) struct NetworkTransport {
    client: reqwest::Client,
    /// A client with the user's certificate, and the URL whose origin may see it.
    identified: Option<(Url, reqwest::Client)>,
    connect_timer: ConnectTimer,
    /// The proxies, to name them in errors.
    proxies: Option<Arc<Proxies>>,
}

impl NetworkTransport {
    /// Connections with `options`. Only the origin of `url` gets their client certificate.
    pub(crate) fn new(url: &Url, options: &Options) -> Result<Self, Cause> {
        let connect_timer = ConnectTimer::default();
        let proxies = Proxies::of(&options.environment);
        let build = |certificate| {
            build_client(
                options,
                certificate,
                connect_timer.clone(),
                proxies.as_ref(),
            )
        };
        let certificate = options.identity.certificate.as_ref();
        let identified = certificate.map(|_| build(certificate)).transpose()?;
        Ok(Self {
            client: build(None)?,
            identified: identified.map(|client| (url.clone(), client)),
            connect_timer,
            proxies,
        })
    }

    /// Connections to servers of credentials.
    pub(crate) fn for_credentials(options: &Options, is_local: bool) -> Result<Self, Cause> {
        let connect_timer = ConnectTimer::default();
        let proxies = Proxies::of(&options.environment).filter(|_| !is_local);
        Ok(Self {
            client: build_client(options, None, connect_timer.clone(), proxies.as_ref())?,
            identified: None,
            connect_timer,
            proxies,
        })
    }

    /// The cause of a request to `url` that got no answer.
    fn failure(&self, url: &Url, error: &reqwest::Error) -> Cause {
        let cause = classify_error(error);
        let proxy = self.proxies.as_ref().and_then(|proxies| proxies.find(url));
        match proxy.filter(|_| error.is_connect() && cause.is_outage()) {
            Some(proxy) => Cause::Unreachable {
                obstacle: Obstacle::Proxy,
                detail: format!("{}: {cause}", proxy.host_str().unwrap_or_default()),
            },
            None => cause,
        }
    }

    fn client(&self, url: &Url) -> &reqwest::Client {
        match &self.identified {
            Some((original, client)) if may_identify(url, original) => client,
            _ => &self.client,
        }
    }
}

impl Transport for NetworkTransport {
    fn send(
        &self,
        method: Method,
        url: Url,
        headers: HeaderMap,
        body: Option<Content>,
    ) -> BoxFuture<'_, Result<RawResponse, Cause>> {
        Box::pin(async move {
            let client = self.client(&url);
            let mut request = client.request(method, url.clone()).headers(headers);
            if let Some(body) = body {
                request = request.body(Body::wrap(body));
            }
            let sent = request.send().await;
            let mut response = sent.map_err(|error| self.failure(&url, &error))?;
            Ok(RawResponse {
                status: response.status(),
                headers: std::mem::take(response.headers_mut()),
                content: Content::new(body_stream(response)),
            })
        })
    }

    fn connect_time(&self) -> Duration {
        self.connect_timer.fastest()
    }

    fn reconnect(&self, url: &Url, options: &Options) -> Result<Box<dyn Transport>, Cause> {
        Ok(Box::new(Self::new(url, options)?))
    }
}

impl http_body::Body for Content {
    type Data = Bytes;
    type Error = Cause;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cause>>> {
        let next = self.get_mut().0.get_mut().poll_next_unpin(context);
        next.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

fn body_stream(response: Response) -> impl Stream<Item = Result<Bytes, Cause>> + Send {
    stream::unfold(Some(response), |response| async {
        let mut response = response?;
        match response.chunk().await {
            Ok(piece) => piece.map(|piece| (Ok(piece), Some(response))),
            Err(error) => Some((Err(classify_error(&error)), None)),
        }
    })
}

fn build_client(
    options: &Options,
    certificate: Option<&ClientCertificate>,
    connect_timer: ConnectTimer,
    proxies: Option<&Arc<Proxies>>,
) -> Result<reqwest::Client, Cause> {
    // An error means that the process already has a provider, which works too.
    drop(rustls::crypto::ring::default_provider().install_default());
    let unusable = |error: &(dyn StdError + 'static)| Cause::Unreachable {
        obstacle: Obstacle::Tls,
        detail: root_cause(error).to_string(),
    };
    let client = certificate.map(ClientCertificate::resolver);
    let system = SystemCertificates::of(&options.environment);
    let tls = certificates::client_config(&options.certificates, system, client);
    let tls = tls.map_err(|error| unusable(&error))?;
    // HTTP/1.1 moves more bytes per CPU second than HTTP/2. Bodies are not decoded. `Client` follows redirects
    // itself, because it knows to which origin the headers belong.
    let client = reqwest::Client::builder()
        .http1_only()
        .http1_allow_spaces_after_header_name_in_responses(true)
        .http1_allow_obsolete_multiline_headers_in_responses(true)
        .http1_ignore_invalid_headers_in_responses(true)
        .http1_max_headers(MAX_HEADER_LINES)
        .redirect(Policy::none())
        .referer(false)
        .user_agent(concat!("tarfs/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(options.connect_timeout.min(options.timeout / 2))
        .pool_max_idle_per_host(options.connections)
        .tls_backend_preconfigured(tls)
        .connector_layer(connect_timer)
        .no_proxy();
    let client = match proxies.map(Arc::clone) {
        Some(proxies) => client.proxy(reqwest::Proxy::custom(move |url| {
            proxies.find(url).cloned()
        })),
        None => client,
    };
    let client = if options.is_public_only {
        client.dns_resolver(PublicResolver::new(options))
    } else {
        client
    };
    let built = client.build();
    built.map_err(|error| unusable(&error))
}

/// Resolves names to addresses outside the own network.
#[derive(Debug)]
struct PublicResolver {
    /// Hosts that the user chose, of proxies.
    chosen: Vec<String>,
}

impl PublicResolver {
    fn new(options: &Options) -> Arc<Self> {
        let proxies = Proxies::of(&options.environment);
        let proxies = proxies.iter().flat_map(|proxies| proxies.urls());
        let via = options.via.iter().map(|via| &via.prefix);
        let hosts = proxies.chain(via).filter_map(Url::host_str);
        Arc::new(Self {
            chosen: hosts.map(str::to_owned).collect(),
        })
    }
}

impl Resolve for PublicResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let name = name.as_str().to_owned();
        let is_chosen = self.chosen.contains(&name);
        Box::pin(async move {
            let found = tokio::net::lookup_host((&*name, 0)).await?;
            let is_usable = |found: &SocketAddr| is_chosen || !is_own_address(found.ip());
            let usable: Vec<_> = found.filter(is_usable).collect();
            if usable.is_empty() {
                return Err(Cause::OwnNetwork(name).into());
            }
            Ok(Box::new(usable.into_iter()) as Addrs)
        })
    }
}

/// Classifies a failed request. The result omits the URL, which may contain secrets.
pub(crate) fn classify_error(error: &reqwest::Error) -> Cause {
    if let Some(cause) = error_chain(error).find_map(<dyn StdError>::downcast_ref::<Cause>) {
        // The body of the request cannot be read.
        return cause.clone();
    }
    // The resolver of the system takes a missing descriptor for a missing name.
    let of_resolver = || check_descriptor_limit(RESOLVER_DESCRIPTORS).err();
    let limit = match error_chain(error).find(|&link| is_descriptor_limit(link)) {
        Some(limit) => Some(limit.to_string()),
        None if error.is_dns() => of_resolver().map(|limit| limit.to_string()),
        None => None,
    };
    if let Some(limit) = limit {
        return Cause::DescriptorLimit(limit);
    }
    let obstacle = if error.is_timeout() {
        Obstacle::Timeout
    } else if error.is_dns() {
        Obstacle::Dns
    } else if let Some(error) = error_chain(error).find_map(<dyn StdError>::downcast_ref) {
        match error {
            rustls::Error::InvalidCertificate(error) => {
                let (obstacle, detail) = certificates::describe(error);
                return Cause::Unreachable { obstacle, detail };
            }
            rustls::Error::NoCertificatesPresented => Obstacle::Certificate,
            _ => Obstacle::Tls,
        }
    } else if io_kind(error) == Some(io::ErrorKind::ConnectionRefused) {
        Obstacle::Refused
    } else if error.is_body() || error.is_decode() {
        // A connection closed cleanly but too early leaves no I/O error.
        match io_kind(error) {
            None | Some(io::ErrorKind::UnexpectedEof) => return Cause::Truncated,
            Some(_) => Obstacle::Connection,
        }
    } else {
        Obstacle::Connection
    };
    Cause::Unreachable {
        obstacle,
        detail: root_cause(error).to_string(),
    }
}

fn io_kind(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
    error_chain(error)
        .filter_map(|link| link.downcast_ref::<io::Error>())
        .last()
        .map(io::Error::kind)
}

fn root_cause<'a>(error: &'a (dyn StdError + 'static)) -> &'a (dyn StdError + 'static) {
    error_chain(error).last().unwrap_or(error)
}

/// Iterates over the error and its causes, including one that an [`io::Error`] or TLS wraps and skips.
fn error_chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&link| {
        let wrapped = link
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        if let Some(rustls::Error::Other(other)) = link.downcast_ref() {
            return Some(&*other.0 as &(dyn StdError + 'static));
        }
        match wrapped {
            Some(wrapped) => Some(wrapped as &(dyn StdError + 'static)),
            None => link.source(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: registry-foreign
    #[test]
    fn name_with_an_address_of_the_own_network_is_not_asked() {
        let network = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let url = Url::parse(&format!("http://localhost:{port}/")).expect("well-formed");
        let options = Options {
            is_public_only: true,
            ..Options::default()
        };
        let transport = NetworkTransport::new(&url, &options).expect("a client");
        let sent = transport.send(Method::GET, url, HeaderMap::new(), None);
        let refused = network.block_on(sent).expect_err("not asked");
        assert!(
            matches!(&refused, Cause::OwnNetwork(name) if name == "localhost"),
            "{refused}"
        );
        listener.set_nonblocking(true).expect("set");
        assert!(listener.accept().is_err(), "no connection");
    }
}
