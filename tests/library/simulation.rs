//! Random fault schedules in a simulated network, on a paused clock.
//!
//! Every read gives the right bytes or an error by its deadline, and the right bytes after the faults.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use reqwest::Method;
use reqwest::header::HeaderMap;
use tarfs::Packed;
use tarfs::Stats;
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::source::{
    self, Access, Cause, Content, Error, Http, Obstacle, Options, RawResponse, ReadHandle,
    ReadMode, RetryForever, Source, Target, Transport,
};
use tokio::time::Instant;
use url::Url;

use crate::support::http::{Fault, Request, Resource, Response};
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};
use crate::support::simulated_network::SimulatedNetwork;

/// Default number of rounds.
const DEFAULT_ROUNDS: u64 = 600;

/// Default number of rounds with several servers.
const DEFAULT_FARM_ROUNDS: u64 = 200;

/// Maximum number of requests in a round of two dozen reads.
///
/// Each request makes real progress or counts as a failure, and there are pauses during an outage.
const MAX_REQUESTS: u64 = 10_000;

/// Minimum speed in bytes a second, which extends the deadline of each read (docs/semantics.md).
const MIN_BYTES_PER_SECOND: u64 = 4 << 10;

/// Slack, because timers have a resolution of a millisecond.
const TICK: Duration = Duration::from_millis(20);

/// A random index below `end`.
fn rng(rng: &mut Rng, end: usize) -> usize {
    usize::try_from(rng.below(end as u64)).expect("small")
}

/// A random one of `choices`.
fn pick<T: Copy>(noise: &mut Rng, choices: &[T]) -> T {
    let number = rng(noise, choices.len());
    *choices.get(number).expect("some")
}

/// The archive's bytes in one version. `way` selects how the server identifies versions.
fn resource(way: usize, version: u64, len: usize) -> Resource {
    let bytes = Rng::new(version).bytes(len);
    let resource = Resource::new(bytes);
    match way {
        0 | 1 => resource.etag(&format!("\"{version}\"")),
        2 => resource.etag(&format!("W/\"{version}\"")),
        3 => resource.last_modified(&format!("Fri, 31 Dec 1999 23:59:{version:02} GMT")),
        // Only the length differs.
        _ => Resource::new(Rng::new(version).bytes(len + usize::from(version > 1))),
    }
}

/// The faults of one round.
struct Schedule {
    rng: Rng,
    /// Possible faults, and the percentage of requests that meet one.
    faults: Vec<Fault>,
    often: u64,
}

impl Schedule {
    fn new(mut noise: Rng, other: &Resource, len: usize) -> Self {
        let often = pick(&mut noise, &[5, 30, 60, 90, 100]);
        let kinds = 1 + rng(&mut noise, 4);
        let faults = (0..kinds).map(|_| fault(&mut noise, other, len));
        Self {
            faults: faults.collect(),
            often,
            rng: noise,
        }
    }

    fn next(&mut self) -> Option<Fault> {
        let strikes = self.rng.below(100) < self.often;
        let number = rng(&mut self.rng, self.faults.len());
        self.faults.get(number).filter(|_| strikes).cloned()
    }
}

/// A random fault.
fn fault(noise: &mut Rng, other: &Resource, len: usize) -> Fault {
    let millis = |noise: &mut Rng, end| Duration::from_millis(noise.below(end));
    match rng(noise, 17) {
        0 => Fault::Late(millis(noise, 40_000)),
        1 => Fault::Paced(1 + rng(noise, 64 << 10), millis(noise, 8_000)),
        2 => Fault::Status(pick(noise, &[500, 502, 503, 504, 429])),
        3 => Fault::Status(pick(noise, &[400, 401, 403, 404, 408, 410, 412, 416, 418])),
        4 => {
            let status = pick(noise, &[429, 503]);
            Fault::Busy(status, noise.below(90).to_string())
        }
        5 => Fault::HangUp,
        6 => Fault::Reset(rng(noise, len)),
        7 => Fault::Short(rng(noise, len)),
        8 => Fault::Silence,
        9 => Fault::Stall(rng(noise, len)),
        10 => Fault::OtherRange,
        11 => Fault::Whole,
        12 => Fault::Unsatisfiable,
        13 => Fault::Chunked,
        14 => Fault::Gzip,
        15 => Fault::Redirect(pick(noise, &["http://elsewhere/a", "/a", "http://a b/"]).to_owned()),
        _ => Fault::Other(other.clone()),
    }
}

/// A round: a server with a schedule, and its readers.
struct Round {
    bytes: Bytes,
    options: Options,
    net: SimulatedNetwork,
    /// Whether requests meet faults.
    is_disturbed: Arc<AtomicBool>,
    /// Whether the version may change.
    is_open: Arc<AtomicBool>,
    rng: Rng,
}

