//! A caching proxy in front of the origin.

use std::sync::Arc;
use std::time::Duration;

use tarfs::source::{self, Identity, Options, Retry, Source, Via};
use tarfs::{Extent, Packed, Stats, fetch};
use tokio::runtime::Runtime;

use crate::support::http::{Fault, Resource, Response, Server};
use crate::support::raw::random_bytes;

const LEN: usize = 1 << 20;

/// An origin, and a caching proxy with a fault.
struct Proxied {
    network: Runtime,
    stats: Arc<Stats>,
    bytes: Vec<u8>,
    origin: Server,
    proxy: Server,
    /// Path of the origin's URL at the proxy.
    path: String,
}

impl Proxied {
    fn new(fault: Option<Fault>) -> Self {
        let (origin, proxy) = (Server::start(), Server::start());
        let bytes = random_bytes(LEN);
        let resource = Resource::new(bytes.clone()).etag("\"1\"");
        origin.serve("/a", resource.clone());
        let path = format!("/at/{}", origin.url("/a").replacen("://", "/", 1));
        proxy.serve_with_faults(&path, resource, move |_| fault.clone());
        Self {
            network: Runtime::new().expect("a runtime"),
            stats: Arc::default(),
            bytes,
            origin,
            proxy,
            path,
        }
    }

    fn open(&self, sends_credentials: bool) -> Arc<dyn Source> {
        self.open_at("/a?versionId=1&sig=secret", sends_credentials)
    }

    fn open_at(&self, place: &str, sends_credentials: bool) -> Arc<dyn Source> {
        let via = Via::new(&self.proxy.url("/at/"), sends_credentials).expect("a URL");
        let options = Options {
            via: Some(via),
            identity: Arc::new(Identity {
                headers: vec![("X-Token".to_owned(), "one".to_owned())],
                ..Identity::default()
            }),
            timeout: Duration::from_secs(20),
            retry: Retry {
                initial_pause: Duration::ZERO,
                ..Retry::default()
            },
            stats: Arc::clone(&self.stats),
            ..Options::default()
        };
        let url = self.origin.url(place).replace("http://", "http://me:pw@");
        self.network
            .block_on(source::open(&url, options))
            .expect("opened")
    }

    fn assert_reads(&self, source: &Arc<dyn Source>, start: usize) {
        let extent = Extent::with_len(Packed(start as u64), 1000);
        let read = fetch::read(self.network.handle(), source, extent);
        let expected = self.bytes.get(start..start + 1000);
        assert_eq!(read.ok().as_deref(), expected);
    }
}

// Promises: via-prefix
#[test]
fn caching_proxy_serves_all_but_the_first_request() {
    let proxied = Proxied::new(None);
    let source = proxied.open(false);
    for start in [100_000, 500_000, 900_000] {
        proxied.assert_reads(&source, start);
    }
    assert_eq!(proxied.origin.requests("/a").len(), 1);
    assert_eq!(proxied.proxy.requests(&proxied.path).len(), 3);
    // Saved state is that of the origin.
    let url = proxied.origin.url("/a?versionId=1");
    let other = source::canonical_location(&url, &Options::default());
    assert_eq!(Some(source.canonical_location()), other.as_deref());
}

// Promises: via-secrets
#[test]
fn caching_proxy_gets_credentials_only_if_told() {
    for sends_credentials in [false, true] {
        let proxied = Proxied::new(None);
        let source = proxied.open(sends_credentials);
        proxied.assert_reads(&source, 500_000);
        for seen in proxied.proxy.requests(&proxied.path) {
            let token = seen.request.header("x-token");
            assert_eq!(token, sends_credentials.then_some("one"));
            let query = if sends_credentials {
                "versionId=1&sig=secret"
            } else {
                "versionId=1"
            };
            assert_eq!(seen.request.query, query);
            let password = seen.request.header("authorization");
            assert_eq!(password.is_some(), sends_credentials);
        }
        let first = &proxied.origin.requests("/a")[0].request;
        assert_eq!(first.header("x-token"), Some("one"));
    }
}

// Promises: via-prefix
#[test]
fn caching_proxy_gets_no_query_of_a_redirect() {
    let proxied = Proxied::new(None);
    let target = proxied.origin.url("/a?unknown=secret");
    proxied.origin.route("/start", move |_| {
        Response::new(302).with("Location", target.clone())
    });
    let source = proxied.open_at("/start", false);
    proxied.assert_reads(&source, 500_000);
    assert!(proxied.proxy.requests(&proxied.path).is_empty());
    assert_eq!(proxied.stats.source_via_failures.get(), 0);
}

// Promises: via-prefix
#[test]
fn caching_proxy_is_not_asked_for_an_unknown_version() {
    let proxied = Proxied::new(None);
    proxied
        .origin
        .serve("/a", Resource::new(proxied.bytes.clone()));
    let source = proxied.open(false);
    proxied.assert_reads(&source, 500_000);
    assert!(proxied.proxy.requests(&proxied.path).is_empty());
}

// Promises: via-prefix
#[test]
fn origin_is_asked_if_the_caching_proxy_fails() {
    let other = Resource::new(random_bytes(LEN)).etag("\"2\"");
    for fault in [
        Fault::Status(403),
        Fault::Status(502),
        Fault::HangUp,
        Fault::Reset(10),
        Fault::Whole,
        Fault::Redirect("/elsewhere".to_owned()),
        Fault::Other(other),
    ] {
        let proxied = Proxied::new(Some(fault.clone()));
        let source = proxied.open(false);
        for start in [100_000, 500_000] {
            proxied.assert_reads(&source, start);
        }
        // It is not asked again for a while.
        assert_eq!(proxied.proxy.requests(&proxied.path).len(), 1, "{fault:?}");
        assert_eq!(proxied.origin.requests("/a").len(), 3, "{fault:?}");
        assert_eq!(proxied.stats.source_via_failures.get(), 1, "{fault:?}");
    }
}
