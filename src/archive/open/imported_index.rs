//! Opens an archive by another program's table of contents, instead of a scan.

use bytes::Bytes;

use super::opener::Opener;
use crate::archive::index_source::estargz_toc;
use crate::archive::index_source::published_index::{
    FindDigest, FindIndex, PublishedIndex, PublishedIndexError, read_toc,
};
use crate::archive::index_source::tree_origin::{TreeOrigin, TreeSource};
use crate::archive::live_index::LiveIndex;
use crate::archive::read::Reader;
use crate::archive::read::checked_headers::HeaderChecks;
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::codec::Compression;
use crate::fetch;
use crate::index::import::{ImportError, Importer, import_estargz, import_ztoc};
use crate::index::{Origin, TooMuchMemory};
use crate::source;

/// Maximum bytes of the TOC of an eStargz layer, packed and unpacked.
const MAX_ESTARGZ_BYTES: u64 = 64 << 20;

/// Maximum bytes of a table of contents, which is in memory as a whole. A ztoc takes 32 KiB for 4 MiB of a layer.
const MAX_TOC_BYTES: u64 = 256 << 20;

impl Opener {
    /// Opens the archive by its ztoc; `None` if none describes the archive as it is with these options.
    pub(super) fn try_ztoc(
        &self,
        published: &PublishedIndex,
        find: &FindIndex,
        origin: TreeOrigin,
    ) -> Result<Option<Reader>, PublishedIndexError> {
        if !self.can_import() {
            return Ok(None);
        }
        let limit = self.options.index_memory.bytes().min(MAX_TOC_BYTES);
        let (ztoc, location) = read_toc(published, find, limit)?;
        let len = self.source.fingerprint().len.unwrap_or_default();
        let imported = import_ztoc(&ztoc, self.importer(), self.origin(len));
        let (index, digests) = imported.map_err(|error| PublishedIndexError::Import {
            location: location.clone(),
            error,
        })?;
        let index = match origin {
            TreeOrigin::Publisher => index.into_published(),
            _ => index,
        };
        // Spans without hashes are not cached on disk, so nothing is shared with other images.
        let tree = TreeSource { origin, location };
        let mut reader = self.build_reader(LiveIndex::complete(index), None, Some(tree));
        reader.header_checks = Some(HeaderChecks::new(None));
        reader.packed.set_digests(digests);
        Ok(Some(reader))
    }

    /// Whether another program's table of contents describes the archive as it is with these options.
    fn can_import(&self) -> bool {
        let scan = &self.options.scan;
        !scan.tar.ignore_zeros && matches!(scan.compression, None | Some(Compression::Gzip))
    }

    /// Opens the archive by the eStargz TOC in it, if that has the digest that `find_digest` finds.
    pub(super) fn try_estargz(
        &self,
        find_digest: &FindDigest,
        origin: TreeOrigin,
    ) -> Result<Option<Reader>, PublishedIndexError> {
        if !self.can_import() {
            return Ok(None);
        }
        let expected = find_digest()?;
        let location = format!("the TOC of {}", self.source.location());
        let unusable = |error| PublishedIndexError::Import {
            location: location.clone(),
            error,
        };
        let len = self.source.fingerprint().len.unwrap_or_default();
        let footer_start = len.saturating_sub(estargz_toc::FOOTER_LEN);
        let footer = self.read_archive(footer_start, len)?;
        let malformed = || unusable(ImportError::Malformed("its place"));
        let start = estargz_toc::parse_footer(&footer).filter(|&start| start < footer_start);
        let start = start.ok_or_else(malformed)?;
        let limit = self.options.index_memory.bytes().min(MAX_ESTARGZ_BYTES);
        if footer_start - start > limit {
            return Err(unusable(TooMuchMemory { limit }.into()));
        }
        let packed = self.read_archive(start, footer_start)?;
        let unpacked = estargz_toc::unpack(&packed, limit);
        let toc = unpacked.as_deref().and_then(estargz_toc::json);
        let toc = toc.ok_or_else(malformed)?;
        if Sha256::of(toc) != expected {
            return Err(PublishedIndexError::Foreign(location));
        }
        let imported = import_estargz(toc, self.importer(), self.origin(start));
        let (index, digests) = imported.map_err(unusable)?;
        let tree = TreeSource { origin, location };
        let mut reader = self.build_reader(LiveIndex::complete(index), None, Some(tree));
        reader.packed.set_digests(digests);
        Ok(Some(reader))
    }

    fn read_archive(&self, start: u64, end: u64) -> Result<Bytes, source::Error> {
        let extent = Extent::with_len(Packed(start), end - start);
        fetch::read(&self.network, &self.source, extent)
    }

    fn importer(&self) -> Importer {
        Importer::new(self.builder(false), &self.options.scan.tar.limits)
    }

    fn origin(&self, packed_bytes: u64) -> Origin {
        Origin {
            locator: self.locator.clone(),
            sha256: self.source.fingerprint().sha256(),
            packed_bytes,
            ..Origin::default()
        }
    }
}
