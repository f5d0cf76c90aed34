//! Uploads of artifacts that refer to a manifest.

use std::collections::BTreeMap;

use bytes::Bytes;
use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION};
use serde::Serialize;
use url::Url;

use super::referrers::{Descriptor, MAX_LIST_BYTES, OCI_INDEX, fallback_tag, with_referrer};
use super::repository::{Repository, Server};
use crate::base::sha256::Sha256;
use crate::source::http::{Failure, Message, resolve_redirect};
use crate::source::upload::{Answer, MAX_RECEIPT_BYTES, Sender, UploadContent};
use crate::source::{Cause, Error};

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Media type of the configuration of an artifact without one.
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";

const EMPTY: &[u8] = b"{}";

/// Header of a registry that adds the manifest to the list of referrers.
const OCI_SUBJECT: &str = "oci-subject";

/// Status of a blob or tag that does not exist.
const ABSENT: u16 = 404;

/// Answers to the question whether a blob exists. A redirect leads to its bytes.
const EXISTS_OR_NOT: &[u16] = &[200, 302, 303, 307, ABSENT];

/// Statuses of a manifest or blob that was stored.
const STORED: &[u16] = &[200, 201, 204];

/// A blob of an artifact.
#[derive(Clone, Debug)]
pub struct ArtifactLayer {
    /// Its bytes.
    pub content: UploadContent,
    /// Their media type.
    pub media_type: String,
    /// Annotations of its descriptor.
    pub annotations: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest<'a> {
    schema_version: u32,
    media_type: &'a str,
    artifact_type: &'a str,
    config: Descriptor,
    layers: Vec<Descriptor>,
    subject: &'a Descriptor,
}

impl Repository {
    /// Uploads an artifact of `artifact_type` that refers to the manifest or index `subject`, and returns the
    /// descriptor of its manifest.
    ///
    /// Blobs that the repository has are not sent again. In a registry without an API for referrers, it also
    /// replaces the artifacts of that type in the list of the tag `sha256-DIGEST`. Of two uploads at the same
    /// time the last one prevails. The artifact itself has no tag, and the same one is stored once.
    ///
    /// # Errors
    /// The registry is unreachable, or the login may not push.
    pub async fn push_artifact(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        layers: &[ArtifactLayer],
    ) -> Result<Descriptor, Error> {
        let pushed = self.push(subject, artifact_type, layers).await;
        pushed.map_err(Error::of_upload)
    }

    async fn push(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        layers: &[ArtifactLayer],
    ) -> Result<Descriptor, Error> {
        let server = self.push_server()?;
        let push = Push {
            name: self.name(),
            server,
            sender: server.push_sender(self.name())?,
        };
        let mut blobs = Vec::new();
        for layer in layers {
            blobs.push(push.blob(layer).await?);
        }
        let config = ArtifactLayer {
            content: UploadContent::from(Bytes::from_static(EMPTY)),
            media_type: EMPTY_TYPE.to_owned(),
            annotations: BTreeMap::new(),
        };
        let manifest = Manifest {
            schema_version: 2,
            media_type: OCI_MANIFEST,
            artifact_type,
            config: push.blob(&config).await?,
            layers: blobs,
            subject,
        };
        let manifest = serde_json::to_vec(&manifest);
        let manifest = manifest.map_err(|error| push.error(Cause::Malformed(error.to_string())))?;
        let manifest = UploadContent::from(Bytes::from(manifest));
        let pushed = Descriptor {
            media_type: OCI_MANIFEST.to_owned(),
            digest: push.digest(&manifest).await?,
            size: manifest.len(),
            artifact_type: Some(artifact_type.to_owned()),
            annotations: BTreeMap::new(),
        };
        let id = format!("sha256:{}", pushed.digest);
        let answer = push.manifest(&id, OCI_MANIFEST, &manifest).await?;
        if !answer.headers.contains_key(OCI_SUBJECT) {
            push.add_to_tag(subject.digest, &pushed).await?;
        }
        Ok(pushed)
    }
}

