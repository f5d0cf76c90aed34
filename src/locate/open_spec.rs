//! Description of how a SOURCE is opened, which another process of its user can carry out.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::context::{OpenContext, PublishedIndexChoice};
use crate::archive::{DiskCacheMode, OpenOptions, scan};
use crate::base::environment::{Environment, HEADERS};
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::base::thread::processors;
use crate::codec::Compression;
use crate::fetch::MinSpeed;
use crate::image::Platform;
use crate::index::MemoryLimit;
use crate::source::{
    self, Certificates, CertificatesError, ClientCertificate, ClientCertificateError, HeaderArg,
    Identity, Retry, Revalidation, UserHeaders, Via, is_url,
};
use crate::tar;

/// Description of how a SOURCE is opened. It has secrets of its user, so it is never shown.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct OpenSpec {
    /// By whose rights it is read.
    pub user: UserSpec,
    /// From which servers, and how.
    pub server: ServerSpec,
    /// How the archive is read.
    pub archive: ArchiveSpec,
    /// Its caches on disk.
    pub cache: CacheSpec,
}

/// By whose rights a SOURCE is read.
#[derive(Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct UserSpec {
    /// Environment of the process that describes it.
    pub environment: Environment,
    /// Location whose host receives headers and client certificate.
    pub origin: String,
    /// Headers in their order, and after them those of the environment.
    pub headers: Vec<HeaderArg>,
    /// File with passwords in the format of netrc.
    pub netrc: Option<OsString>,
    /// Client certificate and its private key, in PEM.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for UserSpec {
    /// Omits secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserSpec").finish_non_exhaustive()
    }
}

/// Servers of a SOURCE.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerSpec {
    /// Certificates trusted besides the system's, in PEM.
    pub trusted: Option<Vec<u8>>,
    /// Whether redirects from HTTPS to HTTP are followed.
    pub allow_insecure_redirects: bool,
    /// Endpoint of the object store, in place of the cloud's.
    pub endpoint_url: Option<String>,
    /// Directory with containerd's `HOST/hosts.toml` of registries.
    pub hosts_dir: OsString,
    /// URLs of the same bytes, which are also read.
    pub mirror_urls: Vec<String>,
    /// URL of a caching proxy, and whether it receives credentials.
    pub via: Option<(String, bool)>,
    /// Maximum number of requests in flight.
    pub connections: usize,
    /// Timeout for a read without progress.
    pub timeout: Duration,
    /// Maximum number of retries; `None` for the default policy.
    pub retries: Option<u32>,
    /// Whether the server must answer, although a version is known.
    pub revalidation: Revalidation,
    /// Maximum bytes of one request.
    pub chunk_len: u64,
    /// Speed in bytes per second below which a request counts as too slow.
    pub min_speed: u64,
    /// Time over which it is measured.
    pub min_speed_wait: Duration,
}

impl Default for ServerSpec {
    fn default() -> Self {
        let (options, speed) = (source::Options::default(), MinSpeed::default());
        Self {
            trusted: None,
            allow_insecure_redirects: false,
            endpoint_url: None,
            hosts_dir: options.hosts_dir.into(),
            mirror_urls: Vec::new(),
            via: None,
            connections: options.connections,
            timeout: options.timeout,
            retries: None,
            revalidation: options.revalidation,
            chunk_len: scan::Options::default().chunk_len,
            min_speed: speed.bytes_per_second,
            min_speed_wait: speed.wait,
        }
    }
}

/// How an archive is read.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct ArchiveSpec {
    /// Packed format; `None` detects it.
    pub compression: Option<Compression>,
    /// Platform of an image; `None` for this machine's.
    pub platform: Option<Platform>,
    /// Expected SHA-256 of an archive's packed bytes, or of an image's manifest.
    pub expected_sha256: Option<Sha256>,
    /// Whether zero records are skipped, as in concatenated archives.
    pub ignore_zeros: bool,
    /// Whether a truncated archive counts as complete.
    pub allow_truncated: bool,
    /// Maximum number of entries; `None` for no limit.
    pub max_entries: Option<u64>,
    /// Maximum length of a file and of the unpacked stream, in bytes; `None` for no limit.
    pub max_unpacked_len: Option<u64>,
    /// Memory for buffers, decoders and cached data, in bytes.
    pub memory: u64,
    /// Memory for indexes, in bytes.
    pub index_memory: u64,
    /// Whether the scan may skip large payloads of plain archives.
    pub allow_skipping: bool,
    /// Whether saved data of unproven version is ignored.
    pub should_rescan_unproven: bool,
    /// Whether damaged members are logged.
    pub should_log_problems: bool,
    /// Version that a mount shows, if this process continues it.
    pub shown_version: Option<String>,
}

