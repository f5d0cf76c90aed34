//! Where Prometheus fetches a mount's figures: `GET /metrics` by HTTP/1.1, a request a connection.
//!
//! Whoever can connect may ask, and is not trusted: heads are bounded in bytes and headers,
//! connections in number and time, and a request can do no more than take a snapshot of counters.

use std::io;
use std::net::{self, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::control::Status;
use super::exposition::{CONTENT_TYPE, exposition};

/// Longest head of a request; Prometheus' has a few hundred bytes.
const MAX_HEAD_BYTES: usize = 8 << 10;
/// Headers of a request.
const MAX_HEADERS: usize = 64;
/// How long to pause when the system has no descriptor left for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// The only path there is.
const PATH: &str = "/metrics";

/// Asks for a status; the channel closes when there is none.
type Ask = Arc<dyn Fn() -> oneshot::Receiver<Status> + Send + Sync>;

/// What clients may cost.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Connections at once; who comes later waits in the kernel's queue.
    connections: usize,
    /// How long a client may take to ask and be answered, and then again to hang up.
    patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            patience: Duration::from_secs(5),
        }
    }
}

/// An address that is bound, and not yet served: connections wait.
#[derive(Debug)]
pub(super) struct Metrics {
    listener: net::TcpListener,
    address: SocketAddr,
}

/// Serves while it lives.
#[derive(Debug)]
pub(super) struct Serving {
    /// One task, which owns those of the connections.
    _acceptor: JoinSet<()>,
}

impl Metrics {
    /// Takes `address`; port 0 is any that is free.
    ///
    /// # Errors
    /// When it is taken, or none of this machine's.
    pub(super) fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = net::TcpListener::bind(address)
            .with_context(|| format!("cannot serve metrics at {address}"))?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Where the figures are.
    pub(super) fn url(&self) -> String {
        format!("http://{}{PATH}", self.address)
    }

    /// Answers on the threads of `network` with what `ask` brings.
    ///
    /// # Errors
    /// When the runtime cannot watch the socket.
    pub(super) fn serve(
        self,
        network: &Handle,
        ask: impl Fn() -> oneshot::Receiver<Status> + Send + Sync + 'static,
    ) -> io::Result<Serving> {
        self.serve_within(Limits::default(), network, Arc::new(ask))
    }

    fn serve_within(self, limits: Limits, network: &Handle, ask: Ask) -> io::Result<Serving> {
        self.listener.set_nonblocking(true)?;
        let _within = network.enter();
        let listener = TcpListener::from_std(self.listener)?;
        let mut acceptor = JoinSet::new();
        acceptor.spawn_on(accept(listener, limits, ask), network);
        Ok(Serving {
            _acceptor: acceptor,
        })
    }
}

async fn accept(listener: TcpListener, limits: Limits, ask: Ask) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= limits.connections {
            connections.join_next().await;
            continue;
        }
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(attend(stream, limits.patience, Arc::clone(&ask)));
            }
            Err(error) => {
                tracing::debug!(%error, "a connection for metrics was not accepted");
                sleep(PAUSE).await;
            }
        }
    }
}

async fn attend(mut stream: TcpStream, patience: Duration, ask: Ask) {
    match timeout(patience, answer(&mut stream, &ask)).await {
        // With bytes unread, closing would reset the connection and take the answer away.
        Ok(Ok(())) => drop(timeout(patience, forget(&mut stream)).await),
        Ok(Err(error)) => tracing::debug!(%error, "metrics could not be sent"),
        Err(_) => tracing::debug!("who asked for metrics took too long"),
    }
}

async fn answer(stream: &mut TcpStream, ask: &Ask) -> io::Result<()> {
    let Some(verdict) = read_head(stream).await? else {
        return Ok(());
    };
    let response = match verdict {
        Verdict::Figures => match ask().await {
            Ok(status) => figures(&exposition(&status)),
            Err(_) => refusal(UNMOUNTED),
        },
        Verdict::Refused(why) => refusal(why),
    };
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await
}

/// What becomes of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    /// It gets what it wants.
    Figures,
    /// It gets this status line, and perhaps a header.
    Refused(&'static str),
}

const MALFORMED: &str = "400 Bad Request";
const ELSEWHERE: &str = "404 Not Found";
const NOT_GET: &str = "405 Method Not Allowed\r\nAllow: GET";
const TOO_LARGE: &str = "431 Request Header Fields Too Large";
const UNMOUNTED: &str = "503 Service Unavailable";

