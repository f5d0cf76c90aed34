//! HTTP server for Prometheus: `GET /metrics` over HTTP/1.1, one request per connection.
//!
//! No client is trusted. Request heads are limited in bytes and headers, connections in number and time. A
//! request only takes a snapshot of counters.

use std::io;
use std::net::{self, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::failure::Failure;
use super::prometheus::{CONTENT_TYPE, render};
use super::status::Status;

/// Maximum length of a request's head. Prometheus sends a few hundred bytes.
const MAX_HEAD_BYTES: usize = 8 << 10;
const MAX_HEADERS: usize = 64;
/// Pause when the system has no file descriptor for a connection.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

const METRICS_PATH: &str = "/metrics";

/// Requests the statuses of all mounts of this process. The channel closes if there is none.
type StatusRequester = Arc<dyn Fn() -> oneshot::Receiver<Vec<Status>> + Send + Sync>;

#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Maximum number of connections. Later ones wait in the kernel's queue.
    max_connections: usize,
    /// Timeout for the request and its response, and again for the client to close.
    client_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 16,
            client_timeout: Duration::from_secs(5),
        }
    }
}

/// A bound address that is not served yet, so that connections wait.
#[derive(Debug)]
pub struct MetricsListener {
    listener: net::TcpListener,
    address: SocketAddr,
}

impl MetricsListener {
    /// Binds `address`; port 0 is any free port.
    ///
    /// # Errors
    /// If it cannot be bound.
    pub fn bind(address: SocketAddr) -> Result<Self, Failure> {
        let failed = |error| Failure::to(format!("cannot serve metrics at {address}"), &error);
        let listener = net::TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    /// URL of the metrics.
    pub fn url(&self) -> String {
        format!("http://{}{METRICS_PATH}", self.address)
    }

    /// Responds on the threads of `network` with the statuses from `request_status`, until the returned task is dropped. It
    /// accepts connections, and owns their tasks.
    ///
    /// # Errors
    /// If the system has no more descriptors.
    pub fn serve(
        self,
        network: &Handle,
        request_status: impl Fn() -> oneshot::Receiver<Vec<Status>> + Send + Sync + 'static,
    ) -> io::Result<JoinSet<()>> {
        self.serve_with_limits(Limits::default(), network, Arc::new(request_status))
    }

    fn serve_with_limits(
        self,
        limits: Limits,
        network: &Handle,
        request_status: StatusRequester,
    ) -> io::Result<JoinSet<()>> {
        self.listener.set_nonblocking(true)?;
        let _within = network.enter();
        let listener = TcpListener::from_std(self.listener)?;
        let mut acceptor = JoinSet::new();
        acceptor.spawn_on(accept_loop(listener, limits, request_status), network);
        Ok(acceptor)
    }
}

/// A page of metrics, which is served until it is dropped.
#[derive(Debug)]
pub(super) struct MetricsPage {
    /// Its URL.
    pub(super) url: String,
    _acceptor: JoinSet<()>,
}

impl MetricsPage {
    /// As [`MetricsListener::serve`].
    pub(super) fn serve(
        listener: MetricsListener,
        network: &Handle,
        request_status: impl Fn() -> oneshot::Receiver<Vec<Status>> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Ok(Self {
            url: listener.url(),
            _acceptor: listener.serve(network, request_status)?,
        })
    }
}

async fn accept_loop(listener: TcpListener, limits: Limits, request_status: StatusRequester) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= limits.max_connections {
            connections.join_next().await;
            continue;
        }
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(handle_connection(
                    stream,
                    limits.client_timeout,
                    Arc::clone(&request_status),
                ));
            }
            Err(error) => {
                tracing::debug!(%error, "a connection for metrics was not accepted");
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn handle_connection(
    mut stream: TcpStream,
    client_timeout: Duration,
    request_status: StatusRequester,
) {
    match timeout(client_timeout, respond(&mut stream, &request_status)).await {
        // With unread bytes, closing would reset the connection and discard the response.
        Ok(Ok(())) => drop(timeout(client_timeout, drain(&mut stream)).await),
        Ok(Err(error)) => tracing::debug!(%error, "metrics could not be sent"),
        Err(_) => tracing::debug!("a metrics client timed out"),
    }
}

async fn respond(stream: &mut TcpStream, request_status: &StatusRequester) -> io::Result<()> {
    let Some(route) = read_head(stream).await? else {
        return Ok(());
    };
    let response = match route {
        Route::Metrics => match request_status().await {
            Ok(statuses) => ok_response(&render(&statuses)),
            Err(_) => error_response(SERVICE_UNAVAILABLE),
        },
        Route::Error(why) => error_response(why),
    };
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    Metrics,
    /// Respond with this status line, which may include a header.
    Error(&'static str),
}

const BAD_REQUEST: &str = "400 Bad Request";
const NOT_FOUND: &str = "404 Not Found";
const METHOD_NOT_ALLOWED: &str = "405 Method Not Allowed\r\nAllow: GET";
const HEADERS_TOO_LARGE: &str = "431 Request Header Fields Too Large";
const SERVICE_UNAVAILABLE: &str = "503 Service Unavailable";

/// Reads a request up to its first empty line; `None` if the client closes.
async fn read_head(stream: &mut TcpStream) -> io::Result<Option<Route>> {
    let mut head = Vec::with_capacity(MAX_HEAD_BYTES);
    while head.len() < MAX_HEAD_BYTES {
        let room = MAX_HEAD_BYTES - head.len();
        if (&mut *stream).take(room as u64).read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
        if let Some(route) = parse_request(&head) {
            return Ok(Some(route));
        }
    }
    Ok(Some(Route::Error(HEADERS_TOO_LARGE)))
}

/// Decides about a request that begins with `head`; `None` if more bytes are needed.
fn parse_request(head: &[u8]) -> Option<Route> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) => return None,
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Some(Route::Error(HEADERS_TOO_LARGE)),
        Err(_) => return Some(Route::Error(BAD_REQUEST)),
    }
    let target = request.path.unwrap_or_default();
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    Some(match (path, request.method) {
        (METRICS_PATH, Some("GET")) => Route::Metrics,
        (METRICS_PATH, _) => Route::Error(METHOD_NOT_ALLOWED),
        _ => Route::Error(NOT_FOUND),
    })
}