impl Default for ArchiveSpec {
    fn default() -> Self {
        Self {
            compression: None,
            platform: None,
            expected_sha256: None,
            ignore_zeros: false,
            allow_truncated: false,
            max_entries: None,
            max_unpacked_len: None,
            memory: scan::Options::default().memory,
            index_memory: MemoryLimit::default().bytes(),
            allow_skipping: false,
            should_rescan_unproven: false,
            should_log_problems: false,
            shown_version: None,
        }
    }
}

/// Caches on disk, and indexes in them. By default only indexes are kept, and decoded data of enclosing archives.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheSpec {
    /// Directory for saved indexes and decoded data.
    pub directory: Option<OsString>,
    /// Whether decoded data of the archives is kept.
    pub archives: DiskCacheMode,
    /// Whether decoded data of enclosing archives is kept.
    pub enclosing_archives: DiskCacheMode,
    /// Index file to use; no other index is searched for.
    pub index_file: Option<OsString>,
    /// Which published indexes are used.
    pub published_index: PublishedIndexChoice,
}

impl Default for CacheSpec {
    fn default() -> Self {
        Self {
            directory: None,
            archives: DiskCacheMode::default(),
            enclosing_archives: DiskCacheMode::Enabled { limit_bytes: None },
            index_file: None,
            published_index: PublishedIndexChoice::default(),
        }
    }
}

/// A setting is unusable. The text has no secrets.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenSpecError {
    /// A header, or the file of one.
    #[error("{0}")]
    Headers(String),
    /// The certificates that are trusted besides the system's.
    #[error(transparent)]
    Trusted(CertificatesError),
    /// The client certificate or its key.
    #[error(transparent)]
    Client(ClientCertificateError),
    /// The URL of the caching proxy.
    #[error("{0}")]
    Via(String),
}

impl OpenSpec {
    /// It for another process: its paths are absolute, and headers are read that no other process can read.
    ///
    /// # Errors
    /// A header is unusable.
    pub fn for_other_process(mut self) -> Result<Self, OpenSpecError> {
        let directory = self.user.environment.directory().to_owned();
        let absolute = |path: OsString| directory.join(path).into_os_string();
        let headers = UserHeaders::new(&self.user.headers, &self.user.environment);
        let headers = headers.and_then(UserHeaders::for_other_process);
        self.user.headers = headers.map_err(OpenSpecError::Headers)?;
        self.user.environment = self.user.environment.without(HEADERS);
        self.user.netrc = self.user.netrc.map(absolute);
        self.server.hosts_dir = absolute(self.server.hosts_dir);
        self.cache.directory = self.cache.directory.map(absolute);
        self.cache.index_file = self.cache.index_file.map(absolute);
        let location = self.cache.published_index.location.take();
        self.cache.published_index.location = location.map(|location| {
            if is_url(&location) {
                return location;
            }
            let path = directory.join(&location).into_os_string();
            path.into_string().unwrap_or(location)
        });
        Ok(self)
    }

    /// Checks the settings, as [`context`](Self::context) does.
    ///
    /// # Errors
    /// A setting is unusable.
    pub fn check(&self) -> Result<(), OpenSpecError> {
        self.source_options(&Arc::default()).map(drop)
    }

    /// Settings of an opening, whose requests `network` carries out and `stats` counts. Reads the files of headers.
    ///
    /// # Errors
    /// A setting is unusable.
    pub fn context(
        &self,
        network: Handle,
        stats: &Arc<Stats>,
    ) -> Result<OpenContext, OpenSpecError> {
        let Self {
            user,
            archive,
            cache,
            ..
        } = self;
        Ok(OpenContext {
            source: self.source_options(stats)?,
            headers_origin: user.origin.clone(),
            archive: OpenOptions {
                scan: self.scan_options(),
                cache_dir: cache.directory.clone().map(PathBuf::from),
                index_file: cache.index_file.clone().map(PathBuf::from),
                index_memory: MemoryLimit::new(archive.index_memory),
                disk_cache: cache.archives,
                should_rescan_unproven: archive.should_rescan_unproven,
                should_log_problems: archive.should_log_problems,
                ..OpenOptions::default()
            },
            enclosing_disk_cache: cache.enclosing_archives,
            expected_sha256: archive.expected_sha256,
            platform: archive.platform.clone(),
            shown_version: archive.shown_version.clone(),
            published_index: cache.published_index.clone(),
            ..OpenContext::new(network)
        })
    }

