//! Files of an image, in a directory, in a tar archive or in a registry.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use super::error::{Cause, Error};
use crate::archive::Archive;
use crate::base::error_chain::error_chain;
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::fetch;
use crate::index::store::Store;
use crate::source::documents::{self, Descriptor, DescriptorKind};
use crate::source::{self, Repository, Revalidation, Source, SourceDirectory};

/// Maximum bytes of one document. The specification suggests 4 MiB for registries.
pub(super) const MAX_DOCUMENT_LEN: u64 = 4 << 20;

/// Name in errors of the document that a name in a registry means.
const MANIFEST: &str = "manifest";

/// Maximum bytes of a blob in a registry, whose length only a manifest claims. A thousand lengths have a sum.
const MAX_BLOB_LEN: u64 = 1 << 50;

#[derive(Debug)]
pub(crate) enum Layout {
    Directory(SourceDirectory),
    /// An archive, read without unpacking.
    Archive(Arc<Archive>),
    /// A repository, of which one image is wanted, and the store with the documents of earlier runs.
    Registry(Arc<Repository>, Option<Store>),
}

impl Layout {
    /// Location as the user gave it, without secrets.
    pub(crate) fn location(&self) -> &str {
        match self {
            Self::Directory(folder) => folder.name(),
            Self::Archive(archive) => archive.source().location(),
            Self::Registry(repository, _) => repository.name(),
        }
    }

    pub(super) fn error(&self, path: &str, cause: impl Into<Cause>) -> Error {
        Error {
            location: self.location().to_owned(),
            document: Some(path.to_owned()),
            cause: Box::new(cause.into()),
        }
    }

    pub(super) fn file(&self, path: &str) -> Result<Arc<dyn Source>, Error> {
        let file = match self {
            Self::Directory(folder) => folder.open_file(path),
            Self::Archive(archive) => archive.file(path),
            // Only layouts have files with names.
            Self::Registry(..) => return Err(self.error(path, Cause::Missing)),
        };
        file.map_err(|error| match error.cause {
            source::Cause::NotFound => self.error(path, Cause::Missing),
            _ => self.error(path, error),
        })
    }

    /// The blob of `descriptor`, whose length is checked, but not its digest.
    pub(super) fn blob(&self, descriptor: &Descriptor) -> Result<Arc<dyn Source>, Error> {
        let path = descriptor.blob_path();
        let (expected, limit) = (descriptor.size, MAX_BLOB_LEN);
        let file = match self {
            Self::Registry(..) if expected > limit => {
                let len = expected;
                return Err(self.error(&path, Cause::TooLong { len, limit }));
            }
            Self::Registry(repository, _) => repository
                .blob(descriptor.digest, expected, &descriptor.urls)
                .map_err(|error| self.error(&path, error))?,
            Self::Directory(_) | Self::Archive(_) => self.file(&path)?,
        };
        let found = file.fingerprint().len.unwrap_or_default();
        if found != expected {
            return Err(self.error(&path, Cause::SizeMismatch { expected, found }));
        }
        Ok(file)
    }

    /// Reads the whole document at `path`, of at most [`MAX_DOCUMENT_LEN`].
    pub(super) fn read_document(&self, path: &str, network: &Handle) -> Result<Bytes, Error> {
        self.read_file(path, &self.file(path)?, network)
    }

    fn read_file(
        &self,
        path: &str,
        file: &Arc<dyn Source>,
        network: &Handle,
    ) -> Result<Bytes, Error> {
        let len = file.fingerprint().len.unwrap_or(u64::MAX);
        self.check_document_len(path, len)?;
        let read = fetch::read(network, file, Extent::with_len(Packed(0), len));
        read.map_err(|error| self.error(path, error))
    }

    fn check_document_len(&self, path: &str, len: u64) -> Result<(), Error> {
        let limit = MAX_DOCUMENT_LEN;
        if len > limit {
            return Err(self.error(path, Cause::TooLong { len, limit }));
        }
        Ok(())
    }

