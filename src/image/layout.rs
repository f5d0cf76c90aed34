//! Files of an image, in a directory, in a tar archive or in a registry.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use super::error::{Cause, Error};
use super::manifest::{self, Descriptor, DescriptorKind};
use crate::archive::{Archive, sha256};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::fetch;
use crate::source::{self, Repository, Source, SourceDirectory};

/// Maximum bytes of one document. The specification suggests 4 MiB for registries.
const MAX_DOCUMENT_LEN: u64 = 4 << 20;

/// Name in errors of the document that a name in a registry means.
const MANIFEST: &str = "manifest";

/// Maximum bytes of a blob in a registry, whose length only a manifest claims. A thousand lengths have a sum.
const MAX_BLOB_LEN: u64 = 1 << 50;

#[derive(Debug)]
pub(crate) enum Layout {
    Directory(SourceDirectory),
    /// An archive, read without unpacking.
    Archive(Arc<Archive>),
    /// A repository, of which one image is wanted.
    Registry(Arc<Repository>),
}

impl Layout {
    /// Location as the user gave it, without secrets.
    pub(crate) fn location(&self) -> &str {
        match self {
            Self::Directory(folder) => folder.name(),
            Self::Archive(archive) => archive.source().location(),
            Self::Registry(repository) => repository.name(),
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
            Self::Registry(_) => return Err(self.error(path, Cause::Missing)),
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
            Self::Registry(_) if expected > limit => {
                let len = expected;
                return Err(self.error(&path, Cause::TooLong { len, limit }));
            }
            Self::Registry(repository) => repository
                .blob(descriptor.digest, expected)
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
        let extent = Extent::with_len(Packed(0), len);
        let read = fetch::read(network, file, extent, &BufferPool::new(len.max(1)));
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
        let bytes = match (self, descriptor.kind()) {
            (Self::Registry(repository), DescriptorKind::Index | DescriptorKind::Manifest) => {
                self.read_manifest(repository, Some(descriptor.digest), network)?
            }
            _ => self.read_file(&path, &self.blob(descriptor)?, network)?,
        };
        let (expected, found) = (descriptor.size, bytes.len() as u64);
        if found != expected {
            return Err(self.error(&path, Cause::SizeMismatch { expected, found }));
        }
        self.check_digest(&path, &bytes, descriptor.digest)?;
        Ok(bytes)
    }

    fn check_digest(&self, path: &str, bytes: &[u8], expected: Sha256) -> Result<(), Error> {
        let found = sha256(bytes);
        if found != expected {
            return Err(self.error(path, Cause::DigestMismatch { expected, found }));
        }
        Ok(())
    }

    fn read_manifest(
        &self,
        repository: &Repository,
        digest: Option<Sha256>,
        network: &Handle,
    ) -> Result<Bytes, Error> {
        let reading = repository.manifest(digest, MAX_DOCUMENT_LEN);
        let bytes = network.block_on(reading);
        let bytes = bytes.map_err(|error| self.error(MANIFEST, error))?;
        self.check_document_len(MANIFEST, bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Reads the index or manifest that the user's name in a registry means, and describes it. `None` for
    /// other layouts.
    pub(super) fn read_root(&self, network: &Handle) -> Result<Option<(Descriptor, Bytes)>, Error> {
        let Self::Registry(repository) = self else {
            return Ok(None);
        };
        let bytes = self.read_manifest(repository, None, network)?;
        if let Some(expected) = repository.digest() {
            self.check_digest(MANIFEST, &bytes, expected)?;
        }
        let root = manifest::describe(&bytes, sha256(&bytes));
        let root = root.map_err(|cause| self.error(MANIFEST, cause))?;
        Ok(Some((root, bytes)))
    }
}