/// Reads a request up to its first empty line and judges it; `None` when the client hangs up.
async fn read_head(stream: &mut TcpStream) -> io::Result<Option<Verdict>> {
    let mut head = Vec::with_capacity(MAX_HEAD_BYTES);
    while head.len() < MAX_HEAD_BYTES {
        let room = MAX_HEAD_BYTES - head.len();
        if (&mut *stream).take(room as u64).read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
        if let Some(verdict) = judge(&head) {
            return Ok(Some(verdict));
        }
    }
    Ok(Some(Verdict::Refused(TOO_LARGE)))
}

/// What to do about a request that begins with `head`; `None` until that is certain.
fn judge(head: &[u8]) -> Option<Verdict> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) => return None,
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Some(Verdict::Refused(TOO_LARGE)),
        Err(_) => return Some(Verdict::Refused(MALFORMED)),
    }
    let target = request.path.unwrap_or_default();
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    Some(match (path, request.method) {
        (PATH, Some("GET")) => Verdict::Figures,
        (PATH, _) => Verdict::Refused(NOT_GET),
        _ => Verdict::Refused(ELSEWHERE),
    })
}

fn figures(text: &str) -> String {
    let len = text.len();
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len}\r\n\
         Connection: close\r\n\r\n{text}"
    )
}

