//! Indexes of an image's layers that are published in its registry.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

use super::layout::MAX_DOCUMENT_LEN;
use crate::base::sha256::Sha256;
use crate::source::documents::{
    self, Annotations, Descriptor, INDEX_LAYER_ANNOTATION, SOCI_INDEX_ANNOTATION,
    TOC_DIGEST_ANNOTATION, ZTOC_LAYER_ANNOTATION, annotated_digest,
};
use crate::source::{
    ArtifactLayer, Cause, Error, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE, Repository, Source,
    UploadContent,
};

/// Artifact type of a SOCI index of the first version, which refers to the image.
const SOCI_ARTIFACT_TYPE: &str = "application/vnd.amazon.soci.index.v1+json";

/// Media type of the ztocs in a SOCI index.
const ZTOC_BLOB_TYPE: &str = "application/octet-stream";

/// Maximum length of one index, which only a manifest claims.
const MAX_INDEX_BYTES: u64 = 1 << 40;

/// Digest and length of each layer's index, by the digest of the layer.
type Blobs = HashMap<Sha256, (Sha256, u64)>;

type Manifest = (Vec<Descriptor>, Annotations);

/// The indexes of the layers of one image or artifact, searched when the first of them is needed.
#[derive(Debug)]
pub(crate) struct LayerIndexes {
    repository: Arc<Repository>,
    /// Digest of the image's manifest.
    subject: Sha256,
    network: Handle,
    image: OnceLock<Result<Manifest, Error>>,
    found: OnceLock<Result<Blobs, Error>>,
    named_ztocs: OnceLock<Result<Blobs, Error>>,
    attached_ztocs: OnceLock<Result<Blobs, Error>>,
}

impl LayerIndexes {
    pub(crate) fn new(repository: Arc<Repository>, subject: Sha256, network: Handle) -> Self {
        Self {
            repository,
            subject,
            network,
            image: OnceLock::new(),
            found: OnceLock::new(),
            named_ztocs: OnceLock::new(),
            attached_ztocs: OnceLock::new(),
        }
    }

    /// Opens the index of the layer with digest `layer`. Only for threads outside the runtime.
    pub(crate) fn open(&self, layer: Sha256) -> Result<Arc<dyn Source>, Error> {
        self.open_blob(self.found.get_or_init(|| self.find()), layer)
    }

    /// As [`open`](Self::open), for a ztoc of the layer in the SOCI index that the image's manifest names.
    pub(crate) fn open_named_ztoc(&self, layer: Sha256) -> Result<Arc<dyn Source>, Error> {
        let find = || {
            let (_, annotations) = self.image()?;
            self.ztocs(annotated_digest(annotations, SOCI_INDEX_ANNOTATION))
        };
        self.open_blob(self.named_ztocs.get_or_init(find), layer)
    }

    /// As [`open`](Self::open), for a ztoc of the layer in the newest SOCI index that refers to the image.
    pub(crate) fn open_attached_ztoc(&self, layer: Sha256) -> Result<Arc<dyn Source>, Error> {
        let find = || self.ztocs(self.newest_referrer(SOCI_ARTIFACT_TYPE)?);
        self.open_blob(self.attached_ztocs.get_or_init(find), layer)
    }

    /// Whether the user's name of the image has a digest.
    pub(crate) fn is_pinned(&self) -> bool {
        self.repository.digest().is_some()
    }

    /// Distinguishes those who can attach indexes to this image from all others.
    pub(crate) fn publisher(&self) -> String {
        format!("{} sha256:{}", self.repository.name(), self.subject)
    }

    /// The digest of the eStargz TOC in the layer, by its annotation in the image's manifest.
    pub(crate) fn toc_digest(&self, layer: Sha256) -> Result<Sha256, Error> {
        let (layers, _) = self.image()?;
        let layer = layers.iter().find(|one| one.digest == layer);
        let digest =
            layer.and_then(|layer| annotated_digest(&layer.annotations, TOC_DIGEST_ANNOTATION));
        digest.ok_or_else(|| self.error(Cause::NotFound))
    }