impl Round {
    fn new(number: u64) -> Self {
        let mut noise = Rng::new(seed().wrapping_mul(1_000_003).wrapping_add(number));
        let way = rng(&mut noise, 5);
        let len = 1 + rng(
            &mut noise,
            pick(&mut Rng::new(number), &[1000, 100_000, 400_000]),
        );
        let has_ranges = noise.below(5) > 0;
        let made = |version| match (resource(way, version, len), has_ranges) {
            (resource, true) => resource,
            (resource, false) => resource.without_ranges(),
        };
        let (good, other) = (made(1), made(2));
        let options = Options {
            timeout: Duration::from_secs(pick(&mut noise, &[1, 4, 30, 60])),
            connections: 1 + rng(&mut noise, 16),
            jitter_seed: Some(noise.number()),
            ..Options::default()
        };
        let is_disturbed = Arc::new(AtomicBool::new(noise.below(2) > 0));
        let is_open = Arc::<AtomicBool>::default();
        let schedule = Mutex::new(Schedule::new(Rng::new(noise.number()), &other, len));
        let net = SimulatedNetwork::new({
            let (is_disturbed, is_open) = (Arc::clone(&is_disturbed), Arc::clone(&is_open));
            move |request| {
                let fault = schedule.lock().expect("whole").next();
                let fault = fault.filter(|fault| {
                    let is_other = matches!(fault, Fault::Other(_));
                    is_disturbed.load(Ordering::SeqCst)
                        && (is_open.load(Ordering::SeqCst) || !is_other)
                });
                match fault {
                    Some(fault) => fault.apply(&good, request),
                    None => good.answer(request),
                }
            }
        });
        Self {
            bytes: Rng::new(1).bytes(len).into(),
            options,
            net,
            is_disturbed,
            is_open,
            rng: noise,
        }
    }

    /// Maximum time for `len` bytes.
    fn time_limit(&self, len: usize) -> Duration {
        self.options.timeout
            + Duration::from_micros(len as u64 * 1_000_000 / MIN_BYTES_PER_SECOND)
            + TICK
    }

    async fn open(&self) -> Option<Http> {
        let url = Url::parse("http://host/archive").expect("well-formed");
        let net = Box::new(self.net.clone());
        let began = Instant::now();
        let opened = Http::open_through(net, url, self.options.clone()).await;
        assert!(began.elapsed() <= self.time_limit(self.bytes.len()), "late");
        opened.ok()
    }

    async fn run(mut self) -> Outcome {
        let mut opened = self.open().await;
        if opened.is_none() {
            self.is_disturbed.store(false, Ordering::SeqCst);
            opened = self.open().await;
        }
        let source = opened.expect("the faults are over");
        self.is_open.store(true, Ordering::SeqCst);
        self.is_disturbed.store(true, Ordering::SeqCst);
        let mut outcome = match source.access() {
            Access::Ranges => self.read_parts(&source).await,
            Access::Stream => self.read_all(&source).await,
        };
        outcome.requests = self.options.stats.source_requests.get();
        outcome
    }

    /// Runs concurrent readers of random ranges, and one reader after the faults.
    async fn read_parts(&mut self, source: &Http) -> Outcome {
        let readers = 1 + rng(&mut self.rng, 6);
        let orders: Vec<Rng> = (0..readers).map(|_| Rng::new(self.rng.number())).collect();
        let reads = orders.into_iter().map(|order| self.reader(source, order));
        let outcomes = futures_util::future::join_all(reads).await;
        let mut outcome = Outcome::default();
        for one in outcomes {
            outcome.right += one.right;
            outcome.wrong += one.wrong;
        }
        self.is_disturbed.store(false, Ordering::SeqCst);
        let last = self.read(source, 0, self.bytes.len()).await;
        assert!(last.is_ok(), "the faults are over: {last:?}");
        outcome
    }

    async fn reader(&self, source: &Http, mut order: Rng) -> Outcome {
        let mut outcome = Outcome::default();
        for _ in 0..4 {
            let start = rng(&mut order, self.bytes.len());
            let len = 1 + rng(&mut order, self.bytes.len() - start);
            match self.read(source, start, len).await {
                Ok(()) => outcome.right += 1,
                Err(cause) => {
                    assert!(
                        !matches!(cause, Cause::Cancelled | Cause::AlreadyRead),
                        "{cause}"
                    );
                    outcome.wrong += 1;
                }
            }
            tokio::time::sleep(Duration::from_millis(order.below(3_000))).await;
        }
        outcome
    }

