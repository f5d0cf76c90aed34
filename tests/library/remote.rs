//! Sources behind a server, and streams of them.

use std::error::Error as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tarfs::Stats;
use tarfs::fetch;
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::source::{self, Access, Cause, Error, Identity, Obstacle, Options, Retry, Source};
use tarfs::{Extent, Packed};

use crate::support::http::{Resource, Response, Server};
use crate::support::rng::Rng;
use crate::support::runtime::TestRuntime;
use crate::support::wait;

/// Two retries at once, so that no test waits.
pub(crate) const RETRY_WITHOUT_PAUSE: Retry = Retry {
    attempts: 3,
    retries_outages: false,
    initial_pause: Duration::ZERO,
    max_pause: Duration::ZERO,
};

/// Length of the first request.
const PREFIX_LEN: u64 = 64 << 10;

/// A runtime and counters.
struct Client {
    runtime: TestRuntime,
    stats: Arc<Stats>,
    headers: Vec<(String, String)>,
}

impl Client {
    fn new() -> Self {
        Self::on(TestRuntime::new())
    }

    fn on(runtime: TestRuntime) -> Self {
        Self {
            runtime,
            stats: Arc::default(),
            headers: Vec::new(),
        }
    }

    fn open(&self, spec: &str) -> Result<Arc<dyn Source>, Error> {
        self.open_as(spec, |options| options)
    }

    /// As [`Client::open`], with some options changed.
    fn open_as(
        &self,
        spec: &str,
        change: impl FnOnce(Options) -> Options,
    ) -> Result<Arc<dyn Source>, Error> {
        let options = Options {
            identity: Arc::new(Identity {
                headers: self.headers.clone(),
                ..Identity::default()
            }),
            stats: Arc::clone(&self.stats),
            connect_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(5),
            retry: RETRY_WITHOUT_PAUSE,
            ..Options::default()
        };
        self.runtime.block_on(source::open(spec, change(options)))
    }

    fn read(&self, source: &Arc<dyn Source>, start: u64, len: u64) -> Result<Bytes, Error> {
        let extent = Extent::with_len(Packed(start), len);
        fetch::read(self.runtime.handle(), source, extent)
    }

    fn config(&self, pool: BufferPool) -> fetch::Config {
        fetch::Config::new(pool, Arc::clone(&self.stats))
    }

    fn stream(
        &self,
        source: &Arc<dyn Source>,
        start: u64,
        budget: u64,
        chunk_len: u64,
    ) -> fetch::Stream {
        let config = fetch::Config {
            chunk_len,
            connections: 4,
            ..self.config(BufferPool::new(budget))
        };
        fetch::Stream::start(
            self.runtime.handle(),
            Arc::clone(source),
            Packed(start),
            config,
        )
    }
}

fn collect(mut stream: fetch::Stream) -> Result<Vec<u8>, Error> {
    let mut all = Vec::new();
    while let Some(chunk) = stream.next()? {
        assert!(!chunk.is_empty());
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

/// Bytes that do not repeat for a while.
fn random_bytes(len: usize) -> Vec<u8> {
    Rng::new(1).bytes(len)
}

#[test]
fn file_is_read_without_fetching_a_byte_twice() {
    let (server, client) = (Server::start(), Client::on(TestRuntime::frozen()));
    let bytes = random_bytes(5_000_000);
    server.serve("/a", Resource::new(bytes.clone()).etag("\"1\""));
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(source.access(), Access::Ranges);
    assert_eq!(source.fingerprint().len, Some(5_000_000));
    assert!(source.fingerprint().is_strong());
    let stream = client.stream(&source, 0, 16 << 20, 1 << 20);
    assert_eq!(collect(stream).expect("read"), bytes);
    let stats = &client.stats;
    assert_eq!(server.sent_bytes("/a"), 5_000_000);
    assert_eq!(stats.source_read_bytes.get(), 5_000_000);
    assert_eq!(
        stats.source_requests.get(),
        server.requests("/a").len() as u64
    );
}

// Promises: version-unmixed
#[test]
fn requests_after_the_first_require_the_strong_version() {
    let (server, client) = (Server::start(), Client::new());
    server.serve("/a", Resource::new(random_bytes(1_000_000)).etag("\"1\""));
    let source = client.open(&server.url("/a")).expect("opened");
    client.read(&source, 500_000, 10).expect("read");
    let seen = server.requests("/a");
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].request.range(), Some((0, PREFIX_LEN)));
    assert_eq!(seen[1].request.header("if-match"), Some("\"1\""));
    assert_eq!(seen[1].request.range(), Some((500_000, 500_010)));
    assert!(
        seen.iter()
            .all(|seen| seen.request.header("accept-encoding") == Some("identity"))
    );
}

