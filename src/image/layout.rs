//! Files of an image, in a directory or in a tar archive.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use super::error::{Cause, Error};
use super::manifest::Descriptor;
use crate::archive::{Archive, sha256};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Packed};
use crate::fetch;
use crate::source::{self, Source, SourceDirectory};

/// Maximum bytes of one document. The specification suggests 4 MiB for registries.
const MAX_DOCUMENT_LEN: u64 = 4 << 20;

#[derive(Debug)]
pub(crate) enum Layout {
    Directory(SourceDirectory),
    /// An archive, read without unpacking.
    Archive(Arc<Archive>),
}

impl Layout {
    /// Location as the user gave it, without secrets.
    pub(crate) fn location(&self) -> &str {
        match self {
            Self::Directory(folder) => folder.name(),
            Self::Archive(archive) => archive.source().location(),
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
        };
        file.map_err(|error| match error.cause {
            source::Cause::NotFound => self.error(path, Cause::Missing),
            _ => self.error(path, error),
        })
    }

    /// Reads the whole document at `path`, of at most [`MAX_DOCUMENT_LEN`].
    pub(super) fn read_document(&self, path: &str, network: &Handle) -> Result<Bytes, Error> {
        let file = self.file(path)?;
        let len = file.fingerprint().len.unwrap_or(u64::MAX);
        if len > MAX_DOCUMENT_LEN {
            let limit = MAX_DOCUMENT_LEN;
            return Err(self.error(path, Cause::TooLong { len, limit }));
        }
        let extent = Extent::with_len(Packed(0), len);
        let read = fetch::read(network, &file, extent, &BufferPool::new(len.max(1)));
        read.map_err(|error| self.error(path, error))
    }

    /// Reads the document of `descriptor` and verifies its length and digest.
    pub(super) fn read_verified(
        &self,
        descriptor: &Descriptor,
        network: &Handle,
    ) -> Result<Bytes, Error> {
        let path = descriptor.blob_path();
        let bytes = self.read_document(&path, network)?;
        let (expected, found) = (descriptor.size, bytes.len() as u64);
        if found != expected {
            return Err(self.error(&path, Cause::SizeMismatch { expected, found }));
        }
        let (expected, found) = (descriptor.digest, sha256(&bytes));
        if found != expected {
            return Err(self.error(&path, Cause::DigestMismatch { expected, found }));
        }
        Ok(bytes)
    }
}