    /// Reads a range, which must give the right bytes or an error in time.
    async fn read(&self, source: &Http, start: usize, len: usize) -> Result<(), Cause> {
        let pool = BufferPool::new(1 << 20);
        let buffer = pool.acquire_async(len).await;
        let (began, watch) = (Instant::now(), ReadHandle::default());
        let read = source.read(Packed(start as u64), buffer, ReadMode::Controlled(&watch));
        let read = tokio::time::timeout(10 * self.time_limit(len), read).await;
        let read = read.expect("it hangs");
        let took = began.elapsed();
        assert!(
            took <= self.time_limit(len),
            "{took:?} for {len} bytes: {read:?}"
        );
        match read {
            Ok(read) => assert!(read == self.bytes.slice(start..start + len), "wrong bytes"),
            Err(error) => return Err(error.cause),
        }
        assert!(pool.used_bytes() == 0);
        Ok(())
    }

    /// Reads everything from the front.
    async fn read_all(&self, source: &Http) -> Outcome {
        let (mut pieces, mut read) = (source.stream(), 0);
        let mut outcome = Outcome::default();
        let all = self.bytes.len();
        // Each byte may be sent again once for every 64 KiB of progress.
        let longest = self.time_limit(all * (2 + all / (64 << 10)));
        let opened = Instant::now();
        loop {
            assert!(opened.elapsed() <= longest, "{:?}", opened.elapsed());
            let began = Instant::now();
            // The bytes before it may have to be sent once more.
            let bound = self.time_limit(self.bytes.len());
            let piece = tokio::time::timeout(10 * bound, pieces.next()).await;
            let piece = piece.expect("it hangs");
            let took = began.elapsed();
            assert!(took <= bound, "{took:?} for {piece:?}");
            match piece {
                Some(Ok(piece)) => {
                    let right = self.bytes.slice(read..read + piece.len());
                    assert!(piece == right, "wrong bytes");
                    read += piece.len();
                }
                Some(Err(_)) => {
                    outcome.wrong += 1;
                    return outcome;
                }
                None => break,
            }
        }
        assert_eq!(read, self.bytes.len(), "a part is not the whole");
        outcome.right += 1;
        outcome
    }
}

/// A registry's tokens, which end at random after their first use. Its token server has the path `/token`.
struct Tokens {
    accepted: AtomicU64,
    is_used: AtomicBool,
    noise: Mutex<Rng>,
}

impl Tokens {
    fn new(noise: Rng) -> Self {
        Self {
            accepted: AtomicU64::new(1),
            is_used: AtomicBool::default(),
            noise: Mutex::new(noise),
        }
    }

    /// The answer to `request`, unless it has the token.
    fn refusal(&self, request: &Request) -> Option<Response> {
        if request.path == "/token" {
            let token = self.accepted.load(Ordering::SeqCst);
            let answer = format!(r#"{{"token":"{token}","expires_in":3600}}"#);
            return Some(Response::new(200).with_body(answer));
        }
        let ends = self.noise.lock().expect("whole").below(10) == 0;
        if ends && self.is_used.swap(false, Ordering::SeqCst) {
            self.accepted.fetch_add(1, Ordering::SeqCst);
        }
        let expected = format!("Bearer {}", self.accepted.load(Ordering::SeqCst));
        let challenge =
            r#"Bearer realm="http://host/token",service="s",scope="repository:me/tool:pull""#;
        let is_accepted = request.header("authorization") == Some(&*expected);
        self.is_used.fetch_or(is_accepted, Ordering::SeqCst);
        (!is_accepted).then(|| Response::new(401).with("WWW-Authenticate", challenge))
    }
}

/// A round with several servers of the same bytes, of which one is healthy at a time.
struct Farm {
    bytes: Bytes,
    options: Options,
    nets: Vec<SimulatedNetwork>,
    /// Whether each server is a registry, which wants tokens of its own token server.
    has_tokens: bool,
    /// Number of the healthy server; past the last if all are healthy.
    healthy: Arc<AtomicUsize>,
    rng: Rng,
}

impl Farm {
    fn new(number: u64) -> Self {
        let mut noise = Rng::new(seed().wrapping_mul(2_000_003).wrapping_add(number));
        let len = 100_000 + rng(&mut noise, 300_000);
        let good = resource(0, 1, len);
        let corrupt = Resource::new(Rng::new(3).bytes(len)).etag("\"1\"");
        let other = resource(0, 2, len);
        let healthy = Arc::new(AtomicUsize::new(usize::MAX));
        let timeout = pick(&mut noise, &[8, 30, 60]);
        let latency = Duration::from_millis(noise.below(timeout * 1000 / 30));
        let has_tokens = noise.below(2) == 0;
        let nets = (0..2 + rng(&mut noise, 3)).map(|server| {
            let wrong = pick(&mut noise, &[&corrupt, &other]);
            let mut schedule = Schedule::new(Rng::new(noise.number()), wrong, len);
            if noise.below(4) == 0 {
                schedule.faults = vec![Fault::Other(corrupt.clone())];
            }
            // A pause that a server asks for is kept, also when it is healthy again.
            schedule
                .faults
                .retain(|fault| !matches!(fault, Fault::Busy(..)));
            schedule
                .faults
                .push(Fault::Busy(429, noise.below(3).to_string()));
            let (good, healthy) = (good.clone(), Arc::clone(&healthy));
            let schedule = Mutex::new(schedule);
            let tokens = Tokens::new(Rng::new(noise.number()));
            SimulatedNetwork::new(move |request| {
                let healthy = healthy.load(Ordering::SeqCst);
                let is_healthy = healthy == usize::MAX || healthy == server;
                let delay = if healthy == server {
                    latency
                } else {
                    Duration::ZERO
                };
                let fault = schedule.lock().expect("whole").next();
                let fault = fault.filter(|_| !is_healthy);
                let refusal = has_tokens.then(|| tokens.refusal(request)).flatten();
                match (fault, refusal) {
                    (Some(fault), Some(refusal)) => fault.apply_to(refusal),
                    (Some(fault), None) => fault.apply(&good, request),
                    (None, refusal) => {
                        let answer = refusal.unwrap_or_else(|| good.answer(request));
                        answer.delayed(delay)
                    }
                }
            })
        });
        let nets = nets.collect();
        Self {
            bytes: Rng::new(1).bytes(len).into(),
            options: Options {
                timeout: Duration::from_secs(timeout),
                jitter_seed: Some(noise.number()),
                ..Options::default()
            },
            nets,
            has_tokens,
            healthy,
            rng: noise,
        }
    }

