//! Slow and straggling requests, and servers that answer one by one, in a simulated network.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tarfs::Packed;
use tarfs::Stats;
use tarfs::fetch::{self, MinSpeed};
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::source::{Http, Options, Source};
use tokio::time::Instant;
use url::Url;

use crate::remote::RETRY_WITHOUT_PAUSE;
use crate::support::http::{Fault, Resource};
use crate::support::rng::Rng;
use crate::support::runtime::TestRuntime;
use crate::support::simulated_network::SimulatedNetwork;

const CHUNK: usize = 100_000;
const CHUNK_LEN: u64 = CHUNK as u64;

/// An open source in a simulated network.
struct Client {
    network: TestRuntime,
    stats: Arc<Stats>,
    source: Arc<dyn Source>,
}

impl Client {
    /// Opens the source behind `net`.
    fn open(net: SimulatedNetwork) -> Self {
        let options = Options {
            idle_timeout: Duration::from_secs(20),
            retry: RETRY_WITHOUT_PAUSE,
            ..Options::default()
        };
        let (network, stats) = (TestRuntime::simulated(), Arc::clone(&options.stats));
        let url = Url::parse("http://host/archive").expect("well-formed");
        let source = network.run(Http::open_through(Box::new(net), url, options));
        let source = Arc::new(source.expect("opened"));
        Self {
            network,
            stats,
            source,
        }
    }

    /// Reads the chunks `numbers` by a range reader, one after the other. They must be those of `bytes`.
    fn assert_reads(&self, bytes: &[u8], numbers: Range<usize>, spare: &BufferPool) {
        let (network, stats) = (self.network.handle().clone(), Arc::clone(&self.stats));
        let source = Arc::clone(&self.source);
        let reads = fetch::RangeReader::new(
            network,
            source,
            spare.clone(),
            stats,
            fetch::CancelToken::default(),
        );
        let reads = Arc::new(reads);
        for number in numbers {
            let (reads, start) = (Arc::clone(&reads), number * CHUNK);
            let buffer = BufferPool::new(CHUNK_LEN).acquire(CHUNK).expect("open");
            let reading = async move { reads.read_hedged(Packed(start as u64), buffer).await };
            let read = self.network.run(reading).expect("read");
            let expected = bytes.chunks(CHUNK).nth(number);
            assert!(Some(&*read) == expected, "wrong bytes");
        }
    }

    /// Streams everything, which must be `bytes`.
    fn assert_streams(&self, bytes: &[u8], connections: usize, min_speed: MinSpeed) {
        let config = fetch::Config {
            chunk_len: CHUNK_LEN,
            connections,
            min_speed,
            ..fetch::Config::new(BufferPool::new(16 << 20), Arc::clone(&self.stats))
        };
        let source = Arc::clone(&self.source);
        let mut stream = fetch::Stream::start(self.network.handle(), source, Packed(0), config);
        let mut all = Vec::new();
        while let Some(chunk) = stream.next().expect("read") {
            all.extend_from_slice(&chunk);
        }
        assert!(all == bytes, "wrong bytes");
    }
}

/// Ranges of the requests so far, in order.
type Ranges = Arc<Mutex<Vec<(u64, u64)>>>;

/// A server that applies the fault for a request's number, from 1, and its range.
fn faulty_server(
    bytes: &[u8],
    fault: impl Fn(usize, (u64, u64)) -> Option<Fault> + Send + Sync + 'static,
) -> (SimulatedNetwork, Ranges) {
    let (resource, ranges) = (Resource::new(bytes.to_owned()), Ranges::default());
    let seen = Arc::clone(&ranges);
    let net = SimulatedNetwork::new(move |request| {
        let range = request.range().expect("a range");
        let mut seen = seen.lock().expect("whole");
        seen.push(range);
        match fault(seen.len(), range) {
            Some(fault) => fault.apply(&resource, request),
            None => resource.answer(request),
        }
    });
    (net, ranges)
}

/// A server whose first response with the byte at `offset` stalls after 5,000 bytes.
fn stalling_server(bytes: &[u8], offset: u64) -> (SimulatedNetwork, Ranges) {
    let has_stalled = AtomicBool::new(false);
    faulty_server(bytes, move |number, (start, end)| {
        let is_there = number > 1 && (start..end).contains(&offset);
        let stalls = is_there && !has_stalled.swap(true, Ordering::SeqCst);
        stalls.then_some(Fault::Stall(5_000))
    })
}

// Promises: request-slow
#[test]
fn slow_request_is_aborted_and_continued_by_another() {
    let bytes = Rng::new(1).bytes(20 * CHUNK);
    let (net, ranges) = stalling_server(&bytes, 5 * CHUNK_LEN + 1);
    let client = Client::open(net);
    let min_speed = MinSpeed {
        bytes_per_second: 50_000,
        wait: Duration::from_millis(300),
    };
    client.assert_streams(&bytes, 4, min_speed);
    assert_eq!(client.stats.source_straggler_retries.get(), 1);
    assert_eq!(client.stats.source_retries.get(), 1);
    assert_eq!(client.stats.source_hedges.get(), 0);
    assert_eq!(client.stats.source_read_bytes.get(), bytes.len() as u64);
    let rest = (5 * CHUNK_LEN + 5_000, 6 * CHUNK_LEN);
    assert!(ranges.lock().expect("whole").contains(&rest));
}