#[test]
fn first_bytes_come_from_memory() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(100_000));
    server.serve("/a", Resource::new(bytes.clone()));
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(
        client.read(&source, 10, 1000).expect("read"),
        bytes[10..1010]
    );
    assert_eq!(server.requests("/a").len(), 1);
    assert_eq!(
        client.read(&source, 65_000, 35_000).expect("read"),
        bytes[65_000..]
    );
    assert_eq!(
        server.requests("/a")[1].request.range(),
        Some((PREFIX_LEN, 100_000))
    );
}

// Promises: version-unmixed
#[test]
fn another_version_is_never_mixed_in() {
    let old = Resource::new(random_bytes(300_000));
    let new = Resource::new(random_bytes(300_000).into_iter().rev().collect::<Vec<_>>());
    let longer = Resource::new(random_bytes(300_001));
    for (before, after) in [
        (old.clone().etag("\"1\""), new.clone().etag("\"2\"")),
        (old.clone().etag("W/\"1\""), new.clone().etag("W/\"2\"")),
        (
            old.clone().last_modified("Monday"),
            new.clone().last_modified("Tuesday"),
        ),
        (old.clone().last_modified("Monday"), new.clone()),
        (old.clone(), longer),
        (
            old.clone().etag("\"1\""),
            Resource::new(random_bytes(100)).etag("\"2\""),
        ),
        (old.clone(), Resource::new(random_bytes(100))),
    ] {
        let (server, client) = (Server::start(), Client::new());
        server.serve("/a", before);
        let source = client.open(&server.url("/a")).expect("opened");
        client.read(&source, 200_000, 10).expect("the same version");
        server.serve("/a", after);
        let error = client
            .read(&source, 250_000, 10)
            .expect_err("another version");
        assert!(matches!(error.cause, Cause::Changed), "{:?}", error.cause);
    }
}

// Promises: version-unmixed
#[test]
fn server_that_ignores_if_match_is_detected() {
    let (server, client) = (Server::start(), Client::new());
    let versions = ["\"1\"", "\"2\""].map(|etag| Resource::new(random_bytes(300_000)).etag(etag));
    server.route("/a", move |request| {
        let mut blind = request.clone();
        blind.remove_header("if-match");
        versions[usize::from(request.number > 1)].answer(&blind)
    });
    let source = client.open(&server.url("/a")).expect("opened");
    let error = client
        .read(&source, 200_000, 10)
        .expect_err("another version");
    assert!(matches!(error.cause, Cause::Changed), "{:?}", error.cause);
}

// Promises: http-no-ranges
#[test]
fn server_without_ranges_is_streamed_in_one_request() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(5_000_000));
    server.serve("/a", Resource::new(bytes.clone()).without_ranges());
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(source.access(), Access::Stream);
    assert_eq!(source.fingerprint().len, Some(5_000_000));
    assert_eq!(
        collect(client.stream(&source, 0, 2 << 20, 1 << 20)).expect("read"),
        bytes
    );
    assert_eq!(server.requests("/a").len(), 1);
    let error = collect(client.stream(&source, 0, 2 << 20, 1 << 20)).expect_err("spent");
    assert!(matches!(error.cause, Cause::AlreadyRead));
}

/// How a server without usable ranges answers a request for one. It gets a right response.
fn range_refusals() -> Vec<(&'static str, RangeRefusal)> {
    vec![
        ("416", |_| Response::new(416)),
        ("400", |_| Response::new(400).with_body("no ranges")),
        ("501", |_| Response::new(501)),
        ("no Content-Range", |good| good.without("Content-Range")),
        ("multipart", |good| {
            let text = "multipart/byteranges; boundary=B";
            good.without("Content-Range").with("Content-Type", text)
        }),
    ]
}

type RangeRefusal = fn(Response) -> Response;

// Promises: http-no-ranges
#[test]
fn server_that_refuses_the_first_range_is_read_without_one() {
    for len in [30_000, 300_000] {
        for (name, refuse) in range_refusals() {
            let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(len));
            let resource = Resource::new(bytes.clone());
            server.route("/a", move |request| {
                let good = resource.answer(request);
                let is_range = request.range().is_some();
                if is_range { refuse(good) } else { good }
            });
            let source = client.open(&server.url("/a")).expect(name);
            assert_eq!(source.fingerprint().len, Some(len as u64), "{name}");
            let read = collect(client.stream(&source, 0, 2 << 20, 1 << 20));
            assert!(read.expect(name) == bytes, "{name}");
        }
    }
}