    fn target(&self, number: usize) -> Target {
        let url = Url::parse("http://host/archive").expect("well-formed");
        let net = self.nets.get(number).expect("one of them");
        let login = source::registry_login("host", "me/tool", net, &self.options);
        let login = login.expect("simulated");
        Target {
            authorizer: self.has_tokens.then_some(login),
            ..url.into()
        }
    }

    async fn open(&mut self) -> Arc<dyn Source> {
        if self.rng.below(2) == 0 {
            let nets = self.nets.iter().enumerate();
            let places = nets.map(|(number, net)| source::UnopenedMirror {
                target: self.target(number),
                options: self.options.clone(),
                transport: Some(Box::new(net.clone())),
            });
            let opened = source::open_mirrors(places.collect()).await.expect("open");
            // The others are opened meanwhile.
            tokio::time::sleep(Duration::from_secs(5)).await;
            return opened;
        }
        let mut opened = Vec::new();
        for (number, net) in self.nets.iter().enumerate() {
            let net = Box::new(net.clone());
            let target = self.target(number);
            let http = Http::open_through(net, target, self.options.clone()).await;
            opened.push(http.expect("open"));
        }
        source::in_order(opened.remove(0), opened)
    }

    async fn run(mut self) -> Outcome {
        let source = Box::pin(self.open()).await;
        let mut outcome = Outcome::default();
        for _ in 0..4 {
            let healthy = rng(&mut self.rng, self.nets.len());
            self.healthy.store(healthy, Ordering::SeqCst);
            let readers = 1 + rng(&mut self.rng, 4);
            let reads = (0..readers).map(|_| {
                let start = rng(&mut self.rng, self.bytes.len());
                let len = 1 + rng(&mut self.rng, self.bytes.len() - start);
                (start, len)
            });
            let reads: Vec<_> = reads.collect();
            let reads = reads
                .iter()
                .map(|&(start, len)| self.read(&*source, start, len));
            for is_reread in futures_util::future::join_all(reads).await {
                outcome.right += 1;
                outcome.wrong += u64::from(is_reread);
            }
            let pause = Duration::from_millis(self.rng.below(20_000));
            tokio::time::sleep(pause).await;
        }
        outcome.requests = self.options.stats.source_requests.get();
        outcome
    }

