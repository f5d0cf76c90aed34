//! Uploads of artifacts that refer to a manifest.

use bytes::Bytes;
use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use serde_json::json;
use url::Url;

use super::documents::{Annotations, Descriptor, OCI_INDEX, OCI_MANIFEST};
use super::referrers::{fallback_tag, with_referrer};
use super::repository::{Repository, Server};
use crate::base::sha256::Sha256;
use crate::source::client::{Answer, Message, Sender, UploadContent};
use crate::source::retry::Failure;
use crate::source::upload::STORED;
use crate::source::{Cause, Error};

/// Media type of the configuration of an artifact without one.
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";

/// Header of a registry that adds the manifest to the list of referrers.
const OCI_SUBJECT: &str = "oci-subject";

/// Status of a blob or tag that does not exist.
const ABSENT: u16 = 404;

/// Answers to the question whether a blob exists. A redirect leads to its bytes.
const EXISTS_OR_NOT: &[u16] = &[200, 302, 303, 307, ABSENT];

/// A blob of an artifact.
#[derive(Clone, Debug)]
pub struct ArtifactLayer {
    /// Its bytes.
    pub content: UploadContent,
    /// Their media type.
    pub media_type: String,
    /// Annotations of its descriptor.
    pub annotations: Annotations,
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
            sender: server.sender(self.name(), &server.push_login)?,
        };
        let mut blobs = Vec::new();
        for layer in layers {
            let mut blob = push.blob(&layer.content, &layer.media_type).await?;
            blob.annotations.clone_from(&layer.annotations);
            blobs.push(blob);
        }
        let empty = Bytes::from_static(b"{}").into();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": artifact_type,
            "config": push.blob(&empty, EMPTY_TYPE).await?,
            "layers": blobs,
            "subject": subject,
        });
        let manifest = UploadContent::from(Bytes::from(manifest.to_string()));
        let mut pushed = push.describe(&manifest, OCI_MANIFEST).await?;
        pushed.artifact_type = Some(artifact_type.to_owned());
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

    async fn describe(
        &self,
        content: &UploadContent,
        media_type: &str,
    ) -> Result<Descriptor, Error> {
        let digest = content.sha256().await;
        let digest = digest.map_err(|cause| self.error(cause))?;
        Ok(Descriptor::new(media_type, digest, content.size()))
    }

    /// Stores `content` as a blob, unless it exists.
    async fn blob(&self, content: &UploadContent, media_type: &str) -> Result<Descriptor, Error> {
        let blob = self.describe(content, media_type).await?;
        let id = format!("sha256:{}", blob.digest);
        let question = Message::new(Method::HEAD, self.server.url("blobs", &id));
        let found = self.sender.request(question, EXISTS_OR_NOT).await?;
        if found.status == ABSENT {
            // A failed one cannot be continued.
            let attempt = || self.upload(content, &id);
            self.sender.repeat(content.progress(), attempt).await?;
        }
        Ok(blob)
    }

    /// Begins an upload, and sends all bytes to the address that the registry names.
    async fn upload(&self, content: &UploadContent, id: &str) -> Result<(), Failure> {
        let url = self.server.url("blobs", "uploads/");
        let message = Message::new(Method::POST, url.clone());
        let begun = self.sender.send(&message, &[202]);
        let headers = begun.await?.headers;
        let address = headers.get(LOCATION).and_then(|url| url.to_str().ok());
        let unnamed = || Cause::Protocol("the registry names no address to upload to".to_owned());
        let mut url = self.sender.resolve(&url, address.ok_or_else(unnamed)?)?;
        url.query_pairs_mut().append_pair("digest", id);
        let message = put(url, content, "application/octet-stream");
        let sent = self.sender.send(&message, STORED);
        sent.await?;
        Ok(())
    }

    /// Stores a manifest or index as `id`.
    async fn manifest(
        &self,
        id: &str,
        media_type: &'static str,
        content: &UploadContent,
    ) -> Result<Answer, Error> {
        let message = put(self.server.url("manifests", id), content, media_type);
        let sent = self.sender.request(message, STORED);
        sent.await
    }

    async fn add_to_tag(&self, subject: Sha256, entry: &Descriptor) -> Result<(), Error> {
        let tag = fallback_tag(subject);
        let question = Message::new(Method::GET, self.server.url("manifests", &tag));
        let old = self.sender.request(question, &[200, ABSENT]);
        let old = old.await?;
        let list = with_referrer((old.status == 200).then_some(&*old.body), entry);
        let list = Bytes::from(list.map_err(|cause| self.error(cause))?);
        self.manifest(&tag, OCI_INDEX, &list.into()).await?;
        Ok(())
    }
}

fn put<'a>(url: Url, content: &'a UploadContent, media_type: &'static str) -> Message<'a> {
    let mut message = Message::new(Method::PUT, url);
    let media_type = HeaderValue::from_static(media_type);
    message.headers.insert(CONTENT_TYPE, media_type);
    message.content = Some(content);
    message
}