    fn source_options(&self, stats: &Arc<Stats>) -> Result<source::Options, OpenSpecError> {
        let Self { user, server, .. } = self;
        let headers = UserHeaders::new(&user.headers, &user.environment);
        let headers = headers.map_err(OpenSpecError::Headers)?;
        let client = user.certificate.as_ref();
        let client = client.map(|(chain, key)| ClientCertificate::from_pem(chain, key));
        let trusted = server.trusted.as_deref().map(Certificates::from_pem);
        let trusted = trusted.transpose().map_err(OpenSpecError::Trusted)?;
        let via = server.via.as_ref();
        let via = via.map(|(prefix, sends_credentials)| Via::new(prefix, *sends_credentials));
        Ok(source::Options {
            environment: Arc::new(user.environment.clone()),
            identity: Arc::new(Identity {
                headers: headers.load().map_err(OpenSpecError::Headers)?,
                reload: headers.loader(),
                netrc: user.netrc.clone().map(PathBuf::from),
                certificate: client.transpose().map_err(OpenSpecError::Client)?,
            }),
            allow_insecure_redirects: server.allow_insecure_redirects,
            endpoint_url: server.endpoint_url.clone(),
            hosts_dir: PathBuf::from(&server.hosts_dir),
            certificates: trusted.unwrap_or_default(),
            mirror_urls: server.mirror_urls.clone(),
            via: via.transpose().map_err(OpenSpecError::Via)?,
            connections: server.connections,
            timeout: server.timeout,
            retry: Retry::with_limit(server.retries),
            revalidation: server.revalidation,
            stats: Arc::clone(stats),
            ..source::Options::default()
        })
    }

    fn scan_options(&self) -> scan::Options {
        let Self {
            server, archive, ..
        } = self;
        let mut options = scan::Options {
            compression: archive.compression,
            tar: tar::Options {
                ignore_zeros: archive.ignore_zeros,
                accepts_empty: false,
                limits: tar::Limits {
                    entries: archive.max_entries.unwrap_or(u64::MAX),
                    ..tar::Limits::default()
                },
            },
            allow_truncated: archive.allow_truncated,
            allow_skipping: archive.allow_skipping,
            connections: server.connections,
            chunk_len: server.chunk_len,
            min_speed: MinSpeed {
                bytes_per_second: server.min_speed,
                wait: server.min_speed_wait,
            },
            workers: processors(),
            ..scan::Options::default()
        };
        options.set_memory(archive.memory);
        if let Some(len) = archive.max_unpacked_len {
            options.tar.limits.size = len;
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    // Promises: limit-metadata
    #[test]
    fn metadata_bytes_limit_grows_with_memory() {
        let kept = |memory| {
            let archive = ArchiveSpec {
                memory,
                ..ArchiveSpec::default()
            };
            let spec = OpenSpec {
                archive,
                ..OpenSpec::default()
            };
            spec.scan_options().tar.limits.metadata_bytes
        };
        assert_eq!(kept(128 << 20), tar::Limits::default().metadata_bytes);
        assert_eq!(kept(1 << 30), 2 << 30);
    }

    #[test]
    fn spec_survives_its_serialization() {
        let name = OsString::from_vec(b"A\xff".to_vec());
        let spec = OpenSpec {
            user: UserSpec {
                environment: Environment::new([(name.clone(), "secret".into())], "/".into()),
                headers: vec!["A: secret".parse().expect("a header")],
                certificate: Some((b"secret".to_vec(), Vec::new())),
                netrc: Some(name.clone()),
                ..UserSpec::default()
            },
            ..OpenSpec::default()
        };
        let bytes = serde_json::to_vec(&spec).expect("serialized");
        assert_eq!(
            serde_json::from_slice::<OpenSpec>(&bytes).expect("the same"),
            spec
        );
        assert!(!format!("{spec:?}").contains("secret"));
    }
}