    /// Reads a range, which must succeed in time. Returns whether it was read again, because bytes were corrupt.
    async fn read(&self, source: &dyn Source, start: usize, len: usize) -> bool {
        let pool = BufferPool::new(1 << 20);
        let expected = self.bytes.slice(start..start + len);
        let limit = self.options.timeout
            + Duration::from_micros(len as u64 * 1_000_000 / MIN_BYTES_PER_SECOND)
            + TICK;
        let at = Packed(start as u64);
        let began = Instant::now();
        let read = source.read_at(at, pool.acquire_async(len).await).await;
        assert!(began.elapsed() <= limit, "{:?}: {read:?}", began.elapsed());
        if read.expect("one server is healthy") == expected {
            return false;
        }
        let began = Instant::now();
        let buffer = pool.acquire_async(len).await;
        let is_intact = |read: &[u8]| read == expected;
        let read = source
            .read(at, buffer, ReadMode::Uncached(&is_intact))
            .await;
        assert!(began.elapsed() <= limit, "{:?}: {read:?}", began.elapsed());
        assert!(
            read.expect("one server is healthy") == expected,
            "wrong bytes"
        );
        true
    }
}

// Promises: mirror-choice, mirror-all-fail
#[test]
#[expect(
    clippy::print_stderr,
    reason = "the round of a failure is shown with it, and what all came to"
)]
fn no_read_fails_while_one_of_several_servers_is_healthy() {
    let mut all = Outcome::default();
    for number in 0..rounds(DEFAULT_FARM_ROUNDS) {
        eprintln!("round {number}");
        let outcome = simulate(Farm::new(number).run());
        assert!(outcome.requests < MAX_REQUESTS, "{outcome:?}");
        all.right += outcome.right;
        all.wrong += outcome.wrong;
        all.requests = all.requests.max(outcome.requests);
    }
    let Outcome {
        right,
        wrong,
        requests,
    } = all;
    eprintln!(
        "of {right} reads {wrong} met wrong bytes, with at most {requests} requests in a round"
    );
    assert!(wrong > 0 && wrong < right, "chance had no say");
}

/// Results of rounds.
#[derive(Debug, Default)]
struct Outcome {
    right: u64,
    wrong: u64,
    requests: u64,
}

// Promises: time-deadline
#[test]
#[expect(
    clippy::print_stderr,
    reason = "the round of a failure is shown with it, and what all came to"
)]
fn read_is_right_or_fails_by_deadline_under_any_fault() {
    let mut all = Outcome::default();
    for number in 0..rounds(DEFAULT_ROUNDS) {
        let round = Round::new(number);
        eprintln!("round {number}");
        let outcome = simulate(round.run());
        assert!(outcome.requests < MAX_REQUESTS, "{outcome:?}");
        all.right += outcome.right;
        all.wrong += outcome.wrong;
        all.requests = all.requests.max(outcome.requests);
    }
    let Outcome {
        right,
        wrong,
        requests,
    } = all;
    let reads = right + wrong;
    eprintln!("of {reads} reads {wrong} failed, with at most {requests} requests in a round");
    assert!(all.right > 0 && all.wrong > 0, "chance had no say");
}

/// Runs `work` on a clock that advances only when all tasks wait.
fn simulate<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let long = Duration::from_hours(24);
    let done = runtime.block_on(async { tokio::time::timeout(long, work).await });
    done.expect("it hangs")
}

async fn open(
    resource: Resource,
    change: impl Fn(Response) -> Response + Send + Sync + 'static,
) -> Result<Http, Error> {
    let options = Options::default();
    let net = SimulatedNetwork::new(move |request| change(resource.answer(request)));
    let url = Url::parse("http://host/archive").expect("well-formed");
    Http::open_through(Box::new(net), url, options).await
}

/// Reads everything from the front. Returns the number of bytes, and the error that ended it.
async fn read_to_end(source: Http) -> (usize, Option<Cause>) {
    let (mut pieces, mut read) = (source.stream(), 0);
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(piece) => read += piece.len(),
            Err(error) => return (read, Some(error.cause)),
        }
    }
    (read, None)
}

fn strong(len: usize) -> Resource {
    resource(0, 1, len)
}

/// A network on which this process has no descriptor for a connection while `is_scarce`.
#[derive(Clone, Debug)]
struct Scarce {
    net: SimulatedNetwork,
    is_scarce: Arc<AtomicBool>,
}

impl Transport for Scarce {
    fn send(
        &self,
        method: Method,
        url: Url,
        headers: HeaderMap,
        body: Option<Content>,
    ) -> BoxFuture<'_, Result<RawResponse, Cause>> {
        if self.is_scarce.load(Ordering::SeqCst) {
            let limit = std::io::Error::from_raw_os_error(24);
            return Box::pin(async { Err(limit.into()) });
        }
        self.net.send(method, url, headers, body)
    }

    fn reconnect(&self, _url: &Url, _options: &Options) -> Result<Box<dyn Transport>, Cause> {
        Ok(Box::new(self.clone()))
    }
}

