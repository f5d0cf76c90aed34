//! A small HTTP/1.1 server on 127.0.0.1 with scripted responses, also invalid ones.
//!
//! A closure from [`Request`] to [`Response`] serves a path. [`Resource`] answers correctly, with
//! ranges and conditions. Tests wrap it to misbehave, for example with a [`Fault`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tarfs::internal::thread::Thread;

/// A running server. Dropping it stops it.
pub(crate) struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<Thread<()>>,
}

#[derive(Default)]
struct Shared {
    stopping: AtomicBool,
    routes: Mutex<BTreeMap<String, Handler>>,
    seen: Mutex<Vec<RecordedRequest>>,
    /// Number of requests being answered.
    in_flight: AtomicUsize,
}

type Handler = Arc<dyn Fn(&Request) -> Response + Send + Sync>;

/// A client's request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Number of this request among those for this path, from 1.
    pub(crate) number: usize,
    /// Number of requests being answered, including this one.
    pub(crate) in_flight: usize,
    pub(crate) method: String,
    /// Path without the query.
    pub(crate) path: String,
    /// Query without the question mark.
    pub(crate) query: String,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Port of the client. Different ports are different connections.
    pub(crate) client_port: u16,
}

impl Request {
    /// A GET of `path` with headers in lower case.
    pub(crate) fn get(path: &str, headers: Vec<(String, String)>) -> Self {
        Self {
            number: 1,
            in_flight: 1,
            method: "GET".to_owned(),
            path: path.to_owned(),
            query: String::new(),
            headers,
            body: Vec::new(),
            client_port: 0,
        }
    }

    /// The value of a header. The name is in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Removes a header. The name is in lower case.
    pub(crate) fn remove_header(&mut self, name: &str) {
        self.headers.retain(|(known, _)| known != name);
    }

    /// The requested half-open range. Its end may be past the end of the file.
    pub(crate) fn range(&self) -> Option<(u64, u64)> {
        let (first, last) = self
            .header("range")?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        let end = last
            .parse::<u64>()
            .map_or(u64::MAX, |last| last.saturating_add(1));
        Some((first.parse().ok()?, end))
    }
}

/// A request and its response.
#[derive(Clone, Debug)]
pub(crate) struct RecordedRequest {
    pub(crate) request: Request,
    pub(crate) status: u16,
    /// Number of body bytes that were sent.
    pub(crate) body_bytes: u64,
}

/// A response.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Bytes,
    /// Pause before the first byte.
    pub(super) delay: Duration,
    /// Length of the pieces of the body, and the pause between them.
    pub(super) pace: Option<(usize, Duration)>,
    /// Whether the body is sent in chunks, without a length.
    pub(super) is_chunked: bool,
    /// Number of body bytes to send, if not all.
    pub(super) cut: Option<usize>,
    pub(super) end: End,
}

/// Behaviour after the last sent byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// Waits for the next request after a complete body, and closes the connection after a cut one.
    Normal,
    /// Sends nothing more until the client disconnects.
    Stall,
    /// As [`End::Stall`], without a head.
    Silence,
    /// Resets the connection.
    Reset,
    /// As [`End::Reset`], without a head.
    HangUp,
}

impl Response {
    pub(crate) fn new(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: Bytes::new(),
            delay: Duration::ZERO,
            pace: None,
            is_chunked: false,
            cut: None,
            end: End::Normal,
        }
    }

    pub(crate) fn redirect(to: impl Into<String>) -> Self {
        Self::new(302).with("Location", to)
    }

    /// The value of a header. The name is spelled as it was set.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Sets or replaces a header.
    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Removes a header.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self
    }

    pub(crate) fn with_body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(super) fn sent_body(&self) -> Bytes {
        self.body
            .slice(..self.body.len().min(self.cut.unwrap_or(usize::MAX)))
    }

    /// Announces the whole body, sends `len` bytes, and closes the connection.
    pub(crate) fn cut_after(mut self, len: usize) -> Self {
        self.cut = Some(len);
        self
    }

    /// Announces the whole body, sends `len` bytes, and then nothing until the client disconnects.
    pub(crate) fn stall_after(mut self, len: usize) -> Self {
        self.end = End::Stall;
        self.cut_after(len)
    }

    /// Announces the whole body, sends `len` bytes, and resets the connection.
    pub(crate) fn reset_after(mut self, len: usize) -> Self {
        self.end = End::Reset;
        self.cut_after(len)
    }

    /// Resets the connection without a response.
    pub(crate) fn hang_up() -> Self {
        let mut response = Self::new(0);
        response.end = End::HangUp;
        response
    }

    /// Sends no response, and waits for the client to disconnect.
    pub(crate) fn silence() -> Self {
        let mut response = Self::new(0);
        response.end = End::Silence;
        response
    }

    /// Waits before the response.
    pub(crate) fn delayed(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sends the body in pieces with pauses.
    pub(crate) fn paced(mut self, bytes: usize, pause: Duration) -> Self {
        self.pace = Some((bytes, pause));
        self
    }

    /// Sends the body in chunks, without a length.
    pub(crate) fn chunked(mut self) -> Self {
        self.is_chunked = true;
        self
    }
}

