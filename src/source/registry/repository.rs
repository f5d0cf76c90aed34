//! Manifests and blobs of one repository.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::StreamExt;
use reqwest::Method;
use reqwest::header::HeaderMap;
use url::Url;

use super::documents::{ACCEPTED_TYPES, Descriptor};
use super::foreign;
use super::hosts;
use super::reference::{Reference, Version};
use super::referrers::{fallback_tag, next_page, parse_referrers};
use crate::base::sha256::Sha256;
use crate::source::client::authorizer::parse_headers;
use crate::source::client::{Message, Sender};
use crate::source::credentials::{PULL, PUSH, ProviderContext, RegistryLogin};
use crate::source::location::is_in_own_network;
use crate::source::mirrors::{self, HEAD_START, first_success};
use crate::source::network::NetworkTransport;
use crate::source::{
    Authorizer, Cause, Error, Fingerprint, Http, Identity, Location, Options, Revalidation, Source,
    Target, Validator, redact,
};

/// Statuses of a list of referrers, and of registries without an API for it.
const LISTED_OR_NOT: &[u16] = &[200, 400, 404, 405, 501];

/// Maximum number of pages of a list of referrers that are read.
const MAX_REFERRER_PAGES: usize = 16;

/// Timeout for the list of referrers of a server besides the first.
const REFERRERS_TIMEOUT: Duration = Duration::from_secs(5);

/// A repository, and which of its images the user wants.
#[derive(Debug)]
pub struct Repository {
    name: String,
    version: Version,
    /// In the order in which they are tried.
    servers: Vec<Server>,
    /// Index of the server that served a manifest first. It serves the rest of the image.
    chosen: OnceLock<usize>,
    revalidation: Revalidation,
    /// Options of requests to other servers that a manifest names.
    foreign_options: Options,
}

/// The repository on one server. Its requests share connections.
#[derive(Debug)]
pub(super) struct Server {
    /// URL of the repository in the API.
    url: Url,
    can_pull: bool,
    can_resolve: bool,
    can_push: bool,
    headers: HeaderMap,
    transport: NetworkTransport,
    login: Arc<RegistryLogin>,
    pub(super) push_login: Arc<RegistryLogin>,
    options: Options,
}

impl Repository {
    /// Prepares requests to the repository of the image `spec`, `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`.
    ///
    /// # Errors
    /// The name or a configuration file is malformed, or TLS is unusable.
    pub async fn open(spec: &str, options: Options) -> Result<Self, Error> {
        let name = redact(spec);
        let failed = |cause| Error::new(&name, cause);
        let reference = Reference::parse(spec).map_err(failed)?;
        let hosts = hosts::load(&reference, &options.hosts_dir, &options.certificates);
        let hosts = hosts.await.map_err(failed)?;
        let hosts = hosts.into_iter();
        let servers = hosts.map(|host| Server::new(host, &reference, &options));
        let servers = servers.collect::<Result<_, _>>().map_err(failed)?;
        Ok(Self {
            name,
            servers,
            chosen: OnceLock::new(),
            revalidation: options.revalidation,
            foreign_options: Options {
                is_public_only: !reference
                    .server()
                    .is_some_and(|url| is_in_own_network(&url)),
                ..options
            },
            version: reference.version,
        })
    }

    /// Whether the registry must answer, although the documents of an earlier run are known.
    pub(crate) fn revalidation(&self) -> Revalidation {
        self.revalidation
    }

    /// The error of a registry that does not answer in the time of [`revalidation`](Self::revalidation).
    pub(crate) fn silent_error(&self) -> Error {
        let cause = match self.revalidation {
            Revalidation::Never => Cause::Offline,
            _ => Cause::silent_server(),
        };
        Error::new(&self.name, cause)
    }

    /// Name for the user, without secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Digest of the manifest or index, if the user's name has it.
    pub fn digest(&self) -> Option<Sha256> {
        match self.version {
            Version::Digest(digest) => Some(digest),
            Version::Tag(_) => None,
        }
    }

    /// Reads the manifest or index with `digest`, or else the one that the user wants. Returns more than
    /// `limit` bytes if it is longer than that. The caller compares the digest.
    ///
    /// The servers are asked in their order, each once, and then all with retries. A silent one delays the next.
    ///
    /// # Errors
    /// It is missing or unreadable on all servers.
    pub async fn manifest(&self, digest: Option<Sha256>, limit: u64) -> Result<Bytes, Error> {
        let version = digest.map_or_else(|| self.version.clone(), Version::Digest);
        let servers = self.manifest_servers(&version);
        let path = version.path();
        for is_last_pass in [servers.len() == 1, true] {
            let mut attempts = Vec::new();
            for &(_, server) in &servers {
                let (path, mut options) = (&path, server.options.clone());
                if !is_last_pass {
                    // The next server is asked instead.
                    options.retry.attempts = 1;
                }
                attempts.push(async move {
                    let read = self.read(server, options, path, limit).await;
                    read.inspect_err(|error| {
                        if !is_last_pass {
                            let host = server.url.host_str().unwrap_or_default();
                            tracing::warn!("{}: {host} fails: {}", error.location, error.cause);
                        }
                    })
                });
            }
            let errors = match first_success(attempts, HEAD_START).await {
                Ok((place, bytes)) => {
                    if let Some(&(number, _)) = servers.get(place) {
                        self.chosen.get_or_init(|| number);
                    }
                    return Ok(bytes);
                }
                Err(errors) => errors,
            };
            let may_end = errors.iter().any(|error| error.cause.is_transient());
            if is_last_pass || !may_end {
                let unable =
                    "its hosts.toml has no host with the capabilities \"pull\" and \"resolve\"";
                let unable = || Error::new(&self.name, Cause::Malformed(unable.to_owned()));
                return Err(errors.into_iter().next_back().unwrap_or_else(unable));
            }
        }
        Err(self.silent_error())
    }