/// A read fails at once, and that of a mount's scan goes on when there are descriptors again.
// Promises: memory-files
#[test]
fn scan_waits_until_there_are_descriptors_again() {
    let requests = simulate(async {
        let resource = strong(300_000);
        let is_scarce = Arc::<AtomicBool>::default();
        let net = Scarce {
            net: SimulatedNetwork::new(move |request| resource.answer(request)),
            is_scarce: Arc::clone(&is_scarce),
        };
        let url = Url::parse("http://host/archive").expect("well-formed");
        let options = Options::default();
        let stats = Arc::clone(&options.stats);
        let source = Http::open_through(Box::new(net), url, options).await;
        let (source, pool) = (source.expect("open"), BufferPool::new(1 << 20));
        is_scarce.store(true, Ordering::SeqCst);
        let forever = RetryForever::default();
        forever.enable();
        let scan = ReadHandle::for_stream(forever);
        let buffer = pool.acquire_async(1000).await;
        let scanning = source.read(Packed(100_000), buffer, ReadMode::Controlled(&scan));
        let reading = async {
            let buffer = pool.acquire_async(1000).await;
            let read = source.read_at(Packed(200_000), buffer).await;
            let error = read.expect_err("there are none");
            assert!(matches!(error.cause, Cause::DescriptorLimit(_)), "{error}");
            assert_eq!(error.attempts, 1);
            tokio::time::sleep(Duration::from_mins(10)).await;
            is_scarce.store(false, Ordering::SeqCst);
        };
        let (scanned, ()) = tokio::join!(scanning, reading);
        let expected = Rng::new(1).bytes(300_000);
        assert!(scanned.expect("there are some again") == expected[100_000..101_000]);
        stats.source_requests.get()
    });
    // It asks after each pause of five seconds, and not more often.
    assert!((100..130).contains(&requests), "{requests}");
}

/// The archive of a registry behind `net`, whose token server is asked for a login.
async fn open_with_login(net: SimulatedNetwork) -> Http {
    let options = Options::default();
    let login = source::registry_login("host", "me/tool", &net, &options);
    let url = Url::parse("http://host/archive").expect("well-formed");
    let target = Target {
        authorizer: Some(login.expect("simulated")),
        ..url.into()
    };
    let opened = Http::open_through(Box::new(net), target, options).await;
    opened.expect("open")
}

/// A status of a token server means what it means of the server itself.
// Promises: retry-credentials
#[test]
fn failures_of_token_servers_are_classed_as_those_of_sources() {
    for (status, is_outage) in [(501, false), (503, true), (520, true)] {
        let error = simulate(async {
            let resource = strong(300_000);
            let is_given = Arc::<AtomicBool>::default();
            let given = Arc::clone(&is_given);
            let net = SimulatedNetwork::new(move |request| {
                let is_given = given.load(Ordering::SeqCst);
                match &*request.path {
                    "/token" => Response::new(status),
                    _ if is_given => {
                        let challenge = r#"Bearer realm="http://host/token",service="s""#;
                        Response::new(401).with("WWW-Authenticate", challenge)
                    }
                    _ => resource.answer(request),
                }
            });
            let (source, pool) = (open_with_login(net).await, BufferPool::new(1 << 20));
            is_given.store(true, Ordering::SeqCst);
            let buffer = pool.acquire_async(1000).await;
            let read = source.read_at(Packed(100_000), buffer).await;
            read.expect_err("there is no token")
        });
        let attempts = error.attempts;
        assert_eq!(error.cause.is_outage(), is_outage, "{status}: {error}");
        assert_eq!(attempts > 5, is_outage, "{status}: {attempts}");
    }
}

/// A token server asks for pauses. All reads wait for their end, and only then ask again.
// Promises: retry-pauses
#[test]
fn retry_after_of_a_token_server_is_honoured() {
    let pause = Duration::from_secs(20);
    for status in [403, 429, 503] {
        let (times, took) = simulate(async {
            let resource = strong(300_000);
            let is_given = Arc::<AtomicBool>::default();
            let times = Arc::<Mutex<Vec<Instant>>>::default();
            let (given, asked) = (Arc::clone(&is_given), Arc::clone(&times));
            let tokens = Tokens::new(Rng::new(1));
            let net = SimulatedNetwork::new(move |request| {
                if !given.load(Ordering::SeqCst) {
                    return resource.answer(request);
                }
                if request.path != "/token" {
                    let refusal = tokens.refusal(request);
                    return refusal.unwrap_or_else(|| resource.answer(request));
                }
                let mut asked = asked.lock().expect("whole");
                asked.push(Instant::now());
                if asked.len() <= 2 {
                    return Fault::Busy(status, pause.as_secs().to_string())
                        .apply(&resource, request);
                }
                tokens.refusal(request).expect("a token")
            });
            let (source, pool) = (open_with_login(net).await, BufferPool::new(1 << 20));
            is_given.store(true, Ordering::SeqCst);
            let began = Instant::now();
            let reads = (1..4).map(async |part| {
                let buffer = pool.acquire_async(1000).await;
                source.read_at(Packed(part * 70_000), buffer).await
            });
            for read in futures_util::future::join_all(reads).await {
                read.expect("within the timeout");
            }
            let times = times.lock().expect("whole").clone();
            (times, began.elapsed())
        });
        assert!(times.len() >= 3, "{status}: {times:?}");
        let first = times.windows(2).take(2);
        assert!(
            first
                .map(|two| two[1] - two[0])
                .all(|waited| waited >= pause)
        );
        assert!(took < pause * 3, "{took:?}");
    }
}

