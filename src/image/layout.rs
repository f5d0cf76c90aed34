//! Where the files of an image are: in a directory, or in a tar archive around them.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use super::error::{Cause, Error};
use super::manifest::Descriptor;
use crate::archive::{Archive, sha256};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::fetch;
use crate::source::{self, Slice, Source, SourceDirectory};

/// Bytes of one document. The specification suggests that registries take 4 MiB.
const MAX_DOCUMENT_LEN: u64 = 4 << 20;

/// Digests that a layer must have, as far as a trusted document names them.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Digests {
    /// Of the bytes as they are stored.
    pub(super) packed: Option<Sha256>,
    /// Of the decompressed bytes.
    pub(super) plain: Option<Sha256>,
}

/// Where the files of an image are.
#[derive(Debug)]
pub enum Layout {
    /// A directory.
    Directory(SourceDirectory),
    /// An archive, which is not unpacked.
    Archive(Arc<Archive>),
}

impl Layout {
    /// What the user calls it, without secrets.
    pub fn location(&self) -> &str {
        match self {
            Self::Directory(folder) => folder.name(),
            Self::Archive(archive) => archive.source().location(),
        }
    }

    /// The error that `cause` is, of the file at `path`.
    pub(super) fn error(&self, path: &str, cause: impl Into<Cause>) -> Error {
        Error {
            location: self.location().to_owned(),
            document: Some(path.to_owned()),
            cause: Box::new(cause.into()),
        }
    }

    /// The file at `path`.
    ///
    /// # Errors
    /// When there is none, or it is none.
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

    /// Whether there is something at `path`.
    pub(super) fn has_file(&self, path: &str) -> Result<bool, Error> {
        match self.file(path) {
            Ok(_) => Ok(true),
            Err(error) if matches!(*error.cause, Cause::Missing) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// All bytes of the document at `path`, which are not many.
    ///
    /// # Errors
    /// When there is none, it cannot be read, or has too many.
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

    /// The document that `descriptor` speaks of, which is the one.
    ///
    /// # Errors
    /// As [`document`](Self::document), and when it is another one.
    pub(super) fn read_verified(
        &self,
        descriptor: &Descriptor,
        network: &Handle,
    ) -> Result<Bytes, Error> {
        let path = descriptor.blob_path();
        let bytes = self.read_document(&path, network)?;
        let cause = match (bytes.len() as u64, sha256(&bytes)) {
            (len, _) if len != descriptor.size => Cause::SizeMismatch {
                expected: descriptor.size,
                found: len,
            },
            (_, found) if found != descriptor.digest => Cause::DigestMismatch {
                expected: descriptor.digest,
                found,
            },
            _ => return Ok(bytes),
        };
        Err(self.error(&path, cause))
    }

    /// The file at `path` as a layer called `name`, whose bytes have the digests that are known.
    ///
    /// # Errors
    /// When there is none, or it has not `size` bytes.
    pub(super) fn layer_source(
        &self,
        path: &str,
        name: &str,
        digests: Digests,
        size: Option<u64>,
    ) -> Result<Arc<dyn Source>, Error> {
        let file = self.file(path)?;
        let found = file.fingerprint().len.unwrap_or_default();
        if let Some(expected) = size.filter(|&expected| expected != found) {
            return Err(self.error(path, Cause::SizeMismatch { expected, found }));
        }
        let whole = Extent::with_len(Packed(0), found);
        let layer = Slice::new(file, whole, name).map_err(|error| self.error(path, error))?;
        let layer = match digests.packed {
            Some(digest) => layer.with_digest(digest),
            None => layer,
        };
        Ok(Arc::new(match digests.plain {
            Some(digest) => layer.with_plain_digest(digest),
            None => layer,
        }))
    }
}