    /// Reads the document of `descriptor` and verifies its length and digest.
    pub(super) fn read_verified(
        &self,
        descriptor: &Descriptor,
        network: &Handle,
    ) -> Result<Bytes, Error> {
        let path = descriptor.blob_path();
        self.check_document_len(&path, descriptor.size)?;
        if let Some(bytes) = self.saved_document(&path)
            && Sha256::of(&bytes) == descriptor.digest
        {
            return Ok(bytes);
        }
        let bytes = match (self, descriptor.kind()) {
            (Self::Registry(repository, _), DescriptorKind::Index | DescriptorKind::Manifest) => {
                let reading = repository.manifest(Some(descriptor.digest), MAX_DOCUMENT_LEN);
                let bytes = network.block_on(reading);
                bytes.map_err(|error| self.error(MANIFEST, error))?
            }
            _ => self.read_file(&path, &self.blob(descriptor)?, network)?,
        };
        let (expected, found) = (descriptor.size, bytes.len() as u64);
        if found != expected {
            return Err(self.error(&path, Cause::SizeMismatch { expected, found }));
        }
        self.check_digest(&path, &bytes, descriptor.digest)?;
        self.save_document(&path, &bytes);
        Ok(bytes)
    }

    fn check_digest(&self, path: &str, bytes: &[u8], expected: Sha256) -> Result<(), Error> {
        let found = Sha256::of(bytes);
        if found != expected {
            return Err(self.error(path, Cause::DigestMismatch { expected, found }));
        }
        Ok(())
    }

    fn saved_document(&self, name: &str) -> Option<Bytes> {
        let Self::Registry(_, Some(store)) = self else {
            return None;
        };
        store.document(name, MAX_DOCUMENT_LEN).map(Bytes::from)
    }

    fn save_document(&self, name: &str, bytes: &[u8]) {
        if let Self::Registry(_, Some(store)) = self
            && let Err(error) = store.save_document(name, bytes)
        {
            tracing::warn!(
                error = error_chain(&error),
                "cannot save a document of the image"
            );
        }
    }

    /// Reads the index or manifest that the user's name in a registry means, and describes it. `None` for
    /// other layouts. While the registry cannot be reached, it is that of the last use.
    pub(super) fn read_root(&self, network: &Handle) -> Result<Option<(Descriptor, Bytes)>, Error> {
        let Self::Registry(repository, _) = self else {
            return Ok(None);
        };
        let (name, revalidation) = (repository.name(), repository.revalidation());
        let reading = repository.manifest(None, MAX_DOCUMENT_LEN);
        let timeout = revalidation.timeout();
        let read = network.block_on(async { tokio::time::timeout(timeout, reading).await });
        let read = read.unwrap_or_else(|_| Err(repository.silent_error()));
        let is_unreachable = |error: &source::Error| {
            revalidation != Revalidation::Required
                && (error.cause.is_outage() || matches!(error.cause, source::Cause::Offline))
        };
        let is_new = read.is_ok();
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(error) => {
                if !is_unreachable(&error) {
                    return Err(self.error(MANIFEST, error));
                }
                let saved = self.saved_document(name);
                let saved = saved.ok_or_else(|| self.error(MANIFEST, error.clone()))?;
                tracing::warn!(
                    "{error}: {}; using the manifest of the last use",
                    error.cause
                );
                saved
            }
        };
        self.check_document_len(MANIFEST, bytes.len() as u64)?;
        if let Some(expected) = repository.digest() {
            self.check_digest(MANIFEST, &bytes, expected)?;
        }
        let root = documents::describe(&bytes, Sha256::of(&bytes));
        let root = root.map_err(|cause| self.error(MANIFEST, cause))?;
        if is_new {
            self.save_document(name, &bytes);
        }
        Ok(Some((root, bytes)))
    }
}