/// A mirror that cannot be opened is asked again as a server that failed a read is.
// Promises: mirror-all-fail
#[test]
fn mirror_that_was_down_is_opened_later() {
    for (status, pauses) in [(503, [5, 10, 20]), (404, [300, 300, 300])] {
        let times = simulate(async {
            let resource = strong(100_000);
            let times = Arc::<Mutex<Vec<Instant>>>::default();
            let asked = Arc::clone(&times);
            let good = SimulatedNetwork::new({
                let resource = resource.clone();
                move |request| resource.answer(request)
            });
            let down = SimulatedNetwork::new(move |request| {
                let mut asked = asked.lock().expect("whole");
                asked.push(Instant::now());
                if asked.len() <= 3 {
                    return Response::new(status);
                }
                resource.answer(request)
            });
            let url = Url::parse("http://host/archive").expect("well-formed");
            let mut options = Options::default();
            options.retry.attempts = 1;
            let places = [good, down].map(|net| source::UnopenedMirror {
                target: url.clone().into(),
                options: options.clone(),
                transport: Some(Box::new(net)),
            });
            let opened = source::open_mirrors(places.into()).await;
            let opened = opened.expect("SOURCE works");
            tokio::time::sleep(Duration::from_hours(1)).await;
            drop(opened);
            let times = times.lock().expect("whole");
            times.clone()
        });
        assert_eq!(times.len(), 4, "{status}: opened once");
        let waited = times.windows(2).map(|two| two[1] - two[0]);
        let expected = pauses.map(Duration::from_secs);
        assert!(
            waited
                .zip(expected)
                .all(|(one, other)| one >= other && one <= other + TICK)
        );
    }
}

// Promises: time-deadline
#[test]
fn aborts_do_not_delay_source_without_ranges() {
    let (read, cause) = simulate(async {
        let drops = |response: Response| response.paced(1, Duration::from_secs(20));
        read_to_end(
            open(strong(100_000).without_ranges(), drops)
                .await
                .expect("open"),
        )
        .await
    });
    assert!(
        matches!(
            cause,
            Some(Cause::Unreachable {
                obstacle: Obstacle::TooSlow,
                ..
            })
        ),
        "{cause:?} after {read} bytes"
    );
    assert_eq!(read, 3);
}

// Promises: time-deadline
#[test]
fn repeated_bytes_do_not_extend_the_deadline() {
    let (read, cause) = simulate(async {
        let second = Duration::from_secs(1);
        let cuts = move |response: Response| response.paced(16 << 10, second).reset_after(100_000);
        read_to_end(
            open(strong(200_000).without_ranges(), cuts)
                .await
                .expect("open"),
        )
        .await
    });
    assert!(cause.is_some_and(|cause| cause.is_outage()));
    assert_eq!(read, 100_000);
}

// Promises: time-deadline
#[test]
fn open_timeout_covers_all_attempts() {
    let took = simulate(async {
        let pause = Duration::from_millis(500);
        let cuts = move |response: Response| response.paced(1 << 10, pause).reset_after(60_000);
        let began = Instant::now();
        assert!(open(strong(200_000), cuts).await.is_err());
        began.elapsed()
    });
    // On the simulated clock: a minute, and the time of the bytes that were sent once.
    assert!(took < Duration::from_secs(76), "{took:?}");
}

