//! Publishes the indexes of an opened SOURCE beside it.

use std::io;
use std::sync::Arc;

use super::context::OpenContext;
use super::error::Error;
use super::spec::SourceSpec;
use crate::archive::{Archive, Volume};
use crate::image::ImageOrArtifact;
use crate::index::store;
use crate::source::{self, Source, UploadContent};

impl OpenContext {
    /// Uploads the indexes of `volume`, which was opened from `spec`, to where other machines search them:
    /// beside an archive, or as a referrer of an image in its registry.
    ///
    /// # Errors
    /// `spec` has no such place, or the upload fails.
    pub fn publish_index(&self, spec: &SourceSpec, volume: &dyn Volume) -> Result<(), Error> {
        let archives = volume.archives();
        if let SourceSpec::Registry(name) = spec {
            let (opened, repository) = self.open_in_registry(name)?;
            let digest = |source: &Arc<dyn Source>| source.fingerprint().sha256();
            let indexed = archives
                .iter()
                .filter_map(|archive| digest(archive.source()));
            let is_same = match &opened {
                ImageOrArtifact::Image(image) => {
                    let layers = image.layers.iter();
                    indexed.eq(layers.filter_map(|layer| digest(&layer.source)))
                }
                ImageOrArtifact::Artifact { archive, .. } => indexed.eq(digest(archive)),
            };
            if !is_same {
                return Err(Error::ImageChanged(repository.name().to_owned()));
            }
            let layers = archives.into_iter().filter_map(|archive| {
                let layer = archive.source().fingerprint().sha256()?;
                Some(packed_index(archive).map(|content| (layer, content)))
            });
            let layers = layers.collect::<io::Result<Vec<_>>>();
            let indexes = self.layer_indexes(&opened, &repository);
            indexes.publish(layers.map_err(Error::PackIndex)?)?;
            return Ok(());
        }
        let (location, options) = self.place_beside(spec).ok_or(Error::NoPlaceForIndex)?;
        let archive = archives.first().ok_or(Error::NoPlaceForIndex)?;
        let content = packed_index(archive).map_err(Error::PackIndex)?;
        self.network
            .block_on(source::put(&location, content, options))?;
        Ok(())
    }
}

/// The framed form of the archive's index, in memory.
fn packed_index(archive: &Archive) -> io::Result<UploadContent> {
    UploadContent::from_file(store::write_unnamed(
        archive.index().tree().map_err(io::Error::other)?,
    )?)
}