/// A fault of one request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The response is delayed.
    Late(Duration),
    /// The body is sent in pieces with pauses.
    Paced(usize, Duration),
    /// Another status code.
    Status(u16),
    /// Another status code with `Retry-After`.
    Busy(u16, String),
    /// A reset without a response.
    HangUp,
    /// A reset after this many body bytes.
    Reset(usize),
    /// A closed connection after this many body bytes.
    Short(usize),
    /// No response on an open connection.
    Silence,
    /// Nothing more after this many body bytes.
    Stall(usize),
    /// Right bytes with the range of others.
    OtherRange,
    /// The whole file instead of the range.
    Whole,
    /// Status 416.
    Unsatisfiable,
    /// A chunked body.
    Chunked,
    /// Packed bytes with a content encoding.
    Gzip,
    /// A redirect to this URL.
    Redirect(String),
    /// Another version.
    Other(Resource),
}

impl Fault {
    /// The response of `resource` with this fault.
    pub(crate) fn apply(&self, resource: &Resource, request: &Request) -> Response {
        let good = || resource.answer(request);
        match self {
            Self::Late(delay) => good().delayed(*delay),
            Self::Paced(bytes, pause) => good().paced(*bytes, *pause),
            Self::Status(status) => Response::new(*status).with_body("no"),
            Self::Busy(status, after) => Response::new(*status).with("Retry-After", after),
            Self::HangUp => Response::hang_up(),
            Self::Reset(len) => good().reset_after(*len),
            Self::Short(len) => good().cut_after(*len),
            Self::Silence => Response::silence(),
            Self::Stall(len) => good().stall_after(*len),
            Self::OtherRange => {
                let good = good();
                let len = good.body.len().max(1);
                let total = resource.bytes.len();
                // Existing bytes of the same length at another offset.
                let is_at_front = request.range().is_none_or(|(start, _)| start == 0);
                let first = usize::from(is_at_front).min(total - len);
                let range = format!("bytes {first}-{}/{total}", first + len - 1);
                good.with("Content-Range", range)
            }
            Self::Whole => resource.clone().without_ranges().answer(request),
            Self::Unsatisfiable => {
                let total = resource.bytes.len();
                Response::new(416).with("Content-Range", format!("bytes */{total}"))
            }
            Self::Chunked => good().chunked(),
            Self::Gzip => good().with("Content-Encoding", "gzip"),
            Self::Redirect(to) => Response::redirect(to),
            Self::Other(other) => {
                let mut blind = request.clone();
                blind.remove_header("if-match");
                other.answer(&blind)
            }
        }
    }
}

impl Fault {
    /// The answer in place of `answer`, which is none of a resource.
    pub(crate) fn apply_to(&self, answer: Response) -> Response {
        match self {
            Self::Late(delay) => answer.delayed(*delay),
            Self::Paced(bytes, pause) => answer.paced(*bytes, *pause),
            Self::Reset(len) => answer.reset_after(*len),
            Self::Short(len) => answer.cut_after(*len),
            Self::Stall(len) => answer.stall_after(*len),
            Self::OtherRange | Self::Chunked | Self::Gzip | Self::Whole | Self::Unsatisfiable => {
                answer.cut_after(0)
            }
            other => other.apply(&Resource::new(""), &Request::get("/", Vec::new())),
        }
    }
}

/// A file as a correct server has it.
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    bytes: Bytes,
    etag: Option<String>,
    last_modified: Option<String>,
    has_ranges: bool,
}

impl Resource {
    /// A resource with ranges and without a version.
    pub(crate) fn new(bytes: impl Into<Bytes>) -> Self {
        Self {
            bytes: bytes.into(),
            etag: None,
            last_modified: None,
            has_ranges: true,
        }
    }

    /// Sets an entity tag, with quotes and weakness mark.
    pub(crate) fn etag(mut self, etag: &str) -> Self {
        self.etag = Some(etag.to_owned());
        self
    }