// Promises: http-no-ranges
#[test]
fn range_that_ends_behind_the_source_may_be_refused() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(30_000));
    let resource = Resource::new(bytes.clone());
    server.route("/a", move |request| match request.range() {
        Some((_, end)) if end > 30_000 => Response::new(416).with("Content-Range", "bytes */30000"),
        _ => resource.answer(request),
    });
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(source.access(), Access::Ranges, "all is in memory");
    assert_eq!(
        client.read(&source, 100, 29_000).expect("read"),
        bytes[100..29_100]
    );
}

// Promises: http-no-ranges
#[test]
fn length_of_a_part_is_not_taken_for_that_of_the_source() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
    let resource = Resource::new(bytes.clone());
    server.route("/a", move |request| {
        let good = resource.answer(request);
        match request.range() {
            Some(_) => good.with("Content-Range", "bytes 0-65535/65536"),
            None => good,
        }
    });
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(source.fingerprint().len, Some(300_000));
    let read = collect(client.stream(&source, 0, 2 << 20, 1 << 20));
    assert!(read.expect("read") == bytes);
    // A source can be as long as the first range.
    server.serve("/b", Resource::new(bytes[..65_536].to_vec()));
    let source = client.open(&server.url("/b")).expect("opened");
    assert_eq!(source.access(), Access::Ranges);
    assert_eq!(
        client.read(&source, 0, 65_536).expect("read"),
        bytes[..65_536]
    );
}

// Promises: http-no-ranges
#[test]
fn empty_and_transformed_sources_are_read_whatever_their_status() {
    let (server, client) = (Server::start(), Client::new());
    server.route("/empty", |request| match request.range() {
        Some(_) => Response::new(416),
        None => Response::new(200),
    });
    let source = client.open(&server.url("/empty")).expect("opened");
    assert_eq!(source.fingerprint().len, Some(0));
    let bytes = random_bytes(300_000);
    let body = bytes.clone();
    server.route("/203", move |_| Response::new(203).with_body(body.clone()));
    let source = client.open(&server.url("/203")).expect("opened");
    let read = collect(client.stream(&source, 0, 2 << 20, 1 << 20));
    assert!(read.expect("read") == bytes);
}

#[test]
fn truncated_stream_is_an_error_after_its_bytes() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(3_000_000));
    let resource = Resource::new(bytes.clone()).without_ranges();
    server.route("/a", move |request| {
        resource.answer(request).cut_after(2_500_000)
    });
    let source = client.open(&server.url("/a")).expect("opened");
    let mut stream = client.stream(&source, 0, 8 << 20, 1 << 20);
    let mut received = 0;
    let error = loop {
        match stream.next() {
            Ok(chunk) => {
                let chunk = chunk.expect("not the end");
                assert_eq!(chunk, bytes[received..received + chunk.len()]);
                received += chunk.len();
            }
            Err(error) => break error,
        }
    };
    assert_eq!(received, 2_500_000);
    assert!(matches!(error.cause, Cause::Truncated), "{:?}", error.cause);
    assert!(stream.next().is_err(), "the error stays");
}

#[test]
fn empty_file_is_empty_for_any_server_response() {
    for resource in [Resource::new(""), Resource::new("").without_ranges()] {
        let (server, client) = (Server::start(), Client::new());
        server.serve("/a", resource);
        let source = client.open(&server.url("/a")).expect("opened");
        assert_eq!(source.fingerprint().len, Some(0));
        assert_eq!(
            collect(client.stream(&source, 0, 1 << 20, 1 << 20)).expect("read"),
            b""
        );
    }
}

// Promises: redirect-followed
#[test]
fn redirects_are_followed_once_and_remembered() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
    server.serve("/b", Resource::new(bytes.clone()));
    server.route("/a", |_| Response::redirect("b?signed"));
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(
        client.read(&source, 100_000, 200_000).expect("read"),
        bytes[100_000..]
    );
    client.read(&source, 200_000, 10).expect("read");
    assert_eq!(server.requests("/a").len(), 1);
    let seen = server.requests("/b");
    assert_eq!(seen.len(), 3);
    assert!(
        seen.iter()
            .all(|seen| seen.request.query == "signed" && seen.status == 206)
    );
    assert_eq!(source.location(), server.url("/a"));
}

#[test]
fn redirect_loop_is_an_error() {
    let (server, client) = (Server::start(), Client::new());
    server.route("/a", |_| Response::redirect("/a"));
    let error = client.open(&server.url("/a")).expect_err("a circle");
    assert!(matches!(error.cause, Cause::Protocol(_)));
    assert_eq!(server.requests("/a").len(), 11);
}