    fn open_blob(
        &self,
        found: &Result<Blobs, Error>,
        layer: Sha256,
    ) -> Result<Arc<dyn Source>, Error> {
        let found = found.as_ref().map_err(Error::clone)?.get(&layer);
        let &(digest, len) = found.ok_or_else(|| self.error(Cause::NotFound))?;
        self.repository.blob(digest, len, &[])
    }

    fn error(&self, cause: Cause) -> Error {
        Error::new(self.repository.name(), cause)
    }

    fn find(&self) -> Result<Blobs, Error> {
        match self.newest_referrer(INDEX_ARTIFACT_TYPE)? {
            Some(artifact) => self.blobs(artifact, INDEX_BLOB_TYPE, INDEX_LAYER_ANNOTATION),
            None => Ok(Blobs::new()),
        }
    }

    fn ztocs(&self, index: Option<Sha256>) -> Result<Blobs, Error> {
        match index {
            Some(index) => self.blobs(index, ZTOC_BLOB_TYPE, ZTOC_LAYER_ANNOTATION),
            None => Ok(Blobs::new()),
        }
    }

    fn newest_referrer(&self, artifact_type: &str) -> Result<Option<Sha256>, Error> {
        let listing = self.repository.referrers(self.subject, artifact_type);
        // The last one is the newest in a registry without an API for referrers.
        let newest = self.network.block_on(listing)?.pop();
        Ok(newest.map(|artifact| artifact.digest))
    }

    fn image(&self) -> Result<&Manifest, Error> {
        let image = self.image.get_or_init(|| self.manifest(self.subject));
        image.as_ref().map_err(Error::clone)
    }

    fn manifest(&self, digest: Sha256) -> Result<Manifest, Error> {
        let reading = self.repository.manifest(Some(digest), MAX_DOCUMENT_LEN);
        let bytes = self.network.block_on(reading)?;
        let is_valid = bytes.len() as u64 <= MAX_DOCUMENT_LEN && Sha256::of(&bytes) == digest;
        let manifest = documents::parse_blobs(&bytes).ok().filter(|_| is_valid);
        let text = "a manifest for its indexes is damaged";
        manifest.ok_or_else(|| self.error(Cause::Damaged(text.to_owned())))
    }

    /// The blobs of `media_type` in an artifact, by the layer in their `annotation`.
    fn blobs(&self, artifact: Sha256, media_type: &str, annotation: &str) -> Result<Blobs, Error> {
        let (blobs, _) = self.manifest(artifact)?;
        let indexes = blobs
            .into_iter()
            .filter(|blob| blob.media_type == media_type && blob.size <= MAX_INDEX_BYTES);
        Ok(indexes
            .filter_map(|blob| {
                let layer = annotated_digest(&blob.annotations, annotation)?;
                Some((layer, (blob.digest, blob.size)))
            })
            .collect())
    }

    /// Publishes `indexes`, each with the digest of its layer.
    pub(crate) fn publish(&self, indexes: Vec<(Sha256, UploadContent)>) -> Result<(), Error> {
        let reading = self
            .repository
            .manifest(Some(self.subject), MAX_DOCUMENT_LEN);
        let bytes = self.network.block_on(reading)?;
        let subject = documents::describe(&bytes, self.subject);
        let subject = subject.map_err(|cause| self.error(Cause::Damaged(cause.to_string())))?;
        let layers: Vec<_> = indexes
            .into_iter()
            .map(|(layer, content)| ArtifactLayer {
                content,
                media_type: INDEX_BLOB_TYPE.to_owned(),
                annotations: [(INDEX_LAYER_ANNOTATION.to_owned(), format!("sha256:{layer}"))]
                    .into(),
            })
            .collect();
        let pushing = self
            .repository
            .push_artifact(&subject, INDEX_ARTIFACT_TYPE, &layers);
        self.network.block_on(pushing).map(drop)
    }
}