    pub(crate) fn last_modified(mut self, date: &str) -> Self {
        self.last_modified = Some(date.to_owned());
        self
    }

    pub(crate) fn without_ranges(mut self) -> Self {
        self.has_ranges = false;
        self
    }

    /// Whether it has an entity tag or a time.
    pub(crate) fn has_version(&self) -> bool {
        self.etag.is_some() || self.last_modified.is_some()
    }

    /// The response by RFC 9110. HEAD is rejected, so that no client relies on it.
    pub(crate) fn answer(&self, request: &Request) -> Response {
        if request.method != "GET" {
            return Response::new(405);
        }
        if request
            .header("if-match")
            .is_some_and(|wanted| self.etag.as_deref() != Some(wanted))
        {
            return Response::new(412);
        }
        let mut response = match request.range().filter(|_| self.has_ranges) {
            None => Response::new(200).with_body(self.bytes.clone()),
            Some((start, end)) => self.part(start, end),
        };
        if let Some(etag) = &self.etag {
            response = response.with("ETag", etag);
        }
        if let Some(date) = &self.last_modified {
            response = response.with("Last-Modified", date);
        }
        response
    }

    fn part(&self, start: u64, end: u64) -> Response {
        let total = self.bytes.len() as u64;
        let end = end.min(total);
        if start >= end {
            return Response::new(416).with("Content-Range", format!("bytes */{total}"));
        }
        let number = |offset| usize::try_from(offset).expect("within memory");
        Response::new(206)
            .with(
                "Content-Range",
                format!("bytes {start}-{}/{total}", end - 1),
            )
            .with_body(self.bytes.slice(number(start)..number(end)))
    }
}

impl Server {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::<Shared>::default();
        let acceptor = Thread::spawn("http", {
            let shared = Arc::clone(&shared);
            move || accept(&listener, &shared)
        });
        Self {
            address,
            shared,
            acceptor: Some(acceptor.expect("a thread")),
        }
    }

    /// Serves `path` with `resource`, from now on.
    pub(crate) fn serve(&self, path: &str, resource: Resource) {
        self.route(path, move |request| resource.answer(request));
    }

    /// Serves `path` with `handler`, from now on. A `*` at its end means all paths without another handler.
    pub(crate) fn route(
        &self,
        path: &str,
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) {
        lock(&self.shared.routes).insert(path.to_owned(), Arc::new(handler));
    }

    /// Serves `path` with `resource`, and with the faults that `fault` returns.
    pub(crate) fn serve_with_faults(
        &self,
        path: &str,
        resource: Resource,
        fault: impl Fn(&Request) -> Option<Fault> + Send + Sync + 'static,
    ) {
        self.route(path, move |request| match fault(request) {
            Some(fault) => fault.apply(&resource, request),
            None => resource.answer(request),
        });
    }

    /// The URL of `path`, which may have a query.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The same URL at another host, localhost.
    pub(crate) fn other_url(&self, path: &str) -> String {
        format!("http://localhost:{}{path}", self.address.port())
    }

    /// The requests for `path` so far, in order.
    pub(crate) fn requests(&self, path: &str) -> Vec<RecordedRequest> {
        let seen = lock(&self.shared.seen);
        seen.iter()
            .filter(|seen| seen.request.path == path)
            .cloned()
            .collect()
    }

    /// Number of body bytes sent for `path` so far.
    pub(crate) fn sent_bytes(&self, path: &str) -> u64 {
        self.requests(path).iter().map(|seen| seen.body_bytes).sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the accepting thread, which checks the flag.
        drop(TcpStream::connect(self.address));
        drop(self.acceptor.take());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection's thread, and the stream to end it.
struct Connection {
    stream: TcpStream,
    _thread: Thread<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // An error means that the client has disconnected first.
        drop(self.stream.shutdown(Shutdown::Both));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut connections = Vec::new();
    for stream in listener.incoming() {
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let own = stream.try_clone().expect("a descriptor");
        let thread = Thread::spawn("http", {
            let shared = Arc::clone(shared);
            // An error means that the client has disconnected.
            move || drop(handle_connection(&stream, &shared))
        });
        connections.push(Connection {
            stream: own,
            _thread: thread.expect("a thread"),
        });
    }
}

fn handle_connection(stream: &TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    let client_port = stream.peer_addr()?.port();
    while let Some(mut request) = read_request(&mut reader)? {
        request.client_port = client_port;
        let handler = handler_of(&lock(&shared.routes), &request.path);
        let mut in_flight = InFlightGuard::of(shared);
        // Numbered and recorded under one lock, so that no number occurs twice.
        let place = {
            let mut seen = lock(&shared.seen);
            let earlier = seen.iter().filter(|seen| seen.request.path == request.path);
            request.number = earlier.count() + 1;
            request.in_flight = in_flight.before + 1;
            seen.push(RecordedRequest {
                request: request.clone(),
                status: 0,
                body_bytes: 0,
            });
            seen.len() - 1
        };
        let response = handler.map_or_else(|| Response::new(404), |handler| handler(&request));
        let sent = response.sent_body().len();
        {
            let mut seen = lock(&shared.seen);
            let seen = seen.get_mut(place).expect("noted above");
            seen.status = response.status;
            seen.body_bytes = sent as u64;
        }
        let written = write_response(stream, &response, &mut in_flight);
        if matches!(response.end, End::Stall | End::Silence) {
            // A waiting client sends nothing, so this returns when it disconnects.
            drop(reader.fill_buf());
        }
        in_flight.finish();
        written?;
        if matches!(response.end, End::Reset | End::HangUp) {
            // tcp(7) calls this a disconnect. It resets the connection.
            return Ok(rustix::net::connect_unspec(stream)?);
        }
        if response.cut.is_some() || response.end != End::Normal {
            return stream.shutdown(Shutdown::Both);
        }
    }
    Ok(())
}

fn handler_of(routes: &BTreeMap<String, Handler>, path: &str) -> Option<Handler> {
    let is_below = |route: &str| {
        let prefix = route.strip_suffix('*');
        prefix.is_some_and(|prefix| path.starts_with(prefix))
    };
    let below = || routes.iter().find(|(route, _)| is_below(route));
    let found = routes.get(path).or_else(|| Some(below()?.1));
    found.cloned()
}

/// Counts a request as in flight until it is dropped.
struct InFlightGuard<'a> {
    count: Option<&'a AtomicUsize>,
    /// Number of requests in flight before it.
    before: usize,
}