// Promises: auth-origin
#[test]
fn headers_and_passwords_never_reach_another_host() {
    let server = Server::start();
    let mut client = Client::new();
    client
        .headers
        .push(("X-Key".to_owned(), "secret".to_owned()));
    server.serve("/b", Resource::new(random_bytes(300_000)));
    let elsewhere = server.other_url("/b");
    server.route("/a", move |_| Response::redirect(&elsewhere));
    server.route("/c", |_| Response::redirect("/b"));
    let with_user = |path: &str| server.url(path).replace("http://", "http://me:pass@");

    let source = client.open(&with_user("/a")).expect("opened");
    client.read(&source, 200_000, 10).expect("read");
    let asked = &server.requests("/a")[0].request;
    assert_eq!(asked.header("x-key"), Some("secret"));
    assert_eq!(asked.header("authorization"), Some("Basic bWU6cGFzcw=="));
    for seen in server.requests("/b") {
        assert_eq!(seen.request.header("x-key"), None);
        assert_eq!(seen.request.header("authorization"), None);
    }
    assert!(!source.location().contains("pass") && !source.canonical_location().contains("pass"));

    let source = client.open(&with_user("/c")).expect("opened");
    client.read(&source, 200_000, 10).expect("read");
    for seen in server.requests("/b").iter().skip(2) {
        assert_eq!(seen.request.header("x-key"), Some("secret"));
        assert_eq!(
            seen.request.header("authorization"),
            Some("Basic bWU6cGFzcw==")
        );
    }
}

// Promises: redirect-followed
#[test]
fn expired_signed_url_is_renewed() {
    // S3 returns 400 for an expired token.
    for status in [400, 401, 403, 404, 409, 410, 422, 498] {
        let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
        let resource = Resource::new(bytes.clone()).etag("\"1\"");
        // Each redirect signs anew. A signature is valid for two requests.
        server.route("/a", |request| {
            Response::redirect(format!("/b{}", request.number))
        });
        for signed in ["/b1", "/b2"] {
            let resource = resource.clone();
            server.route(signed, move |request| match request.number {
                1 | 2 => resource.answer(request),
                _ => Response::new(status),
            });
        }
        let source = client.open(&server.url("/a")).expect("opened");
        for _ in 0..3 {
            assert_eq!(
                client.read(&source, 200_000, 9).expect("read"),
                bytes[200_000..200_009]
            );
        }
        assert_eq!(server.requests("/a").len(), 2);
        assert_eq!(server.requests("/b1").len(), 3);
        assert_eq!(server.requests("/b2").len(), 2);
    }
}

// Promises: redirect-followed
#[test]
fn expired_link_of_a_fresh_redirect_is_asked_for_once_more() {
    for status in [400, 403] {
        let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
        let resource = Resource::new(bytes.clone()).etag("\"1\"");
        server.route("/a", |request| {
            Response::redirect(format!("/b{}", request.number))
        });
        // The link of the second redirect has expired on its way, when the first one broke.
        let first = resource.clone();
        server.route("/b1", move |request| match request.number {
            1 => first.answer(request),
            _ => Response::hang_up(),
        });
        server.route("/b2", move |_| Response::new(status));
        server.serve("/b3", resource);
        let source = client.open(&server.url("/a")).expect("opened");
        let read = client.read(&source, 200_000, 9).expect("read");
        assert_eq!(read, bytes[200_000..200_009]);
        assert_eq!(server.requests("/a").len(), 3);
    }
}

// Promises: version-unmixed
#[test]
fn refusal_of_every_condition_is_no_change() {
    for tag in [Some("\"1\""), None] {
        let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
        let resource = Resource::new(bytes.clone()).etag("\"1\"");
        server.route("/a", move |request| {
            let refusal = Response::new(412);
            match (request.header("if-match"), tag) {
                (None, _) => resource.answer(request),
                (Some(_), Some(tag)) => refusal.with("ETag", tag),
                (Some(_), None) => refusal,
            }
        });
        let source = client.open(&server.url("/a")).expect("opened");
        for _ in 0..3 {
            let read = client.read(&source, 200_000, 9).expect("read");
            assert_eq!(read, bytes[200_000..200_009]);
        }
        assert_eq!(server.requests("/a").len(), 5, "it is remembered");
        let other = Resource::new(random_bytes(300_000)).etag("\"2\"");
        server.serve("/a", other);
        let error = client.read(&source, 200_000, 9).expect_err("changed");
        assert!(matches!(error.cause, Cause::Changed), "{:?}", error.cause);
    }
}

