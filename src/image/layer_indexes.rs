//! Indexes of an image's layers that are published in its registry.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use serde::Deserialize;
use tokio::runtime::Handle;

use crate::archive::sha256;
use crate::base::sha256::Sha256;
use crate::source::{
    ArtifactLayer, Cause, Descriptor, Error, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE,
    INDEX_LAYER_ANNOTATION, Repository, Source, UploadContent,
};

/// Maximum bytes of the manifest that lists the indexes.
const MAX_MANIFEST_BYTES: u64 = 4 << 20;

/// Maximum length of one index, which only a manifest claims.
const MAX_INDEX_BYTES: u64 = 1 << 40;

/// Digest and length of each layer's index, by the digest of the layer.
type Blobs = HashMap<Sha256, (Sha256, u64)>;

/// The indexes of the layers of one image or artifact, searched when the first of them is needed.
#[derive(Debug)]
pub(crate) struct LayerIndexes {
    repository: Arc<Repository>,
    /// Digest of the image's manifest.
    subject: Sha256,
    network: Handle,
    found: OnceLock<Result<Blobs, Error>>,
}

#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Descriptor>,
}

impl LayerIndexes {
    pub(crate) fn new(repository: Arc<Repository>, subject: Sha256, network: Handle) -> Self {
        Self {
            repository,
            subject,
            network,
            found: OnceLock::new(),
        }
    }

    /// Opens the index of the layer with digest `layer`. Only for threads outside the runtime.
    ///
    /// # Errors
    /// There is none, or the registry is unreachable.
    pub(crate) fn open(&self, layer: Sha256) -> Result<Arc<dyn Source>, Error> {
        let found = self.found.get_or_init(|| self.find()).as_ref();
        let found = found.map_err(Error::clone)?.get(&layer);
        let &(digest, len) = found.ok_or_else(|| self.error(Cause::NotFound))?;
        self.repository.blob(digest, len)
    }

    fn error(&self, cause: Cause) -> Error {
        Error::new(self.repository.name(), cause)
    }

    fn find(&self) -> Result<Blobs, Error> {
        let listing = self.repository.referrers(self.subject, INDEX_ARTIFACT_TYPE);
        // The last one is the newest in a registry without an API for referrers.
        let Some(artifact) = self.network.block_on(listing)?.pop() else {
            return Ok(Blobs::new());
        };
        let reading = self
            .repository
            .manifest(Some(artifact.digest), MAX_MANIFEST_BYTES);
        let bytes = self.network.block_on(reading)?;
        let damaged = || {
            self.error(Cause::Damaged(
                "the list of its indexes is damaged".to_owned(),
            ))
        };
        if bytes.len() as u64 > MAX_MANIFEST_BYTES || sha256(&bytes) != artifact.digest {
            return Err(damaged());
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|_| damaged())?;
        let indexes = manifest
            .layers
            .into_iter()
            .filter(|blob| blob.media_type == INDEX_BLOB_TYPE && blob.size <= MAX_INDEX_BYTES);
        Ok(indexes
            .filter_map(|blob| {
                let layer = blob.annotations.get(INDEX_LAYER_ANNOTATION)?;
                Some((layer.parse().ok()?, (blob.digest, blob.size)))
            })
            .collect())
    }

    /// Publishes `indexes`, each with the digest of its layer.
    ///
    /// # Errors
    /// The registry is unreachable, or the login may not push.
    pub(crate) fn publish(&self, indexes: Vec<(Sha256, UploadContent)>) -> Result<(), Error> {
        let reading = self
            .repository
            .manifest(Some(self.subject), MAX_MANIFEST_BYTES);
        let bytes = self.network.block_on(reading)?;
        let media_type = super::manifest::describe(&bytes, self.subject);
        let media_type =
            media_type.map_err(|cause| self.error(Cause::Damaged(cause.to_string())))?;
        let subject = Descriptor {
            media_type: media_type.media_type,
            digest: self.subject,
            size: bytes.len() as u64,
            artifact_type: None,
            annotations: BTreeMap::default(),
        };
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