impl<'a> InFlightGuard<'a> {
    fn of(shared: &'a Shared) -> Self {
        Self {
            count: Some(&shared.in_flight),
            before: shared.in_flight.fetch_add(1, Ordering::SeqCst),
        }
    }

    fn finish(&mut self) {
        if let Some(count) = self.count.take() {
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        number: 0,
        in_flight: 0,
        method,
        path: path.to_owned(),
        query: query.to_owned(),
        headers: Vec::new(),
        body: Vec::new(),
        client_port: 0,
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else {
            break;
        };
        request
            .headers
            .push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let len = request.header("content-length").unwrap_or("0");
    request.body = vec![0; len.parse().map_err(io::Error::other)?];
    reader.read_exact(&mut request.body)?;
    Ok(Some(request))
}

/// Sends a response.
///
/// Before the last byte of a complete response, the request no longer counts as `in_flight`, because a
/// client may then send its next request on any connection.
fn write_response(
    mut stream: &TcpStream,
    response: &Response,
    in_flight: &mut InFlightGuard<'_>,
) -> io::Result<()> {
    std::thread::sleep(response.delay);
    if matches!(response.end, End::Silence | End::HangUp) {
        return Ok(());
    }
    let mut head = format!("HTTP/1.1 {} -\r\n", response.status);
    for (name, value) in &response.headers {
        write!(head, "{name}: {value}\r\n").expect("memory");
    }
    if response.is_chunked {
        head.push_str("Transfer-Encoding: chunked\r\n\r\n");
    } else {
        write!(head, "Content-Length: {}\r\n\r\n", response.body.len()).expect("memory");
    }
    let is_all = response.cut.is_none() && response.end == End::Normal;
    let body = response.sent_body();
    if is_all && body.is_empty() {
        in_flight.finish();
    }
    stream.write_all(head.as_bytes())?;
    let (len, pause) = response.pace.unwrap_or((64 << 10, Duration::ZERO));
    let mut pieces = body.chunks(len.max(1)).enumerate().peekable();
    while let Some((number, piece)) = pieces.next() {
        if number > 0 {
            std::thread::sleep(pause);
        }
        if is_all && pieces.peek().is_none() {
            in_flight.finish();
        }
        if response.is_chunked {
            stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes())?;
        }
        stream.write_all(piece)?;
        if response.is_chunked {
            stream.write_all(b"\r\n")?;
        }
    }
    if response.is_chunked && response.cut.is_none() {
        stream.write_all(b"0\r\n\r\n")?;
    }
    Ok(())
}