/// Without a body, which an answer to HEAD must not have.
fn refusal(why: &str) -> String {
    format!("HTTP/1.1 {why}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

/// Reads on until the client hangs up; what comes is not kept.
async fn forget(stream: &mut TcpStream) -> io::Result<()> {
    let mut waste = [0; 1024];
    while stream.read(&mut waste).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    /// A listener on a port of its own, which tells how often it was asked as the number of
    /// entries.
    struct Place {
        address: SocketAddr,
        asked: Arc<AtomicU64>,
        serving: Option<Serving>,
        network: Runtime,
    }

    impl Place {
        fn new(limits: Limits) -> Self {
            let network = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime");
            let metrics = Metrics::bind(any_port()).expect("a free port");
            let address = metrics.address;
            let asked = Arc::<AtomicU64>::default();
            let counted = Arc::clone(&asked);
            let ask: Ask = Arc::new(move || {
                let (sender, status) = oneshot::channel();
                let entries = counted.fetch_add(1, Ordering::SeqCst) + 1;
                // Who asks is there.
                drop(sender.send(Status {
                    entries,
                    ..Status::example()
                }));
                status
            });
            let serving = metrics.serve_within(limits, network.handle(), ask);
            Self {
                address,
                asked,
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

        /// What is answered to `request`, until the connection is closed.
        fn answer(&self, request: &[u8]) -> String {
            let mut stream = self.connect();
            stream.write_all(request).expect("taken");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("answered");
            answer
        }

        fn asked(&self) -> u64 {
            self.asked.load(Ordering::SeqCst)
        }
    }

    fn any_port() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

    #[test]
    fn each_request_gets_the_figures_of_its_moment() {
        let place = Place::new(Limits::default());
        for number in 1..=3 {
            let answer = place.answer(GET);
            let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            assert!(head.contains(&format!("\r\nContent-Type: {CONTENT_TYPE}\r\n")));
            assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
            let entries = format!("\ntarfs_entries{{mountpoint=\"/mnt\"}} {number}\n");
            assert!(body.contains(&entries), "{body}");
        }
    }

    #[test]
    fn anything_but_get_metrics_is_refused_and_nobody_is_asked() {
        let place = Place::new(Limits::default());
        for (request, line) in [
            ("GET / HTTP/1.1\r\n\r\n", ELSEWHERE),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", ELSEWHERE),
            ("POST /status HTTP/1.1\r\n\r\n", ELSEWHERE),
            ("GET http://localhost/metrics HTTP/1.1\r\n\r\n", ELSEWHERE),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", NOT_GET),
            ("POST /metrics HTTP/1.1\r\n\r\n", NOT_GET),
            ("get /metrics HTTP/1.1\r\n\r\n", NOT_GET),
            ("GET /metrics HTTP/2.0\r\n\r\n", MALFORMED),
            ("GET\r\n\r\n", MALFORMED),
            ("\0\u{1}\u{2}", MALFORMED),
        ] {
            let answer = place.answer(request.as_bytes());
            let expected = format!("HTTP/1.1 {line}\r\nContent-Length: 0\r\nConnection: close");
            assert!(answer.starts_with(&expected), "{request}: {answer}");
            assert!(answer.ends_with("\r\n\r\n"), "{request}: {answer}");
        }
        assert_eq!(place.asked(), 0);
        let answer = place.answer(b"GET /metrics?name=x HTTP/1.0\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(place.asked(), 1);
    }

    #[test]
    fn an_answer_outlives_a_body_that_nobody_reads() {
        let place = Place::new(Limits {
            patience: Duration::from_hours(1),
            ..Limits::default()
        });
        let mut stream = place.connect();
        stream
            .write_all(b"POST /metrics HTTP/1.1\r\n\r\nbody")
            .expect("taken");
        let mut line = [0; 12];
        stream.read_exact(&mut line).expect("answered");
        assert_eq!(&line, b"HTTP/1.1 405");
        // A reset would make these fail, and take away what is not read yet.
        for _ in 0..1000 {
            stream.write_all(&[b'x'; 100]).expect("taken");
            std::thread::yield_now();
        }
        let mut rest = String::new();
        stream.read_to_string(&mut rest).expect("answered");
        assert!(rest.ends_with("\r\n\r\n"), "{rest}");
    }

    #[test]
    fn heads_are_bounded() {
        let place = Place::new(Limits::default());
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(MAX_HEAD_BYTES));
        let many = format!(
            "GET /metrics HTTP/1.1\r\n{}\r\n",
            "x: y\r\n".repeat(MAX_HEADERS + 1)
        );
        for request in [long, many] {
            let answer = place.answer(request.as_bytes());
            assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
        }
        let most = format!(
            "GET /metrics HTTP/1.1\r\n{}\r\n",
            "x: y\r\n".repeat(MAX_HEADERS)
        );
        assert!(place.answer(most.as_bytes()).starts_with("HTTP/1.1 200"));
        assert_eq!(place.asked(), 1);
    }

    #[test]
    fn any_beginning_of_a_request_is_undecided_and_no_bytes_do_harm() {
        for len in 0..GET.len() {
            assert_eq!(judge(&GET[..len]), None);
        }
        assert_eq!(judge(GET), Some(Verdict::Figures));
        for at in 0..GET.len() {
            for byte in 0..=255 {
                let mut request = GET.to_vec();
                request[at] = byte;
                // Whatever it is, it is no panic.
                let _verdict = judge(&request);
            }
        }
    }

    #[test]
    fn who_says_nothing_is_hung_up_on() {
        let place = Place::new(Limits {
            patience: Duration::from_millis(50),
            ..Limits::default()
        });
        let mut silent = place.connect();
        silent
            .write_all(b"GET /metrics HTTP/1.1\r\n")
            .expect("taken");
        let mut answer = Vec::new();
        // Closed, with or without a reset.
        if let Err(error) = silent.read_to_end(&mut answer) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
        assert_eq!(answer, b"");
        assert_eq!(place.asked(), 0);
    }

    #[test]
    fn no_more_connections_are_served_than_are_allowed_and_the_next_one_is_when_one_ends() {
        let place = Place::new(Limits {
            connections: 2,
            patience: Duration::from_hours(1),
        });
        let mut silent = vec![place.connect(), place.connect()];
        let mut third = place.connect();
        third.write_all(GET).expect("taken by the kernel");
        third
            .set_read_timeout(Some(Duration::from_millis(100)))
            .expect("set");
        let early = third.read(&mut [0; 1]).expect_err("nothing yet");
        assert_eq!(early.kind(), ErrorKind::WouldBlock);
        assert_eq!(place.asked(), 0);
        silent.pop();
        third
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("set");
        let mut answer = String::new();
        third.read_to_string(&mut answer).expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(place.asked(), 1);
    }

    #[test]
    fn who_comes_early_waits_and_who_comes_late_is_sent_away() {
        let mut place = Place::new(Limits::default());
        let metrics = Metrics::bind(any_port()).expect("a free port");
        place.address = metrics.address;
        let mut early = place.connect();
        early.write_all(GET).expect("taken by the kernel");
        let nobody = || oneshot::channel().1;
        let serving = metrics.serve(place.network.handle(), nobody);
        place.serving = Some(serving.expect("watched"));
        let mut answer = String::new();
        early.read_to_string(&mut answer).expect("answered");
        // Nobody has a status any more.
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    }

    #[test]
    fn an_address_that_is_taken_is_told_and_free_again_when_no_longer_served() {
        let mut place = Place::new(Limits::default());
        let error = Metrics::bind(place.address).expect_err("taken");
        let text = format!("{error:#}");
        assert!(
            text.starts_with(&format!("cannot serve metrics at {}: ", place.address)),
            "{text}"
        );
        place.serving = None;
        let start = std::time::Instant::now();
        while let Err(error) = Metrics::bind(place.address) {
            assert!(start.elapsed() < Duration::from_secs(10), "{error:#}");
            std::thread::yield_now();
        }
    }
}