fn ok_response(text: &str) -> String {
    let len = text.len();
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len}\r\n\
         Connection: close\r\n\r\n{text}"
    )
}

/// Formats an error without a body, which a response to HEAD must not have.
fn error_response(status_line: &str) -> String {
    format!("HTTP/1.1 {status_line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

async fn drain(stream: &mut TcpStream) -> io::Result<()> {
    let mut discarded = [0; 1024];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    /// A server on a free port. Its status has the number of requests as entries.
    struct TestServer {
        address: SocketAddr,
        request_count: Arc<AtomicU64>,
        serving: Option<JoinSet<()>>,
        network: Runtime,
    }

    impl TestServer {
        fn new(limits: Limits) -> Self {
            let network = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime");
            let metrics = MetricsListener::bind(any_port()).expect("a free port");
            let address = metrics.address;
            let request_count = Arc::<AtomicU64>::default();
            let counted = Arc::clone(&request_count);
            let request_status: StatusRequester = Arc::new(move || {
                let (sender, status) = oneshot::channel();
                let entries = counted.fetch_add(1, Ordering::SeqCst) + 1;
                // The receiver exists, so this cannot fail.
                drop(sender.send(vec![Status {
                    entries,
                    ..Status::example()
                }]));
                status
            });
            let serving = metrics.serve_with_limits(limits, network.handle(), request_status);
            Self {
                address,
                request_count,
                serving: Some(serving.expect("watched")),
                network,
            }
        }

        fn connect(&self) -> net::TcpStream {
            let stream = net::TcpStream::connect(self.address).expect("listening");
            let long = Some(Duration::from_secs(20));
            stream.set_read_timeout(long).expect("set");
            stream
        }

        fn answer(&self, request: &[u8]) -> String {
            let mut stream = self.connect();
            stream.write_all(request).expect("taken");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("answered");
            answer
        }

        fn request_count(&self) -> u64 {
            self.request_count.load(Ordering::SeqCst)
        }
    }

    fn any_port() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

    // Promises: metrics-format
    #[test]
    fn each_request_gets_a_fresh_snapshot() {
        let server = TestServer::new(Limits::default());
        for number in 1..=3 {
            let answer = server.answer(GET);
            let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            assert!(head.contains(&format!("\r\nContent-Type: {CONTENT_TYPE}\r\n")));
            assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
            let entries = format!("\ntarfs_entries{{mountpoint=\"/mnt\"}} {number}\n");
            assert!(body.contains(&entries), "{body}");
        }
    }

    // Promises: metrics-address, metrics-limits
    #[test]
    fn only_get_metrics_requests_a_status() {
        let server = TestServer::new(Limits::default());
        for (request, line) in [
            ("GET / HTTP/1.1\r\n\r\n", NOT_FOUND),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", NOT_FOUND),
            ("POST /status HTTP/1.1\r\n\r\n", NOT_FOUND),
            ("GET http://localhost/metrics HTTP/1.1\r\n\r\n", NOT_FOUND),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", METHOD_NOT_ALLOWED),
            ("POST /metrics HTTP/1.1\r\n\r\n", METHOD_NOT_ALLOWED),
            ("get /metrics HTTP/1.1\r\n\r\n", METHOD_NOT_ALLOWED),
            ("GET /metrics HTTP/2.0\r\n\r\n", BAD_REQUEST),
            ("GET\r\n\r\n", BAD_REQUEST),
            ("\0\u{1}\u{2}", BAD_REQUEST),
        ] {
            let answer = server.answer(request.as_bytes());
            let expected = format!("HTTP/1.1 {line}\r\nContent-Length: 0\r\nConnection: close");
            assert!(answer.starts_with(&expected), "{request}: {answer}");
            assert!(answer.ends_with("\r\n\r\n"), "{request}: {answer}");
        }
        assert_eq!(server.request_count(), 0);
        let answer = server.answer(b"GET /metrics?name=x HTTP/1.0\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(server.request_count(), 1);
    }

    // Promises: metrics-limits
    #[test]
    fn response_survives_an_unread_request_body() {
        let server = TestServer::new(Limits {
            client_timeout: Duration::from_hours(1),
            ..Limits::default()
        });
        let mut stream = server.connect();
        stream
            .write_all(b"POST /metrics HTTP/1.1\r\n\r\nbody")
            .expect("taken");
        let mut line = [0; 12];
        stream.read_exact(&mut line).expect("answered");
        assert_eq!(&line, b"HTTP/1.1 405");
        // A reset would make these writes fail, and discard unread bytes.
        for _ in 0..1000 {
            stream.write_all(&[b'x'; 100]).expect("taken");
            std::thread::yield_now();
        }
        let mut rest = String::new();
        stream.read_to_string(&mut rest).expect("answered");
        assert!(rest.ends_with("\r\n\r\n"), "{rest}");
    }

    // Promises: metrics-limits
    #[test]
    fn request_head_size_is_limited() {
        let server = TestServer::new(Limits::default());
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(MAX_HEAD_BYTES));
        let many = format!(
            "GET /metrics HTTP/1.1\r\n{}\r\n",
            "x: y\r\n".repeat(MAX_HEADERS + 1)
        );
        for request in [long, many] {
            let answer = server.answer(request.as_bytes());
            assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
        }
        let most = format!(
            "GET /metrics HTTP/1.1\r\n{}\r\n",
            "x: y\r\n".repeat(MAX_HEADERS)
        );
        assert!(server.answer(most.as_bytes()).starts_with("HTTP/1.1 200"));
        assert_eq!(server.request_count(), 1);
    }

    // Promises: metrics-limits
    #[test]
    fn partial_request_is_undecided_and_garbage_is_harmless() {
        for len in 0..GET.len() {
            assert_eq!(parse_request(&GET[..len]), None);
        }
        assert_eq!(parse_request(GET), Some(Route::Metrics));
        for at in 0..GET.len() {
            for byte in 0..=255 {
                let mut request = GET.to_vec();
                request[at] = byte;
                // The result does not matter, but there must be no panic.
                let _verdict = parse_request(&request);
            }
        }
    }

    // Promises: metrics-limits
    #[test]
    fn silent_client_is_disconnected_after_the_timeout() {
        let server = TestServer::new(Limits {
            client_timeout: Duration::from_millis(50),
            ..Limits::default()
        });
        let mut silent = server.connect();
        silent
            .write_all(b"GET /metrics HTTP/1.1\r\n")
            .expect("taken");
        let mut answer = Vec::new();
        // Closed, with or without a reset.
        if let Err(error) = silent.read_to_end(&mut answer) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
        assert_eq!(answer, b"");
        assert_eq!(server.request_count(), 0);
    }

    // Promises: metrics-limits
    #[test]
    fn connections_over_the_limit_wait_for_a_free_slot() {
        let server = TestServer::new(Limits {
            max_connections: 2,
            client_timeout: Duration::from_hours(1),
        });
        let mut silent = vec![server.connect(), server.connect()];
        let mut third = server.connect();
        third.write_all(GET).expect("taken by the kernel");
        third
            .set_read_timeout(Some(Duration::from_millis(100)))
            .expect("set");
        let early = third.read(&mut [0; 1]).expect_err("nothing yet");
        assert_eq!(early.kind(), ErrorKind::WouldBlock);
        assert_eq!(server.request_count(), 0);
        silent.pop();
        third
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("set");
        let mut answer = String::new();
        third.read_to_string(&mut answer).expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(server.request_count(), 1);
    }

    // Promises: metrics-address
    #[test]
    fn early_client_waits_and_late_client_gets_an_error() {
        let mut server = TestServer::new(Limits::default());
        let metrics = MetricsListener::bind(any_port()).expect("a free port");
        server.address = metrics.address;
        let mut early = server.connect();
        early.write_all(GET).expect("taken by the kernel");
        let no_status = || oneshot::channel().1;
        let serving = metrics.serve(server.network.handle(), no_status);
        server.serving = Some(serving.expect("watched"));
        let mut answer = String::new();
        early.read_to_string(&mut answer).expect("answered");
        // No status is available any more.
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    }

    // Promises: metrics-address
    #[test]
    fn address_in_use_fails_and_is_free_after_serving() {
        let mut server = TestServer::new(Limits::default());
        let error = MetricsListener::bind(server.address).expect_err("taken");
        let text = format!("{error:#}");
        assert!(
            text.starts_with(&format!("cannot serve metrics at {}: ", server.address)),
            "{text}"
        );
        server.serving = None;
        let start = std::time::Instant::now();
        while let Err(error) = MetricsListener::bind(server.address) {
            assert!(start.elapsed() < Duration::from_secs(10), "{error:#}");
            std::thread::yield_now();
        }
    }
}