/// Uploads to one repository.
struct Push<'a> {
    name: &'a str,
    server: &'a Server,
    sender: Sender,
}

impl Push<'_> {
    fn error(&self, cause: Cause) -> Error {
        Error::new(self.name, cause)
    }

    async fn digest(&self, content: &UploadContent) -> Result<Sha256, Error> {
        let digest = content.sha256().await;
        digest.map_err(|error| self.error(error.into()))
    }

    /// Stores the bytes of `layer`, unless they exist.
    async fn blob(&self, layer: &ArtifactLayer) -> Result<Descriptor, Error> {
        let content = &layer.content;
        let digest = self.digest(content).await?;
        let url = self.server.url("blobs", &format!("sha256:{digest}"));
        let found = self.request(Method::HEAD, &url, EXISTS_OR_NOT, 0);
        if found.await?.status == ABSENT {
            let attempt = || self.upload_blob(content, digest);
            self.sender.repeat(attempt).await?;
        }
        Ok(Descriptor {
            media_type: layer.media_type.clone(),
            digest,
            size: content.len(),
            artifact_type: None,
            annotations: layer.annotations.clone(),
        })
    }

    /// Begins an upload, and sends all bytes to the address that the registry names. A failed one cannot go on.
    async fn upload_blob(&self, content: &UploadContent, digest: Sha256) -> Result<(), Failure> {
        let begin = self.server.url("blobs", "uploads/");
        let message = Message::new(Method::POST, begin.clone());
        let begun = self.sender.send(message, &[202], MAX_RECEIPT_BYTES).await?;
        let address = begun.headers.get(LOCATION);
        let address = address
            .and_then(|address| address.to_str().ok())
            .ok_or_else(|| {
                Cause::Protocol("the registry names no address to upload to".to_owned())
            })?;
        let mut url = resolve_redirect(&begin, address, false)?;
        url.query_pairs_mut()
            .append_pair("digest", &format!("sha256:{digest}"));
        let message = self.message(url, "application/octet-stream", content);
        self.sender.send(message, STORED, MAX_RECEIPT_BYTES).await?;
        Ok(())
    }

    /// Stores a manifest or index as `id`.
    async fn manifest(
        &self,
        id: &str,
        media_type: &'static str,
        content: &UploadContent,
    ) -> Result<Answer, Error> {
        let url = self.server.url("manifests", id);
        let attempt = || {
            let message = self.message(url.clone(), media_type, content);
            self.sender.send(message, STORED, MAX_RECEIPT_BYTES)
        };
        self.sender.repeat(attempt).await
    }

    async fn add_to_tag(&self, subject: Sha256, entry: &Descriptor) -> Result<(), Error> {
        let tag = fallback_tag(subject);
        let url = self.server.url("manifests", &tag);
        let old = self.request(Method::GET, &url, &[200, ABSENT], MAX_LIST_BYTES);
        let old = old.await?;
        let old = (old.status == 200).then_some(&*old.body);
        let new = with_referrer(old, entry).map_err(|cause| self.error(cause))?;
        let new = UploadContent::from(Bytes::from(new));
        self.manifest(&tag, OCI_INDEX, &new).await?;
        Ok(())
    }

    async fn request(
        &self,
        method: Method,
        url: &Url,
        accepted: &[u16],
        limit: usize,
    ) -> Result<Answer, Error> {
        let attempt = || {
            let message = Message::new(method.clone(), url.clone());
            self.sender.send(message, accepted, limit)
        };
        self.sender.repeat(attempt).await
    }

    /// A PUT of `content`.
    fn message<'a>(
        &'a self,
        url: Url,
        media_type: &'static str,
        content: &'a UploadContent,
    ) -> Message<'a> {
        let media_type = (CONTENT_TYPE, HeaderValue::from_static(media_type));
        Message {
            headers: HeaderMap::from_iter([media_type]),
            ..self.sender.put(url, content, None)
        }
    }
}
