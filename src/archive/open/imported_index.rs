//! Opens an archive by another program's table of contents, instead of a scan.

use super::opener::Opener;
use super::published_index::{PublishedIndex, PublishedIndexError, read_toc};
use super::published_opener::log_unused;
use crate::archive::live_index::LiveIndex;
use crate::archive::read::Reader;
use crate::archive::read::checked_headers::HeaderChecks;
use crate::codec::Compression;
use crate::index::Origin;
use crate::index::import::{Importer, import_ztoc};

/// Maximum bytes of a table of contents, which is in memory as a whole. A ztoc takes 32 KiB for 4 MiB of a layer.
const MAX_TOC_BYTES: u64 = 256 << 20;

impl Opener {
    /// Opens the archive by its ztoc. `None` if there is none that can be used.
    pub(super) fn open_imported_index(&self, published: &PublishedIndex) -> Option<Reader> {
        let scan = &self.options.scan;
        // No table of contents describes the archive as it is with these options.
        if scan.tar.ignore_zeros || !matches!(scan.compression, None | Some(Compression::Gzip)) {
            return None;
        }
        let reader = self.try_ztoc(published).inspect_err(log_unused).ok()??;
        self.check_entry_count(&reader.live_index.read()).ok()?;
        Some(reader)
    }

    fn try_ztoc(&self, published: &PublishedIndex) -> Result<Option<Reader>, PublishedIndexError> {
        let Some(find) = &published.find_ztoc else {
            return Ok(None);
        };
        let limit = self.options.index_memory.bytes().min(MAX_TOC_BYTES);
        let (ztoc, location) = read_toc(published, find, limit)?;
        let importer = Importer::new(self.builder(false), &self.options.scan.tar.limits);
        let origin = Origin {
            locator: self.locator.clone(),
            sha256: self.source.fingerprint().sha256(),
            packed_bytes: self.source.fingerprint().len.unwrap_or_default(),
            ..Origin::default()
        };
        let imported = import_ztoc(&ztoc, importer, origin);
        let (index, digests) = imported.map_err(|error| PublishedIndexError::Import {
            location: location.clone(),
            error,
        })?;
        // Spans without hashes are not cached on disk.
        let mut reader = self.build_reader(LiveIndex::complete(index), None);
        reader.header_checks = Some(HeaderChecks::new(location, None));
        reader.span_digests = Some(digests);
        Ok(Some(reader))
    }
}
