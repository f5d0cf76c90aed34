//! Options to open a source.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use url::Url;

use super::location::may_identify;
use super::{Certificates, Fingerprint, Identity, Retry, Via};
use crate::base::environment::Environment;
use crate::base::stats::Stats;

/// Default timeout of a read without bytes. A server restart and a short network failure end sooner.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

/// Default maximum number of requests in flight, enough at 60 MB/s a connection or 40 ms of round trip.
pub const DEFAULT_CONNECTIONS: usize = 16;

/// Range of the maximum number of requests in flight.
pub const CONNECTIONS: RangeInclusive<u64> = 1..=256;

/// Range of the timeout, in seconds.
pub const TIMEOUT_SECONDS: RangeInclusive<u64> = 1..=86_400;

/// Range of the number of retries.
pub const RETRIES: RangeInclusive<u64> = 0..=1_000_000;

/// Default timeout for a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Default timeout without any byte, before an answer and within it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout for the first answer if a saved index has the version.
const REVALIDATION_TIMEOUT: Duration = Duration::from_secs(10);

/// The same for a process that continues a mount.
const TAKEOVER_REVALIDATION_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether the server must answer before a source is open, if a saved index has its version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Revalidation {
    /// It must.
    #[default]
    Required,
    /// It must, unless it cannot be reached in ten seconds.
    UnlessUnreachable,
    /// It need not if it does not answer within two seconds. For a process that continues a mount.
    UnlessLate,
    /// No request is ever sent. Without a saved index the source cannot be opened.
    Never,
}

impl Revalidation {
    /// Timeout for the answer, after which the saved version is assumed.
    pub(crate) fn timeout(self) -> Duration {
        match self {
            Self::Required => Duration::MAX,
            Self::UnlessUnreachable => REVALIDATION_TIMEOUT,
            Self::UnlessLate => TAKEOVER_REVALIDATION_TIMEOUT,
            Self::Never => Duration::ZERO,
        }
    }
}

/// Directory in which containerd looks for the configuration of registries.
pub const DEFAULT_HOSTS_DIR: &str = "/etc/containerd/certs.d";

/// Options to open a source.
#[derive(Clone, Debug)]
pub struct Options {
    /// Environment of the user, for proxies, trusted certificates, and credentials of clouds and registries.
    pub environment: Arc<Environment>,
    /// Identity of the user for the origin of the URL, and for no other.
    pub identity: Arc<Identity>,
    /// Whether redirects from HTTPS to HTTP are followed.
    pub allow_insecure_redirects: bool,
    /// Whether servers of the own network are refused, because another party names the URL.
    pub is_public_only: bool,
    /// Certificates trusted besides the system's.
    pub certificates: Certificates,
    /// URLs of the same bytes, which are also read.
    pub mirror_urls: Vec<String>,
    /// Caching proxy that is asked before the origin.
    pub via: Option<Via>,
    /// Endpoint of the object store, in place of the cloud's.
    pub endpoint_url: Option<String>,
    /// Directory with containerd's `HOST/hosts.toml` of registries.
    pub hosts_dir: PathBuf,
    /// Version that a saved index has, assumed as `revalidation` says, and then required.
    pub known_version: Option<Fingerprint>,
    /// Whether the server must answer, although a version is known.
    pub revalidation: Revalidation,
    /// Maximum number of idle connections.
    pub connections: usize,
    /// Timeout for a connection attempt.
    pub connect_timeout: Duration,
    /// Timeout without any byte, before an answer and within it.
    pub idle_timeout: Duration,
    /// Timeout for a read without progress, retries and pauses included. Others are at most half of it.
    pub timeout: Duration,
    /// Retry policy.
    pub retry: Retry,
    /// Seed of the retry pauses, for reproducible ones. Without it they are random.
    pub jitter_seed: Option<u64>,
    /// Counters.
    pub stats: Arc<Stats>,
}

impl Options {
    /// Timeout without any byte, which leaves time for another attempt.
    pub(crate) fn idle_limit(&self) -> Duration {
        self.idle_timeout.min(self.timeout / 2)
    }

    /// The options for `place` instead of the URL `original`: without its mirrors, and with the user's identity only if
    /// both are URLs of one origin.
    pub(crate) fn for_other(&self, place: &str, original: &str) -> Self {
        let is_same_origin = match (Url::parse(place), Url::parse(original)) {
            (Ok(place), Ok(original)) => may_identify(&place, &original),
            _ => false,
        };
        Self {
            identity: if is_same_origin {
                Arc::clone(&self.identity)
            } else {
                self.identity.elsewhere()
            },
            mirror_urls: Vec::new(),
            ..self.clone()
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            environment: Arc::new(Environment::current()),
            identity: Arc::default(),
            is_public_only: false,
            allow_insecure_redirects: false,
            certificates: Certificates::default(),
            mirror_urls: Vec::new(),
            via: None,
            endpoint_url: None,
            hosts_dir: PathBuf::from(DEFAULT_HOSTS_DIR),
            known_version: None,
            revalidation: Revalidation::Required,
            connections: DEFAULT_CONNECTIONS,
            connect_timeout: CONNECT_TIMEOUT,
            idle_timeout: IDLE_TIMEOUT,
            timeout: DEFAULT_TIMEOUT,
            retry: Retry::default(),
            jitter_seed: None,
            stats: Arc::default(),
        }
    }
}