// Promises: request-slow
#[test]
fn last_straggling_request_is_hedged() {
    let bytes = Rng::new(1).bytes(20 * CHUNK);
    let (net, ranges) = stalling_server(&bytes, 20 * CHUNK_LEN - 1);
    let client = Client::open(net);
    let no_min_speed = MinSpeed {
        bytes_per_second: 0,
        wait: Duration::ZERO,
    };
    client.assert_streams(&bytes, 4, no_min_speed);
    assert_eq!(client.stats.source_hedges.get(), 1);
    assert_eq!(client.stats.source_straggler_retries.get(), 0);
    assert_eq!(client.stats.source_retries.get(), 0);
    assert_eq!(client.stats.source_read_bytes.get(), bytes.len() as u64);
    let rest = (19 * CHUNK_LEN + 5_000, 20 * CHUNK_LEN);
    assert_eq!(ranges.lock().expect("whole").last(), Some(&rest));
}

// Promises: request-slow
#[test]
fn straggling_read_is_hedged() {
    let bytes = Rng::new(1).bytes(10 * CHUNK);
    for (is_spare, fault) in [
        (true, Fault::Silence),
        (true, Fault::Stall(1000)),
        (false, Fault::Silence),
    ] {
        let (net, ranges) = faulty_server(&bytes, move |number, _| {
            (number == 6).then(|| fault.clone())
        });
        let client = Client::open(net);
        let spare = BufferPool::new(CHUNK_LEN);
        let _taken = (!is_spare).then(|| spare.acquire(1));
        client.assert_reads(&bytes, 1..8, &spare);
        let (hedges, retries) = if is_spare { (1, 0) } else { (0, 1) };
        assert_eq!(client.stats.source_hedges.get(), hedges);
        assert_eq!(client.stats.source_retries.get(), retries);
        assert_eq!(ranges.lock().expect("whole").len(), 9);
        assert_eq!(spare.used_bytes(), u64::from(!is_spare), "given back");
    }
}

// Promises: request-slow
#[test]
fn server_with_even_latency_gets_no_hedged_requests() {
    let bytes = Rng::new(1).bytes(20 * CHUNK);
    for millis in [0, 30, 2000] {
        let delay = Duration::from_millis(millis);
        let (net, ranges) = faulty_server(&bytes, move |_, _| Some(Fault::Late(delay)));
        let client = Client::open(net);
        client.assert_reads(&bytes, 1..20, &BufferPool::new(1 << 20));
        assert_eq!(client.stats.source_hedges.get(), 0);
        assert_eq!(ranges.lock().expect("whole").len(), 20);
    }
}

/// A server that answers requests one by one, each after 200 ms, and the number of requests that it had at most.
fn serial_server(bytes: &[u8]) -> (SimulatedNetwork, Arc<AtomicUsize>) {
    let (resource, most) = (Resource::new(bytes.to_owned()), Arc::default());
    let (noted, ends) = (Arc::clone(&most), Mutex::new(Vec::new()));
    let net = SimulatedNetwork::new(move |request| {
        let (now, mut ends) = (Instant::now(), ends.lock().expect("whole"));
        ends.retain(|&end| end > now);
        let end = ends.last().copied().unwrap_or(now) + Duration::from_millis(200);
        ends.push(end);
        AtomicUsize::fetch_max(&noted, ends.len(), Ordering::SeqCst);
        resource.answer(request).delayed(end - now)
    });
    (net, most)
}

// Promises: request-rejected, request-limits
#[test]
fn serial_server_gets_one_request_at_a_time() {
    let bytes = Rng::new(1).bytes(60 * CHUNK);
    let (net, most) = serial_server(&bytes);
    let client = Client::open(net);
    let connections = fetch::DEFAULT_CONNECTIONS;
    client.assert_streams(&bytes, connections, MinSpeed::default());
    // The first request, and two after the second one waits for the first.
    assert_eq!(client.stats.source_requests.get(), 3);
    assert_eq!(client.stats.source_straggler_retries.get(), 0);
    assert_eq!(client.stats.source_hedges.get(), 0);
    assert_eq!(most.swap(0, Ordering::SeqCst), 2);
    let (source, pool) = (Arc::clone(&client.source), BufferPool::new(4 * CHUNK_LEN));
    let reads = client.network.run(async move {
        let reads = (1..5).map(async |number| {
            let buffer = pool.acquire_async(CHUNK).await;
            let start = Packed(number * CHUNK_LEN);
            source.read_at(start, buffer).await
        });
        join_all(reads).await
    });
    for (read, expected) in reads.into_iter().zip(bytes.chunks(CHUNK).skip(1)) {
        assert!(read.expect("read") == expected, "wrong bytes");
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
}
