//! Manifests and blobs of one repository.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::StreamExt;
use url::Url;

use super::reference::{Reference, Version};
use crate::base::sha256::Sha256;
use crate::source::credentials::RegistryLogin;
use crate::source::http::NetworkTransport;
use crate::source::{
    Authorizer, Cause, Error, Fingerprint, Http, Location, Options, Source, Target, Validator,
    redact,
};

/// Media types of manifests and indexes. Without them, old registries convert manifests to older formats.
const ACCEPTED_TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json, */*";

/// A repository, and which of its images the user wants. Blobs share connections.
#[derive(Debug)]
pub(crate) struct Repository {
    name: String,
    version: Version,
    /// URL of the repository in the API.
    url: Url,
    transport: NetworkTransport,
    login: Arc<RegistryLogin>,
    options: Options,
}

impl Repository {
    /// Prepares requests to the repository of the image `spec`, `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`.
    ///
    /// # Errors
    /// The name is malformed, or TLS is unusable.
    pub(crate) fn open(spec: &str, mut options: Options) -> Result<Self, Error> {
        let name = redact(spec);
        let failed = |cause| Error::new(&name, cause);
        let reference = Reference::parse(spec).map_err(failed)?;
        let transport = NetworkTransport::new(&options).map_err(failed)?;
        let server = reference.server();
        let mut url = server.ok_or_else(|| failed(Cause::Malformed("the host".to_owned())))?;
        url.set_path(&format!("/v2/{}", reference.repository));
        let is_plain_http = url.scheme() == "http";
        let (registry, repository) = (&reference.registry, &reference.repository);
        let login = RegistryLogin::new(registry, repository, is_plain_http, &options);
        let login = Arc::new(login);
        let accept = ("Accept".to_owned(), ACCEPTED_TYPES.to_owned());
        options.headers.push(accept);
        Ok(Self {
            version: reference.version,
            name,
            url,
            transport,
            login,
            options,
        })
    }

    /// Name for the user, without secrets.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Digest of the manifest or index, if the user's name has it.
    pub(crate) fn digest(&self) -> Option<Sha256> {
        match self.version {
            Version::Digest(digest) => Some(digest),
            Version::Tag(_) => None,
        }
    }

    /// Reads the manifest or index with `digest`, or else the one that the user wants. Returns more than
    /// `limit` bytes if it is longer than that. The caller compares the digest.
    ///
    /// # Errors
    /// It is missing or unreadable.
    pub(crate) async fn manifest(
        &self,
        digest: Option<Sha256>,
        limit: u64,
    ) -> Result<Bytes, Error> {
        let version = digest.map_or_else(|| self.version.clone(), Version::Digest);
        let target = self.target("manifests", &version.path());
        let transport = Box::new(self.transport.clone());
        let source = Http::open_through(transport, target, self.options.clone()).await?;
        let mut pieces = source.stream();
        let mut bytes = Vec::new();
        while bytes.len() as u64 <= limit
            && let Some(piece) = pieces.next().await
        {
            bytes.extend_from_slice(&piece?);
        }
        Ok(bytes.into())
    }

    /// The blob with `digest` and `len` bytes, without a request. Its readers compare the digest.
    ///
    /// # Errors
    /// The options have an invalid header.
    pub(crate) fn blob(&self, digest: Sha256, len: u64) -> Result<Arc<dyn Source>, Error> {
        let version = Fingerprint {
            len: Some(len),
            validator: Validator::Digest(digest),
        };
        let target = self.target("blobs", &format!("sha256:{digest}"));
        let transport = Box::new(self.transport.clone());
        let options = self.options.clone();
        Ok(Arc::new(Http::open_known(
            version, transport, target, options,
        )?))
    }

    /// Target of the document `id` of `kind`, one of the names in the API.
    fn target(&self, kind: &str, id: &str) -> Target {
        let mut url = self.url.clone();
        url.set_path(&format!("{}/{kind}/{id}", self.url.path()));
        let locator = Location::from_url(&url).locator().to_owned();
        Target {
            url,
            location: Location::with_locator(&self.name, locator),
            authorizer: Some(Arc::clone(&self.login) as Arc<dyn Authorizer>),
        }
    }
}