/// Reads 16 chunks, requested ahead, from a server that answers requests one by one.
///
/// Each answer takes 10 s, and the chunk `silent` is never answered.
async fn read_from_serial_server(silent: Option<usize>) -> (Vec<Result<Bytes, Error>>, Arc<Stats>) {
    const CHUNK: usize = 100_000;
    let free_at = Mutex::new(Instant::now());
    let bytes = Rng::new(1).bytes(16 * CHUNK);
    let options = Options::default();
    let stats = Arc::clone(&options.stats);
    let resource = Resource::new(bytes);
    let is_silent = move |request: &Request| {
        let start = request.range().map(|(start, _)| start);
        silent.is_some_and(|chunk| start == Some((chunk * CHUNK) as u64))
    };
    let net = SimulatedNetwork::new(move |request| {
        if is_silent(request) {
            return Response::silence();
        }
        let mut free_at = free_at.lock().expect("whole");
        *free_at = (*free_at).max(Instant::now()) + Duration::from_secs(10);
        resource.answer(request).delayed(*free_at - Instant::now())
    });
    let url = Url::parse("http://host/archive").expect("well-formed");
    let source = Http::open_through(Box::new(net), url, options).await;
    let (source, pool) = (source.expect("open"), BufferPool::new(16 << 20));
    let reads = (0..16).map(async |chunk| {
        let watch = ReadHandle::for_stream(RetryForever::default());
        let buffer = pool.acquire_async(CHUNK).await;
        let read = source.read(
            Packed((chunk * CHUNK) as u64),
            buffer,
            ReadMode::Controlled(&watch),
        );
        read.await
    });
    (futures_util::future::join_all(reads).await, stats)
}

// Promises: time-attempt
#[test]
fn queueing_at_serial_server_is_not_silence() {
    let (reads, stats) = simulate(read_from_serial_server(None));
    let expected = Rng::new(1).bytes(1_600_000);
    let reads: Result<Vec<_>, _> = reads.into_iter().collect();
    assert!(reads.expect("read").concat() == expected, "wrong bytes");
    assert_eq!(stats.source_retries.get(), 0, "each was sent once");
}

// Promises: time-attempt
#[test]
fn unanswered_request_times_out_though_others_progress() {
    let (reads, _) = simulate(read_from_serial_server(Some(3)));
    for (number, read) in reads.into_iter().enumerate() {
        assert_eq!(read.is_err(), number == 3, "{number}: {read:?}");
        if let Err(error) = read {
            // On the simulated clock: the other answers, a silence noticed after 30 s, and a minute.
            let bound = Duration::from_secs(16 * 10 + 30 + 61);
            assert!(error.elapsed < bound, "{error:?}");
        }
    }
}

// Promises: request-rejected
#[test]
fn rejected_second_request_is_retried_after_the_first() {
    const CHUNK: usize = 100_000;
    let answer_time = Duration::from_millis(10);
    let (took, refusals) = simulate(async {
        let options = Options {
            jitter_seed: Some(1),
            ..Options::default()
        };
        let stats = Arc::clone(&options.stats);
        let resource = strong(4 * CHUNK);
        let busy_until = Mutex::new(Instant::now());
        let net = SimulatedNetwork::new(move |request| {
            let mut busy_until = busy_until.lock().expect("whole");
            if Instant::now() < *busy_until {
                return Response::new(503);
            }
            *busy_until = Instant::now() + answer_time;
            resource.answer(request).delayed(answer_time)
        });
        let url = Url::parse("http://host/archive").expect("well-formed");
        let source = Http::open_through(Box::new(net), url, options).await;
        let (source, pool) = (source.expect("open"), BufferPool::new(1 << 20));
        let began = Instant::now();
        let reads = (0..4).map(async |chunk| {
            let watch = ReadHandle::for_stream(RetryForever::default());
            let buffer = pool.acquire_async(CHUNK).await;
            let read = source.read(
                Packed((chunk * CHUNK) as u64),
                buffer,
                ReadMode::Controlled(&watch),
            );
            read.await
        });
        for read in futures_util::future::join_all(reads).await {
            read.expect("read");
        }
        (began.elapsed(), stats.source_retries.get())
    });
    assert!(refusals > 0);
    // On the simulated clock: only the answers.
    assert!(took <= answer_time * 4 + TICK, "{took:?}");
}

// Promises: registry-foreign
#[test]
fn redirect_into_the_own_network_is_refused() {
    let requests = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&requests);
    let simulated = SimulatedNetwork::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Response::redirect("http://169.254.169.254/latest")
    });
    let options = Options {
        is_public_only: true,
        ..Options::default()
    };
    let url = Url::parse("http://layers.example/layer").expect("well-formed");
    let opening = Http::open_through(Box::new(simulated), url, options);
    let refused = simulate(opening).expect_err("refused");
    assert!(
        matches!(&refused.cause, Cause::OwnNetwork(host) if host == "169.254.169.254"),
        "{refused:?}"
    );
    assert_eq!(requests.load(Ordering::SeqCst), 1, "only the first server");
}