    /// The servers that may be asked for the manifest `version`, and their numbers. The one that served a manifest
    /// comes first, and only that is asked for tags, which may mean another image elsewhere.
    fn manifest_servers(&self, version: &Version) -> Vec<(usize, &Server)> {
        let is_digest = matches!(version, Version::Digest(_));
        let is_able = |server: &Server| match version {
            Version::Tag(_) => server.can_resolve,
            Version::Digest(_) => server.can_pull,
        };
        let chosen = self.chosen.get().copied();
        let servers = self.servers.iter().enumerate();
        let servers = servers.filter(|&(number, server)| match chosen {
            Some(chosen) if chosen == number => true,
            Some(_) => is_digest && is_able(server),
            None => is_able(server),
        });
        let mut servers: Vec<_> = servers.collect();
        servers.sort_by_key(|&(number, _)| chosen != Some(number));
        servers
    }

    async fn read(
        &self,
        server: &Server,
        options: Options,
        id: &str,
        limit: u64,
    ) -> Result<Bytes, Error> {
        let target = server.target(&self.name, "manifests", id);
        let transport = Box::new(server.transport.clone());
        let source = Http::open_through(transport, target, options).await?;
        let mut pieces = source.stream();
        let mut bytes = Vec::new();
        while bytes.len() as u64 <= limit
            && let Some(piece) = pieces.next().await
        {
            bytes.extend_from_slice(&piece?);
        }
        Ok(bytes.into())
    }

    /// The blob with `digest` and `len` bytes, without a request. Its readers compare the digest. While the server
    /// of the manifest fails, the others are asked, and then the servers of `urls`, which the manifest names.
    ///
    /// # Errors
    /// No server may be asked for blobs.
    pub fn blob(
        &self,
        digest: Sha256,
        len: u64,
        urls: &[String],
    ) -> Result<Arc<dyn Source>, Error> {
        let version = Fingerprint {
            len: Some(len),
            validator: Validator::Digest(digest),
        };
        let servers = self.pull_servers().map(|server| {
            let target = server.target(&self.name, "blobs", &format!("sha256:{digest}"));
            let transport = Box::new(server.transport.clone());
            Http::open_known(version.clone(), transport, target, server.options.clone())
        });
        let elsewhere = foreign::servers(&version, urls, &self.name, &self.foreign_options);
        let mut blobs = servers.chain(elsewhere);
        let first = blobs.next().ok_or_else(|| self.unable("pull"))??;
        Ok(mirrors::in_order(first, blobs.collect::<Result<_, _>>()?))
    }

    /// The servers that may be asked for blobs: first the one that served a manifest, or else the last one.
    fn pull_servers(&self) -> impl Iterator<Item = &Server> {
        let chosen = self.chosen.get();
        let chosen = chosen.and_then(|&number| self.servers.get(number));
        let chosen = chosen.filter(|server| server.can_pull);
        let first = chosen.or_else(|| self.servers.iter().rfind(|server| server.can_pull));
        let is_other = move |one: &&Server| !first.is_some_and(|first| std::ptr::eq(*one, first));
        let others = self.servers.iter().filter(|server| server.can_pull);
        first.into_iter().chain(others.filter(is_other))
    }

    /// The first server to which images and artifacts may be uploaded, as in containerd.
    pub(super) fn push_server(&self) -> Result<&Server, Error> {
        let server = self.servers.iter().find(|server| server.can_push);
        server.ok_or_else(|| self.unable("push"))
    }

    fn unable(&self, capability: &str) -> Error {
        let unable = format!("its hosts.toml has no host with the capability \"{capability}\"");
        Error::new(&self.name, Cause::Malformed(unable))
    }