// Promises: retry-which
#[test]
fn busy_and_misdirected_answers_are_retried() {
    for answer in [
        Response::new(421),
        Response::new(403).with("Retry-After", "0"),
        Response::new(529),
    ] {
        let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
        let resource = Resource::new(bytes.clone());
        server.route("/a", move |request| match request.number % 2 {
            1 => answer.clone(),
            _ => resource.answer(request),
        });
        let source = client.open(&server.url("/a")).expect("opened");
        let read = client.read(&source, 200_000, 9).expect("read");
        assert_eq!(read, bytes[200_000..200_009]);
        assert_eq!(server.requests("/a").len(), 4);
    }
}

// Promises: redirect-followed
#[test]
fn target_of_renewed_redirect_is_checked() {
    let (server, client) = (Server::start(), Client::new());
    let old = Resource::new(random_bytes(300_000)).last_modified("Monday");
    server.route("/a", |request| {
        Response::redirect(format!("/b{}", request.number))
    });
    server.route("/b1", move |request| match request.number {
        1 => old.answer(request),
        _ => Response::new(403),
    });
    server.serve(
        "/b2",
        Resource::new(random_bytes(300_000)).last_modified("Tuesday"),
    );
    let source = client.open(&server.url("/a")).expect("opened");
    let error = client
        .read(&source, 200_000, 9)
        .expect_err("another version");
    assert!(matches!(error.cause, Cause::Changed), "{:?}", error.cause);
}

#[test]
fn access_denied_is_retried_once() {
    let (server, client) = (Server::start(), Client::new());
    let resource = Resource::new(random_bytes(300_000));
    server.route("/a", |_| Response::redirect("/b"));
    server.route("/b", move |request| match request.number {
        1 => resource.answer(request),
        _ => Response::new(403),
    });
    let source = client.open(&server.url("/a")).expect("opened");
    let error = client.read(&source, 200_000, 9).expect_err("refused");
    assert!(matches!(error.cause, Cause::DeniedStatus(403)));
    assert_eq!(
        (server.requests("/a").len(), server.requests("/b").len()),
        (2, 3)
    );
}

// Promises: http-encoding
#[test]
fn content_encoding_is_rejected() {
    for has_ranges in [true, false] {
        let (server, client) = (Server::start(), Client::new());
        let resource = Resource::new(random_bytes(1000));
        let resource = if has_ranges {
            resource
        } else {
            resource.without_ranges()
        };
        server.route("/a", move |request| {
            resource.answer(request).with("Content-Encoding", "br")
        });
        let error = client.open(&server.url("/a")).expect_err("wrapped");
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains("Content-Encoding: br"), "{cause}");
    }
}

// Promises: gcs-credentials, http-encoding
#[test]
fn stored_gzip_with_content_encoding_is_read_as_is() {
    for encoding in ["gzip", "x-gzip"] {
        let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
        let resource = Resource::new(bytes.clone()).etag("\"1\"");
        server.route("/a", move |request| {
            resource.answer(request).with("Content-Encoding", encoding)
        });
        let source = client.open(&server.url("/a")).expect("opened");
        assert_eq!(source.fingerprint().len, Some(300_000));
        let read = client
            .read(&source, 200_000, 9)
            .expect("ranges of what is stored");
        assert_eq!(read, bytes[200_000..200_009]);
    }
}