    /// Descriptors of the manifests of `artifact_type` that refer to the manifest or index `subject`, in the
    /// order of the registry. They are empty if there are none or the list is unusable, and at most 64 a page.
    ///
    /// It asks the server that served a manifest, and the others if that fails or has no list. The caller reads the
    /// manifests and compares their digests.
    ///
    /// # Errors
    /// All servers are unreachable, or refuse access.
    pub async fn referrers(
        &self,
        subject: Sha256,
        artifact_type: &str,
    ) -> Result<Vec<Descriptor>, Error> {
        let attempts = self.pull_servers().enumerate().map(|(place, server)| {
            let asking = server.referrers(&self.name, subject, artifact_type);
            // The list is not needed, so a further server has less time.
            let limit = if place == 0 {
                Duration::MAX
            } else {
                REFERRERS_TIMEOUT
            };
            async move {
                let listed = tokio::time::timeout(limit, asking).await;
                let listed = listed.unwrap_or_else(|_| Err(self.silent_error()));
                listed.map_err(Some)?.ok_or(None)
            }
        });
        let errors = match first_success(attempts, HEAD_START).await {
            Ok((_, found)) => return Ok(found),
            Err(errors) => errors.into_iter().collect::<Option<Vec<Error>>>(),
        };
        match errors.map(|errors| errors.into_iter().next()) {
            None => Ok(Vec::new()),
            Some(error) => Err(error.unwrap_or_else(|| self.unable("pull"))),
        }
    }
}

impl Server {
    fn new(host: hosts::Host, reference: &Reference, options: &Options) -> Result<Self, Cause> {
        // The user's is for the registry's own server.
        let identity = if host.is_origin {
            Arc::clone(&options.identity)
        } else {
            options.identity.elsewhere()
        };
        let accept = ("Accept".to_owned(), ACCEPTED_TYPES.join(", "));
        let headers = [&*identity.headers, &host.headers, &[accept]].concat();
        let certificate = host.client_certificate.or(identity.certificate.clone());
        let options = Options {
            certificates: host.certificates,
            identity: Arc::new(Identity {
                certificate,
                ..Identity::default()
            }),
            ..options.clone()
        };
        let mut url = host.api;
        let registry = if host.is_origin {
            reference.registry.clone()
        } else {
            let port = url.port().map(|port| format!(":{port}"));
            let name = url.host_str().unwrap_or_default().to_owned();
            name + &port.unwrap_or_default()
        };
        url.set_path(&format!("{}/{}", url.path(), reference.repository));
        if !host.is_origin {
            // Mirrors of several registries need it.
            url.query_pairs_mut().append_pair("ns", &reference.registry);
        }
        let is_plain_http = url.scheme() == "http";
        let login = |actions| {
            let (repository, context) = (&reference.repository, ProviderContext::new(&options));
            let login = RegistryLogin::new(&registry, repository, actions, is_plain_http, context);
            Arc::new(login)
        };
        let transport = NetworkTransport::new(&url, &options)?;
        Ok(Self {
            url,
            can_pull: host.can_pull,
            can_resolve: host.can_resolve,
            can_push: host.can_push,
            headers: parse_headers(&headers)?,
            transport,
            login: login(PULL),
            push_login: login(PUSH),
            options,
        })
    }

    /// As [`Repository::referrers`], of this server: by the API of the distribution specification 1.1, or else by the
    /// tag `sha256-DIGEST`. `None` if it has neither list.
    async fn referrers(
        &self,
        name: &str,
        subject: Sha256,
        artifact_type: &str,
    ) -> Result<Option<Vec<Descriptor>>, Error> {
        let sender = self.sender(name, &self.login)?;
        let mut listed = self.url("referrers", &format!("sha256:{subject}"));
        listed
            .query_pairs_mut()
            .append_pair("artifactType", artifact_type);
        let tagged = self.url("manifests", &fallback_tag(subject));
        for url in [listed, tagged] {
            let (mut found, mut page) = (None, Some(url));
            for _ in 0..MAX_REFERRER_PAGES {
                let Some(url) = page.take() else {
                    break;
                };
                let message = Message::new(Method::GET, url.clone());
                let answer = sender.request(message, LISTED_OR_NOT).await?;
                let list = (answer.status == 200).then_some(&answer.body);
                if let Some(more) = list.and_then(|list| parse_referrers(list, artifact_type)) {
                    found.get_or_insert_with(Vec::new).extend(more);
                    page = next_page(&answer.headers, &url);
                }
            }
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Target of the document `id` of `kind`, one of the names in the API. Users see `name`.
    fn target(&self, name: &str, kind: &str, id: &str) -> Target {
        let target = Target::from(self.url(kind, id));
        Target {
            location: Location::with_canonical(name, target.location.canonical().to_owned()),
            headers: Some(self.headers.clone()),
            authorizer: Some(Arc::clone(&self.login) as Arc<dyn Authorizer>),
            ..target
        }
    }

    /// URL of `id` of `kind`, as [`target`](Self::target) takes them.
    pub(super) fn url(&self, kind: &str, id: &str) -> Url {
        let mut url = self.url.clone();
        url.set_path(&format!("{}/{kind}/{id}", self.url.path()));
        url
    }

    pub(super) fn sender(&self, name: &str, login: &Arc<RegistryLogin>) -> Result<Sender, Error> {
        let target = Target {
            location: Location::from_name(name),
            headers: Some(self.headers.clone()),
            authorizer: Some(Arc::clone(login) as Arc<dyn Authorizer>),
            ..Target::from(self.url.clone())
        };
        let transport = Box::new(self.transport.clone());
        Sender::new(&target, transport, self.options.clone())
    }
}