// Promises: http-encoding
#[test]
fn short_range_response_is_completed() {
    for total in ["*", "300000"] {
        let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
        let stored = bytes.clone();
        server.route("/a", move |request| {
            let (start, end) = request.range().expect("a range");
            let whole = Resource::new(stored.clone()).etag("\"1\"");
            if request.number == 1 {
                return whole.answer(request);
            }
            // At most a hundred bytes for any request.
            let end = end.min(start + 100);
            let last = end - 1;
            let part = stored.get(usize_of(start)..usize_of(end)).expect("inside");
            Response::new(206)
                .with("ETag", "\"1\"")
                .with("Content-Range", format!("bytes {start}-{last}/{total}"))
                .with_body(part.to_vec())
        });
        let source = client.open(&server.url("/a")).expect("opened");
        let read = client.read(&source, 200_000, 950).expect("in ten parts");
        assert_eq!(read, bytes[200_000..200_950], "{total}");
        assert_eq!(server.requests("/a").len(), 11, "{total}");
    }
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

#[test]
fn wrong_range_is_rejected() {
    for range in [
        "bytes 200001-200010/300000",
        "bytes 200000-200010/300000",
        "nonsense",
    ] {
        let (server, client) = (Server::start(), Client::new());
        let resource = Resource::new(random_bytes(300_000));
        server.route("/a", move |request| match request.number {
            1 => resource.answer(request),
            _ => resource.answer(request).with("Content-Range", range),
        });
        let source = client.open(&server.url("/a")).expect("opened");
        let error = client
            .read(&source, 200_000, 10)
            .expect_err("another range");
        assert!(
            matches!(error.cause, Cause::Protocol(_)),
            "{range}: {:?}",
            error.cause
        );
    }
}

#[test]
fn changed_total_length_is_another_version() {
    let (server, client) = (Server::start(), Client::new());
    let resource = Resource::new(random_bytes(300_000));
    server.route("/a", move |request| match request.number {
        1 => resource.answer(request),
        _ => resource
            .answer(request)
            .with("Content-Range", "bytes 200000-200009/400000"),
    });
    let source = client.open(&server.url("/a")).expect("opened");
    let error = client
        .read(&source, 200_000, 10)
        .expect_err("another version");
    assert!(matches!(error.cause, Cause::Changed));
}

#[test]
fn unknown_length_is_found_at_the_end() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(3_000_000));
    let resource = Resource::new(bytes.clone());
    server.route("/a", move |request| {
        let response = resource.answer(request);
        let range = response
            .header("Content-Range")
            .map(|range| range.replace("/3000000", "/*"));
        range.map_or(response.clone(), |range| {
            response.with("Content-Range", range)
        })
    });
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(source.fingerprint().len, None);
    assert_eq!(
        collect(client.stream(&source, 0, 8 << 20, 1 << 20)).expect("read"),
        bytes
    );
    assert_eq!(
        client.read(&source, 2_999_990, 100).expect("read"),
        bytes[2_999_990..]
    );
    assert_eq!(
        client.read(&source, 4_000_000, 100).expect("read"),
        b"".as_slice()
    );
}

// Promises: retry-which
#[test]
fn cut_response_is_continued_where_it_ended() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
    let resource = Resource::new(bytes.clone());
    server.route("/a", move |request| match request.number {
        2 => resource.answer(request).cut_after(50_000),
        _ => resource.answer(request),
    });
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(
        client.read(&source, 100_000, 200_000).expect("read"),
        bytes[100_000..]
    );
    assert_eq!(
        server.requests("/a")[2].request.range(),
        Some((150_000, 300_000))
    );
    assert_eq!(client.stats.source_retries.get(), 1);
}

/// Length of the chunks in the tests below.
const CHUNK: u64 = 100_000;

// Promises: request-limits
#[test]
fn requests_in_flight_stay_within_the_limit() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(5_000_000));
    server.serve("/a", Resource::new(bytes.clone()));
    let source = client.open(&server.url("/a")).expect("opened");
    for connections in [1, 3] {
        let stats = Arc::<Stats>::default();
        let config = fetch::Config {
            chunk_len: CHUNK,
            connections,
            ..fetch::Config::new(BufferPool::new(16 << 20), Arc::clone(&stats))
        };
        let source = Arc::clone(&source);
        let stream = fetch::Stream::start(client.runtime.handle(), source, Packed(0), config);
        assert!(collect(stream).expect("read") == bytes, "they differ");
        let peak = stats.source_peak_requests.get();
        assert!((1..=connections as u64).contains(&peak), "{peak}");
    }
}

// Promises: retry-which, retry-how-long
#[test]
fn failing_server_is_retried_until_the_deadline() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
    let resource = Resource::new(bytes.clone());
    server.route("/a", move |request| match request.number {
        1 | 4 | 7.. => Response::new(503).with("Retry-After", "0"),
        _ => resource.answer(request),
    });
    let source = client.open(&server.url("/a")).expect("opened");
    client.read(&source, 200_000, 10).expect("read");
    client.read(&source, 200_000, 10).expect("read again");
    client.read(&source, 200_000, 10).expect("read again");
    let error = client.read(&source, 200_000, 10).expect_err("given up");
    assert!(matches!(error.cause, Cause::Http(503)));
    assert_eq!(error.attempts, 3);
    assert!(error.to_string().contains("(3 attempts in "), "{error}");
}

// Promises: retry-pauses
#[test]
fn retry_after_pauses_all_requests() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(300_000));
    let (resource, complained) = (Resource::new(bytes.clone()), Mutex::new(None));
    let early = Arc::new(AtomicBool::new(false));
    let is_early = Arc::clone(&early);
    server.route("/a", move |request| {
        let mut complained = complained.lock().expect("no panic");
        if let Some(since) = *complained {
            let since: Instant = since;
            is_early.fetch_or(since.elapsed() < Duration::from_secs(1), Ordering::SeqCst);
            return resource.answer(request);
        }
        if request.number == 1 {
            return resource.answer(request);
        }
        *complained = Some(Instant::now());
        Response::new(429).with("Retry-After", "1")
    });
    let source = client.open(&server.url("/a")).expect("opened");
    std::thread::scope(|scope| {
        let read = || client.read(&source, 100_000, 10).expect("read");
        let first = scope.spawn(read);
        wait::wait_until("the slowdown is counted", || {
            client.stats.source_slowdowns.get() == 1
        });
        let others: Vec<_> = (0..5).map(|_| scope.spawn(read)).collect();
        for reader in others.into_iter().chain([first]) {
            assert_eq!(reader.join().expect("no panic"), bytes[100_000..100_010]);
        }
    });
    assert!(!early.load(Ordering::SeqCst), "a request did not wait");
    assert_eq!(server.requests("/a").len(), 8);
}

// Promises: request-rejected
#[test]
fn throttling_server_gets_fewer_requests_at_once() {
    throttled_requests_decrease(429, &Response::new(429));
}

/// Some object stores answer with other statuses.
// Promises: request-rejected
#[test]
fn throttling_is_recognized_by_its_code() {
    let answer = Response::new(400).with("Content-Type", "application/xml");
    let body = "<Error><Code>SlowDown</Code></Error>";
    throttled_requests_decrease(400, &answer.with_body(body));
}

/// Reads everything from a server that answers `refusal` to each third request at once.
#[track_caller]
fn throttled_requests_decrease(status: u16, refusal: &Response) {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(6_000_000));
    let (resource, refusal) = (Resource::new(bytes.clone()), refusal.clone());
    server.route("/a", move |request| match request.in_flight {
        1 | 2 => resource.answer(request).delayed(Duration::from_millis(5)),
        _ => refusal.clone(),
    });
    let patient = |options| Options {
        retry: Retry {
            attempts: 1,
            retries_outages: true,
            initial_pause: Duration::from_millis(1),
            max_pause: Duration::from_millis(5),
        },
        connections: 8,
        ..options
    };
    let source = client.open_as(&server.url("/a"), patient).expect("opened");
    let config = fetch::Config {
        chunk_len: CHUNK,
        connections: 8,
        ..client.config(BufferPool::new(16 << 20))
    };
    let stream = fetch::Stream::start(client.runtime.handle(), source, Packed(0), config);
    assert!(collect(stream).expect("read") == bytes, "they differ");
    let seen = server.requests("/a");
    let refused = seen.iter().filter(|seen| seen.status == status).count();
    let slowdowns = client.stats.source_slowdowns.get();
    assert!(slowdowns > 0);
    // With eight at once, six would be rejected again and again.
    assert!(refused * 3 < seen.len() * 2, "{refused} of {}", seen.len());
}

#[test]
fn permanent_errors_are_not_retried() {
    let (server, client) = (Server::start(), Client::new());
    for (status, expected) in [
        (404, "not found"),
        (401, "refuses access"),
        (400, "status 400"),
    ] {
        let path = format!("/{status}?token=hidden");
        server.route(&format!("/{status}"), move |_| Response::new(status));
        let error = client.open(&server.url(&path)).expect_err("refused");
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains(expected), "{cause}");
        assert!(
            error.to_string().ends_with(&format!("/{status}?…")),
            "{error}"
        );
        // 400 may be about the range.
        let requests = 1 + usize::from(status == 400);
        assert_eq!(server.requests(&format!("/{status}")).len(), requests);
    }
}

#[test]
fn connection_refused_error_contains_no_secrets() {
    let client = Client::new();
    let server = Server::start();
    let url = server
        .url("/a?sig=hidden")
        .replace("http://", "http://me:hidden@");
    drop(server);
    let error = client.open(&url).expect_err("no server");
    let Cause::Unreachable { obstacle, detail } = &error.cause else {
        panic!("{:?}", error.cause)
    };
    assert_eq!(*obstacle, Obstacle::Refused);
    assert!(
        !detail.contains("hidden") && !format!("{error:?}").contains("hidden"),
        "{error:?}"
    );
    assert_eq!(error.attempts, 3);
}

#[test]
fn pool_of_one_chunk_suffices_and_stays_within_budget() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(5_000_000));
    server.serve("/a", Resource::new(bytes.clone()));
    let source = client.open(&server.url("/a")).expect("opened");
    assert_eq!(
        collect(client.stream(&source, 0, 1 << 20, 1 << 20)).expect("read"),
        bytes
    );
    let pool = BufferPool::new(3 << 20);
    let config = fetch::Config {
        chunk_len: 1 << 20,
        connections: 8,
        ..client.config(pool.clone())
    };
    let stream = fetch::Stream::start(client.runtime.handle(), source, Packed(0), config);
    assert_eq!(collect(stream).expect("read"), bytes);
    assert!(pool.peak_bytes() <= 3 << 20, "{}", pool.peak_bytes());
}

#[test]
fn stream_starts_anywhere_and_can_be_dropped_anytime() {
    let (server, client, bytes) = (Server::start(), Client::new(), random_bytes(5_000_000));
    server.serve("/ranges", Resource::new(bytes.clone()));
    server.serve("/stream", Resource::new(bytes.clone()).without_ranges());
    for path in ["/ranges", "/stream"] {
        let source = client.open(&server.url(path)).expect("opened");
        let rest = collect(client.stream(&source, 4_321_000, 4 << 20, 1 << 20)).expect("read");
        assert_eq!(rest, bytes[4_321_000..]);
        let source = client.open(&server.url(path)).expect("opened");
        let mut stream = client.stream(&source, 0, 4 << 20, 1 << 20);
        let first = stream.next().expect("read").expect("not the end");
        drop(stream);
        assert_eq!(first, bytes[..first.len()]);
    }
}

#[test]
fn stopped_runtime_is_not_end_of_file() {
    let (server, client) = (Server::start(), Client::new());
    server.serve("/a", Resource::new(random_bytes(5_000_000)));
    let source = client.open(&server.url("/a")).expect("opened");
    let mut stream = client.stream(&source, 0, 1 << 20, 1 << 20);
    let held = stream.next().expect("read");
    drop(client);
    drop(held);
    let error = loop {
        match stream.next() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the end"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.cause, Cause::Cancelled), "{:?}", error.cause);
}

// Promises: source-kinds
#[test]
fn local_files_are_sources_by_path_and_by_url() {
    let (client, bytes) = (Client::new(), random_bytes(3_000_000));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a b.tar");
    std::fs::write(&path, &bytes).expect("written");
    let url = format!("file://{}/a%20b.tar", directory.path().display());
    for spec in [path.to_str().expect("utf-8"), &url] {
        let source = client.open(spec).expect("opened");
        assert!(source.fingerprint().is_strong());
        assert_eq!(
            collect(client.stream(&source, 5, 4 << 20, 1 << 20)).expect("read"),
            bytes[5..]
        );
        let error = client
            .read(&source, 2_999_999, 2)
            .expect_err("past the end");
        assert!(matches!(error.cause, Cause::Truncated));
    }
    let error = client
        .open(directory.path().to_str().expect("utf-8"))
        .expect_err("a directory");
    assert!(matches!(error.cause, Cause::Unsupported(_)));
    let error = client.open("/nowhere/at/all").expect_err("missing");
    assert!(matches!(error.cause, Cause::NotFound));
    let error = client.open("ftp://host/a").expect_err("ftp");
    assert!(matches!(error.cause, Cause::UnknownScheme(_)));
}

// Promises: version-file
#[test]
fn written_file_has_changed_but_replaced_one_has_not() {
    let client = Client::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a");
    std::fs::write(&path, b"before").expect("written");
    let source = client.open(path.to_str().expect("utf-8")).expect("opened");
    let new = directory.path().join("b");
    std::fs::write(&new, b"after").expect("written");
    std::fs::rename(&new, &path).expect("replaced");
    assert_eq!(
        client.read(&source, 0, 6).expect("read"),
        b"before".as_slice()
    );

    let source = client.open(path.to_str().expect("utf-8")).expect("opened");
    std::fs::write(&path, b"after all").expect("written");
    let error = client.read(&source, 0, 5).expect_err("changed");
    assert!(matches!(error.cause, Cause::Changed));
}

// Promises: source-kinds
#[test]
fn fifo_is_read_as_a_stream() {
    let (client, bytes) = (Client::new(), random_bytes(1_000_000));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .expect("a FIFO");
    let writer = tarfs::internal::thread::Thread::spawn("writer", {
        let (path, bytes) = (path.clone(), bytes.clone());
        move || std::fs::write(path, bytes)
    })
    .expect("a thread");
    let source = client.open(path.to_str().expect("utf-8")).expect("opened");
    assert_eq!(source.access(), Access::Stream);
    assert_eq!(
        collect(client.stream(&source, 0, 1 << 20, 1 << 20)).expect("read"),
        bytes
    );
    writer.join().expect("written");
}
